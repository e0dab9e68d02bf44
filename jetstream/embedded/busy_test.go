package embedded_test

import (
	"fmt"
	"testing"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"eventhub/jetstream/embedded"
)

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
