package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
	"eventhub/jetstream/topics"
)

// Topic has the operations of operators on one topic. A Topic is a small value that costs nothing
// to create, and creating one checks nothing. Its methods may be called concurrently. Only Create
// creates a topic. The others return ErrNotFound when the topic does not exist, a bad_topic or
// bad_options *Error for a mistake of the caller, an internal *Error when NATS fails to answer
// properly, and ErrClosed.
type Topic struct {
	admin *admin
	name  string
}

// Topic gives access to a topic for operators.
func (a Admin) Topic(name string) Topic { return Topic{a.bus.admin, name} }

// TopicInfo is the state of a topic.
type TopicInfo struct {
	Topic  string
	Stream string
	// Family is set when the stream holds other topics too.
	Family bool
	// Events is the number of stored events. Bytes is their size, that of the whole stream for a
	// topic of a family.
	Events uint64
	Bytes  uint64
	// First and Last are the oldest and the newest stored event; nil when there is none.
	First, Last *event.Event
	// MaxAge, MaxBytes and MaxMsgs are the bounds; 0 means none. Rule is the pattern of the rule.
	MaxAge   time.Duration
	MaxBytes int64
	MaxMsgs  int64
	Rule     string
	// OnFull is what happens at the bounds. GroupAge is how long a group without members holds
	// events, with OnFullReject.
	OnFull   topics.OnFull
	GroupAge time.Duration
	// Groups is the number of groups.
	Groups    int
	Compacted bool
	Replicas  int
	// Needed says what the hub itself uses the topic for, or is empty.
	Needed string
	// Lost is what groups have lost, those with the greatest losses first: at most 1,000 groups.
	Lost []GroupLoss
}

// GroupLoss is what a group has lost in all.
type GroupLoss struct {
	Group  string
	Events uint64
	// At is when the last loss was found.
	At time.Time
}

// maxLossesShown bounds TopicInfo.Lost.
const maxLossesShown = 1_000

// Create creates the topic by the first rule that matches, as its first use would: its stream, and
// its bucket if it is compacted. Native NATS clients need the stream before they publish. It does
// nothing if the topic exists.
func (t Topic) Create(ctx context.Context) error { return t.CreateFor(ctx, "") }

// CreateFor is Create for a client, for which a topic that is made counts (Limits.TopicsPerClient,
// Limits.ClientTopics).
func (t Topic) CreateFor(ctx context.Context, client string) error {
	_, _, err := t.admin.streams.FreshTopic(ctx, t.name, client)
	return err
}

// Info returns the state of the topic.
func (t Topic) Info(ctx context.Context) (*TopicInfo, error) {
	at, state, err := t.admin.streams.FreshExisting(ctx, t.name)
	if err != nil {
		return nil, err
	}
	info, err := t.info(ctx, at, state)
	return info, t.admin.unavailableOrNil(err)
}

// unavailableOrNil is unavailable, but for no error.
func (c *core) unavailableOrNil(err error) error {
	if err == nil || errors.Is(err, event.ErrNotFound) {
		return err
	}
	return c.conn.Unavailable(err)
}

func (t Topic) info(ctx context.Context, at *streams.Topic, state natsjs.StreamState) (*TopicInfo, error) {
	a := t.admin
	stream, err := a.conn.FindStream(ctx, at.Stream.Name)
	if err != nil {
		return nil, err
	}
	rule, cfg := a.rules.Of(t.name), &stream.Config
	info := &TopicInfo{
		Topic: t.name, Stream: at.Stream.Name, Family: at.Stream.Family, Events: state.Msgs, Bytes: state.Bytes,
		MaxAge: cfg.MaxAge, MaxBytes: max(cfg.MaxBytes, 0), MaxMsgs: max(cfg.MaxMsgs, 0), Rule: rule.Pattern, OnFull: topics.OnFullDrop,
		Compacted: rule.Compaction, Replicas: cfg.Replicas, Needed: a.needed(t.name),
	}
	if k := a.streams.NewKeeping(rule, cfg); k != nil {
		info.OnFull, info.MaxAge, info.GroupAge = topics.OnFullReject, k.Age, k.GroupAge
	}
	if at.Stream.Family {
		if info.Events, err = a.count(ctx, at, state); err != nil {
			return nil, err
		}
	}
	groups, err := a.topicGroups(ctx, at)
	if err != nil && !errors.Is(err, errMissing) {
		return nil, err
	}
	info.Groups = len(groups)
	if info.First, info.Last, err = a.ends(ctx, at); err != nil {
		return nil, err
	}
	info.Lost, err = a.lossesOf(ctx, at, groups)
	return info, err
}

