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
	// unbounded is the headroom of a store of which no bound is known.
	unbounded = math.MaxInt64 / 4
)

// headroom is what clients may still store in files, or in memory.
type headroom struct {
	cfg     *streamsConfig
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

// storage is what NATS says of files, or of memory, in bytes.
type storage struct {
	used uint64
	left int64 // what may still be stored; -1: no bound is known
}

// headrooms are those of files and of memory.
type headrooms struct {
	cfg          *streamsConfig
	file, memory headroom
	wake         chan struct{}
}

func newHeadrooms(c *streamsConfig) *headrooms {
	h := &headrooms{cfg: c, wake: make(chan struct{}, 1)}
	for storage, r := range map[string]*headroom{"file": &h.file, "memory": &h.memory} {
		r.cfg, r.storage = c, storage
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
	c := h.cfg
	every := cmp.Or(c.askStorage, headroomEvery)
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
	c := h.cfg
	file, memory := h.file.answered.Load(), h.memory.answered.Load()
	onDisk, inMemory, err := c.stored(c.conn.Ctx)
	if err != nil {
		if c.conn.Ctx.Err() == nil {
			c.often.Log(c.conn.Ctx, slog.LevelWarn, "failed to ask NATS how much it may still store; retrying", "", slog.Any("error", err))
		}
		return
	}
	h.file.note(onDisk, file)
	h.memory.note(inMemory, memory)
}

// note notes how much a store may still take. answered is what had an outcome before NATS was
// asked: what was sent by now and is not part of it may still have to be stored.
func (r *headroom) note(of storage, answered int64) {
	if of.left < 0 {
		r.left.Store(unbounded)
		r.set(false)
		return
	}
	all := int64(min(of.used, unbounded)) + min(of.left, unbounded) //nolint:gosec // bounded
	reserve := cmp.Or(r.cfg.limits.StorageReserve, min(defaultReserve, all/reserveOf))
	room := of.left - reserve - (r.sent.Load() - answered)
	r.reserve.Store(reserve)
	r.soon.Store(room / 2)
	r.left.Store(room)
	least := reserve
	if r.low.Load() { // clients are not let in and out
		least += max(min(reserve, all-reserve)/againPart, 0)
	}
	r.set(of.left <= least)
}

// set notes whether clients store nothing, and has the log say when that changes.
func (r *headroom) set(low bool) {
	if r.low.Swap(low) == low {
		return
	}
	if low {
		r.cfg.often.Log(r.cfg.conn.Ctx, slog.LevelError, "nats has too little room left: clients store nothing until there is more", r.storage, slog.String("storage", r.storage))
		return
	}
	r.cfg.often.Log(r.cfg.conn.Ctx, slog.LevelInfo, "nats has room again: clients store events", r.storage, slog.String("storage", r.storage))
}

// begin asks NATS for the first time, and then until the bus closes.
func (h *headrooms) begin() {
	h.look()
	h.cfg.conn.Start(h.watch)
}
