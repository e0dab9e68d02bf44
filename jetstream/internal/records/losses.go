package records

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
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

// RetentionBucket is what hubs share about what retention did to groups: what each has lost, what
// operators have purged, and when a group of a topic that rejects last had a member.
const (
	RetentionBucket = "eventhub_retention"
	retentionAge    = 90 * 24 * time.Hour // of an entry that nobody changes
	retentionBytes  = 256 << 20
)

// Retention notes what retention did to groups, and has moves and removals take turns. Its methods
// may be called concurrently.
type Retention struct{ Config }

// maxGaps and maxPurges bound the lists in an entry: the oldest go.
const (
	maxGaps   = 32
	maxPurges = 64
)

// LossBook is the entry of a group that has lost events.
type LossBook struct {
	Stream   time.Time `json:"stream"` // when the stream was created
	Consumer string    `json:"consumer"`
	// Order and Seq are the delivery up to which losses are counted.
	Order uint64 `json:"order"`
	Seq   uint64 `json:"seq"`
	// Lost is the sum of all losses.
	Lost uint64 `json:"lost"`
	// AtMS is when the last one was found, in epoch milliseconds of a hub's clock.
	AtMS int64       `json:"at_ms"`
	Gaps []BookedGap `json:"gaps"` // the newest last

	revision uint64
}

// BookedGap is a gap between two sequences, in which some events were lost.
type BookedGap struct {
	After  uint64 `json:"after"`
	Before uint64 `json:"before"`
	Lost   uint64 `json:"lost"`
	// Since is when the event at After was stored, in Unix nanoseconds; 0: unknown.
	Since int64 `json:"since,omitempty"`
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
	return "$KV." + RetentionBucket + ".lost." + GroupKey(t, group)
}

func purgeSubject(stream string) string { return "$KV." + RetentionBucket + ".purged." + stream }

// Gap says that up to Lost events were left out between two deliveries of a group.
type Gap struct {
	After uint64 // the last event before
	Since int64  // when that event was stored, in Unix nanoseconds; 0: unknown
	Order uint64 // the number of the delivery behind it
	Seq   uint64 // the first event behind it
	Lost  uint64
}

// NoteLoss counts a gap of a group that is now a consumer. It returns how many events this hub was
// the first to count, and all gaps that the book has of the group. On an error, the caller counts
// by itself, and counted is how many there are.
func (r *Retention) NoteLoss(ctx context.Context, t *streams.Topic, group, consumer string, w Gap) (counted uint64, gaps []BookedGap, err error) {
	if w.Seq <= w.After+1 {
		return 0, nil, nil // a redelivery came late: nothing is in between
	}
	first, err := r.firstLeft(ctx, t, w)
	if err != nil {
		return w.Lost, nil, err
	}
	end := min(first, w.Seq) // what is missing from there on was removed singly
	if end <= w.After+1 {
		return 0, nil, nil
	}
	w.Lost = min(w.Lost, end-w.After-1)
	for {
		book, err := r.lossBook(ctx, t, group)
		if err != nil {
			return w.Lost, nil, err
		}
		if book.Consumer != consumer {
			book.Consumer, book.Order, book.Seq, book.Gaps = consumer, 0, 0, nil
		}
		n, err := r.newlyLost(ctx, t, &book, w, end)
		if err != nil {
			return w.Lost, nil, err
		}
		if n == 0 {
			return 0, book.Gaps, nil
		}
		book.add(w, n)
		err = r.putBook(ctx, lossSubject(t, group), &book, book.revision)
		if errors.Is(err, ErrMoved) && r.Conn.Pause(ctx, bookAgain) == nil {
			continue // another hub notes something at this moment
		}
		if err != nil {
			return n, nil, err
		}
		return n, book.Gaps, nil
	}
}

// bookAgain is the pause before an entry that another hub changes is read again.
const bookAgain = 5 * time.Millisecond

