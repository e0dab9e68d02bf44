package jetstream

import (
	"bytes"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

// probeWait is how long a probe is waited for before another is sent.
const probeWait = 2 * time.Second

// probe is a question that is asked again and again, to know that the way to and from somebody is
// open. Its methods may be called concurrently.
type probe struct {
	asked   atomic.Int64 // when the oldest question that was not answered was asked; 0: all were
	heard   atomic.Int64 // when the newest question that was answered was asked
	waiting atomic.Bool  // a question is under way
}

// begin reports whether a question is to be asked now.
func (p *probe) begin(now int64) bool {
	if !p.waiting.CompareAndSwap(false, true) {
		return false
	}
	p.asked.CompareAndSwap(0, max(now, 1))
	return true
}

// end takes the outcome of the question that was asked at the given time.
func (p *probe) end(sent int64, answered bool) {
	if answered {
		p.heard.Store(max(sent, p.heard.Load()))
		p.asked.Store(0)
	}
	p.waiting.Store(false)
}

// reset is for a way that is new.
func (p *probe) reset(now int64) {
	p.asked.Store(0)
	p.heard.Store(now)
}

// silent reports whether a question waits for its answer for longer than limit.
func (p *probe) silent(now, limit int64) bool {
	asked := p.asked.Load()
	return asked != 0 && now-asked > limit
}

// path is the way over one connection to a group's consumer, wherever in a cluster that is. While
// it is silent, what subscribers say about deliveries is kept: sent now, it might arrive when the
// server has given the event to another.
type path struct {
	probe
	group *group
	held  atomic.Int64 // deliveries that are held or leased over it

	mu sync.Mutex
	// bounded by what was held when the path fell silent, and what arrives meanwhile
	kept []settlement
	acks recentAcks
}

type settlement struct {
	d    *Delivery
	what []byte
}

// silent reports whether nothing may be sent about deliveries of the group over the link: a
// question to the consumer or to the hub itself waits for its answer for too long, or the hub had
// no time to ask.
func (g *group) silent(l *link, now int64) bool {
	limit := int64(g.fence.silence)
	return g.paths[l.index].silent(now, limit) || l.echo.silent(now, limit) || now-g.bus.probed.Load() > limit+int64(g.bus.probeEvery())
}

// tell sends what the subscriber, or the hub for it, says about a delivery that has ended here;
// later, if the path is silent.
func (d *Delivery) tell(what []byte) {
	if d.loan != nil {
		how := byte(loanNaked)
		if bytes.Equal(what, ackNow) {
			how = loanAcked
		}
		d.loan.end(loanEnd{What: how})
		return
	}
	l, b := d.m.sub.link, d.group.bus
	if d.group.silent(l, b.clock.now()) {
		d.group.paths[l.index].keep(settlement{d: d, what: what})
		return
	}
	d.send(what)
	if bytes.Equal(what, ackNow) {
		d.noteAck()
	}
}

// acknowledge is tell for acknowledgements of many deliveries over one link.
func acknowledge(ds []*Delivery, now int64) {
	var g *group
	silent := false
	for _, d := range ds {
		if d.group != g {
			g = d.group
			silent = g.silent(d.m.sub.link, now)
		}
		if silent {
			g.paths[d.m.sub.link.index].keep(settlement{d: d, what: ackNow})
			continue
		}
		d.send(ackNow)
		d.noteAck()
	}
}

// sendInTime is send for what could not be said at once: it says nothing when the server may have
// given the event to another.
func (d *Delivery) sendInTime(what []byte) {
	if d.inTime() {
		d.tell(what)
	}
}

// inTime reports whether the server surely still keeps d for the hub.
func (d *Delivery) inTime() bool {
	s := d.m.sub
	now := s.bus.clock.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	return d.usable(now) && d.cuts == s.link.cuts.Load()
}

// keep keeps a settlement until the path is open, or the server may have given the event to
// another.
func (p *path) keep(k settlement) {
	p.change(func(kept []settlement) []settlement { return append(kept, k) })
}

// change changes what is kept, or the recent acknowledgements.
func (p *path) change(f func([]settlement) []settlement) {
	p.mu.Lock()
	before := p.keepsAny()
	p.kept = f(p.kept)
	after := p.keepsAny()
	p.mu.Unlock()
	switch {
	case !before && after:
		p.group.bus.groups.keeps(p.group, 1)
	case before && !after:
		p.group.bus.groups.keeps(p.group, -1)
	}
}

// keepsAny reports whether something waits to be sent. p.mu is held.
func (p *path) keepsAny() bool { return len(p.kept) > 0 || p.acks.doubted }

// release sends what was kept, and the recent acknowledgements if they may have been lost.
func (p *path) release(l *link) {
	var kept []settlement
	var again []string
	p.change(func(all []settlement) []settlement {
		kept, again = all, p.acks.takeDoubted()
		return nil
	})
	for _, reply := range again {
		_ = l.nc.Publish(reply, ackNow)
	}
	for _, k := range kept {
		k.d.sendInTime(k.what)
	}
}

// dropLate drops what was kept for too long.
func (p *path) dropLate() {
	p.mu.Lock()
	kept := slices.Clone(p.kept)
	p.mu.Unlock()
	late := make(map[*Delivery]bool)
	for _, k := range kept {
		if !k.d.inTime() {
			late[k.d] = true
		}
	}
	now := p.group.bus.clock.now()
	p.change(func(all []settlement) []settlement {
		p.acks.dropDoubted(now, int64(p.group.fence.ackWait))
		return slices.DeleteFunc(all, func(k settlement) bool { return late[k.d] })
	})
}

// keeps reports whether something waits to be sent.
func (p *path) keeps() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.keepsAny()
}

