package main

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"eventhub/acl"
	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/outbox"
)

const (
	// ownOutboxName is the file in the data directory that POST /outbox writes to.
	ownOutboxName = "outbox.db"
	// Sent records are kept for ownOutboxKeep, so that repeated ids are detected, and at most
	// ownOutboxSent of them. The others are purged every ownOutboxPurge.
	ownOutboxKeep  = 10 * time.Minute
	ownOutboxPurge = 15 * time.Second
	ownOutboxSent  = 100_000
	// ownOutboxBatch is the maximum number of records stored in one transaction, and ownOutboxBytes
	// the size of their payloads from which on no more are added. Claims have the same limit of
	// bytes: transactions take turns, and each writes the whole records. ownOutboxWrite is the
	// timeout of a transaction that stores records.
	ownOutboxBatch = 256
	ownOutboxBytes = 1 << 20
	ownOutboxWrite = 10 * time.Second
	// ownOutboxLease may be short, because another hub hardly ever uses the same file.
	ownOutboxLease = 5 * time.Second
)

// ownPrincipal is the principal of the hub's own token, to which no limit of clients applies.
const ownPrincipal = string(acl.KindStatic) + ":static"

var errOwnOutboxClosed = errors.New("outbox is closed")

// ownOutbox is the hub's own outbox, which serves POST /outbox. It creates its file on first use.
// Its methods may be called concurrently.
type ownOutbox struct {
	hub       *hub
	publisher *jetstream.Publisher // checks whether an event can be published
	path      string
	limits    []ownLimit
	state     *outboxState

	// records to write; unbuffered, so that every received record gets an answer
	queue chan *addition
	ended chan struct{} // closed when the writer has stopped

	mu     sync.Mutex // guards the fields below
	box    *drainedOutbox
	closed bool
	cancel context.CancelFunc // ends the goroutines in wg
	wg     sync.WaitGroup
}

var (
	_ facade.Outbox = (*ownOutbox)(nil)
	_ outbox.Store  = ownStore{}
	_ outbox.Bus    = ownBus{}
)

func newOwnOutbox(h *hub, path string) *ownOutbox {
	return &ownOutbox{
		hub: h, publisher: h.bus.NewPublisher(), path: path, limits: h.cmd.ownOutbox(), state: h.newOutboxState(outboxOfHTTP),
		queue: make(chan *addition), ended: make(chan struct{}),
	}
}

// resume opens the file if it exists, because records may be waiting in it.
func (o *ownOutbox) resume(ctx context.Context) error {
	if _, err := os.Stat(o.path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return o.open(ctx)
}

// open opens the file unless it is open.
func (o *ownOutbox) open(ctx context.Context) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.closed:
		return errOwnOutboxClosed
	case o.box != nil:
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(o.path), 0o700); err != nil {
		return dataDirError(filepath.Dir(o.path), err)
	}
	box, err := outboxDSN{path: o.path}.open(ctx, outboxOptions{maxPayload: o.hub.bus.MaxPayload(), make: true})
	if err != nil {
		return err
	}
	if _, _, err = box.migrate(ctx); err != nil {
		return errors.Join(err, box.close())
	}
	if err := makeUsage(ctx, box.db); err != nil {
		return errors.Join(fmt.Errorf("%v: %w", box.dsn, err), box.close())
	}
	box.Store = ownStore{box.Store, o, box.db}
	bus := ownBus{outbox.JetStream(o.hub.bus), o.publisher, box.db}
	cfg := outbox.Config{Bus: bus, Lease: ownOutboxLease, HeldBytes: ownOutboxBytes, Observer: outboxObserver{o.state.metric}}
	if o.box, err = o.hub.drain(ctx, box, o.state, cfg); err != nil {
		return err
	}
	var background context.Context
	// must outlive the request that opens the file
	background, o.cancel = context.WithCancel(context.WithoutCancel(ctx))
	opened := o.box
	o.wg.Go(func() { o.tidy(background, opened.openedOutbox) })
	o.wg.Go(func() { o.write(background, opened) })
	return nil
}

// opened returns the outbox while it is open, else nil.
func (o *ownOutbox) opened() *openedOutbox {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.box == nil {
		return nil
	}
	return o.box.openedOutbox
}

