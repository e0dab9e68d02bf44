package jetstream

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/reading"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// Times and bounds of the map for native clients.
const (
	// nativeReadWait bounds a reading of the map, and nativeSomeWait one of single streams: a
	// stream without a leader does not answer.
	nativeReadWait = 8 * time.Second
	nativeSomeWait = 2 * time.Second
	// nativeAge is how old a map may become: a change of a consumer's configuration by somebody
	// else makes no advisory. nativePartAge is the age for a map of which something did not answer.
	nativeAge     = time.Minute
	nativePartAge = 2 * time.Second
	// nativeEcho is how long an advisory may take, and nativeEchoRetry the pause after one that did
	// not come.
	nativeEcho      = time.Second
	nativeEchoRetry = time.Minute
	// maxNativeChanges is how many streams may wait to be read again; beyond it, all are.
	maxNativeChanges = 10_000
)

// nativeAdvisories are what the server publishes about streams, and about consumers that come and
// go. All other advisories of consumers are about events, and many.
var nativeAdvisories = []string{
	"$JS.EVENT.ADVISORY.STREAM.*.*",
	"$JS.EVENT.ADVISORY.CONSUMER.CREATED.*.*",
	"$JS.EVENT.ADVISORY.CONSUMER.DELETED.*.*",
}

// nativeMaps keeps the map of topics and groups for native clients. It is read when a client asks
// for the first time. Afterwards, only streams are read again that have changed since: the server
// publishes advisories about those, and what this hub changes itself is noted before the change is
// answered. The server sends advisories after its answers, so changes that others make are seen a
// moment later. Where the hub gets no advisories, each question is answered by a new map.
//
// One reading runs at a time. Callers that come meanwhile share the next one.
type nativeMaps struct {
	access *access

	begun   atomic.Bool // somebody has asked
	mu      sync.Mutex
	running bool
	next    *nativeReading // for those who wait; it has not begun

	found   *nativeMap
	until   time.Time           // when found is too old
	all     bool                // found is not to be used
	changed map[string]struct{} // streams to be read again; at most maxNativeChanges

	subs    []*nats.Subscription
	lost    int           // advisories that subs had no room for
	follows bool          // advisories come
	echo    string        // the consumer whose advisory is waited for; "" if there is none
	heard   chan struct{} // gets that advisory
	retry   time.Time     // when advisories are waited for again

	known map[string]*nativeStream // owned by run
}

// nativeStream is a stream and, where it stores a topic or a family, what native clients find
// there.
type nativeStream struct {
	topic      *nativeTopic // nil for others
	compaction bool
	groups     []nativeGroup
}

// nativeReading is one reading, and what it found once done is closed.
type nativeReading struct {
	done  chan struct{}
	found *nativeMap
	err   error
}

func newNativeMaps(a *access) *nativeMaps {
	return &nativeMaps{access: a, changed: make(map[string]struct{}), heard: make(chan struct{}, 1)}
}

