package facade_test

import (
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"eventhub/facade"
	"eventhub/jetstream"
)

// heapInUse is the heap after a collection, in MiB.
func heapInUse() int {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc >> 20)
}

// A client that does not read, and pauses and resumes, makes the hub fetch the same events again
// and again. What was given back must not stay in the queue.
func TestUnreadQueueIsBounded(t *testing.T) {
	r := newRig(t, func(cfg *facade.Config) { cfg.Limits.WriteStall = time.Minute })
	payload := []byte(`"` + strings.Repeat("x", 500_000) + `"`)
	for range 30 {
		if _, err := r.bus.Publish(t.Context(), "unread", payload, jetstream.PublishOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	p := r.login(t)
	p.send(`{"op":"SUBSCRIBE","topic":"unread","group":"g","opts":{"from":"earliest","maxAttempts":0,"maxInFlight":1000}}`)
	before := heapInUse()
	for i := range 40 {
		p.send(`{"op":"PAUSE","topic":"unread","group":"g"}`, `{"op":"RESUME","topic":"unread","group":"g"}`)
		eventually(t, "the frames are worked off", func() bool { return r.seen.count("op RESUME") == i+1 })
	}
	// 40 rounds of 8 MiB would be 320.
	if after := heapInUse(); after > before+100 {
		t.Errorf("the heap grew from %d to %d MiB", before, after)
	}
}

// Without credentials a connection gets no more memory than an AUTH needs.
func TestLargeFrameBeforeAuth(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	p := r.dial(t)
	ctx := t.Context()
	if err := p.conn.Write(ctx, websocket.MessageText, []byte(`{"op":"AUTH","token":"`+strings.Repeat("x", 70_000)+`"}`)); err != nil {
		t.Fatal(err)
	}
	p.wantClose(4102)
}

// Over HTTP a client has no connection that its new topics could be counted by: they count for its
// principal.
func TestHTTPTopicLimit(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	codes := map[int]int{}
	for i := range 110 {
		codes[r.post(t, "/publish/new"+strconv.Itoa(i), "1").status]++
	}
	if codes[http.StatusOK] < 100 || codes[http.StatusTooManyRequests] < 8 {
		t.Errorf("got %v", codes)
	}
}
