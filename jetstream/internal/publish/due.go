package publish

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// dueConsumer is the consumer through which all hubs take events that are due.
const dueConsumer = "due"

// MetaDue marks that consumer for endOldLeases.
const MetaDue = "eventhub.due"

const (
	// dueLook is how often a hub looks for the stream of delayed events, which another may have
	// made. It bounds how late events are if the hub that made the stream fails.
	dueLook = 5 * time.Second
	// dueAgain is how long a hub waits after a failure.
	dueAgain = time.Second
	// DueBatch and dueBytes bound what a hub takes at a time, and dueWaits how long it waits for
	// it.
	DueBatch = 256
	dueBytes = 8 << 20
	dueWaits = 10 * time.Second
	// dueAckPending is how many events may be in the hands of hubs, those included that wait for
	// another try. Beyond that, no event that is due is delivered, so it is far above the limit of
	// a client.
	dueAckPending = 1 << 17
	// DueRetry is how long an event waits that could not be stored, doubled with each attempt up to
	// dueRetryMax.
	DueRetry    = time.Second
	dueRetryMax = time.Minute
	// dueAttempts is how often a topic must have refused an event for what it is before the event
	// becomes a dead letter. dueLetters is how many of those are stored at a time.
	dueAttempts = 5
	dueLetters  = 16
	// dueBefore bounds what is read of a topic to find what a hub that failed has stored.
	dueBefore = 500_000
	// dueSkew is by how much clocks of the servers of a cluster may differ.
	dueSkew = 10 * time.Second
	// dueGauge is how often the waiting events are counted.
	dueGauge = 10 * time.Second
	// dueEnd is how long the end of a hub waits for answers.
	dueEnd = 3 * time.Second
)

// run stores events that are due in their topics, until the bus closes.
func (k *schedules) run() {
	p := k.shared
	tick := time.NewTicker(dueLook)
	defer tick.Stop()
	for p.Conn.Ctx.Err() == nil {
		again := tick.C
		s, err := k.open(p.Conn.Ctx, false)
		if err == nil {
			err = k.serve(p.Conn.Ctx, s)
		}
		if !errors.Is(err, event.ErrNotFound) && !errors.Is(err, errNoSchedules) {
			if err != nil && p.Conn.Ctx.Err() == nil {
				p.Often.Log(p.Conn.Ctx, slog.LevelWarn, "failed to receive delayed events that are due; retrying", "", slog.Any("error", err))
			}
			again = time.After(dueAgain)
		}
		select {
		case <-p.Conn.Ctx.Done():
		case <-k.found:
		case <-again:
		}
	}
}

// dueReader takes events that are due from the consumer.
type dueReader struct {
	*schedules
	link  *conn.Link
	inbox string // of pulls, before their numbers
	pulls uint64
	came  chan *nats.Msg // has room for all that was asked for
	// began is the last sequence of the stream when this hub began, or began again, to read.
	// Messages up to it may have been stored in their topics by a hub that failed.
	began uint64
	// oldest is when the oldest of those became due, and before has the ids that topics had since.
	oldest time.Time
	before map[string]map[string]bool
	// cancelled has the sequence of each cancellation up to the sequence seen.
	cancelled map[string]cancellation
	seen      uint64
	counted   int64 // when the waiting events were counted
	full      fullTopics
}

// fullTopics are the topics that were full when an event of theirs was due. Until the time at which
// that event is tried again, no other of the topic is tried: thousands of them would hold up the
// events of other topics.
type fullTopics struct {
	mu    sync.Mutex
	until map[string]int64
}

// wait is how long the events of a topic wait, from now on.
func (f *fullTopics) wait(topic string, now int64) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	return time.Duration(max(f.until[topic]-now, 0))
}

// found notes that a topic is full. It reports false if that is known.
func (f *fullTopics) found(topic string, now int64, wait time.Duration) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.until[topic] > now {
		return false
	}
	maps.DeleteFunc(f.until, func(_ string, until int64) bool { return until <= now })
	f.until[topic] = now + int64(wait)
	return true
}

type cancellation struct {
	seq uint64
	at  time.Time
}

