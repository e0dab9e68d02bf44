package facade_test

import (
	"strings"
	"testing"
	"time"

	"eventhub/facade"
	"eventhub/jetstream"
)

// TestWriteStallIsOneTime closes a client that does not read when it has taken no byte for
// WriteStall, though the kernel took part of the last write. A busy machine may be late, but not
// each time.
func TestWriteStallIsOneTime(t *testing.T) {
	t.Parallel()
	const stall = 2 * time.Second
	var late time.Duration
	for range 4 {
		if late = writeStalled(t, stall); late <= stall/2 {
			return
		}
	}
	t.Errorf("closed %v after the time for that, at best", late)
}

// writeStalled returns how long after WriteStall the hub closes a client that does not read.
func writeStalled(t *testing.T, stall time.Duration) (late time.Duration) {
	t.Helper()
	r := newRig(t, func(cfg *facade.Config) { cfg.Limits.WriteStall = stall })
	p := r.login(t)
	p.send(`{"op":"SUBSCRIBE","topic":"s","group":"g","opts":{"maxInFlight":1000}}`)
	p.want(`{"op":"OK"}`)
	payload := []byte(`"` + strings.Repeat("x", 500_000) + `"`)
	begun := time.Now()
	for range 30 {
		if _, err := r.bus.Publish(t.Context(), "s", payload, jetstream.PublishOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	published := time.Since(begun)
	r.seen.await(t, "limit write_stall", 1)
	took := time.Since(begun)
	if took < stall {
		t.Errorf("closed after %v, want at least %v", took, stall)
	}
	return took - published - stall
}

// TestInvalidUTF8 sends text messages, and reasons to close, that are no UTF-8. The hub closes the
// connection as RFC 6455 (section 8.1) says, before AUTH and after it.
func TestInvalidUTF8(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	for _, login := range []bool{false, true} {
		for _, text := range []string{
			"\xff", `{"op":"AUTH","token":"` + "\xc3" + `"}`, `{"op":"PUBLISH","topic":"t","payload":"` + "\xed\xa0\x80" + `","corr":1}`,
			`{"op":"PUBLISH","topic":"t","payload":1,"` + "\xc0\xaf" + `":1}`,
		} {
			c := dialRaw(t, r.ws.URL)
			if login {
				c.send(`{"op":"AUTH","token":"` + rigToken + `"}`)
				if got := c.next(); got != `{"op":"OK"}` {
					t.Fatal(got)
				}
			}
			c.send(text)
			if got := c.closed(); got.Code != 1007 {
				t.Errorf("%q: closed with %v", text, got)
			}
		}
	}
	if got := r.stored(t, "t"); len(got) > 0 {
		t.Fatal("it was stored")
	}
	for reason, want := range map[string]int{"\xff": 1007, "bye \xc3": 1007, "bye é": 1000} {
		c := dialRaw(t, r.ws.URL)
		// Masked with zeros. The library would close before the answer is read.
		frame := append([]byte{0x88, 0x80 | byte(2+len(reason)), 0, 0, 0, 0, 1000 >> 8, 1000 & 0xff}, reason...)
		if _, err := c.net.Write(frame); err != nil {
			t.Fatal(err)
		}
		if got := c.closed(); got.Code != want {
			t.Errorf("a close frame with the reason %q: closed with %v, want %d", reason, got, want)
		}
	}
}
