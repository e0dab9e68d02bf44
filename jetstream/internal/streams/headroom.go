package streams

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
	// defaultReserve is the reserve.
	defaultReserve = 1 << 30
	// ReserveOf is the part of a small store that is its reserve.
	ReserveOf = 10
	// AgainPart is the part of the reserve, or of what clients may store, that must be left beyond
	// the reserve before clients that stored nothing store again.
	AgainPart = 4
	// Unbounded is the headroom of a store of which no bound is known.
	Unbounded = math.MaxInt64 / 4
)

// headroom is what clients may still store in files, or in memory.
type headroom struct {
	cfg     *Config
	storage string       // for the log
	Left    atomic.Int64 // bytes beyond the reserve; publishes take from them
	soon    atomic.Int64 // at how many bytes NATS is asked again
	Reserve atomic.Int64
	Low     atomic.Bool // clients store nothing
	// Sent is the bytes of all publishes, and answered those of publishes with an outcome. Other
	// processors count the latter.
	Sent     atomic.Int64
	_        [64]byte
	Answered atomic.Int64
}

// Storage is what NATS says of files, or of memory, in bytes.
type Storage struct {
	Used uint64
	Left int64 // what may still be stored; -1: no bound is known
}

// Headrooms are those of files and of memory.
type Headrooms struct {
	cfg          *Config
	File, Memory headroom
	wake         chan struct{}
}

func newHeadrooms(c *Config) *Headrooms {
	h := &Headrooms{cfg: c, wake: make(chan struct{}, 1)}
	for storage, r := range map[string]*headroom{"file": &h.File, "memory": &h.Memory} {
		r.cfg, r.storage = c, storage
		r.Left.Store(Unbounded)
	}
	return h
}

// Of returns the headroom of a storage.
func (h *Headrooms) Of(storage natsjs.StorageType) *headroom {
	if storage == natsjs.MemoryStorage {
		return &h.Memory
	}
	return &h.File
}

// Short reports whether less than twice the reserve is left.
func (r *headroom) Short() bool { return r.Left.Load() < r.Reserve.Load() }

// Take takes n bytes of a store, or reports that clients do not get them.
func (h *Headrooms) Take(r *headroom, n int64, removal bool) bool {
	least := int64(0)
	if removal {
		least = -r.Reserve.Load() / 2
	} else if r.Low.Load() {
		return false
	}
	left := r.Left.Add(-n)
	if left < r.soon.Load() {
		select {
		case h.wake <- struct{}{}:
		default:
		}
	}
	if left >= least {
		return true
	}
	r.Left.Add(n)
	if !removal {
		r.Set(true)
	}
	return false
}

// StorageLow is what clients are told while only the hub itself stores.
func StorageLow(cause error) error {
	return &event.Error{Code: event.CodeStorageLow, Msg: "the event store has no room left for clients: nothing was stored; try again when events were removed, or the store was enlarged", Wait: headroomEvery, Err: cause}
}

// StoreFull reports whether NATS refused to store something because its disk is full, or the bound
// of its account or server is reached, and not because of a bound of the stream.
func StoreFull(code natsjs.ErrorCode, description string) bool {
	return code == ErrAccountResources || code == errServerResources || code == errReserved ||
		code == ErrCodeStoreFailed && strings.HasSuffix(description, syscall.ENOSPC.Error())
}

// Errors of a server that has no room.
const (
	ErrAccountResources natsjs.ErrorCode = 10002 // the bound of the account is reached
	errServerResources  natsjs.ErrorCode = 10023 // the bound of the server is reached
	errReserved         natsjs.ErrorCode = 10047 // what a new stream would reserve is not there
)

// watch asks NATS for its room until the bus closes.
func (h *Headrooms) watch() {
	c := h.cfg
	every := cmp.Or(c.AskStorage, headroomEvery)
	tick := time.NewTimer(every)
	defer tick.Stop()
	for {
		select {
		case <-c.Conn.Ctx.Done():
			return
		case <-tick.C:
		case <-h.wake:
		}
		h.look()
		_ = c.Conn.Pause(c.Conn.Ctx, headroomPause) // an error means that the bus closes
		tick.Reset(every)
	}
}

// look asks NATS for its room.
func (h *Headrooms) look() {
	c := h.cfg
	file, memory := h.File.Answered.Load(), h.Memory.Answered.Load()
	onDisk, inMemory, err := c.Stored(c.Conn.Ctx)
	if err != nil {
		if c.Conn.Ctx.Err() == nil {
			c.Often.Log(c.Conn.Ctx, slog.LevelWarn, "failed to ask NATS how much it may still store; retrying", "", slog.Any("error", err))
		}
		return
	}
	h.File.note(onDisk, file)
	h.Memory.note(inMemory, memory)
}

// note notes how much a store may still take. answered is what had an outcome before NATS was
// asked: what was sent by now and is not part of it may still have to be stored.
func (r *headroom) note(of Storage, answered int64) {
	if of.Left < 0 {
		r.Left.Store(Unbounded)
		r.Set(false)
		return
	}
	all := int64(min(of.Used, Unbounded)) + min(of.Left, Unbounded) //nolint:gosec // bounded
	reserve := cmp.Or(r.cfg.Limits.StorageReserve, min(defaultReserve, all/ReserveOf))
	room := of.Left - reserve - (r.Sent.Load() - answered)
	r.Reserve.Store(reserve)
	r.soon.Store(room / 2)
	r.Left.Store(room)
	least := reserve
	if r.Low.Load() { // clients are not let in and out
		least += max(min(reserve, all-reserve)/AgainPart, 0)
	}
	r.Set(of.Left <= least)
}

// Set notes whether clients store nothing, and has the log say when that changes.
func (r *headroom) Set(low bool) {
	if r.Low.Swap(low) == low {
		return
	}
	if low {
		r.cfg.Often.Log(r.cfg.Conn.Ctx, slog.LevelError, "nats has too little room left: clients store nothing until there is more", r.storage, slog.String("storage", r.storage))
		return
	}
	r.cfg.Often.Log(r.cfg.Conn.Ctx, slog.LevelInfo, "nats has room again: clients store events", r.storage, slog.String("storage", r.storage))
}

// Begin asks NATS for the first time, and then until the bus closes.
func (h *Headrooms) Begin() {
	h.look()
	h.cfg.Conn.Start(h.watch)
}

// ErrCodeStoreFailed is the server's for a message that a bound of the stream, or its disk, has no
// room for.
const ErrCodeStoreFailed natsjs.ErrorCode = 10077
