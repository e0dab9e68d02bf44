//go:build unix

package model

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// counters number what all clients of a run share.
type counters struct{ conns, payloads, corrs atomic.Int64 }

// knownIDs are ids of events that were answered OK.
type knownIDs struct {
	mu  sync.Mutex
	ids map[string][]string
}

func (k *knownIDs) add(topic, id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.ids[topic]) < 50 {
		k.ids[topic] = append(k.ids[topic], id)
	}
}

func (k *knownIDs) any(topic string, rnd *rand.Rand) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.ids[topic]) == 0 {
		return ""
	}
	return k.ids[topic][rnd.IntN(len(k.ids[topic]))]
}

// client does at random what the protocol allows, on one connection after the other.
type client struct {
	rig    *rig
	rnd    *rand.Rand
	count  *counters
	ids    *knownIDs
	conn   *wsConn
	came   chan wireFrame
	agenda []task
	subs   map[groupKey]*held
	asked  sync.Map // PUBLISH frames by corr, for knownIDs
	corrs  bool
	slow   bool                // it holds most events for long
	used   map[string][]string // ids that it gave, by topic
	keys   *rand.Rand          // draws keys for ordered groups; nil where there are none
}

// held is a subscription that it has, as far as it knows.
type held struct {
	plan   *groupPlan
	leased time.Duration
	paused bool
	recent []string
	batch  []string
}

// task is something to do later.
type task struct {
	at time.Time
	do func()
}

func (c *client) later(d time.Duration, do func()) {
	c.agenda = append(c.agenda, task{time.Now().Add(d), do})
}

func (c *client) between(least, most int) time.Duration {
	return time.Duration(least+c.rnd.IntN(most-least)) * time.Millisecond
}

// run acts until ctx ends, and then leaves.
func (c *client) run(ctx context.Context) {
	for ctx.Err() == nil {
		if !c.connect() {
			wait(ctx, 100*time.Millisecond)
			continue
		}
		c.act(ctx)
	}
	if c.conn == nil {
		return
	}
	if c.rnd.IntN(2) == 0 {
		c.conn.hear()
		for k := range c.subs {
			c.send(&wireFrame{Op: "UNSUBSCRIBE", Topic: k.topic, Group: k.group})
		}
	}
	c.leave(endHalf)
}

func (c *client) leave(how int) {
	c.conn.end(how)
	t := time.NewTimer(20 * time.Second)
	defer t.Stop()
	for {
		select {
		case <-c.came:
		case <-c.conn.ended:
			return
		case <-t.C:
			c.conn.end(endAbrupt)
			_ = c.conn.tcp.Close() // a hub that does not close in turn is the rules' business
			return
		}
	}
}

// connect opens a connection to any hub.
func (c *client) connect() bool {
	h := c.rig.hubs[c.rnd.IntN(len(c.rig.hubs))]
	came := make(chan wireFrame, 100_000)
	conn, err := dialHub(c.rig.rec, int(c.count.conns.Add(1)), h.addr, h.name, c.rnd.IntN(4) == 0, func(text []byte) {
		var f wireFrame
		if json.Unmarshal(text, &f) == nil {
			came <- f
		}
	})
	if err != nil {
		return false
	}
	c.conn, c.came, c.agenda, c.subs = conn, came, nil, map[groupKey]*held{}
	c.asked.Clear()
	c.corrs = !c.rig.plan.has("corrless") || c.rnd.IntN(4) > 0
	c.send(&wireFrame{Op: "AUTH", Token: "x", Caps: []string{"group_reset", "events_lost"}})
	for range 1 + c.rnd.IntN(3) {
		c.subscribe()
	}
	return true
}

func (c *client) send(f *wireFrame) {
	if c.corrs {
		corr := strconv.FormatInt(c.count.corrs.Add(1), 36)
		f.Corr = &corr
		if f.Op == "PUBLISH" {
			c.asked.Store(corr, f.Topic)
		}
	}
	c.conn.send(f)
}

