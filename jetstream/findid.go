package jetstream

import (
	"context"
	"errors"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
)

// IDSearch configures FindIDs.
type IDSearch struct {
	// Key, if not "", restricts the search to the events of that key, which are few. By default,
	// the search covers all events of the topic.
	Key string
	// IDs are the ids to search for, as given in PublishOptions.ID.
	IDs []string
	// Since is the earliest time of storage.
	Since time.Time
	// Max is the maximum number of events examined: default 100,000.
	Max int
}

// FindIDs reports which of the given ids occur among the events of a topic that were stored from
// s.Since up to the call. It reads the headers of events only.
//
// complete is true when the answer is certain for every id: all ids were found, or every event
// since then was examined. It is false when there were more events than Max, or when the limits of
// the stream may have removed events of that time. Events that a native client purged count as
// never stored. A topic that does not exist has no events, with certainty. FindIDs returns an error
// when it could not read as far as the stream's leader.
func (h History) FindIDs(ctx context.Context, s IDSearch) (found map[string]bool, complete bool, err error) {
	r := h.reads
	t, _, err := r.streams.FreshExisting(ctx, h.topic)
	if errors.Is(err, event.ErrNotFound) {
		return nil, true, nil
	}
	if err != nil {
		return nil, false, r.conn.Unavailable(err)
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
	err = r.walk(ctx, t, walkOptions{since: streams.Farthest(s.Since), key: s.Key, max: s.Max, headersOnly: true}, func(m *conn.StoredMsg) error {
		seen++
		if id := storedID(m.Header, t.Stream.Name, m.Seq); wanted[id] {
			found[id] = true
			if len(found) == len(wanted) {
				return errStopWalk
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
	info, err := r.conn.FindStream(ctx, t.Stream.Name)
	if err != nil {
		return nil, false, r.conn.Unavailable(err)
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

// DuplicateWindow returns how long the topic's stream remembers the ids of events. A publish with a
// remembered id stores nothing. It returns ErrNotFound when the topic does not exist.
func (h History) DuplicateWindow(ctx context.Context) (time.Duration, error) {
	r, topic := h.reads, h.topic
	if err := ValidTopic(topic); err != nil {
		return 0, err
	}
	info, err := r.conn.FindStream(ctx, r.rules.Of(topic).StreamName(topic))
	if err != nil {
		if errors.Is(err, event.ErrNotFound) {
			return 0, event.ErrNotFound
		}
		return 0, r.conn.Unavailable(err)
	}
	return info.Config.Duplicates, nil
}
