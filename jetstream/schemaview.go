package jetstream

import (
	"context"
	"errors"
	"maps"
	"strconv"
	"strings"
	"time"

	"eventhub/jetstream/schema/upcast"
)

// SchemaLatest stands for the latest version of a schema, at the moment of each event.
const SchemaLatest = -1

// lookAgain is how often a hub asks for versions that it has not heard of.
const lookAgain = time.Second

// SchemaView shows the events of a topic in one version of the topic's schema. Its methods may be
// called concurrently.
type SchemaView struct {
	table       *schemaTable
	name        string // of the schema
	of          *topicSchemas
	version     int // or SchemaLatest
	unversioned int
}

// View returns the view of a topic in a version from 1 on, or in SchemaLatest. Its error is an
// *Error: bad_options for a version that is not registered, and for a topic without any.
func (s Schemas) View(ctx context.Context, topic string, version int) (*SchemaView, error) {
	if err := ValidTopic(topic); err != nil {
		return nil, err
	}
	t := s.bus.schemas
	if err := t.load(ctx); err != nil {
		return nil, err
	}
	rule := s.bus.rule(topic).Schema
	name := rule.of(topic)
	set := t.set(name)
	if set.latest() < max(version, 1) { // another hub may have registered it a moment ago
		var err error
		if set, err = t.catchUp(ctx, name); err != nil {
			return nil, err
		}
	}
	switch latest := set.latest(); {
	case latest == 0:
		return nil, badOptions("topic %s has no schema, so its events have no version", topic)
	case version > latest:
		return nil, badOptions("version %d of the schema of %s is not registered; the latest is %d", version, topic, latest)
	case version < 1 && version != SchemaLatest:
		return nil, badOptions("version %d: a version is a number from 1 on", version)
	}
	return &SchemaView{table: t, name: name, of: t.of(name), version: version, unversioned: max(rule.Unversioned, 1)}, nil
}

// Cast turns an event into the version of the view. An event of that version stays as it is.
// Otherwise, Cast replaces Payload and Headers, whose x-schema-version then names the version, and
// leaves what they were. Tombstones stay as they are.
//
// After an error, the event is as it was. The error is an *Error (schema_invalid) that wraps a
// *upcast.CastError, and tells no values of the payload. ctx is for the question to the server for
// a version that this hub has not heard of.
func (v *SchemaView) Cast(ctx context.Context, e *Event) error {
	err := v.cast(e)
	if errors.Is(err, errVersionUnknown) && v.of.mayLook() {
		if _, asked := v.table.catchUp(ctx, v.name); asked == nil {
			err = v.cast(e)
		}
	}
	return err
}

// errVersionUnknown says that this hub does not know the version of an event.
var errVersionUnknown = errors.New("jetstream: the version is not known")

// cast is Cast, which asks nobody.
func (v *SchemaView) cast(e *Event) error {
	if e.Tombstone {
		return nil
	}
	set := v.of.set.Load()
	to := v.version
	if to == SchemaLatest {
		to = set.latest()
	}
	text, given := schemaHeader(e.Headers)
	from := v.unversioned
	if given {
		var ok bool
		if from, ok = parseVersion(text); !ok {
			return &Error{Code: CodeSchemaInvalid, Msg: headerSchemaVersion + " of the event is not a number from 1 on"}
		}
	}
	if from == to {
		return nil
	}
	doc := e.Payload
	if len(doc) == 0 {
		doc = []byte("null")
	}
	doc, err := set.chain.Cast(doc, from, to)
	if err != nil {
		return castFailed(err, from, set.latest())
	}
	headers := make(map[string]string, len(e.Headers)+1)
	maps.Copy(headers, e.Headers)
	maps.DeleteFunc(headers, func(name, _ string) bool { return strings.EqualFold(name, headerSchemaVersion) })
	headers[headerSchemaVersion] = strconv.Itoa(to)
	e.Payload, e.Headers = doc, headers
	return nil
}

// castFailed is the error of a cast from a version.
func castFailed(err error, from, latest int) error {
	if from > latest {
		err = errors.Join(errVersionUnknown, err)
		return &Error{Code: CodeSchemaInvalid, Msg: "version " + strconv.Itoa(from) + " of the event is not registered; the latest is " + strconv.Itoa(latest), Err: err}
	}
	msg := err.Error()
	if failure, ok := errors.AsType[*upcast.CastError](err); ok {
		msg = failure.Error()
	}
	return &Error{Code: CodeSchemaInvalid, Msg: msg, Err: err}
}

// schemaHeader returns the version that the headers of an event name.
func schemaHeader(headers map[string]string) (text string, given bool) {
	if text, given = headers[headerSchemaVersion]; given {
		return text, true
	}
	for name, value := range headers {
		if strings.EqualFold(name, headerSchemaVersion) {
			return value, true
		}
	}
	return "", false
}

// parseVersion reads a version in its only form.
func parseVersion(text string) (n int, ok bool) {
	n, err := strconv.Atoi(text)
	return n, err == nil && n >= 1 && strconv.Itoa(n) == text
}

// mayLook reports whether it is time to ask for further versions. It then counts as asked.
func (s *topicSchemas) mayLook() bool {
	now := time.Now().UnixNano()
	last := s.looked.Load()
	return now-last >= int64(lookAgain) && s.looked.CompareAndSwap(last, now)
}

// lookUp asks for further versions in the background.
func (s *Subscription) lookUp(v *SchemaView) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running() && v.of.mayLook() {
		s.wg.Go(func() {
			ctx, cancel := context.WithTimeout(s.ctx, publishWait)
			defer cancel()
			_, _ = v.table.catchUp(ctx, v.name) // the next event asks again
		})
	}
}

// viewsOf returns the views of a subscription on topics; nil without
// SubscribeOptions.SchemaVersion.
func (b *Bus) viewsOf(ctx context.Context, topics []string, version int) (map[string]*SchemaView, error) {
	if version == 0 {
		return nil, nil //nolint:nilnil // events stay as they are
	}
	views := make(map[string]*SchemaView, len(topics))
	for _, topic := range topics {
		v, err := SchemasOf(b).View(ctx, topic, version)
		if err != nil {
			return nil, err
		}
		views[topic] = v
	}
	return views, nil
}

// cast turns the event into the version that its subscriber wants. The delivery is not held yet.
func (d *Delivery) cast() {
	v := d.m.sub.views[d.Event.Topic]
	if v == nil {
		return
	}
	was := len(d.Event.Payload)
	d.uncast = v.cast(&d.Event)
	d.size += len(d.Event.Payload) - was
}

// give gives a delivery to the handler. An event that could not be cast was an attempt that failed.
func (s *Subscription) give(d *Delivery) {
	if d.uncast == nil {
		s.handler((*Held)(d))
		return
	}
	if !d.begin(false) {
		return
	}
	delay := DefaultBackoff
	if errors.Is(d.uncast, errVersionUnknown) {
		s.lookUp(s.views[d.Event.Topic])
		delay = lookAgain // this hub may hear of the version meanwhile
	}
	reason := d.uncast.Error()
	if e, ok := errors.AsType[*Error](d.uncast); ok {
		reason = e.Msg
	}
	s.nack(d, "", reason, delay)
}
