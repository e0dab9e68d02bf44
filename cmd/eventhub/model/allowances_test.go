//go:build unix

package model

import "time"

// allowance says what a fault excuses. Everything that is not in this table is a promise that
// faults do not break.
type allowance struct {
	kind string
	// atLeast is the length below which the fault excuses nothing: the hub's fences are made for
	// that.
	atLeast func(settings) time.Duration
	// voids: the leases of the hub in Target end (those of all hubs, if allHubs), and what it had
	// fetched is forgotten: the protocol's "leases of a hub that died".
	voids, allHubs bool
	// skips: attempts may skip numbers across it.
	skips bool
	// losesAcks: an ACK that was answered OK while the fault was there, or up to justBefore it, may
	// come to nothing.
	losesAcks bool
	// rewinds: attempts may repeat, or fall, across it.
	rewinds bool
	// deposes: in a cluster, a leader that was away goes on for a moment when it comes back, until
	// it hears of the new one. Attempts of what it delivered then may repeat, or fall.
	// They also fall when a delivery waited between servers.
	deposes bool
	// brief: losesAcks and rewinds are about its beginning only, not about the time until all
	// copies are up to date again.
	brief bool
	// holdsBack: what was said just before it, and until the hub knows of it, comes when it is
	// over.
	holdsBack bool
	// notesLate: what the hub notes of deliveries that no client had may come when another hub has
	// the event, so that an attempt is shown twice: the hub, or in a cluster the leader of the
	// notes, was away for longer than the margin.
	notesLate bool
	// leaderless: in a cluster, leases that are due to be kept end, for want of an answer.
	leaderless bool
	// ages: in a cluster, a new leader takes the deliveries of the last leader's last moments for
	// expired, if their events were stored longer ago than AckWait
	// (docs/upstream/nats-server-stored-time.md).
	ages bool
	// ends: connections to the hub may end while it is there, and frames may stay unanswered.
	ends bool
}

// justBefore is what "its last moments (about 200 ms)" is on a busy machine. cmd/eventhub's kill
// test takes the same.
const justBefore = 600 * time.Millisecond

// reconnected is when a hub has all its connections again after a fault.
const reconnected = 2 * time.Second

// allowances, from protocol.md, section 3, and ARCHITECTURE.md, "Fencing".
var allowances = []allowance{
	// "Leases of a hub that died end within AckWait"; attempts "may skip a number when a hub died".
	{kind: "kill-hub", skips: true, voids: true, losesAcks: true, ends: true},
	// A drained hub gives everything back, and settles what it said OK to.
	{kind: "stop-hub", voids: true, ends: true},
	// A process that stood still for longer than the stall limit gives up all leases. Half of the
	// limit must do no harm.
	{kind: "freeze-hub", skips: true, atLeast: halfStall, voids: true, losesAcks: true, notesLate: true},
	// The same, where the machine was too busy to run the hub. The hub says so itself.
	{kind: "stall-hub", skips: true, atLeast: halfStall, voids: true, losesAcks: true, notesLate: true},
	// "A broken connection drops all leases at once."
	{kind: "cut", skips: true, voids: true, losesAcks: true},
	// "A server that is killed may deliver again what was acknowledged in its last moments." The
	// leases of hubs that were connected to it end by "cut"; those of other hubs stay. In a
	// cluster, the consumers that it led have no leader for as long as an election takes: nothing
	// keeps their leases, so the hubs give them up before the server gives the events to others.
	{kind: "kill-node", losesAcks: true, rewinds: true, brief: true, leaderless: true, notesLate: true},
	// A server that is stopped in order takes acks with it that reach it in that moment, and "may
	// resume its delivery count from an older number".
	{kind: "stop-node", losesAcks: true, rewinds: true, brief: true, ages: true},
	// A frozen node, or a link that holds bytes back, for about the margin or longer: no touch gets
	// through.
	{kind: "freeze-node", skips: true, atLeast: mostOfMargin, voids: true, allHubs: true, losesAcks: true, notesLate: true, holdsBack: true, deposes: true},
	{kind: "hold-link", skips: true, atLeast: mostOfMargin, voids: true, losesAcks: true, notesLate: true, holdsBack: true},
	// The same for a part of the network: a node apart from the others, one of a hub's links, and
	// either of them one way only. The hub of an isolated node goes on to hear the node.
	{kind: "part-node", skips: true, atLeast: mostOfMargin, voids: true, allHubs: true, losesAcks: true, notesLate: true, holdsBack: true, deposes: true},
	{kind: "part-node-oneway", skips: true, atLeast: mostOfMargin, voids: true, allHubs: true, losesAcks: true, notesLate: true, holdsBack: true, deposes: true},
	{kind: "hold-one-link", skips: true, atLeast: mostOfMargin, voids: true, losesAcks: true, notesLate: true, holdsBack: true},
	{kind: "hold-link-oneway", skips: true, atLeast: mostOfMargin, voids: true, losesAcks: true, notesLate: true, holdsBack: true},
	// A node whose disk is full, or was lost, is one that was killed: it comes back when there is
	// room, or empty.
	{kind: "fill-disk", losesAcks: true, rewinds: true, leaderless: true, notesLate: true},
	{kind: "lose-disk", losesAcks: true, rewinds: true, brief: true, leaderless: true, notesLate: true},
	// The hub's clock went on by more than the stall limit, as that of a machine that slept: it
	// gives up all leases.
	{kind: "jump-hub", skips: true, voids: true, losesAcks: true},
	// Half a second at a time is far below the margin; so are slow routes; and the leader of the
	// cluster has no part in deliveries.
	{kind: "pulse-node"},
	{kind: "delay-route"},
	{kind: "stepdown-meta"},
	// A slow link is no excuse at all: its delays are far below the margin.
	{kind: "delay-link"},
	// A leader that steps down tells the others all that it took.
	{kind: "stepdown", ages: true},
	// Holes in the harness's own time say that the machine stood still. They are told apart only by
	// the rules about time.
	{kind: "stall-harness"},
}

