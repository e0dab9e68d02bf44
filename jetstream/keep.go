package jetstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
	"eventhub/jetstream/topics"
)

// A topic that rejects (OnFull) has a stream that never removes anything by itself: it refuses new
// events at its bounds (DiscardNew), and has no age. Every hub that knows the topic removes what
// all groups have settled, before publishers would be refused although the groups keep up.

// A hub removes settled events when a topic has 7/8 of a bound, and leaves 3/4.
const (
	keepHigh = 7
	keepLow  = 6
)

// How often the topics that reject are looked at.
const (
	keepEvery = time.Second
	// keepFind is how often topics are looked for that only native clients use.
	keepFind = 30 * time.Second
	// keepPause is the least time between two looks at one topic.
	keepPause = 2 * time.Millisecond
	// keepWait bounds one look.
	keepWait = 10 * time.Second
)

// rejects reports whether a rule makes topics that reject.
func (a *admin) rejects() bool {
	return slices.ContainsFunc(a.rules, func(r topics.Rule) bool { return r.OnFull == topics.OnFullReject })
}

// keepTopics removes settled events from topics that reject, until the bus closes.
func (a *admin) keepTopics() {
	tick := time.NewTicker(keepEvery)
	defer tick.Stop()
	found := a.clock.Now() - int64(keepFind)
	for {
		if now := a.clock.Now(); now-found >= int64(keepFind) {
			found = now
			if err := a.findKept(a.conn.Ctx); err != nil && a.conn.Ctx.Err() == nil {
				a.often.Log(a.conn.Ctx, slog.LevelWarn, "failed to look for topics that reject; retrying", "", slog.Any("error", err))
			}
		}
		all := false
		select {
		case <-a.conn.Ctx.Done():
			return
		case <-a.streams.KeepNow:
		case <-tick.C:
			all = true
		}
		for _, t := range a.keptTopics() {
			k := t.Stream.Keep
			began := a.clock.Now()
			if a.conn.Ctx.Err() != nil || !k.Due.Load() && !all || began < k.Rests {
				continue
			}
			if began-k.Looked < int64(keepPause) {
				_ = a.conn.Pause(a.conn.Ctx, keepPause)
			}
			k.Due.Store(false)
			err := a.keep(a.conn.Ctx, t)
			k.Looked = a.clock.Now()
			if err != nil && a.conn.Ctx.Err() == nil {
				a.often.Log(a.conn.Ctx, slog.LevelWarn, "failed to remove settled events of a topic; retrying", t.Name, slog.String("topic", t.Name), slog.Any("error", err))
				// a topic without a leader holds up the others
				k.Rests = k.Looked + 3*(k.Looked-began)
			}
		}
	}
}

// findKept meets the topics that reject and that this hub does not know yet.
func (a *admin) findKept(ctx context.Context) (failed error) {
	inv, err := takeInventory(ctx, a.core)
	if err != nil {
		return err
	}
	for _, info := range inv.byName {
		s := inv.recognise(info)
		if s.rule == nil || s.topic == "" || s.rule.OnFull != topics.OnFullReject || a.streams.Known(s.topic) != nil {
			continue
		}
		if _, err := a.streams.Topic(ctx, s.topic, ""); err != nil {
			failed = errors.Join(failed, err)
		}
	}
	return failed
}

// keptTopics are the topics that reject, as far as this hub knows them.
func (a *admin) keptTopics() []*streams.Topic {
	return slices.DeleteFunc(a.streams.Met(), func(t *streams.Topic) bool { return t.Stream.Keep == nil })
}

