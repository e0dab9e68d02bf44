package facade_test

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/facade"
)

// begin writes the header of a message of the given size and then so much of it, past the library.
func begin(t *testing.T, conn net.Conn, size, sent int) {
	t.Helper()
	frame := binary.BigEndian.AppendUint64([]byte{0x81, 0x80 | 127}, uint64(size))
	frame = append(frame, 0, 0, 0, 0)
	if _, err := conn.Write(append(frame, bytes.Repeat([]byte(" "), sent)...)); err != nil {
		t.Fatal(err)
	}
}

// Clients that begin large messages and do not end them get so much memory and no more. Those who
// send what fits into the share of a connection notice nothing, and the others when it is over.
func TestUnfinishedMessages(t *testing.T) {
	const attackers, size, budget = 14, 4 << 20, 8 << 20
	r := newRig(t, func(cfg *facade.Config) { cfg.Limits.InboundBytes = budget })
	neighbour := r.login(t)
	publish := func(corr string, size int) string {
		return `{"op":"PUBLISH","topic":"t","corr":"` + corr + `","payload":"` + strings.Repeat("x", size) + `"}`
	}
	before := heapInUse()
	crowd := make([]*rawConn, attackers)
	for i := range crowd {
		crowd[i] = dialRaw(t, r.ws.URL)
		crowd[i].send(`{"op":"AUTH","token":"` + rigToken + `"}`)
		if got := crowd[i].next(); got != `{"op":"OK"}` {
			t.Fatal(got)
		}
		begin(t, crowd[i].net, size, size-1)
	}
	// The room is taken: what is large finds none.
	eventually(t, "large messages are refused", func() bool {
		return neighbour.outcome(publish("large", 500_000)) == "overloaded"
	})
	if got := neighbour.outcome(publish("small", 30_000)); got != "OK" {
		t.Fatal(got)
	}
	// The attackers' own messages, 56 MiB, are beyond it.
	if after := heapInUse(); after > before+budget>>20+16 {
		t.Errorf("the heap grew from %d to %d MiB", before, after)
	} else {
		t.Logf("the heap grew from %d to %d MiB", before, after)
	}
	// Those that are ended are answered, and the connections live on.
	refused := 0
	for _, a := range crowd {
		if _, err := a.net.Write([]byte(" ")); err != nil {
			t.Fatal(err)
		}
		switch got := a.next(); {
		case strings.Contains(got, `"overloaded"`) && !strings.Contains(got, "corr"):
			refused++
		case !strings.Contains(got, `"bad_json"`):
			t.Fatal(got)
		}
		a.send(`{"op":"ACK","topic":"t","group":"g","id":"x"}`)
		if got := a.next(); !strings.Contains(got, "not_subscribed") {
			t.Fatal(got)
		}
	}
	if refused < attackers-budget/size || r.seen.count("limit inbound_bytes") < refused {
		t.Errorf("%d of %d were refused", refused, attackers)
	}
	if got := neighbour.outcome(publish("large", 500_000)); got != "OK" {
		t.Fatal(got)
	}
}

// Room that was taken is free when the connection is lost in the middle of a message.
func TestUnfinishedMessagesThatAreLost(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) { cfg.Limits.InboundBytes = 3 << 19 })
	neighbour := r.login(t)
	large := `{"op":"PUBLISH","topic":"t","payload":"` + strings.Repeat("x", 800_000) + `"}`
	for range 5 {
		a := dialRaw(t, r.ws.URL)
		a.send(`{"op":"AUTH","token":"` + rigToken + `"}`)
		a.next()
		begin(t, a.net, 3<<20, 2<<20)
		eventually(t, "there is no room", func() bool { return neighbour.outcome(large) == "overloaded" })
		_ = a.ws.CloseNow()
		eventually(t, "there is room", func() bool { return neighbour.outcome(large) == "OK" })
	}
}

