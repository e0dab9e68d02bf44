package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// startListener serves handler as the hub does, until the test ends.
func startListener(t *testing.T, handler http.Handler, waiting int, fair time.Duration) (at string, reached *atomic.Int64) {
	t.Helper()
	reached = new(atomic.Int64)
	var l listener
	if err := l.open(t.Context(), "127.0.0.1", 0, "", ""); err != nil {
		t.Fatal(err)
	}
	room := newWaitingRoom(waiting, func(limit string) {
		if limit != "waiting_connections" {
			t.Errorf("limit %s was reached", limit)
		}
		reached.Add(1)
	})
	room.fair = fair
	l.serveWith(handler, nil, room, slog.New(slog.DiscardHandler))
	ended := make(chan error, 1)
	go func() { ended <- l.serve() }()
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		l.close(ctx)
		if err := <-ended; err != nil {
			t.Error(err)
		}
		waitFor(t, "an empty room", func() bool {
			room.mu.Lock()
			defer room.mu.Unlock()
			return room.waiting+len(room.visitors)+len(room.queues) == 0
		})
	})
	return l.address(), reached
}

// waitFor polls until ok.
func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(patience)
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s: not after %v", what, patience)
		}
	}
}

func dialTCP(t *testing.T, at string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return c
}

// untilClosed waits for the end of a connection.
func untilClosed(t *testing.T, c net.Conn) {
	t.Helper()
	if _, err := io.Copy(io.Discard, c); err != nil && strings.Contains(err.Error(), "timeout") {
		t.Fatalf("the connection is still open: %v", err)
	}
}

// A flood of connections that send half a request ends itself, and an honest client is served
// meanwhile.
func TestHalfOpenConnections(t *testing.T) {
	const room, flood = 8, 100
	at, reached := startListener(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "served")
	}), room, 0)
	var conns []net.Conn
	for i := range flood {
		c := dialTCP(t, at)
		if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\nX-Slow: "); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
		if i%10 != 0 {
			continue
		}
		honest := dialTCP(t, at)
		if _, err := io.WriteString(honest, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		if answer, err := io.ReadAll(honest); err != nil || !strings.HasSuffix(string(answer), "served") {
			t.Fatalf("an honest client gets %q: %v", answer, err)
		}
	}
	for _, c := range conns[:flood-room] {
		untilClosed(t, c)
	}
	if n := reached.Load(); n < flood-room {
		t.Errorf("the limit was reached %d times, want at least %d", n, flood-room)
	}
}

// While those that wait have not waited long, a full room lets nobody else in: of honest clients
// that come all at once, as many are served as there is room for.
func TestConnectionsAllAtOnce(t *testing.T) {
	const room, crowd = 8, 50
	at, reached := startListener(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "served")
	}), room, time.Hour)
	var conns []net.Conn
	for range crowd {
		conns = append(conns, dialTCP(t, at))
	}
	waitFor(t, "those for whom there is no room are refused", func() bool { return reached.Load() == crowd-room })
	served := 0
	for _, c := range conns {
		// fails for those
		_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
		if answer, _ := io.ReadAll(c); strings.HasSuffix(string(answer), "served") {
			served++
		}
	}
	if served != room {
		t.Errorf("%d were served, want %d", served, room)
	}
}

// A header that does not end takes a connection headerTimeout.
func TestSlowHeader(t *testing.T) {
	t.Parallel()
	at, _ := startListener(t, http.NotFoundHandler(), 10, fairWait)
	c := dialTCP(t, at)
	begin := time.Now()
	stop := make(chan struct{})
	dripped := make(chan struct{})
	go func() { // a byte now and then does not help
		defer close(dripped)
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for text := "GET / HTTP/1.1\r\nX: " + strings.Repeat("x", 1000); ; text = text[1:] {
			if _, err := io.WriteString(c, text[:1]); err != nil {
				return
			}
			select {
			case <-tick.C:
			case <-stop:
				return
			}
		}
	}()
	untilClosed(t, c)
	close(stop)
	<-dripped
	if took := time.Since(begin); took < headerTimeout-time.Second || took > headerTimeout+5*time.Second {
		t.Errorf("the connection was closed after %v, want %v", took, headerTimeout)
	}
}

