package jetstream

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

// stateful is the rules of a hub with something of everything.
var stateful = []topics.Rule{{Pattern: "state.**", Compaction: true, MaxAge: time.Hour}}

// fillHub makes something of everything that a hub stores.
func fillHub(t *testing.T, b *Bus) {
	t.Helper()
	ctx := t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	publishAll(t, b, "orders", numbers(20)...)

	// a group with events in every state: 0 to 9 settled, 12 settled out of order, 10 refused twice
	k := take(t, b, "orders", "plain", SubscribeOptions{From: FromEarliest})
	k.payloads(10)
	for range 10 {
		switch d := k.next(); string(d.Event.Payload) {
		case "10":
			must(d.Nack("later", 0))
		case "12":
			must(d.Ack())
		}
	}
	must(k.next().Nack("later still", 0))
	must(k.sub.Stop(ctx))

	// a group that was moved: its pointer names the stream
	k = take(t, b, "orders", "moved", SubscribeOptions{From: FromEarliest})
	k.payloads(20)
	must(k.sub.Stop(ctx))
	_, err := b.Group("orders", "moved").Move(ctx, FromTime(time.Unix(0, 0)))
	must(err)
	k = take(t, b, "orders", "moved", SubscribeOptions{})
	k.payloads(5)
	_, err = b.Group("orders", "moved").Bookmarks().Put(ctx, "here")
	must(err)
	must(k.sub.Stop(ctx))

	fail(t, b, "orders", "failing", "it is broken", 3)
	for i := range 5 {
		_, err := b.Publish(ctx, "state.a", fmt.Appendf(nil, "%d", i), PublishOptions{Key: "k" + strconv.Itoa(i%2)})
		must(err)
	}
	eventually(t, "the bucket", func() bool {
		e, err := b.Keys("state.a").Get(ctx, "k0")
		return err == nil && e != nil && string(e.Payload) == "4"
	})
	_, err = b.Publish(ctx, "late", []byte(`"soon"`), PublishOptions{ID: "due", Delay: time.Hour})
	must(err)
	own, err := b.Collections().Open(ctx, "states")
	must(err)
	_, err = own.Put(ctx, "a", []byte("1"), nil, 0)
	must(err)
}

// filledHub checks what fillHub has made, on another bus.
func filledHub(t *testing.T, b *Bus) {
	t.Helper()
	ctx := t.Context()
	k := take(t, b, "orders", "plain", SubscribeOptions{})
	attempts := make(map[string]int)
	for range 9 {
		d := k.next()
		attempts[string(d.Event.Payload)] = d.Attempt
		if err := d.Ack(); err != nil {
			t.Fatal(err)
		}
	}
	for i := 10; i < 20; i++ {
		if p := strconv.Itoa(i); (attempts[p] > 0) == (i == 12) {
			t.Errorf("event %d came to the group with attempt %d", i, attempts[p])
		}
	}
	if attempts["10"] < 2 {
		t.Errorf("event 10 was refused, and comes with attempt %d", attempts["10"])
	}
	k.quiet(100 * time.Millisecond)
	k = take(t, b, "orders", "moved", SubscribeOptions{})
	// Events that were on their way when a leader changed come again later.
	if got, want := slices.Sorted(slices.Values(k.payloads(15))), slices.Sorted(slices.Values(numbers(20)[5:])); !slices.Equal(got, want) {
		t.Errorf("the moved group gets %v, want %v", got, want)
	}
	if marks, err := b.Group("orders", "moved").Bookmarks().List(ctx); err != nil || len(marks) != 1 {
		t.Errorf("bookmarks: %v, %v", marks, err)
	}
	counts, err := b.Admin().DeadLetters().Count(ctx, LetterFilter{Topic: "orders", Group: "failing"}, "", nil)
	if err != nil || counts.Total != 3 {
		t.Errorf("dead letters: %+v, %v", counts, err)
	}
	if got := redriveAll(t, b, LetterFilter{Topic: "orders", Group: "failing"}, RedriveOptions{}); got.Done != 3 {
		t.Errorf("redriven: %+v", got)
	}
	for key, want := range map[string]string{"k0": "4", "k1": "3"} {
		if e, err := b.Keys("state.a").Get(ctx, key); err != nil || e == nil || string(e.Payload) != want {
			t.Errorf("the latest of %s is %v, %v", key, e, err)
		}
	}
	// the bucket goes on where it was
	if _, err := b.Publish(ctx, "state.a", []byte("9"), PublishOptions{Key: "k1"}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the bucket goes on", func() bool {
		m, err := b.Keys("state.a").GetMany(ctx, []string{"k1"})
		return err == nil && m["k1"] != nil && string(m["k1"].Payload) == "9"
	})
	waiting, err := b.Admin().Topic("late").Delayed(ctx, "", 10)
	if err != nil || len(waiting.Events) != 1 || waiting.Events[0].ID != "due" {
		t.Errorf("delayed events: %+v, %v", waiting, err)
	}
	own, err := b.Collections().Open(ctx, "states")
	if err != nil {
		t.Fatal(err)
	}
	if e, err := own.Get(ctx, "a"); err != nil || string(e.Value) != "1" {
		t.Errorf("the collection has %+v, %v", e, err)
	}
}

