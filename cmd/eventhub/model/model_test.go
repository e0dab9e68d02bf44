//go:build unix

package model

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

var (
	seedFlag      = flag.Int64("model.seed", 0, "the seed to begin with; 0: the short form, one fixed seed")
	fixedFlag     = flag.Int("model.fixed", 1, "how many of the fixed seeds the short form runs at the same time, at most 4")
	seedsFlag     = flag.Int64("model.seeds", 1, "how many seeds, from that one on")
	forFlag       = flag.Duration("model.for", 0, "run seeds until so much time has passed, instead of -model.seeds")
	activeFlag    = flag.Duration("model.active", 20*time.Second, "how long clients act for each seed, before all is drained")
	faultsFlag    = flag.String("model.faults", strings.Join(allFaults, ","), "the faults to inject")
	withFlag      = flag.String("model.with", strings.Join(allFeatures, ","), "what clients use, and clusters of three")
	logFlag       = flag.String("model.log", "", "a directory for histories of failing seeds, and for logs of hubs")
	keepFlag      = flag.Bool("model.keep", false, "keep the histories of seeds that pass, too")
	checkFlag     = flag.String("model.check", "", "check these histories again, whose names fit the pattern, and run nothing")
	muteFlag      = flag.String("model.mute", "", "rules that are not asked, separated by commas")
	updateFlag    = flag.Bool("model.update", false, "write the drawing that TestTimeline compares anew")
	clusterFlag   = flag.Bool("model.cluster", false, "run every seed beside three nats-servers, with two or three hubs")
	oldFlag       = flag.String("model.old", "", "an older nats-server, which the nodes of even seeds run until they are upgraded")
	toleranceFlag = flag.Duration("model.tolerance", 2*time.Second, "how long an event may wait for an idle member")
)

func list(text string) []string {
	return slices.DeleteFunc(strings.Split(text, ","), func(s string) bool { return s == "" })
}

// fixed are the seeds of the short form, which -model.fixed selects the first of. The hubs of the
// first are killed twice and stopped.
func fixed() []*plan {
	return []*plan{
		newPlan(1, []string{"kill", "stop"}, sound, 10*time.Second),
		newPlan(7, clusterShort, clusterSound, 20*time.Second).cluster(),
		newPlan(2, []string{"kill", "stop"}, sound, 14*time.Second),
		newPlan(1, nil, sound, 10*time.Second),
	}
}

// TestModel runs seeds: see the package's doc. Its short form is one of them.
func TestModel(t *testing.T) {
	switch {
	case *checkFlag != "":
		paths, err := filepath.Glob(*checkFlag)
		if err != nil || len(paths) == 0 {
			t.Fatalf("-model.check: %v, %v", paths, err)
		}
		for _, path := range paths {
			h := readFile(t, path)
			sum.faults(h.made())
			judge(t, h)
		}
		sum.print(t)
	case *seedFlag == 0:
		for i, p := range fixed() {
			if i >= *fixedFlag {
				break
			}
			t.Run(fmt.Sprint("seed=", p.seed), func(t *testing.T) {
				t.Parallel()
				runPlan(t, p)
			})
		}
	default:
		began := time.Now()
		for seed := *seedFlag; *forFlag > 0 && time.Since(began) < *forFlag || *forFlag == 0 && seed < *seedFlag+*seedsFlag; seed++ {
			t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
				defer func() {
					if t.Failed() {
						t.Log(replay(seed))
					}
				}()
				runPlan(t, newPlan(seed, list(*faultsFlag), list(*withFlag), *activeFlag))
			})
		}
		sum.print(t)
	}
}

