package main

import (
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Connections that a port accepts end when a client that has vanished acknowledges nothing: a
// stream of events would otherwise lose attempt after attempt to it.
func TestVanishedClientsAreGivenUp(t *testing.T) {
	t.Parallel()
	var l listener
	if err := l.open(t.Context(), "127.0.0.1", 0, "--http-port", "--http-host"); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	var d net.Dialer
	client, err := d.DialContext(t.Context(), "tcp", l.address())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		t.Fatalf("the connection is a %T", conn)
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	limit := 0
	if cerr := raw.Control(func(fd uintptr) { limit, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT) }); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	if got := time.Duration(limit) * time.Millisecond; got != unackedLimit {
		t.Errorf("the kernel gives a connection up after %v, want %v", got, unackedLimit)
	}
}
