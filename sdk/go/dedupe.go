package eventhub

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// DefaultRemember is how long Dedupe remembers an event. An event may come again for as long as its
// topic keeps it: seven days by default.
const DefaultRemember = 7 * 24 * time.Hour

// DedupeStore remembers which events were handled. Its methods are called concurrently.
type DedupeStore interface {
	// Seen reports whether Mark was called for the event, and its time is not over.
	Seen(ctx context.Context, topic, group, id string) (bool, error)
	// Mark remembers the event for so long.
	Mark(ctx context.Context, topic, group, id string, remember time.Duration) error
}

// Dedupe makes a handler that handles each event once, as long as the store remembers. Effects
// happen twice only when the process ends between the handler and the mark. A store that shares a
// transaction with the handler has not even this gap: it marks in the handler, and its Mark does
// nothing. An error of the store refuses the event.
func Dedupe(handler Handler, store DedupeStore, remember time.Duration) Handler {
	if remember <= 0 {
		remember = DefaultRemember
	}
	return func(ctx context.Context, d *Delivery) error {
		seen, err := store.Seen(ctx, d.Topic, d.Group, d.ID)
		if err != nil {
			return fmt.Errorf("look for an event that was handled: %w", err)
		}
		if seen {
			return nil
		}
		if err := handler(ctx, d); err != nil {
			return err
		}
		if err := store.Mark(ctx, d.Topic, d.Group, d.ID, remember); err != nil {
			return fmt.Errorf("remember an event that was handled: %w", err)
		}
		return nil
	}
}

// DefaultMemoryStore is how many events a MemoryStore remembers.
const DefaultMemoryStore = 100_000

// MemoryStore is a DedupeStore for one process. The oldest entries make room for new ones. The zero
// value is ready to use.
type MemoryStore struct {
	// Max is the most events that are remembered. Defaults to 100,000. It is not to be changed
	// later.
	Max int

	mu    sync.Mutex
	ends  map[eventKey]time.Time
	order []eventKey // a ring, oldest at next
	next  int
}

type eventKey struct{ topic, group, id string }

var _ DedupeStore = (*MemoryStore)(nil)

// Seen implements DedupeStore.
func (m *MemoryStore) Seen(_ context.Context, topic, group, id string) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	end, ok := m.ends[eventKey{topic, group, id}]
	return ok && time.Now().Before(end), nil
}

// Mark implements DedupeStore.
func (m *MemoryStore) Mark(_ context.Context, topic, group, id string, remember time.Duration) error {
	key := eventKey{topic, group, id}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ends == nil {
		m.ends = make(map[eventKey]time.Time)
	}
	if _, ok := m.ends[key]; !ok {
		most := m.Max
		if most <= 0 {
			most = DefaultMemoryStore
		}
		if len(m.order) < most {
			m.order = append(m.order, key)
		} else {
			delete(m.ends, m.order[m.next])
			m.order[m.next] = key
			m.next = (m.next + 1) % most
		}
	}
	m.ends[key] = time.Now().Add(remember)
	return nil
}
