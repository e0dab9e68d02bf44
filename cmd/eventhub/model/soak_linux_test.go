package model

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

var (
	soakFor     = flag.Duration("soak.for", 0, "how long TestSoak injects faults; 0: the short form, 2 s")
	soakSeed    = flag.Int64("soak.seed", 1, "the seed of the faults of TestSoak; it also selects the hub and the node that live through it")
	soakRate    = flag.Float64("soak.rate", 0, "the most events a second of TestSoak; 0: half of the measured capacity")
	soakMeasure = flag.Duration("soak.measure", 10*time.Second, "for how long TestSoak measures the capacity")
	soakPause   = flag.Duration("soak.pause", 15*time.Second, "the pause between two faults of TestSoak, without its random part of up to a half")
	soakFaults  = flag.String("soak.faults", strings.Join(soakKinds, ","), "the faults of TestSoak, as -model.faults names them, but for its short form")
	soakKeep    = flag.Bool("soak.keep", false, "keep the piece of TestSoak in testdata/soak if it passes, for the picture")
	soakLeak    = flag.String("soak.leak", "", "break the hub of TestSoak on purpose, as this file of testdata/leaks says")
)

// soakKinds are the faults of a soak. The clock of a hub is not moved, because the hub is the
// program that ships. Those of soakShort are over soon.
var soakKinds = []string{
	"kill", "stop", "stepdown", "freeze", "delay", "meta", "partition", "oneway", "slowroute", "diskslow", "diskloss", "rollhubs", "rollnodes",
}

var soakShort = []string{"kill", "slowroute"}

// What a soak waits for.
const (
	soakBack   = 90 * time.Second // after a fault, until groups were given what was confirmed
	soakAnHour = 2 * time.Minute  // until a hub without clients is as it was
	soakAtRest = 4                // goroutines and files that such a hub may have more than before
	soakWarmUp = 5 * time.Second
)

// soakShortRate is the rate of the short form, in events a second, which does not measure the
// capacity: to fill servers that share the machine with other tests makes them lose their leaders
// for minutes, and says nothing of hubs.
const soakShortRate = 200

// soak is one run of TestSoak.
type soak struct {
	*rig

	piece   soakPiece
	load    *soakLoad
	sampler *soakSampler
	faults  *injector
	lasting *hub // whose process no fault ends
}

