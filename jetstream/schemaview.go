package jetstream

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	"eventhub/jetstream/cputime"
	"eventhub/jetstream/event"
	"eventhub/jetstream/schema/upcast"
)

// SchemaLatest stands for the latest version of a schema, at the moment of each event.
const SchemaLatest = -1

const (
	// lookAgain is how often a read asks for versions that the hub has not heard of, of each
	// schema.
	lookAgain = 100 * time.Millisecond
	// lookWait is how long an event of such a version waits for the answer. After a question
	// without one, none is asked for lookRest, and deliveries are given back after giveUpWait.
	lookWait   = 2 * time.Second
	lookRest   = time.Second
	giveUpWait = time.Second
)

// SchemaView shows the events of a topic in one version of the topic's schema. Its methods may be
// called concurrently.
type SchemaView struct {
	table       *schemaTable
	name        string // of the schema
	of          *topicSchemas
	version     int // or SchemaLatest
	unversioned int
	client      string
}

// View returns the view of a topic in a version from 1 on, or in SchemaLatest. Its error is an
// *Error: bad_options for a version that is not registered, and for a topic without any.
func (s Schemas) View(ctx context.Context, topic string, version int) (*SchemaView, error) {
	if err := ValidTopic(topic); err != nil {
		return nil, err
	}
	t := s.schemas.table
	if err := t.load(ctx); err != nil {
		return nil, err
	}
	rule := s.schemas.rules.Of(topic).Schema
	name := rule.Name(topic)
	set := t.set(name)
	if set.latest() < max(version, 1) { // another hub may have registered it a moment ago
		var err error
		if set, err = t.catchUp(ctx, name); err != nil {
			return nil, err
		}
	}
	switch latest := set.latest(); {
	case latest == 0:
		return nil, event.BadOptions("topic %s has no schema, so its events have no version", topic)
	case version > latest:
		return nil, event.BadOptions("version %d of the schema of %s is not registered; the latest is %d", version, topic, latest)
	case version < 1 && version != SchemaLatest:
		return nil, event.BadOptions("version %d: a version is a number from 1 on", version)
	}
	return &SchemaView{table: t, name: name, of: t.of(name), version: version, unversioned: max(rule.Unversioned, 1)}, nil
}

// CountFor returns the view for a client, in whose ration of time (Limits.ComputeTime) casts are.
// By default they are the program's own, and have none.
func (v *SchemaView) CountFor(client string) *SchemaView {
	own := *v
	own.client = client
	return &own
}

// Cast turns an event into the version of the view. An event of that version stays as it is.
// Otherwise, Cast replaces Payload and Headers, whose x-schema-version then names the version, and
// leaves what they were. Tombstones stay as they are.
//
// After an error, the event is as it was. The error is an *Error (schema_invalid) that wraps a
// *upcast.CastError, and tells no values of the payload, or that of ctx, or cputime.ErrOwes or
// ErrPlaces, which say what ctx was too short for. ctx is for the ration of the client, and for the
// question to the server for a version that this hub has not heard of.
func (v *SchemaView) Cast(ctx context.Context, e *event.Event) error {
	err := v.cast(ctx, e)
	since := v.table.schemas.clock.Now() - int64(lookAgain)
	switch {
	case !errors.Is(err, errVersionUnknown):
		return err
	case v.table.look(ctx, v.name, v.of, since):
		return v.cast(ctx, e)
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return v.table.schemas.conn.Unavailable(errNoVersions)
}

// errNoVersions says that the server did not tell versions, or that this hub cannot read one.
var errNoVersions = errors.New("jetstream: the versions of a schema could not be read")

// errVersionUnknown says that this hub does not know the version of an event.
var errVersionUnknown = errors.New("jetstream: the version is not known")

// cast is Cast without a question to the server.
func (v *SchemaView) cast(ctx context.Context, e *event.Event) error {
	err := v.castBy(ctx, e, v.table.schemas.computing.castBriefly)
	if errors.Is(err, ErrLong) {
		err = v.castBy(ctx, e, v.table.schemas.computing.castSlowly)
	}
	return err
}

// castFunc casts a document for a client.
type castFunc func(ctx context.Context, chain *upcast.Chain, doc []byte, from, to int, client string) ([]byte, error)

func (v *SchemaView) castBy(ctx context.Context, e *event.Event, cast castFunc) error {
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
			return &event.Error{Code: CodeSchemaInvalid, Msg: headerSchemaVersion + " of the event is not a number from 1 on"}
		}
	}
	if from == to {
		return nil
	}
	if from > set.latest() {
		return castFailed(nil, from, set.latest())
	}
	doc := e.Payload
	if len(doc) == 0 {
		doc = []byte("null")
	}
	doc, err := cast(ctx, set.chain, doc, from, to, v.client)
	switch {
	case errors.Is(err, ErrLong), errors.Is(err, cputime.ErrOwes), errors.Is(err, cputime.ErrPlaces):
		return err
	case err != nil && ctx.Err() != nil:
		return fmt.Errorf("jetstream: cast an event: %w", ctx.Err())
	case err != nil:
		return castFailed(err, from, set.latest())
	case len(doc) > max(v.table.schemas.conn.MaxPayload, len(e.Payload)):
		return &event.Error{Code: CodeSchemaInvalid, Msg: "the event has " + strconv.Itoa(len(doc)) + " bytes in version " + strconv.Itoa(to) + "; at most " +
			strconv.Itoa(v.table.schemas.conn.MaxPayload) + " are allowed"}
	case !ValidPayload(doc):
		return &event.Error{Code: CodeSchemaInvalid, Msg: "the event in version " + strconv.Itoa(to) + " is not JSON, or is nested too deeply"}
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
		return &event.Error{Code: CodeSchemaInvalid, Msg: "version " + strconv.Itoa(from) + " of the event is not registered; the latest is " + strconv.Itoa(latest), Err: err}
	}
	msg := err.Error()
	if failure, ok := errors.AsType[*upcast.CastError](err); ok {
		msg = failure.Error()
	}
	return &event.Error{Code: CodeSchemaInvalid, Msg: msg, Err: err}
}

