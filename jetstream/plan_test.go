package jetstream

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

func plan(tb testing.TB, b *Bus) []TopicChange {
	tb.Helper()
	changes, err := b.Admin().PlanTopics(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	return changes
}

func apply(tb testing.TB, b *Bus, deleting bool) []TopicChange {
	tb.Helper()
	changes, err := b.Admin().ApplyTopics(tb.Context(), deleting)
	if err != nil {
		tb.Fatal(err)
	}
	return changes
}

// outcomes are the changes on a line each, with what became of them.
func outcomes(changes []TopicChange) []string {
	lines := make([]string, len(changes))
	for i := range changes {
		c := &changes[i]
		lines[i] = fmt.Sprintf("%s: %s, done %v, error %v", c.Kind, c.String(), c.Done, c.Err != nil)
	}
	return lines
}

func same(tb testing.TB, what string, got, want []string) {
	tb.Helper()
	if !slices.Equal(got, want) {
		tb.Errorf("%s:\ngot\n  %s\nwant\n  %s", what, strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}

// stream returns what the server has.
func streamInfo(tb testing.TB, b *Bus, name string) *natsjs.StreamInfo {
	tb.Helper()
	info, err := b.conn.FindStream(tb.Context(), name)
	if err != nil {
		tb.Fatal(err)
	}
	return info
}

// makeStream makes a stream as another program would.
func makeStream(tb testing.TB, b *Bus, cfg natsjs.StreamConfig) {
	tb.Helper()
	if _, err := b.conn.JS.CreateStream(tb.Context(), cfg); err != nil {
		tb.Fatal(err)
	}
}

func TestApplyMakesWhatRulesName(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: []topics.Rule{
		{Pattern: "orders", MaxAge: time.Hour, MaxBytes: 1 << 20, MaxMsgs: 1000, DuplicateWindow: time.Minute, MaxPayload: 1 << 10, Storage: topics.StorageMemory},
		{Pattern: "user.*", Family: "users"},
		{Pattern: "state", Compaction: true},
		{Pattern: "other.*"},
	}})
	want := []string{
		"create: orders: stream orders is to be made, done %v, error false",
		"create: family users: stream users is to be made, done %v, error false",
		"create: state: stream state is to be made, done %v, error false",
		"create: state: compaction is false, the rule says true, done %v, error false",
	}
	lines := func(done bool, of []string) []string {
		var filled []string
		for _, line := range of {
			filled = append(filled, fmt.Sprintf(line, done))
		}
		return filled
	}
	same(t, "plan", outcomes(plan(t, b)), lines(false, want[:3]))
	same(t, "plan again", outcomes(plan(t, b)), lines(false, want[:3]))
	same(t, "apply", outcomes(apply(t, b, false)), lines(true, want))
	same(t, "second apply", outcomes(apply(t, b, true)), nil)
	same(t, "plan after it", outcomes(plan(t, b)), nil)
	cfg := streamInfo(t, b, "orders").Config
	if cfg.MaxAge != time.Hour || cfg.MaxBytes != 1<<20 || cfg.MaxMsgs != 1000 || cfg.Duplicates != time.Minute ||
		cfg.MaxMsgSize != 1<<10+event.PayloadMargin || cfg.Storage != natsjs.MemoryStorage {
		t.Errorf("got %+v", cfg)
	}
	publishAll(t, b, "user.7", "1")
	if n := streamInfo(t, b, "users").State.Msgs; n != 1 {
		t.Errorf("the family has %d messages", n)
	}
	all, err := b.Admin().Topics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range all {
		got = append(got, fmt.Sprintf("%s %s %s %d %v %d", s.Topic, s.Stream, s.Rule, s.Messages, s.Compacted, len(s.Changes)))
	}
	same(t, "topics", got, []string{"orders orders orders 0 false 0", "state state state 0 true 0", " users user.* 1 false 0"})
}

func TestNothingIsDeletedUnlessTold(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	before := open(t, Config{URL: url, Topics: []topics.Rule{{Pattern: "t.*"}, {Pattern: "f.*", Family: "f"}}})
	publishAll(t, before, "t.a", numbers(10)...)
	publishAll(t, before, "f.a", numbers(10)...)
	after := open(t, Config{URL: url, Topics: []topics.Rule{
		{Pattern: "t.*", MaxAge: time.Hour, MaxBytes: 1000, MaxMsgs: 3, DuplicateWindow: time.Minute},
		{Pattern: "f.*", Family: "f", MaxMsgs: 5},
	}})
	want := func(deletes, safe bool) []string {
		return []string{
			fmt.Sprintf("deletes: family f: retention.messages is none, the rule says 5, done %v, error false", deletes),
			fmt.Sprintf("deletes: t.a: retention.age is none, the rule says 1h, done %v, error false", deletes),
			fmt.Sprintf("deletes: t.a: retention.bytes is none, the rule says 1000, done %v, error false", deletes),
			fmt.Sprintf("deletes: t.a: retention.messages is none, the rule says 3, done %v, error false", deletes),
			fmt.Sprintf("change: t.a: duplicate_window is 2m, the rule says 1m, done %v, error false", safe),
		}
	}
	same(t, "plan", outcomes(plan(t, after)), want(false, false))
	same(t, "apply", outcomes(apply(t, after, false)), want(false, true))
	for _, name := range []string{"t=2Ea", "f"} {
		if info := streamInfo(t, after, name); info.State.Msgs != 10 || info.Config.MaxMsgs != -1 || info.Config.MaxAge != 0 || info.Config.MaxBytes != -1 {
			t.Errorf("%s: %d messages are left, %+v", name, info.State.Msgs, info.Config)
		}
	}
	same(t, "apply with deletion", outcomes(apply(t, after, true)), want(true, true)[:4])
	if n := streamInfo(t, after, "t=2Ea").State.Msgs; n != 3 {
		t.Errorf("%d messages are left, want 3", n)
	}
	same(t, "plan after it", outcomes(plan(t, after)), nil)

	// And back, to wider bounds.
	if n := len(plan(t, before)); n != 5 {
		t.Errorf("%d changes", n)
	}
	for _, c := range apply(t, before, false) {
		if c.Kind != ChangeSafe || !c.Done {
			t.Errorf("%s is %s, done %v", c.String(), c.Kind, c.Done)
		}
	}
	same(t, "plan after it", outcomes(plan(t, before)), nil)
}

// TestNoRuleDeletesByItself tries many pairs of rules: after ApplyTopics without deletion no bound
// is narrower, and all events are there.
func TestNoRuleDeletesByItself(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	pick := func() topics.Rule {
		return topics.Rule{
			Pattern: "t.*", MaxAge: []time.Duration{0, time.Minute, time.Hour, 24 * time.Hour}[random.IntN(4)],
			MaxBytes: []int64{0, 1 << 10, 1 << 20}[random.IntN(3)], MaxMsgs: []int64{0, 5, 1000}[random.IntN(3)],
			DuplicateWindow: []time.Duration{0, time.Second, time.Minute}[random.IntN(3)],
			MaxPayload:      []int{0, 1 << 10, 1 << 20}[random.IntN(3)], Compaction: false,
		}
	}
	for i := range 25 {
		topic := fmt.Sprintf("t.%d", i)
		b := open(t, Config{URL: url, Connections: 1, Topics: []topics.Rule{pick()}})
		publishAll(t, b, topic, numbers(20)...)
		old := streamInfo(t, b, objectName(topic))
		next := open(t, Config{URL: url, Connections: 1, Topics: []topics.Rule{pick()}})
		for _, c := range apply(t, next, false) {
			if c.Err != nil || c.Done == (c.Kind == ChangeDeletes) {
				t.Errorf("%s: %s, done %v, %v", c.String(), c.Kind, c.Done, c.Err)
			}
		}
		now := streamInfo(t, next, objectName(topic))
		narrower := func(a, b int64) bool { return b > 0 && (a <= 0 || b < a) }
		if now.State.Msgs != old.State.Msgs || now.State.FirstSeq != old.State.FirstSeq || narrower(int64(old.Config.MaxAge), int64(now.Config.MaxAge)) ||
			narrower(old.Config.MaxBytes, now.Config.MaxBytes) || narrower(old.Config.MaxMsgs, now.Config.MaxMsgs) {
			t.Fatalf("from %+v with %d messages to %+v with %d", old.Config, old.State.Msgs, now.Config, now.State.Msgs)
		}
		_ = next.Close()
		_ = b.Close()
	}
}

// TestApplyKeepsWhatOthersChangedMeanwhile: the plan is old when it is carried out.
func TestApplyKeepsWhatOthersChangedMeanwhile(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: []topics.Rule{{Pattern: "t", MaxAge: time.Hour, DuplicateWindow: time.Minute}}})
	makeStream(t, b, natsjs.StreamConfig{Name: "t", Subjects: []string{"event.t", "keyed.*.t"}, MaxAge: 30 * time.Minute, AllowDirect: true, Duplicates: time.Second})
	inv, err := takeInventory(t.Context(), b.core)
	if err != nil {
		t.Fatal(err)
	}
	cfg := inv.byName["t"].Config
	cfg.MaxAge = 48 * time.Hour
	if _, err := b.conn.JS.UpdateStream(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	s := inv.wanted(false)[0]
	same(t, "apply", outcomes(b.admin.apply(t.Context(), inv, s, inv.plan(s), false)), []string{
		"deletes: t: retention.age is 2d, the rule says 1h, done false, error false",
		"change: t: duplicate_window is 1s, the rule says 1m, done true, error false",
	})
	if age := streamInfo(t, b, "t").Config.MaxAge; age != 48*time.Hour {
		t.Errorf("age is %v", age)
	}
}

