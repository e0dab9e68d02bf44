package jetstream

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// GroupInfo is what operators want to know of a group. The figures are the server's own; reading
// them reads no events.
type GroupInfo struct {
	Topic string `json:"topic"`
	Group string `json:"group"`
	// Generation counts the moves of the group, from 1.
	Generation int `json:"generation"`
	// LastID and LastTS are the group's Cursor. Floor is its sequence: every event up to it is
	// settled.
	LastID string `json:"lastId,omitempty"`
	LastTS int64  `json:"lastTs,omitempty"`
	Floor  uint64 `json:"floor"`
	// Pending is the number of events that were not delivered yet. InFlight is the number of events
	// that were delivered and are not settled, those in back-off included.
	Pending  uint64 `json:"pending"`
	InFlight uint64 `json:"inflight"`
	// PutBack is the number of events that a redrive has put back and that are not settled.
	PutBack uint64 `json:"putBack"`
	// Redelivered is how many of those in flight were delivered more than once.
	Redelivered uint64 `json:"redelivered"`
	// OldestUnackedMS is how long ago the oldest event was stored that is not settled; 0 if there
	// is none.
	OldestUnackedMS int64 `json:"oldestUnackedMs"`
	Paused          bool  `json:"paused"`
	// TTLMS is how long the group outlives its last member; 0: it stays.
	TTLMS int64 `json:"groupTtlMs,omitempty"`
	// Members is the number of subscriptions of the group on this hub. Waiting is the number of
	// requests for events that wait on the server, of members on all hubs.
	Members int `json:"members"`
	Waiting int `json:"waiting"`
}

// Info returns what is known of the group. It returns ErrNotFound when the topic or the group does
// not exist.
func (g Group) Info(ctx context.Context) (GroupInfo, error) {
	t, ptr, err := g.pointer(ctx)
	if err != nil {
		return GroupInfo{}, err
	}
	info, err := g.bus.groupConsumer(ctx, t, &ptr)
	if errors.Is(err, ErrNotFound) {
		return GroupInfo{}, ErrNotFound
	}
	if err != nil {
		return GroupInfo{}, g.bus.unavailable(err)
	}
	return g.bus.groupInfo(ctx, t, g.name, &ptr, info)
}

func (b *Bus) groupInfo(ctx context.Context, t *topicInfo, group string, ptr *generation, info *natsjs.ConsumerInfo) (GroupInfo, error) {
	found := GroupInfo{
		Topic: t.name, Group: group, Generation: ptr.Number, Floor: floorOf(info),
		Pending: info.NumPending, InFlight: uint64(max(info.NumAckPending, 0)), Redelivered: uint64(max(info.NumRedelivered, 0)),
		Paused: ptr.Paused, TTLMS: info.Config.InactiveThreshold.Milliseconds(), Waiting: info.NumWaiting,
	}
	if live := b.liveGroup(t, info.Name); live != nil {
		found.Members = len(b.membersOf(live))
	}
	var err error
	if found.LastID, found.LastTS, err = b.lastSettled(ctx, t, info); err != nil {
		return GroupInfo{}, err
	}
	waiting, leased, err := b.putBackCount(ctx, ptr.PutBack)
	if err != nil {
		return GroupInfo{}, err
	}
	found.PutBack = waiting + leased
	if found.Pending+found.InFlight > 0 {
		oldest, err := b.nextStored(ctx, t, &walkOptions{}, found.Floor)
		if err != nil {
			return GroupInfo{}, err
		}
		if oldest != nil {
			found.OldestUnackedMS = max(info.TimeStamp.Sub(oldest.time).Milliseconds(), 0)
		}
	}
	return found, nil
}

// Groups has the requests about all groups. It is a small value that costs nothing to create. Its
// methods may be called concurrently. Their errors are for operators, as those of Admin.
type Groups struct{ bus *Bus }

// Groups gives access to all groups.
func (a Admin) Groups() Groups { return Groups(a) }

// MaxGroupsPage is the most groups of one page of Groups.
const MaxGroupsPage = 500

// maxGroupsSeen is how many consumers are looked at for one page at most: a page of a caller who
// may see few groups ends early.
const maxGroupsSeen = 5_000

// GroupsPage selects groups for Groups.List.
type GroupsPage struct {
	// Topic selects the groups of one topic. By default, the groups of all topics are listed.
	Topic string
	// Limit is the most groups: 1..MaxGroupsPage.
	Limit int
	// Next is the Next of the page before; "" begins.
	Next string
	// Visible, when not nil, selects groups by topic and name.
	Visible func(topic, group string) bool
}