// TestSoak runs hubs beside three nats-servers at half of their capacity, with random faults. See
// the package's doc. Its short form is 2 s with one fault, at soakShortRate.
func TestSoak(t *testing.T) {
	t.Parallel()
	length, pause, capacity, warmUp, quiet, kinds, ackWait := *soakFor, *soakPause, *soakMeasure, soakWarmUp, 20*time.Second, list(*soakFaults), 6*time.Second
	if length == 0 {
		// What a killed hub held comes again after AckWait.
		length, pause, capacity, warmUp, quiet, kinds, ackWait = 2*time.Second, 500*time.Millisecond, 0, 500*time.Millisecond, 500*time.Millisecond, soakShort, 3*time.Second
	}
	seed := *soakSeed
	p := &plan{
		seed: seed, nodes: 3, hubs: 2, ackWaitMS: int(ackWait.Milliseconds()), topics: []string{"t0", "t1"}, faults: kinds, with: []string{"http"},
		logs: *logFlag, program: buildHub(t), rules: filepath.Join(t.TempDir(), "topics.yaml"),
		spared: []string{fmt.Sprint("h", seed%2), fmt.Sprint("n", seed%3)},
	}
	// Retention is reached in the first quarter: what grows from there on is no longer the streams.
	var rules strings.Builder
	rules.WriteString("topics:\n")
	for _, topic := range p.topics {
		rules.WriteString("  - topic: " + topic + "\n    retention: {messages: 120000}\n")
	}
	if err := os.WriteFile(p.rules, []byte(rules.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	rec := newRecorder()
	rec.sparse = true
	r := startRig(t, p, rec)
	s := &soak{rig: r, sampler: newSoakSampler(r), lasting: r.hubs[seed%2]}
	s.load = &soakLoad{rig: r, groups: []string{"g0", "g1"}, ledger: newSoakLedger(p.topics, []string{"g0", "g1"}, 4)}
	s.faults = &injector{rig: r, count: &s.load.count, set: settings{Seed: seed, AckWaitMS: p.ackWaitMS, Disturbed: true, Cluster: true}}
	s.piece = soakPiece{seed: seed, when: time.Now(), length: length}

	s.measure(warmUp, capacity)
	before, err := s.sampler.rest(t.Context(), s.lasting, quiet)
	if err != nil {
		t.Fatal(err)
	}
	s.load.churn = 500 * time.Millisecond
	s.run(length, pause)
	s.judge(before, quiet)
	dir := keptIn(t)
	if *soakKeep && !t.Failed() {
		dir = filepath.Join("testdata", "soak")
	}
	path := filepath.Join(dir, fmt.Sprintf("%s-seed-%d.csv", s.piece.when.UTC().Format("2006-01-02-1504"), seed))
	var text bytes.Buffer
	if err := errors.Join(s.piece.write(&text), os.WriteFile(path, text.Bytes(), 0o600)); err != nil {
		t.Fatal(err)
	}
	t.Logf("the piece is in %s", path)
}

// buildHub builds the program.
func buildHub(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "eventhub")
	args := []string{"build", "-ldflags=-s -w", "-o", path}
	for name, changed := range soakLeaks(t) {
		if name != *soakLeak {
			continue
		}
		list, err := overlay(t.TempDir(), changed)
		if err != nil {
			t.Fatal(err)
		}
		args = append(args, "-overlay", list)
	}
	if out, err := exec.CommandContext(t.Context(), "go", append(args, "eventhub/cmd/eventhub")...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return path
}

// soakLeaks are the leaks of testdata/leaks: by their names, the sources that have them. Each must
// fit.
func soakLeaks(t *testing.T) map[string]map[string][]byte {
	t.Helper()
	root, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]map[string][]byte{}
	for _, m := range readMutations(t, "leaks") {
		if all[m.name], err = m.apply(root); err != nil {
			t.Errorf("%s: %v", m.name, err)
		}
	}
	if *soakLeak != "" && all[*soakLeak] == nil {
		t.Fatalf("there is no leak %q", *soakLeak)
	}
	return all
}

// measure publishes as fast as all groups follow, and takes down how fast that is. Where the time
// for it is 0, it publishes at soakShortRate.
func (s *soak) measure(warmUp, capacity time.Duration) {
	s.Helper()
	s.piece.rate = soakShortRate
	if capacity > 0 {
		s.piece.rate = 0
	}
	end := s.load.start(s.Context(), s.piece.rate)
	s.until("all groups are given events of all lanes", func(context.Context) bool { return s.load.ledger.begun() })
	wait(s.Context(), warmUp)
	was, began := s.load.ledger.totals().confirmed, time.Now()
	wait(s.Context(), capacity)
	// A machine that stood still all the while has no capacity to measure.
	s.until("events are confirmed", func(context.Context) bool { return s.load.ledger.totals().confirmed > was+10 })
	s.piece.capacity = float64(s.load.ledger.totals().confirmed-was) / time.Since(began).Seconds()
	if missing := end(soakBack); len(missing) > 0 {
		s.Fatalf("without faults, %s\n%s", strings.Join(missing, "\n"), s.backlogs())
	}
	if capacity > 0 {
		s.piece.rate = s.piece.capacity / 2
	}
	if *soakRate > 0 {
		s.piece.rate = min(s.piece.rate, *soakRate)
	}
	if s.piece.rate < 1 {
		s.Fatalf("the capacity is %.1f events/s", s.piece.capacity)
	}
	s.Logf("seed %d: %.0f events/s before to two groups each; soak at %.0f/s for %v; %v live through it", s.piece.seed, s.piece.capacity, s.piece.rate, s.piece.length, s.plan.spared)
}

// run makes faults while clients act, and takes samples.
func (s *soak) run(length, pause time.Duration) {
	s.Helper()
	s.rec.mu.Lock()
	s.rec.began = time.Now()
	s.rec.mu.Unlock()
	ctx, cancel := context.WithTimeout(s.Context(), length)
	defer cancel()
	sampling, stop := context.WithCancel(s.Context())
	var sampler sync.WaitGroup
	sampler.Go(func() { s.sampler.run(sampling, min(10*time.Second, length/120)) })
	defer func() {
		stop()
		sampler.Wait()
		s.piece.samples = s.sampler.samples
	}()
	s.sampler.all(s.Context())
	system, test := s.sampler.processors()
	end := s.load.start(s.Context(), s.piece.rate)
	for n := uint64(0); ; n++ {
		rnd := rand.New(rand.NewPCG(uint64(s.piece.seed), 1_000+n))
		wait(ctx, pause+time.Duration(rnd.Int64N(int64(pause/2)+1)))
		if ctx.Err() != nil {
			break
		}
		if s.fault(rnd); s.Failed() {
			break
		}
	}
	s.sampler.all(s.Context())
	later, mine := s.sampler.processors()
	s.Logf("hubs and nodes used %.2f processors, and the test, which is also the network, %.2f", (later-system).Seconds()/s.rec.now().Seconds(), (mine-test).Seconds()/s.rec.now().Seconds())
	for _, missing := range end(soakBack) {
		s.Error(missing)
	}
	stop()
}

// fault makes one fault, and waits until all groups were given what was confirmed by then.
func (s *soak) fault(rnd *rand.Rand) {
	s.Helper()
	j := s.faults
	j.rnd = rnd
	kind := s.plan.faults[rnd.IntN(len(s.plan.faults))]
	h, i, atHub := rnd.IntN(len(s.hubs)), rnd.IntN(len(s.nodes)), rnd.IntN(2) == 0
	if slices.Contains([]string{"kill", "stop", "diskloss"}, kind) { // ends a process
		if j.spares(s.hubs[h].name) {
			h = (h + 1) % len(s.hubs)
		}
		if j.spares(s.nodes[i].Name()) {
			i = (i + 1) % len(s.nodes)
		}
	}
	f := soakFault{from: s.rec.now()}
	// A fault ends by itself, also at the end of the run.
	ctx := s.Context()
	if !j.partOf(ctx, kind, s.hubs[h], i, atHub) {
		j.one(ctx, kind, s.hubs[h], i, atHub)
	}
	s.tally[kind]++
	f.over, f.what = s.rec.now(), j.last
	at := s.load.ledger.position()
	if !s.within(soakBack, func(context.Context) bool { return s.load.ledger.reached(at) }) {
		s.Errorf("%v after %s: %s\n%s", soakBack, f.what, strings.Join(s.load.ledger.missing(at), "\n"), s.backlogs())
	}
	f.back = s.rec.now()
	s.piece.faults = append(s.piece.faults, f)
	s.Logf("at %v: %s for %v, and %v more until groups had all", f.from.Round(time.Second), f.what, (f.over - f.from).Round(time.Millisecond), (f.back - f.over).Round(time.Millisecond))
}

// backlogs tells what the servers say of the groups.
func (s *soak) backlogs() string {
	ctx, cancel := context.WithTimeout(s.Context(), 5*time.Second)
	defer cancel()
	var b strings.Builder
	fmt.Fprintf(&b, "totals %+v\n", s.load.ledger.totals())
	for _, topic := range s.plan.topics {
		all, err := s.consumers(ctx, topic)
		if err != nil {
			fmt.Fprintf(&b, "%s: %v\n", topic, err)
		}
		for _, c := range all {
			fmt.Fprintf(&b, "%s %s: %d pending, %d unsettled, %d again, %d requests, delivered %+v, floor %+v, cluster %+v\n", topic, c.Config.Metadata["eventhub.group"],
				c.NumPending, c.NumAckPending, c.NumRedelivered, c.NumWaiting, c.Delivered, c.AckFloor, c.Cluster)
		}
	}
	return b.String()
}

// judge says what came of it, and whether all is as it was.
func (s *soak) judge(before soakSample, quiet time.Duration) {
	s.Helper()
	p := &s.piece
	p.totals, p.guests = s.load.ledger.totals(), s.load.guests.Load()
	var left map[groupKey]int
	var err error
	if !s.within(patience, func(ctx context.Context) bool {
		left, err = s.unsettled(ctx)
		return err == nil && len(left) == 0
	}) {
		s.Fatalf("after %v, unsettled are %v (%v)\n%s", patience, left, err, s.backlogs())
	}
	for _, wrong := range s.load.ledger.wrong {
		s.Error(wrong)
	}
	if p.totals.published != p.totals.confirmed {
		s.Errorf("%d events were published, and %d confirmed", p.totals.published, p.totals.confirmed)
	}
	var after soakSample
	grown := true
	for until := time.Now().Add(soakAnHour); grown && time.Now().Before(until); {
		if after, err = s.sampler.rest(s.Context(), s.lasting, quiet); err != nil {
			s.Fatal(err)
		}
		grown = after.goroutines > before.goroutines+soakAtRest || after.fds > before.fds+soakAtRest
	}
	rest := fmt.Sprintf("%s without clients: goroutines %d before and %d after, files %d and %d", s.lasting.name, before.goroutines, after.goroutines, before.fds, after.fds)
	if s.Log(rest); grown {
		s.Errorf("grown: %s", rest)
	}
	longest := soakFault{}
	for _, f := range p.faults {
		if f.back-f.over >= longest.back-longest.over {
			longest = f
		}
	}
	s.Logf("seed %d: %v, %d faults %v; %d events published and confirmed, %d deliveries, %d of them again, %d clients came and went; %d errors were told to clients (the last: %v); longest wait for a backlog %v after %s",
		p.seed, p.length, len(p.faults), s.tally, p.totals.confirmed, p.totals.deliveries, p.totals.again, p.guests, s.load.errs.Load(), s.load.last.Load(), (longest.back - longest.over).Round(time.Millisecond), longest.what)
	judged := 0
	for _, g := range p.growths() {
		if !g.judged {
			continue
		}
		judged++
		if s.Log(g); g.grown {
			s.Errorf("grown: %v", g)
		}
	}
	if judged == 0 && *soakFor > 0 {
		s.Error("no life was long enough to be judged")
	}
}
