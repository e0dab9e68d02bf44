package jetstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
)

// Rates of redrives and discards, in letters a second.
const (
	defaultRedriveRate = 100
	defaultDiscardRate = 1_000
	maxRedriveRate     = 10_000
	// redriveBatch is the most letters that are on their way at a time.
	redriveBatch = 64
	// redriveTries is how often what has no certain outcome is tried for one letter.
	redriveTries = 10
	// redriveWait is how long a redrive waits for others, and redrivesWaiting how many of one
	// client may run or wait.
	redriveWait     = 9 * time.Second
	redrivesWaiting = 16
	// tellEvery is how often progress is told while nothing is selected.
	tellEvery = 5 * time.Second
)

// RedriveOptions configure a redrive or a discard. The zero value puts events back to the group
// that failed.
type RedriveOptions struct {
	// ToTopic publishes the events on their topic, for all groups. Default: each goes to the group
	// that failed only.
	ToTopic bool
	// Rate is the most letters a second: 1..10,000. Default 100 for a redrive, 1,000 for a discard.
	Rate int
	// DryRun only counts.
	DryRun bool
	// Through, if not "", is Redriven.Through of a dry run: letters that came after it stay. It is
	// for a filter with a topic.
	Through string
	// Client is the client that asks, "" for the program itself (Limits.PutBackShare,
	// Limits.Redrives).
	Client string
	// Progress, if not nil, is called after each batch of up to 64 letters, and every 5 s while
	// letters are read that are not selected. It is called in the goroutine of the caller. An error
	// ends the redrive.
	Progress func(Redriven) error
}

// Redriven says what a redrive or a discard has done.
type Redriven struct {
	// Matched is how many letters were selected so far. Each is done, skipped or, in a dry run,
	// counted only.
	Matched int
	// Done is how many events were put back, or letters were discarded.
	Done int
	// Skipped is how many letters stay, and Reasons says why, with the number of letters of each
	// reason: at most 10 reasons.
	Skipped int
	Reasons map[string]int
	// Through, of a dry run with a topic, says where the letters ended (RedriveOptions.Through); ""
	// when the topic never had any.
	Through string
}

// maxSkipReasons bounds Redriven.Reasons. Further ones count as otherReason.
const (
	maxSkipReasons = 10
	otherReason    = "other reasons"
)

func (r *Redriven) skip(why string) {
	r.Skipped++
	if r.Reasons == nil {
		r.Reasons = make(map[string]int)
	}
	if _, ok := r.Reasons[why]; !ok && len(r.Reasons) >= maxSkipReasons {
		why = otherReason
	}
	r.Reasons[why]++
}

// copied is r for the caller to keep.
func (r *Redriven) copied() Redriven {
	c := *r
	c.Reasons = make(map[string]int, len(r.Reasons))
	for why, n := range r.Reasons {
		c.Reasons[why] = n
	}
	return c
}

// redrive is one that runs.
type redrive struct {
	letters *letters
	filter  LetterFilter
	opts    RedriveOptions
	result  Redriven
	act     func(context.Context, []*Letter) error // on a batch

	began  time.Time
	queues map[[2]string]queueOf // of groups, by topic and name
	looked bool                  // for events that an earlier redrive has published
	// charged are the letters of the batch that count for the client's share already.
	charged map[letterRef]bool
}

// Redrive puts the events of the selected letters back, and removes the letters. Letters that come
// meanwhile stay. Payload, key, headers, ts, sid, tags and caused_by are kept.
//
// To the group, an event keeps its id and begins with attempt 1. It is put back once, even if the
// hub dies in the middle and the redrive is repeated, and no other group sees it. It waits until
// the group has a member, and no longer than the group exists. To the topic, an event gets a new
// id, and caused_by names the old one. A redrive to the topic that is repeated after the hub died
// publishes an event once as far as the duplicate window of the topic reaches, or a look at its
// newest 100,000 events.
//
// The letters that are left when ctx ends, or when Redrive returns an error, stay. Errors besides
// those of the filter: ErrNoTopic when filter.Topic does not exist and there are no letters of it;
// ErrNotFound when filter.ID or filter.EventID selects nothing, or when filter.Topic and
// filter.Group name a group that does not exist; overloaded and rate_limited when
// a limit is reached (Limits.PutBack). The result is valid with an error, too.
func (d DeadLetters) Redrive(ctx context.Context, filter LetterFilter, opts RedriveOptions) (Redriven, error) {
	r := &redrive{letters: d.letters, filter: filter, opts: opts, queues: make(map[[2]string]queueOf)}
	r.act = r.toGroups
	if opts.ToTopic {
		r.act = r.toTopics
	}
	if !opts.DryRun {
		leave, err := d.letters.backups.enter()
		if err != nil {
			return Redriven{}, err
		}
		defer leave()
	}
	return r.run(ctx, defaultRedriveRate)
}

