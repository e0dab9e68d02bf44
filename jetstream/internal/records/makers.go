package records

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

// MakersBucket has an entry for each group that counts for a client: CLIENT.STREAM.GROUP, and for
// each stream of a topic: CLIENT.STREAM. It outlives the hubs, so that a restart gives nobody a new
// quota.
const MakersBucket = "eventhub_makers"

// MetaMaker is the metadata of a group's consumer that names the client that made the group.
const MetaMaker = "eventhub.maker"

// Makers counts the topics and the groups that clients have made and that exist.
type Makers struct {
	records *Records
	// looked is when what of a client's does not exist any more was last looked for.
	looked    *quota.Set
	newGroups *conn.Ration
}

func newMakers(r *Records) *Makers {
	return &Makers{
		records: r, looked: quota.New(1/conn.NewRefill.Seconds(), 1, r.Limits.Topics, nil),
		newGroups: conn.NewRation(r.Obs, "groups_per_client", "groups", r.Limits.GroupsPerClient, r.Limits.Topics),
	}
}

const makersPrefix = "$KV." + MakersBucket + "."

// makerSubject is where a group of a client is noted.
func makerSubject(client string, t *streams.Topic, group string) string {
	return makersPrefix + native.ObjectName(client) + "." + GroupKey(t, group)
}

// Entry is a topic or a group that is noted for a client. The zero Entry is none.
type Entry struct {
	subject string
	seq     uint64 // of the note
	Client  string
}

// makerNote is the value of an Entry, for operators.
type makerNote struct {
	Client string `json:"client"`
	Topic  string `json:"topic"`
	Group  string `json:"group,omitempty"`
}

// Note counts a group that a client is about to make, or returns the refusal. A group of the client
// that has ended by its TTL, and is made again, is free. The caller calls Forget when the group was
// not made after all.
//
// The note comes before the consumer, so that hubs that make groups for one client at once do not
// exceed its limit together.
func (m *Makers) Note(ctx context.Context, t *streams.Topic, group, client string) (Entry, error) {
	c := m.records
	e := Entry{subject: makerSubject(client, t, group), Client: client}
	_, err := c.Conn.LastBySubject(ctx, "KV_"+MakersBucket, e.subject)
	if err == nil {
		return Entry{}, nil
	}
	if !errors.Is(err, event.ErrNotFound) {
		return Entry{}, c.Conn.Unavailable(err)
	}
	if err := m.newGroups.Take(client); err != nil {
		return Entry{}, err
	}
	return m.write(ctx, e, makerNote{client, t.Name, group}, "client_groups", func() (*event.Error, error) { return m.refusal(ctx, t, client) })
}

// NoteTopic is Note for a topic that a client is about to make, with a stream of this name. What
// nobody named makes counts for nobody. undo takes the note back.
func (m *Makers) NoteTopic(ctx context.Context, topic, stream, client string) (undo func(context.Context), err error) {
	if !conn.Rationed(client) {
		return func(context.Context) {}, nil
	}
	e := Entry{subject: makersPrefix + native.ObjectName(client) + "." + stream, Client: client}
	e, err = m.write(ctx, e, makerNote{Client: client, Topic: topic}, "client_topics", func() (*event.Error, error) { return m.TopicRefusal(ctx, client, 0) })
	return func(ctx context.Context) { m.Forget(ctx, e) }, err
}

