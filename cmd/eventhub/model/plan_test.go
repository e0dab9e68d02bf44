//go:build unix

package model

import (
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"
)

// plan is what a seed stands for: the machines, the groups, and how long.
type plan struct {
	seed      int64
	nodes     int
	hubs      int
	clients   int
	ackWaitMS int
	topics    []string
	groups    []*groupPlan
	active    time.Duration
	faults    []string
	with      []string
	logs      string // a directory for the logs of hubs; "" for none
	tolerance time.Duration
	old       string // an older nats-server that nodes run until they are upgraded; "" for none
	// program is an eventhub that the hubs run, with the rules for topics in a file; "" for hubs of
	// this program.
	program, rules string
	spared         []string // hubs and nodes whose processes no fault ends
}

// groupPlan is what members of a group ask for.
type groupPlan struct {
	name   string
	topics []string // the first is that of SUBSCRIBE
	ttlMS  int
	from   string
	opens  time.Duration // nobody subscribes before
	lone   bool          // one member, once
	taken  bool          // by that member

	ordered bool // by key
	slots   int  // that most members ask for; 0 for the default
}

// allFaults and allFeatures are what -model.faults and -model.with know.
var (
	allFaults = []string{
		"kill", "stop", "stepdown", "freeze", "delay",
		"meta", "partition", "oneway", "slowroute", "diskfull", "diskslow", "diskloss", "jump", "rollhubs", "rollnodes", "silent",
	}
	// clusterFaults need three nodes.
	clusterFaults = []string{"stepdown", "meta", "slowroute", "diskfull", "diskloss", "rollnodes"}
	allFeatures   = []string{
		"pause", "topics", "ttl", "deaf", "corrless", "cluster",
		"tombstones", "reads", "projection", "outbox", "http", "native", "go", "ts", "ordered",
	}
)

func (p *plan) has(feature string) bool { return slices.Contains(p.with, feature) }

// newPlan makes a plan of a seed. What is not in faults and with does not come.
func newPlan(seed int64, faults, with []string, active time.Duration) *plan {
	rnd := rand.New(rand.NewPCG(uint64(seed), 0))
	p := &plan{seed: seed, nodes: 1, hubs: 1 + rnd.IntN(3), ackWaitMS: 6_000, active: active, faults: faults, with: with, tolerance: *toleranceFlag, logs: *logFlag}
	if rnd.IntN(2) == 0 && p.has("cluster") {
		p.nodes = 3
	}
	if *clusterFlag {
		p.cluster()
	}
	p.clients = 3 + rnd.IntN(3)
	for i := range 2 + rnd.IntN(2) {
		p.topics = append(p.topics, "t"+strconv.Itoa(i))
	}
	pick := func() string { return p.topics[rnd.IntN(len(p.topics))] }
	add := func(g groupPlan) {
		g.name = "g" + strconv.Itoa(len(p.groups))
		if g.topics == nil {
			g.topics = []string{pick()}
		}
		p.groups = append(p.groups, &g)
	}
	add(groupPlan{from: "latest"})
	add(groupPlan{from: "earliest"})
	// a backlog older than AckWait
	add(groupPlan{from: []string{"earliest", "ts", "afterId"}[rnd.IntN(3)], opens: active * 6 / 10})
	add(groupPlan{from: "earliest", opens: active * 8 / 10})
	add(groupPlan{from: []string{"latest", "earliest"}[rnd.IntN(2)], lone: true, opens: time.Duration(rnd.IntN(int(active / 2)))})
	if p.has("topics") {
		add(groupPlan{from: []string{"latest", "earliest"}[rnd.IntN(2)], topics: slices.Clone(p.topics)})
	}
	if p.has("ttl") {
		add(groupPlan{from: []string{"latest", "earliest"}[rnd.IntN(2)], ttlMS: 4_000 + rnd.IntN(4_000)})
	}
	if p.has("ordered") {
		p.order(rand.New(rand.NewPCG(uint64(seed), 1)))
	}
	return p
}

// order adds one or two ordered groups. Their draws are apart from the others, so a seed means the
// same groups with them and without.
func (p *plan) order(rnd *rand.Rand) {
	for range 1 + rnd.IntN(2) {
		g := &groupPlan{
			name: "g" + strconv.Itoa(len(p.groups)), topics: []string{p.topics[rnd.IntN(len(p.topics))]},
			from: []string{"latest", "earliest"}[rnd.IntN(2)], ordered: true, slots: []int{0, 1, 4, 16}[rnd.IntN(4)],
		}
		if rnd.IntN(4) == 0 && p.has("topics") {
			g.topics = slices.Clone(p.topics)
		}
		p.groups = append(p.groups, g)
	}
}

// cluster makes it one of three nodes, and two or three hubs.
func (p *plan) cluster() *plan {
	p.nodes, p.hubs = 3, 2+int(uint64(p.seed)%2)
	return p
}

// finish leaves out what the machines of the plan cannot have.
func (p *plan) finish() {
	if p.nodes == 1 {
		p.faults = slices.DeleteFunc(slices.Clone(p.faults), func(f string) bool { return slices.Contains(clusterFaults, f) })
	}
	if slices.Contains(p.faults, "rollnodes") && p.seed%2 == 0 {
		p.old = *oldFlag
	}
}

func (p *plan) String() string {
	return strings.Join([]string{
		"seed " + strconv.FormatInt(p.seed, 10), strconv.Itoa(p.nodes) + " nats-servers", strconv.Itoa(p.hubs) + " hubs", strconv.Itoa(p.clients) + " clients",
		strconv.Itoa(len(p.topics)) + " topics", strconv.Itoa(len(p.groups)) + " groups", "faults " + strings.Join(p.faults, ","), "with " + strings.Join(p.with, ","),
	}, ", ")
}

// options are those of one member.
func (g *groupPlan) options(rnd *rand.Rand, ids *knownIDs, began time.Time) *wireOptions {
	o := &wireOptions{From: g.from, GroupTTLMS: g.ttlMS, Topics: slices.Clone(g.topics[1:])}
	switch g.from {
	case "latest":
		if rnd.IntN(2) == 0 {
			o.From = ""
		}
	case "ts":
		// A time in the future would be the end of the topic.
		o.TS = min(began.Add(time.Duration(rnd.IntN(5_000))*time.Millisecond).UnixMilli(), time.Now().Add(-time.Second).UnixMilli())
	case "afterId":
		if o.AfterID = ids.any(g.topics[0], rnd); o.AfterID == "" {
			o.From = "earliest"
		}
	}
	o.MaxInFlight = []int{1, 2, 5, 20, 0}[rnd.IntN(5)]
	if len(g.topics) > 1 { // what comes beyond it may wait in the hub, while others have room
		o.MaxInFlight = []int{1, 1, 20, 0}[rnd.IntN(4)]
	}
	o.AckTimeoutMS = []int{1_000, 1_500, 3_000, 8_000, 0}[rnd.IntN(5)]
	if g.lone {
		o.AckTimeoutMS = 0
	}
	if rnd.IntN(4) == 0 {
		o.BatchSize = 1 + rnd.IntN(10)
	}
	if n := []int{-1, 0, 1, 2, 3}[rnd.IntN(5)]; n >= 0 {
		o.MaxAttempts = &n
	}
	if g.ordered {
		o.Ordered, o.Slots = "key", g.slots
		if rnd.IntN(8) == 0 { // it counts only if the group is made with it
			o.Slots = 7
		}
		if o.AckTimeoutMS == 0 { // an event that nobody settles keeps its key for so long
			o.AckTimeoutMS = 2_000
		}
	}
	return o
}