// serve reads until ctx ends or something fails.
func (k *schedules) serve(ctx context.Context, s *streams.Stream) error {
	p := k.shared
	_, err := p.Conn.JS.CreateOrUpdateConsumer(ctx, DelayedStream, natsjs.ConsumerConfig{
		Durable: dueConsumer, FilterSubject: duePrefix + ">", AckPolicy: natsjs.AckExplicitPolicy, AckWait: p.AckWait,
		MaxAckPending: dueAckPending, MaxDeliver: -1, Metadata: map[string]string{MetaDue: "1"},
	})
	var info *natsjs.StreamInfo
	if err == nil {
		info, err = p.Conn.FindStream(ctx, DelayedStream)
	}
	if errors.Is(err, natsjs.ErrStreamNotFound) || errors.Is(err, event.ErrNotFound) {
		k.forget(s)
	}
	if err != nil {
		return err
	}
	r := &dueReader{schedules: k, link: p.Conn.Links[0], came: make(chan *nats.Msg, 2*DueBatch), began: info.State.LastSeq, cancelled: make(map[string]cancellation), before: make(map[string]map[string]bool), full: fullTopics{until: make(map[string]int64)}, counted: p.Clock.Now() - int64(dueGauge)}
	switch first, err := p.Conn.GetMsg(ctx, DelayedStream, map[string]any{"next_by_subj": duePrefix + ">", "seq": 1}); {
	case err == nil:
		r.oldest = first.Time
	case !errors.Is(err, event.ErrNotFound):
		return err
	}
	r.inbox = nats.NewInbox() + "."
	sub, err := r.link.NC.ChanSubscribe(r.inbox+"*", r.came)
	if err != nil {
		return err
	}
	defer func() {
		_ = sub.Unsubscribe() // it fails where the connection is closed
		r.giveBack()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dueEnd)
		defer cancel()
		_ = k.out.Flush(ctx) // what is not acknowledged comes again
	}()
	cuts := r.link.Cuts.Load()
	for {
		r.gauge(ctx)
		err := r.pull(ctx)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			return err
		case r.link.Cuts.Load() != cuts:
			return conn.ErrCut
		}
	}
}

// gauge reports how many events wait.
func (r *dueReader) gauge(ctx context.Context) {
	p := r.shared
	if now := p.Clock.Now(); now-r.counted >= int64(dueGauge) {
		r.counted = now
		if n, err := r.count(ctx, waitPrefix+">"); err == nil {
			p.Obs.Gauge(event.GaugeDelayed, float64(n))
		}
	}
}

// giveBack gives back what has come and was not begun.
func (r *dueReader) giveBack() {
	for {
		select {
		case m := <-r.came:
			if _, ok := conn.ParseAckSubject(m.Reply); ok {
				r.settle(m.Reply, conn.NakNow)
			}
		default:
			return
		}
	}
}

// settle sends a settlement. One that is lost only makes the event come again.
func (r *dueReader) settle(reply string, how []byte) { _ = r.link.NC.Publish(reply, how) }

// pull asks for events and stores them until the request has ended.
func (r *dueReader) pull(ctx context.Context) error {
	p := r.shared
	most := max(dueBytes, int(r.link.NC.MaxPayload())+event.PayloadMargin) // an event always fits
	req, err := json.Marshal(map[string]any{"batch": DueBatch, "max_bytes": most, "expires": dueWaits, "idle_heartbeat": dueWaits / 4})
	if err != nil {
		return err
	}
	r.pulls++
	inbox := r.inbox + strconv.FormatUint(r.pulls, 36) // what ends a pull names it
	if err := r.link.NC.PublishMsg(&nats.Msg{Subject: p.Conn.API + "CONSUMER.MSG.NEXT." + DelayedStream + "." + dueConsumer, Reply: inbox, Data: req}); err != nil {
		return err
	}
	silence := time.NewTimer(dueWaits)
	defer silence.Stop()
	var events []dueEvent
	for ended, came := false, 0; !ended; {
		var m *nats.Msg
		select {
		case m = <-r.came:
		case <-ctx.Done():
			return nil
		case <-silence.C:
			return conn.ErrNoReply
		}
		silence.Reset(dueWaits)
		events = events[:0]
		for m != nil {
			if meta, ok := conn.ParseAckSubject(m.Reply); ok {
				came++
				ended = came == DueBatch
				events = append(events, dueEvent{msg: m, meta: meta})
			} else if status := m.Header.Get("Status"); status != "100" && m.Subject == inbox {
				if ended = true; came == 0 && (status == "409" || status == "503") {
					err = fmt.Errorf("jetstream: the consumer of delayed events ended: %s", m.Header.Get("Description"))
				}
			}
			m = nil
			if !ended {
				select {
				case m = <-r.came:
				default:
				}
			}
		}
		events = slices.DeleteFunc(events, r.waitsForRoom)
		if len(events) > 0 {
			if err := r.take(ctx, events); err != nil {
				for _, e := range events {
					if !e.begun {
						r.settle(e.msg.Reply, conn.NakNow)
					}
				}
				return err
			}
			silence.Reset(dueWaits)
		}
	}
	return err
}

