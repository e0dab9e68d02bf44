//go:build unix

package model

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// injector makes one fault after the other.
type injector struct {
	*rig

	rnd   *rand.Rand // for the fault that is made
	count *counters
	set   settings
	last  string // the fault that was made last: its kind and its target
}

// run goes on until ctx ends; everything is healed then. Each fault has decisions of its own, so
// that none depends on how far one before it came.
func (j *injector) run(ctx context.Context) {
	if len(j.plan.faults) == 0 {
		<-ctx.Done()
		return
	}
	var quiet sync.WaitGroup
	defer quiet.Wait()
	for n := uint64(0); ; n++ {
		j.rnd = rand.New(rand.NewPCG(uint64(j.plan.seed), 1_000+n))
		wait(ctx, time.Duration(500+j.rnd.IntN(3_500))*time.Millisecond)
		if ctx.Err() != nil {
			return
		}
		kind := j.plan.faults[j.rnd.IntN(len(j.plan.faults))]
		j.tally[kind]++
		j.rec.add(0, kindNote, madeNote+kind)
		if kind == "silent" {
			rnd := j.rnd
			quiet.Go(func() { j.silent(ctx, rnd) })
			continue
		}
		h, i, atHub := j.hubs[j.rnd.IntN(len(j.hubs))], j.rnd.IntN(len(j.nodes)), j.rnd.IntN(2) == 0
		if !j.partOf(ctx, kind, h, i, atHub) {
			j.one(ctx, kind, h, i, atHub)
		}
	}
}

func (j *injector) one(ctx context.Context, kind string, h *hub, i int, atHub bool) {
	switch kind {
	case "kill", "stop":
		if atHub {
			j.fault(kind+"-hub", h.name, func() {
				h.set(false)
				if kind == "kill" {
					h.child.Kill()
				} else {
					h.child.Stop()
				}
				wait(ctx, j.away())
				j.startHub(h)
			})
			return
		}
		j.fault(kind+"-node", fmt.Sprint("n", i), func() {
			if kind == "kill" {
				j.nodes[i].Kill()
			} else {
				j.nodes[i].Stop()
			}
			wait(ctx, j.away())
			j.nodes[i].Start()
			j.healthy()
		})
	case "freeze":
		if atHub {
			d := j.one3(halfStall(j.set)/2, margin(j.set)*3/2, j.set.ackWait()+2*time.Second)
			j.fault("freeze-hub", h.name, func() {
				h.child.Freeze()
				wait(ctx, d)
				h.child.Thaw()
			})
			return
		}
		d := j.one3(margin(j.set)*2/5, margin(j.set)*3/2, j.set.ackWait()+time.Second)
		j.fault("freeze-node", fmt.Sprint("n", i), func() {
			j.nodes[i].Freeze()
			wait(ctx, d)
			j.nodes[i].Thaw()
			if d > margin(j.set) {
				j.healthy()
			}
		})
	case "delay":
		if j.rnd.IntN(2) == 0 {
			d := j.one3(margin(j.set)*2/5, margin(j.set)*3/2, j.set.ackWait()+time.Second)
			j.fault("hold-link", h.name, func() {
				for _, p := range h.links {
					p.hold(true)
				}
				wait(ctx, d)
				for _, p := range h.links {
					p.hold(false)
				}
			})
			return
		}
		d := time.Duration(5+j.rnd.IntN(150)) * time.Millisecond
		j.fault("delay-link", h.name, func() {
			for _, p := range h.links {
				p.slow(d)
			}
			wait(ctx, time.Duration(1_000+j.rnd.IntN(3_000))*time.Millisecond)
			for _, p := range h.links {
				p.slow(0)
			}
		})
	case "stepdown":
		j.fault("stepdown", "-", func() { j.deposeOne(ctx) })
	case "meta":
		j.fault("stepdown-meta", "-", func() {
			err := j.stepDown(ctx, j.sys, "META.LEADER.STEPDOWN")
			j.rec.add(0, kindNote, fmt.Sprintf("META.LEADER.STEPDOWN: %v", err))
			j.healthy()
		})
	default:
		j.machine(ctx, kind, h, i)
	}
}

