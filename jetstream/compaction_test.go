package jetstream

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// The long form, as in RELIABILITY.md:
//
//	go test ./jetstream -run TestCompactionLosesNothing -compaction.rounds 20 -v -timeout 60m
var compactionRounds = flag.Int("compaction.rounds", 1, "how often servers are killed, restarted and robbed of their leadership, and the topic's events dropped")

const (
	compactionTopic   = "state.kept"
	compactionWriters = 4
	compactionKeys    = 25 // of each writer
)

// Whatever happens to servers and to the topic's stream: the bucket has the newest event of each
// key that was confirmed, or a later one whose publisher was left without an answer; keys that were
// removed stay gone.
func TestCompactionLosesNothing(t *testing.T) {
	t.Parallel()
	for _, servers := range []int{1, 3} {
		t.Run(strconv.Itoa(servers)+" servers", func(t *testing.T) {
			t.Parallel()
			c := startProcesses(t, servers)
			k := &keyWriter{servers: c, truth: make(map[string]*keyTruth)}
			for range 2 {
				k.hubs = append(k.hubs, openRemote(t, Config{URL: c.urls(), Replicas: servers, Topics: compactedRules}))
			}
			k.run(t)
		})
	}
}

// keyWriter writes keys, disturbs servers, and knows what must be there.
type keyWriter struct {
	servers *natsProcesses
	hubs    []*Bus
	topic   *streams.Topic
	count   int // rounds so far

	mu    sync.Mutex
	truth map[string]*keyTruth
}

// keyTruth is what one key may be. Only its writer changes it.
type keyTruth struct {
	seq     uint64 // of the newest confirmed event, 0: none was
	payload string // "": a tombstone
	// open are the payloads of publishes without an answer: they may have been stored, even later.
	open map[string]bool
}

func (k *keyWriter) run(t *testing.T) {
	t.Helper()
	var err error
	if k.topic, err = k.hubs[0].streams.Topic(t.Context(), compactionTopic, ""); err != nil {
		t.Fatal(err)
	}
	streams := []string{k.topic.Stream.Name, k.topic.Bucket.Stream}
	k.servers.healthy(streams...)
	confirmed := 0
	for range *compactionRounds {
		confirmed += k.write(t, func() { k.disturb(t, streams) })
		k.servers.healthy(streams...)
		k.settle(t)
		k.check(t, "after servers failed")
		k.expire(t)
		k.check(t, "after the topic's events were dropped")
		k.killAll(t, streams)
		k.check(t, "after all servers were killed")
		k.count++
	}
	t.Logf("%d events were confirmed in %d rounds; %d keys, of which %d are gone", confirmed, k.count, len(k.truth), k.gone())
}

func (k *keyWriter) gone() (n int) {
	for _, w := range k.truth {
		if w.payload == "" {
			n++
		}
	}
	return n
}

// write has all writers write until f has returned, and says how many events were confirmed. Half
// of the writers give ids, and repeat what was left without an answer until it has one; the other
// half, and native ones, go on with the next event.
func (k *keyWriter) write(t *testing.T, f func()) (confirmed int) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	var writers sync.WaitGroup
	counts := make([]int, compactionWriters)
	for w := range compactionWriters {
		writers.Go(func() { counts[w] = k.writer(ctx, w) })
	}
	f()
	stop()
	writers.Wait()
	for _, n := range counts {
		confirmed += n
	}
	if confirmed == 0 {
		t.Error("nothing was confirmed")
	}
	return confirmed
}

