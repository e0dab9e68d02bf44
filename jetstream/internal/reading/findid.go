package reading

import (
	"context"
	"errors"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// IDSearch configures FindIDs, as the IDSearch of the bus.
type IDSearch struct {
	Key   string
	IDs   []string
	Since time.Time
	Max   int
}

// FindIDs is History.FindIDs.
func (r *Reads) FindIDs(ctx context.Context, topic string, s IDSearch) (found map[string]bool, complete bool, err error) {
	t, _, err := r.Streams.FreshExisting(ctx, topic)
	if errors.Is(err, event.ErrNotFound) {
		return nil, true, nil
	}
	if err != nil {
		return nil, false, r.Conn.Unavailable(err)
	}
	if s.Max <= 0 {
		s.Max = maxIDSearch
	}
	wanted := make(map[string]bool, len(s.IDs))
	for _, id := range s.IDs {
		wanted[id] = true
	}
	found = make(map[string]bool)
	seen := 0
	q := Query{Since: streams.Farthest(s.Since), Max: s.Max, HeadersOnly: true}
	if s.Key != "" {
		q.Subjects = []string{native.Subject(t.Name, s.Key)}
	}
	err = r.Walk(ctx, t, q, func(m *conn.StoredMsg) error {
		seen++
		if id := native.StoredID(m.Header, t.Stream.Name, m.Seq); wanted[id] {
			found[id] = true
			if len(found) == len(wanted) {
				return ErrStop
			}
		}
		return nil
	})
	if err != nil {
		return nil, false, err
	}
	if len(found) == len(wanted) {
		return found, true, nil
	}
	if seen >= s.Max {
		return found, false, nil
	}
	info, err := r.Conn.FindStream(ctx, t.Stream.Name)
	if err != nil {
		return nil, false, r.Conn.Unavailable(err)
	}
	return found, !mayHaveDropped(info, s.Since), nil
}

// mayHaveDropped says that the limits of a stream may have removed something that was stored since
// a moment. What they are now says nothing of what they were then.
func mayHaveDropped(info *natsjs.StreamInfo, since time.Time) bool {
	state, cfg := &info.State, &info.Config
	if !state.LastTime.IsZero() && state.LastTime.Before(since) {
		return false // nothing was stored since
	}
	fromTheMiddle := cfg.MaxMsgsPerSubject > 0 || cfg.AllowMsgTTL || cfg.Retention != natsjs.LimitsPolicy
	if fromTheMiddle && state.Msgs != state.LastSeq+1-state.FirstSeq {
		return true
	}
	return state.FirstSeq > 1 && (state.Msgs == 0 || state.FirstTime.After(since))
}

// DuplicateWindow is History.DuplicateWindow.
func (r *Reads) DuplicateWindow(ctx context.Context, topic string) (time.Duration, error) {
	if err := event.ValidTopic(topic); err != nil {
		return 0, err
	}
	info, err := r.Conn.FindStream(ctx, r.Streams.Rules.Of(topic).StreamName(topic))
	if err != nil {
		if errors.Is(err, event.ErrNotFound) {
			return 0, event.ErrNotFound
		}
		return 0, r.Conn.Unavailable(err)
	}
	return info.Config.Duplicates, nil
}