// spares reports whether a process must not end.
func (j *injector) spares(name string) bool { return slices.Contains(j.plan.spared, name) }

// away is for how long something is gone: mostly not for long.
func (j *injector) away() time.Duration {
	most := 1_500
	if j.rnd.IntN(4) == 0 {
		most = j.plan.ackWaitMS + 3_000
	}
	return time.Duration(j.rnd.IntN(most)) * time.Millisecond
}

// one3 picks one, the shorter ones more often, and now and then one that is longer than an answer
// may take.
func (j *injector) one3(short, middle, long time.Duration) time.Duration {
	switch n := j.rnd.IntN(20); {
	case n < 7:
		return short
	case n < 12:
		return middle
	case n < 19:
		return long
	}
	return answerWithin + 3*time.Second
}

// fault takes down a fault and does it.
func (j *injector) fault(kind, target string, do func()) {
	n := j.number()
	j.last = kind + " " + target
	j.rec.add(0, kindFault, fmt.Sprintf("%d %s %s", n, kind, target))
	do()
	j.rec.add(0, kindOver, strconv.Itoa(n))
}

// deposeOne makes a leader step down: of a stream, or mostly of the group with the most leases.
func (j *injector) deposeOne(ctx context.Context) {
	topic := j.plan.topics[j.rnd.IntN(len(j.plan.topics))]
	what := "STREAM.LEADER.STEPDOWN." + streamName(topic)
	asked, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	all, err := j.consumers(asked, topic)
	if j.rnd.IntN(4) > 0 && err == nil && len(all) > 0 {
		one := all[j.rnd.IntN(len(all))]
		for _, c := range all {
			if c.NumAckPending > one.NumAckPending { // where there is something to lose
				one = c
			}
		}
		what = "CONSUMER.LEADER.STEPDOWN." + streamName(topic) + "." + one.Name
	}
	err = j.stepDown(ctx, j.nc, what)
	j.rec.add(0, kindNote, fmt.Sprintf("%s: %v", what, err))
	j.healthy()
}

// healthy waits for some time until streams, those of the hubs' buckets too, and groups have
// leaders and their copies are up to date. It takes down what it waited for last.
func (r *rig) healthy() {
	began, last := r.rec.now(), ""
	well := r.within(patience, func(ctx context.Context) bool {
		name, ok := r.ailing(ctx)
		if ok {
			return true
		}
		last = name
		return false
	})
	if took := r.rec.now() - began; took > time.Second {
		r.rec.add(0, kindNote, fmt.Sprintf("healthy: %v after %v; the last to wait for was %s", well, short(took), last))
	}
}

// ailing returns the name of a stream or a group that is not whole, or true.
func (r *rig) ailing(ctx context.Context) (name string, ok bool) {
	list := r.js.ListStreams(ctx)
	for s := range list.Info() {
		if !whole(s.Cluster, len(r.nodes)) {
			return s.Config.Name, false
		}
	}
	if err := list.Err(); err != nil {
		return "the list of streams", false
	}
	for _, topic := range append([]string{"dlq"}, r.plan.topics...) {
		all, err := r.consumers(ctx, topic)
		if isMissing(err) {
			continue
		}
		if err != nil {
			return "the list of groups of " + topic, false
		}
		for _, c := range all {
			if !whole(c.Cluster, len(r.nodes)) {
				return c.Name, false
			}
		}
	}
	return "", true
}

func whole(c *natsjs.ClusterInfo, nodes int) bool {
	if nodes == 1 || c == nil {
		return true
	}
	if c.Leader == "" {
		return false
	}
	for _, r := range c.Replicas {
		if r.Offline || !r.Current {
			return false
		}
	}
	return true
}