// keep removes the oldest events of a topic that are beyond its age, or in the way of new ones, as
// far as all groups have settled them.
func (a *admin) keep(ctx context.Context, t *streams.Topic) error {
	began := a.clock.Now()
	ctx, cancel := context.WithTimeout(ctx, keepWait)
	defer cancel()
	k := t.Stream.Keep
	info, err := a.conn.FindStream(ctx, t.Stream.Name)
	if errors.Is(err, event.ErrNotFound) || err == nil && !native.StreamMade(info).Equal(t.Stream.Created) {
		a.streams.Forget(t.Stream)
		return nil
	}
	if err != nil {
		return err
	}
	state := &info.State
	over := tooMuch(state, &info.Config)
	if k.Age > 0 && state.Msgs > 0 && info.TimeStamp.Sub(state.FirstTime) > k.Age {
		since, err := a.reads.FirstSince(ctx, t, info.TimeStamp.Add(-k.Age), state.LastSeq+1)
		if err != nil {
			return err
		}
		over = max(over, since-min(since, state.FirstSeq))
	}
	if over == 0 {
		a.sayFull(t, false, "")
		return nil
	}
	mine, err := a.records.Retention.TakeTurn(ctx, records.Removals, t.Stream.Name)
	if err != nil {
		return err
	}
	certain := true
	defer func() {
		if certain {
			mine.End(ctx)
		}
	}()
	if first, err := mine.First(ctx, records.Moves); err != nil || !first {
		if err == nil { // at the next look
			a.sayFull(t, isFull(state, &info.Config), "one that is being moved")
		}
		return err
	}
	floor, holder, err := a.lowest(ctx, t, info)
	if err != nil {
		return err
	}
	last := min(state.FirstSeq+over-1, floor)
	if last >= state.FirstSeq {
		if a.clock.Now()-began > int64(keepWait) { // moves may not wait for this hub any more
			return conn.ErrStalled
		}
		a.sayFull(t, false, "")
		_, err := a.conn.PurgeStream(ctx, t.Stream.Name, "", last+1)
		certain = err == nil
		return err
	}
	a.sayFull(t, isFull(state, &info.Config), holder)
	return nil
}

// tooMuch is how many of the oldest messages are to go, so that keepLow of streams.KeepOf are left.
func tooMuch(state *natsjs.StreamState, cfg *natsjs.StreamConfig) (n uint64) {
	if bound := uint64(max(cfg.MaxMsgs, 0)); bound > 0 && state.Msgs > bound/streams.KeepOf*keepHigh+bound%streams.KeepOf*keepHigh/streams.KeepOf {
		n = state.Msgs - bound/streams.KeepOf*keepLow - bound%streams.KeepOf*keepLow/streams.KeepOf
	}
	if bound := uint64(max(cfg.MaxBytes, 0)); bound > 0 && state.Msgs > 0 && state.Bytes > bound/streams.KeepOf*keepHigh {
		each := max(state.Bytes/state.Msgs, 1)
		n = max(n, (state.Bytes-bound/streams.KeepOf*keepLow)/each+1)
	}
	return n
}

// isFull reports whether the stream refuses an event of the usual size.
func isFull(state *natsjs.StreamState, cfg *natsjs.StreamConfig) bool {
	return cfg.MaxMsgs > 0 && state.Msgs >= uint64(cfg.MaxMsgs) ||
		cfg.MaxBytes > 0 && state.Msgs > 0 && state.Bytes+state.Bytes/state.Msgs > uint64(cfg.MaxBytes)
}

// sayFull logs when a topic becomes full, and when it has room again.
func (a *admin) sayFull(t *streams.Topic, full bool, holder string) {
	if k := t.Stream.Keep; k.Full != full {
		k.Full = full
		if full {
			a.often.Log(a.conn.Ctx, slog.LevelWarn, "topic is full; publishes are refused until the group acknowledges its events, or is deleted", t.Name, slog.String("topic", t.Name), slog.String("group", holder))
		} else {
			a.often.Log(a.conn.Ctx, slog.LevelInfo, "topic has room again", t.Name, slog.String("topic", t.Name))
		}
	}
}

// lowest is the lowest ack floor of the topic's groups that count, and whose it is; the end of the
// stream where there is no group.
func (a *admin) lowest(ctx context.Context, t *streams.Topic, info *natsjs.StreamInfo) (floor uint64, holder string, err error) {
	groups, err := a.consumers(ctx, t.Stream.Name)
	if err != nil {
		return 0, "", err
	}
	groups = slices.DeleteFunc(groups, func(c *natsjs.ConsumerInfo) bool {
		return c.Config.AckPolicy != natsjs.AckExplicitPolicy || c.Config.Durable == ""
	})
	slices.SortFunc(groups, func(a, b *natsjs.ConsumerInfo) int { return cmp.Compare(a.AckFloor.Stream, b.AckFloor.Stream) })
	for _, c := range groups {
		if c.AckFloor.Stream >= info.State.LastSeq {
			break
		}
		holds, err := a.holds(ctx, t, c, info.TimeStamp)
		if err != nil {
			return 0, "", err
		}
		if holds {
			return c.AckFloor.Stream, cmp.Or(c.Config.Metadata[native.MetaGroup], c.Name), nil
		}
	}
	return info.State.LastSeq, "", nil
}

