package embedded_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"eventhub/jetstream/embedded"
)

// A goroutine of the server may outlive the server, and has the caller's log no longer.
func TestNothingIsLoggedAfterClose(t *testing.T) {
	var out bytes.Buffer
	s, err := embedded.Start(t.Context(), embedded.Config{DataDir: t.TempDir(), Logger: slog.New(slog.NewTextHandler(&out, nil))})
	if err != nil {
		t.Fatal(err)
	}
	server := s.NATS()
	server.Warnf("before")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	server.Warnf("after")
	if got := out.String(); !strings.Contains(got, "before") || strings.Contains(got, "after") {
		t.Errorf("the log is %q", got)
	}
}

// A server that is closed while it makes streams leaves nothing behind.
func TestCloseWhileStreamsAreMade(t *testing.T) {
	before := goleak.IgnoreCurrent()
	for range 20 {
		s, err := embedded.Start(t.Context(), embedded.Config{DataDir: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		url, opts := s.Connection()
		nc, err := nats.Connect(url, opts...)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 20 {
			if err := nc.PublishRequest(fmt.Sprintf("$JS.API.STREAM.CREATE.s%d", i), nc.NewInbox(), fmt.Appendf(nil, `{"name":"s%d","subjects":["s%d"]}`, i, i)); err != nil {
				t.Fatal(err)
			}
		}
		if err := nc.Flush(); err != nil {
			t.Fatal(err)
		}
		nc.Close()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := goleak.Find(before); err != nil {
		t.Error(err)
	}
}
