// Package native is for programs that speak NATS themselves, beside the clients of a hub. It maps
// topics, keys and events to subjects, headers and streams, and lets a program be a member of a
// group next to members that have connected to a hub. Hubs use the same code.
//
// A program connects with nats.go, and publishes and consumes with a Client:
//
//	nc, err := nats.Connect("nats://127.0.0.1:4222", nats.Token(token))
//	js, err := jetstream.New(nc)
//	client := native.New(js)
//	_, err = client.Publish(ctx, "orders.placed", payload, native.Fields{Key: "customer:1"})
//	group, err := client.Group(ctx, "orders.placed", "mailer", native.GroupOptions{})
//	err = group.Consume(ctx, handle)
//
// The functions of the package are enough for a program with loops of its own: Subject and Filters
// name subjects, ParseSubject reads them back, Decode reads an event from a message, BucketName and
// KeyToken find the newest event of a key, and Group.Receive turns a message of any pull into a
// Delivery. The file testdata/subjects.json has the mapping as data, for tests of programs in other
// languages, and docs/native.md describes it.
//
// Policies and limits of the hub do not apply to what a program does through NATS: the permissions
// of its NATS user do.
package native

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
)

var (
	// ErrNoTopic is returned when no stream stores the topic. Nothing was stored. A hub makes the
	// stream of a topic that a rule names when the hub starts, and that of any other topic at its
	// first use, or when asked to by `eventhub topics create`.
	ErrNoTopic = errors.New("native: no stream stores this topic; create it with eventhub topics create, or use it through the hub once")
	// ErrGroupGone is returned when a group was deleted, or lost its consumer. A member that joins
	// through a hub makes the group again.
	ErrGroupGone = errors.New("native: the group has no consumer; join it through the hub once")
	// ErrOrdered is returned for an ordered group, whose events one hub gives out.
	ErrOrdered = errors.New("native: the group is ordered; join it through a hub")
	// ErrNotEvent is returned for a message that is no event of a topic.
	ErrNotEvent = errors.New("native: the message is no event of a topic")
	// ErrNotHeld is returned when a Delivery is settled or kept after this member has lost it: the
	// event was settled before, AckWait is nearly over since it was last kept, or the client is
	// connected to another server by now, or to one that was restarted. Nothing was sent,
	// because the server could take it for another member's.
	ErrNotHeld = errors.New("native: this member does not hold the event any more")
	// ErrNotConnected is returned when a Delivery is settled while there is no connection to NATS.
	// Nothing was sent, and nothing will be: nats.go would send it when the event may be another
	// member's. The Delivery is still held, and may be settled once the connection is back.
	ErrNotConnected = errors.New("native: no connection to NATS; settle again when it is back")
	// ErrNotPermitted is returned when the NATS user of the program may not ask what a call needs
	// to know. A user gets rights for groups that exist when it connects: connect again after a
	// group was made or moved.
	ErrNotPermitted = errors.New("native: the NATS user has no permission for this")
)

// requestWait is how long a request waits for NATS if its context says nothing else.
const requestWait = 10 * time.Second

// Client publishes events and joins groups. New returns one. Its methods may be called
// concurrently. It needs no closing.
type Client struct {
	js natsjs.JetStream

	mu       sync.Mutex
	families map[string]bool // whether the stream of a topic is a family's; at most maxFamilies
}

// maxFamilies bounds what a Client remembers.
const maxFamilies = 10_000

// New returns a Client that uses js.
func New(js natsjs.JetStream) *Client {
	return &Client{js: js, families: make(map[string]bool)}
}

// Publish stores an event, and returns once the stream has it. A payload should be JSON; anything
// else reaches clients of a hub as a string, with the header HeaderEncoding. An event with an ID
// that was published to the topic within its duplicate window is stored once: the PubAck then has
// Duplicate set. Publish returns ErrNoTopic when no stream stores the topic.
func (c *Client) Publish(ctx context.Context, topic string, payload []byte, fields Fields) (*natsjs.PubAck, error) {
	msg, err := c.message(ctx, topic, payload, &fields)
	if err != nil {
		return nil, err
	}
	ctx, cancel := within(ctx)
	defer cancel()
	ack, err := c.js.PublishMsg(ctx, msg)
	if errors.Is(err, natsjs.ErrNoStreamResponse) || errors.Is(err, nats.ErrNoResponders) {
		return nil, fmt.Errorf("publish to %s: %w", topic, ErrNoTopic)
	}
	if err != nil {
		return nil, fmt.Errorf("native: publish to %s: %w", topic, err)
	}
	return ack, nil
}

func (c *Client) message(ctx context.Context, topic string, payload []byte, fields *Fields) (*nats.Msg, error) {
	if err := CheckTopic(topic); err != nil {
		return nil, fmt.Errorf("native: %w", err)
	}
	if err := fields.Check(); err != nil {
		return nil, fmt.Errorf("native: publish to %s: %w", topic, err)
	}
	if fields.Tombstone && len(payload) > 0 && string(payload) != "null" {
		return nil, fmt.Errorf("native: publish to %s: a tombstone has no payload", topic)
	}
	family := false
	if fields.ID != "" {
		var err error
		if family, err = c.family(ctx, topic); err != nil {
			return nil, err
		}
	}
	return &nats.Msg{Subject: Subject(topic, fields.Key), Header: fields.Header(topic, family), Data: payload}, nil
}

