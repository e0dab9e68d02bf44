package jetstream

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// MaxLags is the maximum number of groups that Groups.Lags returns.
const MaxLags = 10_000

// Lag is how far a group is behind. The figures are those of the leaders of the group's consumers;
// reading them reads at most two events.
type Lag struct {
	Topic, Group string
	// Ephemeral is set for a group with a TTL.
	Ephemeral bool
	// Pending is the number of events that were not delivered yet, those that a redrive has put
	// back included.
	Pending uint64
	// InFlight is the number of events that were delivered and are not settled, those in back-off
	// included.
	InFlight uint64
	// OldestUnacked is how long ago the oldest event was stored that is not settled; 0 if there is
	// none. An event that a redrive has put back counts from then on.
	OldestUnacked time.Duration
	// StuckSince is since when the group is stuck: events and requests of members of this hub wait,
	// and the server has delivered nothing for Limits.StuckAfter. Zero: it is not, or it has no
	// members on this hub.
	StuckSince time.Time
}

// AllLags is the lag of many groups.
type AllLags struct {
	// Lags are in the order of topics and groups.
	Lags []Lag
	// More says that there are further groups.
	More bool
	// Unknown is the number of groups of which nothing is known, because a leader of theirs does
	// not answer or is out of touch with the other servers.
	Unknown int
}

// groupName is a group of a topic.
type groupName struct{ topic, group string }

// listedGroups are the groups of all streams, by their consumers.
type listedGroups struct {
	mu        sync.Mutex
	consumers map[groupName][]*natsjs.ConsumerInfo
	// missing are the consumers of which nothing is known, by stream.
	missing map[string][]string
}

// list reads the consumers of a stream.
func (l *listedGroups) list(ctx context.Context, a *admin, stream string) error {
	for page, err := range consumerPages(ctx, a.core, stream, "", 0) {
		if err != nil {
			return err
		}
		l.mu.Lock()
		for _, info := range page.consumers {
			a.adminHooks.seen(info)
			if at := (groupName{info.Config.Metadata[native.MetaTopic], info.Config.Metadata[native.MetaGroup]}); at.topic != "" && at.group != "" {
				l.consumers[at] = append(l.consumers[at], info)
			}
		}
		if len(page.missing) > 0 {
			l.missing[stream] = append(l.missing[stream], page.missing...)
		}
		l.mu.Unlock()
	}
	return nil
}

// streams returns the streams of topics that have groups.
func (l *listedGroups) streams() []string {
	set := make(map[string]bool)
	for _, consumers := range l.consumers {
		for _, info := range consumers {
			set[info.Stream] = true
		}
	}
	delete(set, putBackStream)
	return slices.Collect(maps.Keys(set))
}

// names returns the groups in order.
func (l *listedGroups) names() []groupName {
	return slices.SortedFunc(maps.Keys(l.consumers), func(a, b groupName) int {
		return cmp.Or(strings.Compare(a.topic, b.topic), strings.Compare(a.group, b.group))
	})
}

// lagEvents are the events behind the groups of the last Groups.Lags.
type lagEvents struct {
	mu    sync.Mutex
	known map[string]*knownEvents
}

func (e *lagEvents) get() map[string]*knownEvents {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.known
}

func (e *lagEvents) set(known map[string]*knownEvents) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.known = known
}

