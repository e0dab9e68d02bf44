package schemas

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
	"eventhub/jetstream/schema"
	"eventhub/jetstream/schema/upcast"
	"eventhub/jetstream/topics"
)

// Bounds of schemas. Every hub has all of them in memory, compiled.
const (
	// MaxVersions ("schemas") is the maximum number of versions of all topics. The server refuses
	// further ones.
	MaxVersions = 2_000
	// maxEntry is the most bytes of a version, with its casts.
	maxEntry = 512 << 10
	// maxMemory ("schema_memory") is what all versions may take in the memory of a hub, as it
	// estimates, and clientMemory ("client_schema_memory") what those of a client may take.
	maxMemory, clientMemory = 256 << 20, 64 << 20
)

// Version is one version of the schema of a topic. It is immutable.
type Version struct {
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
func (v *Version) same(d *Draft) bool {
	return equalJSON(v.Schema, d.Schema) &&
		(len(d.Up) == 0 || equalJSON(v.Up, d.Up)) && (len(d.Down)+len(d.Up) == 0 || equalJSON(v.Down, d.Down))
}

// compiledVersion is a version that documents can be compared with.
type compiledVersion struct {
	registered

	schema *schema.Schema
	caster *upcast.Caster // from the version before; nil: none
}

// registered is a Version under a name that does not hide its field Version.
type registered = Version

// size estimates what the version takes in memory, in bytes.
func (v *compiledVersion) size() int { return v.schema.Size() + 32*(len(v.Up)+len(v.Down)) }

func (r *Registry) compile(v *Version) (*compiledVersion, error) {
	s, err := schema.Compile(v.Schema)
	if err != nil {
		return nil, fmt.Errorf("schema: %w", err)
	}
	c := &compiledVersion{registered: *v, schema: s}
	if len(v.Up) > 0 || len(v.Down) > 0 {
		if c.caster, err = upcast.Compile(v.Up, v.Down); err != nil {
			return nil, err
		}
	}
	if own := r.cfg.Casters[v.Topic][v.Version]; own != nil {
		c.caster = own
	}
	return c, nil
}

// versionSet is what a topic has at a moment: versions 1, 2, 3… in order.
type versionSet struct {
	versions []*compiledVersion
	chain    *upcast.Chain
}

// version returns a version, or nil.
func (s *versionSet) version(n int) *compiledVersion {
	if s == nil || n < 1 || n > len(s.versions) {
		return nil
	}
	return s.versions[n-1]
}

// latest is the number of the newest version, 0 for none.
func (s *versionSet) latest() int {
	if s == nil {
		return 0
	}
	return len(s.versions)
}

// with returns the set with one more version.
func (s *versionSet) with(v *compiledVersion) *versionSet {
	next := &versionSet{}
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

// topicVersions are the versions of one name. Reading is one atomic load.
type topicVersions struct {
	set   atomic.Pointer[versionSet]
	ahead map[int]*compiledVersion // that wait for one before them; guarded by the table's mu
	// looked is when the last question for further versions was asked that was answered, in the
	// clock of the bus.
	looked atomic.Int64
	// failed is when a question had no answer, in the clock of the bus; 0: none had.
	failed atomic.Int64
}

func (r *Registry) bucket() streams.SharedBucket {
	s := r.cfg.Bucket
	s.MaxEntry, s.Fixed = maxEntry, true
	return s
}

// Open waits until all schemas are known, if a rule asks for schemas: no event passes unseen.
func (r *Registry) Open(ctx context.Context) error {
	if !slices.ContainsFunc(r.cfg.Rules, func(r topics.Rule) bool { return r.Schema.Asked() }) {
		return nil
	}
	return r.load(ctx)
}

// load follows the bucket from the first call on, and waits until all that was there is known. A
// bus that needs no schemas has no bucket.
func (r *Registry) load(ctx context.Context) error {
	if r.cfg.Conn.Closing() {
		return event.ErrClosed
	}
	r.follow.Do(func() {
		r.cfg.Conn.Start(func() {
			r.bucket().Follow(r.cfg.Conn.Ctx, func() { r.once.Do(func() { close(r.full) }) }, r.saw)
		})
		r.cfg.Conn.Start(r.answer)
	})
	ctx, cancel := context.WithTimeout(ctx, r.cfg.OpenWait)
	defer cancel()
	select {
	case <-r.full:
		return nil
	case <-r.cfg.Conn.Ctx.Done():
		return event.ErrClosed
	case <-ctx.Done():
		return r.cfg.Conn.Unavailable(fmt.Errorf("jetstream: bucket %s: could not be read: %w", r.cfg.Bucket.Name, ctx.Err()))
	}
}

// lookedSince reports whether a question that was answered was asked since a time.
func (s *topicVersions) lookedSince(since int64) bool {
	last := s.looked.Load()
	return last != 0 && last > since
}

// look is a question for further versions of a schema.
type look struct {
	name string
	of   *topicVersions
	// since is when an answer has to have been asked for at least, in the clock of the bus.
	since int64
	done  chan bool
}

// look has the leader of the bucket asked for further versions of a schema, unless it was asked
// since a time. It returns whether it has answered.
func (r *Registry) look(ctx context.Context, name string, of *topicVersions, since int64) bool {
	if of.lookedSince(since) {
		return true
	}
	now := r.cfg.Clock.Now()
	if failed := of.failed.Load(); failed != 0 && now-failed < int64(lookRest) {
		return false
	}
	timer := time.NewTimer(lookWait)
	defer timer.Stop()
	q := look{name, of, since, make(chan bool, 1)}
	select {
	case r.wanted <- q:
	case <-timer.C:
		of.failed.Store(r.cfg.Clock.Now())
		return false
	case <-ctx.Done():
		return false
	}
	select {
	case ok := <-q.done:
		return ok
	case <-timer.C:
		of.failed.Store(r.cfg.Clock.Now())
	case <-ctx.Done():
	}
	return false
}

// answer answers looks, one after the other, until the bus ends.
func (r *Registry) answer() {
	for {
		select {
		case q := <-r.wanted:
			q.done <- r.ask(&q)
		case <-r.cfg.Conn.Ctx.Done():
			return
		}
	}
}

// ask answers a look.
func (r *Registry) ask(q *look) bool {
	if q.of.lookedSince(q.since) {
		return true
	}
	began := r.cfg.Clock.Now()
	ctx, cancel := context.WithTimeout(r.cfg.Conn.Ctx, lookWait)
	defer cancel()
	if _, err := r.catchUp(ctx, q.name); err != nil {
		q.of.failed.Store(r.cfg.Clock.Now())
		return false
	}
	q.of.failed.Store(0)
	q.of.looked.Store(began)
	return true
}

// saw takes an entry of the bucket.
func (r *Registry) saw(key string, value []byte) {
	var v Version
	err := json.Unmarshal(value, &v)
	var c *compiledVersion
	if err == nil && entryKey(v.Topic, v.Version) != key {
		err = errors.New("the entry names another topic or version")
	}
	if err == nil && r.set(v.Topic).version(v.Version) != nil {
		return // a watch begins with all entries after each reconnect
	}
	if err == nil {
		c, err = r.compile(&v)
	}
	if err != nil {
		r.cfg.Often.Log(r.cfg.Conn.Ctx, slog.LevelWarn, "a schema in the registry cannot be used", key, slog.String("key", key), slog.Any("error", err))
		return
	}
	r.add(c)
}

// add takes a version that may be known.
func (r *Registry) add(v *compiledVersion) {
	r.mu.Lock()
	defer r.mu.Unlock()
	of := r.topics[v.Topic]
	if of == nil {
		of = &topicVersions{}
		r.topics[v.Topic] = of
	}
	if of.set.Load().version(v.Version) != nil || of.ahead[v.Version] != nil {
		return
	}
	r.count++
	r.by[v.By]++
	r.size += v.size()
	r.sizeBy[v.By] += v.size()
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
func (r *Registry) of(name string) *topicVersions {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.topics[name]
}

// set returns the versions of a name as they are, nil for none.
func (r *Registry) set(name string) *versionSet {
	if of := r.of(name); of != nil {
		return of.set.Load()
	}
	return nil
}

// names are the names that have versions, sorted.
func (r *Registry) names() (all []string) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for name, of := range r.topics {
		if of.set.Load().latest() > 0 {
			all = append(all, name)
		}
	}
	slices.Sort(all)
	return all
}

// entryKey is the key of an entry.
func entryKey(name string, version int) string {
	return native.ObjectName(name) + "." + strconv.Itoa(version)
}

// catchUp reads versions that this hub has not heard of yet, at the leader of the bucket.
func (r *Registry) catchUp(ctx context.Context, name string) (*versionSet, error) {
	for {
		set := r.set(name)
		key := entryKey(name, set.latest()+1)
		m, err := r.cfg.Conn.LastBySubject(ctx, r.bucket().Stream(), r.bucket().Subject(key))
		if errors.Is(err, event.ErrNotFound) {
			return set, nil
		}
		if err != nil {
			return nil, r.cfg.Conn.Unavailable(err)
		}
		before := set.latest()
		r.saw(key, m.Data)
		if r.set(name).latest() == before {
			return nil, &event.Error{Code: event.CodeInternal, Msg: fmt.Sprintf("version %d of this schema cannot be read by this hub; an operator finds the reason in its log", before+1)}
		}
	}
}

// errTaken says that another hub has registered the version.
var errTaken = errors.New("jetstream: the version was registered by another")

// store writes a new version.
func (r *Registry) store(ctx context.Context, v *compiledVersion) error {
	value, err := json.Marshal(&v.registered)
	if err != nil {
		return err
	}
	if len(value) > maxEntry {
		return event.BadOptions("the version has %d bytes with its casts, at most %d are allowed", len(value), maxEntry)
	}
	if _, err := r.bucket().Open(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, conn.PublishWait)
	defer cancel()
	msg := &nats.Msg{Subject: r.bucket().Subject(entryKey(v.Topic, v.Version)), Data: value}
	_, err = r.cfg.Conn.JS.PublishMsg(ctx, msg, natsjs.WithExpectStream(r.bucket().Stream()), natsjs.WithExpectLastSequencePerSubject(0))
	if conn.KeyChanged(err) {
		return errTaken
	}
	if api, ok := errors.AsType[*natsjs.APIError](err); ok && strings.Contains(api.Description, "maximum messages") {
		if strings.Contains(api.Description, "per subject") {
			return errTaken
		}
		r.cfg.Obs.LimitReached("schemas")
		return &event.Error{Code: event.CodeOverloaded, Msg: fmt.Sprintf("the registry has %d versions, which is its limit", MaxVersions)}
	}
	if err != nil {
		return r.cfg.Conn.Unavailable(fmt.Errorf("jetstream: write to bucket %s: %w", r.cfg.Bucket.Name, err))
	}
	r.add(v)
	return nil
}
