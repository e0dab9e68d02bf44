package jetstream

import (
	"fmt"
	"log/slog"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"

	"eventhub/jetstream/natstest"
)

var notLoggedCount = regexp.MustCompile(`not_logged=(\d+)`)

// counted returns how many lines with a text there are, and how many more they count.
func (l *lockedLog) counted(text string) (lines, notLogged int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.text.String()) {
		if strings.Contains(line, text) {
			lines++
			if m := notLoggedCount.FindStringSubmatch(line); m != nil {
				n, _ := strconv.Atoi(m[1])
				notLogged += n
			}
		}
	}
	return lines, notLogged
}

// wantPaced checks that a line that happened n times since began is in the log once a minute, and,
// after the end of the bus, that no time is lost.
func (l *lockedLog) wantPaced(t *testing.T, b *Bus, n int, began time.Time, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if lines, _ := l.counted(text); lines < 1 || lines > 1+int(time.Since(began)/time.Minute) {
			t.Errorf("%d lines have %q after %v, want one a minute", lines, text, time.Since(began))
		}
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	for _, text := range texts {
		if lines, notLogged := l.counted(text); lines+notLogged < n || notLogged == 0 {
			t.Errorf("%d lines have %q and count %d more, want %d", lines, text, notLogged, n)
		}
	}
}

// TestLogOfRefusedEvents has the streams of two topics refuse what is published.
func TestLogOfRefusedEvents(t *testing.T) {
	t.Parallel()
	var log lockedLog
	b := open(t, Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	const n = 100
	var texts []string
	for _, topic := range []string{"one", "two"} {
		publishAll(t, b, topic, "1")
		info, err := b.conn.FindStream(t.Context(), topic)
		if err != nil {
			t.Fatal(err)
		}
		info.Config.MaxMsgSize = 1
		if _, err := b.conn.JS.UpdateStream(t.Context(), info.Config); err != nil {
			t.Fatal(err)
		}
		texts = append(texts, `level=WARN msg="the stream refused an event" topic=`+topic+` error=`)
	}
	began := time.Now()
	for range n {
		for _, topic := range []string{"one", "two"} {
			if _, err := b.Publish(t.Context(), topic, []byte(`"too large"`), PublishOptions{}); err == nil {
				t.Fatal("the stream took an event that is too large")
			}
		}
	}
	log.wantPaced(t, b, n, began, texts...)
}

// TestLogOfErrorsOfNATS has a server refuse many subjects, as it may those of clients.
func TestLogOfErrorsOfNATS(t *testing.T) {
	t.Parallel()
	var log lockedLog
	nats := natstest.Run(t, func(o *natsserver.Options) {
		o.Users = []*natsserver.User{{Username: "hub", Password: "x", Permissions: &natsserver.Permissions{Publish: &natsserver.SubjectPermission{Deny: []string{"denied.>"}}}}}
	})
	url := strings.Replace(nats.ClientURL(), "nats://", "nats://hub:x@", 1)
	b := open(t, Config{URL: url, Connections: 1, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	const n = 100
	began := time.Now()
	nc := b.conn.Links[0].NC
	for i := range n {
		if err := nc.Publish(fmt.Sprint("denied.", i), nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	text := `level=WARN msg="nats reported an error" error=`
	// errors arrive before the answer to Flush, and the last is handled after it
	eventually(t, "the error was handled", func() bool { n, _ := log.counted(text); return n > 0 })
	log.wantPaced(t, b, 2, began, text)
}