// backup makes a backup of a bus, and opens it.
func backup(t *testing.T, b *Bus) *Backup {
	t.Helper()
	path := filepath.Join(t.TempDir(), "backup")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Admin().NATS().Backup(t.Context(), f, BackupOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	made, err := OpenBackup(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = made.Close() })
	return made
}

func openStore(t *testing.T, cfg Config) *Store {
	t.Helper()
	s, err := OpenStore(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// restorable returns a backup of a hub with 20 events of topic orders, the name of their stream,
// and a server to restore it to, with a proxy.
func restorable(t *testing.T) (made *Backup, orders string, at *natsserver.Server, proxy *apiProxy) {
	t.Helper()
	from := open(t, Config{Topics: stateful})
	publishAll(t, from, "orders", numbers(20)...)
	made = backup(t, from)
	orders = made.Streams[slices.IndexFunc(made.Streams, func(s backedUp) bool { return s.Messages == 20 })].Name
	at = natstest.Run(t)
	return made, orders, at, startAPIProxy(t, at.ClientURL())
}

// A backup of a running hub has everything that the hub stores: it is restored to an embedded
// server, and to a cluster.
func TestRestoreHasEverything(t *testing.T) {
	t.Parallel()
	// On a slow machine, a hub may forget its leases.
	b := open(t, Config{Topics: stateful, AckWait: 3 * time.Second})
	fillHub(t, b)
	made := backup(t, b)
	t.Run("embedded", func(t *testing.T) {
		t.Parallel()
		dir := t.TempDir()
		s := openStore(t, Config{Server: natstest.Embed(t, dir)})
		if err := s.Restore(t.Context(), made, RestoreOptions{}); err != nil {
			t.Fatal(err)
		}
		_ = s.Close()
		filledHub(t, open(t, Config{Server: natstest.Embed(t, dir), Topics: stateful}))
	})
	t.Run("cluster", func(t *testing.T) {
		t.Parallel()
		url := threeServers(t)
		s := openStore(t, Config{URL: url, openWait: 10 * time.Second})
		if err := s.Restore(t.Context(), made, RestoreOptions{Replicas: 3}); err != nil {
			t.Fatal(err)
		}
		filledHub(t, open(t, Config{URL: url, Topics: stateful, Replicas: 3}))
	})
}

// In a cluster, the answer to a request for a restore may be quicker than the news of where its
// parts go: the first part is sent until a server takes it.
func TestRestoreBeforeItsWayIsKnown(t *testing.T) {
	t.Parallel()
	made, orders, server, proxy := restorable(t)
	received := func() int64 {
		v, err := server.Varz(nil)
		if err != nil {
			t.Error(err)
			return 1 << 62
		}
		return v.InMsgs
	}
	var relays sync.WaitGroup
	defer relays.Wait()
	proxy.answer("STREAM.RESTORE."+orders, func(answer []byte) []byte {
		var said struct {
			Deliver string `json:"deliver_subject"`
		}
		if err := json.Unmarshal(answer, &said); err != nil || said.Deliver == "" {
			t.Errorf("answer %s: %v", answer, err)
			return answer
		}
		before := received()
		relays.Go(func() {
			// the way is made when the first part has come to nobody
			eventually(t, "a first part", func() bool { return received() >= before+2 })
			_, err := proxy.nc.Subscribe("late", func(m *nats.Msg) {
				// it fails at the end of the test
				_ = proxy.nc.PublishMsg(&nats.Msg{Subject: said.Deliver, Reply: m.Reply, Data: m.Data})
			})
			if err != nil {
				t.Error(err)
			}
		})
		return bytes.Replace(answer, []byte(said.Deliver), []byte("late"), 1)
	})
	s := openStore(t, Config{URL: server.ClientURL(), Domain: proxyDomain})
	if err := s.Restore(t.Context(), made, RestoreOptions{}); err != nil {
		t.Fatal(err)
	}
	to := open(t, Config{URL: server.ClientURL(), Topics: stateful})
	take(t, to, "orders", "g", SubscribeOptions{From: FromEarliest}).payloads(20)
}

// A cluster that elects another leader than it planned does not answer the request for a restore,
// and keeps an empty stream: the restore is begun again.
func TestRestoreThatIsNotAnswered(t *testing.T) {
	t.Parallel()
	made, orders, server, proxy := restorable(t)
	nc, err := nats.Connect(server.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	var asked atomic.Int32
	proxy.answer("STREAM.RESTORE."+orders, func(answer []byte) []byte {
		if asked.Add(1) > 1 {
			return answer
		}
		config, err := json.Marshal(map[string]string{"name": orders})
		if err != nil {
			t.Error(err)
		}
		if _, err := nc.Request("$JS.API.STREAM.CREATE."+orders, config, wait); err != nil {
			t.Error(err)
		}
		return nil
	})
	s := openStore(t, Config{URL: server.ClientURL(), Domain: proxyDomain, openWait: 2 * time.Second})
	if err := s.Restore(t.Context(), made, RestoreOptions{}); err != nil {
		t.Fatal(err)
	}
	if n := asked.Load(); n != 2 {
		t.Errorf("the restore was begun %d times", n)
	}
	to := open(t, Config{URL: server.ClientURL(), Topics: stateful})
	take(t, to, "orders", "g", SubscribeOptions{From: FromEarliest}).payloads(20)
}

// A restore removes no stream of another program that has the name of one of the backup's, even if
// no server answers the request for its restore: the restore is refused before anything is made.
func TestRestoreBesideAStreamOfThatName(t *testing.T) {
	t.Parallel()
	made, orders, server, proxy := restorable(t)
	proxy.meet(func(request string) bool { return request != "STREAM.RESTORE."+orders })
	look := natstest.Look(t, server.ClientURL())
	if _, err := look.JS.CreateStream(t.Context(), natsjs.StreamConfig{Name: orders, Subjects: []string{"theirs"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := look.JS.Publish(t.Context(), "theirs", []byte("x")); err != nil {
		t.Fatal(err)
	}
	s := openStore(t, Config{URL: server.ClientURL(), Domain: proxyDomain, openWait: 2 * time.Second})
	if err := s.Restore(t.Context(), made, RestoreOptions{}); err == nil || !strings.Contains(err.Error(), "stream "+orders+" of another program") {
		t.Errorf("restored: %v", err)
	}
	theirs, err := look.JS.Stream(t.Context(), orders)
	if err != nil || theirs.CachedInfo().State.Msgs != 1 {
		t.Fatalf("their stream: %+v, %v", theirs, err)
	}
	if _, err := look.JS.Stream(t.Context(), restoreMark); !errors.Is(err, natsjs.ErrStreamNotFound) {
		t.Errorf("the mark of the restore: %v", err)
	}
}

// The leader of a cluster that was just elected may not know all servers yet, and refuses to place
// streams, and more copies of them.
func TestPlacesAfterAnElection(t *testing.T) {
	t.Parallel()
	// The servers learn of the proxy one after the other, so all connect to the same one.
	url := natstest.RunCluster(t, 3)[0].ClientURL()
	proxy := startAPIProxy(t, url)
	b := open(t, Config{URL: url, Domain: proxyDomain})
	js := natstest.Look(t, url).JS
	settings := func(stream string) natsjs.StreamConfig {
		s, err := js.Stream(t.Context(), stream)
		if err != nil {
			t.Error(err)
			return natsjs.StreamConfig{}
		}
		return s.CachedInfo().Config
	}
	var made, joined, refused atomic.Int32
	var changed atomic.Bool
	var changing sync.Mutex
	// change is somebody who changes another setting, before the hub reads the settings again.
	change := func() {
		changing.Lock()
		defer changing.Unlock()
		if changed.Load() {
			return
		}
		cfg := settings("orders")
		cfg.Description += "."
		if _, err := js.UpdateStream(t.Context(), cfg); err != nil {
			t.Error(err)
		}
		changed.Store(true)
	}
	proxy.instead(func(request string) []byte {
		switch {
		case strings.HasPrefix(request, "CONSUMER.CREATE.orders.") && joined.Add(1) == 1:
		case request == "STREAM.CREATE.orders" && made.Add(1) == 1:
		case request == "STREAM.UPDATE.orders" && !changed.Load():
			refused.Add(1)
		case request == "STREAM.INFO.orders" && refused.Load() > 0:
			change()
			return nil
		default:
			return nil
		}
		return []byte(`{"error":{"code":400,"err_code":10005,"description":"no suitable peers for placement, peer offline"}}`)
	})
	publishAll(t, b, "orders", "0")
	if made.Load() < 2 {
		t.Errorf("the stream was made after %d answers", made.Load())
	}
	take(t, b, "orders", "g", SubscribeOptions{From: FromEarliest}).payloads(1)
	if joined.Load() < 2 {
		t.Errorf("the consumer was made after %d answers", joined.Load())
	}
	changes, err := b.Admin().NATS().PlanReplicas(t.Context(), 3)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(changes, func(c ReplicaChange) bool { return c.Stream == "orders" })
	if err := b.Admin().NATS().SetReplicas(t.Context(), changes[i]); err != nil || refused.Load() == 0 {
		t.Errorf("3 copies after %d answers: %v", refused.Load(), err)
	}
	if cfg := settings("orders"); cfg.Replicas != 3 || cfg.Description != "." {
		t.Errorf("the stream has %d copies and the description %q", cfg.Replicas, cfg.Description)
	}
	refused.Store(0)
	changed.Store(false)
	ruled := open(t, Config{URL: url, Domain: proxyDomain, Topics: []topics.Rule{{Pattern: "orders", MaxAge: 7 * 24 * time.Hour, Replicas: 1}}})
	same(t, "apply", outcomes(apply(t, ruled, false)), []string{"change: orders: replicas is 3, the rule says 1, done true, error false"})
	if cfg := settings("orders"); cfg.Replicas != 1 || cfg.Description != ".." {
		t.Errorf("by its rule, the stream has %d copies and the description %q", cfg.Replicas, cfg.Description)
	}
}

// The number of copies changes from 1 to 3 and back while members work: no event is lost, and no
// lease ends more than once.
func TestReplicasChangeLive(t *testing.T) {
	t.Parallel()
	url := threeServers(t)
	// What a change of leader loses may come again after twice AckWait only.
	b := open(t, Config{URL: url, Topics: stateful, AckWait: 5 * time.Second})
	publishAll(t, b, "orders", "0")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var working sync.WaitGroup
	defer working.Wait()
	defer cancel()
	var mu sync.Mutex
	stored, got := map[string]bool{"0": true}, make(map[string]int)
	working.Go(func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for i := 1; ctx.Err() == nil; i++ {
			<-tick.C
			p := strconv.Itoa(i)
			if _, err := b.Publish(ctx, "orders", []byte(p), PublishOptions{ID: p, Key: "k"}); err == nil {
				mu.Lock()
				stored[p] = true
				mu.Unlock()
			}
		}
	})
	sub, err := b.Consume(t.Context(), "orders", "g", SubscribeOptions{From: FromEarliest}, func(_ context.Context, d *Delivery) error {
		mu.Lock()
		defer mu.Unlock()
		got[string(d.Event.Payload)] = max(got[string(d.Event.Payload)], d.Attempt)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{3, 1} {
		changes, err := b.Admin().NATS().PlanReplicas(t.Context(), n)
		if err != nil || len(changes) < 7 {
			t.Fatalf("changes to %d copies: %v, %v", n, changes, err)
		}
		for _, c := range changes {
			if err := b.Admin().NATS().SetReplicas(t.Context(), c); err != nil {
				t.Fatal(err)
			}
		}
		if left, err := b.Admin().NATS().PlanReplicas(t.Context(), n); err != nil || len(left) > 0 {
			t.Errorf("left after the change to %d copies: %v, %v", n, left, err)
		}
		info, err := b.conn.JS.Consumer(t.Context(), "orders", "g")
		if err != nil {
			t.Fatal(err)
		}
		if cluster := info.CachedInfo().Cluster; cluster == nil || len(cluster.Replicas) != n-1 {
			t.Errorf("with %d copies, the consumer has %+v", n, cluster)
		}
	}
	cancel()
	working.Wait()
	eventually(t, "all events", func() bool {
		mu.Lock()
		defer mu.Unlock()
		for p := range stored {
			if got[p] == 0 {
				return false
			}
		}
		return true
	})
	if err := sub.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	again := 0
	for _, attempt := range got {
		if attempt > 1 {
			again++
		}
	}
	t.Logf("%d events, %d of them again", len(stored), again)
}

// A stream that is empty when its snapshot begins, and has messages when it ends, is restored with
// them.
func TestCopyOfAnEmptyBucket(t *testing.T) {
	t.Parallel()
	server := natstest.Run(t)
	proxy := startAPIProxy(t, server.ClientURL())
	b := open(t, Config{URL: server.ClientURL(), Domain: proxyDomain})
	look := natstest.Look(t, server.ClientURL())
	kv, err := look.JS.CreateKeyValue(t.Context(), natsjs.KeyValueConfig{Bucket: "empty"})
	if err != nil {
		t.Fatal(err)
	}
	const stream = "KV_empty"
	proxy.answer("STREAM.SNAPSHOT."+stream, func(answer []byte) []byte {
		if _, err := kv.Put(t.Context(), "key", []byte("late")); err != nil {
			t.Error(err)
		}
		return answer
	})
	info, err := b.conn.FindStream(t.Context(), stream)
	if err != nil {
		t.Fatal(err)
	}
	var file bytes.Buffer
	done, err := b.backups.copyStream(t.Context(), &copiedStream{name: stream, info: info, grows: true}, nil, time.Time{}, &file, func(int, int) {})
	if err != nil || done.messages != 1 {
		t.Fatalf("%d messages were copied: %v", done.messages, err)
	}
	if err := look.JS.DeleteStream(t.Context(), stream); err != nil {
		t.Fatal(err)
	}
	if _, err := b.backups.putSnapshot(t.Context(), stream, done.config, done.state, &file); err != nil {
		t.Fatal(err)
	}
	if e, err := kv.Get(t.Context(), "key"); err != nil || string(e.Value()) != "late" || e.Revision() != 1 {
		t.Errorf("restored: %+v, %v", e, err)
	}
}

// writerFunc is a writer.
type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// A move that is cut off, such that nothing can be removed, says what to remove. Then it can be
// begun again.
func TestMoveThatIsCutOff(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	own := natstest.Embed(t, dir)
	b := open(t, Config{Server: own, Topics: stateful})
	fillHub(t, b)
	_ = b.Close()
	_ = own.Close()
	from := openStore(t, Config{Server: natstest.Embed(t, dir)})
	server := natstest.Start(t)
	to := openStore(t, Config{URL: server.URL()})
	var closing sync.WaitGroup
	defer closing.Wait()
	closed := false
	err := from.MoveTo(t.Context(), to, RestoreOptions{Progress: func(done, all uint64) {
		if done > all/2 && !closed { // not all of them: some may have expired meanwhile
			closed = true
			closing.Go(func() { _ = to.Close() })
			eventually(t, "the connection is closed", func() bool { return to.backups.conn.Links[0].NC.IsClosed() })
		}
	}})
	if err == nil || !strings.Contains(err.Error(), "nats stream rm") {
		t.Fatalf("cut off: %v", err)
	}
	closing.Wait()
	to = openStore(t, Config{URL: server.URL()})
	if err = from.MoveTo(t.Context(), to, RestoreOptions{}); err == nil {
		t.Fatal("the next move does not say what is left")
	}
	_, list, found := strings.Cut(err.Error(), "repeat the command: nats stream rm ")
	if !found {
		t.Fatal(err)
	}
	look := natstest.Look(t, server.URL())
	for name := range strings.SplitSeq(list, "; nats stream rm ") {
		if err := look.JS.DeleteStream(t.Context(), name); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	if _, err := look.JS.CreateStream(t.Context(), natsjs.StreamConfig{Name: "orders", Subjects: []string{"theirs"}}); err != nil {
		t.Fatal(err)
	}
	if err := from.MoveTo(t.Context(), to, RestoreOptions{}); err == nil || !strings.Contains(err.Error(), "stream orders of another program") {
		t.Fatalf("beside a stream of that name: %v", err)
	}
	if err := look.JS.DeleteStream(t.Context(), "orders"); err != nil {
		t.Fatal(err)
	}
	if err := from.MoveTo(t.Context(), to, RestoreOptions{}); err != nil {
		t.Fatal(err)
	}
	filledHub(t, open(t, Config{URL: server.URL(), Topics: stateful}))
}