func TestWhatCannotBeDone(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: []topics.Rule{
		{Pattern: "memory", Storage: topics.StorageMemory, MaxAge: time.Hour},
		{Pattern: "queue"},
		{Pattern: "foreign"},
		{Pattern: "taken"},
		{Pattern: "user.*", Family: "users"},
		{Pattern: "widened.**", Family: "widened"},
	}})
	makeStream(t, b, natsjs.StreamConfig{Name: "memory", Subjects: []string{"event.memory", "keyed.*.memory"}, AllowDirect: true, Duplicates: 2 * time.Minute})
	makeStream(t, b, natsjs.StreamConfig{Name: "queue", Subjects: []string{"event.queue", "keyed.*.queue"}, AllowDirect: true, Retention: natsjs.WorkQueuePolicy})
	makeStream(t, b, natsjs.StreamConfig{Name: "foreign", Subjects: []string{"elsewhere"}})
	makeStream(t, b, natsjs.StreamConfig{Name: "another", Subjects: []string{"event.taken", "keyed.*.widened.>"}})
	makeStream(t, b, natsjs.StreamConfig{Name: "user=2E7", Subjects: []string{"event.user.7", "keyed.*.user.7"}})
	makeStream(t, b, natsjs.StreamConfig{Name: "widened", Subjects: []string{"event.widened.*", "keyed.*.widened"}, AllowDirect: true})
	makeStream(t, b, natsjs.StreamConfig{Name: "old", Subjects: []string{"event.old.>"}, Metadata: map[string]string{metaPattern: "old.**"}})
	want := []string{
		"deletes: memory: retention.age is none, the rule says 1h, done false, error false",
		"impossible: memory: storage is file, the rule says memory, done false, error true",
		"impossible: queue: retention policy is workqueue, the rule says limits, done false, error true",
		"impossible: family widened: subjects is event.widened.* keyed.*.widened, the rule says event.widened event.widened.> keyed.*.widened keyed.*.widened.>, done false, error true",
		"impossible: foreign: stream is not the event bus's, the rule says made, done false, error true",
		"impossible: taken: stream is missing, the rule says made, done false, error true",
		"impossible: family users: stream is missing, the rule says made, done false, error true",
		"impossible: family old: family is old, the rule says none, done false, error true",
	}
	same(t, "plan", outcomes(plan(t, b)), want)
	same(t, "apply", outcomes(apply(t, b, false)), want)
	for _, c := range plan(t, b) {
		if c.Kind == ChangeImpossible {
			t.Logf("%s: %v", c.String(), c.Err)
		}
	}
}