// writer writes its own keys, one event at a time.
func (k *keyWriter) writer(ctx context.Context, w int) (confirmed int) {
	random := rand.New(rand.NewPCG(uint64(k.count), uint64(w)))
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for i := 0; ctx.Err() == nil; i++ {
		<-tick.C
		key := fmt.Sprintf("%d-%d", w, random.IntN(compactionKeys))
		payload := fmt.Sprintf("%d.%d", k.count, i)
		if random.IntN(8) == 0 {
			payload = ""
		}
		id := ""
		if w%2 == 0 {
			id = fmt.Sprintf("%d-%d-%d", w, k.count, i)
		}
		for {
			// An event is given its time, whatever ends the writing.
			seq, err := k.publish(context.WithoutCancel(ctx), w, key, payload, id)
			if err == nil {
				k.confirm(key, payload, seq)
				confirmed++
				break
			}
			if id == "" {
				k.unanswered(key, payload)
				break
			}
		}
	}
	return confirmed
}

// publish goes through a hub, and of the last writer natively.
func (k *keyWriter) publish(ctx context.Context, w int, key, payload, id string) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if w == compactionWriters-1 {
		m := nats.NewMsg(keyedSubject(compactionTopic, key))
		m.Data = []byte(payload)
		if payload == "" {
			m.Header.Set(native.HeaderOperation, native.Tombstone)
		}
		ack, err := k.servers.js.PublishMsg(ctx, m)
		if err != nil {
			return 0, err
		}
		return ack.Sequence, nil
	}
	r, err := k.hubs[w%len(k.hubs)].Publish(ctx, compactionTopic, []byte(payload), PublishOptions{Key: key, ID: id, Tombstone: payload == ""})
	return r.Sequence, err
}

func (k *keyWriter) of(key string) *keyTruth {
	if k.truth[key] == nil {
		k.truth[key] = &keyTruth{open: make(map[string]bool)}
	}
	return k.truth[key]
}

func (k *keyWriter) confirm(key, payload string, seq uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	w := k.of(key)
	w.seq, w.payload = seq, payload
}

func (k *keyWriter) unanswered(key, payload string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.of(key).open[payload] = true
}

// disturb kills a server, restarts another in good order, and makes both leaders change, all while
// writers write.
func (k *keyWriter) disturb(t *testing.T, streams []string) {
	t.Helper()
	nodes := k.servers.nodes
	n := len(nodes)
	k.await(t, 50)
	if n > 1 {
		for _, stream := range streams {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			if err := k.servers.stepDown(ctx, stream); err != nil {
				t.Logf("%v", err) // somebody else has taken over just now
			}
			cancel()
			k.await(t, 20)
		}
	}
	nodes[k.count%n].Kill()
	if n > 1 {
		k.await(t, 20) // the others go on
	}
	nodes[k.count%n].Start()
	k.servers.healthy(streams...)
	k.await(t, 20)
	other := nodes[(k.count+1)%n]
	other.Stop()
	other.Start()
	k.servers.healthy(streams...)
	k.await(t, 20)
}

// await waits until so many events more are in the topic's stream.
func (k *keyWriter) await(t *testing.T, n uint64) {
	t.Helper()
	from := uint64(0)
	k.servers.until("writers go on", func(ctx context.Context) bool {
		info, err := k.servers.info(ctx, k.topic.Stream.Name)
		if err != nil {
			return false
		}
		if from == 0 {
			from = info.State.LastSeq
		}
		return info.State.LastSeq >= from+n
	})
}

// settle waits until the bucket has all that the topic's stream has: each key's newest sequence is
// the same in both.
func (k *keyWriter) settle(t *testing.T) {
	t.Helper()
	for key := range k.truth {
		var want, got *conn.StoredMsg
		k.servers.until("the bucket has the newest event of "+key, func(ctx context.Context) bool {
			var err error
			if want, err = k.hubs[0].conn.LastBySubject(ctx, k.topic.Stream.Name, keyedSubject(compactionTopic, key)); err != nil {
				return err == event.ErrNotFound //nolint:errorlint // it comes as it is; a key that was never stored, or was dropped before
			}
			if got, err = k.hubs[0].conn.LastBySubject(ctx, k.topic.Bucket.Stream, k.topic.Bucket.Subject(key)); err != nil {
				return false
			}
			at, ours := k.topic.EntryOrigin(got)
			return ours && at.Seq == want.Seq
		})
	}
}

