package jetstream

import (
	"errors"
	"testing"
	"time"

	"eventhub/jetstream/event"
)

// A position that no topic has is refused wherever one is taken, and nothing is made.
func TestPositionsThatNoTopicHas(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	for name, at := range map[string]Position{
		"no time":     FromTime(time.Time{}),
		"before 1970": FromTime(time.UnixMilli(-1)),
		"no id":       FromAfterID(""),
	} {
		_, subscribed := b.Subscribe(t.Context(), "a", "g", SubscribeOptions{From: at}, ignore)
		scanned := b.History("a").Scan(t.Context(), ScanOptions{From: at}, func(*event.Event) error { return nil })
		moved := b.Group("a", "g").Seek(t.Context(), at)
		for _, err := range []error{subscribed, scanned, moved} {
			if e, ok := errors.AsType[*event.Error](err); !ok || e.Code != event.CodeBadOptions {
				t.Errorf("%s: got %v", name, err)
			}
		}
	}
	if _, err := b.conn.JS.Stream(t.Context(), "a"); err == nil {
		t.Error("the topic was made")
	}
	var zero Position
	if zero != FromLatest {
		t.Error("the zero value is not the end")
	}
}
