package textmsg

import (
	"bufio"
	"bytes"
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/coder/websocket"
)

// sizes lie around every change of the header's form.
var sizes = []int{0, 1, 7, 8, 9, 124, 125, 126, 127, 128, 1000, 65_534, 65_535, 65_536, 65_537, 1 << 20}

func text(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte('a' + i%26)
	}
	return b
}

// TestMessagesAreReadByALibrary sends messages of all sizes back to back, and has the library read
// them, on either side.
func TestMessagesAreReadByALibrary(t *testing.T) {
	var toClient, toServer []byte
	for i, n := range sizes {
		start := len(toClient)
		toClient = End(append(Begin(toClient), text(n)...), start)
		start = len(toServer)
		toServer = EndMasked(append(BeginMasked(toServer), text(n)...), start, 0x01020304*uint32(i))
	}
	served := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer close(served)
		kept := &keeper{ResponseWriter: w}
		ws, err := websocket.Accept(kept, r, nil)
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = ws.CloseNow() }()
		go func() { _, _ = kept.conn.Write(toClient) }() // ends with the connection
		readAll(t, ws)
		_ = ws.Close(websocket.StatusNormalClosure, "")
	}))
	defer server.Close()
	var conn net.Conn
	transport := &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		var d net.Dialer
		var err error
		conn, err = d.DialContext(ctx, network, addr)
		return conn, err
	}}
	ws, resp, err := websocket.Dial(t.Context(), "ws"+strings.TrimPrefix(server.URL, "http"), &websocket.DialOptions{HTTPClient: &http.Client{Transport: transport}})
	if err != nil {
		t.Fatal(err)
	}
	if resp.Body != nil {
		_ = resp.Body.Close()
	}
	go func() { _, _ = conn.Write(toServer) }() // ends with the connection
	readAll(t, ws)
	_, _, err = ws.Read(t.Context())
	if websocket.CloseStatus(err) != websocket.StatusNormalClosure {
		t.Error(err)
	}
	_ = ws.CloseNow()
	<-served
}

func readAll(t *testing.T, ws *websocket.Conn) {
	t.Helper()
	ws.SetReadLimit(2 << 20)
	for _, n := range sizes {
		typ, b, err := ws.Read(t.Context())
		if err != nil || typ != websocket.MessageText || !bytes.Equal(b, text(n)) {
			t.Errorf("%d bytes: got %d, type %v, %v", n, len(b), typ, err)
			return
		}
	}
}

// keeper keeps the connection below a WebSocket.
type keeper struct {
	http.ResponseWriter
	conn net.Conn
}

func (k *keeper) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(k.ResponseWriter).Hijack()
	k.conn = conn
	return conn, rw, err
}