// act does this and that until ctx or the connection ends.
func (c *client) act(ctx context.Context) {
	next := time.NewTimer(0)
	defer next.Stop()
	for {
		wake := time.Duration(-1)
		now := time.Now()
		for i := 0; i < len(c.agenda); i++ {
			if t := c.agenda[i]; !t.at.After(now) {
				c.agenda = append(c.agenda[:i], c.agenda[i+1:]...)
				i--
				t.do()
			}
		}
		for _, t := range c.agenda {
			if d := time.Until(t.at); wake < 0 || d < wake {
				wake = max(d, 0)
			}
		}
		var due <-chan time.Time
		var alarm *time.Timer
		if wake >= 0 {
			alarm = time.NewTimer(wake)
			due = alarm.C
		}
		select {
		case f := <-c.came:
			c.took(&f)
		case <-next.C:
			c.anything()
			next.Reset(c.between(20, 150))
		case <-due:
		case <-c.conn.ended:
			return
		case <-ctx.Done():
			return
		}
		if alarm != nil {
			alarm.Stop()
		}
	}
}

// anything does one random thing.
func (c *client) anything() {
	switch n := c.rnd.IntN(1000); {
	case n < 550:
		for range 1 + c.rnd.IntN(4) {
			c.publish()
		}
	case n < 660:
		c.subscribe()
	case n < 690:
		if k, _, ok := c.anySub(); ok {
			delete(c.subs, k)
			c.send(&wireFrame{Op: "UNSUBSCRIBE", Topic: k.topic, Group: k.group})
		}
	case n < 740 && c.rig.plan.has("pause"):
		c.pause()
	case n < 760:
		if k, s, ok := c.anySub(); ok && len(s.recent) > 0 { // perhaps no longer in flight
			c.send(&wireFrame{Op: "MODACK", Topic: k.topic, Group: k.group, ID: s.recent[c.rnd.IntN(len(s.recent))], ExtendMS: 1_000 + c.rnd.IntN(4_000)})
		}
	case n < 770:
		if k, _, ok := c.anySub(); ok {
			c.send(&wireFrame{Op: "ACK", Topic: k.topic, Group: k.group, IDs: []string{}})
		}
	case n < 782:
		c.leave([]int{endAbrupt, endHalf, endClose}[c.rnd.IntN(3)])
	case n < 800 && c.rig.plan.has("deaf"):
		c.conn.deaf()
		conn := c.conn
		c.later(c.between(200, 5_000), conn.hear)
	}
}

func (c *client) anySub() (groupKey, *held, bool) {
	for k, s := range c.subs { // any will do
		return k, s, true
	}
	return groupKey{}, nil, false
}

func (c *client) publish() {
	n := c.count.payloads.Add(1)
	f := &wireFrame{Op: "PUBLISH", Topic: c.rig.plan.topics[c.rnd.IntN(len(c.rig.plan.topics))]}
	f.Payload = json.RawMessage(fmt.Sprintf(`{"n":%d,"big":123456789012345678901234567890,"x":"é/"}`, n))
	o := &wireOptions{}
	switch used := c.used[f.Topic]; {
	case c.rnd.IntN(40) == 0 && len(used) > 0:
		o.ID = used[c.rnd.IntN(len(used))]
	case c.rnd.IntN(4) == 0:
		o.ID = fmt.Sprintf("own-%d", n)
		c.used[f.Topic] = append(used, o.ID)
	}
	if c.rnd.IntN(4) == 0 {
		o.Key = "host:" + strconv.Itoa(c.rnd.IntN(5))
	}
	if o.Key == "" && c.keys != nil && c.keys.IntN(3) == 0 { // more keys, which share slots
		o.Key = "order:" + strconv.Itoa(c.keys.IntN(12))
	}
	if o.Key != "" && o.ID == "" && c.rnd.IntN(5) == 0 && c.rig.plan.has("tombstones") {
		o.ID, o.Tombstone = tombstoneID+strconv.FormatInt(n, 10), true
		f.Payload = json.RawMessage("null")
	}
	if o.ID != "" || o.Key != "" {
		f.Opts = o
	}
	c.send(f)
}

