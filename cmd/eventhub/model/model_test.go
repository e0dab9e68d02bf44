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

	natsjs "github.com/nats-io/nats.go/jetstream"
)

var (
	seedFlag      = flag.Int64("model.seed", 0, "the seed to begin with; 0: the short form, two fixed seeds")
	seedsFlag     = flag.Int64("model.seeds", 1, "how many seeds, from that one on")
	forFlag       = flag.Duration("model.for", 0, "run seeds until so much time has passed, instead of -model.seeds")
	activeFlag    = flag.Duration("model.active", 20*time.Second, "how long clients act for each seed, before all is drained")
	faultsFlag    = flag.String("model.faults", strings.Join(allFaults, ","), "the faults to inject")
	withFlag      = flag.String("model.with", strings.Join(allFeatures, ","), "what clients use, and clusters of three")
	logFlag       = flag.String("model.log", "", "a directory for histories of failing seeds, and for logs of hubs")
	keepFlag      = flag.Bool("model.keep", false, "keep the histories of seeds that pass, too")
	checkFlag     = flag.String("model.check", "", "check this history again, and run nothing")
	muteFlag      = flag.String("model.mute", "", "rules that are not asked, separated by commas")
	toleranceFlag = flag.Duration("model.tolerance", 2*time.Second, "how long an event may wait for an idle member")
)

func list(text string) []string {
	return slices.DeleteFunc(strings.Split(text, ","), func(s string) bool { return s == "" })
}

// TestModel runs seeds: see the package's doc. Its short form is two of them, at the same time.
func TestModel(t *testing.T) {
	switch {
	case *checkFlag != "":
		f, err := os.Open(*checkFlag)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = f.Close() }()
		h, err := readHistory(f)
		if err != nil {
			t.Fatal(err)
		}
		judge(t, h)
	case *seedFlag == 0:
		for _, p := range []*plan{
			newPlan(1, nil, sound, 10*time.Second),
			newPlan(2, []string{"kill", "stop"}, sound, 14*time.Second),
		} {
			t.Run(fmt.Sprint("seed=", p.seed), func(t *testing.T) {
				t.Parallel()
				runPlan(t, p)
			})
		}
	default:
		began := time.Now()
		for seed := *seedFlag; *forFlag > 0 && time.Since(began) < *forFlag || *forFlag == 0 && seed < *seedFlag+*seedsFlag; seed++ {
			t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
				runPlan(t, newPlan(seed, list(*faultsFlag), list(*withFlag), *activeFlag))
			})
		}
	}
}

// runPlan runs a plan and judges its history.
func runPlan(t *testing.T, p *plan) {
	t.Helper()
	t.Log(p)
	rec := newRecorder()
	r := startRig(t, p, rec)
	rec.mu.Lock()
	rec.began = time.Now() // starting does not count
	rec.entries = nil
	rec.mu.Unlock()
	set := settings{Seed: p.seed, AckWaitMS: p.ackWaitMS, ToleranceMS: int(p.tolerance.Milliseconds()), Disturbed: len(p.faults) > 0, Drained: true}
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

	count, ids := &counters{}, &knownIDs{ids: map[string][]string{}}
	active, cancel := context.WithTimeout(t.Context(), p.active)
	defer cancel()
	var clients sync.WaitGroup
	for i := range p.clients {
		c := &client{rig: r, rnd: rand.New(rand.NewPCG(uint64(p.seed), uint64(i+1))), count: count, ids: ids, used: map[string][]string{}}
		clients.Go(func() { c.run(active) })
	}
	(&injector{rig: r, rnd: rand.New(rand.NewPCG(uint64(p.seed), 1_000)), set: set}).run(active)
	clients.Wait()
	r.healthy()
	r.drain(count)
	r.readAll()
	judge(t, rec.history())
}