// List lists groups, in the order of their streams and names. next is "" at the end. A group that
// exists all the time is listed once. A topic that does not exist has no groups.
func (a Groups) List(ctx context.Context, page GroupsPage) (groups []GroupInfo, next string, err error) {
	b := a.bus
	if page.Limit < 1 || page.Limit > MaxGroupsPage {
		return nil, "", badOptions("limit is %d: 1 to %d are allowed", page.Limit, MaxGroupsPage)
	}
	after, err := parseGroupsNext(page.Next)
	if err != nil {
		return nil, "", err
	}
	var streams []string
	if page.Topic != "" {
		t, err := b.existing(ctx, page.Topic)
		if errors.Is(err, ErrNotFound) {
			return nil, "", nil
		}
		if err != nil {
			return nil, "", err
		}
		streams = []string{t.stream.name}
	} else {
		list := b.js.StreamNames(ctx)
		for name := range list.Name() {
			if !strings.HasPrefix(name, "KV_") && !strings.HasPrefix(name, "OBJ_") {
				streams = append(streams, name)
			}
		}
		if err := list.Err(); err != nil && !errors.Is(err, natsjs.ErrEndOfData) {
			return nil, "", b.unavailable(fmt.Errorf("jetstream: list streams: %w", err))
		}
		slices.Sort(streams)
	}
	seen := 0
	for _, stream := range streams {
		if stream < after[0] {
			continue
		}
		names, err := b.consumerNames(ctx, stream)
		if err != nil {
			return nil, "", b.unavailable(err)
		}
		for _, name := range names {
			at := [2]string{stream, name}
			if cmp.Or(strings.Compare(stream, after[0]), strings.Compare(name, after[1])) <= 0 {
				continue
			}
			if len(groups) == page.Limit || seen == maxGroupsSeen {
				return groups, formatGroupsNext(after), nil
			}
			after = at
			seen++
			found, ok, err := b.listed(ctx, stream, name, &page)
			if err != nil {
				return nil, "", b.unavailable(err)
			}
			if ok {
				groups = append(groups, found)
			}
		}
	}
	return groups, "", nil
}

// listed returns the group that a consumer is. ok is false for consumers that are no group, or one
// that the page leaves out.
func (b *Bus) listed(ctx context.Context, stream, name string, page *GroupsPage) (found GroupInfo, ok bool, err error) {
	c, err := b.js.Consumer(ctx, stream, name)
	if errors.Is(err, natsjs.ErrConsumerNotFound) || errors.Is(err, natsjs.ErrStreamNotFound) {
		return found, false, nil
	}
	if err != nil {
		return found, false, fmt.Errorf("jetstream: consumer %s of stream %s: %w", name, stream, err)
	}
	info := c.CachedInfo()
	topic, group := info.Config.Metadata[metaTopic], info.Config.Metadata[metaGroup]
	if topic == "" || group == "" || page.Topic != "" && topic != page.Topic || page.Visible != nil && !page.Visible(topic, group) {
		return found, false, nil
	}
	t, err := b.existing(ctx, topic)
	if err != nil {
		if errors.Is(err, ErrNotFound) {
			err = nil
		}
		return found, false, err
	}
	if t.stream.name != stream {
		return found, false, nil
	}
	ptr, err := b.generations.get(ctx, t, group)
	if err != nil || ptr.Deleted || ptr.Consumer != name {
		return found, false, err
	}
	found, err = b.groupInfo(ctx, t, group, &ptr, info)
	return found, err == nil, err
}

// consumerNames returns the names of a stream's consumers in order; none when it does not exist.
func (b *Bus) consumerNames(ctx context.Context, stream string) ([]string, error) {
	s, err := b.js.Stream(ctx, stream)
	if errors.Is(err, natsjs.ErrStreamNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("jetstream: stream %s: %w", stream, err)
	}
	var names []string
	list := s.ConsumerNames(ctx)
	for name := range list.Name() {
		names = append(names, name)
	}
	if err := list.Err(); err != nil && !errors.Is(err, natsjs.ErrEndOfData) && !errors.Is(err, natsjs.ErrStreamNotFound) {
		return nil, fmt.Errorf("jetstream: list consumers of stream %s: %w", stream, err)
	}
	slices.Sort(names)
	return names, nil
}

func formatGroupsNext(at [2]string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(at[0] + "\x00" + at[1]))
}

func parseGroupsNext(next string) (at [2]string, err error) {
	if next == "" {
		return at, nil
	}
	text, err := base64.RawURLEncoding.DecodeString(next)
	stream, consumer, ok := strings.Cut(string(text), "\x00")
	if err != nil || !ok || stream == "" {
		return at, badOptions("next is not what a page of groups has returned")
	}
	return [2]string{stream, consumer}, nil
}
