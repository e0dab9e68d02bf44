package process

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/projections"
)

// patience bounds what a test waits for. Reaching it is a failure.
const patience = time.Minute

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, natstest.Leaks()...)
}

// openBus opens a bus with an embedded server on a directory. Unless it is given, its AckWait is
// much shorter than patience: on a slow machine, a hub that stood still gives up the events that it
// holds, and they come again after AckWait.
func openBus(tb testing.TB, cfg jetstream.Config) *jetstream.Bus {
	tb.Helper()
	if cfg.AckWait == 0 {
		cfg.AckWait = 6 * time.Second
	}
	bus, err := jetstream.Open(tb.Context(), cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = bus.Close() })
	return bus
}

// startNATS starts a server that several buses share.
func startNATS(tb testing.TB) (url string) {
	tb.Helper()
	return natstest.Run(tb).ClientURL()
}

// start runs a projector until stop is called, or the test ends.
func start(tb testing.TB, cfg Config) (stop func()) {
	tb.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(tb.Context()))
	ended := make(chan error, 1)
	go func() { ended <- New(cfg).Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				tb.Errorf("the projector ended with: %v", err)
			}
		case <-time.After(patience):
			tb.Error("the projector does not end")
		}
	})
	tb.Cleanup(stop)
	return stop
}

// publish publishes a heartbeat and returns where it lies.
func publish(tb testing.TB, bus *jetstream.Bus, payload string) jetstream.Receipt {
	tb.Helper()
	r, err := bus.Publish(tb.Context(), TopicHeartbeat, []byte(payload), jetstream.PublishOptions{})
	if err != nil {
		tb.Fatal(err)
	}
	return r
}

// heartbeat is the payload of process n's i-th heartbeat.
func heartbeat(n, i int) string {
	return fmt.Sprintf(`{"pid":%d,"name":"worker","host":"node","cpu_pct":%d,"mem_mb":1.5}`, n, i)
}

// stored is a state as it lies in its stream.
type stored struct {
	*jetstream.Event
	State
}

func states(tb testing.TB, bus *jetstream.Bus, topic string) []stored {
	tb.Helper()
	var all []stored
	err := bus.History(topic).Scan(tb.Context(), jetstream.ScanOptions{Limit: 1_000_000}, func(e *jetstream.Event) error {
		s := stored{Event: e}
		if topic == TopicState {
			if err := json.Unmarshal(e.Payload, &s.State); err != nil {
				return err
			}
		}
		all = append(all, s)
		return nil
	})
	if err != nil {
		tb.Fatal(err)
	}
	return all
}

// await reads the states until done says that they are all there.
func await(tb testing.TB, bus *jetstream.Bus, topic string, done func([]stored) bool) []stored {
	tb.Helper()
	timeout := time.After(patience)
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		all := states(tb, bus, topic)
		if done(all) {
			return all
		}
		select {
		case <-ticker.C:
		case <-timeout:
			tb.Fatalf("waited in vain; there are %d on %s", len(all), topic)
		}
	}
}

func atLeast(n int) func([]stored) bool {
	return func(all []stored) bool { return len(all) >= n }
}

// count counts the states of a status.
func count(all []stored, status Status) int {
	n := 0
	for _, s := range all {
		if s.Status == status {
			n++
		}
	}
	return n
}

// settle waits until the group has acknowledged everything: then nothing is on its way.
func settle(tb testing.TB, bus *jetstream.Bus, lastID string) {
	tb.Helper()
	timeout := time.After(patience)
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		cursor, err := bus.Group(TopicHeartbeat, Group).Cursor(tb.Context())
		if err == nil && cursor.LastID == lastID {
			return
		}
		select {
		case <-ticker.C:
		case <-timeout:
			tb.Fatalf("the group stays at %+v (%v), the last heartbeat is %s", cursor, err, lastID)
		}
	}
}

