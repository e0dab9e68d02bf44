package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

const (
	// MaxBookmarks ("bookmarks") is the maximum number of bookmarks of a group.
	MaxBookmarks = 100
	// MaxBookmarkEvents ("bookmark_events") is the maximum number of unsettled events, delivered
	// before the bookmark, that a bookmark tells from settled ones.
	MaxBookmarkEvents = 10_000
	// maxBookmarkName is the maximum length of a bookmark's name in bytes.
	maxBookmarkName = 128
)

// Bookmarks are stored positions of a group. They survive restarts, and end with the group. A
// Bookmarks is a small value that costs nothing to create. Its methods may be called concurrently.
// They return the errors of Group's methods.
type Bookmarks struct{ group Group }

// Bookmarks gives access to the bookmarks of the group.
func (g Group) Bookmarks() Bookmarks { return Bookmarks{g} }

// Bookmark is a stored position of a group. Group.Move with AtBookmark goes there.
type Bookmark struct {
	Name string `json:"name"`
	// Floor is the sequence up to which the group had settled every event. Newest is the newest
	// event that had been delivered.
	Floor  uint64 `json:"floor"`
	Newest uint64 `json:"newest"`
	// Unsettled is how many events up to Newest were not settled.
	Unsettled uint64 `json:"unsettled"`
	// Exact says that the bookmark knows each unsettled event. Otherwise the group gets all events
	// behind Floor again, also those that were settled.
	Exact bool `json:"exact"`
	// MadeMS is when the bookmark was made, in epoch milliseconds.
	MadeMS int64 `json:"made_ms"`
}

// seqSpan is a run of sequences, both ends included.
type seqSpan = native.Span

// gaps returns what is in floor+1..newest and not among unsettled, which is sorted.
func gaps(floor, newest uint64, unsettled []uint64) (spans []seqSpan) {
	next := floor + 1
	for _, seq := range unsettled {
		if seq > next {
			spans = append(spans, seqSpan{next, seq - 1})
		}
		next = seq + 1
	}
	if next <= newest {
		spans = append(spans, seqSpan{next, newest})
	}
	return spans
}

func validBookmark(name string) error {
	if err := ValidGroup(name); err != nil || len(name) > maxBookmarkName {
		return event.BadOptions("the name of a bookmark is 1 to %d bytes of UTF-8 without control characters", maxBookmarkName)
	}
	return nil
}

// Put stores the present position of the group under a name, and replaces the bookmark that has the
// name. Deliveries to the group stop for a moment, so that the bookmark can be exact.
func (m Bookmarks) Put(ctx context.Context, name string) (Bookmark, error) {
	b := m.group.bus
	if err := validBookmark(name); err != nil {
		return Bookmark{}, err
	}
	t, ptr, err := m.group.pointer(ctx)
	if err != nil {
		return Bookmark{}, err
	}
	known, err := b.records.BookmarkNames(ctx, t, m.group.name)
	if err != nil {
		return Bookmark{}, err
	}
	if !slices.Contains(known, name) && len(known) >= MaxBookmarks {
		b.obs.LimitReached("bookmarks")
		return Bookmark{}, &event.Error{Code: event.CodeOverloaded, Msg: fmt.Sprintf("the group has %d bookmarks, which is the limit: delete one", MaxBookmarks)}
	}
	made, err := b.takeBookmark(ctx, t, m.group.name, &ptr)
	// it may have been moved meanwhile
	for try := 0; errors.Is(err, event.ErrNotFound) && try < 8; try++ {
		if t, ptr, err = m.group.pointer(ctx); err != nil {
			return Bookmark{}, err
		}
		made, err = b.takeBookmark(ctx, t, m.group.name, &ptr)
	}
	if errors.Is(err, event.ErrNotFound) {
		return Bookmark{}, err
	}
	if err != nil {
		return Bookmark{}, b.conn.Unavailable(err)
	}
	made.Name = name
	if err := b.records.PutBookmark(ctx, t, m.group.name, made); err != nil {
		return Bookmark{}, err
	}
	return Bookmark(made.Bookmark), nil
}