// tidy periodically deletes old sent records until ctx ends.
func (o *ownOutbox) tidy(ctx context.Context, box *openedOutbox) {
	tick := time.NewTicker(ownOutboxPurge)
	defer tick.Stop()
	for {
		_, err := purge(ctx, box, outbox.PurgeOptions{Status: outbox.Sent, OlderThan: ownOutboxKeep})
		if err == nil {
			err = purgeSent(ctx, box.db, ownOutboxSent)
		}
		if err != nil && ctx.Err() == nil {
			o.hub.log.LogAttrs(ctx, slog.LevelWarn, "failed to delete sent records of the outbox", slog.Any("error", err))
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// addition is a record to store for a principal, with a channel for the single result.
type addition struct {
	record    *outbox.Record
	principal string
	stored    chan error
}

// Add implements facade.Outbox.
func (o *ownOutbox) Add(ctx context.Context, topic string, payload []byte, opts jetstream.PublishOptions) (id string, err error) {
	if err := o.publisher.Admit(ctx, topic, payload, &opts); err != nil {
		return "", err
	}
	if err := o.publisher.Reserve(ctx, topic, opts.Key, opts.CountFor); err != nil {
		return "", err
	}
	if err := o.open(ctx); err != nil {
		return "", err
	}
	r := &outbox.Record{
		ID: opts.ID, Topic: topic, Key: opts.Key, Payload: payload, Headers: opts.Headers, SID: opts.SID,
		Tags: opts.Tags, CausedBy: opts.CausedBy, Tombstone: opts.Tombstone, TS: opts.TS,
	}
	a := &addition{record: r, principal: opts.CountFor, stored: make(chan error, 1)}
	select {
	case o.queue <- a:
		err = <-a.stored // wait even if ctx ends, because the payload belongs to the caller
	case <-ctx.Done():
		err = ctx.Err()
	case <-o.ended:
		err = errOwnOutboxClosed
	}
	if err != nil && !errors.Is(err, errKnown) {
		return "", err
	}
	return r.ID, nil
}

// write stores concurrent additions in one transaction until ctx ends. A transaction per record
// would sync the disk for each.
func (o *ownOutbox) write(ctx context.Context, box *drainedOutbox) {
	defer close(o.ended)
	for {
		var batch []*addition
		bytes := 0
		add := func(a *addition) {
			batch = append(batch, a)
			bytes += len(a.record.Payload)
		}
		select {
		case a := <-o.queue:
			add(a)
		case <-ctx.Done():
			return
		}
		for more := true; more && len(batch) < ownOutboxBatch && bytes < ownOutboxBytes; {
			select {
			case a := <-o.queue:
				add(a)
			default:
				more = false
			}
		}
		answers, err := o.storeBatch(context.WithoutCancel(ctx), box, batch)
		for i, a := range batch {
			if err != nil {
				a.stored <- err
			} else {
				a.stored <- answers[i]
			}
		}
		box.drainer.Wake()
	}
}

// storeBatch returns a result for each addition. If it returns an error, nothing was stored.
func (o *ownOutbox) storeBatch(ctx context.Context, box *drainedOutbox, batch []*addition) (answers []error, err error) {
	ctx, cancel := context.WithTimeout(ctx, ownOutboxWrite)
	defer cancel()
	tx, err := box.db.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer func() { _ = tx.Rollback() }() // no effect after the commit
	answers = make([]error, len(batch))
	var added []*addition
	used := make(map[string]*usage)
	for i, a := range batch {
		if answers[i], err = o.store(ctx, tx, box, a, used); err != nil {
			return nil, err
		}
		if answers[i] == nil {
			added = append(added, a)
		}
	}
	if err := notePosters(ctx, tx, added); err != nil {
		return nil, err
	}
	if err := tx.Commit(); err != nil {
		return nil, err
	}
	o.tell(used[""])
	return answers, nil
}

// errKnown is the result for a record that is already stored: the same topic and id mean the same
// event.
var errKnown = errors.New("record is already in the outbox")

// store adds a record unless a limit forbids it. used holds what records of principals take,
// including those of this transaction. After an error nothing of the transaction may be stored.
func (o *ownOutbox) store(ctx context.Context, tx *sql.Tx, box *drainedOutbox, a *addition, used map[string]*usage) (answer, err error) {
	for _, principal := range []string{"", a.principal} {
		if used[principal] != nil {
			continue
		}
		u, err := readUsage(ctx, tx, principal)
		if err != nil {
			return nil, err
		}
		used[principal] = &u
	}
	n := size(a.record)
	for _, limit := range o.limits {
		u := used[""]
		if limit.own {
			u = used[a.principal]
		}
		if limit.clients && a.principal == ownPrincipal || !limit.exceeded(u, n) {
			continue
		}
		if a.record.ID != "" {
			var known bool
			err := tx.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM outbox WHERE id = ? AND aggregatetype = ?)", a.record.ID, a.record.Topic).Scan(&known)
			if known || err != nil {
				return errKnown, err
			}
		}
		o.hub.metrics.LimitReached(limit.name)
		return limit.full(), nil
	}
	err = box.sql.Add(ctx, tx, a.record)
	if e, ok := errors.AsType[*sqlite.Error](err); ok && e.Code() == sqlite3.SQLITE_CONSTRAINT_UNIQUE {
		return errKnown, nil // the failed INSERT left the transaction intact
	}
	if refused, ok := errors.AsType[*jetstream.Error](err); ok {
		return refused, nil
	}
	if err != nil {
		return nil, err
	}
	for _, u := range []*usage{used[""], used[a.principal]} {
		u.records++
		u.bytes += n
	}
	return nil, nil
}

// tell reports how many records wait.
func (o *ownOutbox) tell(all *usage) {
	o.state.metric.Records(int(all.records-all.parked), int(all.parked))
}

// ownLimit limits the unsent records.
type ownLimit struct {
	name  string
	most  int64
	bytes bool // not records
	own   bool // of each principal, not of all
	// clients exempts the hub's own token.
	clients bool
}

// ownOutbox returns the limits of the hub's own outbox.
func (f limitFlags) ownOutbox() []ownLimit {
	records, bytes := int64(f.OutboxPending), int64(f.OutboxBytes)
	return []ownLimit{
		{"principal_outbox_pending", cmp.Or(int64(f.PrincipalOutboxPending), (records+1)/2), false, true, f.PrincipalOutboxPending == 0},
		{"principal_outbox_bytes", cmp.Or(int64(f.PrincipalOutboxBytes), (bytes+1)/2), true, true, f.PrincipalOutboxBytes == 0},
		{"outbox_pending", records, false, false, false},
		{"outbox_bytes", bytes, true, false, false},
	}
}

// exceeded reports whether a record of n bytes more would exceed the limit.
func (l *ownLimit) exceeded(u *usage, n int64) bool {
	if l.bytes {
		return u.bytes+n > l.most
	}
	return u.records >= l.most
}

// full is the answer to a post beyond the limit.
func (l *ownLimit) full() error {
	what, whose := strconv.FormatInt(l.most, 10)+" events", "The outbox is full"
	if l.bytes {
		what = strconv.FormatInt(l.most, 10) + " bytes of events"
	}
	if l.own {
		whose = "This client's share of the outbox is full"
	}
	return &jetstream.Error{Code: jetstream.CodeOverloaded, Msg: whose + ": at most " + what + " may wait to be published (" + l.name + ")."}
}

// close stops adding and closes the outbox.
func (o *ownOutbox) close(ctx context.Context) error {
	o.mu.Lock()
	box := o.box
	o.box, o.closed = nil, true
	o.mu.Unlock()
	if box == nil {
		return nil
	}
	o.cancel()
	o.wg.Wait()
	return box.close(ctx, o.hub.log)
}

// ownStore reports after each settlement how many records still wait.
type ownStore struct {
	outbox.Store

	own *ownOutbox
	db  *sql.DB
}

// Settle implements outbox.Store.
func (s ownStore) Settle(ctx context.Context, worker string, st outbox.Settlement) (outbox.Unsettled, error) {
	left, err := s.Store.Settle(ctx, worker, st)
	if all, rerr := readUsage(ctx, s.db, ""); rerr == nil { // else the next report is right
		s.own.tell(&all)
	}
	return left, err
}

// ownBus publishes records of the hub's own outbox. A topic that this hub has not reserved for its
// poster, because another process took the post, counts for the poster when it is made.
type ownBus struct {
	outbox.Bus

	publisher *jetstream.Publisher
	db        *sql.DB
}

// Publish implements outbox.Bus.
func (b ownBus) Publish(ctx context.Context, topic string, payload []byte, opts jetstream.PublishOptions) (jetstream.Receipt, error) {
	if !b.publisher.Knows(topic) {
		poster, err := posterOf(ctx, b.db, topic, opts.ID)
		if err != nil {
			poster = nobodyKnown // the record is published all the same
		}
		opts.CountFor = poster
	}
	return b.Bus.Publish(ctx, topic, payload, opts)
}