// wantEachOnce wants one state for each of the heartbeats 0..perProcess-1 of each process, in their
// order.
func wantEachOnce(t *testing.T, all []stored, processes, perProcess int) {
	t.Helper()
	seen := make(map[string]int)
	for _, s := range all {
		if s.Status != Alive {
			continue
		}
		if int(s.CPUPct) != seen[s.ProcessID] {
			t.Fatalf("heartbeat %v of %s was projected, it is the turn of %d", s.CPUPct, s.ProcessID, seen[s.ProcessID])
		}
		seen[s.ProcessID]++
	}
	if len(seen) != processes {
		t.Errorf("%d processes have states, want %d", len(seen), processes)
	}
	for id, n := range seen {
		if n != perProcess {
			t.Errorf("%s has %d states, want %d", id, n, perProcess)
		}
	}
}

func TestEachHeartbeatBecomesAState(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	ts := int64(1_700_000_000_000)
	first, err := bus.Publish(t.Context(), TopicHeartbeat,
		[]byte(`{"mem_mb":256,"cpu_pct":12.3,"host":"local","name":"stt","pid":1234.0,"sid":"boot-1","extra":[1]}`),
		jetstream.PublishOptions{TS: ts, HasTS: true})
	if err != nil {
		t.Fatal(err)
	}
	publish(t, bus, heartbeat(7, 0))
	start(t, Config{Bus: projections.JetStream(bus), StaleAfter: 1_000_000 * time.Hour})
	last := publish(t, bus, heartbeat(7, 1))
	all := await(t, bus, TopicState, atLeast(3))
	settle(t, bus, last.ID)

	want := `{"processId":"local:stt:1234","name":"stt","host":"local","pid":1234,"sid":"boot-1","cpu_pct":12.3,"mem_mb":256,"last_seen_ts":1700000000000,"status":"alive"}`
	i := slices.IndexFunc(all, func(s stored) bool { return s.ProcessID == "local:stt:1234" })
	if i < 0 {
		t.Fatal("the process has no state")
	}
	all[0], all[i] = all[i], all[0] // states of different processes come in any order
	if got := string(all[0].Payload); got != want {
		t.Errorf("the state is\n%s, want\n%s", got, want)
	}
	if all[0].Key != "local:stt:1234" {
		t.Errorf("the key is %q", all[0].Key)
	}
	if !slices.Equal(all[0].CausedBy, []string{first.ID}) {
		t.Errorf("it was caused by %q, want the heartbeat %s", all[0].CausedBy, first.ID)
	}
	if want := fmt.Sprintf("%s@%d", first.Stream, first.Sequence); all[0].Headers["projection-source"] != want {
		t.Errorf("its source is %q, want %q", all[0].Headers["projection-source"], want)
	}
	if n := len(states(t, bus, TopicState)); n != 3 {
		t.Errorf("there are %d states, want 3", n)
	}
}

// TestRestart ends the projector, the bus and the server with it, again and again while heartbeats
// come in.
func TestRestart(t *testing.T) {
	t.Parallel()
	const processes, perProcess, restarts = 10, 60, 5
	dir := t.TempDir()
	var last jetstream.Receipt
	for round := range restarts + 1 {
		// What was handed back before a restart of the server comes again after AckWait.
		bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, dir), AckWait: 3 * time.Second})
		stop := start(t, Config{Bus: projections.JetStream(bus), StaleAfter: time.Hour})
		const each = perProcess / (restarts + 1)
		for i := range each {
			for n := range processes {
				last = publish(t, bus, heartbeat(n, round*each+i))
			}
		}
		if round == 0 {
			// A server that is shut down while it makes a stream leaves goroutines of it behind.
			await(t, bus, TopicState, atLeast(1))
		}
		if round == restarts {
			await(t, bus, TopicState, atLeast(processes*perProcess))
			settle(t, bus, last.ID)
			wantEachOnce(t, states(t, bus, TopicState), processes, perProcess)
		}
		stop()
		if err := bus.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestNothingIsDoubledWhenAllComesAgain sets the group back, as lost acknowledgements would, only
