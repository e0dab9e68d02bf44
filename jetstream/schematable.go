package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/quota"
	"eventhub/jetstream/schema"
	"eventhub/jetstream/schema/upcast"
	"eventhub/jetstream/topics"
)

// schemasBucket is the KV bucket that holds the schemas of all hubs.
const schemasBucket = "eventhub_schemas"

// Bounds of schemas. Every hub has all of them in memory, compiled.
const (
	// MaxSchemas ("schemas") is the maximum number of versions of all topics. The server refuses
	// further ones.
	MaxSchemas = 2_000
	// maxSchemaEntry is the most bytes of a version, with its casts.
	maxSchemaEntry = 512 << 10
	// maxSchemaMemory ("schema_memory") is what all versions may take in the memory of a hub, as it
	// estimates, and clientSchemaMemory ("client_schema_memory") what those of a client may take.
	maxSchemaMemory, clientSchemaMemory = 256 << 20, 64 << 20
)

// SchemaVersion is one version of the schema of a topic. It is immutable.
type SchemaVersion struct {
	// Topic is the name under which the version is registered.
	Topic string `json:"topic"`
	// Version counts from 1.
	Version int `json:"version"`
	// Schema is a JSON Schema 2020-12.
	Schema json.RawMessage `json:"schema"`
	// Up turns documents of the version before into documents of this one, and Down the other way
	// round: lists of operations (package upcast). Empty without one.
	Up   json.RawMessage `json:"up,omitempty"`
	Down json.RawMessage `json:"down,omitempty"`
	// Description is for people.
	Description string `json:"description,omitempty"`
	// Forced says that the version was registered although it is not compatible.
	Forced bool `json:"forced,omitempty"`
	// By is the client that registered the version, "" for the hub itself, and TS when, in epoch
	// milliseconds.
	By string `json:"by,omitempty"`
	TS int64  `json:"ts"`
}

// same reports whether a draft says what is registered already.
func (v *SchemaVersion) same(d *SchemaDraft) bool {
	return equalJSON(v.Schema, d.Schema) &&
		(len(d.Up) == 0 || equalJSON(v.Up, d.Up)) && (len(d.Down)+len(d.Up) == 0 || equalJSON(v.Down, d.Down))
}

// compiledVersion is a version that documents can be compared with.
type compiledVersion struct {
	SchemaVersion

	schema *schema.Schema
	caster *upcast.Caster // from the version before; nil: none
}

// size estimates what the version takes in memory, in bytes.
func (v *compiledVersion) size() int { return v.schema.Size() + 32*(len(v.Up)+len(v.Down)) }

func (t *schemaTable) compile(v *SchemaVersion) (*compiledVersion, error) {
	s, err := schema.Compile(v.Schema)
	if err != nil {
		return nil, fmt.Errorf("schema: %w", err)
	}
	c := &compiledVersion{SchemaVersion: *v, schema: s}
	if len(v.Up) > 0 || len(v.Down) > 0 {
		if c.caster, err = upcast.Compile(v.Up, v.Down); err != nil {
			return nil, err
		}
	}
	if own := t.schemas.cfg.Casters[v.Topic][v.Version]; own != nil {
		c.caster = own
	}
	return c, nil
}

// schemaSet is what a topic has at a moment: versions 1, 2, 3… in order.
type schemaSet struct {
	versions []*compiledVersion
	chain    *upcast.Chain
}

// version returns a version, or nil.
func (s *schemaSet) version(n int) *compiledVersion {
	if s == nil || n < 1 || n > len(s.versions) {
		return nil
	}
	return s.versions[n-1]
}

// latest is the number of the newest version, 0 for none.
func (s *schemaSet) latest() int {
	if s == nil {
		return 0
	}
	return len(s.versions)
}

// with returns the set with one more version.
func (s *schemaSet) with(v *compiledVersion) *schemaSet {
	next := &schemaSet{}
	if s != nil {
		next.versions = slices.Clone(s.versions)
	}
	next.versions = append(next.versions, v)
	casters := make([]*upcast.Caster, 0, len(next.versions))
	for _, v := range next.versions[1:] {
		casters = append(casters, v.caster)
	}
	next.chain = upcast.NewChain(1, casters...)
	return next
}

// topicSchemas are the versions of one name. Reading is one atomic load.
type topicSchemas struct {
	set   atomic.Pointer[schemaSet]
	ahead map[int]*compiledVersion // that wait for one before them; guarded by the table's mu
	// looked is when the last question for further versions was asked that was answered, in the
	// clock of the bus.
	looked atomic.Int64
	// failed is when a question had no answer, in the clock of the bus; 0: none had.
	failed atomic.Int64
}

// schemas has the schemas of topics, and compares and casts events with them.
type schemas struct {
	*core
	table     *schemaTable
	computing computing
}

