package embedded_test

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/embedded"
)

// TestLogOfNativeClients has a client be refused at each of many connections, under a new name.
func TestLogOfNativeClients(t *testing.T) {
	var log bytes.Buffer // handlers of slog lock it, and Close comes before it is read
	began := time.Now()
	s := start(t, embedded.Config{Listen: "127.0.0.1:0", Token: "t", Logger: slog.New(slog.NewTextHandler(&log, nil))})
	const n = 50
	for i := range n {
		if nc, err := nats.Connect(s.ClientURL(), nats.Token("wrong"), nats.Name(strings.Repeat(`"%s \`, i))); err == nil {
			nc.Close()
			t.Fatal("a wrong token is accepted")
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	text := log.String()
	// the count at the end, and one a minute
	if lines := strings.Count(text, "authentication error"); lines < 2 || lines > 2+int(time.Since(began)/time.Minute) {
		t.Errorf("%d lines about %d connections:\n%s", lines, n, text)
	}
	if !strings.Contains(text, `level=ERROR msg="embedded nats server" text="127.0.0.1:`) || !strings.Contains(text, "not_logged=") {
		t.Errorf("the log has neither client nor count:\n%s", text)
	}
}
