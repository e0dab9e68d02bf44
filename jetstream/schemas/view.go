package schemas

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
	"eventhub/jetstream/native"
	"eventhub/jetstream/schema/upcast"
)

// Latest stands for the latest version of a schema, at the moment of each event.
const Latest = -1

const (
	// lookAgain is how often a read asks for versions that the hub has not heard of, of each
	// schema.
	lookAgain = 100 * time.Millisecond
	// lookWait is how long an event of such a version waits for the answer. After a question
	// without one, none is asked for lookRest.
	lookWait = 2 * time.Second
	lookRest = time.Second
)

// View shows the events of a topic in one version of the topic's schema. Its methods may be
// called concurrently.
type View struct {
	registry    *Registry
	name        string // of the schema
	of          *topicVersions
	version     int // or Latest
	unversioned int
	client      string
}

// View returns the view of a topic in a version from 1 on, or in Latest. Its error is an
// *Error: bad_options for a version that is not registered, and for a topic without any.
func (r *Registry) View(ctx context.Context, topic string, version int) (*View, error) {
	if err := event.ValidTopic(topic); err != nil {
		return nil, err
	}
	if err := r.load(ctx); err != nil {
		return nil, err
	}
	rule := r.cfg.Rules.Of(topic).Schema
	name := rule.Name(topic)
	set := r.set(name)
	if set.latest() < max(version, 1) { // another hub may have registered it a moment ago
		var err error
		if set, err = r.catchUp(ctx, name); err != nil {
			return nil, err
		}
	}
	switch latest := set.latest(); {
	case latest == 0:
		return nil, event.BadOptions("topic %s has no schema, so its events have no version", topic)
	case version > latest:
		return nil, event.BadOptions("version %d of the schema of %s is not registered; the latest is %d", version, topic, latest)
	case version < 1 && version != Latest:
		return nil, event.BadOptions("version %d: a version is a number from 1 on", version)
	}
	return &View{registry: r, name: name, of: r.of(name), version: version, unversioned: max(rule.Unversioned, 1)}, nil
}

// CountFor returns the view for a client, in whose ration of time (Limits.ComputeTime) casts are.
// By default they are the program's own, and have none.
func (v *View) CountFor(client string) *View {
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
func (v *View) Cast(ctx context.Context, e *event.Event) error {
	err := v.CastBriefly(ctx, e, v.registry.cfg.Clock.Now()-int64(lookAgain))
	switch {
	case errors.Is(err, ErrLong):
		return v.CastSlowly(ctx, e)
	case !errors.Is(err, ErrNoVersions):
		return err
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return v.registry.cfg.Conn.Unavailable(err)
}

// CastBriefly is Cast for what takes less than about 0.1 ms and waits for no ration. For the rest,
// the error is ErrLong, and CastSlowly has to be called. For a version that this hub has not heard
// of, CastBriefly asks the server, unless the answer to a question since a time, in the clock of
// the bus, has told; ErrNoVersions means that the server did not tell.
func (v *View) CastBriefly(ctx context.Context, e *event.Event, since int64) error {
	err := v.castBy(ctx, e, v.registry.computing.castBriefly)
	if !errors.Is(err, errVersionUnknown) {
		return err
	}
	if !v.registry.look(ctx, v.name, v.of, since) {
		return ErrNoVersions
	}
	return v.castBy(ctx, e, v.registry.computing.castBriefly)
}

// CastSlowly is Cast after CastBriefly, for what takes long.
func (v *View) CastSlowly(ctx context.Context, e *event.Event) error {
	return v.castBy(ctx, e, v.registry.computing.castSlowly)
}

// ErrNoVersions says that the server did not tell versions, or that this hub cannot read one.
var ErrNoVersions = errors.New("jetstream: the versions of a schema could not be read")

// errVersionUnknown says that this hub does not know the version of an event.
var errVersionUnknown = errors.New("jetstream: the version is not known")

// castFunc casts a document for a client.
type castFunc func(ctx context.Context, chain *upcast.Chain, doc []byte, from, to int, client string) ([]byte, error)

func (v *View) castBy(ctx context.Context, e *event.Event, cast castFunc) error {
	if e.Tombstone {
		return nil
	}
	set := v.of.set.Load()
	to := v.version
	if to == Latest {
		to = set.latest()
	}
	text, given := headerVersion(e.Headers)
	from := v.unversioned
	if given {
		var ok bool
		if from, ok = parseVersion(text); !ok {
			return &event.Error{Code: CodeInvalid, Msg: VersionHeader + " of the event is not a number from 1 on"}
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
	case len(doc) > max(v.registry.cfg.Conn.MaxPayload, len(e.Payload)):
		return &event.Error{Code: CodeInvalid, Msg: "the event has " + strconv.Itoa(len(doc)) + " bytes in version " + strconv.Itoa(to) + "; at most " +
			strconv.Itoa(v.registry.cfg.Conn.MaxPayload) + " are allowed"}
	case !native.ValidPayload(doc):
		return &event.Error{Code: CodeInvalid, Msg: "the event in version " + strconv.Itoa(to) + " is not JSON, or is nested too deeply"}
	}
	headers := make(map[string]string, len(e.Headers)+1)
	maps.Copy(headers, e.Headers)
	maps.DeleteFunc(headers, func(name, _ string) bool { return strings.EqualFold(name, VersionHeader) })
	headers[VersionHeader] = strconv.Itoa(to)
	e.Payload, e.Headers = doc, headers
	return nil
}

// castFailed is the error of a cast from a version.
func castFailed(err error, from, latest int) error {
	if from > latest {
		err = errors.Join(errVersionUnknown, err)
		return &event.Error{Code: CodeInvalid, Msg: "version " + strconv.Itoa(from) + " of the event is not registered; the latest is " + strconv.Itoa(latest), Err: err}
	}
	msg := err.Error()
	if failure, ok := errors.AsType[*upcast.CastError](err); ok {
		msg = failure.Error()
	}
	return &event.Error{Code: CodeInvalid, Msg: msg, Err: err}
}

// headerVersion returns the version that the headers of an event name: "" if they name two.
func headerVersion(headers map[string]string) (text string, given bool) {
	for name, value := range headers {
		if !strings.EqualFold(name, VersionHeader) {
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
