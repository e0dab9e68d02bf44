package schemas

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"eventhub/jetstream/cputime"
	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/jsonequal"
	"eventhub/jetstream/pacedlog"
	"eventhub/jetstream/quota"
	"eventhub/jetstream/schema/compat"
	"eventhub/jetstream/schema/upcast"
	"eventhub/jetstream/topics"
)

// Registry is the registry of schemas that all hubs of a NATS share, in the KV bucket
// eventhub_schemas. It follows the bucket, and keeps what it has read without NATS. Its methods may
// be called concurrently.
type Registry struct {
	cfg       Config
	computing computing

	follow sync.Once
	once   sync.Once
	full   chan struct{} // closed once all that was there is known
	wanted chan look     // for versions that events name

	checks *quota.Places

	mu     sync.RWMutex
	topics map[string]*topicVersions // bounded by MaxVersions
	count  int
	by     map[string]int // versions by client
	// size is what all versions take in memory, and sizeBy what those of a client take, in bytes.
	size   int
	sizeBy map[string]int
}

// Config is what a Registry is given.
type Config struct {
	Conn  *conn.Pool
	Rules topics.Rules
	// Bucket has at most MaxVersions entries.
	Bucket streams.SharedBucket
	// Casters are those of the program, by the name of the schema and the version.
	Casters map[string]map[int]*upcast.Caster
	// Computing is the time that clients may have comparisons and casts take; nil: any.
	Computing *cputime.Ration
	// PerClient is how many versions a client may register.
	PerClient int
	// OpenWait is how long the first use waits until the bucket is read.
	OpenWait time.Duration

	Often *pacedlog.Log
	Obs   event.Observer
	Clock *conn.Clock
}

// New returns a registry that asks NATS for nothing yet.
func New(cfg Config) *Registry {
	return &Registry{
		cfg: cfg, computing: computing{cfg.Computing},
		full: make(chan struct{}), wanted: make(chan look), checks: quota.NewPlaces(maxChecks, (maxChecks+1)/2),
		topics: make(map[string]*topicVersions), by: make(map[string]int), sizeBy: make(map[string]int),
	}
}

