package reading

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"sync"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// Bounds of the search for an id (protocol section 3).
const (
	idSearchBefore = time.Minute
	idSearchAfter  = 10 * time.Minute
	maxIDSearch    = streams.MaxRecent
	// A hub stores an event within milliseconds of making its id. A client's clock may be ahead: so
	// a search for a UUIDv7 also covers this many messages before.
	idSearchEarlier = 20_000
	idSkew          = 20 * time.Millisecond

	// A search reads at most this many events a second, in parts of idPiece.
	idSearchRate = 50_000
	idPiece      = 4096
	// A part, and a topic, count as this many ids more.
	idOverhead = 8
	// idSearchWait is how long a search may take and wait for others.
	idSearchWait = 9 * time.Second
	// idSearchQueue is the most searches of one client that run or wait.
	idSearchQueue = 64
)

// idSearches finds events by their ids. It remembers the ids that it has read, so that a topic is
// read once, and not once a search. The index has hashes only; the stream has the last word on a
// match.
type idSearches struct {
	reads *Reads
	seed  maphash.Seed

	mu     sync.Mutex
	topics map[idTopic]*topicIDs
	known  int    // ids, at most Limits.IDsKnown after each search
	uses   uint64 // searches
}

// KnownIDs returns how many ids searches remember.
func (r *Reads) KnownIDs() int {
	r.ids.mu.Lock()
	defer r.ids.mu.Unlock()
	return r.ids.known
}

// idTopic is one topic of one stream; a stream that was created again is another one.
type idTopic struct {
	topic   string
	created int64
}

// topicIDs are the ids of a topic that were read.
type topicIDs struct {
	turn   chan struct{} // held by the search that uses pieces
	pieces []*idRange    // in order, without overlaps

	// guarded by idSearches.mu
	known int
	used  uint64 // the number of its last search
	users int
}

// idRange is what is known of the sequences from..to of a stream: the events of the topic.
type idRange struct {
	from, to uint64
	hashes   []uint64
	seqs     []uint64
}

func newIDSearches(r *Reads) *idSearches {
	return &idSearches{
		reads: r, seed: maphash.MakeSeed(),
		topics: make(map[idTopic]*topicIDs),
	}
}

// Find is the sequence of the event with the id, or an unknown_id *Error. A UUIDv7 that is older
// than the first event that is left gives the sequence before that one. A search that finds no
// place in time gets overloaded, and one of a client that has too many gets rate_limited.
func (r *Reads) Find(ctx context.Context, t *streams.Topic, id string, state natsjs.StreamState, client string) (uint64, error) {
	seq, _, err := r.Locate(ctx, t, id, state, client)
	return seq, err
}

// Locate is Find, and reports whether the topic holds the event. Where it does not, the event may
// also be one of another topic that was stored in the millisecond of this topic's first event.
func (r *Reads) Locate(ctx context.Context, t *streams.Topic, id string, state natsjs.StreamState, client string) (seq uint64, held bool, err error) {
	unknown := func(why string) (uint64, bool, error) {
		return 0, false, &event.Error{Code: event.CodeUnknownID, Msg: "no event of this topic has the id of afterId: " + why}
	}
	if stream, seq, ok := native.ParsePlace(id); ok && stream == t.Stream.Name {
		if seq == 0 || seq > state.LastSeq {
			return unknown("its sequence is beyond the end")
		}
		return seq, true, nil
	}
	made, v7 := streams.MadeAt(id)
	found, err := r.ids.search(ctx, t, id, state, client)
	switch {
	case err != nil || found > 0:
		return found, err == nil, err
	case v7 && state.Msgs > 0 && made.Before(state.FirstTime):
		return state.FirstSeq - 1, false, nil
	case v7 && state.Msgs == 0 && state.LastSeq > 0:
		// all events are gone: the next one stored is the first that is left
		return state.LastSeq, false, nil
	case v7:
		return unknown("it was not found among those stored around its time")
	default:
		return unknown(fmt.Sprintf("it was not found among the last %d events", maxIDSearch))
	}
}