func TestSubjectsGrowWithTheFamily(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	before := open(t, Config{URL: url, Topics: []topics.Rule{{Pattern: "user.*", Family: "users"}}})
	publishAll(t, before, "user.a", "1")
	after := open(t, Config{URL: url, Topics: []topics.Rule{{Pattern: "user.**", Family: "users"}}})
	if changes := apply(t, after, false); len(changes) != 1 || !changes[0].Done || changes[0].Field != "subjects" {
		t.Errorf("got %v", outcomes(changes))
	}
	publishAll(t, after, "user.a.b", "2")
	if info := streamInfo(t, after, "users"); info.State.Msgs != 2 || info.Config.Metadata[metaPattern] != "user.**" {
		t.Errorf("got %+v", info.Config)
	}
	same(t, "plan after it", outcomes(plan(t, after)), nil)
}

// TestOneFailureStopsNothing: one server alone keeps no three copies.
func TestOneFailureStopsNothing(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	publishAll(t, open(t, Config{URL: url}), "t", "1")
	b := open(t, Config{URL: url, Topics: []topics.Rule{{Pattern: "new", Replicas: 3}, {Pattern: "t", Replicas: 3, MaxAge: 30 * 24 * time.Hour}, {Pattern: "fine"}}})
	same(t, "apply", outcomes(apply(t, b, false)), []string{
		"change: t: retention.age is 7d, the rule says 30d, done true, error false",
		"change: t: replicas is 1, the rule says 3, done false, error true",
		"create: new: stream new is to be made, done false, error true",
		"create: fine: stream fine is to be made, done true, error false",
	})
}

