package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// retentionBucket is what hubs share about what retention did to groups: what each has lost, what
// operators have purged, and when a group of a topic that rejects last had a member.
const (
	retentionBucket = "eventhub_retention"
	retentionAge    = 90 * 24 * time.Hour // of an entry that nobody changes
	retentionBytes  = 256 << 20
)

// maxGaps and maxPurges bound the lists in an entry: the oldest go.
const (
	maxGaps   = 32
	maxPurges = 64
)

// lossBook is the entry of a group that has lost events.
type lossBook struct {
	Stream   time.Time `json:"stream"` // when the stream was created
	Consumer string    `json:"consumer"`
	// Order and Seq are the delivery up to which losses are counted.
	Order uint64 `json:"order"`
	Seq   uint64 `json:"seq"`
	// Lost is the sum of all losses.
	Lost uint64 `json:"lost"`
	// AtMS is when the last one was found, in epoch milliseconds of a hub's clock.
	AtMS int64       `json:"at_ms"`
	Gaps []bookedGap `json:"gaps"` // the newest last

	revision uint64
}

// bookedGap is a gap between two sequences, in which some events were lost.
type bookedGap struct {
	After  uint64 `json:"after"`
	Before uint64 `json:"before"`
	Lost   uint64 `json:"lost"`
	// Since is when the event at After was stored, in Unix nanoseconds; 0: unknown.
	Since int64 `json:"since,omitempty"`
}

func (g bookedGap) loss(topic string) Loss {
	l := Loss{Topic: topic, Events: g.Lost}
	if g.Since > 0 {
		l.Since = time.Unix(0, g.Since)
	}
	return l
}

// purgeBook is the entry of a stream that an operator has purged. What is purged is not lost.
type purgeBook struct {
	Stream time.Time `json:"stream"`
	Purges []purged  `json:"purges"`
}

// purged is the events From up to, and without, To.
type purged struct {
	From uint64 `json:"from"`
	To   uint64 `json:"to"`
}

func lossSubject(t *streams.Topic, group string) string {
	return "$KV." + retentionBucket + ".lost." + groupKey(t, group)
}

func purgeSubject(stream string) string { return "$KV." + retentionBucket + ".purged." + stream }

// noteLoss counts a gap, and returns what the members on this hub are to be told of it. The metric
// counts on the hub that was first to note the gap. On an error, the hub counts by itself.
func (r *records) noteLoss(ctx context.Context, g *group, w gap) ([]Loss, error) {
	alone := func(n uint64, err error) ([]Loss, error) {
		r.countLost(g, n)
		return []Loss{bookedGap{Lost: n, Since: w.after.stored}.loss(g.topic.Name)}, err
	}
	if w.seq <= w.after.seq+1 {
		return nil, nil // a redelivery came late: nothing is in between
	}
	first, err := r.firstLeft(ctx, g.topic, w)
	if err != nil {
		return alone(w.lost, err)
	}
	end := min(first, w.seq) // what is missing from there on was removed singly
	if end <= w.after.seq+1 {
		return nil, nil
	}
	w.lost = min(w.lost, end-w.after.seq-1)
	for {
		book, err := r.lossBook(ctx, g.topic, g.name)
		if err != nil {
			return alone(w.lost, err)
		}
		if book.Consumer != g.consumer {
			book.Consumer, book.Order, book.Seq, book.Gaps = g.consumer, 0, 0, nil
		}
		n, err := r.newlyLost(ctx, g.topic, &book, w, end)
		if err != nil {
			return alone(w.lost, err)
		}
		if n == 0 {
			return g.untold(&book, w), nil
		}
		book.add(w, n)
		err = r.putBook(ctx, lossSubject(g.topic, g.name), &book, book.revision)
		if errors.Is(err, errGroupMoved) && r.conn.Pause(ctx, bookAgain) == nil {
			continue // another hub notes something at this moment
		}
		if err != nil {
			return alone(n, err)
		}
		r.countLost(g, n)
		return g.untold(&book, w), nil
	}
}

// bookAgain is the pause before an entry that another hub changes is read again.
const bookAgain = 5 * time.Millisecond

// noteReturned counts events that the group's members gave back and that were removed since.
func (r *records) noteReturned(ctx context.Context, g *group, seqs []uint64) ([]Loss, error) {
	info, err := r.conn.FindStream(ctx, g.topic.Stream.Name)
	if err != nil {
		return nil, err
	}
	gone := slices.DeleteFunc(seqs, func(seq uint64) bool { return seq >= info.State.FirstSeq })
	if len(gone) == 0 || !native.StreamMade(info).Equal(g.topic.Stream.Created) {
		return nil, nil
	}
	var purges purgeBook
	if _, err := r.book(ctx, purgeSubject(g.topic.Stream.Name), &purges); err != nil {
		return nil, err
	}
	if purges.Stream.Equal(g.topic.Stream.Created) {
		gone = slices.DeleteFunc(gone, func(seq uint64) bool {
			return slices.ContainsFunc(purges.Purges, func(p purged) bool { return p.From <= seq && seq < p.To })
		})
	}
	if len(gone) == 0 {
		return nil, nil
	}
	n := uint64(len(gone))
	losses := []Loss{{Topic: g.topic.Name, Events: n}}
	r.countLost(g, n)
	for {
		book, err := r.lossBook(ctx, g.topic, g.name)
		if err != nil {
			return losses, err
		}
		book.Lost += n
		book.AtMS = time.Now().UnixMilli()
		err = r.putBook(ctx, lossSubject(g.topic, g.name), &book, book.revision)
		if !errors.Is(err, errGroupMoved) || r.conn.Pause(ctx, bookAgain) != nil {
			return losses, err
		}
	}
}

