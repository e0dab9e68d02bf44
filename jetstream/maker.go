package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/reading"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
	"eventhub/jetstream/quota"
)

// makersBucket has an entry for each group that counts for a client: CLIENT.STREAM.GROUP, and for
// each stream of a topic: CLIENT.STREAM. It outlives the hubs, so that a restart gives nobody a new
// quota.
const makersBucket = "eventhub_makers"

// Metadata of a group's consumer.
const (
	metaGroup = native.MetaGroup
	metaTopic = native.MetaTopic
	metaMaker = "eventhub.maker" // the client that made the group
)

// makers counts the topics and the groups that clients have made and that exist.
type makers struct {
	core *core
	// looked is when what of a client's does not exist any more was last looked for.
	looked    *quota.Set
	newGroups *conn.Ration
}

func newMakers(c *core) *makers {
	return &makers{
		core: c, looked: quota.New(1/conn.NewRefill.Seconds(), 1, c.limits.Topics, nil),
		newGroups: conn.NewRation(c.obs, "groups_per_client", "groups", c.limits.GroupsPerClient, c.limits.Topics),
	}
}

const makersPrefix = "$KV." + makersBucket + "."

// makerSubject is where a group of a client is noted.
func makerSubject(client string, t *streams.Topic, group string) string {
	return makersPrefix + objectName(client) + "." + groupKey(t, group)
}

// entry is a topic or a group that is noted for a client. The zero entry is none.
type entry struct {
	subject string
	seq     uint64 // of the note
	client  string
}

// makerNote is the value of an entry, for operators.
type makerNote struct {
	Client string `json:"client"`
	Topic  string `json:"topic"`
	Group  string `json:"group,omitempty"`
}

// note counts a group that a client is about to make, or returns the refusal. A group of the client
// that has ended by its TTL, and is made again, is free. The caller calls forget when the group was
// not made after all.
//
// The note comes before the consumer, so that hubs that make groups for one client at once do not
// exceed its limit together.
func (m *makers) note(ctx context.Context, t *streams.Topic, group, client string) (entry, error) {
	c := m.core
	e := entry{subject: makerSubject(client, t, group), client: client}
	_, err := c.conn.LastBySubject(ctx, "KV_"+makersBucket, e.subject)
	if err == nil {
		return entry{}, nil
	}
	if !errors.Is(err, event.ErrNotFound) {
		return entry{}, c.conn.Unavailable(err)
	}
	if err := m.newGroups.Take(client); err != nil {
		return entry{}, err
	}
	return m.write(ctx, e, makerNote{client, t.Name, group}, "client_groups", func() (*event.Error, error) { return m.refusal(ctx, t, client) })
}

// noteTopic is note for a topic that a client is about to make, with a stream of this name. What
// nobody named makes counts for nobody. undo takes the note back.
func (m *makers) noteTopic(ctx context.Context, topic, stream, client string) (undo func(context.Context), err error) {
	if !conn.Rationed(client) {
		return func(context.Context) {}, nil
	}
	e := entry{subject: makersPrefix + objectName(client) + "." + stream, client: client}
	e, err = m.write(ctx, e, makerNote{Client: client, Topic: topic}, "client_topics", func() (*event.Error, error) { return m.topicRefusal(ctx, client, 0) })
	return func(ctx context.Context) { m.forget(ctx, e) }, err
}

// write writes a note, and takes it back if the client has too many then.
func (m *makers) write(ctx context.Context, e entry, note makerNote, limit string, refusal func() (*event.Error, error)) (entry, error) {
	c := m.core
	value, err := json.Marshal(note)
	if err != nil {
		return entry{}, err
	}
	ack, err := c.conn.Write(ctx, "KV_"+makersBucket, &nats.Msg{Subject: e.subject, Data: value})
	if err != nil {
		return entry{}, c.conn.Unavailable(fmt.Errorf("jetstream: note who makes a topic or a group: %w", err))
	}
	e.seq = ack.Seq
	refused, err := refusal()
	if refused != nil && m.looked.Take(e.client) == 0 {
		if err = m.sweep(ctx, e.client, sweepYoung); err == nil {
			refused, err = refusal()
		}
	}
	if err == nil && refused == nil {
		return e, nil
	}
	m.forget(ctx, e)
	if err != nil {
		return entry{}, c.conn.Unavailable(err)
	}
	c.obs.LimitReached(limit)
	return entry{}, refused
}