// sent waits until nothing is kept.
func (p *path) sent(ctx context.Context) error {
	if !p.keeps() {
		return nil
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for p.keeps() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// forget drops what was kept: the connection was lost.
func (p *path) forget() {
	p.change(func([]settlement) []settlement {
		p.acks = recentAcks{}
		return nil
	})
}

// probeEvery is how often each connection, and each consumer of which the hub holds something, is
// asked.
func (c *core) probeEvery() time.Duration { return max(margin(c.cfg.AckWait)/5, 10*time.Millisecond) }

// probePaths asks over each connection whether it is open, and each consumer of which the hub holds
// something whether it hears us, until the bus closes.
func (b *Bus) probePaths() {
	tick := time.NewTicker(b.probeEvery())
	defer tick.Stop()
	for {
		select {
		case <-b.ctx.Done():
			return
		case <-tick.C:
		}
		now := b.clock.now()
		b.probed.Store(now)
		for _, l := range b.links {
			l.probe(now)
		}
		b.groups.eachGroup(func(g *group) {
			for i := range g.paths {
				g.paths[i].turnAcks(now)
				if p := &g.paths[i]; p.held.Load() > 0 || p.asked.Load() != 0 {
					g.probe(b.links[i], p, now)
				}
			}
		})
		b.groups.eachKeeping(func(g *group) {
			for i := range g.paths {
				if p := &g.paths[i]; p.keeps() {
					p.dropLate()
					g.probe(b.links[i], p, now)
				}
			}
		})
	}
}

// probe asks the server, over the connection, for an answer to the hub itself. After a silence, the
// answer counts when all that came before the answer was received: deliveries wait for their inbox
// to look at them, and are as old as the silence.
func (l *link) probe(now int64) {
	if l.mute || !l.up.Load() || !l.echo.begin(now) {
		return
	}
	answered := func() {
		l.echo.end(now, true)
		l.core.linkHooks.heard(l)
	}
	err := l.askUntil(&nats.Msg{Subject: echoSubject}, now+int64(probeWait), askerFunc(func(_ *nats.Msg, err error) {
		switch {
		case err != nil:
			l.echo.end(now, false)
		case now-l.echo.heard.Load() <= 2*int64(l.core.probeEvery()):
			answered()
		case l.nc.Barrier(answered) != nil:
			l.echo.end(now, false)
		}
	}))
	if err != nil {
		l.echo.end(now, false)
	}
}

// open sends what was kept if nothing is silent any more.
func (p *path) open(g *group, l *link) {
	now := g.bus.clock.now()
	switch {
	case !p.keeps() || g.silent(l, now):
	case g.memory || p.doubtful(): // another hub may have made a consumer of the same name anew
		g.ask(l, now, func(*consumerState) { p.release(l) })
	default:
		p.release(l)
	}
}

// probe asks the consumer. It works its acks off in order, so its answer to one about no event
// comes after all others.
func (g *group) probe(l *link, p *path, now int64) {
	if !l.up.Load() || !p.begin(now) {
		return
	}
	msg := &nats.Msg{Subject: g.keepAliveSubject(), Data: progress}
	err := l.askUntil(msg, now+int64(probeWait), askerFunc(func(reply *nats.Msg, err error) {
		answered := err == nil && !noResponders(reply)
		p.end(now, answered)
		switch {
		case answered:
			p.open(g, l)
		case err == nil:
			g.doubtAcks()
			g.verify()
		}
	}))
	if err != nil {
		p.end(now, false)
	}
}

// keepAliveSubject is the subject of an ack about no event: the consumer answers it, and takes it
// for a sign of life.
func (g *group) keepAliveSubject() string { return g.acksPrefix() + noEvent }

// noEvent ends the subject of an ack about no event.
const noEvent = "1.9223372036854775807.1.0.0"

// acksPrefix is what the ack subjects of the consumer begin with.
func (g *group) acksPrefix() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.acks != "" {
		return g.acks
	}
	return "$JS.ACK." + g.topic.stream.name + "." + g.consumer + "."
}

// used reports whether anything of the group has come to this hub.
func (g *group) used() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.acks != ""
}

// sentSince is a moment after which the server sent what arrives now over the link: the newest that
// an answer stands for.
func (l *link) sentSince(now int64) int64 {
	if l.mute {
		return now
	}
	return min(now, l.echo.heard.Load())
}
