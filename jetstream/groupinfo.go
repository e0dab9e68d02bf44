package jetstream

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"strings"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// GroupInfo is what operators want to know of a group. The figures are the server's own; reading
// them reads three events at most: two for OldestUnackedMS, and one for LastID.
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
	// that were delivered and are not settled, those in back-off included. Both count the events
	// that a redrive has put back.
	Pending  uint64 `json:"pending"`
	InFlight uint64 `json:"inflight"`
	// PutBack is how many events of both were put back by a redrive.
	PutBack uint64 `json:"putBack"`
	// Redelivered is how many of those in flight were delivered more than once.
	Redelivered uint64 `json:"redelivered"`
	// OldestUnackedMS is how long ago the oldest event was stored that is not settled; 0 if there
	// is none. An event that a redrive has put back counts from then on.
	OldestUnackedMS int64 `json:"oldestUnackedMs"`
	Paused          bool  `json:"paused"`
	// TTLMS is how long the group outlives its last member; 0: it stays.
	TTLMS int64 `json:"groupTtlMs,omitempty"`
	// Members is the number of subscriptions of the group on this hub. Waiting is the number of
	// requests for events that wait on the server, of members on all hubs.
	Members int `json:"members"`
	Waiting int `json:"waiting"`
	// Stuck is since when the group is stuck (Lag.StuckSince), in epoch milliseconds; 0: it is not.
	Stuck int64 `json:"stuck,omitempty"`
}

// Info returns what is known of the group. It returns ErrNotFound when the topic or the group does
// not exist.
func (g Group) Info(ctx context.Context) (GroupInfo, error) {
	t, ptr, info, err := g.present(ctx)
	if err != nil {
		return GroupInfo{}, err
	}
	found, err := (&groupReader{admin: g.bus.admin}).info(ctx, t, g.name, &ptr, info)
	if err != nil {
		return GroupInfo{}, g.bus.conn.Unavailable(err)
	}
	return found, nil
}

// info is what is known of the group that a consumer is.
func (r *groupReader) info(ctx context.Context, t *streams.Topic, group string, ptr *records.Generation, info *natsjs.ConsumerInfo) (GroupInfo, error) {
	a := r.admin
	if !current(info) {
		return GroupInfo{}, errNotCurrent
	}
	var queue *natsjs.ConsumerInfo
	if ptr.PutBack != "" {
		var err error
		queue, err = a.records.Consumer(ctx, &streams.Topic{Stream: &streams.Stream{Name: putBackStream}}, ptr.PutBack)
		switch {
		case gone(err):
			queue = nil
		case err != nil:
			return GroupInfo{}, err
		case !current(queue):
			return GroupInfo{}, errNotCurrent
		}
	}
	lag, err := r.lagOf(ctx, t, group, info, queue)
	if err != nil {
		return GroupInfo{}, err
	}
	settled, err := r.lastSettled(ctx, t, info)
	if err != nil {
		return GroupInfo{}, err
	}
	found := GroupInfo{
		Topic: t.Name, Group: group, Generation: ptr.Number, LastID: settled.id, LastTS: settled.ts, Floor: floorOf(info),
		Pending: lag.Pending, InFlight: lag.InFlight, Redelivered: uint64(max(info.NumRedelivered, 0)), OldestUnackedMS: lag.OldestUnacked.Milliseconds(),
		Paused: ptr.Paused, TTLMS: info.Config.InactiveThreshold.Milliseconds(), Waiting: info.NumWaiting,
	}
	if queue != nil {
		found.PutBack = queue.NumPending + uint64(max(queue.NumAckPending, 0))
		found.Redelivered += uint64(max(queue.NumRedelivered, 0))
	}
	if !lag.StuckSince.IsZero() {
		found.Stuck = lag.StuckSince.UnixMilli()
	}
	found.Members = a.adminHooks.members(t, info.Name)
	return found, nil
}

// Groups has the requests about all groups. It is a small value that costs nothing to create. Its
// methods may be called concurrently. Their errors are for operators, as those of Admin.
type Groups struct{ admin *admin }

// Groups gives access to all groups.
func (a Admin) Groups() Groups { return Groups{a.bus.admin} }

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
func (g Groups) List(ctx context.Context, page GroupsPage) (groups []GroupInfo, next string, err error) {
	a := g.admin
	if page.Limit < 1 || page.Limit > MaxGroupsPage {
		return nil, "", event.BadOptions("limit is %d: 1 to %d are allowed", page.Limit, MaxGroupsPage)
	}
	r := &groupReader{admin: a}
	return walkGroups(ctx, r, &page, maxGroupsSeen, func(at *foundGroup) (GroupInfo, error) {
		return r.info(ctx, at.topic, at.group, &at.ptr, at.info)
	})
}

// MaxCursorsPage is the most groups of one page of Groups.Cursors.
const MaxCursorsPage = 10_000

// GroupCursor is the cursor of a group.
type GroupCursor struct {
	Group string `json:"group"`
	// LastID and LastTS are those of Cursor.
	LastID string `json:"lastId"`
	LastTS int64  `json:"lastTs"`
}