// A body that is announced and not sent holds neither the answer nor the connection, when the
// handler does not read it.
func TestBodyThatDoesNotCome(t *testing.T) {
	t.Parallel()
	at, _ := startListener(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusUnauthorized)
	}), 10, fairWait)
	for _, announced := range []string{"Content-Length: 1000", "Transfer-Encoding: chunked"} {
		c := dialTCP(t, at)
		begin := time.Now()
		if _, err := fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n", announced); err != nil {
			t.Fatal(err)
		}
		in := bufio.NewReader(c)
		status, err := in.ReadString('\n')
		if err != nil || !strings.Contains(status, "401") {
			t.Errorf("%s: the answer is %q: %v", announced, status, err)
		}
		if _, err := io.Copy(io.Discard, in); err != nil {
			t.Errorf("%s: the connection stays open: %v", announced, err)
		}
		if took := time.Since(begin); took > unreadTimeout+5*time.Second {
			t.Errorf("%s: that took %v", announced, took)
		}
	}
}

// A client that asks and asks and does not read the answers holds its connection no longer than
// answerTimeout.
func TestAnswersThatNobodyReads(t *testing.T) {
	t.Parallel()
	at, _ := startListener(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, strings.Repeat("x", 1000))
	}), 10, fairWait)
	c := dialTCP(t, at)
	begin := time.Now()
	requests := []byte(strings.Repeat("GET / HTTP/1.1\r\nHost: x\r\n\r\n", 1000))
	for {
		_, err := c.Write(requests)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("the connection is open after %v", time.Since(begin))
		}
		if err != nil {
			break
		}
	}
	if took := time.Since(begin); took < answerTimeout {
		t.Errorf("the connection was closed after %v", took)
	}
}

// A connection that is used again after a body is none the worse for it.
func TestBodiesOverOneConnection(t *testing.T) {
	t.Parallel()
	at, _ := startListener(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(w, r.Body)
	}), 10, fairWait)
	c := dialTCP(t, at)
	in := bufio.NewReader(c)
	for range 3 {
		if _, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		if text, err := io.ReadAll(resp.Body); err != nil || string(text) != "body" {
			t.Fatalf("the answer is %q: %v", text, err)
		}
		_ = resp.Body.Close()
		select { // longer than the time for what a handler leaves unread
		case <-time.After(unreadTimeout + 200*time.Millisecond):
		case <-t.Context().Done():
		}
	}
}

// Strangers and one owner of a token fill the room again and again. Connections whose last request
// had a valid token stay, and connections of their owner, who comes anew, are served.
func TestStrangersDisplaceNobody(t *testing.T) {
	t.Parallel()
	const room = 16
	at, reached := startListener(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if owner := r.Header.Get("Owner"); owner != "" {
			ownedBy(r, owner)
		}
		_, _ = io.WriteString(w, "served")
	}), room, 0)
	request := func(c net.Conn, owner string) error {
		if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\nOwner: "+owner+"\r\n\r\n"); err != nil {
			return err
		}
		res, err := http.ReadResponse(bufio.NewReader(c), nil) //nolint:bodyclose // the connection goes on, and is closed by the test
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, res.Body)
		return err
	}
	var honest []net.Conn
	for range room / 4 {
		c := dialTCP(t, at)
		if err := request(c, "honest"); err != nil {
			t.Fatal(err)
		}
		honest = append(honest, c)
	}
	for range 4 {
		for range 2 * room {
			silent, greedy, idle := dialTCP(t, at), dialTCP(t, at), dialTCP(t, at)
			_ = silent
			if err := request(greedy, "greedy"); err != nil {
				t.Fatalf("another owner is not served: %v", err)
			}
			if err := request(idle, ""); err != nil {
				t.Fatalf("a stranger is not served: %v", err)
			}
		}
		for _, c := range honest {
			if err := request(c, "honest"); err != nil {
				t.Fatalf("a connection of an owner was closed: %v", err)
			}
		}
	}
	if n := reached.Load(); n < 4*2*room {
		t.Errorf("the limit was reached %d times", n)
	}
	// The token of this request is not valid any more, so the connection is a stranger's again.
	if err := request(honest[0], ""); err != nil {
		t.Fatal(err)
	}
	// The server may note the end of the request after some of the next connections.
	waitFor(t, "the end of the connection", func() bool {
		for range 2 * room {
			dialTCP(t, at)
		}
		if err := honest[0].SetReadDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		_, err := honest[0].Read(make([]byte, 1))
		return err != nil && !errors.Is(err, os.ErrDeadlineExceeded)
	})
}