// write writes a note, and takes it back if the client has too many then.
func (m *Makers) write(ctx context.Context, e Entry, note makerNote, limit string, refusal func() (*event.Error, error)) (Entry, error) {
	c := m.records
	value, err := json.Marshal(note)
	if err != nil {
		return Entry{}, err
	}
	ack, err := c.Conn.Write(ctx, "KV_"+MakersBucket, &nats.Msg{Subject: e.subject, Data: value})
	if err != nil {
		return Entry{}, c.Conn.Unavailable(fmt.Errorf("jetstream: note who makes a topic or a group: %w", err))
	}
	e.seq = ack.Seq
	refused, err := refusal()
	if refused != nil && m.looked.Take(e.Client) == 0 {
		if err = m.Sweep(ctx, e.Client, sweepYoung); err == nil {
			refused, err = refusal()
		}
	}
	if err == nil && refused == nil {
		return e, nil
	}
	m.Forget(ctx, e)
	if err != nil {
		return Entry{}, c.Conn.Unavailable(err)
	}
	c.Obs.LimitReached(limit)
	return Entry{}, refused
}

// TopicRefusal returns why a client that is about to make more topics has too many, or nil.
func (m *Makers) TopicRefusal(ctx context.Context, client string, more int) (*event.Error, error) {
	if !conn.Rationed(client) {
		return nil, nil
	}
	noted, err := m.records.Conn.Subjects(ctx, MakersBucket, makersPrefix+native.ObjectName(client)+".*")
	if limit := m.records.Limits.ClientTopics; err == nil && len(noted)+more > limit {
		return &event.Error{Code: event.CodeRateLimited, Msg: fmt.Sprintf("this client has made %d topics that exist, which is its limit: have some deleted", limit)}, nil
	}
	return nil, err
}

// refusal returns why the client has too many groups, the noted ones included, or nil.
func (m *Makers) refusal(ctx context.Context, t *streams.Topic, client string) (*event.Error, error) {
	c := m.records
	prefix := makersPrefix + native.ObjectName(client) + "."
	noted, err := c.Conn.Subjects(ctx, MakersBucket, prefix+"*.*")
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
	case len(noted) > c.Limits.ClientGroups:
		return &event.Error{Code: event.CodeOverloaded, Msg: fmt.Sprintf("this client has made %d groups that exist, which is its limit: have some deleted, or let them end by opts.groupTtlMs", c.Limits.ClientGroups)}, nil
	case here > share:
		return &event.Error{Code: event.CodeOverloaded, Msg: fmt.Sprintf("this client has made %d groups on the stream of this topic, which is half of what it has room for: have some deleted, or let them end by opts.groupTtlMs", share)}, nil
	}
	return nil, nil
}

// Forget takes a note back. One that stays is found by the next sweep.
func (m *Makers) Forget(ctx context.Context, e Entry) {
	if e.subject == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanWait)
	defer cancel()
	if err := m.records.Conn.Purge(ctx, MakersBucket, e.subject, e.seq); err != nil {
		m.records.Often.Log(ctx, slog.LevelWarn, "failed to remove the note of who made something; the next sweep removes it", "", slog.Any("error", err))
	}
}

// Sweep removes the notes of a client's topics and groups that do not exist any more; "" is every
// client. It leaves notes alone that are younger than age: their groups may be about to be made.
func (m *Makers) Sweep(ctx context.Context, client string, age time.Duration) error {
	c := m.records
	prefix := makersPrefix
	if client != "" {
		prefix += native.ObjectName(client) + "."
	}
	noted := make(map[string][]Entry) // by stream
	before := time.Now().Add(-age)
	err := c.Messages.Through(ctx, "KV_"+MakersBucket, reading.Query{HeadersOnly: true}, func(msg *conn.StoredMsg) error {
		if parts := strings.Split(strings.TrimPrefix(msg.Subject, makersPrefix), "."); strings.HasPrefix(msg.Subject, prefix) && len(parts) >= 2 && msg.Time.Before(before) {
			noted[parts[1]] = append(noted[parts[1]], Entry{subject: msg.Subject, seq: msg.Seq})
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
				if err := c.Conn.Purge(ctx, MakersBucket, e.subject, e.seq); err != nil {
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
func (r *Records) groupsOf(ctx context.Context, stream string) (map[string]bool, error) {
	s, err := r.Conn.JS.Stream(ctx, stream)
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
