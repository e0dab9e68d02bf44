package facade_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"eventhub/docs/apitest"
)

// waitLimit is how long tests wait for what must come. Nothing is measured by it.
const waitLimit = time.Minute

// rawConn is a WebSocket connection without a client: messages as they are.
type rawConn struct {
	t        *testing.T
	ws       *websocket.Conn
	net      *holdConn
	messages chan string
	frames   *apitest.Frames
	err      error // why there are no more messages; valid when messages is closed
}

// holdConn can hold writes back, so that several messages go out in one.
type holdConn struct {
	net.Conn
	mu      sync.Mutex
	holding bool
	held    []byte
}

func (h *holdConn) Write(p []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.holding {
		h.held = append(h.held, p...)
		return len(p), nil
	}
	return h.Conn.Write(p)
}

func (h *holdConn) hold() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.holding = true
}

func (h *holdConn) release() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.holding = false
	_, err := h.Conn.Write(h.held)
	h.held = nil
	return err
}

func dialRaw(t *testing.T, url string) *rawConn {
	t.Helper()
	c := &rawConn{t: t, messages: make(chan string, 1000), frames: apitest.NewFrames(t)}
	transport := &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, network, addr)
		c.net = &holdConn{Conn: conn}
		return c.net, err
	}}
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	ws, _, err := websocket.Dial(ctx, url, &websocket.DialOptions{HTTPClient: &http.Client{Transport: transport}}) //nolint:bodyclose // the library closes it
	if err != nil {
		t.Fatal(err)
	}
	ws.SetReadLimit(-1)
	c.ws = ws
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer close(c.messages)
		for {
			_, b, err := ws.Read(context.Background())
			if err != nil {
				c.err = err
				return
			}
			c.messages <- string(b)
		}
	}()
	t.Cleanup(func() {
		_ = ws.CloseNow()
		for range c.messages { // whoever reads must be able to end
		}
		<-read
	})
	return c
}

func (c *rawConn) send(messages ...string) {
	c.t.Helper()
	c.net.hold()
	for _, m := range messages {
		c.frames.Sent(m)
		if err := c.ws.Write(c.t.Context(), websocket.MessageText, []byte(m)); err != nil {
			c.t.Fatalf("sending %s: %v", brief([]byte(m)), err)
		}
	}
	if err := c.net.release(); err != nil {
		c.t.Fatalf("sending: %v", err)
	}
}

// next is the next message. It fails the test when none comes.
func (c *rawConn) next() string {
	c.t.Helper()
	select {
	case m, open := <-c.messages:
		if !open {
			c.t.Fatalf("the hub closed the connection: %v", c.err)
		}
		c.frames.Received(m)
		return m
	case <-time.After(waitLimit):
		c.t.Fatalf("no message within %v", waitLimit)
	}
	return ""
}

// closed waits for the hub to close the connection, and returns its code.
func (c *rawConn) closed() closeCode {
	c.t.Helper()
	select {
	case m, open := <-c.messages:
		if open {
			c.t.Fatalf("a message instead of the end: %s", brief([]byte(m)))
		}
	case <-time.After(waitLimit):
		c.t.Fatalf("the connection was not closed within %v", waitLimit)
	}
	ce, ok := errors.AsType[websocket.CloseError](c.err)
	if !ok {
		c.t.Fatalf("the connection ended without a close code: %v", c.err)
	}
	return closeCode{int(ce.Code), ce.Reason}
}
