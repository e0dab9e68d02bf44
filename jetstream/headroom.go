package jetstream

import (
	"cmp"
	"log/slog"
	"math"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/quota"
)

// What NATS may store has a part that clients do not get (Limits.StorageReserve). It is for what
// the hub must write so that events can be settled: attempts, dead letters, leases, positions. The
// bus asks NATS now and then how much is left, and counts what it publishes in between.

const (
	// headroomEvery is the time between two questions, and headroomPause the least, for which a
	// bus waits that publishes much.
	headroomEvery = 5 * time.Second
	headroomPause = 100 * time.Millisecond
	// defaultReserve is the reserve, of a small store a part of reserveOf.
	defaultReserve = 1 << 30
	reserveOf      = 10
	// againPart is the part of the reserve, or of what clients may store, that must be left beyond
	// the reserve before clients that stored nothing store again.
	againPart = 4
	// shareOf is the part of what is left at the start that a client may store in storedAge.
	shareOf   = 4
	storedAge = 7 * 24 * time.Hour
	// eventOverhead is what an event takes beside its payload, key and headers: its subject, and
	// what the server writes.
	eventOverhead = 128
	// rationedAtOnce is how many bytes a Publisher takes from the rations of its client at a time,
	// so that not every event costs two locks.
	rationedAtOnce = 64 << 10
	// unbounded is the headroom of a store of which no bound is known.
	unbounded = math.MaxInt64 / 4
)

// headroom is what clients may still store in files, or in memory.
type headroom struct {
	core    *core
	storage string       // for the log
	left    atomic.Int64 // bytes beyond the reserve; publishes take from them
	soon    atomic.Int64 // at how many bytes NATS is asked again
	reserve atomic.Int64
	low     atomic.Bool // clients store nothing
	// sent is the bytes of all publishes, and answered those of publishes with an outcome. Other
	// processors count the latter.
	sent     atomic.Int64
	_        [64]byte
	answered atomic.Int64
}

// headrooms are those of files and of memory.
type headrooms struct {
	core         *core
	file, memory headroom
	wake         chan struct{}
	published    *quota.Set // bytes, by client
	stored       *quota.Set // the same over storedAge; nil: any
}

func newHeadrooms(c *core) *headrooms {
	h := &headrooms{core: c, wake: make(chan struct{}, 1), published: quota.New(float64(c.limits.PublishRate), c.limits.PublishBurst, c.limits.Topics, nil)}
	for storage, r := range map[string]*headroom{"file": &h.file, "memory": &h.memory} {
		r.core, r.storage = c, storage
		r.left.Store(unbounded)
	}
	return h
}

// of returns the headroom of a storage.
func (h *headrooms) of(storage natsjs.StorageType) *headroom {
	if storage == natsjs.MemoryStorage {
		return &h.memory
	}
	return &h.file
}

// size is about what an event takes in a store.
func (o *PublishOptions) size(payload []byte) int64 {
	n := len(payload) + len(o.Key) + len(o.SID) + eventOverhead
	for name, value := range o.Headers {
		n += len(name) + len(value)
	}
	for _, list := range [][]string{o.Tags, o.CausedBy} {
		for _, s := range list {
			n += len(s)
		}
	}
	return int64(n)
}

// admit takes an event of opts.bytes from the rations of its client and from the room for its
// stream, or returns the refusal. The hub's own events need neither, unless they can wait
// (PublishOptions.Yield). Removals of keys make room, and may use half of the reserve.
func (h *headrooms) admit(p *Publisher, s *stream, opts *PublishOptions, client string) error {
	switch {
	case rationed(client):
		if err := h.ration(p, s, opts, client); err != nil {
			return err
		}
	case !opts.Yield:
		return nil
	}
	if !h.take(s.headroom, opts.bytes*s.copies, opts.Tombstone) {
		h.core.obs.LimitReached("storage_reserve")
		return storageLow(nil)
	}
	return nil
}

// ration takes an event from the rations of its client. What p takes in advance is lost with p.
func (h *headrooms) ration(p *Publisher, s *stream, opts *PublishOptions, client string) error {
	n, own := opts.bytes, client == p.client
	if own {
		if p.advance.Add(-n) >= 0 {
			return nil
		}
		p.advance.Add(n)
	}
	taken := n
	if own {
		taken = max(n, rationedAtOnce)
	}
	wait := h.published.TakeN(client, int(taken))
	if wait > 0 && taken > n {
		taken = n
		wait = h.published.TakeN(client, int(taken))
	}
	if wait > 0 {
		h.core.obs.LimitReached("publish_rate")
		return &event.Error{Code: event.CodeRateLimited, Msg: "this client publishes more bytes a second than it may: slow down", Wait: wait}
	}
	if wait := h.stored.TakeN(client, int(taken)); wait > 0 && s.headroom.short() && !opts.Tombstone {
		h.core.obs.LimitReached("storage_share")
		h.core.often.Log(h.core.conn.Ctx, slog.LevelWarn, "a client has stored more than its share, and nats has little room left: it stores nothing", client, slog.String("client", client))
		return &event.Error{Code: event.CodeStorageLow, Msg: "the event store has little room left, and this client has stored more than its share: nothing was stored; have events removed, or the store enlarged", Wait: wait}
	}
	p.advance.Add(taken - n)
	return nil
}