// Get returns a bookmark, or ErrNotFound.
func (m Bookmarks) Get(ctx context.Context, name string) (Bookmark, error) {
	if err := validBookmark(name); err != nil {
		return Bookmark{}, err
	}
	t, _, err := m.group.pointer(ctx)
	if err != nil {
		return Bookmark{}, err
	}
	found, err := m.group.bus.records.Bookmark(ctx, t, m.group.name, name)
	if err != nil {
		return Bookmark{}, err
	}
	return Bookmark(found.Bookmark), nil
}

// List returns the bookmarks of the group by their names.
func (m Bookmarks) List(ctx context.Context) ([]Bookmark, error) {
	b := m.group.bus
	t, _, err := m.group.pointer(ctx)
	if err != nil {
		return nil, err
	}
	names, err := b.records.BookmarkNames(ctx, t, m.group.name)
	if err != nil {
		return nil, err
	}
	var list []Bookmark
	for _, name := range names {
		found, err := b.records.Bookmark(ctx, t, m.group.name, name)
		if errors.Is(err, event.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		list = append(list, Bookmark(found.Bookmark))
	}
	return list, nil
}

// Delete removes a bookmark. It returns ErrNotFound if there is none of that name.
func (m Bookmarks) Delete(ctx context.Context, name string) error {
	if _, err := m.Get(ctx, name); err != nil {
		return err
	}
	t, _, err := m.group.pointer(ctx)
	if err != nil {
		return err
	}
	if err := m.group.bus.records.DeleteBookmark(ctx, t, m.group.name, name); err != nil {
		return m.group.bus.conn.Unavailable(err)
	}
	return nil
}

// pointer returns the topic and the generation of a group that exists.
func (g Group) pointer(ctx context.Context) (*streams.Topic, records.Generation, error) {
	t, ptr, _, err := g.present(ctx)
	return t, ptr, err
}

// present is pointer with the consumer.
func (g Group) present(ctx context.Context) (t *streams.Topic, ptr records.Generation, info *natsjs.ConsumerInfo, err error) {
	if err := ValidGroup(g.name); err != nil {
		return nil, ptr, nil, err
	}
	if t, _, err = g.bus.streams.FreshExisting(ctx, g.topic); err != nil {
		return nil, ptr, nil, err
	}
	ptr, err = g.bus.records.Generation(ctx, t, g.name)
	if err == nil {
		info, err = g.bus.records.GroupConsumer(ctx, t, &ptr)
	}
	if errors.Is(err, event.ErrNotFound) {
		return nil, ptr, nil, event.ErrNotFound
	}
	if err != nil {
		return nil, ptr, nil, g.bus.conn.Unavailable(err)
	}
	return t, ptr, info, nil
}

// Times of taking a bookmark.
const (
	// bookmarkPause is how long deliveries stop at most.
	bookmarkPause = 2 * time.Second
	// bookmarkAsks is how long hubs are asked what they hold.
	bookmarkAsks = time.Second
)

// takeBookmark notes how far a group is. The server tells how many events it waits for, and not
// which. Hubs know what they hold. Nothing is delivered meanwhile, so if hubs hold as many events
// as the server waits for, these are the ones. Events that wait on the server for a new delivery
// are in no hub's hands; the bookmark is then not exact.
func (b *Bus) takeBookmark(ctx context.Context, t *streams.Topic, group string, ptr *records.Generation) (*records.StoredBookmark, error) {
	info, err := b.records.GroupConsumer(ctx, t, ptr)
	if err != nil {
		return nil, err
	}
	if info.NumAckPending == 0 {
		return bookmarkOf(ptr, info, nil, true), nil
	}
	if info.NumAckPending > MaxBookmarkEvents {
		b.obs.LimitReached("bookmark_events")
		return bookmarkOf(ptr, info, nil, false), nil
	}
	if !ptr.Paused {
		if err := b.records.PauseConsumer(ctx, t, ptr.Consumer, info.TimeStamp.Add(bookmarkPause)); err != nil {
			return nil, err
		}
		defer b.endShortPause(ctx, t, group, ptr.Consumer)
	}
	deadline := time.Now().Add(bookmarkAsks)
	for {
		if info, err = b.records.GroupConsumer(ctx, t, ptr); err != nil {
			return nil, err
		}
		held, err := b.askHeld(ctx, t, ptr.Consumer, info.NumAckPending)
		if err != nil {
			return nil, err
		}
		held, all, err := b.heldOf(ctx, t, info, held)
		if err != nil {
			return nil, err
		}
		if all {
			return bookmarkOf(ptr, info, held, true), nil
		}
		if time.Now().After(deadline) {
			return bookmarkOf(ptr, info, nil, false), nil
		}
	}
}

// bookmarkOf notes where the group is. unsettled are the events up to the newest delivered one that
// the server waits for, in order; they are known if exact.
func bookmarkOf(p *records.Generation, info *natsjs.ConsumerInfo, unsettled []uint64, exact bool) *records.StoredBookmark {
	mark := &records.StoredBookmark{Bookmark: records.Bookmark{
		Floor: floorOf(info), Newest: max(info.Delivered.Stream, floorOf(info)), Unsettled: uint64(max(info.NumAckPending, 0)),
		Exact: exact, MadeMS: time.Now().UnixMilli(),
	}}
	from := mark.Floor + 1
	if exact {
		mark.Settled = gaps(mark.Floor, mark.Newest, unsettled)
		from = mark.Newest + 1
	}
	// What members acknowledge unseen is settled, too.
	for _, s := range p.Settled {
		if s[1] >= from {
			mark.Settled = append(mark.Settled, seqSpan{max(s[0], from), s[1]})
		}
	}
	return mark
}

// endShortPause ends the pause of takeBookmark, unless somebody has paused the group meanwhile.
func (b *Bus) endShortPause(ctx context.Context, t *streams.Topic, group, consumer string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleWait)
	defer cancel()
	ptr, err := b.records.Generation(ctx, t, group)
	if err != nil {
		return // the pause ends by itself
	}
	if ptr.Paused {
		// who pauses the group does the same
		_ = b.records.PauseConsumer(ctx, t, consumer, pausedUntil)
		return
	}
	_ = b.records.ResumeConsumer(ctx, t, consumer) // as above
}

