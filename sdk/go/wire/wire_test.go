package wire

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"
)

var corrOf = regexp.MustCompile(`"corr":"([^"]+)"`)

// answerAll answers every frame with OK, and counts those read.
func answerAll(t *testing.T, frames *atomic.Int64) http.Handler {
	t.Helper()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ws, err := websocket.Accept(w, r, nil)
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = ws.CloseNow() }()
		ws.SetReadLimit(-1)
		for {
			_, b, err := ws.Read(context.Background())
			if err != nil {
				return
			}
			end := b[max(0, len(b)-200):] // without a large payload
			corr := corrOf.FindSubmatch(end)
			if corr == nil {
				t.Errorf("a frame ends with %q", end)
				return
			}
			frames.Add(1)
			if err := ws.Write(context.Background(), websocket.MessageText, fmt.Appendf(nil, `{"op":"OK","corr":%q,"id":"i"}`, corr[1])); err != nil {
				return
			}
		}
	})
}

// Frames that bypass the WebSocket library must not bypass TLS.
func TestFramesGoThroughTLS(t *testing.T) {
	var frames atomic.Int64
	server := httptest.NewTLSServer(answerAll(t, &frames))
	defer server.Close()
	roots := x509.NewCertPool()
	roots.AddCert(server.Certificate())
	c, err := Dial(t.Context(), "wss"+strings.TrimPrefix(server.URL, "https"), Options{Token: "secret", TLS: &tls.Config{RootCAs: roots}})
	if err != nil {
		t.Fatal(err)
	}
	for range 100 {
		if _, err := c.Publish(t.Context(), "t", []byte(`{"n":1}`), PublishOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Close(); err != nil || frames.Load() != 101 {
		t.Errorf("%d frames, %v", frames.Load(), err)
	}
	if _, err := Dial(t.Context(), "wss"+strings.TrimPrefix(server.URL, "https"), Options{Token: "secret"}); err == nil {
		t.Error("a certificate that nobody vouches for was accepted")
	}
}

// Many large publishes at once wait for room; together they do not give the connection up.
func TestLargePublishesAtOnceWait(t *testing.T) {
	var frames atomic.Int64
	server := httptest.NewServer(answerAll(t, &frames))
	defer server.Close()
	c, err := Dial(t.Context(), "ws"+strings.TrimPrefix(server.URL, "http"), Options{Timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	payload := []byte(`"` + strings.Repeat("x", 1<<20) + `"`)
	var wg sync.WaitGroup
	for range hardBuffer>>20 + 2 {
		wg.Go(func() {
			if _, err := c.Publish(t.Context(), "t", payload, PublishOptions{}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

func TestNoMessageFollowsACloseFrame(t *testing.T) {
	gate := &gateConn{entered: make(chan struct{}, 10), gate: make(chan struct{}, 10)}
	b := newBatchConn(gate)
	b.start()
	gate.gate <- struct{}{}
	if _, err := b.Write([]byte("\x88\x80\x00\x00\x00\x00")); err != nil {
		t.Fatal(err)
	}
	if err := b.message(func(m []byte) []byte { return append(m, "late"...) }, false); err == nil {
		t.Error("a message was taken after a close frame")
	}
	if err := b.Close(); err != nil || len(gate.writes) != 1 {
		t.Errorf("writes %q, %v", gate.writes, err)
	}
}

// A hub that answers with what is no answer ends the connection, and the call with it.
func TestAnUnreadableAnswerEndsItsCall(t *testing.T) {
	c := connect(t, Options{}, func(h *hub) {
		f := h.next()
		h.write(`{"op":"OK","corr":"` + f.Corr + `","id":5}`)
		drain(h)
	})
	if _, err := c.Publish(t.Context(), "t", nil, PublishOptions{}); err == nil || t.Context().Err() != nil {
		t.Errorf("got %v", err)
	}
	if len(c.slots) != 0 {
		t.Error("its place is still taken")
	}
}
