package facade

import (
	"bytes"
	"context"
	"errors"
	"net/url"
	"strconv"
	"time"

	"eventhub/facade/textmsg"
	"eventhub/jetstream"
	"eventhub/jetstream/cloudevents"
	"eventhub/jetstream/cputime"
	"eventhub/jetstream/jsonscan"
	"eventhub/jetstream/schemas"
	"eventhub/jetstream/topics"
)

const (
	// optSchemaVersion is the option, and the parameter of a query, for the version in which events
	// are sent: a number, or latestVersion.
	optSchemaVersion = "schemaVersion"
	latestVersion    = "latest"
	// castVersions ("tail_versions") is the most versions in which a topic is broadcast, besides as
	// it is stored. principalVersions ("principal_tail_versions") is the most that one principal is
	// the first to listen to.
	castVersions, principalVersions = 4, 2
	// castAgain is how long a broadcast waits before it tries again to cast an event.
	castAgain = 100 * time.Millisecond
	// castTurn is how long a broadcast waits for the ration of one of those who listen, before it
	// is the turn of another one.
	castTurn = 100 * time.Millisecond
	// attrSchemaError is the attribute of a CloudEvent that could not be cast.
	attrSchemaError = "schemaerror"
)

// version reads a version of a schema: 0 for none, a number from 1 on, or schemas.Latest.
func (r *optionReader) version(name string, raw []byte) int {
	if isString(raw) && r.string(name, raw) == latestVersion {
		return schemas.Latest
	}
	if missing(raw) {
		return 0
	}
	n, ok := integer(raw)
	if !ok || n < 1 || n > topics.MaxSchemaVersions {
		r.want(name, `an integer from 1 to `+strconv.Itoa(topics.MaxSchemaVersions)+`, or "`+latestVersion+`"`, raw)
		return 0
	}
	return int(n)
}

// versionParam is version for a query.
func versionParam(values url.Values) (int, *fault) {
	given := values[optSchemaVersion]
	if len(given) == 0 {
		return 0, nil
	}
	if len(given) == 1 && given[0] == latestVersion {
		return schemas.Latest, nil
	}
	n, err := strconv.Atoi(given[0])
	if len(given) > 1 || err != nil || n < 1 || n > topics.MaxSchemaVersions || strconv.Itoa(n) != given[0] {
		return 0, &fault{code: codeBadOptions, msg: optSchemaVersion + " must be an integer from 1 to " + strconv.Itoa(topics.MaxSchemaVersions) +
			", or " + latestVersion + ", given once."}
	}
	return n, nil
}

// versionText is a version as versionParam reads it.
func versionText(version int) string {
	if version == schemas.Latest {
		return latestVersion
	}
	return strconv.Itoa(version)
}

// caster casts events for a reader. A nil caster leaves them as they are.
type caster struct {
	view     *schemas.View
	patience time.Duration // castPatience
}

// casterOf returns the caster of a topic for a version as versionParam returns it. Casts count
// in the ration of the client.
func (s *Server) casterOf(ctx context.Context, topic string, version int, client string) (*caster, error) {
	if version == 0 {
		return nil, nil //nolint:nilnil // events stay as they are
	}
	v, err := s.cfg.Bus.Schemas().View(ctx, topic, version)
	if err != nil {
		return nil, err
	}
	return &caster{v.CountFor(client), s.castPatience}, nil
}

// cast turns an event into the version of the reader. why says, for the client, that the event
// cannot be cast, which stays so. An error says that the hub could not find out: it passes, and the
// reader has to come back to the event.
func (c *caster) cast(ctx context.Context, e *jetstream.Event) (why string, err error) {
	if c == nil {
		return "", nil
	}
	err = c.view.Cast(ctx, e)
	known, ok := errors.AsType[*jetstream.Error](err)
	if ok && code(known.Code) == codeSchemaInvalid {
		return known.Msg, nil
	}
	return "", castFault(err)
}

