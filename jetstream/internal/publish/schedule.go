package publish

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync/atomic"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// Delayed events wait in a stream of their own, one message schedule each. When a schedule is due,
// the server stores its message under the target, which lies in the same stream, and removes the
// schedule; a hub then publishes the message to its topic (see due.go). The stream has no bounds,
// because a bound would drop events: the hub refuses events instead.
const (
	DelayedStream = "eventhub_delayed"
	delayedPrefix = "eventhub.delayed."
	// waitPrefix.<client>.<topic>.<id> is an event that waits.
	waitPrefix = delayedPrefix + "wait."
	// duePrefix.<client>.<topic>.<id> is an event that is due.
	duePrefix = delayedPrefix + "due."
	// cancelledPrefix.<schedule> says that an event was cancelled. It counts for events that became
	// due after it.
	cancelledPrefix = delayedPrefix + "cancelled."
)

// Headers of the messages in that stream, beside those that the event will have.
const (
	headerSchedule       = "Nats-Schedule"
	headerScheduleTarget = "Nats-Schedule-Target"
	headerExpectSubject  = "Nats-Expected-Last-Subject-Sequence-Subject"
	headerTTL            = "Nats-TTL"
	headerScheduleID     = "Event-Schedule" // tells schedules of the same event id from each other
	headerTarget         = "Event-Subject"  // subject of the event in the stream of its topic
	headerDropped        = "Event-Dropped"  // of a cancellation that a due event met
)

// cancelledAge is how long a cancellation is kept: longer than a due event can be on its way to
// being stored.
const cancelledAge = 10 * time.Minute

// Bounds of what the hub remembers about who has delayed events.
const (
	delayedClients = 10_000
	delayedLook    = time.Second // between two counts of a client that is at its limit
)

// errNoSchedules is the refusal where the server has no message schedules.
var errNoSchedules = event.BadOptions("opts.delay_ms and opts.at need message schedules, which this NATS server does not have: use nats-server 2.12 or newer")

// schedules is the stream of delayed events as this hub knows it.
type schedules struct {
	shared *Publishers
	lock   chan struct{} // held while the stream is looked for or made
	stream atomic.Pointer[streams.Stream]
	none   int64         // when the server had no schedules; 0 if never. Under lock.
	found  chan struct{} // has a value when the stream was found
	places *lru.Cache[string, *delayPlaces]
	out    *Publisher // of events that are due
	// letters has an entry for each dead letter of a due event that is being stored.
	letters chan struct{}
}

func newSchedules(p *Publishers) *schedules {
	places, _ := lru.New[string, *delayPlaces](delayedClients) // it fails for sizes below 1
	return &schedules{shared: p, lock: make(chan struct{}, 1), found: make(chan struct{}, 1), places: places, letters: make(chan struct{}, dueLetters)}
}

func scheduleConfig(cfg *Config) natsjs.StreamConfig {
	c := natsjs.StreamConfig{
		Name:        DelayedStream,
		Description: "eventhub: delayed events",
		Subjects:    []string{delayedPrefix + ">"},
		// what is settled goes; only due events are ever read
		Retention:         natsjs.WorkQueuePolicy,
		Discard:           natsjs.DiscardOld,
		MaxMsgs:           -1,
		MaxBytes:          -1,
		MaxMsgSize:        -1,
		MaxConsumers:      -1,
		Replicas:          cfg.Replicas,
		AllowDirect:       true,
		AllowMsgTTL:       true,
		AllowMsgSchedules: true,
	}
	if cfg.Memory {
		c.Storage = natsjs.MemoryStorage
	}
	return c
}