// family reports whether the topic's stream holds other topics too. Dead letters count as such
// without a look. So do topics whose stream the user may not see: in the stream of a single topic,
// an id in the form of a family's still makes the publishes of all such users idempotent.
func (c *Client) family(ctx context.Context, topic string) (bool, error) {
	if strings.HasPrefix(topic, DeadLetterPrefix) {
		return true, nil
	}
	c.mu.Lock()
	family, known := c.families[topic]
	c.mu.Unlock()
	if known {
		return family, nil
	}
	switch info, err := c.stream(ctx, topic); {
	case errors.Is(err, ErrNotPermitted):
		family = true
	case err != nil:
		return false, err
	default:
		family = IsFamily(topic, info.Config.Name, info.Config.Subjects)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.families) >= maxFamilies {
		clear(c.families)
	}
	c.families[topic] = family
	return family, nil
}

// stream finds the stream of a topic.
func (c *Client) stream(ctx context.Context, topic string) (*natsjs.StreamInfo, error) {
	ctx, cancel := within(ctx)
	defer cancel()
	s, err := c.streamNamed(ctx, ObjectName(topic))
	if err == nil && slices.Contains(s.CachedInfo().Config.Subjects, Subject(topic, "")) {
		return s.CachedInfo(), nil
	}
	if err == nil || errors.Is(err, natsjs.ErrStreamNotFound) { // it may be a family's
		var name string
		err = c.ask(ctx, "STREAM.NAMES", func(ctx context.Context) (err error) {
			name, err = c.js.StreamNameBySubject(ctx, Subject(topic, ""))
			return err
		})
		if err == nil {
			s, err = c.streamNamed(ctx, name)
		}
	}
	if errors.Is(err, natsjs.ErrStreamNotFound) {
		return nil, fmt.Errorf("topic %s: %w", topic, ErrNoTopic)
	}
	if err != nil {
		return nil, fmt.Errorf("native: find the stream of topic %s: %w", topic, err)
	}
	return s.CachedInfo(), nil
}

func (c *Client) streamNamed(ctx context.Context, name string) (s natsjs.Stream, err error) {
	err = c.ask(ctx, "STREAM.INFO."+name, func(ctx context.Context) (err error) {
		s, err = c.js.Stream(ctx, name)
		return err
	})
	return s, err
}

// refusedEvery is the interval between looks whether the server has refused a request.
const refusedEvery = 10 * time.Millisecond

// ask sends a request to the API of JetStream, and returns ErrNotPermitted as soon as the server
// refuses that. The server says so to the connection, and does not answer the request.
func (c *Client) ask(ctx context.Context, subject string, request func(context.Context) error) error {
	refusal := strings.ToLower(`"` + c.api() + subject + `"`)
	ctx, end := context.WithCancelCause(ctx)
	var watching sync.WaitGroup
	watching.Go(func() {
		tick := time.NewTicker(refusedEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			last := c.js.Conn().LastError() // of this connection: a new one has none
			if errors.Is(last, nats.ErrPermissionViolation) && strings.Contains(strings.ToLower(last.Error()), refusal) {
				end(ErrNotPermitted)
				return
			}
		}
	})
	err := request(ctx)
	end(nil)
	watching.Wait()
	if err != nil && errors.Is(context.Cause(ctx), ErrNotPermitted) {
		return ErrNotPermitted
	}
	return err
}

// api is the prefix of the subjects of the API of JetStream.
func (c *Client) api() string {
	switch o := c.js.Options(); {
	case o.APIPrefix != "":
		return strings.TrimSuffix(o.APIPrefix, ".") + "."
	case o.Domain != "":
		return "$JS." + o.Domain + ".API."
	}
	return "$JS.API."
}

// Decode reads the event of a message that a consumer has delivered. The payload shares memory with
// the message. Decode returns ErrNotEvent for a message of a stream that stores no topic.
func Decode(msg natsjs.Msg) (*Event, error) {
	meta, err := msg.Metadata()
	if err != nil {
		return nil, fmt.Errorf("native: message on %s: %w", msg.Subject(), err)
	}
	return DecodeStored(meta.Stream, &natsjs.RawStreamMsg{
		Subject: msg.Subject(), Sequence: meta.Sequence.Stream, Header: msg.Headers(), Data: msg.Data(), Time: meta.Timestamp,
	})
}

// DecodeStored is Decode for a message that was read from a stream.
func DecodeStored(stream string, msg *natsjs.RawStreamMsg) (*Event, error) {
	topic, key, ok := ParseSubject(msg.Subject)
	if !ok || CheckTopic(topic) != nil {
		return nil, fmt.Errorf("%w: its subject is %s", ErrNotEvent, msg.Subject)
	}
	e := &Event{Topic: topic, Key: key, Payload: msg.Data, Stream: stream, Sequence: msg.Sequence, StoredAt: msg.Time.UnixNano()}
	e.ReadHeader(msg.Header)
	return e, nil
}

// errNoEntry says that a bucket has no value of a key, or that there is no such bucket.
var errNoEntry = errors.New("native: no entry")

// entry reads the value of a key in a bucket of the hubs, in one request that names the key: a
// token with a policy is permitted no other.
func (c *Client) entry(ctx context.Context, bucket, key string) ([]byte, error) {
	subject := "DIRECT.GET.KV_" + bucket + ".$KV." + bucket + "." + key
	var m *nats.Msg
	err := c.ask(ctx, subject, func(ctx context.Context) (err error) {
		m, err = c.js.Conn().RequestWithContext(ctx, c.api()+subject, nil)
		return err
	})
	if errors.Is(err, nats.ErrNoResponders) {
		return nil, errNoEntry
	}
	if err != nil {
		return nil, err
	}
	switch status := m.Header.Get("Status"); {
	case status == "404", m.Header.Get(HeaderOperation) != "":
		return nil, errNoEntry
	case status != "":
		return nil, fmt.Errorf("status %s %s", status, m.Header.Get("Description"))
	}
	return m.Data, nil
}

// within bounds a request that has no deadline.
func within(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, has := ctx.Deadline(); has {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, requestWait)
}