// dueEvent is an event that is due.
type dueEvent struct {
	msg   *nats.Msg
	meta  conn.DeliveryMeta
	begun bool
}

// options are those with which the event was published, and its topic. It returns false for a
// message that no hub has stored.
func (e *dueEvent) options() (topic string, opts Options, ok bool) {
	h := e.msg.Header
	subject := h.Get(headerTarget)
	topic, key, _ := native.ParseSubject(subject)
	if topic == "" || h[headerID] == nil {
		return "", opts, false
	}
	var was event.Event
	was.ReadHeader(h)
	opts = Options{
		ID: was.ID, Key: key, SID: was.SID, Headers: was.Headers, Tags: was.Tags, CausedBy: was.CausedBy, Tombstone: was.Tombstone,
		TS: was.TS, HasTS: h[headerTS] != nil,
	}
	return topic, opts, true
}

// take stores events in their topics, except those that were cancelled or are stored already. An
// error means that the rest was not begun.
func (r *dueReader) take(ctx context.Context, events []dueEvent) error {
	p := r.shared
	if err := r.readCancelled(ctx); err != nil {
		return err
	}
	if p.Clock.Stalled(p.Clock.Now()) {
		return conn.ErrStalled // others may have the events by now
	}
	if first := &events[0].meta; first.Delivered <= 1 && first.StreamSeq > r.began {
		clear(r.before) // the consumer is beyond those events
	}
	stored, err := r.lookUp(ctx, events)
	if err != nil {
		return err
	}
	for i := range events {
		e := &events[i]
		if ctx.Err() != nil {
			return ctx.Err()
		}
		topic, opts, ok := e.options()
		switch mark := e.msg.Header.Get(headerScheduleID); {
		case !ok:
			p.Often.Log(ctx, slog.LevelWarn, "a message among delayed events is none; it is removed", "", slog.String("subject", e.msg.Subject))
			r.settle(e.msg.Reply, conn.AckNow)
		case r.isCancelled(mark, e.meta.StreamSeq):
			if _, err := r.mark(ctx, cancelledPrefix+mark, true); err != nil {
				return err
			}
			r.settle(e.msg.Reply, conn.AckNow)
		case stored[i]:
			r.settle(e.msg.Reply, conn.AckNow)
		default:
			r.store(ctx, e, topic, opts)
		}
		e.begun = true
	}
	return nil
}

// waitsForRoom gives an event back until its topic, which was full, is tried again. It reports
// false for events of other topics.
func (r *dueReader) waitsForRoom(e dueEvent) bool {
	topic, _, _ := native.ParseSubject(e.msg.Header.Get(headerTarget))
	wait := r.full.wait(topic, r.shared.Clock.Now())
	if wait > 0 {
		r.settle(e.msg.Reply, conn.NakAfter(wait))
	}
	return wait > 0
}