// short reports whether less than twice the reserve is left.
func (r *headroom) short() bool { return r.left.Load() < r.reserve.Load() }

// take takes n bytes of a store, or reports that clients do not get them.
func (h *headrooms) take(r *headroom, n int64, removal bool) bool {
	least := int64(0)
	if removal {
		least = -r.reserve.Load() / 2
	} else if r.low.Load() {
		return false
	}
	left := r.left.Add(-n)
	if left < r.soon.Load() {
		select {
		case h.wake <- struct{}{}:
		default:
		}
	}
	if left >= least {
		return true
	}
	r.left.Add(n)
	if !removal {
		r.set(true)
	}
	return false
}

// storageLow is what clients are told while only the hub itself stores.
func storageLow(cause error) error {
	return &event.Error{Code: event.CodeStorageLow, Msg: "the event store has no room left for clients: nothing was stored; try again when events were removed, or the store was enlarged", Wait: headroomEvery, Err: cause}
}

// storeFull reports whether NATS refused to store something because its disk is full, or the bound
// of its account or server is reached, and not because of a bound of the stream.
func storeFull(code natsjs.ErrorCode, description string) bool {
	return code == errAccountResources || code == errServerResources || code == errReserved ||
		code == errCodeStoreFailed && strings.HasSuffix(description, syscall.ENOSPC.Error())
}

// Errors of a server that has no room.
const (
	errAccountResources natsjs.ErrorCode = 10002 // the bound of the account is reached
	errServerResources  natsjs.ErrorCode = 10023 // the bound of the server is reached
	errReserved         natsjs.ErrorCode = 10047 // what a new stream would reserve is not there
)

// watch asks NATS for its room until the bus closes.
func (h *headrooms) watch() {
	c := h.core
	every := cmp.Or(c.cfg.askStorage, headroomEvery)
	tick := time.NewTimer(every)
	defer tick.Stop()
	for {
		select {
		case <-c.conn.Ctx.Done():
			return
		case <-tick.C:
		case <-h.wake:
		}
		h.look()
		_ = c.conn.Pause(c.conn.Ctx, headroomPause) // an error means that the bus closes
		tick.Reset(every)
	}
}

// look asks NATS for its room.
func (h *headrooms) look() {
	c := h.core
	file, memory := h.file.answered.Load(), h.memory.answered.Load()
	info, err := c.askNATS(c.conn.Ctx)
	if err != nil {
		if c.conn.Ctx.Err() == nil {
			c.often.Log(c.conn.Ctx, slog.LevelWarn, "failed to ask NATS how much it may still store; retrying", "", slog.Any("error", err))
		}
		return
	}
	h.file.note(info.FileBytes, info.FileLeft, file)
	h.memory.note(info.MemoryBytes, info.MemoryLeft, memory)
}

// note notes how much a store may still take. answered is what had an outcome before NATS was
// asked: what was sent by now and is not part of it may still have to be stored.
func (r *headroom) note(used uint64, left, answered int64) {
	if left < 0 {
		r.left.Store(unbounded)
		r.set(false)
		return
	}
	all := int64(min(used, unbounded)) + min(left, unbounded) //nolint:gosec // bounded
	reserve := cmp.Or(r.core.limits.StorageReserve, min(defaultReserve, all/reserveOf))
	room := left - reserve - (r.sent.Load() - answered)
	r.reserve.Store(reserve)
	r.soon.Store(room / 2)
	r.left.Store(room)
	least := reserve
	if r.low.Load() { // clients are not let in and out
		least += max(min(reserve, all-reserve)/againPart, 0)
	}
	r.set(left <= least)
}

// set notes whether clients store nothing, and has the log say when that changes.
func (r *headroom) set(low bool) {
	if r.low.Swap(low) == low {
		return
	}
	if low {
		r.core.often.Log(r.core.conn.Ctx, slog.LevelError, "nats has too little room left: clients store nothing until there is more", r.storage, slog.String("storage", r.storage))
		return
	}
	r.core.often.Log(r.core.conn.Ctx, slog.LevelInfo, "nats has room again: clients store events", r.storage, slog.String("storage", r.storage))
}

// begin asks NATS for the first time, which says what a share of the store is.
func (h *headrooms) begin() {
	h.look()
	share := h.core.limits.StorageShare
	if left := h.file.left.Load(); share == 0 && left < unbounded {
		share = int(max(left/shareOf, h.file.reserve.Load()))
	}
	if share > 0 {
		h.stored = quota.New(float64(share)/storedAge.Seconds(), share, h.core.limits.Topics, nil)
	}
	h.core.conn.Start(h.watch)
}

// StorageLow reports whether clients store nothing now, because the files or the memory of NATS
// have no room left beyond Limits.StorageReserve.
func (n NATS) StorageLow() (file, memory bool) {
	return n.bus.streams.headrooms.file.low.Load(), n.bus.streams.headrooms.memory.low.Load()
}
