package jetstream

import (
	"context"
	"errors"
	"maps"
	"strconv"
	"strings"
	"sync/atomic"

	"eventhub/jetstream/event"
	"eventhub/jetstream/native"
	"eventhub/jetstream/topics"
)

// schemaGate compares the events of a topic with the schemas of the topic.
type schemaGate struct {
	rule  topics.SchemaRule
	table *schemaTable
	name  string
	found atomic.Pointer[topicSchemas] // nil while the name has no version
}

// set returns the versions as they are.
func (g *schemaGate) set() *schemaSet {
	of := g.found.Load()
	if of == nil {
		if of = g.table.of(g.name); of == nil {
			return nil
		}
		g.found.Store(of)
	}
	return of.set.Load()
}

// schemaGate returns what compares events of a topic, nil if the topic's rule asks for no schema.
func (p *publishing) schemaGate(topic string, rule *topics.Rule) *schemaGate {
	if !rule.Schema.Asked() {
		return nil
	}
	return &schemaGate{rule: rule.Schema, table: p.schemas.table, name: rule.Schema.Name(topic)}
}

// admit compares an event with the version that it names, or else with the latest one, which it is
// stamped with. It asks nobody, and may wait for the ration of the client. With SchemaWarn, an
// event beyond the ration is not compared. Without obs, an event that is stored all the same is
// noted in opts.
func (g *schemaGate) admit(ctx context.Context, payload []byte, opts *PublishOptions, client string, obs event.TopicObserver) error {
	if opts.Wrapper {
		return nil // a dead letter has the payload of another topic
	}
	set := g.set()
	version, given := set.latest(), false
	for name, value := range opts.Headers {
		if strings.EqualFold(name, headerSchemaVersion) {
			n, ok := parseVersion(value)
			if !ok {
				return event.BadOptions("opts.headers: %s is %q: a version is a number from 1 on", headerSchemaVersion, value)
			}
			if given && n != version {
				return event.BadOptions("opts.headers: %s is given twice, as %d and as %d", headerSchemaVersion, min(n, version), max(n, version))
			}
			version, given = n, true
		}
	}
	broken, err := g.valid(ctx, set, version, given, payload, opts, client)
	if err != nil && (g.rule.Mode == topics.SchemaEnforce || errors.Is(err, ErrLong)) {
		return err
	}
	switch {
	case broken == nil:
	case obs != nil:
		obs.SchemaBroken(g.rule.Mode == topics.SchemaEnforce)
	default:
		opts.schemaBroken = true
	}
	if broken != nil && g.rule.Mode == topics.SchemaEnforce {
		return broken
	}
	if !given && version > 0 {
		// With SchemaWarn, this is also the version of what breaks it: it was written for it.
		opts.schemaVersion = version
	}
	return nil
}

// checkStamp reports an event whose headers have no room for the version that it is stamped with.
// Such an event could be stored, but not published again, as a redrive and a mirror do.
func (o *PublishOptions) checkStamp(topic string) error {
	if o.schemaVersion == 0 {
		return nil
	}
	if n := len(o.Headers); n >= native.MaxHeaders {
		return event.BadOptions("opts.headers has %d headers, and topic %s adds %s; at most %d are allowed: leave one out", n, topic, headerSchemaVersion, native.MaxHeaders)
	}
	f := o.fields()
	size, added := f.HeaderBytes(), len(headerSchemaVersion)+len(strconv.Itoa(o.schemaVersion))
	if size+added > native.MaxHeaderBytes {
		return event.BadOptions("opts.headers, sid, tags and caused_by have %d bytes together, and topic %s adds %s with %d; at most %d are allowed: make them shorter",
			size, topic, headerSchemaVersion, added, native.MaxHeaderBytes)
	}
	return nil
}

// stamp moves the version to the headers, where it is as a client gives it. checkStamp has found
// room for it.
func (o *PublishOptions) stamp() {
	if o.schemaVersion == 0 {
		return
	}
	stamped := make(map[string]string, len(o.Headers)+1)
	maps.Copy(stamped, o.Headers)
	stamped[headerSchemaVersion] = strconv.Itoa(o.schemaVersion)
	o.Headers, o.schemaVersion = stamped, 0
}

// valid says what is wrong with an event. The error says why the event was not compared.
func (g *schemaGate) valid(ctx context.Context, set *schemaSet, version int, given bool, payload []byte, opts *PublishOptions, client string) (broken, err error) {
	v := set.version(version)
	switch {
	case v == nil && given:
		return schemaInvalid("version %d of the schema is not registered; the latest is %d", version, set.latest()), nil
	case v == nil:
		return schemaInvalid("the topic needs a schema, and none is registered"), nil
	case opts.Tombstone:
		return nil, nil
	}
	if len(payload) == 0 {
		payload = []byte("null")
	}
	switch found, err := g.table.schemas.computing.validate(ctx, v.schema, payload, client, opts.Brief); {
	case err != nil:
		return nil, err
	case found == nil:
		return nil, nil
	case found.Pointer == "":
		return schemaInvalid("version %d: %s", version, found.Keyword), nil
	default:
		return schemaInvalid("version %d, %s", version, found), nil
	}
}