// search takes a place, and searches the part of the stream in which an event with the id may be.
// It returns 0 when there is none.
func (x *idSearches) search(ctx context.Context, t *streams.Topic, id string, state natsjs.StreamState, client string) (uint64, error) {
	if state.Msgs == 0 {
		return 0, nil
	}
	r := x.reads
	ctx, cancel := context.WithTimeout(ctx, idSearchWait)
	defer cancel()
	if !x.reads.Searches.Enter(ctx, client, idSearchQueue, func() { r.Obs.LimitReached("id_searches") }) {
		if ctx.Err() == nil {
			return 0, &event.Error{Code: event.CodeRateLimited, Msg: fmt.Sprintf("%d searches for afterId of this client run or wait: try again later", idSearchQueue)}
		}
		return 0, errSearchLate(ctx)
	}
	defer x.reads.Searches.Leave(client)
	from, to, err := x.bounds(ctx, t, id, state)
	if err != nil || from > to {
		return 0, err
	}
	first, last, seqs := t.Stream.Recent.Among(id, from, to)
	found, err := x.scan(ctx, t, id, from, first-1)
	for i := 0; found == 0 && err == nil && i < len(seqs); i++ {
		found, err = x.compare(ctx, t, seqs[i], id)
	}
	if found == 0 && err == nil {
		found, err = x.scan(ctx, t, id, last+1, to)
	}
	if err != nil && ctx.Err() != nil {
		err = errSearchLate(ctx)
	}
	return found, err
}

func errSearchLate(ctx context.Context) error {
	return &event.Error{Code: event.CodeOverloaded, Msg: "the search for afterId did not end in time, because others run: try again", Err: ctx.Err()}
}

// bounds are the first and the last sequence at which an event with the id may be.
func (x *idSearches) bounds(ctx context.Context, t *streams.Topic, id string, state natsjs.StreamState) (from, to uint64, err error) {
	r := x.reads
	made, v7 := streams.MadeAt(id)
	if !v7 {
		if state.LastSeq > maxIDSearch {
			from = state.LastSeq - maxIDSearch + 1
		}
		return max(from, state.FirstSeq, 1), state.LastSeq, nil
	}
	end := state.LastSeq + 1
	since := func(at time.Time) (uint64, error) {
		if !at.After(state.FirstTime) {
			return max(state.FirstSeq, 1), nil
		}
		return r.FirstSince(ctx, t, at, end)
	}
	if from, err = since(made.Add(-idSearchBefore)); err != nil {
		return 0, 0, err
	}
	near, err := since(made.Add(-idSkew))
	if err != nil {
		return 0, 0, err
	}
	if near > idSearchEarlier {
		from = max(from, near-idSearchEarlier)
	}
	if last := made.Add(idSearchAfter); last.Before(state.LastTime) {
		if end, err = r.FirstSince(ctx, t, last.Add(time.Nanosecond), end); err != nil {
			return 0, 0, err
		}
	}
	return from, end - 1, nil
}

// open waits for its turn with the ids of a topic.
func (x *idSearches) open(ctx context.Context, t *streams.Topic) (*topicIDs, error) {
	key := idTopic{t.Name, t.Stream.Created.UnixNano()}
	x.mu.Lock()
	ids := x.topics[key]
	if ids == nil {
		ids = &topicIDs{turn: make(chan struct{}, 1)}
		x.topics[key] = ids
	}
	ids.users++
	x.uses++
	ids.used = x.uses
	x.mu.Unlock()
	select {
	case ids.turn <- struct{}{}:
		return ids, nil
	case <-ctx.Done():
		x.mu.Lock()
		defer x.mu.Unlock()
		ids.users--
		return nil, errSearchLate(ctx)
	}
}

