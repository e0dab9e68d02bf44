package ops

import (
	"sync/atomic"
	"time"
)

// goneAfter is how long a topic or group must be missing from the lists of NATS, at least twice,
// before its series end.
const goneAfter = 10 * time.Second

// table has the series of topics, or of pairs of topic and group, by their key. Up to max keys have
// series of their own. The others share those of the key other. The caller holds a lock.
type table[K comparable, S any] struct {
	max   int
	room  int // for entries
	other K
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

// exists gives a key that exists series of its own, if there is room for them.
func (t *table[K, S]) exists(k K) {
	e, ok := t.entries[k]
	if (!ok || !e.own) && t.own < t.max && k != t.other {
		e = t.put(k, true)
	}
	if e != nil {
		e.durable = true
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