// Cursors is List for cursors alone, with 1..MaxCursorsPage of them on a page. Page.Topic is
// required.
func (g Groups) Cursors(ctx context.Context, page GroupsPage) (cursors []GroupCursor, next string, err error) {
	a := g.admin
	if page.Limit < 1 || page.Limit > MaxCursorsPage {
		return nil, "", event.BadOptions("limit is %d: 1 to %d are allowed", page.Limit, MaxCursorsPage)
	}
	if err := ValidTopic(page.Topic); err != nil {
		return nil, "", err
	}
	r := &groupReader{admin: a}
	return walkGroups(ctx, r, &page, MaxCursorsPage, func(at *foundGroup) (GroupCursor, error) {
		settled, err := r.lastSettled(ctx, at.topic, at.info)
		return GroupCursor{at.group, settled.id, settled.ts}, err
	})
}

// foundGroup is a group with its consumer.
type foundGroup struct {
	topic *streams.Topic
	group string
	ptr   records.Generation
	info  *natsjs.ConsumerInfo
}

// walkGroups reads a page of groups, looking at seen consumers at most. read is called
// concurrently.
func walkGroups[T any](ctx context.Context, r *groupReader, page *GroupsPage, seen int, read func(*foundGroup) (T, error)) (found []T, next string, err error) {
	after, err := parseGroupsNext(page.Next)
	if err != nil {
		return nil, "", err
	}
	streams, err := r.admin.streamsOf(ctx, r, page.Topic)
	if err != nil {
		return nil, "", err
	}
	for _, stream := range streams {
		if stream < after.stream {
			continue
		}
		if stream != after.stream {
			after = groupsNext{stream: stream}
		}
		for consumers, err := range consumerPages(ctx, r.admin.core, stream, after.consumer, after.offset) {
			if err == nil && len(consumers.missing) > 0 {
				err = fmt.Errorf("%w (%d groups of stream %s)", errNotCurrent, len(consumers.missing), stream)
			}
			if err != nil {
				return nil, "", r.admin.conn.Unavailable(err)
			}
			after.offset = consumers.offset
			for left := consumers.consumers; len(left) > 0; {
				if len(found) == page.Limit || seen == 0 {
					return found, after.String(), nil
				}
				part := left[:min(len(left), page.Limit-len(found), seen)]
				seen -= len(part)
				left = left[len(part):]
				after.consumer = part[len(part)-1].Name
				values := make([]*T, len(part))
				err := concurrently(len(part), func(i int) error {
					at, err := r.find(ctx, part[i], page)
					if err != nil || at == nil {
						return err
					}
					value, err := read(at)
					values[i] = &value
					return err
				})
				if err != nil {
					return nil, "", r.admin.conn.Unavailable(err)
				}
				for _, value := range values {
					if value != nil {
						found = append(found, *value)
					}
				}
			}
		}
	}
	return found, "", nil
}

// streamsOf returns the streams that may have groups of a topic, or of all topics, in order.
func (a *admin) streamsOf(ctx context.Context, r *groupReader, topic string) (streams []string, err error) {
	if topic != "" {
		t, err := r.topic(ctx, topic)
		if errors.Is(err, event.ErrNotFound) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		return []string{t.Stream.Name}, nil
	}
	return streamNames(ctx, a.core)
}

// find returns the group that a consumer is, or nil for a consumer that is no group, or one that
// the page leaves out.
func (r *groupReader) find(ctx context.Context, info *natsjs.ConsumerInfo, page *GroupsPage) (*foundGroup, error) {
	topic, group := info.Config.Metadata[native.MetaTopic], info.Config.Metadata[native.MetaGroup]
	if topic == "" || group == "" || page.Topic != "" && topic != page.Topic || page.Visible != nil && !page.Visible(topic, group) {
		return nil, nil //nolint:nilnil // as documented
	}
	t, err := r.topic(ctx, topic)
	if errors.Is(err, event.ErrNotFound) {
		return nil, nil //nolint:nilnil // as documented
	}
	if err != nil {
		return nil, err
	}
	if t.Stream.Name != info.Stream {
		return nil, nil //nolint:nilnil // as documented
	}
	ptr, err := r.admin.records.Generation(ctx, t, group)
	if err != nil || ptr.Deleted || ptr.Consumer != info.Name {
		return nil, err
	}
	return &foundGroup{t, group, ptr, info}, nil
}

// groupsNext is where a page of groups ended.
type groupsNext struct {
	stream, consumer string
	offset           int // of the consumer, in steps of pages
}

// String is what GroupsPage.Next takes.
func (n groupsNext) String() string {
	return base64.RawURLEncoding.EncodeToString([]byte(n.stream + "\x00" + n.consumer + "\x00" + strconv.Itoa(n.offset)))
}

func parseGroupsNext(next string) (at groupsNext, err error) {
	if next == "" {
		return at, nil
	}
	text, err := base64.RawURLEncoding.DecodeString(next)
	part := strings.Split(string(text), "\x00")
	if err == nil && len(part) == 3 && part[0] != "" {
		at.stream, at.consumer = part[0], part[1]
		if at.offset, err = strconv.Atoi(part[2]); err == nil && at.offset >= 0 {
			return at, nil
		}
	}
	return groupsNext{}, event.BadOptions("next is not what a page of groups has returned")
}