func TestBucketsOfTopicsThatExist(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	b := open(t, Config{URL: url})
	// As a hub left it that knew of no compaction.
	makeStream(t, b, natsjs.StreamConfig{Name: "process=2Estate", Subjects: []string{"event.process.state", "keyed.*.process.state"}, MaxAge: time.Hour, AllowDirect: true})
	if _, err := b.conn.JS.Publish(t.Context(), "keyed.k.process.state", []byte("1")); err != nil {
		t.Fatal(err)
	}
	same(t, "apply", outcomes(apply(t, b, false)), []string{"create: process.state: compaction is false, the rule says true, done true, error false"})
	eventually(t, "the bucket is filled", func() bool { return streamInfo(t, b, "KV_latest_process_state").State.Msgs == 1 })
	if age := streamInfo(t, b, "process=2Estate").Config.MaxAge; age != time.Hour {
		t.Errorf("a built-in rule has made the age %v", age)
	}
	same(t, "second apply", outcomes(apply(t, b, false)), nil)

	off := open(t, Config{URL: url, Topics: []topics.Rule{{Pattern: "process.*", MaxAge: time.Hour}}})
	want := []string{"impossible: process.state: compaction is true, the rule says false, done false, error true"}
	same(t, "compaction switched off", outcomes(apply(t, off, true)), want)
	if n := streamInfo(t, b, "KV_latest_process_state").State.Msgs; n != 1 {
		t.Errorf("the bucket has %d entries", n)
	}
}

