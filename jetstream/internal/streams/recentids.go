package streams

import (
	"hash/maphash"
	"math"
	"sync"
	"sync/atomic"

	"eventhub/jetstream/event"
)

// maxAhead is the most ids that a stream keeps beyond a gap. Publishes over several connections are
// confirmed in any order; a gap that stays is an event of somebody else.
const maxAhead = 1024

// MaxRecent is how many events a recentIDs covers, and how many a search for an id reads.
const MaxRecent = 100_000

// recentIDs are the ids that this hub has published to the stream of one topic, as far back as no
// event of anybody else lies between them. A search for one of them reads no events. It keeps ids
// that are no UUIDv7s only: a search for a UUIDv7 reads few events anyway. Its methods may be
// called concurrently.
type recentIDs struct {
	count *recentCount

	mu       sync.Mutex
	from, to uint64 // the sequences that are known
	// hashes are those of the ids among them that are kept, and seqs their sequences. Both are only
	// appended to, and cut off in front.
	hashes, seqs []uint64
	ahead        map[uint64]uint64 // hashes beyond to+1, by their sequences
	gone         bool              // the stream is not used any more
}

// recentCount counts and bounds the ids in the recentIDs of all streams.
type recentCount struct {
	seed  maphash.Seed
	IDs   atomic.Int64
	limit int64 // Limits.IDsKnown
	obs   event.Observer
}

func newRecentCount(c *Config) *recentCount {
	return &recentCount{seed: maphash.MakeSeed(), limit: int64(c.Limits.IDsKnown), obs: c.Obs}
}

// isKept reports whether an id is kept: whether it has not even the form of a UUIDv7.
func isKept(id string) bool { return len(id) != 36 || id[14] != '7' }

// Published notes an event that the stream has confirmed.
func (s *Stream) Published(seq uint64, id string) {
	if !s.Family && s.Recent != nil {
		s.Recent.published(seq, id)
	}
}

func (r *recentIDs) published(seq uint64, id string) {
	var hash uint64 // 0: not kept
	if isKept(id) {
		hash = r.hash(id)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.gone || seq < r.from:
		return
	case r.to == 0 || seq <= r.to: // the first, or a server that lost events gives sequences again
		r.restart(seq)
		r.ahead = nil
	case seq > r.to+1:
		if r.ahead == nil {
			r.ahead = make(map[uint64]uint64)
		}
		if r.ahead[seq] = hash; len(r.ahead) <= maxAhead {
			return
		}
		first := uint64(math.MaxUint64)
		for seq := range r.ahead {
			first = min(first, seq)
		}
		hash = r.ahead[first]
		delete(r.ahead, first)
		r.restart(first)
	}
	r.extend(hash)
	for len(r.ahead) > 0 {
		hash, ok := r.ahead[r.to+1]
		if !ok {
			return
		}
		delete(r.ahead, r.to+1)
		r.extend(hash)
	}
}

// hash is the hash of an id that is kept, never 0.
func (r *recentIDs) hash(id string) uint64 { return maphash.String(r.count.seed, id) | 1 }

// restart forgets all before a sequence. r.mu is held.
func (r *recentIDs) restart(first uint64) {
	r.count.IDs.Add(int64(-len(r.seqs)))
	r.from, r.to, r.hashes, r.seqs = first, first-1, nil, nil
}

// extend adds the next sequence. r.mu is held.
func (r *recentIDs) extend(hash uint64) {
	r.to++
	if r.to-r.from >= MaxRecent {
		r.from = r.to - MaxRecent + 1
	}
	if len(r.seqs) > 0 && r.seqs[0] < r.from {
		r.hashes, r.seqs = r.hashes[1:], r.seqs[1:]
		r.count.IDs.Add(-1)
	}
	if hash == 0 {
		return
	}
	r.hashes, r.seqs = append(r.hashes, hash), append(r.seqs, r.to)
	if r.count.IDs.Add(1) > r.count.limit {
		r.count.obs.LimitReached("ids_known")
		r.restart(r.to + 1)
	}
}

// Drop forgets what a stream holds that is not used any more.
func (r *recentIDs) Drop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.restart(1)
	r.ahead, r.gone = nil, true
}

// Among returns which part of from..to is known, and the sequences there that may have the id. The
// part is empty, with first above last, when nothing is known.
func (r *recentIDs) Among(id string, from, to uint64) (first, last uint64, seqs []uint64) {
	if r == nil {
		return to + 1, to, nil
	}
	r.mu.Lock()
	first, last = max(from, r.from), min(to, r.to)
	hashes, all := r.hashes, r.seqs
	r.mu.Unlock()
	if first > last || !isKept(id) {
		return to + 1, to, nil
	}
	hash := r.hash(id)
	for i, h := range hashes {
		if h == hash && all[i] >= first && all[i] <= last {
			seqs = append(seqs, all[i])
		}
	}
	return first, last, seqs
}
