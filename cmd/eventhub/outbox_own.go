package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/outbox"
)

const (
	// ownOutboxName is the file in the data directory that POST /outbox writes to.
	ownOutboxName = "outbox.db"
	// Sent records are kept for ownOutboxKeep, so that repeated ids are detected. Older ones are
	// purged every ownOutboxPurge.
	ownOutboxKeep  = 10 * time.Minute
	ownOutboxPurge = 15 * time.Second
	// ownOutboxBatch is the maximum number of records stored in one transaction. ownOutboxWrite is
	// the timeout of that transaction.
	ownOutboxBatch = 256
	ownOutboxWrite = 10 * time.Second
	// ownOutboxLease may be short, because another hub hardly ever uses the same file.
	ownOutboxLease = 5 * time.Second
	// limitOutboxPending is the name of the limit on unsent records.
	limitOutboxPending = "outbox_pending"
)

var errOwnOutboxClosed = errors.New("outbox is closed")

// ownOutbox is the hub's own outbox, which serves POST /outbox. It creates its file on first use.
// Its methods may be called concurrently.
type ownOutbox struct {
	hub       *hub
	publisher *jetstream.Publisher // checks whether an event can be published
	path      string
	max       int64
	state     *outboxState

	// unsent is the approximate number of unsent records. Each call of Backlog corrects it.
	unsent atomic.Int64
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
	_ facade.Outbox   = (*ownOutbox)(nil)
	_ outbox.Observer = ownObserver{}
)

func newOwnOutbox(h *hub, path string) *ownOutbox {
	return &ownOutbox{
		hub: h, publisher: h.bus.NewPublisher(), path: path, max: int64(h.cmd.OutboxPending), state: h.newOutboxState(outboxOfHTTP),
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
	if o.box, err = o.hub.drain(ctx, box, o.state, ownOutboxLease, ownObserver{outboxObserver{o.state.metric}, o}); err != nil {
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

// tidy periodically deletes old sent records until ctx ends.
func (o *ownOutbox) tidy(ctx context.Context, box *openedOutbox) {
	tick := time.NewTicker(ownOutboxPurge)
	defer tick.Stop()
	for {
		if _, err := purge(ctx, box, outbox.PurgeOptions{Status: outbox.Sent, OlderThan: ownOutboxKeep}); err != nil && ctx.Err() == nil {
			o.hub.log.LogAttrs(ctx, slog.LevelWarn, "failed to delete sent records of the outbox", slog.Any("error", err))
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// addition is a record to store, with a channel for the single result.
type addition struct {
	record *outbox.Record
	stored chan error
}

// Add implements facade.Outbox.
func (o *ownOutbox) Add(ctx context.Context, topic string, payload []byte, opts jetstream.PublishOptions) (id string, err error) {
	if err := o.publisher.Admit(topic, payload, opts); err != nil {
		return "", err
	}
	if err := o.open(ctx); err != nil {
		return "", err
	}
	if o.unsent.Add(1) > o.max {
		o.unsent.Add(-1)
		o.hub.metrics.LimitReached(limitOutboxPending)
		return "", &jetstream.Error{Code: jetstream.CodeOverloaded, Msg: "The outbox is full: as many events as it takes wait to be published."}
	}
	r := &outbox.Record{
		ID: opts.ID, Topic: topic, Key: opts.Key, Payload: payload, Headers: opts.Headers, SID: opts.SID,
		Tags: opts.Tags, CausedBy: opts.CausedBy, Tombstone: opts.Tombstone, TS: opts.TS,
	}
	a := &addition{record: r, stored: make(chan error, 1)}
	select {
	case o.queue <- a:
		err = <-a.stored // wait even if ctx ends, because the payload belongs to the caller
	case <-ctx.Done():
		err = ctx.Err()
	case <-o.ended:
		err = errOwnOutboxClosed
	}
	switch {
	case errors.Is(err, errKnown):
		o.unsent.Add(-1)
	case err != nil:
		o.unsent.Add(-1)
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
		select {
		case a := <-o.queue:
			batch = append(batch, a)
		case <-ctx.Done():
			return
		}
		for more := true; more && len(batch) < ownOutboxBatch; {
			select {
			case a := <-o.queue:
				batch = append(batch, a)
			default:
				more = false
			}
		}
		answers, err := storeBatch(context.WithoutCancel(ctx), box, batch)
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
func storeBatch(ctx context.Context, box *drainedOutbox, batch []*addition) (answers []error, err error) {
	ctx, cancel := context.WithTimeout(ctx, ownOutboxWrite)
	defer cancel()
	tx, err := box.db.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer func() { _ = tx.Rollback() }() // no effect after the commit
	answers = make([]error, len(batch))
	for i, a := range batch {
		err := box.sql.Add(ctx, tx, a.record)
		if e, ok := errors.AsType[*sqlite.Error](err); ok && e.Code() == sqlite3.SQLITE_CONSTRAINT_UNIQUE {
			err = known(ctx, tx, a.record) // the failed INSERT left the transaction intact
		}
		_, refused := errors.AsType[*jetstream.Error](err)
		if err != nil && !refused && !errors.Is(err, errKnown) {
			return nil, err
		}
		answers[i] = err
	}
	return answers, tx.Commit()
}

// errKnown is returned for a record that is already stored.
var errKnown = errors.New("record is already in the outbox")

// known returns the result for a duplicate id. The same id and topic mean the same event.
func known(ctx context.Context, tx *sql.Tx, r *outbox.Record) error {
	var topic string
	if err := tx.QueryRowContext(ctx, "SELECT aggregatetype FROM "+outbox.DefaultTable+" WHERE id = ?", r.ID).Scan(&topic); err != nil {
		return fmt.Errorf("look up record %q: %w", r.ID, err)
	}
	if topic != r.Topic {
		return &jetstream.Error{Code: jetstream.CodeBadOptions, Msg: "The outbox has an event of this id for another topic."}
	}
	return errKnown
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

// ownObserver updates the count of unsent records.
type ownObserver struct {
	outboxObserver

	own *ownOutbox
}

func (o ownObserver) Published(age time.Duration, found bool) {
	o.own.unsent.Add(-1)
	o.outboxObserver.Published(age, found)
}

func (o ownObserver) Backlog(st outbox.Stats) {
	o.own.unsent.Store(int64(st.Pending + st.Claimed + st.Errors))
	o.outboxObserver.Backlog(st)
}
