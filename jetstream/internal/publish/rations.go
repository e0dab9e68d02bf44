package publish

import (
	"log/slog"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/quota"
)

const (
	// shareOf is the part of what is left at the start that a client may store in storedAge.
	shareOf   = 4
	storedAge = 7 * 24 * time.Hour
	// eventOverhead is what an event takes beside its payload, key and headers: its subject, and
	// what the server writes.
	eventOverhead = 128
	// rationedAtOnce is how many bytes a Publisher takes from the rations of its client at a time,
	// so that not every event costs two locks.
	rationedAtOnce = 64 << 10
)

// byteRations are the bytes that clients may publish.
type byteRations struct {
	shared    *Publishers
	published *quota.Set // bytes, by client
	stored    *quota.Set // the same over storedAge; nil: any
}

func newByteRations(p *Publishers) *byteRations {
	l := p.Limits
	return &byteRations{shared: p, published: quota.New(float64(l.PublishRate), l.PublishBurst, l.Topics, nil)}
}

// begin finds out what a share of the store is, once NATS was asked for its room.
func (r *byteRations) begin() {
	share := r.shared.Limits.StorageShare
	if left := r.shared.Streams.Headrooms.File.Left.Load(); share == 0 && left < streams.Unbounded {
		share = int(max(left/shareOf, r.shared.Streams.Headrooms.File.Reserve.Load()))
	}
	if share > 0 {
		r.stored = quota.New(float64(share)/storedAge.Seconds(), share, r.shared.Limits.Topics, nil)
	}
}

// size is about what an event takes in a store.
func (o *outgoing) size() int64 {
	n := len(o.payload) + len(o.Key) + len(o.SID) + eventOverhead
	for name, value := range o.Headers {
		n += len(name) + len(value)
	}
	for _, list := range [][]string{o.Tags, o.CausedBy} {
		for _, s := range list {
			n += len(s)
		}
	}
	return int64(n)
}

// admit takes an event of o.bytes from the rations of its client and from the room for its
// stream, or returns the refusal. The hub's own events need neither, unless they can wait
// (Options.Yield). Removals of keys make room, and may use half of the reserve.
func (r *byteRations) admit(p *Publisher, s *streams.Stream, o *outgoing, client string) error {
	switch {
	case conn.Rationed(client):
		if err := r.ration(p, s, o, client); err != nil {
			return err
		}
	case !o.Yield:
		return nil
	}
	if !r.shared.Streams.Headrooms.Take(s.Headroom, o.bytes*s.Copies, o.Tombstone) {
		r.shared.Obs.LimitReached("storage_reserve")
		return streams.StorageLow(nil)
	}
	return nil
}

// ration takes an event from the rations of its client. What p takes in advance is lost with p.
func (r *byteRations) ration(p *Publisher, s *streams.Stream, o *outgoing, client string) error {
	n, own := o.bytes, client == p.client
	if own {
		if p.advance.Add(-n) >= 0 {
			return nil
		}
		p.advance.Add(n)
	}
	taken := n
	if own {
		taken = max(n, rationedAtOnce)
	}
	wait := r.published.TakeN(client, int(taken))
	if wait > 0 && taken > n {
		taken = n
		wait = r.published.TakeN(client, int(taken))
	}
	if wait > 0 {
		r.shared.Obs.LimitReached("publish_rate")
		return &event.Error{Code: event.CodeRateLimited, Msg: "this client publishes more bytes a second than it may: slow down", Wait: wait}
	}
	if wait := r.stored.TakeN(client, int(taken)); wait > 0 && s.Headroom.Short() && !o.Tombstone {
		r.shared.Obs.LimitReached("storage_share")
		r.shared.Often.Log(r.shared.Conn.Ctx, slog.LevelWarn, "a client has stored more than its share, and nats has little room left: it stores nothing", client, slog.String("client", client))
		return &event.Error{Code: event.CodeStorageLow, Msg: "the event store has little room left, and this client has stored more than its share: nothing was stored; have events removed, or the store enlarged", Wait: wait}
	}
	p.advance.Add(taken - n)
	return nil
}