// A message may come in fragments, of one byte or none, with pings between them, and is what it
// would be otherwise. One that never ends costs its connection only.
func TestFragments(t *testing.T) {
	r := newRig(t, func(cfg *facade.Config) {
		unthrottled(cfg)
		cfg.Limits.Skip, cfg.Limits.Frame = 512<<10, 256<<10
	})
	neighbour := r.login(t)
	a := dialRaw(t, r.ws.URL)
	frame := func(first byte, text string) []byte {
		return append([]byte{first, 0x80 | byte(len(text)), 0, 0, 0, 0}, text...)
	}
	var out []byte
	for i, c := range `{"op":"AUTH","token":"` + rigToken + `"}` {
		out = append(out, frame(map[bool]byte{true: 0x01}[i == 0], string(c))...)
		out = append(out, frame(0x00, "")...)
		out = append(out, frame(0x89, strconv.Itoa(i))...)
	}
	out = append(out, frame(0x80, "")...)
	if _, err := a.net.Write(out); err != nil {
		t.Fatal(err)
	}
	if got := a.next(); got != `{"op":"OK"}` {
		t.Fatal(got)
	}
	before := heapInUse()
	if _, err := a.net.Write(frame(0x01, "{")); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { // until the hub has had enough
		defer close(ended)
		chunk := bytes.Repeat(frame(0x00, "x"), 10_000)
		_ = a.net.SetWriteDeadline(time.Now().Add(rigPatience))
		for {
			if _, err := a.net.Write(chunk); err != nil {
				return
			}
		}
	}()
	for i := range 100 {
		if got := neighbour.outcome(`{"op":"PUBLISH","topic":"t","payload":` + strconv.Itoa(i) + `}`); got != "OK" {
			t.Fatal(got)
		}
	}
	r.wantClosed(t, 4102)
	<-ended
	if after := heapInUse(); after > before+16 {
		t.Errorf("the heap grew from %d to %d MiB", before, after)
	}
}

// Pings are answered, and cost nothing that grows, whether their sender reads the pongs or not.
func TestPingFlood(t *testing.T) {
	r := newRig(t, func(cfg *facade.Config) {
		unthrottled(cfg)
		cfg.Limits.WriteStall = time.Second
	})
	neighbour := r.login(t)
	ping := append([]byte{0x89, 0x80 | 125, 0, 0, 0, 0}, bytes.Repeat([]byte("p"), 125)...)
	before := heapInUse()
	unread, err := net.Dial("tcp", r.ws.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unread.Close() }()
	_ = unread.SetDeadline(time.Now().Add(rigPatience))
	_, _ = io.WriteString(unread, "GET / HTTP/1.1\r\nHost: hub\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"+
		"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n")
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		chunk := bytes.Repeat(ping, 1000)
		for {
			if _, err := unread.Write(chunk); err != nil {
				return
			}
		}
	}()
	for i := range 100 {
		if got := neighbour.outcome(`{"op":"PUBLISH","topic":"t","payload":` + strconv.Itoa(i) + `}`); got != "OK" {
			t.Fatal(got)
		}
	}
	select {
	case <-ended:
	case <-time.After(rigPatience):
		t.Fatal("the connection that floods and does not read is still open")
	}
	if after := heapInUse(); after > before+16 {
		t.Errorf("the heap grew from %d to %d MiB", before, after)
	}
}

// Pings, pongs and small parts of messages cost as much as frames, and their sender may not send
// more of them: what is over waits, and is answered.
func TestPartsWait(t *testing.T) {
	t.Parallel()
	const rate, burst, parts = 100, 20, 60
	r := newRig(t, func(cfg *facade.Config) { cfg.Limits.FrameRate, cfg.Limits.FrameBurst = rate, burst })
	auth := `{"op":"AUTH","token":"` + rigToken + `"}`
	for name, out := range map[string][]byte{
		"pings": append(bytes.Repeat([]byte{0x89, 0x80, 0, 0, 0, 0}, parts), masked(nil, auth)...),
		"pongs": append(bytes.Repeat([]byte{0x8a, 0x80, 0, 0, 0, 0}, parts), masked(nil, auth)...),
		"fragments": slices.Concat([]byte{0x01, 0x80 | 1, 0, 0, 0, 0, ' '},
			bytes.Repeat([]byte{0x00, 0x80 | 1, 0, 0, 0, 0, ' '}, parts),
			[]byte{0x80, 0x80 | byte(len(auth)), 0, 0, 0, 0}, []byte(auth)),
	} {
		a := dialRaw(t, r.ws.URL)
		begun := time.Now()
		if _, err := a.net.Write(out); err != nil {
			t.Fatal(err)
		}
		if got := a.next(); got != `{"op":"OK"}` {
			t.Fatal(got)
		}
		if took := time.Since(begun); took < (parts-burst-1)*time.Second/rate {
			t.Errorf("%s: taken within %v", name, took)
		}
	}
	if r.seen.count("limit part_rate") == 0 {
		t.Error("the limit was not counted")
	}
}