// check compares all reads with the truth.
func (k *keyWriter) check(t *testing.T, when string) {
	t.Helper()
	keys := slices.Collect(maps.Keys(k.truth))
	var wrong error
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(slow / 4); time.Now().Before(deadline); <-tick.C {
		// A replica may be late by a moment, and a leader may just change.
		if wrong = k.read(t.Context(), keys); wrong == nil {
			return
		}
	}
	t.Errorf("%s: %v", when, wrong)
}

// read reads the keys in all ways, and says what is wrong.
func (k *keyWriter) read(ctx context.Context, keys []string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	many, err := k.hubs[1].Keys(compactionTopic).GetMany(ctx, keys)
	if err == nil {
		err = k.judge(many)
	}
	if err != nil {
		return fmt.Errorf("GetMany: %w", err)
	}
	each := make(map[string]*event.Event)
	err = k.hubs[0].Keys(compactionTopic).Each(ctx, func(e *event.Event) error {
		if !e.Tombstone {
			each[e.Key] = e
		}
		return nil
	})
	if err != nil || !maps.EqualFunc(many, each, sameEvent) {
		return fmt.Errorf("Each gives %d keys, GetMany %d: %w", len(each), len(many), err)
	}
	pages := make(map[string]*event.Event)
	page, err := k.hubs[0].Keys(compactionTopic).Page(ctx, 0, 1_000)
	for _, e := range page {
		pages[e.Key] = e
	}
	if err != nil || !maps.EqualFunc(many, pages, sameEvent) {
		return fmt.Errorf("Page gives %d keys, GetMany %d: %w", len(pages), len(many), err)
	}
	return nil
}

func sameEvent(a, b *event.Event) bool {
	return a.Key == b.Key && a.Sequence == b.Sequence && string(a.Payload) == string(b.Payload)
}

// judge says what is wrong with what was read.
func (k *keyWriter) judge(read map[string]*event.Event) error {
	for key, w := range k.truth {
		e := read[key]
		switch {
		case e == nil && (w.payload == "" || w.open[""]):
			// removed
		case e == nil && w.seq == 0:
			// never confirmed
		case e == nil:
			return fmt.Errorf("key %s is missing, %q was confirmed at %d", key, w.payload, w.seq)
		case e.Sequence == w.seq && string(e.Payload) == w.payload && w.payload != "":
			// the newest
		case e.Sequence > w.seq && w.open[string(e.Payload)]:
			// stored without an answer
		default:
			return fmt.Errorf("key %s is %q of %d, %q was confirmed at %d", key, e.Payload, e.Sequence, w.payload, w.seq)
		}
	}
	return nil
}

// expire shortens the topic's retention until the stream is empty, and restores it.
func (k *keyWriter) expire(t *testing.T) {
	t.Helper()
	k.setAge(t, 100*time.Millisecond)
	k.servers.until("the topic's stream is empty", func(ctx context.Context) bool {
		info, err := k.servers.info(ctx, k.topic.Stream.Name)
		return err == nil && info.State.Msgs == 0
	})
	k.setAge(t, time.Hour)
}

func (k *keyWriter) setAge(t *testing.T, age time.Duration) {
	t.Helper()
	k.servers.until("the retention changes", func(ctx context.Context) bool {
		info, err := k.servers.info(ctx, k.topic.Stream.Name)
		if err != nil {
			return false
		}
		cfg := info.Config
		cfg.MaxAge, cfg.Duplicates = age, min(cfg.Duplicates, age)
		if age == time.Hour {
			cfg.Duplicates = 2 * time.Minute
		}
		_, err = k.servers.js.UpdateStream(ctx, cfg)
		return err == nil
	})
}

// killAll kills all servers at once and starts them again.
func (k *keyWriter) killAll(t *testing.T, streams []string) {
	t.Helper()
	for _, s := range k.servers.nodes {
		s.Kill()
	}
	for _, s := range k.servers.nodes {
		s.Start()
	}
	k.servers.healthy(streams...)
}