// Discard removes the selected letters for good, those that cannot be read included. Letters that
// come meanwhile stay. Errors are those of Redrive, but for those about groups.
func (d DeadLetters) Discard(ctx context.Context, filter LetterFilter, opts RedriveOptions) (Redriven, error) {
	r := &redrive{letters: d.letters, filter: filter, opts: opts}
	r.act = r.discard
	return r.run(ctx, defaultDiscardRate)
}

// enterRedrives waits for a place for something that reads many letters.
func (d *letters) enterRedrives(ctx context.Context, client string) (leave func(), err error) {
	waiting, cancel := context.WithTimeout(ctx, redriveWait)
	defer cancel()
	if !d.redrives.Enter(waiting, client, redrivesWaiting, func() { d.obs.LimitReached("redrives") }) {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		return nil, &event.Error{Code: event.CodeOverloaded, Msg: "too many redrives, discards and counts of dead letters run on this hub: try again later"}
	}
	return func() { d.redrives.Leave(client) }, nil
}

func (r *redrive) run(ctx context.Context, rate int) (Redriven, error) {
	d := r.letters
	if err := r.filter.validate(); err != nil {
		return Redriven{}, err
	}
	if r.opts.Rate < 0 || r.opts.Rate > maxRedriveRate {
		return Redriven{}, event.BadOptions("rate is %d: 1 to %d letters a second are allowed", r.opts.Rate, maxRedriveRate)
	}
	r.opts.Rate = cmp.Or(r.opts.Rate, rate)
	if r.queues != nil && !r.opts.ToTopic && r.filter.Topic != "" && r.filter.Group != "" {
		if err := r.groupExists(ctx); err != nil {
			return Redriven{}, err
		}
	}
	leave, err := d.enterRedrives(ctx, r.opts.Client)
	if err != nil {
		return Redriven{}, err
	}
	defer leave()
	streams, err := d.letterStreams(ctx, &r.filter)
	if err != nil {
		return Redriven{}, err
	}
	if err := r.bound(streams); err != nil {
		return Redriven{}, err
	}
	r.began = time.Now()
	for i := range streams {
		if err := r.stream(ctx, &streams[i]); err != nil {
			return r.result.copied(), err
		}
	}
	if r.result.Matched > 0 {
		return r.result.copied(), nil
	}
	if r.filter.Topic != "" {
		if _, _, err := d.streams.FreshExisting(ctx, r.filter.Topic); err != nil {
			if errors.Is(err, event.ErrNotFound) {
				err = event.ErrNoTopic
			}
			return r.result.copied(), err
		}
	}
	if r.filter.ID != "" || r.filter.EventID != "" {
		return r.result.copied(), event.ErrNotFound
	}
	return r.result.copied(), nil
}

// bound ends the letters of a topic where those of a dry run ended, or notes where they end.
func (r *redrive) bound(streams []letterStream) error {
	if r.filter.Topic == "" {
		if r.opts.Through != "" {
			return event.BadOptions("through goes with a topic")
		}
		return nil
	}
	var through streamCursor
	if r.opts.Through != "" {
		var ok bool
		if through, ok = parseStreamCursor(r.opts.Through); !ok {
			return event.BadOptions("through is not that of a dry run: leave it out")
		}
		if len(streams) == 0 {
			return errChanged
		}
	}
	for i := range streams { // one at most
		s := &streams[i]
		if r.opts.DryRun {
			r.result.Through = streamCursor{Stream: s.name, Created: s.created.UnixNano(), Next: s.last + 1}.String()
		}
		if r.opts.Through == "" {
			continue
		}
		if s.name != through.Stream || s.created.UnixNano() != through.Created {
			return errChanged
		}
		s.last = min(s.last, through.Next-1)
	}
	return nil
}

// errChanged refuses to remove something that a dry run has not shown.
var errChanged = &event.Error{Code: event.CodeBadOptions, Msg: "the stream was created again since the dry run: repeat the dry run"}

// groupExists returns ErrNotFound when the one group of the filter does not exist.
func (r *redrive) groupExists(ctx context.Context) error {
	d := r.letters
	t, _, err := d.streams.FreshExisting(ctx, r.filter.Topic)
	if err != nil {
		return err
	}
	ptr, err := d.records.Generation(ctx, t, r.filter.Group)
	if err != nil {
		return d.conn.Unavailable(err)
	}
	if _, err = d.records.GroupConsumer(ctx, t, &ptr); err == nil {
		return nil
	}
	if !gone(err) {
		return d.conn.Unavailable(err)
	}
	alive, err := d.queues.waitsForServer(ctx, t, r.filter.Group, &ptr)
	if err != nil {
		return d.conn.Unavailable(err)
	}
	if !alive {
		return event.ErrNotFound
	}
	return nil
}

