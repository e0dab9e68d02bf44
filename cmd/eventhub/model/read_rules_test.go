//go:build unix

package model

import (
	"fmt"
	"slices"
	"time"
)

func (r *reading) broken(id, format string, args ...any) violation {
	return violation{topic: r.Topic, group: r.Group, id: id, msg: fmt.Sprintf(format, args...), from: r.lo, to: r.at}
}

// of are the readings of one kind. What is stored at the end says what they should have been, so
// there are none in a history without.
func (l *ledger) of(what string) []*reading {
	if !l.set.Drained {
		return nil
	}
	var all []*reading
	for _, r := range l.readings {
		if r.What == what {
			all = append(all, r)
		}
	}
	return all
}

// confirmedBefore reports whether the publish of s was answered OK before at.
func (l *ledger) confirmedBefore(s *stored, at time.Duration) bool {
	f := l.sentN[s.n]
	return f != nil && f.ok() && f.answered < at
}

// cursors wants nothing unsettled at or before the position of a group.
func cursors(l *ledger) []violation {
	var all []violation
	buried := l.buried()
	for _, r := range l.of("cursor") {
		if r.ID == "" {
			continue
		}
		g := l.groups[groupKey{r.Topic, r.Group}]
		upTo := l.byID[[2]string{r.Topic, r.ID}]
		if upTo == nil {
			all = append(all, r.broken(r.ID, "the cursor is at an event that is not stored"))
			continue
		}
		if g == nil {
			continue // the hub's own
		}
		for _, s := range l.stored[r.Topic] {
			if s.seq > upTo.seq {
				break
			}
			if surely, _ := l.wants(g, s); !surely || buried[g.groupKey][s.id] {
				continue
			}
			if e := g.events[s.id]; e == nil || !e.settled(g, r.at) {
				all = append(all, r.broken(s.id, "the cursor is at %s, number %d of the stream, and number %d was not acknowledged by then", r.ID, upTo.seq, s.seq))
				break
			}
		}
	}
	return all
}

// latest wants the newest event of a key to be the one that the stream has: no older one than was
// answered OK before the question.
func latest(l *ledger) []violation {
	var all []violation
	for _, r := range l.of("latest") {
		var events []*stored
		at := -1 // of the answer
		for _, s := range l.stored[r.Topic] {
			f := l.sentN[s.n]
			if f == nil || f.Opts == nil || f.Opts.Key != r.Key {
				continue
			}
			if s.id == r.ID || r.ID == "" && f.Opts.Tombstone && f.sent <= r.at {
				at = len(events)
			}
			events = append(events, s)
		}
		switch {
		case r.ID != "" && at < 0:
			all = append(all, r.broken(r.ID, "the newest event of key %s is said to be one that the key does not have", r.Key))
			continue
		case r.ID != "" && l.sentN[events[at].n].Opts.Tombstone:
			all = append(all, r.broken(r.ID, "key %s is said to have a value, which is the event that removed it", r.Key))
			continue
		}
		for _, s := range events[at+1:] {
			if r.Final || l.confirmedBefore(s, r.lo) {
				said := "nothing"
				if at >= 0 {
					said = fmt.Sprintf("number %d of the stream (%s)", events[at].seq, events[at].id)
				}
				all = append(all, r.broken(s.id, "the newest event of key %s is said to be %s, and number %d had been answered OK", r.Key, said, s.seq))
				break
			}
		}
	}
	return all
}

// replays wants an answer to GET /replay to be a piece of the stream: the right one, whole.
func replays(l *ledger) []violation {
	var all []violation
	for _, r := range l.of("replay") {
		events := l.stored[r.Topic]
		switch r.From {
		case "ts":
			i := slices.IndexFunc(events, func(s *stored) bool { return s.ms >= r.TS })
			if i < 0 {
				i = len(events)
			}
			events = events[i:]
		case "afterId":
			i := slices.IndexFunc(events, func(s *stored) bool { return s.id == r.AfterID })
			if i < 0 {
				all = append(all, r.broken(r.AfterID, "a replay begins behind an event that is not stored"))
				continue
			}
			events = events[i+1:]
		}
		wrong := false
		for i, id := range r.IDs {
			if i >= len(events) || events[i].id != id {
				want := "nothing"
				if i < len(events) {
					want = events[i].id
				}
				all = append(all, r.broken(id, "event %d of a replay (%s %d%s) is %s, and the stream has %s", i, r.From, r.TS, r.AfterID, id, want))
				wrong = true
				break
			}
		}
		if wrong || len(r.IDs) >= r.Limit || len(r.IDs) >= len(events) {
			continue
		}
		// A replica may lag behind the leader.
		if next := events[len(r.IDs)]; r.Final || !l.set.Cluster && l.confirmedBefore(next, r.lo) {
			all = append(all, r.broken(next.id, "a replay (%s %d%s, limit %d) ends after %d events, and number %d had been answered OK", r.From, r.TS, r.AfterID, r.Limit, len(r.IDs), next.seq))
		}
	}
	return all
}

