package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/jsonequal"
	"eventhub/jetstream/schema/compat"
	"eventhub/jetstream/topics"
)

// Schemas is the registry of schemas that all hubs of a NATS share, in the KV bucket
// eventhub_schemas. A Schemas is a small value that costs nothing to create. Its methods may be
// called concurrently.
type Schemas struct{ schemas *schemas }

// SchemasOf gives access to the registry of schemas.
func SchemasOf(b *Bus) Schemas { return Schemas{b.schemas} }

// SchemaDraft is a version that is to be registered, or checked.
type SchemaDraft struct {
	// Schema is a JSON Schema 2020-12 of at most 256 KiB. A list under its keyword examples is
	// tried when the next version is registered.
	Schema json.RawMessage
	// Up and Down turn documents of the version before into documents of this one, and back: lists
	// of operations (package upcast). Without Up, the registry makes one that fills in defaults of
	// new required members, if there are any.
	Up, Down json.RawMessage
	// Description is for people, at most 1,024 bytes.
	Description string
	// Force registers the version although it is not compatible, or this is not known.
	Force bool
	// By is the client. Each may register Limits.SchemasPerClient versions; "" is the hub itself,
	// which has no such limit.
	By string
}

// maxDescription is the most bytes of a description.
const maxDescription = 1024

// Topics returns the names that have schemas, sorted.
func (s Schemas) Topics(ctx context.Context) ([]string, error) {
	if err := s.schemas.table.load(ctx); err != nil {
		return nil, err
	}
	return s.schemas.table.names(), nil
}

// Mirrors returns the rules that are in force and request copies in other versions of the schema
// (SchemaRule.Mirrors). Each is for one topic.
func (s Schemas) Mirrors() []topics.Rule { return s.schemas.rules.Mirrors() }

// List returns the versions of a topic that this hub knows, from 1 on. Changes by other hubs arrive
// within a second. The caller must not change them.
func (s Schemas) List(ctx context.Context, topic string) ([]*SchemaVersion, error) {
	if err := s.schemas.table.load(ctx); err != nil {
		return nil, err
	}
	set := s.schemas.table.set(s.name(topic))
	all := make([]*SchemaVersion, 0, set.latest())
	for n := range set.latest() {
		all = append(all, &set.versions[n].SchemaVersion)
	}
	return all, nil
}

// name is the name under which the schemas of a topic are registered.
func (s Schemas) name(topic string) string { return s.schemas.rules.Of(topic).Schema.Name(topic) }

// Check says what a registration would find. It stores nothing.
func (s Schemas) Check(ctx context.Context, topic string, d SchemaDraft) (*SchemaReport, error) {
	leave, err := s.enter(ctx, d.By)
	if err != nil {
		return nil, err
	}
	defer leave()
	set, err := s.prepare(ctx, topic, &d)
	if err != nil {
		return nil, err
	}
	_, report, err := s.judge(ctx, topic, &d, set)
	return report, err
}

// Register adds a version and returns it, with what was found. If the draft says what the latest
// version says, that version is returned without a report, and nothing is stored. A draft that is
// not compatible as SchemaRule.Compatibility wants it gets an *Error (schema_conflict) beside the
// report, unless Force is set. So does a draft when another hub registers a version at the same
// time.
//
// When ctx or the server's answer is late, the outcome is unknown; the same draft may be registered
// again.
func (s Schemas) Register(ctx context.Context, topic string, d SchemaDraft) (*SchemaVersion, *SchemaReport, error) {
	leave, err := s.enter(ctx, d.By)
	if err != nil {
		return nil, nil, err
	}
	defer leave()
	set, err := s.prepare(ctx, topic, &d)
	if err != nil {
		return nil, nil, err
	}
	if last := set.version(set.latest()); last != nil && last.same(&d) {
		return &last.SchemaVersion, nil, nil
	}
	v, report, err := s.judge(ctx, topic, &d, set)
	if err != nil {
		return nil, report, err
	}
	if !report.Compatible && !d.Force {
		return nil, report, &event.Error{Code: CodeSchemaConflict, Msg: v.conflict(report)}
	}
	v.Forced = !report.Compatible
	if err := s.allowed(d.By, v.size()); err != nil {
		return nil, report, err
	}
	switch err := s.schemas.table.store(ctx, v); {
	case errors.Is(err, errSchemaTaken):
		return nil, report, &event.Error{Code: CodeSchemaConflict, Msg: fmt.Sprintf("version %d was registered by another at the same time: look at that version, and register again", v.Version)}
	case err != nil:
		return nil, report, err
	}
	return &v.SchemaVersion, report, nil
}