// stream redrives the letters of a stream, batch by batch.
func (r *redrive) stream(ctx context.Context, s *letterStream) error {
	var batch []*Letter
	told := time.Now()
	size := min(redriveBatch, max(r.opts.Rate/10, 1))
	flush := func() error {
		if len(batch) == 0 {
			return nil
		}
		if !r.opts.DryRun {
			if err := r.act(ctx, batch); err != nil {
				return err
			}
		}
		clear(batch)
		batch = batch[:0]
		told = time.Now()
		if err := r.tell(); err != nil {
			return err
		}
		if r.opts.DryRun {
			return nil
		}
		// The rate holds over all of the redrive.
		due := r.began.Add(time.Duration(float64(r.result.Matched) / float64(r.opts.Rate) * float64(time.Second)))
		select {
		case <-time.After(time.Until(due)):
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-r.letters.conn.Ctx.Done():
			return event.ErrClosed
		}
	}
	// While the rate lets the reader wait for long, the server forgets it, and it begins again.
	err := r.letters.eachLetter(ctx, s, 1, &r.filter, func(l *Letter, _ *conn.StoredMsg) error {
		if !r.filter.selects(l) {
			if time.Since(told) < tellEvery {
				return nil
			}
			told = time.Now()
			return r.tell()
		}
		r.result.Matched++
		if batch = append(batch, l); len(batch) < size {
			return nil
		}
		return flush()
	})
	if err != nil {
		return err
	}
	return flush()
}

// tell reports the progress.
func (r *redrive) tell() error {
	if r.opts.Progress == nil {
		return nil
	}
	return r.opts.Progress(r.result.copied())
}

// current reads a letter at the leader of its stream. It returns nil when the letter is gone.
func (r *redrive) current(ctx context.Context, l *Letter) (*Letter, error) {
	m, err := r.letters.conn.GetMsg(ctx, l.Stream, map[string]any{"seq": l.Sequence})
	if errors.Is(err, event.ErrNotFound) || err == nil && m.Time.UnixNano() != l.StoredAt {
		return nil, nil //nolint:nilnil // it is gone
	}
	if err != nil {
		return nil, r.letters.conn.Unavailable(err)
	}
	return readLetter(l.Stream, m), nil
}

// each calls f for the letters of a batch, several at a time.
func each(letters []*Letter, f func(i int, l *Letter)) {
	var wg sync.WaitGroup
	for i, l := range letters {
		wg.Go(func() { f(i, l) })
	}
	wg.Wait()
}

// discard removes letters.
func (r *redrive) discard(ctx context.Context, batch []*Letter) error {
	errs := make([]error, len(batch))
	each(batch, func(i int, l *Letter) { errs[i] = r.remove(ctx, l) })
	for _, err := range errs {
		if err != nil {
			return r.letters.conn.Unavailable(err)
		}
		r.result.Done++
	}
	return nil
}

// remove removes a letter; one that is gone is no error.
func (r *redrive) remove(ctx context.Context, l *Letter) error {
	now, err := r.current(ctx, l)
	if err != nil || now == nil {
		return err
	}
	return r.letters.conn.RemoveMsg(ctx, l.Stream, l.Sequence)
}

// prepare is the letter as it is to be put back: with the payload. The reason is for a letter that
// stays.
func (r *redrive) prepare(ctx context.Context, l *Letter) (_ *letter, why string, err error) {
	if l.Fault != "" {
		return nil, "this is no dead letter of a hub: " + l.Fault, nil
	}
	out := &letter{
		ref: l.ref(), topic: l.Topic, group: l.Group, event: l.Event,
		origin: originRef{stream: l.Event.Stream, seq: l.Event.Sequence, storedAt: l.Event.StoredAt, tombstone: l.Event.Tombstone},
	}
	if l.Bare {
		const lost = "the dead letter does not have the payload, which its topic does not have any more"
		t, _, err := r.letters.streams.FreshExisting(ctx, l.Topic)
		if errors.Is(err, event.ErrNotFound) || err == nil && t.Stream.Name != l.Event.Stream {
			return nil, lost, nil
		}
		if err != nil {
			return nil, "", err
		}
		m, err := r.letters.conn.GetMsg(ctx, t.Stream.Name, map[string]any{"seq": l.Event.Sequence})
		if errors.Is(err, event.ErrNotFound) || err == nil && (subjectTopic(m.Subject) != l.Topic || m.Time.UnixNano() != l.Event.StoredAt) {
			return nil, lost, nil
		}
		if err != nil {
			return nil, "", r.letters.conn.Unavailable(err)
		}
		out.event.Payload = m.Data
	}
	out.size = len(out.event.Payload) + deadOverhead
	if r.opts.Client != "" && !r.charged[out.ref] {
		if wait := r.letters.putBackShares.TakeN(r.opts.Client, out.size); wait > 0 {
			r.letters.obs.LimitReached("put_back_share")
			return nil, "", &event.Error{Code: event.CodeRateLimited, Msg: fmt.Sprintf("you have put back as many bytes as one client may, which is %d in 30 days: the other letters stay", r.letters.limits.PutBackShare)}
		}
		if r.charged != nil {
			r.charged[out.ref] = true
		}
	}
	return out, "", nil
}
