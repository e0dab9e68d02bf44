//go:build unix

package model

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// rules are the promises. Each is a pure function of what happened.
var rules = []struct {
	name string
	what string
	find func(*ledger) []violation
}{
	{"stored", "what was answered OK is stored exactly once, and nothing is that should not be", stored1},
	{"order", "publishes of a connection, and first deliveries to a lone member, keep their order", order},
	{"lost", "every event of a group's range is acknowledged by who holds it, or dead-lettered", lost},
	{"range", "no event comes from before the group's start", outOfRange},
	{"holder", "an event is leased to one member at a time", holder},
	{"acked", "what was acknowledged in time does not come again", ackedAgain},
	{"backoff", "a refused event does not come before its time", backOff},
	{"inflight", "no more than maxInFlight events are leased to a subscription", inFlight},
	{"attempts", "attempts count deliveries from 1, one by one", attempts},
	{"letters", "a dead letter for each last failure, and for nothing else", letters},
	{"answers", "each frame is answered within 15 s", answers},
	{"hoarded", "an event that nobody holds comes to an idle member at once", hoarded},
	{"keys", "of a key of an ordered group one event is leased at a time, and the next comes when it is settled", keysInOrder},
	{"slots", "members of ordered groups get events of the slots that they have, and a slot is one member's", slots},
	{"cursors", "nothing is unsettled at or before the position of a group", cursors},
	{"latest", "the newest event of a key is the newest in the stream", latest},
	{"replay", "a replay is a piece of the stream", replays},
	{"states", "the states of a projection are the fold of the stream", states},
	{"outbox", "each committed row of an outbox is stored once, in the order of its key", outboxes},
	{"handlers", "programs see what came to the connections of their libraries", handlers},
	{"frames", "frames and connections are as the protocol has them", frames},
}

// check asks all rules about a history.
func check(h history) (*ledger, []violation, error) {
	l, err := newLedger(h)
	if err != nil {
		return nil, nil, err
	}
	var all []violation
	for _, r := range rules {
		found := r.find(l)
		for i := range found {
			found[i].rule = r.name
		}
		all = append(all, found...)
	}
	return l, all, nil
}

// describe is a violation with the lines of the history that it is about.
func (l *ledger) describe(v violation, most int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d: rule %q is broken", l.set.Seed, v.rule)
	if v.topic != "" {
		fmt.Fprintf(&b, ", topic %s", v.topic)
	}
	if v.group != "" {
		fmt.Fprintf(&b, ", group %s", v.group)
	}
	if v.id != "" {
		fmt.Fprintf(&b, ", event %s", v.id)
	}
	fmt.Fprintf(&b, ": %s\n", v.msg)
	lines := l.slice(v)
	if left := len(lines) - most; left > 0 {
		lines = lines[left:]
		fmt.Fprintf(&b, "    (%d lines left out)\n", left)
	}
	for _, e := range lines {
		line := e.String()
		if len(line) > 400 {
			line = line[:400] + "…"
		}
		b.WriteString("    " + line + "\n")
	}
	return b.String()
}

// slice is what of the history is about a violation: the event, the group's subscriptions, faults,
// and what the connections concerned went through.
func (l *ledger) slice(v violation) history {
	from, to := v.from-3*time.Second, v.to+time.Second
	whole := v.from == 0 && v.to == 0
	concerned := map[int]bool{}
	if g := l.groups[groupKey{v.topic, v.group}]; g != nil {
		for _, f := range g.starts {
			concerned[f.conn.number] = true
		}
	}
	for _, e := range l.h {
		if v.id != "" && v.group == "" && e.conn > 0 && strings.Contains(e.text, `"`+v.id+`"`) {
			concerned[e.conn] = true
		}
	}
	var lines history
	for _, e := range l.h {
		aboutEvent := v.id != "" && (strings.Contains(e.text, `"`+v.id+`"`) || e.kind == kindStored && strings.Contains(e.text, " "+v.id+" "))
		inTime := whole || e.at >= from && e.at <= to
		switch {
		case aboutEvent && (v.group == "" || e.kind == kindStored || e.kind == kindLetter || strings.Contains(e.text, `"`+v.group+`"`) || strings.Contains(e.text, `"PUBLISH"`)):
		case !inTime:
			continue
		case e.kind == kindFault, e.kind == kindOver, e.kind == kindNote && v.group == "":
		case !concerned[e.conn] && v.id != "" || e.conn == 0:
			continue
		case e.kind == kindGot && strings.Contains(e.text, `"EVENT"`), e.kind == kindStored:
			continue
		case e.kind == kindSent && (strings.Contains(e.text, `"ACK"`) || strings.Contains(e.text, `"NACK"`) || strings.Contains(e.text, `"PUBLISH"`)):
			continue
		case e.kind == kindSent && v.group != "" && !strings.Contains(e.text, `"`+v.group+`"`):
			continue
		case e.kind == kindGot:
			continue
		}
		lines = append(lines, e)
	}
	return lines
}

// eachEvent calls f for each event that a group was given, in a fixed order.
func (l *ledger) eachEvent(f func(g *group, e *event)) {
	for _, g := range l.sortedGroups() {
		ids := make([]string, 0, len(g.events))
		for id := range g.events {
			ids = append(ids, id)
		}
		slices.Sort(ids)
		for _, id := range ids {
			f(g, g.events[id])
		}
	}
}

func (l *ledger) sortedGroups() []*group {
	all := make([]*group, 0, len(l.groups))
	for _, g := range l.groups {
		all = append(all, g)
	}
	slices.SortFunc(all, func(a, b *group) int {
		return cmp.Or(strings.Compare(a.topic, b.topic), strings.Compare(a.group, b.group))
	})
	return all
}

// at gives a violation its place.
func (g *group) broken(id string, from, to time.Duration, format string, args ...any) violation {
	return violation{topic: g.topic, group: g.group, id: id, msg: fmt.Sprintf(format, args...), from: from, to: to}
}

func (d *delivery) String() string {
	return fmt.Sprintf("attempt %d to c%d on %s (written between %v and %v)", d.attempt, d.sub.conn.number, d.sub.conn.hub, short(d.lo), short(d.at))
}

func short(d time.Duration) time.Duration { return d.Round(100 * time.Microsecond) }