// store publishes an event to its topic, and settles it when that is confirmed.
func (r *dueReader) store(ctx context.Context, e *dueEvent, topic string, opts Options) {
	shared, due, reply, delivered := r.shared, *e, e.msg.Reply, e.meta.Delivered
	done := func(_ event.Receipt, err error) {
		if err == nil {
			r.settle(reply, conn.AckNow)
			return
		}
		if delivered >= dueAttempts && hopeless(err) && r.bury(ctx, &due, topic, &opts, err) {
			return
		}
		wait := min(shared.DueRetry<<min(max(delivered-1, 0), 10), dueRetryMax)
		known := false
		if refused, ok := errors.AsType[*event.Error](err); ok && refused.Code == event.CodeTopicFull {
			known = !r.full.found(topic, shared.Clock.Now(), wait)
		}
		if !known {
			shared.Often.Log(ctx, slog.LevelWarn, "failed to store a delayed event that is due; retrying", topic, slog.String("topic", topic), slog.String("id", opts.ID), slog.Duration("wait", wait), slog.Any("error", err))
		}
		r.settle(reply, conn.NakAfter(wait))
	}
	t, err := shared.Streams.Topic(ctx, topic, "")
	if err == nil {
		err = r.out.send(ctx, t, &outgoing{Options: opts, payload: e.msg.Data}, done)
	}
	if err != nil {
		done(event.Receipt{}, err)
	}
}

// DelayedGroup is the group that dead letters of delayed events name: no group has had them.
const DelayedGroup = "eventhub-delayed"

// hopeless reports that an event was refused for what it is, or that its topic cannot be: the next
// try fails too, unless somebody changes the topic. A topic that is full is none of these.
func hopeless(err error) bool {
	if refused, ok := errors.AsType[*conn.APIError](err); ok {
		return refused.Code == conn.CodeRefused && !streams.StoreFull(refused.ErrCode, refused.Description)
	}
	known, ok := errors.AsType[*event.Error](err)
	return ok && (known.Code == event.CodeBadTopic || known.Code == event.CodeBadOptions || conn.TooLarge(err))
}

// bury makes a dead letter of an event that its topic refuses, and then settles it. It does not
// block. It reports whether it has begun to; otherwise, as when the letter cannot be stored, the
// event is tried again.
func (r *dueReader) bury(ctx context.Context, e *dueEvent, topic string, opts *Options, refused error) bool {
	p := r.shared
	select {
	case r.letters <- struct{}{}:
	default:
		return false
	}
	// letters have none of their own
	if p.Conn.Closing() || strings.HasPrefix(topic, native.DeadLetterPrefix) {
		<-r.letters
		return false
	}
	p.Conn.Apart(func() {
		defer func() { <-r.letters }()
		ctx, cancel := context.WithTimeout(ctx, conn.PublishWait)
		defer cancel()
		ts := time.Unix(0, e.meta.StoredAt)
		original := &event.Event{
			ID: opts.ID, TS: opts.TS, Topic: topic, Key: opts.Key, SID: opts.SID, Headers: opts.Headers, CausedBy: opts.CausedBy, Tags: opts.Tags,
			Tombstone: opts.Tombstone, Payload: e.msg.Data, Stream: DelayedStream, Sequence: e.meta.StreamSeq, StoredAt: e.meta.StoredAt,
		}
		if !opts.HasTS {
			original.TS = ts.UnixMilli()
		}
		sum := sha256.Sum256([]byte(DelayedStream + " " + e.msg.Header.Get(headerScheduleID)))
		err := p.Hooks.Bury(ctx, original, reasonOf(refused), e.meta.Delivered, "dlq:"+hex.EncodeToString(sum[:16]))
		if err != nil {
			p.Often.Log(ctx, slog.LevelWarn, "failed to store the dead letter of a delayed event; retrying", topic, slog.String("topic", topic), slog.String("id", opts.ID), slog.Duration("wait", dueRetryMax), slog.Any("error", err))
			r.settle(e.msg.Reply, conn.NakAfter(dueRetryMax))
			return
		}
		r.settle(e.msg.Reply, conn.AckNow)
		o := p.Obs.Group(topic, DelayedGroup, false)
		o.Settled(event.DeadLettered, 0, max(time.Since(ts), 0))
		o.Close()
	})
	return true
}

