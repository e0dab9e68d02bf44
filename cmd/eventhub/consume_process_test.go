//go:build unix

package main

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
)

// pulledEvent is an event of a pull or of a stream.
type pulledEvent struct {
	Event struct {
		ID      string
		Payload json.RawMessage
	}
	Ctx struct {
		Attempt     int
		AckDeadline int64 `json:"ack_deadline_ms"`
	}
	Ack string
}

// postTo sends a POST to a hub.
func (n *node) postTo(path, body string) (status int, answer string) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), patience)
	defer cancel()
	return askWith(ctx, nodeToken, http.MethodPost, n.http+path, strings.NewReader(body), "Content-Type", "application/json")
}

// pullOne pulls from the group g of the topic t until there is an event.
func (n *node) pullOne(opts string) pulledEvent {
	n.t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); {
		status, text := n.postTo("/groups/t/g/pull", `{"max":1,"wait_ms":5000,"opts":{`+opts+`}}`)
		var got struct{ Events []pulledEvent }
		if err := json.Unmarshal([]byte(text), &got); err != nil || status != http.StatusOK {
			n.t.Fatalf("pull: %d %s", status, text)
		}
		if len(got.Events) == 1 {
			return got.Events[0]
		}
	}
	n.t.Fatal("no event came")
	return pulledEvent{}
}

func (n *node) ack(handles ...string) (status int, answer string) {
	n.t.Helper()
	body, err := json.Marshal(map[string][]string{"ack": handles})
	if err != nil {
		n.t.Fatal(err)
	}
	return n.postTo("/ack", string(body))
}

// consumerInfo is what NATS says of a group.
func consumerInfo(t *testing.T, url, stream, consumer string) *natsjs.ConsumerInfo {
	t.Helper()
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	c, err := js.Consumer(t.Context(), stream, consumer)
	if err != nil {
		t.Fatal(err)
	}
	return c.CachedInfo()
}

// until asks again and again until it has what it wants.
func until(t *testing.T, what string, ask func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); !ask(); {
		if time.Now().After(end) {
			t.Fatalf("did not happen: %s", what)
		}
		<-tick.C
	}
}

// The leases of a hub that was killed are over: other hubs say so at once, and settle nothing.
func TestHandlesOfKilledHub(t *testing.T) {
	t.Parallel()
	url := runNATS(t)
	flags := []string{"--nats-url=" + url, "--ack-wait=2s"}
	killed, other := startNode(t, flags...), startNode(t, flags...)
	killed.postTo("/groups/t/g/pull", `{"wait_ms":0}`)
	killed.postTo("/publish/t", `1`)
	e := killed.pullOne(`"ackTimeoutMs":600000`)
	killed.kill()
	until(t, "the lease is known to be over", func() bool {
		status, text := other.ack(e.Ack)
		switch {
		case status == http.StatusGone && strings.Contains(text, `"code":"lease_over"`) && strings.Contains(text, `"settled":0`):
			return true
		case status == http.StatusServiceUnavailable: // NATS has not noticed yet
			return false
		}
		t.Fatalf("got %d %s", status, text)
		return false
	})
	again := other.pullOne("")
	if again.Event.ID != e.Event.ID || again.Ctx.Attempt < 2 {
		t.Errorf("got %+v after %+v", again, e)
	}
	if status, text := other.ack(e.Ack); status != http.StatusGone {
		t.Errorf("the old handle: %d %s", status, text)
	}
	settleAt(other, other, again)
}

// settleAt settles an event that one hub holds by way of another. A hub on a busy machine may stand
// still for long enough to lose its leases; then the event comes again.
func settleAt(by, holder *node, e pulledEvent) {
	by.t.Helper()
	until(by.t, "the event is settled", func() bool {
		status, text := by.ack(e.Ack)
		if status == http.StatusGone {
			e = holder.pullOne(`"ackTimeoutMs":600000`)
			return false
		}
		if status != http.StatusOK && status != http.StatusServiceUnavailable {
			by.t.Fatalf("%d %s", status, text)
		}
		return status == http.StatusOK
	})
}

// A hub that stands still does not answer, and says so: what became of the event is unknown. When
// it goes on, its leases are over, and what was on its way to it settles nothing, although another
// member has the event.
func TestHandlesOfFrozenHub(t *testing.T) {
	t.Parallel()
	url := runNATS(t)
	flags := []string{"--nats-url=" + url, "--ack-wait=2s"}
	frozen, other := startNode(t, flags...), startNode(t, flags...)
	frozen.postTo("/groups/t/g/pull", `{"wait_ms":0}`)
	frozen.postTo("/publish/t", `1`)
	e := frozen.pullOne(`"ackTimeoutMs":600000`)
	frozen.stop()
	status, text := other.ack(e.Ack)
	if status != http.StatusServiceUnavailable || !strings.Contains(text, `"code":"ack_failed"`) || !strings.Contains(text, `"settled":0`) {
		t.Errorf("while the hub stands still: %d %s", status, text)
	}
	again := other.pullOne(`"ackTimeoutMs":600000`)
	if again.Event.ID != e.Event.ID || again.Ctx.Attempt < 2 {
		t.Errorf("got %+v after %+v", again, e)
	}
	frozen.signal(syscall.SIGCONT)
	until(t, "the lease is known to be over", func() bool {
		status, text := other.ack(e.Ack)
		if status == http.StatusOK {
			t.Fatalf("a lease of before the stop was settled: %s", text)
		}
		return status == http.StatusGone
	})
	if status, text := frozen.ack(e.Ack); status != http.StatusGone {
		t.Errorf("at the hub itself: %d %s", status, text)
	}
	if info := consumerInfo(t, url, "t", "g"); info.NumAckPending != 1 {
		t.Errorf("%d events are unsettled, want the one that the other hub holds", info.NumAckPending)
	}
	settleAt(frozen, other, again)
	until(t, "nothing is left", func() bool {
		info := consumerInfo(t, url, "t", "g")
		return info.NumAckPending == 0 && info.NumPending == 0
	})
}