// states wants the states of a projection to be the fold of the stream.
func states(l *ledger) []violation {
	var all []violation
	for _, r := range l.of("state") {
		want := map[string]folded{}
		for _, s := range l.stored[r.Topic] {
			if f := l.sentN[s.n]; f != nil && f.Opts != nil && f.Opts.Key != "" {
				want[f.Opts.Key] = fold(want[f.Opts.Key], s.id)
			}
		}
		for key, w := range want {
			if got := r.States[key]; got != w {
				all = append(all, r.broken(w.Last, "the state of key %s is %+v, and the fold of its events is %+v", key, got, w))
			}
		}
		for key, got := range r.States {
			if _, ok := want[key]; !ok {
				all = append(all, r.broken(got.Last, "there is a state of key %s, %+v, and the key has no events", key, got))
			}
		}
	}
	return all
}

// outboxes wants each row that was committed in the stream once, in the order of its key, and no
// other.
func outboxes(l *ledger) []violation {
	if !l.set.Drained {
		return nil
	}
	var all []violation
	type lane struct{ topic, key string }
	last := map[lane]*stored{}
	for _, r := range l.rows {
		broken := func(format string, args ...any) {
			all = append(all, violation{topic: r.Topic, id: r.ID, msg: fmt.Sprintf(format, args...), from: r.at, to: r.at})
		}
		var found []*stored
		n := number(r.Payload)
		for _, s := range l.stored[r.Topic] {
			if s.id == r.ID || s.n == n {
				found = append(found, s)
			}
		}
		switch {
		case len(found) > 1:
			broken("a row is in the stream %d times", len(found))
		case len(found) > 0 && r.fate == "rollback":
			broken("a row that was rolled back is in the stream")
		case len(found) == 0 && r.fate == "commit":
			broken("a row that was committed is not in the stream")
		}
		if len(found) != 1 || r.fate != "commit" || r.Key == "" {
			continue
		}
		k := lane{r.Topic, r.Key}
		if was := last[k]; was != nil && was.seq > found[0].seq {
			broken("row %d of key %s was added after row %d, and they are stored at %d and %d", found[0].n, r.Key, was.n, found[0].seq, was.seq)
		}
		last[k] = found[0]
	}
	return all
}

// handlers wants what programs of client libraries see to be what came to their connections: each
// delivery at most once, and each publish that ended well stored under its id.
func handlers(l *ledger) []violation {
	type call struct {
		client, topic, group, id string
		attempt                  int
	}
	came, calls := map[call]int{}, map[call]int{}
	l.eachEvent(func(g *group, e *event) {
		for _, d := range e.deliveries {
			if by := d.sub.conn.by; by != "" {
				came[call{by, d.topic, g.group, e.id, d.attempt}]++
			}
		}
	})
	var all []violation
	for _, s := range l.saws {
		broken := func(format string, args ...any) {
			all = append(all, violation{topic: s.Topic, group: s.Group, id: s.ID, msg: s.Client + ": " + fmt.Sprintf(format, args...), from: s.at, to: s.at})
		}
		if s.N > 0 {
			if at := l.byN[s.N]; l.set.Drained && (at == nil || at.id != s.ID) {
				broken("publish %d ended well, and is not in the stream under its id", s.N)
			}
			continue
		}
		k := call{s.Client, s.Topic, s.Group, s.ID, s.Attempt}
		if calls[k]++; calls[k] > came[k] {
			broken("a handler was called for attempt %d the %d. time, which came %d times", s.Attempt, calls[k], came[k])
		}
	}
	return all
}