// ends reads the oldest and the newest event of a topic.
func (a *admin) ends(ctx context.Context, t *streams.Topic) (first, last *event.Event, err error) {
	m, err := a.messages.LeaderNext(ctx, t.Stream.Name, 1, time.Time{}, t.Filters())
	if err != nil || m == nil {
		return nil, nil, err
	}
	subjects := t.Filters()
	if subjects == nil {
		subjects = []string{">"}
	}
	newest := m
	for _, subject := range subjects {
		switch m, err := a.conn.LastBySubject(ctx, t.Stream.Name, subject); {
		case errors.Is(err, event.ErrNotFound):
		case err != nil:
			return nil, nil, err
		case m.Seq > newest.Seq:
			newest = m
		}
	}
	return t.Event(m), t.Event(newest), nil
}

// topicGroups are the consumers of a topic that are groups, by the names of their groups. With
// errMissing, it returns those that the server told of.
func (a *admin) topicGroups(ctx context.Context, t *streams.Topic) (map[string]*natsjs.ConsumerInfo, error) {
	all, missing := a.consumers(ctx, t.Stream.Name)
	if missing != nil && !errors.Is(missing, errMissing) {
		return nil, missing
	}
	groups := make(map[string]*natsjs.ConsumerInfo)
	for _, c := range all {
		topic, group := c.Config.Metadata[native.MetaTopic], c.Config.Metadata[native.MetaGroup]
		switch {
		case group != "" && topic == t.Name:
			groups[group] = c
		case group == "" && !t.Stream.Family && c.Config.Durable != "" && c.Config.AckPolicy == natsjs.AckExplicitPolicy && c.Config.DeliverSubject == "":
			groups[c.Name] = c // made by a native client
		}
	}
	return groups, missing
}

// lossesOf reads what groups have lost.
func (a *admin) lossesOf(ctx context.Context, t *streams.Topic, groups map[string]*natsjs.ConsumerInfo) ([]GroupLoss, error) {
	var lost []GroupLoss
	books, err := a.records.Retention.Losses(ctx, t, maps.Keys(groups))
	for group, book := range books {
		lost = append(lost, GroupLoss{Group: group, Events: book.Lost, At: time.UnixMilli(book.AtMS)})
	}
	slices.SortFunc(lost, func(a, b GroupLoss) int {
		switch {
		case a.Events != b.Events && a.Events > b.Events:
			return -1
		case a.Events != b.Events:
			return 1
		}
		return strings.Compare(a.Group, b.Group)
	})
	return lost[:min(len(lost), maxLossesShown)], err
}

// count counts the stored events of a topic, at the leader of its stream.
func (a *admin) count(ctx context.Context, t *streams.Topic, state natsjs.StreamState) (n uint64, err error) {
	if !t.Stream.Family {
		return state.Msgs, nil
	}
	s, err := a.conn.JS.Stream(ctx, t.Stream.Name)
	if err != nil {
		return 0, err
	}
	for _, subject := range t.Filters() {
		info, err := s.Info(ctx, natsjs.WithSubjectFilter(subject))
		if err != nil {
			return 0, err
		}
		for _, events := range info.State.Subjects {
			n += events
		}
	}
	return n, nil
}