func (c *client) subscribe() {
	p := c.rig.plan.groups[c.rnd.IntN(len(c.rig.plan.groups))]
	if c.rig.rec.now() < p.opens {
		return
	}
	if p.lone && !c.take(p) {
		return
	}
	k := groupKey{p.topics[0], p.name}
	if c.subs[k] != nil && c.rnd.IntN(10) > 0 {
		return // now and then it asks all the same, and is refused
	}
	o := p.options(c.rnd, c.ids, c.rig.rec.began)
	leased := 30 * time.Second
	if o.AckTimeoutMS > 0 {
		leased = time.Duration(o.AckTimeoutMS) * time.Millisecond
	}
	if c.subs[k] == nil {
		c.subs[k] = &held{plan: p, leased: leased}
	}
	c.send(&wireFrame{Op: "SUBSCRIBE", Topic: k.topic, Group: k.group, Opts: o})
}

// take makes this client the one member of a group.
func (c *client) take(p *groupPlan) bool {
	c.ids.mu.Lock()
	defer c.ids.mu.Unlock()
	was := p.taken
	p.taken = true
	return !was
}

// pause pauses a subscription, and mostly resumes it soon.
func (c *client) pause() {
	k, s, ok := c.anySub()
	if !ok || s.paused {
		return
	}
	s.paused = true
	c.send(&wireFrame{Op: "PAUSE", Topic: k.topic, Group: k.group})
	resume := func() {
		s.paused = false
		if c.subs[k] == s {
			c.send(&wireFrame{Op: "RESUME", Topic: k.topic, Group: k.group})
		}
	}
	if c.rnd.IntN(3) == 0 {
		resume()
		return
	}
	c.later(c.between(50, 2_000), resume)
}

// took does something about a frame.
func (c *client) took(f *wireFrame) {
	if f.Op == "OK" && f.ID != "" && f.Corr != nil {
		if topic, ok := c.asked.LoadAndDelete(*f.Corr); ok {
			c.ids.add(fmt.Sprint(topic), f.ID)
		}
		return
	}
	if f.Op != "EVENT" || f.Event == nil {
		return
	}
	k := groupKey{f.Topic, f.Group}
	s := c.subs[k]
	if s == nil {
		return
	}
	if s.recent = append(s.recent, f.Event.ID); len(s.recent) > 10 {
		s.recent = s.recent[1:]
	}
	c.settle(k, s, f.Event.ID)
}

func (c *client) settle(k groupKey, s *held, id string) {
	ack := func() {
		if c.subs[k] == s {
			c.send(&wireFrame{Op: "ACK", Topic: k.topic, Group: k.group, ID: id})
		}
	}
	nack := &wireFrame{Op: "NACK", Topic: k.topic, Group: k.group, ID: id}
	share := func(of time.Duration, least, most int) time.Duration {
		return of * time.Duration(least+c.rnd.IntN(most-least)) / 100
	}
	switch n := c.rnd.IntN(100); {
	case c.slow && n < 60:
		c.later(share(min(s.leased, 9*time.Second), 50, 95), ack)
	case n < 50:
		ack()
	case n < 62:
		c.later(c.between(1, 60), ack)
	case n < 70:
		c.gather(k, s, id)
	case n < 77:
		if c.rnd.IntN(2) == 0 {
			nack.Reason = "reason " + id[max(0, len(id)-4):]
		}
		c.send(nack)
	case n < 81:
		d := []int{0, 100, 1_000, 2_500}[c.rnd.IntN(4)]
		nack.DelayMS = &d
		c.send(nack)
	case n < 86:
		extend := 1_000 + c.rnd.IntN(3_000)
		c.send(&wireFrame{Op: "MODACK", Topic: k.topic, Group: k.group, ID: id, ExtendMS: extend})
		c.later(share(time.Duration(extend)*time.Millisecond, 10, 130), ack)
	case n < 88: // too late, if it is not too long for this run
		c.later(min(s.leased, 9*time.Second)+c.between(0, 1_500), ack)
	case n < 93: // never
	case n < 95:
		ack()
		ack()
	default:
		c.later(share(min(s.leased, 9*time.Second), 50, 95), ack)
	}
}

// gather acknowledges several at once.
func (c *client) gather(k groupKey, s *held, id string) {
	s.batch = append(s.batch, id)
	if len(s.batch) > 1 {
		return
	}
	c.later(c.between(20, 300), func() {
		if c.subs[k] == s {
			c.send(&wireFrame{Op: "ACK", Topic: k.topic, Group: k.group, IDs: s.batch})
		}
		s.batch = nil
	})
}
