//go:build unix

package model

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"time"
)

// partOf makes a fault of the network, and reports false if kind is none.
func (j *injector) partOf(ctx context.Context, kind string, h *hub, i int, atHub bool) bool {
	d := j.one3(margin(j.set)*2/5, margin(j.set)*3/2, j.set.ackWait()+time.Second)
	direction := j.rnd.IntN(2)
	link := h.links[i]
	switch {
	case kind == "partition" && atHub:
		j.fault("hold-one-link", h.name, func() {
			link.hold(true)
			wait(ctx, d)
			link.hold(false)
		})
	case kind == "partition":
		j.fault("part-node", fmt.Sprint("n", i), func() {
			j.apart(i, true, true, true)
			wait(ctx, d)
			j.apart(i, true, true, false)
			j.healthy()
		})
	case kind == "oneway" && atHub:
		j.fault("hold-link-oneway", h.name, func() {
			for _, p := range h.links {
				p.holdOne(direction, true)
			}
			wait(ctx, d)
			for _, p := range h.links {
				p.holdOne(direction, false)
			}
		})
	case kind == "oneway":
		j.fault("part-node-oneway", fmt.Sprint("n", i), func() {
			j.apart(i, direction == toServer, direction != toServer, true)
			wait(ctx, d)
			j.apart(i, direction == toServer, direction != toServer, false)
			j.healthy()
		})
	case kind == "slowroute":
		late := time.Duration(5+j.rnd.IntN(100)) * time.Millisecond
		j.fault("delay-route", fmt.Sprint("n", i), func() {
			j.eachRoute(i, func(p *proxy, _ bool) { p.slow(late) })
			wait(ctx, time.Duration(1_000+j.rnd.IntN(3_000))*time.Millisecond)
			j.eachRoute(i, func(p *proxy, _ bool) { p.slow(0) })
		})
	default:
		return false
	}
	return true
}

// apart holds back what a node sends to other nodes, what it is sent, or both.
func (j *injector) apart(node int, sends, hears, on bool) {
	j.eachRoute(node, func(p *proxy, dialed bool) {
		if sends {
			p.holdOne(map[bool]int{true: toServer, false: fromServer}[dialed], on)
		}
		if hears {
			p.holdOne(map[bool]int{true: fromServer, false: toServer}[dialed], on)
		}
	})
}

// eachRoute is for the links of a node to others: those that it dialed, and those that it took.
func (j *injector) eachRoute(node int, do func(p *proxy, dialed bool)) {
	for other := range j.nodes {
		if other != node {
			do(j.routes[node][other], true)
			do(j.routes[other][node], false)
		}
	}
}

// machine makes a fault of a disk, a clock, or whole machines.
func (j *injector) machine(ctx context.Context, kind string, h *hub, i int) {
	away := j.away()
	switch kind {
	case "diskfull":
		last := len(j.nodes) - 1
		j.fault("fill-disk", fmt.Sprint("n", last), func() {
			j.disk.fill()
			wait(ctx, away+time.Second)
			j.disk.enlarge()
			// A store that met a full disk keeps its error until it is opened again.
			j.nodes[last].Kill()
			j.nodes[last].Start()
			j.healthy()
		})
	case "diskloss":
		j.healthy() // what only one node has cannot survive its disk
		j.fault("lose-disk", fmt.Sprint("n", i), func() {
			j.nodes[i].Kill()
			j.nodes[i].Wipe()
			wait(ctx, away)
			j.nodes[i].Start()
			j.healthy()
		})
	case "diskslow": // the whole node is slow then
		j.fault("pulse-node", fmt.Sprint("n", i), func() {
			for range 3 + j.rnd.IntN(5) {
				j.nodes[i].Freeze()
				wait(ctx, time.Duration(100+j.rnd.IntN(400))*time.Millisecond)
				j.nodes[i].Thaw()
				wait(ctx, time.Duration(50+j.rnd.IntN(200))*time.Millisecond)
			}
		})
	case "jump":
		by := 2*halfStall(j.set) + time.Second + time.Duration(j.rnd.IntN(30_000))*time.Millisecond
		j.fault("jump-hub", h.name, func() {
			j.rec.add(0, kindNote, fmt.Sprintf("the clock of %s goes on by %v", h.name, by))
			j.jump(ctx, h, by)
			wait(ctx, time.Second)
		})
	case "rollhubs":
		for _, h := range j.hubs {
			if j.spares(h.name) {
				continue
			}
			j.fault("stop-hub", h.name, func() {
				h.set(false)
				h.child.Stop()
				j.startHub(h)
			})
		}
	case "rollnodes": // to the newer version, if they run the older one
		for i, n := range j.nodes {
			if j.spares(n.Name()) {
				continue
			}
			j.fault("stop-node", fmt.Sprint("n", i), func() {
				n.Stop()
				n.SetProgram("")
				n.Start()
				j.healthy()
			})
		}
	}
}

