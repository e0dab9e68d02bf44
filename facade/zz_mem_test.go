package facade_test

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"runtime"
	"testing"
	"time"
)

func TestZZMem(t *testing.T) {
	r := newRig(t, nil)
	var a, b runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&a)
	const n = 2000
	var conns []net.Conn
	for range n {
		conn, err := net.Dial("tcp", r.ws.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
		out := []byte("GET / HTTP/1.1\r\nHost: hub\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n")
		out = masked(out, `{"op":"AUTH","token":"`+rigToken+`","corr":"a"}`)
		conn.Write(out)
		in := bufio.NewReaderSize(conn, 512)
		res, _ := http.ReadResponse(in, nil)
		_ = res
		io.ReadFull(in, make([]byte, 10))
	}
	time.Sleep(time.Second)
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&b)
	t.Logf("per conn: heap %d stack %d goroutines %d", (b.HeapInuse-a.HeapInuse)/n, (b.StackInuse-a.StackInuse)/n, runtime.NumGoroutine())
	for _, c := range conns {
		c.Close()
	}
}
