package schemas

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"

	"eventhub/jetstream/event"
	"eventhub/jetstream/topics"
)

// Gate compares the events of a topic with the schemas of the topic.
type Gate struct {
	rule     topics.SchemaRule
	registry *Registry
	name     string
	found    atomic.Pointer[topicVersions] // nil while the name has no version
}

// set returns the versions as they are.
func (g *Gate) set() *versionSet {
	of := g.found.Load()
	if of == nil {
		if of = g.registry.of(g.name); of == nil {
			return nil
		}
		g.found.Store(of)
	}
	return of.set.Load()
}

// Gate returns what compares events of a topic, nil if the topic's rule asks for no schema.
func (r *Registry) Gate(topic string, rule *topics.Rule) *Gate {
	if !rule.Schema.Asked() {
		return nil
	}
	return &Gate{rule: rule.Schema, registry: r, name: rule.Schema.Name(topic)}
}

// Admit compares an event with the version that its headers name, or else with the latest one. It
// asks nobody, and may wait for the ration of the client; "" is the hub itself, which has none. It
// returns the version that the event is to be stamped with, 0 for none, and whether the event
// breaks the schema, which is an error with topics.SchemaEnforce. With topics.SchemaWarn, an event
// beyond the ration is not compared. With brief, the error is ErrLong where the comparison takes
// long, or the client must wait. obs, if not nil, is given what is broken.
func (g *Gate) Admit(ctx context.Context, e *event.Event, brief bool, client string, obs event.TopicObserver) (stamp int, broken bool, err error) {
	set := g.set()
	version, given := set.latest(), false
	for name, value := range e.Headers {
		if strings.EqualFold(name, VersionHeader) {
			n, ok := parseVersion(value)
			if !ok {
				return 0, false, event.BadOptions("opts.headers: %s is %q: a version is a number from 1 on", VersionHeader, value)
			}
			if given && n != version {
				return 0, false, event.BadOptions("opts.headers: %s is given twice, as %d and as %d", VersionHeader, min(n, version), max(n, version))
			}
			version, given = n, true
		}
	}
	enforced := g.rule.Mode == topics.SchemaEnforce
	why, err := g.valid(ctx, set, version, given, e, brief, client)
	if err != nil && (enforced || errors.Is(err, ErrLong)) {
		return 0, false, err
	}
	if why != nil && obs != nil {
		obs.SchemaBroken(enforced)
	}
	if why != nil && enforced {
		return 0, true, why
	}
	if !given {
		// With SchemaWarn, this is also the version of what breaks it: it was written for it.
		stamp = version
	}
	return stamp, why != nil, nil
}

// valid says what is wrong with an event. The error says why the event was not compared.
func (g *Gate) valid(ctx context.Context, set *versionSet, version int, given bool, e *event.Event, brief bool, client string) (broken, err error) {
	v := set.version(version)
	switch {
	case v == nil && given:
		return invalid("version %d of the schema is not registered; the latest is %d", version, set.latest()), nil
	case v == nil:
		return invalid("the topic needs a schema, and none is registered"), nil
	case e.Tombstone:
		return nil, nil
	}
	payload := e.Payload
	if len(payload) == 0 {
		payload = []byte("null")
	}
	switch found, err := g.registry.computing.validate(ctx, v.schema, payload, client, brief); {
	case err != nil:
		return nil, err
	case found == nil:
		return nil, nil
	case found.Pointer == "":
		return invalid("version %d: %s", version, found.Keyword), nil
	default:
		return invalid("version %d, %s", version, found), nil
	}
}