// NoteReturned counts events that the members of a group gave back and that were removed since. It
// returns how many they are, also with an error.
func (r *Retention) NoteReturned(ctx context.Context, t *streams.Topic, group string, seqs []uint64) (n uint64, err error) {
	info, err := r.Conn.FindStream(ctx, t.Stream.Name)
	if err != nil {
		return 0, err
	}
	gone := slices.DeleteFunc(seqs, func(seq uint64) bool { return seq >= info.State.FirstSeq })
	if len(gone) == 0 || !native.StreamMade(info).Equal(t.Stream.Created) {
		return 0, nil
	}
	var purges purgeBook
	if _, err := r.book(ctx, purgeSubject(t.Stream.Name), &purges); err != nil {
		return 0, err
	}
	if purges.Stream.Equal(t.Stream.Created) {
		gone = slices.DeleteFunc(gone, func(seq uint64) bool {
			return slices.ContainsFunc(purges.Purges, func(p purged) bool { return p.From <= seq && seq < p.To })
		})
	}
	if len(gone) == 0 {
		return 0, nil
	}
	n = uint64(len(gone))
	for {
		book, err := r.lossBook(ctx, t, group)
		if err != nil {
			return n, err
		}
		book.Lost += n
		book.AtMS = time.Now().UnixMilli()
		err = r.putBook(ctx, lossSubject(t, group), &book, book.revision)
		if !errors.Is(err, ErrMoved) || r.Conn.Pause(ctx, bookAgain) != nil {
			return n, err
		}
	}
}

// newly is how much of a gap is not in the book yet, and the event after which that begins. end is
// where the gap ends.
func (k *LossBook) newly(w Gap, end uint64) (n, after uint64) {
	switch {
	case w.Seq <= k.Seq:
		return 0, w.After
	case k.Seq <= w.After:
		return w.Lost, w.After
	}
	left := w.Seq - k.Seq - 1 // another hub has seen a delivery in between
	// else a new leader has numbered again, and the numbers say nothing of other hubs
	if w.Order > k.Order {
		left -= min(left, w.Order-k.Order-1)
	}
	return min(w.Lost, left, max(end, k.Seq+1)-k.Seq-1), k.Seq
}