func newSchemas(c *core) *schemas {
	m := &schemas{core: c, computing: computing{c.cfg.Computing}}
	m.table = newSchemaTable(m)
	return m
}

// schemaTable has all schemas. It follows the bucket, and keeps what it knows without NATS.
type schemaTable struct {
	schemas *schemas
	follow  sync.Once
	once    sync.Once
	full    chan struct{} // closed once all that was there is known
	wanted  chan look     // for versions that events name

	checks *quota.Places

	mu     sync.RWMutex
	topics map[string]*topicSchemas // bounded by MaxSchemas
	count  int
	by     map[string]int // versions by client
	// size is what all versions take in memory, and sizeBy what those of a client take, in bytes.
	size   int
	sizeBy map[string]int
}

func newSchemaTable(m *schemas) *schemaTable {
	return &schemaTable{schemas: m, full: make(chan struct{}), wanted: make(chan look), checks: quota.NewPlaces(schemaChecks, (schemaChecks+1)/2), topics: make(map[string]*topicSchemas), by: make(map[string]int), sizeBy: make(map[string]int)}
}

func (t *schemaTable) bucket() streams.SharedBucket {
	s := t.schemas.sharedBucket(schemasBucket, "schemas of topics", MaxSchemas)
	s.MaxEntry, s.Fixed = maxSchemaEntry, true
	return s
}

// open waits until all schemas are known, if a rule asks for schemas: no event passes unseen.
func (t *schemaTable) open(ctx context.Context) error {
	if !slices.ContainsFunc(t.schemas.rules, func(r topics.Rule) bool { return r.Schema.Asked() }) {
		return nil
	}
	return t.load(ctx)
}

// load follows the bucket from the first call on, and waits until all that was there is known. A
// bus that needs no schemas has no bucket.
func (t *schemaTable) load(ctx context.Context) error {
	if t.schemas.conn.Closing() {
		return event.ErrClosed
	}
	t.follow.Do(func() {
		t.schemas.conn.Start(func() {
			t.bucket().Follow(t.schemas.conn.Ctx, func() { t.once.Do(func() { close(t.full) }) }, t.saw)
		})
		t.schemas.conn.Start(t.answer)
	})
	ctx, cancel := context.WithTimeout(ctx, t.schemas.cfg.openWait)
	defer cancel()
	select {
	case <-t.full:
		return nil
	case <-t.schemas.conn.Ctx.Done():
		return event.ErrClosed
	case <-ctx.Done():
		return t.schemas.conn.Unavailable(fmt.Errorf("jetstream: bucket %s: could not be read: %w", schemasBucket, ctx.Err()))
	}
}

// lookedSince reports whether a question that was answered was asked since a time.
func (s *topicSchemas) lookedSince(since int64) bool {
	last := s.looked.Load()
	return last != 0 && last > since
}

// look is a question for further versions of a schema.
type look struct {
	name string
	of   *topicSchemas
	// since is when an answer has to have been asked for at least, in the clock of the bus.
	since int64
	done  chan bool
}

// look has the leader of the bucket asked for further versions of a schema, unless it was asked
// since a time. It returns whether it has answered.
func (t *schemaTable) look(ctx context.Context, name string, of *topicSchemas, since int64) bool {
	if of.lookedSince(since) {
		return true
	}
	now := t.schemas.clock.Now()
	if failed := of.failed.Load(); failed != 0 && now-failed < int64(lookRest) {
		return false
	}
	timer := time.NewTimer(lookWait)
	defer timer.Stop()
	q := look{name, of, since, make(chan bool, 1)}
	select {
	case t.wanted <- q:
	case <-timer.C:
		of.failed.Store(t.schemas.clock.Now())
		return false
	case <-ctx.Done():
		return false
	}
	select {
	case ok := <-q.done:
		return ok
	case <-timer.C:
		of.failed.Store(t.schemas.clock.Now())
	case <-ctx.Done():
	}
	return false
}

// answer answers looks, one after the other, until the bus ends.
func (t *schemaTable) answer() {
	for {
		select {
		case q := <-t.wanted:
			q.done <- t.ask(&q)
		case <-t.schemas.conn.Ctx.Done():
			return
		}
	}
}

// ask answers a look.
func (t *schemaTable) ask(q *look) bool {
	if q.of.lookedSince(q.since) {
		return true
	}
	began := t.schemas.clock.Now()
	ctx, cancel := context.WithTimeout(t.schemas.conn.Ctx, lookWait)
	defer cancel()
	if _, err := t.catchUp(ctx, q.name); err != nil {
		q.of.failed.Store(t.schemas.clock.Now())
		return false
	}
	q.of.failed.Store(0)
	q.of.looked.Store(began)
	return true
}