// castFault makes an error for clients of one that says that a cast has waited for too long.
func castFault(err error) error {
	switch {
	case errors.Is(err, cputime.ErrOwes):
		return &jetstream.Error{Code: string(codeRateLimited), Msg: "Casting this client's events takes more time than it may: read fewer, or later.", Wait: time.Second}
	case errors.Is(err, cputime.ErrPlaces):
		return &jetstream.Error{Code: string(codeOverloaded), Msg: "Too many events are being cast: try again later.", Wait: time.Second}
	}
	return err
}

// castInTurn is cast for all who listen to a broadcast, in the ration of one of them. payer chooses
// one, another one than last time if there is.
func (c *caster) castInTurn(ctx context.Context, e *jetstream.Event, payer func(not string) string) (why string, err error) {
	if payer == nil {
		return c.cast(ctx, e)
	}
	for client := ""; ; {
		client = payer(client)
		within, cancel := context.WithTimeout(ctx, castTurn)
		why, err = (&caster{c.view.CountFor(client), c.patience}).cast(within, e)
		cancel()
		known, ok := errors.AsType[*jetstream.Error](err)
		waits := ok && (code(known.Code) == codeRateLimited || code(known.Code) == codeOverloaded) || errors.Is(err, context.DeadlineExceeded)
		if !waits || ctx.Err() != nil {
			return why, err
		}
	}
}

// castPatiently is castInTurn for a broadcast, which does not come back: it goes on trying for
// castPatience.
func (c *caster) castPatiently(ctx context.Context, e *jetstream.Event, payer func(not string) string) (why string, err error) {
	if why, err = c.castInTurn(ctx, e, payer); err == nil {
		return why, nil
	}
	ctx, cancel := context.WithTimeout(ctx, c.patience)
	defer cancel()
	for !errors.Is(err, jetstream.ErrClosed) {
		select {
		case <-time.After(castAgain):
		case <-ctx.Done():
			return "", err
		}
		if why, err = c.castInTurn(ctx, e, payer); err == nil {
			return why, nil
		}
	}
	return "", err
}

// appendUncast appends the record of an event that could not be cast: it has the members error and
// code instead of the payload, which the reader does not expect.
func appendUncast(dst []byte, e *jetstream.Event, why string) []byte {
	bare := *e
	bare.Payload = nil
	dst = bytes.TrimSuffix(bare.AppendRecord(dst), []byte(`"payload":null}`))
	dst = jsonscan.AppendString(append(dst, `"error":`...), why)
	return append(append(append(dst, `,"code":"`...), codeSchemaInvalid...), `"}`...)
}

// uncast is the CloudEvent of an event that could not be cast: it has an attribute that says why,
// and no data.
func (c *cloudForm) uncast(e *jetstream.Event, why string) *cloudevents.Event {
	bare := *e
	bare.Payload = nil
	ce := c.of(&bare)
	ce.Data = nil
	ce.Attributes[attrSchemaError] = why
	return ce
}

// appendRead appends an event that was cast, or could not be, in the form of an answer.
func appendRead(dst []byte, e *jetstream.Event, cloud *cloudForm, why string) []byte {
	switch {
	case why != "" && cloud != nil:
		return cloud.uncast(e, why).Append(dst)
	case why != "":
		return appendUncast(dst, e, why)
	case cloud != nil:
		return cloud.append(dst, e)
	}
	return e.AppendRecord(dst)
}

// appendTo appends the frame of a broadcast, framed for a WebSocket: the EVENT in the version of
// the reader, or a GAP in the place of an event that cannot be cast. After an error, nothing is
// known of the event, and the broadcast ends: its clients go on from the event before.
func (c *caster) appendTo(ctx context.Context, dst []byte, topic string, at jetstream.Place, e *jetstream.Event, payer func(not string) string) (frame []byte, uncast bool, err error) {
	shown := *e
	why, err := c.castPatiently(ctx, &shown, payer)
	if err != nil {
		return dst, false, err
	}
	if why == "" {
		return appendCast(dst, topic, at, &shown), false, nil
	}
	start := len(dst)
	dst = appendGap(textmsg.Begin(dst), topic, at.Made.UnixNano(), e.Sequence-1, e.Sequence, 1)
	dst = jsonscan.AppendString(append(dst, `,"reason":`...), why)
	return textmsg.End(append(dst, '}'), start), true, nil
}