// reasonOf is why a topic refused an event, for its dead letter.
func reasonOf(err error) string {
	reason := "the delayed event could not be stored in its topic"
	if known, ok := errors.AsType[*event.Error](err); ok {
		reason += ": " + known.Msg
	}
	if refused, ok := errors.AsType[*conn.APIError](err); ok {
		reason += " (" + refused.Description + ")"
	}
	return reason
}

// readCancelled reads the cancellations at the leader that lie before the events at hand.
func (r *dueReader) readCancelled(ctx context.Context) error {
	for mark, c := range r.cancelled {
		if time.Since(c.at) > cancelledAge {
			delete(r.cancelled, mark)
		}
	}
	for {
		m, err := r.shared.Conn.GetMsg(ctx, DelayedStream, map[string]any{"next_by_subj": cancelledPrefix + ">", "seq": r.seen + 1})
		if errors.Is(err, event.ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		r.seen = m.Seq
		mark := m.Subject[len(cancelledPrefix):]
		if _, met := r.cancelled[mark]; !met {
			r.cancelled[mark] = cancellation{seq: m.Seq, at: time.Now()}
		}
	}
}

func (r *dueReader) isCancelled(mark string, seq uint64) bool {
	c, ok := r.cancelled[mark]
	return ok && c.seq < seq
}

// storedBefore returns the ids of the events that a topic had when this hub first asked, from the
// time at which the oldest event became due that was due when this hub began to read. They are read
// once, because many events may have been due: a search for each batch would read the same events
// again and again.
func (r *dueReader) storedBefore(ctx context.Context, topic string) (map[string]bool, error) {
	if ids, ok := r.before[topic]; ok {
		return ids, nil
	}
	p := r.shared
	ids := make(map[string]bool)
	t, _, err := p.Streams.FreshExisting(ctx, topic)
	if err == nil {
		since := streams.Farthest(r.oldest.Add(-dueSkew))
		err = p.Hooks.EachID(ctx, t, since, dueBefore, func(id string) { ids[id] = true })
	}
	if err != nil && !errors.Is(err, event.ErrNotFound) {
		return nil, err
	}
	if len(ids) >= dueBefore {
		p.Often.Log(ctx, slog.LevelWarn, "could not look up all delayed events that may be stored already; the duplicate window decides", topic, slog.String("topic", topic))
	}
	r.before[topic] = ids
	return ids, nil
}

// lookUp reports which events are stored in their topics already, by their index. Only those are
// looked for that another hub, or this one before a failure, may have had.
func (r *dueReader) lookUp(ctx context.Context, events []dueEvent) (map[int]bool, error) {
	type search struct {
		since time.Time
		ids   []string
		index map[string][]int
	}
	var searches map[string]*search
	stored := make(map[int]bool)
	for i := range events {
		e := &events[i]
		if e.meta.Delivered <= 1 && e.meta.StreamSeq > r.began {
			continue
		}
		topic, opts, ok := e.options()
		if !ok {
			continue
		}
		if e.meta.Delivered <= 1 {
			before, err := r.storedBefore(ctx, topic)
			if err != nil {
				return nil, err
			}
			stored[i] = before[opts.ID]
			continue
		}
		since := time.Unix(0, e.meta.StoredAt).Add(-dueSkew)
		s := searches[topic]
		if s == nil {
			if searches == nil {
				searches = make(map[string]*search)
			}
			s = &search{since: since, index: make(map[string][]int)}
			searches[topic] = s
		}
		if since.Before(s.since) {
			s.since = since
		}
		if s.index[opts.ID] == nil {
			s.ids = append(s.ids, opts.ID)
		}
		s.index[opts.ID] = append(s.index[opts.ID], i)
	}
	for topic, s := range searches {
		found, complete, err := r.shared.Hooks.StoredIDs(ctx, topic, s.ids, s.since)
		if err != nil {
			return nil, err
		}
		if !complete {
			r.shared.Often.Log(ctx, slog.LevelWarn, "could not look up all delayed events that may be stored already; the duplicate window decides", topic, slog.String("topic", topic))
		}
		for id, indexes := range s.index {
			for _, i := range indexes {
				stored[i] = found[id]
			}
		}
	}
	return stored, nil
}