// conflict says why a version is not compatible, and what to do.
func (v *compiledVersion) conflict(r *SchemaReport) string {
	first := r.Findings[0]
	what := fmt.Sprintf("version %d is not %s compatible", v.Version, r.Mode)
	if r.Mode == compat.None {
		what = fmt.Sprintf("the casts of version %d fail", v.Version)
	}
	hint := "change it, give casts, or force it"
	if first.Rule == "property_added_to_open_content_model" {
		hint = `close the object with "additionalProperties": false, set lenient in the rule of the topic, or force it`
	}
	return fmt.Sprintf("%s: %s; %s", what, first, hint)
}

// Bounds of comparisons, each of which may take a second of a processor ("schema_checks").
const (
	schemaChecks        = 2 // at a time
	schemaChecksWaiting = 8 // and waiting, of one client
	schemaCheckWait     = 10 * time.Second
)

// enter waits for a place for a comparison.
func (s Schemas) enter(ctx context.Context, client string) (leave func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, schemaCheckWait)
	defer cancel()
	places := s.schemas.table.checks
	if !places.Enter(ctx, client, schemaChecksWaiting, func() { s.schemas.obs.LimitReached("schema_checks") }) {
		return nil, &event.Error{Code: event.CodeOverloaded, Msg: "too many schemas are compared on this hub: try again later"}
	}
	return func() { places.Leave(client) }, nil
}

// allowed enforces Limits.SchemasPerClient, and the bounds of memory, for one more version.
func (s Schemas) allowed(client string, size int) error {
	t := s.schemas.table
	t.mu.RLock()
	defer t.mu.RUnlock()
	switch {
	case client != "" && t.by[client] >= s.schemas.limits.SchemasPerClient:
		s.schemas.obs.LimitReached("schemas_per_client")
		return &event.Error{Code: event.CodeRateLimited, Msg: fmt.Sprintf("this client has registered %d versions of schemas, which is its limit", t.by[client])}
	case client != "" && t.sizeBy[client]+size > clientSchemaMemory:
		s.schemas.obs.LimitReached("client_schema_memory")
		return &event.Error{Code: event.CodeRateLimited, Msg: "the schemas of this client would take more memory than a client may have on each hub"}
	case t.size+size > maxSchemaMemory:
		s.schemas.obs.LimitReached("schema_memory")
		return &event.Error{Code: event.CodeOverloaded, Msg: "all schemas together would take more memory than they may have on each hub"}
	}
	return nil
}

// prepare checks a draft alone, and returns the versions that there are.
func (s Schemas) prepare(ctx context.Context, topic string, d *SchemaDraft) (*schemaSet, error) {
	if err := ValidTopic(topic); err != nil {
		return nil, err
	}
	if len(d.Schema) == 0 {
		return nil, event.BadOptions("schema is missing")
	}
	if len(d.Description) > maxDescription {
		return nil, event.BadOptions("description has %d bytes, at most %d are allowed", len(d.Description), maxDescription)
	}
	if err := s.schemas.table.load(ctx); err != nil {
		return nil, err
	}
	return s.schemas.table.catchUp(ctx, s.name(topic))
}

// judge compiles the next version, and compares it with those before.
func (s Schemas) judge(ctx context.Context, topic string, d *SchemaDraft, set *schemaSet) (*compiledVersion, *SchemaReport, error) {
	if set.latest() >= topics.MaxSchemaVersions {
		return nil, nil, event.BadOptions("the topic has %d versions, which is the limit", set.latest())
	}
	next := &SchemaVersion{
		Topic: s.name(topic), Version: set.latest() + 1, Schema: d.Schema, Up: nonNull(d.Up), Down: nonNull(d.Down), Description: d.Description, By: d.By,
		TS: time.Now().UnixMilli(),
	}
	if next.Version == 1 && (len(next.Up) > 0 || len(next.Down) > 0) {
		return nil, nil, event.BadOptions("the first version has none before it: leave out up and down")
	}
	c, err := s.schemas.table.compile(next)
	if err != nil {
		return nil, nil, event.BadOptions("%v", err)
	}
	rule := s.schemas.rules.Of(topic).Schema
	return checkVersion(ctx, s.schemas.table, &rule, set, c)
}

// nonNull is a list of operations, or nothing.
func nonNull(text json.RawMessage) json.RawMessage {
	if string(text) == "null" {
		return nil
	}
	return text
}

// equalJSON compares two texts, either of which may be missing.
func equalJSON(a, b json.RawMessage) bool {
	if len(nonNull(a)) == 0 || len(nonNull(b)) == 0 {
		return len(nonNull(a)) == len(nonNull(b))
	}
	return jsonequal.Equal(a, b)
}

// headerSchemaVersion is the header of an event that has the version of its schema.
const headerSchemaVersion = "x-schema-version"

// CodeSchemaInvalid and CodeSchemaConflict are codes of errors about schemas.
const (
	CodeSchemaInvalid  = "schema_invalid"
	CodeSchemaConflict = "schema_conflict"
)

func schemaInvalid(format string, args ...any) *event.Error {
	return &event.Error{Code: CodeSchemaInvalid, Msg: fmt.Sprintf(format, args...)}
}
