package jetstream

import (
	"context"
	"errors"
	"testing"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/natstest"
)

// Each handle of a bus that is closed says so, at once, of a topic that the hub knew and of
// another.
func TestHandlesOfClosedBus(t *testing.T) {
	t.Parallel()
	b, err := Open(t.Context(), Config{Server: natstest.Embed(t, t.TempDir())})
	if err != nil {
		t.Fatal(err)
	}
	publishAll(t, b, "known", "1")
	_ = b.Close()
	calls := map[string]func(ctx context.Context, topic string) error{
		"Backlog": func(ctx context.Context, topic string) error { _, err := b.Group(topic, "g").Backlog(ctx); return err },
		"Cursor":  func(ctx context.Context, topic string) error { _, err := b.Group(topic, "g").Cursor(ctx); return err },
		"Delete":  func(ctx context.Context, topic string) error { return b.Group(topic, "g").Delete(ctx) },
		"Seek":    func(ctx context.Context, topic string) error { return b.Group(topic, "g").Seek(ctx, FromEarliest) },
		"Preview": func(ctx context.Context, topic string) error {
			_, err := b.Group(topic, "g").Preview(ctx, FromEarliest)
			return err
		},
		"Info":  func(ctx context.Context, topic string) error { _, err := b.Group(topic, "g").Info(ctx); return err },
		"Pause": func(ctx context.Context, topic string) error { return b.Group(topic, "g").Pause(ctx) },
		"Bookmarks": func(ctx context.Context, topic string) error {
			_, err := b.Group(topic, "g").Bookmarks().List(ctx)
			return err
		},
		"Put bookmark": func(ctx context.Context, topic string) error {
			_, err := b.Group(topic, "g").Bookmarks().Put(ctx, "m")
			return err
		},
		"Groups": func(ctx context.Context, _ string) error {
			_, _, err := b.Admin().Groups().List(ctx, GroupsPage{Limit: 1})
			return err
		},
		"Bounds": func(ctx context.Context, topic string) error { _, _, err := b.History(topic).Bounds(ctx); return err },
		"DuplicateWindow": func(ctx context.Context, topic string) error {
			_, err := b.History(topic).DuplicateWindow(ctx)
			return err
		},
		"NextOfKey": func(ctx context.Context, topic string) error {
			_, err := b.History(topic).NextOfKey(ctx, "k", 0)
			return err
		},
		"Get":         func(ctx context.Context, topic string) error { _, err := b.Keys(topic).Get(ctx, "k"); return err },
		"PlanTopics":  func(ctx context.Context, _ string) error { _, err := b.Admin().PlanTopics(ctx); return err },
		"ApplyTopics": func(ctx context.Context, _ string) error { _, err := b.Admin().ApplyTopics(ctx, false); return err },
		"Topics":      func(ctx context.Context, _ string) error { _, err := b.Admin().Topics(ctx); return err },
	}
	for name, call := range calls {
		for _, topic := range []string{"known", "other"} {
			if took := quickest(func(int) {
				if err := call(t.Context(), topic); !errors.Is(err, event.ErrClosed) {
					t.Errorf("%s of topic %s: %v", name, topic, err)
				}
			}); took > time.Second {
				t.Errorf("%s of topic %s took %v", name, topic, took)
			}
		}
	}
}