// further.
func TestNothingIsDoubledWhenAllComesAgain(t *testing.T) {
	t.Parallel()
	const processes, perProcess = 10, 20
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	cfg := Config{Bus: projections.JetStream(bus), StaleAfter: time.Hour}
	stop := start(t, cfg)
	var last jetstream.Receipt
	for i := range perProcess {
		for n := range processes {
			last = publish(t, bus, heartbeat(n, i))
		}
	}
	settle(t, bus, last.ID)
	for _, live := range []bool{false, true} {
		if !live {
			stop()
		}
		if err := bus.Group(TopicHeartbeat, Group).Seek(t.Context(), jetstream.FromEarliest); err != nil {
			t.Fatal(err)
		}
		if !live {
			start(t, cfg)
		}
		settle(t, bus, last.ID)
		wantEachOnce(t, states(t, bus, TopicState), processes, perProcess)
	}
}

// TestTwoHubs lets two projectors share the group while heartbeats come in over both hubs, and
// restarts one of them.
func TestTwoHubs(t *testing.T) {
	t.Parallel()
	const processes, perProcess = 20, 40
	url := startNATS(t)
	one, two := openBus(t, jetstream.Config{URL: url}), openBus(t, jetstream.Config{URL: url})
	start(t, Config{Bus: projections.JetStream(one), StaleAfter: time.Hour, ScanEvery: 50 * time.Millisecond})
	stop := start(t, Config{Bus: projections.JetStream(two), StaleAfter: time.Hour, ScanEvery: 50 * time.Millisecond})
	for i := range perProcess {
		if i == perProcess/2 {
			stop()
			start(t, Config{Bus: projections.JetStream(two), StaleAfter: time.Hour})
		}
		for n := range processes {
			publish(t, []*jetstream.Bus{one, two}[(n+i)%2], heartbeat(n, i))
		}
	}
	await(t, one, TopicState, atLeast(processes*perProcess))
	settle(t, one, publish(t, one, heartbeat(0, perProcess)).ID)
	all := states(t, one, TopicState)
	all = slices.DeleteFunc(all, func(s stored) bool { return s.CPUPct == perProcess })
	wantEachOnce(t, all, processes, perProcess)
}

// TestHeartbeatsOutOfOrder holds back the first heartbeats with a member that does not acknowledge,
// as a hub does that was killed: they must not be left out because later ones of the same process
// came first.
func TestHeartbeatsOutOfOrder(t *testing.T) {
	t.Parallel()
	const held = 20
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	arrived := make(chan struct{}, held)
	sub, err := bus.Subscribe(t.Context(), TopicHeartbeat, Group,
		jetstream.SubscribeOptions{From: jetstream.FromEarliest, MaxInFlight: held, MaxAttempts: jetstream.NeverGiveUp},
		func(h *jetstream.Held) {
			if _, ok := h.Begin(); ok {
				arrived <- struct{}{}
			}
		})
	if err != nil {
		t.Fatal(err)
	}
	for i := range held {
		publish(t, bus, heartbeat(1, i))
	}
	for range held {
		select {
		case <-arrived:
		case <-time.After(patience):
			t.Fatal("the heartbeats were not delivered")
		}
	}
	start(t, Config{Bus: projections.JetStream(bus), StaleAfter: time.Hour})
	last := publish(t, bus, heartbeat(1, held))
	await(t, bus, TopicState, atLeast(held+1))
	if err := sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	settle(t, bus, last.ID)
	wantEachOnce(t, states(t, bus, TopicState), 1, held+1)
}

// clock is what projectors take for the time.
type clock struct {
	began time.Time
	ahead atomic.Int64
}

func newClock() *clock { return &clock{began: time.Now()} }

func (c *clock) now() time.Time { return c.began.Add(time.Duration(c.ahead.Load())) }

func (c *clock) pass(d time.Duration) { c.ahead.Add(int64(d)) }