// newlyLost is newly without what operators have purged.
func (r *Retention) newlyLost(ctx context.Context, t *streams.Topic, book *LossBook, w Gap, end uint64) (uint64, error) {
	n, after := book.newly(w, end)
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
func (k *LossBook) add(w Gap, n uint64) {
	k.Order, k.Seq = w.Order, w.Seq
	k.Lost += n
	k.AtMS = time.Now().UnixMilli()
	if len(k.Gaps) >= maxGaps {
		k.Gaps = k.Gaps[len(k.Gaps)-maxGaps+1:]
	}
	k.Gaps = append(k.Gaps, BookedGap{After: w.After, Before: w.Seq, Lost: n, Since: w.Since})
}

// leaderBehind is how long the leader of a stream may show less removed than the server of a
// consumer: replicas remove by age for themselves.
const leaderBehind = 200 * time.Millisecond

// firstLeft is the first sequence that is left in the stream. A leader that has not applied yet
// what another server has is asked again.
func (r *Retention) firstLeft(ctx context.Context, t *streams.Topic, w Gap) (uint64, error) {
	for end := r.Clock.Now() + int64(leaderBehind); ; {
		info, err := r.Conn.FindStream(ctx, t.Stream.Name)
		if err != nil {
			return 0, err
		}
		if !native.StreamMade(info).Equal(t.Stream.Created) {
			return 0, ErrStreamGone
		}
		first, applied := info.State.FirstSeq, info.State.LastSeq >= w.Seq
		if applied && (first > w.After+w.Lost || info.Config.Replicas == 1 || r.Clock.Now() > end) {
			return first, nil
		}
		if err := r.Conn.Pause(ctx, 20*time.Millisecond); err != nil {
			return 0, fmt.Errorf("jetstream: stream %s: its leader is behind: %w", t.Stream.Name, err)
		}
	}
}

// lossBook reads the entry of a group; an empty one if there is none for this stream.
func (r *Retention) lossBook(ctx context.Context, t *streams.Topic, group string) (LossBook, error) {
	var book LossBook
	rev, err := r.book(ctx, lossSubject(t, group), &book)
	if err != nil {
		return LossBook{}, err
	}
	if !book.Stream.Equal(t.Stream.Created) {
		book = LossBook{Stream: t.Stream.Created}
	}
	book.revision = rev
	return book, nil
}

// book reads an entry at the leader, and returns its revision; 0 if there is none. What cannot be
// read counts for nothing.
func (r *Retention) book(ctx context.Context, subject string, into any) (uint64, error) {
	m, err := r.Conn.LastBySubject(ctx, "KV_"+RetentionBucket, subject)
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

// putBook stores an entry that replaces the one of a revision. It returns ErrMoved when
// another was first.
func (r *Retention) putBook(ctx context.Context, subject string, book any, revision uint64) error {
	value, err := json.Marshal(book)
	if err != nil {
		return err
	}
	m := &nats.Msg{Subject: subject, Data: value, Header: nats.Header{natsjs.ExpectedLastSubjSeqHeader: {strconv.FormatUint(revision, 10)}}}
	_, err = r.Conn.Write(ctx, "KV_"+RetentionBucket, m)
	return MovedOr(err)
}

// Losses returns what groups of a topic have lost, by their names.
func (r *Retention) Losses(ctx context.Context, t *streams.Topic, groups iter.Seq[string]) (map[string]LossBook, error) {
	bySubject := make(map[string]string)
	for group := range groups {
		bySubject[lossSubject(t, group)] = group
	}
	lost := make(map[string]LossBook)
	of := []string{"$KV." + RetentionBucket + ".lost." + t.Stream.Name + ".>"}
	_, err := r.Messages.All(ctx, "KV_"+RetentionBucket, time.Time{}, 1, of, func(m *conn.StoredMsg) error {
		group, known := bySubject[m.Subject]
		book := LossBook{}
		if known && unmarshalBook(m, &book) && book.Stream.Equal(t.Stream.Created) {
			lost[group] = book
		}
		return nil
	})
	return lost, err
}

// NotePurge notes that an operator is about to remove the events of a topic before a sequence: they
// are not lost.
func (r *Retention) NotePurge(ctx context.Context, t *streams.Topic, before uint64) error {
	for {
		var book purgeBook
		rev, err := r.book(ctx, purgeSubject(t.Stream.Name), &book)
		if err != nil {
			return err
		}
		if !book.Stream.Equal(t.Stream.Created) {
			book = purgeBook{Stream: t.Stream.Created}
		}
		info, err := r.Conn.FindStream(ctx, t.Stream.Name)
		if err != nil {
			return err
		}
		if len(book.Purges) >= maxPurges {
			book.Purges = book.Purges[len(book.Purges)-maxPurges+1:]
		}
		book.Purges = append(book.Purges, purged{From: info.State.FirstSeq, To: before})
		err = r.putBook(ctx, purgeSubject(t.Stream.Name), &book, rev)
		if !errors.Is(err, ErrMoved) || r.Conn.Pause(ctx, bookAgain) != nil {
			return err
		}
	}
}

func seenSubject(t *streams.Topic, group string) string {
	return "$KV." + RetentionBucket + ".seen." + GroupKey(t, group)
}

// Seen is the note that a group of a topic that rejects has a member now.
func Seen(t *streams.Topic, group string) *nats.Msg { return &nats.Msg{Subject: seenSubject(t, group)} }

// NoteSeen notes that a group of a topic that rejects has a member now.
func (r *Retention) NoteSeen(ctx context.Context, t *streams.Topic, group string) error {
	if _, err := r.Conn.Write(ctx, "KV_"+RetentionBucket, Seen(t, group)); err != nil {
		return fmt.Errorf("jetstream: note that group %q of topic %s has a member: %w", group, t.Name, err)
	}
	return nil
}

// LastSeen returns when a group was last noted to have a member; zero for never.
func (r *Retention) LastSeen(ctx context.Context, t *streams.Topic, group string) (time.Time, error) {
	m, err := r.Conn.LastBySubject(ctx, "KV_"+RetentionBucket, seenSubject(t, group))
	if errors.Is(err, event.ErrNotFound) {
		return time.Time{}, nil
	}
	if err != nil {
		return time.Time{}, err
	}
	return m.Time, nil
}