// get returns a map that has all changes that this hub has made before the call, and those of which
// it has got advisories.
func (n *nativeMaps) get(ctx context.Context) (*nativeMap, error) {
	if n.access.conn.Closing() {
		return nil, event.ErrClosed
	}
	n.begun.Store(true)
	n.mu.Lock()
	if n.currentLocked() {
		defer n.mu.Unlock()
		return n.found, nil
	}
	if n.next == nil {
		n.next = &nativeReading{done: make(chan struct{})}
	}
	reading := n.next
	n.running = n.running || n.access.conn.Start(n.run)
	running := n.running
	n.mu.Unlock()
	if !running {
		return nil, event.ErrClosed
	}
	select {
	case <-reading.done:
		return reading.found, reading.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// currentLocked reports whether nothing has changed since the map was read.
func (n *nativeMaps) currentLocked() bool {
	lost := 0
	for _, sub := range n.subs {
		dropped, err := sub.Dropped()
		if err != nil {
			return false
		}
		lost += dropped
	}
	if lost != n.lost {
		n.lost, n.all = lost, true
	}
	return n.found != nil && n.follows && !n.all && len(n.changed) == 0 && time.Now().Before(n.until)
}

// hubChanged notes that this hub has changed a stream, or a consumer of it if that is not "".
func (n *nativeMaps) hubChanged(stream, consumer string) {
	if mayBeGroup(consumer) {
		n.streamChanged(stream)
	}
}

// streamChanged notes that a stream or its consumers are not what they were.
func (n *nativeMaps) streamChanged(stream string) {
	if !n.begun.Load() {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.changed[stream] = struct{}{}; len(n.changed) > maxNativeChanges {
		clear(n.changed)
		n.all = true
	}
}

// cut notes that the connection over which advisories come was lost, or is back.
func (n *nativeMaps) cut() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.follows, n.all, n.retry = false, true, time.Time{}
}

// advised takes an advisory. The subject ends with the stream, or with stream and consumer.
func (n *nativeMaps) advised(m *nats.Msg) {
	kind, at, _ := strings.Cut(strings.TrimPrefix(m.Subject, "$JS.EVENT.ADVISORY."), ".")
	_, at, _ = strings.Cut(at, ".")
	stream, consumer, _ := strings.Cut(at, ".")
	if kind == "STREAM" || mayBeGroup(consumer) {
		n.streamChanged(stream)
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if consumer == n.echo {
		n.echo, n.follows, n.all = "", true, true // what changed before was not followed
		n.heard <- struct{}{}
	}
}

// run reads as long as somebody waits.
func (n *nativeMaps) run() {
	for {
		n.mu.Lock()
		reading := n.next
		n.next = nil
		n.running = reading != nil
		n.mu.Unlock()
		if reading == nil {
			return
		}
		ctx, cancel := context.WithTimeout(n.access.conn.Ctx, nativeReadWait)
		reading.found, reading.err = n.read(ctx)
		cancel()
		close(reading.done)
	}
}

// read reads what has changed, or all.
func (n *nativeMaps) read(ctx context.Context) (*nativeMap, error) {
	n.listen(ctx)
	n.mu.Lock()
	all := !n.follows || n.found == nil || n.all || !time.Now().Before(n.until)
	changed := slices.Collect(maps.Keys(n.changed))
	clear(n.changed)
	n.all = false
	n.mu.Unlock()

	age := nativeAge
	if !all {
		err := n.readSome(ctx, changed)
		if all = err != nil; all && ctx.Err() == nil {
			n.access.often.Log(ctx, slog.LevelInfo, "cannot read single streams for native clients; reading all", "", slog.Any("error", err))
		}
	}
	if all {
		complete, err := n.readAll(ctx)
		if err != nil {
			n.mu.Lock()
			n.all = true
			n.mu.Unlock()
			return nil, err
		}
		if !complete {
			age = nativePartAge
		}
	}
	found := n.draw()
	n.mu.Lock()
	defer n.mu.Unlock()
	if all {
		n.until = time.Now().Add(age)
	}
	n.found = found
	return found, nil
}

// draw is the map of what is known.
func (n *nativeMaps) draw() *nativeMap {
	var topics []nativeTopic
	var groups []nativeGroup
	names := make(map[string]struct{}, len(n.known))
	for _, name := range slices.Sorted(maps.Keys(n.known)) {
		names[name] = struct{}{}
		s := n.known[name]
		if s.topic == nil {
			continue
		}
		t := *s.topic
		if bucket := streams.NewBucket(t.name).Stream; s.compaction && n.known[bucket] != nil {
			t.bucket = bucket
		}
		topics, groups = append(topics, t), append(groups, s.groups...)
	}
	return newNativeMap(topics, groups, names)
}

// listen begins to listen for advisories, and waits until they come: the hub makes a consumer on
// one of its own streams, and the server tells of it.
func (n *nativeMaps) listen(ctx context.Context) {
	name := n.expectEcho()
	if name == "" {
		return
	}
	within, cancel := context.WithTimeout(ctx, nativeEcho)
	defer cancel()
	err := n.subscribe(within)
	if err == nil {
		err = n.callForEcho(within, name)
	}
	if err != nil && ctx.Err() == nil {
		n.access.often.Log(ctx, slog.LevelWarn, "NATS sends no advisories of streams and consumers: the hub lists all of them for each native client that connects; may its NATS user subscribe to $JS.EVENT.ADVISORY.>?",
			"", slog.Any("error", err))
	}
}

// expectEcho returns the name of a consumer whose advisory is to be waited for, or "".
func (n *nativeMaps) expectEcho() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.follows || time.Now().Before(n.retry) {
		return ""
	}
	n.retry = time.Now().Add(nativeEchoRetry)
	n.echo = rand.Text()
	select {
	case <-n.heard: // too late for the last one
	default:
	}
	return n.echo
}

func (n *nativeMaps) subscribe(ctx context.Context) error {
	nc := n.access.conn.Links[0].NC
	for _, subject := range nativeAdvisories[len(n.subs):] {
		sub, err := nc.Subscribe(subject, n.advised)
		if err != nil {
			return err
		}
		n.mu.Lock()
		n.subs = append(n.subs, sub)
		n.mu.Unlock()
	}
	return nc.FlushWithContext(ctx)
}

// callForEcho makes a consumer, and waits for its advisory.
func (n *nativeMaps) callForEcho(ctx context.Context, name string) error {
	stream := "KV_" + native.AttemptsBucket
	_, err := n.access.conn.JS.CreateConsumer(ctx, stream, natsjs.ConsumerConfig{
		Name: name, AckPolicy: natsjs.AckNonePolicy, DeliverPolicy: natsjs.DeliverNewPolicy, MemoryStorage: true, InactiveThreshold: reading.MakeWait, Replicas: 1,
	})
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), nativeEcho)
		defer cancel()
		_ = n.access.conn.JS.DeleteConsumer(ctx, stream, name) // else the server drops it
	}()
	select {
	case <-n.heard:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("jetstream: no advisory of a consumer came within %v", nativeEcho)
	}
}