func TestStale(t *testing.T) {
	t.Parallel()
	url := startNATS(t)
	one, two := openBus(t, jetstream.Config{URL: url}), openBus(t, jetstream.Config{URL: url})
	c := newClock()
	cfg := Config{StaleAfter: 10 * time.Minute, ScanEvery: 20 * time.Millisecond, Now: c.now}
	for _, bus := range []*jetstream.Bus{one, two} {
		cfg.Bus = projections.JetStream(bus)
		start(t, cfg)
	}
	beat := func(bus *jetstream.Bus, n, i int, ago time.Duration) {
		t.Helper()
		opts := jetstream.PublishOptions{TS: c.now().Add(-ago).UnixMilli(), HasTS: true}
		if _, err := bus.Publish(t.Context(), TopicHeartbeat, []byte(heartbeat(n, i)), opts); err != nil {
			t.Fatal(err)
		}
		// Before the clock goes on, the heartbeat has to be in the state.
		await(t, one, TopicState, func(all []stored) bool {
			return slices.ContainsFunc(all, func(s stored) bool {
				return s.PID == int64(n) && s.CPUPct == float64(i) && s.Status == Alive
			})
		})
	}
	// stale awaits the next stale state, which is of a process.
	wanted := 0
	stale := func(n int) stored {
		t.Helper()
		wanted++
		all := await(t, one, TopicState, func(all []stored) bool { return count(all, Stale) >= wanted })
		all = slices.DeleteFunc(all, func(s stored) bool { return s.Status != Stale })
		last := all[len(all)-1]
		if len(all) != wanted || last.PID != int64(n) {
			t.Errorf("%d states are stale, the last is of process %d; want %d and %d", len(all), last.PID, wanted, n)
		}
		return last
	}
	// Process 1 falls silent at once; process 2 stays, and process 3 is silent for longer.
	beat(one, 1, 0, 0)
	beat(two, 2, 0, 0)
	beat(one, 3, 0, 2*time.Minute)
	c.pass(9 * time.Minute)
	stale(3)
	beat(two, 2, 1, 0)
	c.pass(2 * time.Minute)
	got := stale(1)
	all := states(t, one, TopicState)
	alive := all[slices.IndexFunc(all, func(s stored) bool { return s.ProcessID == "node:worker:1" })]
	if got.ProcessID != alive.ProcessID || got.LastSeenTS != alive.LastSeenTS || got.Headers["projection-source"] != alive.Headers["projection-source"] {
		t.Errorf("the stale state is %+v %v, want one of %+v %v", got.State, got.Headers, alive.State, alive.Headers)
	}

	// It comes back, and falls silent again.
	beat(two, 1, 1, 0)
	c.pass(8 * time.Minute)
	beat(one, 2, 2, 0)
	c.pass(3 * time.Minute)
	stale(1)
	c.pass(8 * time.Minute)
	stale(2)
	var history []string
	for _, s := range states(t, one, TopicState) {
		if s.ProcessID == "node:worker:1" {
			history = append(history, string(s.Status))
		}
	}
	if got := strings.Join(history, " "); got != "alive stale alive stale" {
		t.Errorf("process 1 was %s, want alive stale alive stale", got)
	}
}

// TestStaleAfterRestart wants processes marked that fell silent while no hub ran, and one that did
// not left alone.
func TestStaleAfterRestart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, dir)})
	stop := start(t, Config{Bus: projections.JetStream(bus), StaleAfter: time.Hour})
	const processes = 5
	for n := range processes {
		publish(t, bus, heartbeat(n, 0))
	}
	await(t, bus, TopicState, atLeast(processes))
	stop()
	// This one is heard of while the projector is away.
	last := publish(t, bus, heartbeat(0, 1))
	if err := bus.Close(); err != nil {
		t.Fatal(err)
	}

	bus = openBus(t, jetstream.Config{Server: natstest.Embed(t, dir)})
	heard := states(t, bus, TopicHeartbeat)
	after := time.UnixMilli(heard[len(heard)-1].TS)
	// A clock by which process 0 is heard of just in time, and the others are not.
	start(t, Config{
		Bus: projections.JetStream(bus), StaleAfter: 10 * time.Minute, ScanEvery: 20 * time.Millisecond,
		Now: func() time.Time { return after.Add(10 * time.Minute) },
	})
	settle(t, bus, last.ID)
	all := await(t, bus, TopicState, func(all []stored) bool { return count(all, Stale) == processes-1 })
	for _, s := range all {
		if s.PID == 0 && s.Status == Stale {
			t.Error("process 0 is stale although a heartbeat of it waited")
		}
	}
	if count(all, Alive) != processes+1 {
		t.Errorf("there are %d alive states, want %d", count(all, Alive), processes+1)
	}
}