// needed says what the hub itself uses a topic for, or returns "".
func (a *admin) needed(topic string) string {
	if streams.IsDead(topic) {
		return "it holds dead letters"
	}
	for _, r := range a.rules {
		if r.Snapshot != nil && r.Snapshot.Topic == topic {
			return "it holds the snapshots of " + r.Pattern
		}
		for _, version := range r.Schema.Mirrors {
			if topics.Mirror(r.Pattern, version) == topic {
				return "it holds the events of " + r.Pattern + " in version " + strconv.Itoa(version)
			}
		}
	}
	for _, r := range topics.WithBuiltin(nil) {
		if r.Pattern == topic {
			return "the hub's own projections use it"
		}
	}
	return ""
}

// PurgeOptions say what Purge removes: exactly one of All, Before and Through is set.
type PurgeOptions struct {
	// All removes all events.
	All bool
	// Before removes the events that were stored before this time.
	Before time.Time
	// Through removes the event with this id and those before it.
	Through string
	// Needed also allows topics that the hub itself uses (TopicInfo.Needed).
	Needed bool
	// DryRun removes nothing, and counts.
	DryRun bool
	// Bound, if not "", is Purged.Bound of a dry run: events that came after it stay.
	Bound string
}

// Purged is what Purge has removed, or would.
type Purged struct {
	Removed, Left uint64
	// Bound, of a dry run, says where the events to be removed ended (PurgeOptions.Bound).
	Bound string
}

