package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/records"
)

// ownersBucket says which hub owns each ordered group, and which hubs live.
const ownersBucket = "eventhub_owners"

// Times of ownership. A hub that has not renewed its lease owns nothing any more after ownerLease.
// It stops pulling before that, so that its last pulls have ended when the lease has.
const (
	ownerLease = 10 * time.Second
	// ownersAge is how long an entry is kept. Owners write theirs again after a quarter of it.
	ownersAge = time.Hour
)

// ownership is the entry of an ordered group.
type ownership struct {
	Hub string `json:"hub"`
	// Term counts the owners of the group.
	Term uint64 `json:"term"`
	// Clean says that the owner has given back all that it had, and that no member of it holds
	// anything: the next one need not wait.
	Clean bool `json:"clean,omitempty"`
	// Wait says that the owner has given up the group while it held nothing, and how long the next
	// one waits for what others may have had before; 0: the owner has the group, or left it in
	// another way.
	Wait time.Duration `json:"wait_ns,omitempty"`

	revision uint64 // 0: there is no entry
}

// renewal is when the lease of a hub was seen to change, in the clock of this bus.
type renewal struct {
	at       int64
	revision uint64
}

// owners are the leases of hubs, and the entries of groups, as this hub knows them. A hub has one
// lease for all groups that it owns. Its methods may be called concurrently.
type owners struct {
	core *core
	hub  string // the name of this hub
	kv   natsjs.KeyValue

	renewing sync.Mutex

	mu      sync.Mutex
	hubs    map[string]renewal       // bounded by the hubs of the last hour
	groups  map[string]*orderedGroup // those of this hub, by the key of their entry
	owned   int                      // groups that this hub owns
	renewed int64                    // when the last renewal that came through was sent; 0: none
	started int64                    // when this hub began to follow
}

func openOwners(ctx context.Context, c *core, hub string) (*owners, error) {
	kv, err := c.ownBucket(ctx, natsjs.KeyValueConfig{Bucket: ownersBucket, Description: "eventhub: the hubs that own ordered groups", TTL: ownersAge})
	if err != nil {
		return nil, err
	}
	return &owners{core: c, hub: hub, kv: kv, hubs: make(map[string]renewal), groups: make(map[string]*orderedGroup)}, nil
}

// lease is how long a lease lasts.
func (w *owners) lease() time.Duration { return w.core.cfg.OwnerLease }

// pullTime is how long a pull of an owner waits at the server.
func (w *owners) pullTime() time.Duration { return w.lease() / 5 }

// begin follows the bucket from the start of this hub on: a hub that knows since when another one
// is gone need not wait when the first member of a group comes.
func (w *owners) begin() {
	w.started = w.core.clock.Now()
	w.core.conn.Start(w.follow)
	w.core.conn.Start(w.keep)
}

// add has a group told when its entry changes, or the lease of a hub ends.
func (w *owners) add(o *orderedGroup) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.groups[o.key] = o
}

func (w *owners) remove(o *orderedGroup) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.groups[o.key] == o {
		delete(w.groups, o.key)
	}
}

// hubKey is the key of a hub's lease, groupPrefix begins the keys of groups.
const (
	hubPrefix   = "hub."
	groupPrefix = "group."
)

// follow learns of leases and entries until the bus closes.
func (w *owners) follow() {
	for w.core.conn.Ctx.Err() == nil {
		if err := w.watch(); err != nil && w.core.conn.Ctx.Err() == nil {
			w.core.often.Log(w.core.conn.Ctx, slog.LevelWarn, "cannot watch the owners of ordered groups; retrying", "", slog.Any("error", err))
		}
		select {
		case <-w.core.conn.Ctx.Done():
		case <-time.After(250 * time.Millisecond):
		}
	}
}

func (w *owners) watch() error {
	watch, err := w.kv.WatchAll(w.core.conn.Ctx)
	if err != nil {
		return err
	}
	defer func() { _ = watch.Stop() }()
	for {
		select {
		case <-w.core.conn.Ctx.Done():
			return nil
		case e, open := <-watch.Updates():
			if !open {
				return errors.New("the watch ended")
			}
			if e == nil { // what was there before ends here
				continue
			}
			w.saw(e.Key(), e.Value(), e.Revision())
		}
	}
}