// saw takes an entry of the bucket.
func (t *schemaTable) saw(key string, value []byte) {
	var v SchemaVersion
	err := json.Unmarshal(value, &v)
	var c *compiledVersion
	if err == nil && schemaKey(v.Topic, v.Version) != key {
		err = errors.New("the entry names another topic or version")
	}
	if err == nil && t.set(v.Topic).version(v.Version) != nil {
		return // a watch begins with all entries after each reconnect
	}
	if err == nil {
		c, err = t.compile(&v)
	}
	if err != nil {
		t.schemas.often.Log(t.schemas.conn.Ctx, slog.LevelWarn, "a schema in the registry cannot be used", key, slog.String("key", key), slog.Any("error", err))
		return
	}
	t.add(c)
}

// add takes a version that may be known.
func (t *schemaTable) add(v *compiledVersion) {
	t.mu.Lock()
	defer t.mu.Unlock()
	of := t.topics[v.Topic]
	if of == nil {
		of = &topicSchemas{}
		t.topics[v.Topic] = of
	}
	if of.set.Load().version(v.Version) != nil || of.ahead[v.Version] != nil {
		return
	}
	t.count++
	t.by[v.By]++
	t.size += v.size()
	t.sizeBy[v.By] += v.size()
	if of.ahead == nil {
		of.ahead = make(map[int]*compiledVersion)
	}
	of.ahead[v.Version] = v
	for {
		next := of.ahead[of.set.Load().latest()+1]
		if next == nil {
			return
		}
		delete(of.ahead, next.Version)
		of.set.Store(of.set.Load().with(next))
	}
}

// of returns the versions of a name, nil for none.
func (t *schemaTable) of(name string) *topicSchemas {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.topics[name]
}

// set returns the versions of a name as they are, nil for none.
func (t *schemaTable) set(name string) *schemaSet {
	if of := t.of(name); of != nil {
		return of.set.Load()
	}
	return nil
}

// names are the names that have versions, sorted.
func (t *schemaTable) names() (all []string) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for name, of := range t.topics {
		if of.set.Load().latest() > 0 {
			all = append(all, name)
		}
	}
	slices.Sort(all)
	return all
}

// schemaKey is the key of an entry.
func schemaKey(name string, version int) string {
	return objectName(name) + "." + strconv.Itoa(version)
}

// catchUp reads versions that this hub has not heard of yet, at the leader of the bucket.
func (t *schemaTable) catchUp(ctx context.Context, name string) (*schemaSet, error) {
	for {
		set := t.set(name)
		key := schemaKey(name, set.latest()+1)
		m, err := t.schemas.conn.LastBySubject(ctx, t.bucket().Stream(), t.bucket().Subject(key))
		if errors.Is(err, event.ErrNotFound) {
			return set, nil
		}
		if err != nil {
			return nil, t.schemas.conn.Unavailable(err)
		}
		before := set.latest()
		t.saw(key, m.Data)
		if t.set(name).latest() == before {
			return nil, &event.Error{Code: event.CodeInternal, Msg: fmt.Sprintf("version %d of this schema cannot be read by this hub; an operator finds the reason in its log", before+1)}
		}
	}
}

// errSchemaTaken says that another hub has registered the version.
var errSchemaTaken = errors.New("jetstream: the version was registered by another")

// store writes a new version.
func (t *schemaTable) store(ctx context.Context, v *compiledVersion) error {
	value, err := json.Marshal(&v.SchemaVersion)
	if err != nil {
		return err
	}
	if len(value) > maxSchemaEntry {
		return event.BadOptions("the version has %d bytes with its casts, at most %d are allowed", len(value), maxSchemaEntry)
	}
	if _, err := t.bucket().Open(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, conn.PublishWait)
	defer cancel()
	msg := &nats.Msg{Subject: t.bucket().Subject(schemaKey(v.Topic, v.Version)), Data: value}
	_, err = t.schemas.conn.JS.PublishMsg(ctx, msg, natsjs.WithExpectStream(t.bucket().Stream()), natsjs.WithExpectLastSequencePerSubject(0))
	if errors.Is(records.MovedOr(err), records.ErrMoved) {
		return errSchemaTaken
	}
	if api, ok := errors.AsType[*natsjs.APIError](err); ok && strings.Contains(api.Description, "maximum messages") {
		if strings.Contains(api.Description, "per subject") {
			return errSchemaTaken
		}
		t.schemas.obs.LimitReached("schemas")
		return &event.Error{Code: event.CodeOverloaded, Msg: fmt.Sprintf("the registry has %d versions, which is its limit", MaxSchemas)}
	}
	if err != nil {
		return t.schemas.conn.Unavailable(fmt.Errorf("jetstream: write to bucket %s: %w", schemasBucket, err))
	}
	t.add(v)
	return nil
}
