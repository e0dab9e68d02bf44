package projections

import (
	"context"
	"errors"
	"testing"
	"time"

	"eventhub/jetstream"
)

// fakeTopic is a topic without a server: its Keys and its History, as far as the tests ask for
// them.
type fakeTopic struct {
	Keys
	History

	events  []*jetstream.Event
	dropped bool // the topic has lost events
	changes chan *jetstream.Event
}

// fakeBus gives access to the topic.
type fakeBus struct {
	Bus
	topic *fakeTopic
}

func (b fakeBus) Keys(string) Keys       { return b.topic }
func (b fakeBus) History(string) History { return b.topic }

func (f *fakeTopic) Scan(_ context.Context, opts jetstream.ScanOptions, yield func(*jetstream.Event) error) error {
	for _, e := range f.events {
		if e.Key != opts.Key || e.StoredAt > opts.Until.UnixNano() {
			continue
		}
		if err := yield(e); err != nil {
			return err
		}
	}
	return nil
}

// Bounds says that the topic does not exist while nothing is in it, as jetstream.History does.
func (f *fakeTopic) Bounds(context.Context) (first, last uint64, err error) {
	switch {
	case len(f.events) == 0:
		return 0, 0, jetstream.ErrNotFound
	case f.dropped:
		return 2, uint64(len(f.events)), nil
	}
	return 1, uint64(len(f.events)), nil
}

func (f *fakeTopic) Watch(ctx context.Context, _ []string, yield func(*jetstream.Event) error) error {
	for {
		select {
		case e := <-f.changes:
			if err := yield(e); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func TestReconstructOnAFakeHistory(t *testing.T) {
	t.Parallel()
	now := time.Now()
	topic := &fakeTopic{}
	for i, key := range []string{"a", "b", "a"} {
		topic.events = append(topic.events, &jetstream.Event{
			Key: key, Payload: []byte{byte('1' + i)}, Stream: "S", Sequence: uint64(i + 1), StoredAt: now.Add(time.Duration(i) * time.Second).UnixNano(),
		})
	}
	s, err := Reconstruct(t.Context(), topic, "a", now.Add(time.Minute), appendEvent)
	if err != nil || string(s.Value) != "1 3 " {
		t.Errorf("%q, %v", s.Value, err)
	}
	if s, err = Reconstruct(t.Context(), topic, "a", now.Add(time.Second), appendEvent); err != nil || string(s.Value) != "1 " {
		t.Errorf("%q, %v", s.Value, err)
	}
	topic.dropped = true
	if _, err := Reconstruct(t.Context(), topic, "a", now, appendEvent); !errors.Is(err, ErrTruncated) {
		t.Errorf("got %v", err)
	}
}

func TestMirrorOnAFakeBus(t *testing.T) {
	t.Parallel()
	topic := &fakeTopic{changes: make(chan *jetstream.Event)}
	m := NewMirror(MirrorConfig{Bus: fakeBus{topic: topic}, Topic: "state", Logger: logs(t)})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- m.Run(ctx) }()
	event := func(key, payload string, seq uint64) *jetstream.Event {
		return &jetstream.Event{Topic: "state", Key: key, Payload: []byte(payload), Stream: "S", Sequence: seq, StoredAt: time.Now().UnixNano()}
	}
	for _, e := range []*jetstream.Event{event("k", "new", 2), event("k", "old", 1), nil} {
		topic.changes <- e
	}
	select {
	case <-m.Ready():
	case <-time.After(patience):
		t.Fatal("it does not become ready")
	}
	if e, err := m.Get(t.Context(), "k"); err != nil || string(e.Payload) != "new" {
		t.Errorf("got %v, %v", e, err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