func (w *owners) saw(key string, value []byte, revision uint64) {
	now := w.core.clock.Now()
	w.mu.Lock()
	o := w.groups[key]
	if hub, ok := strings.CutPrefix(key, hubPrefix); ok {
		for other, seen := range w.hubs {
			if now-seen.at > int64(ownersAge) {
				delete(w.hubs, other)
			}
		}
		if revision > w.hubs[hub].revision {
			w.hubs[hub] = renewal{now, revision}
		}
	}
	w.mu.Unlock()
	if o != nil {
		o.entryChanged(value, revision)
	}
}

// left returns how long a hub may own its groups still, as far as is known here, or since when it
// does not, as a negative time. A hub that was never heard of may have renewed its lease just
// before this hub began to listen.
func (w *owners) left(hub string, now int64) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	at := w.started
	if seen, known := w.hubs[hub]; known {
		at = seen.at
	}
	return time.Duration(at + int64(w.lease()) - now)
}

// look reads the lease of a hub whose renewals were not heard of. They may be late, or lost with
// the watch.
func (w *owners) look(ctx context.Context, hub string) error {
	m, err := w.core.conn.LastBySubject(ctx, "KV_"+ownersBucket, "$KV."+ownersBucket+"."+hubPrefix+hub)
	if errors.Is(err, event.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	w.saw(hubPrefix+hub, nil, m.Seq)
	return nil
}

// mayPull reports whether the lease of this hub lasts for one more pull.
func (w *owners) mayPull(now int64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.renewed != 0 && now < w.renewed+int64(w.lease()-w.pullTime())
}

// valid reports whether this hub holds its lease.
func (w *owners) valid(now int64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.renewed != 0 && now < w.renewed+int64(w.lease())
}

// keep renews the lease while this hub owns a group.
func (w *owners) keep() {
	tick := time.NewTicker(w.lease() * 3 / 10)
	defer tick.Stop()
	for {
		select {
		case <-w.core.conn.Ctx.Done():
			return
		case <-tick.C:
		}
		w.mu.Lock()
		owned := w.owned
		w.mu.Unlock()
		if owned == 0 {
			continue
		}
		ctx, cancel := context.WithTimeout(w.core.conn.Ctx, w.lease()*3/10)
		if err := w.renew(ctx); err != nil && w.core.conn.Ctx.Err() == nil {
			w.core.often.Log(w.core.conn.Ctx, slog.LevelWarn, "failed to renew the lease on ordered groups; retrying", "", slog.Any("error", err))
		}
		cancel()
	}
}

// renew writes the lease of this hub.
func (w *owners) renew(ctx context.Context) error {
	w.renewing.Lock()
	defer w.renewing.Unlock()
	sent := w.core.clock.Now()
	if _, err := w.kv.Put(ctx, hubPrefix+w.hub, []byte("{}")); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.renewed = max(sent, w.renewed)
	return nil
}

// read reads the entry of a group at the bucket's leader.
func (w *owners) read(ctx context.Context, key string) (ownership, error) {
	m, err := w.core.conn.LastBySubject(ctx, "KV_"+ownersBucket, "$KV."+ownersBucket+"."+key)
	if errors.Is(err, event.ErrNotFound) {
		return ownership{}, nil
	}
	if err != nil {
		return ownership{}, err
	}
	e := ownership{revision: m.Seq}
	if op := m.Header.Get("KV-Operation"); op != "" {
		return e, nil
	}
	if err := json.Unmarshal(m.Data, &e); err != nil {
		e.Hub = "" // of nobody: whoever comes waits
	}
	return e, nil
}

// take makes this hub the owner of a group, or returns records.ErrMoved when another hub was first.
// The hub has a valid lease then.
func (w *owners) take(ctx context.Context, key string, was ownership) (ownership, error) {
	w.mu.Lock()
	due := w.renewed == 0 || w.core.clock.Now() > w.renewed+int64(w.lease()*3/10)
	w.mu.Unlock()
	if due {
		if err := w.renew(ctx); err != nil {
			return ownership{}, err
		}
	}
	e, err := w.write(ctx, key, ownership{Hub: w.hub, Term: was.Term + 1, revision: was.revision})
	if err != nil {
		return ownership{}, err
	}
	w.mu.Lock()
	w.owned++
	w.mu.Unlock()
	return e, nil
}

// write replaces an entry by compare-and-set.
func (w *owners) write(ctx context.Context, key string, e ownership) (ownership, error) {
	value, err := json.Marshal(e)
	if err != nil {
		return ownership{}, err
	}
	e.revision, err = w.kv.Update(ctx, key, value, e.revision)
	return e, records.MovedOr(err)
}

// ended counts a group that this hub owns no more.
func (w *owners) ended() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.owned--
}