// open returns the stream, and makes it if create is set. It returns ErrNotFound otherwise.
func (k *schedules) open(ctx context.Context, create bool) (*streams.Stream, error) {
	if s := k.stream.Load(); s != nil {
		return s, nil
	}
	select {
	case k.lock <- struct{}{}:
		defer func() { <-k.lock }()
	case <-ctx.Done():
		return nil, k.shared.Conn.Unavailable(ctx.Err())
	}
	if s := k.stream.Load(); s != nil {
		return s, nil
	}
	p := k.shared
	if k.none != 0 && p.Clock.Now()-k.none < int64(time.Minute) {
		return nil, errNoSchedules
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), conn.PublishWait)
	defer cancel()
	info, err := p.Conn.FindStream(ctx, DelayedStream)
	made := false
	if errors.Is(err, event.ErrNotFound) && create {
		info, made, err = k.create(ctx)
	}
	if errors.Is(err, event.ErrNotFound) {
		return nil, err
	}
	if err != nil {
		return nil, p.Conn.Unavailable(err)
	}
	if !info.Config.AllowMsgSchedules {
		if made { // by a server that ignores the setting
			if err := p.Conn.JS.DeleteStream(ctx, DelayedStream); err != nil {
				p.Log.WarnContext(ctx, "failed to remove a stream that is of no use: the NATS server has no message schedules", slog.String("stream", DelayedStream), slog.Any("error", err))
			}
		}
		k.none = p.Clock.Now()
		return nil, errNoSchedules
	}
	s := &streams.Stream{Name: DelayedStream, Family: true, Created: native.StreamMade(info), Slots: make(chan struct{}, p.Limits.PublishInFlight), Ready: make([]atomic.Bool, len(p.Conn.Links)), Headroom: p.Streams.Headrooms.Of(info.Config.Storage), Copies: int64(max(info.Config.Replicas, 1))}
	k.stream.Store(s)
	select {
	case k.found <- struct{}{}:
	default:
	}
	return s, nil
}

func (k *schedules) create(ctx context.Context) (info *natsjs.StreamInfo, made bool, err error) {
	p := k.shared
	if err := p.Streams.AwaitGone(ctx, DelayedStream); err != nil {
		return nil, false, err
	}
	s, err := p.Conn.JS.CreateStream(ctx, scheduleConfig(&p.Config))
	if errors.Is(err, natsjs.ErrStreamNameAlreadyInUse) {
		info, err = p.Conn.FindStream(ctx, DelayedStream)
		return info, false, err
	}
	if err != nil {
		return nil, false, fmt.Errorf("jetstream: create stream %s: %w", DelayedStream, err)
	}
	return s.CachedInfo(), true, nil
}

// forget drops what is known of a stream that is gone, so that the next use looks again.
func (k *schedules) forget(s *streams.Stream) {
	if k.stream.CompareAndSwap(s, nil) {
		p := k.shared
		p.Streams.Missing(s.Name)
	}
}

// delayPlaces counts the delayed events of a client, or of all, without asking the server each
// time.
type delayPlaces struct {
	lock    chan struct{} // held while the server is asked; guards the rest
	left    int           // how many more are allowed before the server is asked again
	asked   int64         // when that was
	sending atomic.Int64  // unanswered, so perhaps not counted by the server
}

// take counts one event, or returns how many wait if that is as many as are allowed.
//
// Events that are due count, too: those whose topic is full or refuses them stay in the stream.
func (k *schedules) take(ctx context.Context, p *delayPlaces, filter string, limit int) (full bool, err error) {
	select {
	case p.lock <- struct{}{}:
		defer func() { <-p.lock }()
	case <-ctx.Done():
		return false, k.shared.Conn.Unavailable(ctx.Err())
	}
	if p.left <= 0 {
		now := k.shared.Clock.Now()
		if p.asked != 0 && p.left < 0 && now-p.asked < int64(delayedLook) {
			return true, nil
		}
		waiting, err := k.count(ctx, waitPrefix+filter)
		var due int
		if err == nil {
			due, err = k.count(ctx, duePrefix+filter)
		}
		if err != nil {
			return false, k.shared.Conn.Unavailable(err)
		}
		room := limit - waiting - due - int(p.sending.Load())
		p.asked = now
		if room <= 0 {
			p.left = -1
			return true, nil
		}
		p.left = max(1, room/4) // other hubs add to it, too
	}
	p.left--
	p.sending.Add(1)
	return false, nil
}

// count returns how many messages the stream has under a filter.
func (k *schedules) count(ctx context.Context, filter string) (n int, err error) {
	_, err = k.shared.Conn.Direct(ctx, DelayedStream, &conn.DirectQuery{Seq: 1, Batch: 1, NextBySubj: filter}, func(_ *conn.StoredMsg, pending uint64) error {
		n = int(pending) + 1 //nolint:gosec // far fewer
		return nil
	})
	return n, err
}

