package reading

import (
	"context"
	"errors"
	"log/slog"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
	"eventhub/jetstream/pacedlog"
	"eventhub/jetstream/quota"
)

// Reads reads the stored events of topics: by position, by id, by key, in pages and in order. Its
// methods may be called concurrently. The caller of a method owns the events that it gets.
type Reads struct {
	Config
	// Searches are the places of searches for an id that run at a time.
	Searches *quota.Places

	listings *listings
	ids      *idSearches
}

// Config is what a Reads is given.
type Config struct {
	Conn     *conn.Pool
	Streams  *streams.Streams
	Messages *Messages
	// Replicas and Memory are of the bucket of listings.
	Replicas int
	Memory   bool
	Limits   Limits

	Log   *slog.Logger
	Often *pacedlog.Log
	Obs   event.Observer
}

// Limits are those of the bus with the same names.
type Limits struct {
	ListingReaders, IDSearches, IDSearchesPerClient, IDsKnown int
}

// New returns the reads of a bus that is not connected yet.
func New(cfg Config) *Reads {
	r := &Reads{Config: cfg, Searches: quota.NewPlaces(cfg.Limits.IDSearches, cfg.Limits.IDSearchesPerClient)}
	r.listings = &listings{reads: r}
	r.ids = newIDSearches(r)
	return r
}

// ByID is History.ByID.
func (r *Reads) ByID(ctx context.Context, topic, id, client string) (*event.Event, error) {
	if err := (Position{Kind: AtID, ID: id}).Validate(); err != nil {
		return nil, err
	}
	t, state, err := r.Streams.FreshExisting(ctx, topic)
	if err != nil {
		return nil, err
	}
	seq, err := r.Find(ctx, t, id, state, client)
	if unknown, ok := errors.AsType[*event.Error](err); ok && unknown.Code == event.CodeUnknownID || err == nil && seq == 0 {
		return nil, event.ErrNotFound
	}
	if err != nil {
		return nil, err
	}
	e, err := r.BySequence(ctx, t, seq)
	if errors.Is(err, event.ErrNotFound) {
		return nil, err
	}
	if err != nil {
		return nil, r.Conn.Unavailable(err)
	}
	if e.ID != id || e.Topic != topic {
		return nil, event.ErrNotFound // an id that tells its place is found when its event is gone
	}
	return e, nil
}

// NextOfKey is History.NextOfKey.
func (r *Reads) NextOfKey(ctx context.Context, topic, key string, after uint64) (*event.Event, error) {
	t, err := r.Streams.Existing(ctx, topic)
	if err != nil {
		return nil, err
	}
	m, err := r.Conn.GetMsg(ctx, t.Stream.Name, map[string]any{"seq": after + 1, "next_by_subj": native.Subject(topic, key)})
	if err != nil {
		if errors.Is(err, event.ErrNotFound) {
			return nil, event.ErrNotFound
		}
		return nil, r.Conn.Unavailable(err)
	}
	return t.Event(m), nil
}

// Bounds is History.Bounds.
func (r *Reads) Bounds(ctx context.Context, topic string) (first, last uint64, err error) {
	_, state, err := r.Streams.FreshExisting(ctx, topic)
	return max(state.FirstSeq, 1), state.LastSeq, err
}
