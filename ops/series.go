package ops

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"eventhub/jetstream"
)

// Series is how many topics, and how many groups, have series of their own: those with the most
// lag. The others share those of OtherLabel. The zero value is AllSeries.
type Series int

const (
	// AllSeries is as many as MaxTopics and MaxPairs allow.
	AllSeries Series = 0
	// NoSeries lets all share the series of OtherLabel.
	NoSeries Series = -1
)

// ParseSeries reads "all", "none", or a number from 1 to MaxPairs. Its errors name the text, and
// say what is allowed.
func ParseSeries(text string) (Series, error) {
	switch text {
	case "all":
		return AllSeries, nil
	case "none":
		return NoSeries, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > MaxPairs {
		return AllSeries, fmt.Errorf("%q: use all, none, or a number from 1 to %d", text, MaxPairs)
	}
	return Series(n), nil
}

// upTo returns the number of series that there may be with a bound.
func (s Series) upTo(bound int) int {
	switch s {
	case AllSeries:
		return bound
	case NoSeries:
		return 0
	default:
		return min(int(s), bound)
	}
}

// keptLag is how much more lag a topic or group needs to take the place of another: those whose lag
// is about the same do not take turns.
const keptLag = 10 * time.Second

// rank is the lag of a topic or group. The zero value is that of one without lag.
type rank struct {
	stuck   bool
	oldest  time.Duration
	backlog uint64
}

// add adds the lag of a group.
func (r rank) add(lag *jetstream.Lag) rank {
	return rank{r.stuck || !lag.StuckSince.IsZero(), max(r.oldest, lag.OldestUnacked), r.backlog + lag.Pending + lag.InFlight}
}

// compare returns less than 0 for the rank with more lag. own says which has series of its own.
func (r rank) compare(other rank, own, otherOwn bool) int {
	oldest := func(r rank, own bool) time.Duration {
		if own {
			return r.oldest + keptLag
		}
		return r.oldest
	}
	stuck := func(r rank) int {
		if r.stuck {
			return 1
		}
		return 0
	}
	return cmp.Or(stuck(other)-stuck(r), cmp.Compare(oldest(other, otherOwn), oldest(r, own)), cmp.Compare(other.backlog, r.backlog))
}

// goneAfter is how long a topic or group must be missing from the lists of NATS, at least twice,
// before its series end.
const goneAfter = 10 * time.Second

// table has the series of topics, or of pairs of topic and group, by their key. Up to max keys have
// series of their own. The others share those of the key other. The caller holds a lock.
type table[K comparable, S any] struct {
	max    int
	ranked bool
	room   int // for entries
	other  K
	// compare is the order of keys whose lag is the same.
	compare func(a, b K) int
	// resolve returns the series with a label, and makes them. end removes them.
	resolve func(label K) S
	end     func(label K)

	entries map[K]*entry[S]
	own     int // entries with series of their own
	// rest is the entry of all keys for which entries has no room, or nil.
	rest *entry[S]
	// shared says that the series of other exist.
	shared bool
}

// entry is where a key is counted.
type entry[S any] struct {
	series S
	own    bool
	// durable entries with series of their own stay without observers.
	durable bool
	// absent is since when the key is missing from the lists of NATS, or zero.
	absent time.Time
	// ended says that the key is to be looked up again. Observers read it without the lock: what
	// one counts at this very moment may be lost.
	ended atomic.Bool
}

// get returns the entry of a key, and makes it.
func (t *table[K, S]) get(k K) *entry[S] {
	if e, ok := t.entries[k]; ok {
		return e
	}
	own := t.own < t.max && k != t.other
	if own || len(t.entries) < t.room {
		return t.put(k, own)
	}
	if t.rest == nil {
		t.rest = t.entry(false, t.other)
	}
	return t.rest
}

// choose gives series of their own to up to max of the keys that have an entry, or that exist: to
// those with the most lag. Unless ranked is set, keys that have such series keep them.
func (t *table[K, S]) choose(exist []K, lag map[K]rank) {
	keys := make([]K, 0, max(len(t.entries), len(exist)))
	for k := range t.entries {
		keys = append(keys, k)
	}
	for _, k := range exist {
		if _, ok := t.entries[k]; !ok {
			keys = append(keys, k)
		}
	}
	keys = slices.DeleteFunc(keys, func(k K) bool { return k == t.other })
	owns := func(k K) bool {
		e, ok := t.entries[k]
		return ok && e.own
	}
	if len(keys) > t.max {
		slices.SortFunc(keys, func(a, b K) int {
			if own := owns(a); !t.ranked && own != owns(b) {
				if own {
					return -1
				}
				return 1
			}
			return cmp.Or(lag[a].compare(lag[b], owns(a), owns(b)), t.compare(a, b))
		})
		for _, k := range keys[t.max:] {
			if owns(k) {
				t.drop(k)
			}
		}
		keys = keys[:t.max]
	}
	for _, k := range keys {
		if !owns(k) {
			t.put(k, true)
		}
	}
	for _, k := range exist {
		if e, ok := t.entries[k]; ok {
			e.durable = true
		}
	}
}

// put makes the entry of a key. It ends the one that the key had, which has no series of its own.
func (t *table[K, S]) put(k K, own bool) *entry[S] {
	if old, ok := t.entries[k]; ok {
		old.ended.Store(true)
	} else {
		t.endRest()
	}
	label := t.other
	if own {
		label = k
		t.own++
	}
	t.entries[k] = t.entry(own, label)
	return t.entries[k]
}

// endRest lets keys that have no entry look whether they get one.
func (t *table[K, S]) endRest() {
	if t.rest != nil {
		t.rest.ended.Store(true)
		t.rest = nil
	}
}

func (t *table[K, S]) entry(own bool, label K) *entry[S] {
	t.shared = t.shared || !own
	return &entry[S]{series: t.resolve(label), own: own}
}

// drop ends the entry of a key, and its own series.
func (t *table[K, S]) drop(k K) {
	e := t.entries[k]
	delete(t.entries, k)
	e.ended.Store(true)
	if e.own {
		t.own--
		t.end(k)
	}
	t.endRest()
}

// sweep drops the keys that have been missing for goneAfter. there reports whether a key is in the
// lists that were read now.
func (t *table[K, S]) sweep(there func(K) bool) {
	now := time.Now()
	for k, e := range t.entries {
		switch {
		case there(k):
			e.absent = time.Time{}
		case e.absent.IsZero():
			e.absent = now
		case now.Sub(e.absent) >= goneAfter:
			t.drop(k)
		}
	}
}