// clientToken is a client's name in subjects.
func clientToken(client string) string {
	sum := sha256.Sum256([]byte(client))
	return hex.EncodeToString(sum[:8])
}

// reserve counts an event that client is about to delay, or returns the refusal. release is to be
// called when the stream has answered.
func (k *schedules) reserve(ctx context.Context, client string) (release func(), err error) {
	p := k.shared
	places := func(name string) *delayPlaces {
		fresh := &delayPlaces{lock: make(chan struct{}, 1)}
		if old, met, _ := k.places.PeekOrAdd(name, fresh); met {
			k.places.Get(name)
			return old
		}
		return fresh
	}
	all := places("")
	full, err := k.take(ctx, all, ">", p.Limits.Delayed)
	if err != nil {
		return nil, err
	}
	if full {
		p.Obs.LimitReached("delayed")
		return nil, &event.Error{Code: event.CodeOverloaded, Msg: fmt.Sprintf("%d delayed events wait, which is the limit (delayed): publish again when some are due", p.Limits.Delayed)}
	}
	if client == "" || client[0] == conn.OwnClient[0] {
		return func() { all.sending.Add(-1) }, nil
	}
	own := places(client)
	full, err = k.take(ctx, own, clientToken(client)+".>", p.Limits.DelayedPerClient)
	if err == nil && full {
		p.Obs.LimitReached("delayed_per_client")
		err = &event.Error{Code: event.CodeOverloaded, Msg: fmt.Sprintf("%d delayed events of this client wait, which is its limit (delayed_per_client): publish again when some are due", p.Limits.DelayedPerClient)}
	}
	if err != nil {
		all.sending.Add(-1)
		return nil, err
	}
	return func() { all.sending.Add(-1); own.sending.Add(-1) }, nil
}

// delayedName is what the subjects of a delayed event end with.
func delayedName(topic, id string) string {
	return native.ObjectName(topic) + "." + native.KeyToken(id)
}

// schedule is PublishAsync for an event that is due later.
func (p *Publisher) schedule(ctx context.Context, t *streams.Topic, o *outgoing, at time.Time, done func(event.Receipt, error)) error {
	k := p.shared.schedules
	s, err := k.open(ctx, true)
	if err != nil {
		return err
	}
	client := cmp.Or(o.CountFor, p.client)
	release, err := k.reserve(ctx, client)
	if err != nil {
		return err
	}
	id := o.ID
	if id == "" {
		if id, err = p.link.NewIDAt(at); err != nil {
			release()
			return &event.Error{Code: event.CodeInternal, Msg: "no id could be made", Err: err}
		}
	}
	if err := p.acquire(ctx, s); err != nil {
		release()
		return err
	}
	name := delayedName(t.Name, id)
	h := o.header(t, id, false)
	h[headerTarget] = []string{t.SubjectFor(o.Key)}
	h[headerScheduleID] = []string{rand.Text()}
	h[headerSchedule] = []string{"@at " + at.UTC().Format("2006-01-02T15:04:05.000Z")}
	h[headerScheduleTarget] = []string{duePrefix + clientToken(client) + "." + name}
	h[headerExpectSubSeq] = []string{"0"}
	h[headerExpectSubject] = []string{waitPrefix + "*." + name}

	w, _ := inFlight.Get().(*flight)
	w.p, w.id = p, id
	w.topic = &streams.Topic{Name: t.Name, Stream: s, Obs: scheduleObserver{t.Obs}}
	w.done = func(r event.Receipt, err error) {
		release()
		if errors.Is(err, nats.ErrNoResponders) {
			k.forget(s)
		}
		if errors.Is(err, event.ErrKeyChanged) { // an event of this id waits
			r, err = event.Receipt{Duplicate: true}, nil
		}
		r.ID, r.Stream, r.Sequence = id, "", 0
		done(r, err)
	}
	w.msg.Subject, w.msg.Header, w.msg.Data = waitPrefix+clientToken(client)+"."+name, h, o.payload
	return p.transmit(ctx, w)
}

// scheduleObserver counts a delayed event as published only when it is stored in its topic.
type scheduleObserver struct{ event.TopicObserver }

func (scheduleObserver) Published(time.Duration) {}