// Draft is a version that is to be registered, or checked.
type Draft struct {
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
func (r *Registry) Topics(ctx context.Context) ([]string, error) {
	if err := r.load(ctx); err != nil {
		return nil, err
	}
	return r.names(), nil
}

// Mirrors returns the rules that are in force and request copies in other versions of the schema
// (SchemaRule.Mirrors). Each is for one topic.
func (r *Registry) Mirrors() []topics.Rule { return r.cfg.Rules.Mirrors() }

// List returns the versions of a topic that this hub knows, from 1 on. Changes by other hubs arrive
// within a second. The caller must not change them.
func (r *Registry) List(ctx context.Context, topic string) ([]*Version, error) {
	if err := r.load(ctx); err != nil {
		return nil, err
	}
	set := r.set(r.name(topic))
	all := make([]*Version, 0, set.latest())
	for n := range set.latest() {
		all = append(all, &set.versions[n].registered)
	}
	return all, nil
}

// name is the name under which the schemas of a topic are registered.
func (r *Registry) name(topic string) string { return r.cfg.Rules.Of(topic).Schema.Name(topic) }

// Check says what a registration would find. It stores nothing.
func (r *Registry) Check(ctx context.Context, topic string, d Draft) (*Report, error) {
	leave, err := r.enter(ctx, d.By)
	if err != nil {
		return nil, err
	}
	defer leave()
	set, err := r.prepare(ctx, topic, &d)
	if err != nil {
		return nil, err
	}
	_, report, err := r.judge(ctx, topic, &d, set)
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
func (r *Registry) Register(ctx context.Context, topic string, d Draft) (*Version, *Report, error) {
	leave, err := r.enter(ctx, d.By)
	if err != nil {
		return nil, nil, err
	}
	defer leave()
	set, err := r.prepare(ctx, topic, &d)
	if err != nil {
		return nil, nil, err
	}
	if last := set.version(set.latest()); last != nil && last.same(&d) {
		return &last.registered, nil, nil
	}
	v, report, err := r.judge(ctx, topic, &d, set)
	if err != nil {
		return nil, report, err
	}
	if !report.Compatible && !d.Force {
		return nil, report, &event.Error{Code: CodeConflict, Msg: v.conflict(report)}
	}
	v.Forced = !report.Compatible
	if err := r.allowed(d.By, v.size()); err != nil {
		return nil, report, err
	}
	switch err := r.store(ctx, v); {
	case errors.Is(err, errTaken):
		return nil, report, &event.Error{Code: CodeConflict, Msg: fmt.Sprintf("version %d was registered by another at the same time: look at that version, and register again", v.Version)}
	case err != nil:
		return nil, report, err
	}
	return &v.registered, report, nil
}

// conflict says why a version is not compatible, and what to do.
func (v *compiledVersion) conflict(r *Report) string {
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
	maxChecks     = 2 // at a time
	checksWaiting = 8 // and waiting, of one client
	checkWait     = 10 * time.Second
)

// enter waits for a place for a comparison.
func (r *Registry) enter(ctx context.Context, client string) (leave func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, checkWait)
	defer cancel()
	places := r.checks
	if !places.Enter(ctx, client, checksWaiting, func() { r.cfg.Obs.LimitReached("schema_checks") }) {
		return nil, &event.Error{Code: event.CodeOverloaded, Msg: "too many schemas are compared on this hub: try again later"}
	}
	return func() { places.Leave(client) }, nil
}

// allowed enforces Limits.SchemasPerClient, and the bounds of memory, for one more version.
func (r *Registry) allowed(client string, size int) error {
	r.mu.RLock()
	defer r.mu.RUnlock()
	switch {
	case client != "" && r.by[client] >= r.cfg.PerClient:
		r.cfg.Obs.LimitReached("schemas_per_client")
		return &event.Error{Code: event.CodeRateLimited, Msg: fmt.Sprintf("this client has registered %d versions of schemas, which is its limit", r.by[client])}
	case client != "" && r.sizeBy[client]+size > clientMemory:
		r.cfg.Obs.LimitReached("client_schema_memory")
		return &event.Error{Code: event.CodeRateLimited, Msg: "the schemas of this client would take more memory than a client may have on each hub"}
	case r.size+size > maxMemory:
		r.cfg.Obs.LimitReached("schema_memory")
		return &event.Error{Code: event.CodeOverloaded, Msg: "all schemas together would take more memory than they may have on each hub"}
	}
	return nil
}

// prepare checks a draft alone, and returns the versions that there are.
func (r *Registry) prepare(ctx context.Context, topic string, d *Draft) (*versionSet, error) {
	if err := event.ValidTopic(topic); err != nil {
		return nil, err
	}
	if len(d.Schema) == 0 {
		return nil, event.BadOptions("schema is missing")
	}
	if len(d.Description) > maxDescription {
		return nil, event.BadOptions("description has %d bytes, at most %d are allowed", len(d.Description), maxDescription)
	}
	if err := r.load(ctx); err != nil {
		return nil, err
	}
	return r.catchUp(ctx, r.name(topic))
}

// judge compiles the next version, and compares it with those before.
func (r *Registry) judge(ctx context.Context, topic string, d *Draft, set *versionSet) (*compiledVersion, *Report, error) {
	if set.latest() >= topics.MaxSchemaVersions {
		return nil, nil, event.BadOptions("the topic has %d versions, which is the limit", set.latest())
	}
	next := &Version{
		Topic: r.name(topic), Version: set.latest() + 1, Schema: d.Schema, Up: nonNull(d.Up), Down: nonNull(d.Down), Description: d.Description, By: d.By,
		TS: time.Now().UnixMilli(),
	}
	if next.Version == 1 && (len(next.Up) > 0 || len(next.Down) > 0) {
		return nil, nil, event.BadOptions("the first version has none before it: leave out up and down")
	}
	c, err := r.compile(next)
	if err != nil {
		return nil, nil, event.BadOptions("%v", err)
	}
	rule := r.cfg.Rules.Of(topic).Schema
	return checkVersion(ctx, r, &rule, set, c)
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

// VersionHeader is the header of an event that has the version of its schema.
const VersionHeader = "x-schema-version"

// CodeInvalid and CodeConflict are codes of errors about schemas.
const (
	CodeInvalid  = "schema_invalid"
	CodeConflict = "schema_conflict"
)

func invalid(format string, args ...any) *event.Error {
	return &event.Error{Code: CodeInvalid, Msg: fmt.Sprintf(format, args...)}
}
