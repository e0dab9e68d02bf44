//go:build unix

package main

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"strings"
	"testing"
	"time"
)

// TestStrangersOnPortsOfHTTP holds more connections without a request to both ports of HTTP than
// these have room for, and replaces them all the time. Clients with a token keep their connections.
func TestStrangersOnPortsOfHTTP(t *testing.T) {
	t.Parallel()
	n := startNode(t, "--limit-waiting-connections=32")
	ask := func(client *http.Client, method, url, body string) (reused bool) {
		t.Helper()
		ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{GotConn: func(got httptrace.GotConnInfo) { reused = got.Reused }})
		req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+nodeToken)
		res, err := client.Do(req)
		if err != nil {
			t.Fatalf("%s %s: %v", method, url, err)
		}
		_, _ = io.Copy(io.Discard, res.Body) // a connection with an unread answer is not used again
		_ = res.Body.Close()
		if res.StatusCode != http.StatusOK {
			t.Fatalf("%s %s: %s", method, url, res.Status)
		}
		return reused
	}
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	for _, port := range []struct{ base, method, path, body string }{
		{n.http, http.MethodPost, "/publish/t", "1"}, {n.ops, http.MethodGet, "/topics", ""},
	} {
		ask(client, port.method, port.base+port.path, port.body)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan int)
		go func() {
			opened := 0
			var held []net.Conn
			for ctx.Err() == nil {
				conn, err := net.Dial("tcp", strings.TrimPrefix(port.base, "http://"))
				if err != nil {
					continue
				}
				opened++
				if held = append(held, conn); len(held) > 128 {
					drop(held[0])
					held = held[1:]
				}
			}
			for _, conn := range held {
				drop(conn)
			}
			ended <- opened
		}()
		for range 30 {
			<-time.After(50 * time.Millisecond) // more than fairWait in all
			if !ask(client, port.method, port.base+port.path, port.body) {
				t.Errorf("%s: the connection of a client with a token was closed", port.path)
			}
		}
		cancel()
		if opened := <-ended; opened < 200 {
			t.Errorf("strangers opened %d connections only", opened)
		}
	}
}
