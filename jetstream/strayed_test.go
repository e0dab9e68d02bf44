package jetstream

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
)

// TestAnEventThatAnotherStreamTakes deletes the stream of a topic behind the hub, and gives its
// subject to another stream, whose answers must not count as those of the topic.
func TestAnEventThatAnotherStreamTakes(t *testing.T) {
	t.Parallel()
	for _, subject := range []string{"event.taken", "event.*"} {
		var log bytes.Buffer
		b := open(t, Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
		ctx := t.Context()
		publishAll(t, b, "taken", "1")
		if err := b.conn.JS.DeleteStream(ctx, "taken"); err != nil {
			t.Fatal(err)
		}
		makeStream(t, b, natsjs.StreamConfig{Name: "another", Subjects: []string{subject}})
		// The second publish looks for the stream of the topic, and cannot make it.
		for _, want := range []string{event.CodePublishFailed, event.CodeBadTopic} {
			_, err := b.Publish(ctx, "taken", []byte("2"), PublishOptions{})
			if fail, ok := errors.AsType[*event.Error](err); !ok || fail.Code != want {
				t.Errorf("%s: a publish into another stream: %v, want %s", subject, err, want)
			}
		}
		if info := streamInfo(t, b, "another"); info.State.Msgs != 1 {
			t.Errorf("%s: the other stream has %d messages, want only that of the first publish", subject, info.State.Msgs)
		}
		if err := b.conn.JS.DeleteStream(ctx, "another"); err != nil {
			t.Fatal(err)
		}
		if got := publishAll(t, b, "taken", "3")[0]; got.Stream != "taken" || got.Sequence != 1 {
			t.Errorf("%s: a publish after the other stream is gone: %+v", subject, got)
		}
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
		if got := log.String(); strings.Count(got, "level=ERROR") == 0 || !strings.Contains(got, "topic=taken stream=taken other=another") {
			t.Errorf("%s: the log is %s", subject, got)
		}
	}
}