// topicRefusal returns why a client that is about to make more topics has too many, or nil.
func (m *makers) topicRefusal(ctx context.Context, client string, more int) (*event.Error, error) {
	if !conn.Rationed(client) {
		return nil, nil
	}
	noted, err := m.core.conn.Subjects(ctx, makersBucket, makersPrefix+objectName(client)+".*")
	if limit := m.core.limits.ClientTopics; err == nil && len(noted)+more > limit {
		return &event.Error{Code: event.CodeRateLimited, Msg: fmt.Sprintf("this client has made %d topics that exist, which is its limit: have some deleted", limit)}, nil
	}
	return nil, err
}

// refusal returns why the client has too many groups, the noted ones included, or nil.
func (m *makers) refusal(ctx context.Context, t *streams.Topic, client string) (*event.Error, error) {
	c := m.core
	prefix := makersPrefix + objectName(client) + "."
	noted, err := c.conn.Subjects(ctx, makersBucket, prefix+"*.*")
	if err != nil {
		return nil, err
	}
	here := 0
	for subject := range noted {
		if strings.HasPrefix(subject, prefix+t.Stream.Name+".") {
			here++
		}
	}
	switch share := max(t.Stream.Room/2, 1); {
	case len(noted) > c.limits.ClientGroups:
		return &event.Error{Code: event.CodeOverloaded, Msg: fmt.Sprintf("this client has made %d groups that exist, which is its limit: have some deleted, or let them end by opts.groupTtlMs", c.limits.ClientGroups)}, nil
	case here > share:
		return &event.Error{Code: event.CodeOverloaded, Msg: fmt.Sprintf("this client has made %d groups on the stream of this topic, which is half of what it has room for: have some deleted, or let them end by opts.groupTtlMs", share)}, nil
	}
	return nil, nil
}

// forget takes a note back. One that stays is found by the next sweep.
func (m *makers) forget(ctx context.Context, e entry) {
	if e.subject == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleWait)
	defer cancel()
	if err := m.core.conn.Purge(ctx, makersBucket, e.subject, e.seq); err != nil {
		m.core.often.Log(ctx, slog.LevelWarn, "failed to remove the note of who made something; the next sweep removes it", "", slog.Any("error", err))
	}
}

// sweep removes the notes of a client's topics and groups that do not exist any more; "" is every
// client. It leaves notes alone that are younger than age: their groups may be about to be made.
func (m *makers) sweep(ctx context.Context, client string, age time.Duration) error {
	c := m.core
	prefix := makersPrefix
	if client != "" {
		prefix += objectName(client) + "."
	}
	noted := make(map[string][]entry) // by stream
	before := time.Now().Add(-age)
	err := c.messages.Through(ctx, "KV_"+makersBucket, reading.Query{HeadersOnly: true}, func(msg *conn.StoredMsg) error {
		if parts := strings.Split(strings.TrimPrefix(msg.Subject, makersPrefix), "."); strings.HasPrefix(msg.Subject, prefix) && len(parts) >= 2 && msg.Time.Before(before) {
			noted[parts[1]] = append(noted[parts[1]], entry{subject: msg.Subject, seq: msg.Seq})
		}
		return nil
	})
	if err != nil {
		return err
	}
	for stream, entries := range noted {
		alive, err := c.groupsOf(ctx, stream)
		if err != nil {
			return err
		}
		for _, e := range entries {
			parts := strings.Split(strings.TrimPrefix(e.subject, makersPrefix), ".")
			if alive == nil || len(parts) == 3 && !alive[parts[2]] {
				if err := c.conn.Purge(ctx, makersBucket, e.subject, e.seq); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// sweepYoung is how long a topic or a group may take from its note until it exists.
const sweepYoung = 2 * conn.PublishWait

// groupsOf returns the groups of a stream, by the names of their first consumers, and nil for a
// stream that does not exist.
func (c *core) groupsOf(ctx context.Context, stream string) (map[string]bool, error) {
	s, err := c.conn.JS.Stream(ctx, stream)
	if errors.Is(err, natsjs.ErrStreamNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("jetstream: stream %s: %w", stream, err)
	}
	groups := make(map[string]bool)
	names := s.ConsumerNames(ctx)
	for name := range names.Name() {
		base, _, _ := strings.Cut(name, "~")
		groups[base] = true
	}
	return groups, names.Err()
}