func margin(s settings) time.Duration { return min(5*time.Second, s.ackWait()/3) }

// mostOfMargin leaves a quarter for what a busy machine adds.
func mostOfMargin(s settings) time.Duration { return margin(s) * 3 / 4 }

func halfStall(s settings) time.Duration { return min(2*time.Second, margin(s)*3/5) / 2 }

// fault is one that happened.
type fault struct {
	allowance
	number   string
	target   string // hub "h0", node "n0", the links of hub "h0"; "-" for none of them
	from, to time.Duration
}

func (f *fault) length() time.Duration { return f.to - f.from }

// counts reports whether the fault was long enough to excuse anything.
func (f *fault) counts(s settings) bool { return f.atLeast == nil || f.length() >= f.atLeast(s) }

// during reports whether the fault may lose acks, or rewind attempts, between from and to.
func (f *fault) during(from, to time.Duration) bool {
	until := f.to
	if f.brief {
		until = min(until, f.from+reconnected)
	}
	return f.from <= to && until >= from
}

// within reports whether any of the faults that want picks was there between from and to.
func (l *ledger) within(from, to time.Duration, want func(*fault) bool) bool {
	for _, f := range l.faults {
		if f.from <= to && f.to >= from && f.counts(l.set) && want(f) {
			return true
		}
	}
	return false
}

// voidedAt is when a fault ended the leases of a hub, at the earliest: in [from, to], or never.
func (l *ledger) voidedAt(hub string, from, to time.Duration) time.Duration {
	at := never
	for _, f := range l.faults {
		if f.voids && (f.allHubs || f.target == hub) && f.from <= to && f.to >= from && f.counts(l.set) {
			at = min(at, max(f.from, from))
		}
		// A lease that was kept a moment before stays for longer than this.
		if since := f.from + margin(l.set)/2; f.leaderless && l.set.Cluster && since <= to && f.to >= max(since, from) {
			at = min(at, max(since, from))
		}
	}
	return at
}

// agedAt is when a new leader may have taken a delivery for expired, at the earliest; or never. It
// knows better as soon as the hub's in-progress ack reaches it, which follows each delivery.
func (l *ledger) agedAt(d *delivery) time.Duration {
	s := l.byID[[2]string{d.topic, d.id}]
	if s == nil || l.sentN[s.n] == nil || !l.set.Cluster {
		return never
	}
	at, old := never, l.sentN[s.n].sent+l.set.ackWait()
	for _, f := range l.faults {
		handed := min(f.to, f.from+reconnected)
		if from := max(f.from, d.lo, old); f.ages && d.at >= f.from-justBefore && from <= handed {
			at = min(at, from)
		}
	}
	return at
}

// mayLoseAck reports whether an ACK that was on its way between sent and answered may have come to
// nothing.
func (l *ledger) mayLoseAck(hub string, sent, answered time.Duration) bool {
	return l.within(sent, answered+justBefore, func(f *fault) bool {
		return f.losesAcks && f.during(sent, answered+justBefore) && (f.target == hub || f.target == "-" || f.target[0] == 'n' || f.allHubs)
	})
}