// jump moves the clock of a hub forward.
func (j *injector) jump(ctx context.Context, h *hub, by time.Duration) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+h.addr+jumpPath+"?by="+by.String(), http.NoBody)
	if err != nil {
		j.Fatal(err)
	}
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	res, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		j.Errorf("the clock of %s does not move: %v", h.name, err)
		return
	}
	_ = res.Body.Close()
	if res.StatusCode != http.StatusOK {
		j.Errorf("the clock of %s does not move: %s", h.name, res.Status)
	}
}

// silent is a member that takes events, and then neither reads, nor settles, nor leaves.
func (j *injector) silent(ctx context.Context, rnd *rand.Rand) {
	h, g := j.hubs[rnd.IntN(len(j.hubs))], j.plan.groups[rnd.IntN(len(j.plan.groups))]
	leased, reads := 1_000+rnd.IntN(4_000), rnd.IntN(2) == 0
	quiet := time.Duration(1_000+rnd.IntN(8_000)) * time.Millisecond
	if g.lone || j.rec.now() < g.opens {
		g = j.plan.groups[0]
	}
	came := make(chan struct{}, 1)
	conn, err := dialHub(j.rec, int(j.count.conns.Add(1)), h.addr, h.name+" silent", false, func(text []byte) {
		var f wireFrame
		if json.Unmarshal(text, &f) == nil && f.Op == "EVENT" {
			select {
			case came <- struct{}{}:
			default:
			}
		}
	})
	if err != nil {
		return // the hub is away
	}
	say := func(f *wireFrame) {
		corr := fmt.Sprint("s", j.count.corrs.Add(1))
		f.Corr = &corr
		conn.send(f)
	}
	never := 0
	say(&wireFrame{Op: "AUTH", Token: "x", Caps: []string{"group_reset", "events_lost"}})
	say(&wireFrame{Op: "SUBSCRIBE", Topic: g.topics[0], Group: g.name, Opts: &wireOptions{
		From: "earliest", Topics: g.topics[1:], GroupTTLMS: g.ttlMS, MaxInFlight: 20, AckTimeoutMS: leased, MaxAttempts: &never,
	}})
	select {
	case <-came:
	case <-conn.ended:
	case <-time.After(3 * time.Second):
	}
	if !reads {
		conn.deaf()
	}
	wait(ctx, quiet)
	conn.end([]int{endAbrupt, endHalf}[rnd.IntN(2)])
	select {
	case <-conn.ended:
	case <-time.After(20 * time.Second):
		conn.end(endAbrupt)
		_ = conn.tcp.Close()
		<-conn.ended
	}
}

// replay is the command that runs a seed again.
func replay(seed int64) string {
	cmd := fmt.Sprintf("again: go test ./cmd/eventhub/model -run '^TestModel$' -v -timeout 0 -model.seed=%d -model.active=%v -model.faults=%s -model.with=%s",
		seed, *activeFlag, *faultsFlag, *withFlag)
	if *clusterFlag {
		cmd += " -model.cluster"
	}
	if *oldFlag != "" {
		cmd += " -model.old=" + *oldFlag
	}
	return cmd
}