// newlyLost is how much of a gap is not in the book yet.
func (r *records) newlyLost(ctx context.Context, t *streams.Topic, book *lossBook, w gap, end uint64) (uint64, error) {
	n, after := w.lost, w.after.seq
	switch {
	case w.seq <= book.Seq:
		return 0, nil
	case book.Seq > after: // another hub has seen a delivery in between
		left := w.seq - book.Seq - 1
		// else a new leader has numbered again, and the numbers say nothing of other hubs
		if w.order > book.Order {
			left -= min(left, w.order-book.Order-1)
		}
		n, after = min(n, left, max(end, book.Seq+1)-book.Seq-1), book.Seq
	}
	if n == 0 {
		return 0, nil
	}
	var purges purgeBook
	if _, err := r.book(ctx, purgeSubject(t.Stream.Name), &purges); err != nil {
		return 0, err
	}
	if !purges.Stream.Equal(t.Stream.Created) {
		return n, nil
	}
	for _, p := range purges.Purges {
		if from, to := max(p.From, after+1), min(p.To, end); from < to {
			n -= min(n, to-from)
		}
	}
	return n, nil
}

// add counts a gap, behind those that are in the book.
func (k *lossBook) add(w gap, n uint64) {
	k.Order, k.Seq = w.order, w.seq
	k.Lost += n
	k.AtMS = time.Now().UnixMilli()
	if len(k.Gaps) >= maxGaps {
		k.Gaps = k.Gaps[len(k.Gaps)-maxGaps+1:]
	}
	k.Gaps = append(k.Gaps, bookedGap{After: w.after.seq, Before: w.seq, Lost: n, Since: w.after.stored})
}

// untold is what the members on this hub have not been told of a gap: what the book has of it,
// whichever hub has noted it.
func (g *group) untold(book *lossBook, w gap) (losses []Loss) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, booked := range book.Gaps {
		if booked.Before > g.told && booked.After < w.seq && booked.Before > w.after.seq {
			losses = append(losses, booked.loss(g.topic.Name))
			g.told = booked.Before
		}
	}
	return losses
}

// countLost is the metric of a loss.
func (r *records) countLost(g *group, n uint64) {
	o := r.obs.Group(g.topic.Name, g.name, g.timeToLive() > 0)
	o.Lost(n)
	o.Close()
}

// leaderBehind is how long the leader of a stream may show less removed than the server of a
// consumer: replicas remove by age for themselves.
const leaderBehind = 200 * time.Millisecond

// firstLeft is the first sequence that is left in the stream. A leader that has not applied yet
// what another server has is asked again.
func (r *records) firstLeft(ctx context.Context, t *streams.Topic, w gap) (uint64, error) {
	for end := r.clock.Now() + int64(leaderBehind); ; {
		info, err := r.conn.FindStream(ctx, t.Stream.Name)
		if err != nil {
			return 0, err
		}
		if !native.StreamMade(info).Equal(t.Stream.Created) {
			return 0, errStreamGone
		}
		first, applied := info.State.FirstSeq, info.State.LastSeq >= w.seq
		if applied && (first > w.after.seq+w.lost || info.Config.Replicas == 1 || r.clock.Now() > end) {
			return first, nil
		}
		if err := r.conn.Pause(ctx, 20*time.Millisecond); err != nil {
			return 0, fmt.Errorf("jetstream: stream %s: its leader is behind: %w", t.Stream.Name, err)
		}
	}
}

// lossBook reads the entry of a group; an empty one if there is none for this stream.
func (r *records) lossBook(ctx context.Context, t *streams.Topic, group string) (lossBook, error) {
	var book lossBook
	rev, err := r.book(ctx, lossSubject(t, group), &book)
	if err != nil {
		return lossBook{}, err
	}
	if !book.Stream.Equal(t.Stream.Created) {
		book = lossBook{Stream: t.Stream.Created}
	}
	book.revision = rev
	return book, nil
}

// book reads an entry at the leader, and returns its revision; 0 if there is none. What cannot be
// read counts for nothing.
func (r *records) book(ctx context.Context, subject string, into any) (uint64, error) {
	m, err := r.conn.LastBySubject(ctx, "KV_"+retentionBucket, subject)
	if errors.Is(err, event.ErrNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	unmarshalBook(m, into)
	return m.Seq, nil
}

func unmarshalBook(m *conn.StoredMsg, into any) bool { return json.Unmarshal(m.Data, into) == nil }

// putBook stores an entry that replaces the one of a revision. It returns errGroupMoved when
// another was first.
func (r *records) putBook(ctx context.Context, subject string, book any, revision uint64) error {
	value, err := json.Marshal(book)
	if err != nil {
		return err
	}
	m := &nats.Msg{Subject: subject, Data: value, Header: nats.Header{natsjs.ExpectedLastSubjSeqHeader: {strconv.FormatUint(revision, 10)}}}
	_, err = r.conn.Write(ctx, "KV_"+retentionBucket, m)
	if keyChanged(err) {
		return errGroupMoved
	}
	return err
}
