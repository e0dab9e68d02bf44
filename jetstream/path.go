package jetstream

import (
	"bytes"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/internal/conn"
)

// path is the way over one connection to a group's consumer, wherever in a cluster that is. While
// it is silent, what subscribers say about deliveries is kept: sent now, it might arrive when the
// server has given the event to another.
type path struct {
	conn.Probe
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
func (g *group) silent(l *conn.Link, now int64) bool {
	limit := int64(g.fence.silence)
	return g.paths[l.Index].Silent(now, limit) || l.Echo.Silent(now, limit) || now-g.bus.probed.Load() > limit+int64(g.bus.conn.ProbeEvery())
}

// tell sends what the subscriber, or the hub for it, says about a delivery that has ended here;
// later, if the path is silent.
func (d *Delivery) tell(what []byte) {
	if d.loan != nil {
		how := byte(loanNaked)
		if bytes.Equal(what, conn.AckNow) {
			how = loanAcked
		}
		d.loan.end(loanEnd{What: how})
		return
	}
	l, b := d.m.sub.link, d.group.bus
	if d.group.silent(l, b.clock.Now()) {
		d.group.paths[l.Index].keep(settlement{d: d, what: what})
		return
	}
	d.send(what)
	if bytes.Equal(what, conn.AckNow) {
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
			g.paths[d.m.sub.link.Index].keep(settlement{d: d, what: conn.AckNow})
			continue
		}
		d.send(conn.AckNow)
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
	now := s.bus.clock.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	return d.usable(now) && d.cuts == s.link.Cuts.Load()
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
func (p *path) release(l *conn.Link) {
	var kept []settlement
	var again []string
	p.change(func(all []settlement) []settlement {
		kept, again = all, p.acks.takeDoubted()
		return nil
	})
	for _, reply := range again {
		_ = l.NC.Publish(reply, conn.AckNow)
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
	now := p.group.bus.clock.Now()
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

// probePaths asks over each connection whether it is open, and each consumer of which the hub holds
// something whether it hears us, until the bus closes.
func (b *Bus) probePaths() {
	tick := time.NewTicker(b.conn.ProbeEvery())
	defer tick.Stop()
	for {
		select {
		case <-b.conn.Ctx.Done():
			return
		case <-tick.C:
		}
		now := b.clock.Now()
		b.probed.Store(now)
		for _, l := range b.conn.Links {
			l.Probe(now)
		}
		b.groups.eachGroup(func(g *group) {
			for i := range g.paths {
				g.paths[i].turnAcks(now)
				if p := &g.paths[i]; p.held.Load() > 0 || p.Asked.Load() != 0 {
					g.probe(b.conn.Links[i], p, now)
				}
			}
		})
		b.groups.eachKeeping(func(g *group) {
			for i := range g.paths {
				if p := &g.paths[i]; p.keeps() {
					p.dropLate()
					g.probe(b.conn.Links[i], p, now)
				}
			}
		})
	}
}

// open sends what was kept if nothing is silent any more.
func (p *path) open(g *group, l *conn.Link) {
	now := g.bus.clock.Now()
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
func (g *group) probe(l *conn.Link, p *path, now int64) {
	if !l.Up.Load() || !p.Begin(now) {
		return
	}
	msg := &nats.Msg{Subject: g.keepAliveSubject(), Data: conn.InProgress}
	err := l.AskUntil(msg, now+int64(conn.ProbeWait), conn.AskerFunc(func(reply *nats.Msg, err error) {
		answered := err == nil && !conn.NoResponders(reply)
		p.End(now, answered)
		switch {
		case answered:
			p.open(g, l)
		case err == nil:
			g.doubtAcks()
			g.verify()
		}
	}))
	if err != nil {
		p.End(now, false)
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
	return "$JS.ACK." + g.topic.Stream.Name + "." + g.consumer + "."
}

// used reports whether anything of the group has come to this hub.
func (g *group) used() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.acks != ""
}