// schemaHeader returns the version that the headers of an event name: "" if they name two.
func schemaHeader(headers map[string]string) (text string, given bool) {
	for name, value := range headers {
		if !strings.EqualFold(name, headerSchemaVersion) {
			continue
		}
		if given && value != text {
			return "", true
		}
		text, given = value, true
	}
	return text, given
}

// parseVersion reads a version in its only form.
func parseVersion(text string) (n int, ok bool) {
	n, err := strconv.Atoi(text)
	return n, err == nil && n >= 1 && strconv.Itoa(n) == text
}

// viewsOf returns the views of a subscription on topics; nil without
// SubscribeOptions.SchemaVersion.
func (m *schemas) viewsOf(ctx context.Context, topics []string, version int, client string) (map[string]*SchemaView, error) {
	if version == 0 {
		return nil, nil //nolint:nilnil // events stay as they are
	}
	views := make(map[string]*SchemaView, len(topics))
	for _, topic := range topics {
		v, err := Schemas{m}.View(ctx, topic, version)
		if err != nil {
			return nil, err
		}
		v.client = client
		views[topic] = v
	}
	return views, nil
}

// Cast turns the event into the version that the subscription asks for
// (SubscribeOptions.SchemaVersion). It waits as long as ctx allows for the ration of the client
// (Limits.ComputeTime). Its error is that of ctx, cputime.ErrOwes or cputime.ErrPlaces, and then
// Cast may be called again. It returns false when the event cannot be cast: then the attempt has
// failed, and the Held is not valid any more. Begin calls Cast. Servers that copy the event call
// Cast before, so that an event takes the memory of its version only on its way to a client.
func (h *Held) Cast(ctx context.Context) (ok bool, err error) {
	if ok, long := h.CastBriefly(); !long {
		return ok, nil
	}
	return h.CastSlowly(ctx)
}

// CastSlowly is Cast after CastBriefly, for what takes long.
func (h *Held) CastSlowly(ctx context.Context) (ok bool, err error) {
	d := (*Delivery)(h)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(d.m.sub.ctx, cancel)() //nolint:contextcheck // either ends the cast
	v := d.m.sub.views[d.Event.Topic]
	return d.wasCast(d.castBy(ctx, v, v.table.schemas.computing.castSlowly))
}

// CastBriefly is Cast for what takes less than about 0.1 ms and waits for no ration. For the rest,
// long is set, and CastSlowly has to be called.
func (h *Held) CastBriefly() (ok, long bool) {
	d := (*Delivery)(h)
	v := d.m.sub.views[d.Event.Topic]
	if v == nil {
		return true, false
	}
	brief := v.table.schemas.computing.castBriefly
	err := d.castBy(d.m.sub.ctx, v, brief)
	if errors.Is(err, errVersionUnknown) {
		if !v.table.look(d.m.sub.ctx, v.name, v.of, d.arrived) {
			d.giveUpSoon() // whether there is such a version, a later delivery tells
			return false, false
		}
		err = d.castBy(d.m.sub.ctx, v, brief)
	}
	if errors.Is(err, ErrLong) {
		return false, true
	}
	ok, _ = d.wasCast(err)
	return ok, false
}

func (d *Delivery) castBy(ctx context.Context, v *SchemaView, cast castFunc) error {
	was := d.Event.Headers[headerSchemaVersion]
	err := v.castBy(ctx, &d.Event, cast)
	d.recast = d.recast || err == nil && d.Event.Headers[headerSchemaVersion] != was
	return err
}

// wasCast deals with the error of a cast. It returns those after which the cast may be repeated.
func (d *Delivery) wasCast(err error) (ok bool, _ error) {
	if d.m.sub.ctx.Err() != nil {
		return false, nil //nolint:nilerr // the subscription gives back what it holds
	}
	if err == nil {
		return true, nil
	}
	e, failed := errors.AsType[*event.Error](err)
	if !failed {
		return false, err
	}
	if d.begin(false) {
		d.m.sub.nack(d, "", e.Msg, DefaultBackoff)
	}
	return false, nil
}

// giveUpSoon gives a delivery back that was not begun, after giveUpWait, so that it does not come
// again at once. It counts for no attempt.
func (d *Delivery) giveUpSoon() {
	s := d.m.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.running() {
		return // the subscription gives back what it holds
	}
	s.wg.Go(func() {
		timer := time.NewTimer(giveUpWait)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-s.ctx.Done():
		}
		s.mu.Lock()
		ours := d.index >= 0 && !d.begun && s.remove(d, event.Returned)
		s.mu.Unlock()
		if ours {
			s.spare(d, true)
		}
	})
}