// errMissing says that the server did not tell of all consumers of a stream: in a cluster, the
// leader of one may be away.
var errMissing = errors.New("jetstream: the server did not tell of all groups")

// consumers lists the consumers of a stream. With errMissing, it returns those that the server told
// of. The listing of nats.go does not say that some are missing.
func (a *admin) consumers(ctx context.Context, stream string) (all []*natsjs.ConsumerInfo, err error) {
	missing := 0
	for {
		var page struct {
			Error     *conn.APIError         `json:"error"`
			Total     int                    `json:"total"`
			Consumers []*natsjs.ConsumerInfo `json:"consumers"`
			Missing   []string               `json:"missing"`
		}
		err := a.conn.AskAPI(ctx, "CONSUMER.LIST."+stream, map[string]any{"offset": len(all) + missing}, &page)
		if err == nil && page.Error != nil {
			err = page.Error
		}
		if err != nil {
			return nil, fmt.Errorf("jetstream: list consumers of stream %s: %w", stream, err)
		}
		all = append(all, page.Consumers...)
		missing += len(page.Missing)
		if len(page.Consumers)+len(page.Missing) == 0 || len(all)+missing >= page.Total {
			break
		}
	}
	if missing > 0 {
		return all, fmt.Errorf("%w of stream %s: %d are missing", errMissing, stream, missing)
	}
	return all, nil
}

// holds reports whether a consumer holds the events that it has not settled: it is what its group
// now is, and the group had a member lately.
func (a *admin) holds(ctx context.Context, t *streams.Topic, c *natsjs.ConsumerInfo, now time.Time) (bool, error) {
	k := t.Stream.Keep
	lately := func(at *time.Time) bool { return at != nil && now.Sub(*at) < k.GroupAge }
	group, ours := c.Config.Metadata[native.MetaGroup]
	if ours && now.Sub(c.Created) > records.SweepAge {
		ptr, err := a.records.Generation(ctx, t, group)
		if err != nil {
			return false, err
		}
		if ptr.Deleted || ptr.Consumer != c.Name {
			return false, nil // a seek has left it; the sweeper removes it
		}
	}
	if c.NumWaiting > 0 || lately(&c.Created) || lately(c.Delivered.Last) || lately(c.AckFloor.Last) {
		delete(k.Ignored, c.Name)
		return true, nil
	}
	if ours {
		at, err := a.records.Retention.LastSeen(ctx, t, group)
		if err != nil {
			return false, err
		}
		if !at.IsZero() && lately(&at) {
			delete(k.Ignored, c.Name)
			return true, nil
		}
	}
	if !k.Ignored[c.Name] {
		k.Ignored[c.Name] = true
		o := a.obs.Topic(t.Name)
		o.GroupIgnored()
		a.log.WarnContext(ctx, "group had no member for too long; it holds the events of its topic no more", slog.String("topic", t.Name),
			slog.String("group", cmp.Or(group, c.Name)), slog.Duration("group_age", k.GroupAge), slog.Uint64("unsettled_from", c.AckFloor.Stream+1))
	}
	return false, nil
}

// noteSeen notes that a group of a topic that rejects has a member now.
func (g *group) noteSeen(ctx context.Context) error {
	if g.topic.Stream.Keep == nil {
		return nil
	}
	return g.bus.records.Retention.NoteSeen(ctx, g.topic, g.name)
}

// keepSeen notes now and then that a group of a topic that rejects has members. It does not block.
func (g *group) keepSeen(l *conn.Link, now int64) {
	k := g.topic.Stream.Keep
	if k == nil || now-g.seen.Load() < int64(k.SeenEvery()) || len(g.bus.groups.membersOf(g)) == 0 {
		return
	}
	g.seen.Store(now)
	_ = l.Ask(records.Seen(g.topic, g.name), now, conn.AskerFunc(func(reply *nats.Msg, err error) {
		if err != nil || conn.NoResponders(reply) {
			g.seen.Store(now - int64(k.SeenEvery())) // at the next look
		}
	}))
}