// close ends a turn, and forgets what is too much: the topics whose last search is longest ago.
func (x *idSearches) close(ids *topicIDs) {
	known := idOverhead
	for _, p := range ids.pieces {
		known += len(p.seqs) + idOverhead
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.known += known - ids.known
	ids.known = known
	ids.users--
	<-ids.turn
	if x.known <= x.reads.Limits.IDsKnown {
		return
	}
	x.reads.Obs.LimitReached("ids_known")
	unused := make([]idTopic, 0, len(x.topics))
	for key, ids := range x.topics {
		if ids.users == 0 {
			unused = append(unused, key)
		}
	}
	slices.SortFunc(unused, func(a, b idTopic) int { return int(x.topics[a].used) - int(x.topics[b].used) }) //nolint:gosec // counts of searches
	for _, key := range unused {
		if x.known <= x.reads.Limits.IDsKnown {
			return
		}
		x.known -= x.topics[key].known
		delete(x.topics, key)
	}
}

// scan looks through a range of sequences, at most maxIDSearch events of it, and reads what is not
// known of it.
func (x *idSearches) scan(ctx context.Context, t *streams.Topic, id string, from, to uint64) (uint64, error) {
	if from > to {
		return 0, nil
	}
	ids, err := x.open(ctx, t)
	if err != nil {
		return 0, err
	}
	defer x.close(ids)
	hash := maphash.String(x.seed, id)
	left := maxIDSearch
	for left > 0 && from <= to {
		i, known := slices.BinarySearchFunc(ids.pieces, from, func(p *idRange, seq uint64) int {
			switch {
			case p.to < seq:
				return -1
			case p.from > seq:
				return 1
			default:
				return 0
			}
		})
		if !known {
			end := to
			if i < len(ids.pieces) {
				end = min(end, ids.pieces[i].from-1)
			}
			if err := x.read(ctx, t, ids, i, from, end, left); err != nil {
				return 0, err
			}
			continue
		}
		p := ids.pieces[i]
		first, _ := slices.BinarySearch(p.seqs, from)
		for j := first; j < len(p.seqs) && p.seqs[j] <= to && left > 0; j++ {
			left--
			if p.hashes[j] != hash {
				continue
			}
			if found, err := x.compare(ctx, t, p.seqs[j], id); found > 0 || err != nil {
				return found, err
			}
		}
		from = p.to + 1
	}
	return 0, nil
}

// compare returns the sequence if its event has the id, else 0.
func (x *idSearches) compare(ctx context.Context, t *streams.Topic, seq uint64, id string) (uint64, error) {
	switch e, err := x.reads.BySequence(ctx, t, seq); {
	case errors.Is(err, event.ErrNotFound): // removed since
		return 0, nil
	case err != nil:
		return 0, x.reads.Conn.Unavailable(err)
	case e.ID != id:
		return 0, nil
	default:
		return e.Sequence, nil
	}
}

// read adds the ids of the events at from..to, or of the first limit of them, before piece i.
func (x *idSearches) read(ctx context.Context, t *streams.Topic, ids *topicIDs, i int, from, to uint64, limit int) error {
	var p *idRange
	if i > 0 && ids.pieces[i-1].to == from-1 {
		p = ids.pieces[i-1] // goes on
	}
	next := func() *idRange {
		if p == nil || len(p.seqs) >= idPiece {
			p = &idRange{from: from, to: from - 1}
			ids.pieces = slices.Insert(ids.pieces, i, p)
			i++
		}
		return p
	}
	next()
	began, read, ended := time.Now(), 0, false
	err := x.reads.Walk(ctx, t, Query{From: from, HeadersOnly: true}, func(m *conn.StoredMsg) error {
		if m.Seq > to {
			ended = true
			return ErrStop
		}
		p := next()
		p.hashes = append(p.hashes, maphash.String(x.seed, native.StoredID(m.Header, t.Stream.Name, m.Seq)))
		p.seqs = append(p.seqs, m.Seq)
		p.to, from = m.Seq, m.Seq+1
		if read++; read == limit {
			return ErrStop
		}
		if read%idPiece > 0 {
			return nil
		}
		return x.reads.Conn.Pause(ctx, time.Duration(read)*time.Second/idSearchRate-time.Since(began))
	})
	if err == nil && (ended || read < limit) {
		p.to = to // Walk has read all that the leader had
	}
	return err
}
