package facade

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"
)

// TestStallCountsFromTheLastByte has a peer that reads now and then. It is given up when it has
// taken no byte for the stall time, and not before, however long the whole takes.
func TestStallCountsFromTheLastByte(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const stall = 16 * time.Second
		w, peer := pipeWire(t, stall)
		_ = peer.SetReadDeadline(time.Time{})
		type outcome struct {
			err error
			at  time.Time
		}
		sent := make(chan outcome, 1)
		go func() {
			_, err := w.send(make([]byte, 1000))
			sent <- outcome{err, time.Now()}
		}()
		for range 20 {
			time.Sleep(stall * 9 / 10)
			if _, err := peer.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
		}
		last := time.Now()
		got := <-sent
		if after := got.at.Sub(last); !errors.Is(got.err, errStalled) || after < stall || after > stall+stall/stallSteps {
			t.Fatalf("%v after %v, want errStalled after %v", got.err, after, stall)
		}
		if w.taken() != 20 {
			t.Fatal(w.taken())
		}
	})
}

// TestStallOverTLS has a peer that reads a record now and then, and then none: a write that has
// timed out is the end of a TLS connection, so each record has the stall time.
func TestStallOverTLS(t *testing.T) {
	srv := httptest.NewTLSServer(nil)
	certificates := srv.TLS.Certificates
	srv.Close()
	synctest.Test(t, func(t *testing.T) {
		const stall, size = 15 * time.Second, 200 << 10
		near, far := net.Pipe()
		w := newWire(stall)
		w.Conn = tls.Server(near, &tls.Config{Certificates: certificates, DynamicRecordSizingDisabled: true})
		peer := tls.Client(far, &tls.Config{InsecureSkipVerify: true})
		defer func() { _ = far.Close() }()
		done := make(chan error, 1)
		send := func() {
			_, err := w.send(make([]byte, size))
			done <- err
		}
		go send()
		begun := time.Now()
		for left := size; left > 0; {
			time.Sleep(stall / 2)
			n, err := peer.Read(make([]byte, min(left, 16<<10)))
			if err != nil {
				t.Fatal(err)
			}
			left -= n
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begun); took < 2*stall {
			t.Fatal("the test has lost its sense: it took", took)
		}
		begun = time.Now()
		go send()
		if _, err := io.ReadFull(peer, make([]byte, 10)); err != nil {
			t.Fatal(err)
		}
		if err := <-done; !errors.Is(err, errStalled) || time.Since(begun) != stall {
			t.Fatal(err, time.Since(begun))
		}
		_ = far.Close()
		_ = w.Close()
	})
}