// readSome reads single streams.
func (n *nativeMaps) readSome(ctx context.Context, names []string) error {
	ctx, cancel := context.WithTimeout(ctx, nativeSomeWait)
	defer cancel()
	read := make([]*nativeStream, len(names))
	err := concurrently(len(names), func(i int) error {
		info, err := n.access.conn.FindStream(ctx, names[i])
		if errors.Is(err, event.ErrNotFound) {
			return nil
		}
		if err == nil {
			read[i], err = n.readStream(ctx, info)
		}
		return err
	})
	if err != nil {
		return err
	}
	for i, name := range names {
		if n.known[name] = read[i]; read[i] == nil {
			delete(n.known, name)
		}
	}
	return nil
}

// readAll reads all streams. complete is false if some have no leader; of those, what was known
// stays.
func (n *nativeMaps) readAll(ctx context.Context) (complete bool, err error) {
	inv, err := takeInventory(ctx, n.access.core)
	if err != nil {
		return false, err
	}
	names := inv.names()
	read := make([]*nativeStream, len(names))
	err = concurrently(len(names), func(i int) (err error) {
		read[i], err = n.readStream(ctx, inv.byName[names[i]])
		return err
	})
	if err != nil {
		return false, fmt.Errorf("jetstream: list groups for native clients: %w", err)
	}
	known := make(map[string]*nativeStream, len(names))
	for i, name := range names {
		known[name] = read[i]
	}
	complete = true
	list := n.access.conn.JS.StreamNames(ctx)
	for name := range list.Name() {
		if known[name] != nil {
			continue
		}
		complete = false
		if was := n.known[name]; was != nil {
			known[name] = was
		}
	}
	if err := list.Err(); err != nil && !errors.Is(err, natsjs.ErrEndOfData) {
		return false, fmt.Errorf("jetstream: list streams for native clients: %w", err)
	}
	n.known = known
	return complete, nil
}

// readStream returns what native clients find in a stream.
func (n *nativeMaps) readStream(ctx context.Context, info *natsjs.StreamInfo) (*nativeStream, error) {
	found := (&inventory{core: n.access.core}).recognise(info)
	if found.rule == nil {
		return &nativeStream{}, nil
	}
	t := &nativeTopic{name: found.topic, stream: info.Config.Name, alone: found.topic != ""}
	own := []string{plainSubject(t.name), keyedPattern(t.name)}
	for _, subject := range info.Config.Subjects {
		t.alone = t.alone && slices.Contains(own, subject)
	}
	groups, complete, err := n.access.groupsNatively(ctx, t)
	if err != nil {
		return nil, err
	}
	if !complete {
		n.streamChanged(t.stream)
	}
	return &nativeStream{topic: t, compaction: found.rule.Compaction && t.name != "", groups: groups}, nil
}