// Lags returns the lag of up to limit groups of all topics. limit is 1..MaxLags. A group whose
// leader does not answer is left out: AllLags.Unknown counts it. Lags remembers the times of events
// for the next Lags, for as long as their stream has removed no event.
func (g Groups) Lags(ctx context.Context, limit int) (AllLags, error) {
	a := g.admin
	if limit < 1 || limit > MaxLags {
		return AllLags{}, event.BadOptions("limit is %d: 1 to %d are allowed", limit, MaxLags)
	}
	streams, err := streamNames(ctx, a.core)
	if err != nil {
		return AllLags{}, err
	}
	listed := &listedGroups{consumers: make(map[groupName][]*natsjs.ConsumerInfo), missing: make(map[string][]string)}
	if err = concurrently(len(streams), func(i int) error { return listed.list(ctx, a, streams[i]) }); err != nil {
		return AllLags{}, a.conn.Unavailable(err)
	}
	var all AllLags
	for _, missing := range listed.missing {
		all.Unknown += len(missing)
	}
	names := listed.names()
	r := &groupReader{admin: a}
	if err := r.remember(ctx, listed.streams(), a.lagEvents.get()); err != nil {
		return AllLags{}, a.conn.Unavailable(err)
	}
	defer func() { a.lagEvents.set(r.found) }()
	for len(names) > 0 {
		if len(all.Lags) == limit {
			all.More = true
			return all, nil
		}
		part := names[:min(len(names), limit-len(all.Lags))]
		names = names[len(part):]
		found := make([]*Lag, len(part))
		err = concurrently(len(part), func(i int) error {
			lag, err := r.listedLag(ctx, part[i], listed)
			found[i] = lag
			return err
		})
		if err != nil {
			return AllLags{}, a.conn.Unavailable(err)
		}
		for _, lag := range found {
			if lag == nil {
				continue
			}
			if lag.Group == "" {
				all.Unknown++
				continue
			}
			all.Lags = append(all.Lags, *lag)
		}
	}
	return all, nil
}

// listedLag returns the lag of a group whose consumers were listed: nil for a group that does not
// exist any more, and an empty Lag for one of which nothing is known.
func (r *groupReader) listedLag(ctx context.Context, at groupName, listed *listedGroups) (*Lag, error) {
	t, err := r.topic(ctx, at.topic)
	if errors.Is(err, event.ErrNotFound) {
		return nil, nil //nolint:nilnil // as documented
	}
	if err != nil {
		return unknownLag(ctx, err)
	}
	consumers := listed.consumers[at]
	doubtful := len(listed.missing[t.Stream.Name])+len(listed.missing[putBackStream]) > 0
	ptr := records.Generation{Generation: native.Generation{Consumer: consumers[0].Name}}
	if len(consumers) > 1 || consumers[0].Stream != t.Stream.Name || doubtful {
		if ptr, err = r.admin.records.Generation(ctx, t, at.group); err != nil {
			return unknownLag(ctx, err)
		}
	}
	if slices.Contains(listed.missing[putBackStream], ptr.PutBack) {
		return &Lag{}, nil
	}
	var main, queue *natsjs.ConsumerInfo
	for _, info := range consumers {
		switch {
		case info.Stream == t.Stream.Name && info.Name == ptr.Consumer:
			main = info
		case info.Stream == putBackStream && info.Name == ptr.PutBack:
			queue = info
		}
	}
	if main == nil || ptr.Deleted {
		return nil, nil //nolint:nilnil // as documented
	}
	lag, err := r.lagOf(ctx, t, at.group, main, queue)
	if err != nil {
		return unknownLag(ctx, err)
	}
	return &lag, nil
}

// unknownLag is the lag of a group that could not be read: it hides no other group, unless the time
// is over.
func unknownLag(ctx context.Context, err error) (*Lag, error) {
	if ctx.Err() != nil && !errors.Is(err, errSilent) {
		return nil, err
	}
	return &Lag{}, nil
}

// lagOf is the lag of a group by its consumer, and by that of its put-back events or nil.
func (r *groupReader) lagOf(ctx context.Context, t *streams.Topic, group string, main, queue *natsjs.ConsumerInfo) (Lag, error) {
	lag := Lag{Topic: t.Name, Group: group, Ephemeral: main.Config.InactiveThreshold > 0, StuckSince: r.admin.adminHooks.stuckSince(main)}
	for _, info := range []*natsjs.ConsumerInfo{main, queue} {
		if info == nil || info.NumPending == 0 && info.NumAckPending <= 0 {
			continue
		}
		lag.Pending += info.NumPending
		lag.InFlight += uint64(max(info.NumAckPending, 0))
		var oldest time.Time
		var err error
		if info == main {
			oldest, err = r.oldestBehind(ctx, t, floorOf(info))
		} else {
			oldest, err = r.oldestCopy(ctx, info)
		}
		if err != nil {
			return lag, err
		}
		if !oldest.IsZero() {
			lag.OldestUnacked = max(lag.OldestUnacked, info.TimeStamp.Sub(oldest))
		}
	}
	return lag, nil
}