func readFile(t *testing.T, path string) history {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	h, err := readHistory(f)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// runPlan runs a plan and judges its history.
func runPlan(t *testing.T, p *plan) {
	t.Helper()
	p.finish()
	t.Log(p)
	rec := newRecorder()
	r := startRig(t, p, rec)
	count, ids := &counters{}, &knownIDs{ids: map[string][]string{}}
	company := newCompany(r, count, ids)
	rec.mu.Lock()
	rec.began = time.Now() // starting does not count
	rec.entries = nil
	rec.mu.Unlock()
	set := settings{Seed: p.seed, AckWaitMS: p.ackWaitMS, ToleranceMS: int(p.tolerance.Milliseconds()), Disturbed: len(p.faults) > 0, Drained: true, Cluster: p.nodes > 1}
	text, err := json.Marshal(set)
	if err != nil {
		t.Fatal(err)
	}
	rec.add(0, kindSet, string(text))
	watched, stop := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() { r.watch(watched) })
	defer watching.Wait()
	defer stop()

	active, cancel := context.WithTimeout(t.Context(), p.active)
	defer cancel()
	var clients sync.WaitGroup
	for i := range p.clients {
		c := &client{rig: r, rnd: rand.New(rand.NewPCG(uint64(p.seed), uint64(i+1))), count: count, ids: ids, used: map[string][]string{}, slow: i%3 == 2}
		if p.has("ordered") {
			c.keys = rand.New(rand.NewPCG(uint64(p.seed), uint64(1_000+i)))
		}
		clients.Go(func() { c.run(active) })
	}
	clients.Go(func() { company.run(active) })
	(&injector{rig: r, count: count, set: set}).run(active)
	clients.Wait()
	r.healthy()
	company.settle()
	r.drain(count)
	company.read()
	r.readAll()
	sum.faults(r.tally)
	judge(t, rec.history())
}

// judge asks the rules about a history, and keeps the history if they find something.
func judge(t *testing.T, h history) {
	t.Helper()
	l, found, err := check(h)
	if err != nil {
		t.Fatal(err)
	}
	mute := list(*muteFlag)
	found = slices.DeleteFunc(found, func(v violation) bool { return slices.Contains(mute, v.rule) })
	events, deliveries := 0, 0
	for _, s := range l.stored {
		events += len(s)
	}
	for _, s := range l.subs {
		deliveries += len(s.delivered)
	}
	byRule := map[string]int{}
	for _, v := range found {
		byRule[v.rule]++
	}
	t.Logf("seed %d: %d connections, %d frames sent, %d events stored, %d subscriptions, %d deliveries, %d dead letters, %d faults; violations: %v",
		l.set.Seed, len(l.order), len(l.frames), events, len(l.subs), deliveries, len(l.letter), len(l.faults), byRule)
	sum.add(l, events, deliveries, byRule)
	const mostOfRule, mostLines = 2, 40
	said := map[string]int{}
	for _, v := range found {
		if said[v.rule]++; said[v.rule] <= mostOfRule {
			t.Error(l.describe(v, mostLines))
		}
	}
	if len(found) > 0 {
		path := filepath.Join(keptIn(t), fmt.Sprintf("seed-%d.svg", l.set.Seed))
		if err := draw(l, found[0], path); err != nil {
			t.Error(err)
		}
		t.Logf("the timeline is in %s", path)
	}
	if *checkFlag == "" && (len(found) > 0 || t.Failed() || *keepFlag) {
		keep(t, l.set.Seed, h)
	}
	// Once more and in short, because viewers of logs show the end of what a test says.
	for _, v := range found[:min(len(found), mostLines)] {
		t.Errorf("%s: topic %s, group %s, event %s: %s", v.rule, v.topic, v.group, v.id, v.msg)
	}
}

// keptIn is where what can be looked at is kept.
func keptIn(t *testing.T) string {
	t.Helper()
	if *logFlag != "" {
		return *logFlag
	}
	return t.ArtifactDir()
}

// keep writes a history where it can be looked at.
func keep(t *testing.T, seed int64, h history) {
	t.Helper()
	path := filepath.Join(keptIn(t), fmt.Sprintf("seed-%d.history", seed))
	f, err := os.Create(path)
	if err == nil {
		err = errors.Join(h.write(f), f.Close())
	}
	if err != nil {
		t.Error(err)
		return
	}
	t.Logf("the history is in %s", path)
}