// Cancel removes an event that was published with a delay and still waits. It returns ErrNotFound
// when no such event waits. After another error the outcome is unknown.
func (p *Publisher) Cancel(ctx context.Context, topic, id string) error {
	shared := p.shared
	if err := event.ValidTopic(topic); err != nil {
		return err
	}
	if err := validateID(id); err != nil {
		return err
	}
	if shared.Conn.Closing() {
		return event.ErrClosed
	}
	if _, err := shared.schedules.open(ctx, false); errors.Is(err, event.ErrNotFound) || errors.Is(err, errNoSchedules) {
		return event.ErrNotFound
	} else if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, conn.PublishWait)
	defer cancel()
	err := shared.schedules.cancel(ctx, delayedName(topic, id))
	if err != nil && !errors.Is(err, event.ErrNotFound) {
		return shared.Conn.Unavailable(err)
	}
	return err
}

// cancel decides between the removal of a schedule and the server, which may be about to store the
// event as due. A due event counts as cancelled if a cancellation lies before it in the stream;
// hubs look for cancellations after they have received an event, and note which they have met.
func (k *schedules) cancel(ctx context.Context, name string) error {
	p := k.shared
	waits, err := p.Conn.LastBySubject(ctx, DelayedStream, waitPrefix+"*."+name)
	if err != nil {
		return err
	}
	schedule := waits.Header.Get(headerScheduleID)
	mark := cancelledPrefix + schedule
	at, err := k.mark(ctx, mark, false)
	if err != nil {
		return err
	}
	removed, err := k.remove(ctx, waits.Seq)
	if err != nil {
		return err
	}
	due, err := p.Conn.LastBySubject(ctx, DelayedStream, duePrefix+"*."+name)
	switch {
	case err == nil && due.Header.Get(headerScheduleID) == schedule:
		if due.Seq < at {
			return event.ErrNotFound
		}
		return nil // the hub that receives it drops it
	case err != nil && !errors.Is(err, event.ErrNotFound):
		return err
	case removed:
		return nil
	}
	// a hub has had it
	met, err := p.Conn.LastBySubject(ctx, DelayedStream, mark)
	if err != nil {
		return err
	}
	if met.Header.Get(headerDropped) == "" {
		return event.ErrNotFound
	}
	return nil
}

// mark stores a cancellation and returns its sequence.
func (k *schedules) mark(ctx context.Context, subject string, dropped bool) (uint64, error) {
	h := nats.Header{headerTTL: {strconv.Itoa(int(cancelledAge.Seconds()))}}
	if dropped {
		h[headerDropped] = []string{"1"}
	}
	ack, err := k.shared.Conn.Write(ctx, DelayedStream, &nats.Msg{Subject: subject, Header: h})
	if err != nil {
		return 0, fmt.Errorf("jetstream: store a cancellation: %w", err)
	}
	return ack.Seq, nil
}

// remove removes a message and reports whether it was there. It asks once: asked twice, the server
// would say that what it removed the first time was not there.
func (k *schedules) remove(ctx context.Context, seq uint64) (bool, error) {
	p := k.shared
	query := []byte(`{"no_erase":true,"seq":` + strconv.FormatUint(seq, 10) + `}`)
	reply, err := p.Conn.Link().Request(ctx, p.Conn.API+"STREAM.MSG.DELETE."+DelayedStream, query)
	if err != nil {
		return false, fmt.Errorf("jetstream: remove a schedule: %w", err)
	}
	removed, err := parseRemoved(reply)
	if _, refused := errors.AsType[*conn.APIError](err); refused {
		// The server has several errors for a message that is not there.
		_, absent := p.Conn.GetMsg(ctx, DelayedStream, map[string]any{"seq": seq})
		if errors.Is(absent, event.ErrNotFound) {
			return false, nil
		}
	}
	if err != nil {
		return false, fmt.Errorf("jetstream: remove a schedule: %w", err)
	}
	return removed, nil
}

// parseRemoved reads the answer to the removal of a message.
func parseRemoved(reply *nats.Msg) (bool, error) {
	if conn.NoResponders(reply) {
		return false, nats.ErrNoResponders
	}
	var got struct {
		Error   *conn.APIError `json:"error"`
		Success bool           `json:"success"`
	}
	if err := json.Unmarshal(reply.Data, &got); err != nil {
		return false, err
	}
	if got.Error != nil {
		return false, got.Error
	}
	return got.Success, nil
}