// heldWait is how long answers are waited for.
const heldWait = 250 * time.Millisecond

// askHeld returns what hubs hold of a consumer, in order. It returns as soon as it has enough.
func (b *Bus) askHeld(ctx context.Context, t *streams.Topic, consumer string, enough int) ([]uint64, error) {
	if enough == 0 {
		return nil, nil
	}
	held := make(map[uint64]struct{})
	err := b.records.AskHubs(ctx, records.Question{Held: t.Stream.Name + "." + consumer}, heldWait, func(answer []byte) bool {
		var seqs []uint64
		if json.Unmarshal(answer, &seqs) == nil {
			for _, seq := range seqs {
				held[seq] = struct{}{}
			}
		}
		return len(held) >= enough
	})
	return slices.Sorted(maps.Keys(held)), err
}

// answerHeld tells who asks what this hub surely holds of a consumer.
func (r *groupRegistry) answerHeld(q *records.Question) {
	r.mu.Lock()
	g := r.byKey[q.Held]
	r.mu.Unlock()
	if g == nil {
		return
	}
	var answer any
	if q.LetGo {
		answer = g.letGo()
	} else {
		answer = g.surelyHeld()
	}
	if value, err := json.Marshal(answer); err == nil {
		_ = r.conn.Link().NC.Publish(q.Reply, value) // an error means that the connection is down
	}
}

// surelyHeld are events that members of this hub have and nobody else does.
func (g *group) surelyHeld() []uint64 {
	seqs := []uint64{}
	now := g.bus.clock.Now()
	for _, s := range g.bus.groups.membersOf(g) {
		s.mu.Lock()
		for _, d := range s.out {
			if d.group == g && d.usable(now) && len(seqs) < MaxBookmarkEvents {
				seqs = append(seqs, d.Event.Sequence)
			}
		}
		s.mu.Unlock()
	}
	return seqs
}

// aimAtBookmark resolves a bookmark.
func (b *Bus) aimAtBookmark(ctx context.Context, t *streams.Topic, group, name string, state natsjs.StreamState) (aim, error) {
	found, err := b.records.Bookmark(ctx, t, group, name)
	if err != nil {
		return aim{}, err
	}
	return aim{start: min(found.Floor, state.LastSeq) + 1, settled: found.Settled}, nil
}