func TestTwoHubsApplyAtOnce(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	var rules []topics.Rule
	for i := range 20 {
		rules = append(rules, topics.Rule{Pattern: fmt.Sprintf("t.%d", i), MaxAge: time.Hour * time.Duration(1+i), Compaction: i%2 == 0})
	}
	wider := slices.Clone(rules)
	for i := range wider {
		wider[i].MaxAge *= 2
	}
	for _, cfg := range []Config{{URL: url, Topics: rules}, {URL: url, Topics: wider}} {
		one, two := open(t, cfg), open(t, cfg)
		var wg sync.WaitGroup
		for _, b := range []*Bus{one, two} {
			wg.Go(func() {
				changes, err := b.Admin().ApplyTopics(context.Background(), false)
				if err != nil {
					t.Error(err)
				}
				for _, c := range changes {
					if !c.Done {
						t.Errorf("%s: %v", c.String(), c.Err)
					}
				}
			})
		}
		wg.Wait()
		same(t, "plan after it", outcomes(plan(t, one)), nil)
	}
}

func TestDriftIsReportedAndUsed(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var log bytes.Buffer
	b := open(t, Config{
		Topics: []topics.Rule{{Pattern: "t", MaxAge: time.Hour, MaxMsgs: 5}},
		Logger: slog.New(slog.NewTextHandler(&lockedWriter{mu: &mu, w: &log}, nil)),
	})
	makeStream(t, b, natsjs.StreamConfig{Name: "t", Subjects: []string{"event.t", "keyed.*.t"}, MaxAge: 2 * time.Hour, AllowDirect: true})
	publishAll(t, b, "t", numbers(10)...)
	mu.Lock()
	defer mu.Unlock()
	if text := log.String(); !strings.Contains(text, `stream differs from its rule" topic=t stream=t drift="retention.age is 2h, the rule says 1h; retention.messages is none, the rule says 5"`) {
		t.Errorf("got %s", text)
	}
	if n := streamInfo(t, b, "t").State.Msgs; n != 10 {
		t.Errorf("%d messages are left", n)
	}
}

type lockedWriter struct {
	mu *sync.Mutex
	w  *bytes.Buffer
}

func (l *lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

// TestReplicasOfStreamAndBucket needs a cluster: three servers.
func TestReplicasOfStreamAndBucket(t *testing.T) {
	t.Parallel()
	url := threeServers(t)
	before := open(t, Config{URL: url, Topics: []topics.Rule{{Pattern: "state", Compaction: true}}})
	if n := len(apply(t, before, false)); n != 2 {
		t.Errorf("%d changes, want a stream and a bucket", n)
	}
	if _, err := before.Publish(t.Context(), "state", []byte("1"), PublishOptions{Key: "k"}); err != nil {
		t.Fatal(err)
	}
	after := open(t, Config{URL: url, Topics: []topics.Rule{{Pattern: "state", Compaction: true, Replicas: 3}}})
	same(t, "apply", outcomes(apply(t, after, false)), []string{
		"change: state: replicas is 1, the rule says 3, done true, error false",
		"change: state: replicas of the bucket is 1, the rule says 3, done true, error false",
	})
	same(t, "second apply", outcomes(apply(t, after, false)), nil)
	// The number of copies that a rule does not name is for new streams only.
	unnamed := open(t, Config{URL: url, Topics: []topics.Rule{{Pattern: "state", Compaction: true}}})
	same(t, "a rule without replicas", outcomes(apply(t, unnamed, true)), nil)
	if e, err := after.Keys("state").Get(t.Context(), "k"); err != nil || string(e.Payload) != "1" {
		t.Errorf("%v, %v", e, err)
	}
}

// threeServers starts a cluster and returns the addresses of all of it.
func threeServers(tb testing.TB) string {
	tb.Helper()
	return natstest.ClientURLs(natstest.RunCluster(tb, 3)...)
}