// Purge removes events, whether groups have read them or not. They do not count as lost. Groups go
// on behind them. The bucket of a compacted topic keeps the newest event of each key.
func (t Topic) Purge(ctx context.Context, opts PurgeOptions) (Purged, error) {
	a := t.admin
	if n := btoi(opts.All) + btoi(!opts.Before.IsZero()) + btoi(opts.Through != ""); n != 1 {
		return Purged{}, event.BadOptions("a purge removes all events, those before a time, or those up to an id: give one of the three")
	}
	at, state, err := a.streams.FreshExisting(ctx, t.name)
	if err != nil {
		return Purged{}, err
	}
	if why := a.needed(t.name); why != "" && !opts.Needed && !opts.DryRun {
		return Purged{}, needs(t.name, why)
	}
	before, err := t.purgeEnd(ctx, at, state, &opts)
	if err != nil {
		return Purged{}, a.conn.Unavailable(err)
	}
	if opts.Bound != "" {
		bound, ok := parseStreamCursor(opts.Bound)
		switch {
		case !ok:
			return Purged{}, event.BadOptions("bound is not that of a dry run: leave it out")
		case bound.Stream != at.Stream.Name || bound.Created != at.Stream.Created.UnixNano():
			return Purged{}, errChanged
		}
		before = min(before, bound.Next)
	}
	all, err := a.count(ctx, at, state)
	if err != nil {
		return Purged{}, a.conn.Unavailable(err)
	}
	if opts.DryRun {
		left, err := a.reads.CountFrom(ctx, at, before)
		if err != nil {
			return Purged{}, a.conn.Unavailable(err)
		}
		bound := streamCursor{Stream: at.Stream.Name, Created: at.Stream.Created.UnixNano(), Next: before}
		return Purged{Removed: all - min(all, left), Left: left, Bound: bound.String()}, nil
	}
	if before <= state.FirstSeq {
		return Purged{Left: all}, nil
	}
	removed, err := a.purgeTopic(ctx, at, before)
	if err != nil {
		return Purged{}, a.conn.Unavailable(err)
	}
	a.log.InfoContext(ctx, "topic purged", slog.String("topic", t.name), slog.Uint64("events", removed), slog.Uint64("before", before))
	return Purged{Removed: removed, Left: all - min(all, removed)}, nil
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// needs refuses to touch a topic that the hub itself uses.
func needs(topic, why string) error {
	return event.BadOptions("the hub needs topic %s: %s; say explicitly that it may be removed all the same", topic, why)
}

// purgeEnd is the first sequence that stays.
func (t Topic) purgeEnd(ctx context.Context, at *streams.Topic, state natsjs.StreamState, opts *PurgeOptions) (uint64, error) {
	switch {
	case opts.All:
		return state.LastSeq + 1, nil
	case opts.Through != "":
		seq, err := t.admin.reads.Find(ctx, at, opts.Through, state, "")
		return min(seq, state.LastSeq) + 1, err
	default:
		return t.admin.reads.FirstSince(ctx, at, streams.Farthest(opts.Before), state.LastSeq+1)
	}
}

// purgeTopic removes the events of a topic before a sequence. In a stream of its own, the purge is
// noted first: what is purged is not lost.
func (a *admin) purgeTopic(ctx context.Context, t *streams.Topic, before uint64) (removed uint64, err error) {
	if t.Stream.Family {
		for _, subject := range t.Filters() {
			n, err := a.conn.PurgeStream(ctx, t.Stream.Name, subject, before)
			if err != nil {
				return removed, err
			}
			removed += n
		}
		return removed, nil
	}
	if err := a.records.Retention.NotePurge(ctx, t, before); err != nil {
		return 0, err
	}
	return a.conn.PurgeStream(ctx, t.Stream.Name, "", before)
}

// DeleteOptions say how Delete works.
type DeleteOptions struct {
	// Needed also allows topics that the hub itself uses (TopicInfo.Needed).
	Needed bool
}

// Delete removes the topic with its events, its groups, and its latest events by key. The
// subscriptions of members end, on all hubs, if they have SubscribeOptions.OnDeleted. The next
// publish or subscription creates the topic again, and nothing of the old one is in it. Dead
// letters stay on their topic. After an error, the topic may have been deleted; repeat the call to
// be sure.
func (t Topic) Delete(ctx context.Context, opts DeleteOptions) error {
	a := t.admin
	at, _, err := a.streams.FreshExisting(ctx, t.name)
	if errors.Is(err, event.ErrNotFound) { // a deletion that was cut off may be repeated
		finished, err := a.finishDeletion(ctx, a.rules.Of(t.name).StreamName(t.name))
		if err == nil && !finished {
			err = event.ErrNotFound
		}
		return a.unavailableOrNil(err)
	}
	if err != nil {
		return err
	}
	if why := a.needed(t.name); why != "" && !opts.Needed {
		return needs(t.name, why)
	}
	if at.Stream.Family {
		err = t.deleteFromFamily(ctx, at)
	} else {
		err = t.deleteStream(ctx, at)
	}
	if err != nil {
		return a.conn.Unavailable(err)
	}
	a.log.InfoContext(ctx, "topic deleted", slog.String("topic", t.name), slog.String("stream", at.Stream.Name))
	return nil
}

// deleteFromFamily removes a topic from a stream that holds others.
func (t Topic) deleteFromFamily(ctx context.Context, at *streams.Topic) error {
	groups, err := t.admin.topicGroups(ctx, at)
	if err != nil {
		return err
	}
	for group := range groups {
		if err := t.admin.adminHooks.deleteGroup(ctx, t.name, group); err != nil && !errors.Is(err, event.ErrNotFound) {
			return err
		}
	}
	for _, subject := range at.Filters() {
		if _, err := t.admin.conn.PurgeStream(ctx, at.Stream.Name, subject, 0); err != nil {
			return err
		}
	}
	return nil
}

// deleteStream removes the stream of a topic. The mark comes first: members that find their
// consumer gone look for it. It comes once more when the stream is gone, so that no hub knows the
// stream any more. Until the mark says that nothing is left, whoever creates the topic again first
// finishes the deletion.
func (t Topic) deleteStream(ctx context.Context, at *streams.Topic) error {
	admin, name := t.admin, at.Stream.Name
	rev, err := admin.records.MarkDeleted(ctx, at.Stream, t.name, 0)
	if err != nil {
		return err
	}
	if err := admin.conn.JS.DeleteStream(ctx, name); err != nil && !errors.Is(err, natsjs.ErrStreamNotFound) {
		return err
	}
	admin.streams.Forget(at.Stream)
	if _, err := admin.records.MarkDeleted(ctx, at.Stream, t.name, rev); errors.Is(err, records.ErrMoved) {
		mark, err := admin.records.Deletion(ctx, name)
		if err == nil && !mark.Deleted {
			err = fmt.Errorf("jetstream: the mark that stream %s was deleted is gone", name)
		}
		return err // nil: another hub has finished it, and perhaps created the topic again
	} else if err != nil {
		return err
	}
	_, err = admin.finishDeletion(ctx, name)
	return err
}

// marked reports whether the stream that a mark says was deleted is there.
func (a *admin) marked(ctx context.Context, stream string, mark records.Generation) (bool, error) {
	info, err := a.conn.FindStream(ctx, stream)
	if errors.Is(err, event.ErrNotFound) {
		return false, nil
	}
	return err == nil && native.StreamMade(info).Equal(mark.Stream), err
}

// takeBack removes the mark of a deletion that was cut off, if the mark has the revision and the
// stream is there. The mark must be older than any deletion that is under way.
func (a *admin) takeBack(ctx context.Context, stream string, revision uint64) error {
	mark, err := a.records.Deletion(ctx, stream)
	if err != nil || mark.Unfinished == "" || mark.Revision != revision {
		return err
	}
	there, err := a.marked(ctx, stream, mark)
	if err != nil || !there {
		return err
	}
	return a.conn.Purge(ctx, native.GroupsBucket, "$KV."+native.GroupsBucket+"."+stream, mark.Revision)
}

// endDeletion finishes a deletion whose hub died. If the stream is still there, endDeletion takes
// the mark back, provided that the mark has this revision.
func (a *admin) endDeletion(ctx context.Context, stream string, revision uint64) error {
	ctx, cancel := context.WithTimeout(ctx, conn.PublishWait)
	defer cancel()
	if err := a.takeBack(ctx, stream, revision); err != nil {
		return err
	}
	_, err := a.finishDeletion(ctx, stream)
	return err
}

// finishDeletion removes what a stream that was deleted has left, and then says so in its mark. It
// reports whether there was something to finish. While the stream is there, as far as the server
// that answers knows, finishDeletion asks again, until ctx ends: a server that led the stream may
// not know yet, or another hub is about to delete it.
//
// Several hubs may do this at a time, and the topic is created again only after one has changed the
// mark. Each therefore looks how far the buckets are before it looks at the mark, and removes
// nothing behind that: so nothing is removed of the topic that was created again.
func (a *admin) finishDeletion(ctx context.Context, stream string) (bool, error) {
	for {
		mark, err := a.records.Deletion(ctx, stream)
		if err != nil || mark.Unfinished == "" {
			return false, err
		}
		still, err := a.marked(ctx, stream, mark)
		if err != nil {
			return false, err
		}
		if still {
			if err := a.conn.Pause(ctx, 20*time.Millisecond); err != nil {
				return false, fmt.Errorf("jetstream: stream %s is marked as deleted, and is still there: %w", stream, err)
			}
			continue
		}
		ends := make(map[string]uint64)
		for _, s := range records.OfStream(stream) {
			if _, known := ends[s.Bucket]; known {
				continue
			}
			info, err := a.conn.FindStream(ctx, "KV_"+s.Bucket)
			if err != nil {
				return false, err
			}
			ends[s.Bucket] = info.State.LastSeq
		}
		now, err := a.records.Deletion(ctx, stream)
		if err != nil {
			return false, err
		}
		if now.Revision != mark.Revision {
			continue
		}
		bucket := streams.NewBucket(mark.Unfinished).Stream
		switch info, err := a.conn.FindStream(ctx, bucket); {
		case errors.Is(err, event.ErrNotFound):
		case err != nil:
			return false, err
		case info.Config.Metadata[streams.BucketTopic] == mark.Unfinished: // else: somebody's own
			if err := a.conn.JS.DeleteStream(ctx, bucket); err != nil && !errors.Is(err, natsjs.ErrStreamNotFound) {
				return false, err
			}
		}
		for _, s := range records.OfStream(stream) {
			if err := a.conn.Purge(ctx, s.Bucket, s.Subject, ends[s.Bucket]); err != nil {
				return false, err
			}
		}
		if err := a.records.Finished(ctx, stream, mark); !errors.Is(err, records.ErrMoved) {
			return true, err
		}
	}
}