// drain acknowledges all that the groups have left, and takes down what does not come.
func (r *rig) drain(count *counters) {
	r.Helper()
	var conn *wsConn
	number := 0
	var send func(f *wireFrame)
	r.until("the drain connects", func(context.Context) bool {
		var err error
		number = int(count.conns.Add(1))
		ready := make(chan struct{})
		conn, err = dialHub(r.rec, number, r.hubs[0].addr, r.hubs[0].name, false, func(text []byte) {
			<-ready
			var f wireFrame
			if json.Unmarshal(text, &f) == nil && f.Op == "EVENT" {
				send(&wireFrame{Op: "ACK", Topic: f.Topic, Group: f.Group, ID: f.Event.ID})
			}
		})
		if err != nil {
			return false
		}
		to := conn
		send = func(f *wireFrame) {
			corr := fmt.Sprint("d", count.corrs.Add(1))
			f.Corr = &corr
			to.send(f)
		}
		close(ready)
		return true
	})
	send(&wireFrame{Op: "AUTH", Token: "x", Caps: []string{"group_reset", "events_lost"}})
	never := 0
	for _, g := range r.plan.groups {
		send(&wireFrame{Op: "SUBSCRIBE", Topic: g.topics[0], Group: g.name, Opts: &wireOptions{
			Topics: g.topics[1:], GroupTTLMS: g.ttlMS, MaxInFlight: 1_000, MaxAttempts: &never, AckTimeoutMS: 10_000,
		}})
	}
	left := map[groupKey]int{}
	still := 0
	r.within(60*time.Second, func(ctx context.Context) bool {
		clear(left)
		for _, topic := range r.plan.topics {
			all, err := r.consumers(ctx, topic)
			if err != nil {
				still = 0
				return false
			}
			newest := map[string]*natsjs.ConsumerInfo{}
			for _, c := range all {
				g := c.Config.Metadata["eventhub.group"]
				if was := newest[g]; was == nil || was.Created.Before(c.Created) {
					newest[g] = c
				}
			}
			for g, c := range newest {
				if n := int(c.NumPending) + c.NumAckPending; n > 0 {
					left[groupKey{topic, g}] = n
				}
			}
		}
		if len(left) > 0 {
			still = 0
			return false
		}
		still++
		return still > 5
	})
	for k, n := range left {
		r.rec.add(0, kindLeft, fmt.Sprintf("%s %s %d", k.group, k.topic, n))
	}
	conn.end(endHalf)
	select {
	case <-conn.ended:
	case <-time.After(10 * time.Second):
		r.Errorf("seed %d: the hub does not end the connection of the drain", r.plan.seed)
		_ = conn.tcp.Close()
		<-conn.ended
	}
}

func isMissing(err error) bool { return errors.Is(err, natsjs.ErrStreamNotFound) }

// readAll takes down all that is stored.
func (r *rig) readAll() {
	r.Helper()
	for _, topic := range r.plan.topics {
		r.readStream(streamName(topic), func(m *natsjs.RawStreamMsg) {
			id := m.Header.Get("Nats-Msg-Id")
			if id == "" {
				id = m.Header.Get("Event-Id")
			}
			r.rec.add(0, kindStored, fmt.Sprintf("%s %d %s %d %s", topic, m.Sequence, id, m.Time.UnixMilli(), m.Data))
		})
	}
	r.readStream("dlq", func(m *natsjs.RawStreamMsg) {
		r.rec.add(0, kindLetter, fmt.Sprintf("%d %s", m.Sequence, m.Data))
	})
}

func (r *rig) readStream(name string, f func(*natsjs.RawStreamMsg)) {
	r.Helper()
	var s natsjs.Stream
	missing := false
	r.until("stream "+name+" is found", func(ctx context.Context) bool {
		var err error
		s, err = r.js.Stream(ctx, name)
		missing = err != nil && isMissing(err)
		return err == nil || missing
	})
	if missing {
		return
	}
	state := s.CachedInfo().State
	for seq := state.FirstSeq; seq <= state.LastSeq; seq++ {
		r.until("an event is read", func(ctx context.Context) bool {
			m, err := s.GetMsg(ctx, seq)
			if err == nil {
				f(m)
			}
			return err == nil || errors.Is(err, natsjs.ErrMsgNotFound)
		})
	}
}

// judge asks the rules about a history, and keeps the history if they find something.
func judge(t *testing.T, h history) {
	t.Helper()
	l, found, err := check(h)
	if err != nil {
		t.Fatal(err)
	}
	found = slices.DeleteFunc(found, func(v violation) bool { return slices.Contains(list(*muteFlag), v.rule) })
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
	const mostOfRule, mostLines = 2, 40
	said := map[string]int{}
	for _, v := range found {
		if said[v.rule]++; said[v.rule] <= mostOfRule {
			t.Error(l.describe(v, mostLines))
		}
	}
	if *checkFlag == "" && (len(found) > 0 || t.Failed() || *keepFlag) {
		keep(t, l.set.Seed, h)
	}
}

// keep writes a history where it can be looked at.
func keep(t *testing.T, seed int64, h history) {
	t.Helper()
	dir := *logFlag
	if dir == "" {
		dir = t.ArtifactDir()
	}
	path := filepath.Join(dir, fmt.Sprintf("seed-%d.history", seed))
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