// TestMoreProcessesThanAreKept wants the same result with less memory.
func TestMoreProcessesThanAreKept(t *testing.T) {
	t.Parallel()
	const processes, perProcess = 7, 3
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	c := newClock()
	start(t, Config{Bus: projections.JetStream(bus), MaxProcesses: 2, StaleAfter: time.Hour, ScanEvery: 20 * time.Millisecond, Now: c.now})
	for i := range perProcess {
		for n := range processes {
			publish(t, bus, heartbeat(n, i))
		}
	}
	await(t, bus, TopicState, func(all []stored) bool { return count(all, Alive) >= processes*perProcess })
	c.pass(2 * time.Hour)
	all := await(t, bus, TopicState, func(all []stored) bool { return count(all, Stale) >= processes })
	wantEachOnce(t, all, processes, perProcess)
	stale := make(map[string]int)
	for _, s := range all {
		if s.Status == Stale {
			stale[s.ProcessID]++
		}
	}
	if len(stale) != processes || slices.Max(slices.Collect(maps.Values(stale))) != 1 {
		t.Errorf("these went stale: %v, want each of %d once", stale, processes)
	}
}

func TestWhatIsNoHeartbeat(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	start(t, Config{Bus: projections.JetStream(bus), StaleAfter: time.Hour})
	publish(t, bus, heartbeat(1, 0))
	bad := publish(t, bus, `{"name":"worker","host":"node"}`)
	publish(t, bus, heartbeat(1, 1))
	// The others do not wait for it.
	await(t, bus, TopicState, atLeast(2))
	dead := await(t, bus, "dlq."+TopicHeartbeat, atLeast(1))
	var letter struct {
		Group    string `json:"group"`
		Err      string `json:"err"`
		Original struct {
			ID string `json:"id"`
		} `json:"original"`
		Attempts int `json:"attempts"`
	}
	if err := json.Unmarshal(dead[0].Payload, &letter); err != nil {
		t.Fatal(err)
	}
	if letter.Group != Group || letter.Err != "invalid heartbeat: pid is missing" || letter.Original.ID != bad.ID || letter.Attempts != 1 {
		t.Errorf("the dead letter is %s", dead[0].Payload)
	}
	wantEachOnce(t, states(t, bus, TopicState), 1, 2)
}

// BenchmarkHeartbeats projects a backlog, one heartbeat an operation.
func BenchmarkHeartbeats(b *testing.B) {
	bus := openBus(b, jetstream.Config{Server: natstest.Embed(b, b.TempDir())})
	p := bus.NewPublisher()
	for i := range b.N {
		if err := p.PublishAsync(b.Context(), TopicHeartbeat, []byte(heartbeat(i%100, i)), jetstream.PublishOptions{}, func(jetstream.Receipt, error) {}); err != nil {
			b.Fatal(err)
		}
	}
	if err := p.Flush(b.Context()); err != nil {
		b.Fatal(err)
	}
	last := publish(b, bus, heartbeat(0, b.N))
	b.ResetTimer()
	start(b, Config{Bus: projections.JetStream(bus), StaleAfter: time.Hour})
	settle(b, bus, last.ID)
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "heartbeats/s")
}
