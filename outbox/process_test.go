package outbox_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
	"eventhub/outbox"
)

// role is what a child process is told: a writer or a drainer.
type role struct {
	Dialect outbox.Dialect // the database
	Address string

	Name string // writer: begins the ids of its records
	Seed uint64
	Keys int
	Rate int // writer: transactions in a second; 0: as many as it can

	URL   string // drainer
	Heap  bool   // drainer: collect garbage before the heap is measured
	Limit int    // drainer: Config.InFlight; 0: default
}

// open opens the role's database and its outbox.
func (r *role) open() (*sql.DB, *outbox.SQLStore, error) {
	cfg := outbox.SQLConfig{Dialect: r.Dialect}
	driver := "sqlite"
	if r.Dialect == outbox.PostgreSQL {
		driver = "pgx"
		cfg.Listen = outbox.PgxListener(func(ctx context.Context) (*pgx.Conn, error) { return pgx.Connect(ctx, r.Address) })
	}
	db, err := sql.Open(driver, r.Address)
	if err != nil {
		return nil, nil, err
	}
	db.SetMaxIdleConns(8)
	cfg.DB = db
	s, err := outbox.NewSQLStore(cfg)
	return db, s, err
}

// query writes a query with $1 and so on as the dialect does.
func (r *role) query(q string) string {
	if r.Dialect == outbox.SQLite {
		return strings.ReplaceAll(q, "$", "?")
	}
	return q
}

// The business of the writers: lanes that count their changes, and the changes. Whoever changes a
// lane has its row, so that the changes of a lane follow each other.
var business = []string{
	"CREATE TABLE lanes (topic TEXT NOT NULL, key TEXT NOT NULL, n BIGINT NOT NULL, PRIMARY KEY (topic, key))",
	"CREATE TABLE changes (topic TEXT NOT NULL, key TEXT NOT NULL, n BIGINT NOT NULL, id TEXT NOT NULL)",
}

// Topics of the writers. That which is short remembers ids for so short a time that what may have
// been published before is looked up.
const (
	topicLong  = "orders"
	topicShort = "bills"
)

const shortWindow = 2 * time.Second

var crashTopics = []topics.Rule{{Pattern: topicShort, DuplicateWindow: shortWindow}}

// setUp makes the tables and the lanes. Of each topic the first lane has no key.
func (r *role) setUp(ctx context.Context) error {
	db, s, err := r.open()
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	if _, err := s.Migrate(ctx); err != nil {
		return err
	}
	for _, q := range business {
		if _, err := db.ExecContext(ctx, q); err != nil {
			return err
		}
	}
	for i := range r.Keys {
		for _, topic := range []string{topicLong, topicShort} {
			if _, err := db.ExecContext(ctx, r.query("INSERT INTO lanes (topic, key, n) VALUES ($1, $2, 0)"), topic, laneKey(i)); err != nil {
				return err
			}
		}
	}
	return nil
}

func laneKey(i int) string {
	if i == 0 {
		return ""
	}
	return fmt.Sprint("k", i)
}

// writer commits and rolls back transactions, some at a time, and says which: "c <id>" and "r
// <id>".
func writer(ctx context.Context, r *role) error {
	db, s, err := r.open()
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	natstest.Ready()
	var next atomic.Int64
	var all sync.WaitGroup
	var pace <-chan time.Time
	if r.Rate > 0 {
		t := time.NewTicker(time.Second / time.Duration(r.Rate))
		defer t.Stop()
		pace = t.C
	}
	lines := 4
	if r.Dialect == outbox.SQLite {
		lines = 1 // it has one writer at a time anyway
	}
	for line := range lines {
		all.Go(func() {
			rnd := rand.New(rand.NewPCG(r.Seed, uint64(line)))
			for ctx.Err() == nil {
				if pace != nil {
					select {
					case <-pace:
					case <-ctx.Done():
						return
					}
				}
				if err := r.write(ctx, db, s, rnd, fmt.Sprintf("%s-%d", r.Name, next.Add(1))); err != nil {
					wait(ctx, 50*time.Millisecond) // the database is away
				}
			}
		})
	}
	all.Wait()
	return nil
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// write runs one transaction.
func (r *role) write(ctx context.Context, db *sql.DB, s *outbox.SQLStore, rnd *rand.Rand, id string) error {
	topic, key := topicLong, laneKey(rnd.IntN(r.Keys))
	if rnd.IntN(2) == 0 {
		topic = topicShort
	}
	end := rnd.IntN(10) // 0 rolls back before the event is added, 1 and 2 after
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	err = func() error {
		var n int64
		if err := tx.QueryRowContext(ctx, r.query("UPDATE lanes SET n = n + 1 WHERE topic = $1 AND key = $2 RETURNING n"), topic, key).Scan(&n); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, r.query("INSERT INTO changes (topic, key, n, id) VALUES ($1, $2, $3, $4)"), topic, key, n, id); err != nil {
			return err
		}
		if end == 0 {
			return nil
		}
		return s.Add(ctx, tx, &outbox.Record{ID: id, Topic: topic, Key: key, Type: "changed", Payload: fmt.Appendf(nil, `{"n":%d}`, n)})
	}()
	if err != nil || end < 3 {
		_ = tx.Rollback()
		fmt.Println("r " + id)
		return err
	}
	if err := tx.Commit(); err != nil {
		fmt.Println("u " + id) // unknown
		return err
	}
	fmt.Println("c " + id)
	return nil
}

// meter is a bus whose publishes are counted.
type meter struct {
	*jetstream.Bus
	tries, duplicates, looks, now, most atomic.Int64
}

func (m *meter) Publish(ctx context.Context, topic string, payload []byte, o jetstream.PublishOptions) (jetstream.Receipt, error) {
	m.tries.Add(1)
	n := m.now.Add(1)
	defer m.now.Add(-1)
	for most := m.most.Load(); n > most && !m.most.CompareAndSwap(most, n); most = m.most.Load() {
	}
	r, err := m.Bus.Publish(ctx, topic, payload, o)
	if err == nil && r.Duplicate {
		m.duplicates.Add(1)
	}
	return r, err
}

func (m *meter) History(topic string) outbox.History {
	return counting{m.Bus.History(topic), &m.looks}
}

func (m *meter) Now(ctx context.Context) (time.Time, error) { return m.Bus.Admin().NATS().Now(ctx) }

// drained is what a drainer says of itself, in lines "s <JSON>".
type drained struct {
	Published, Found, Tries, Duplicates, Looks, Most, Failed int64
	Heap                                                     uint64
}

// Times of the drainers. A publish must take no longer than the margin.
const (
	crashLease  = time.Second
	crashMargin = shortWindow - 100*time.Millisecond
	crashTell   = 100 * time.Millisecond
)

func drainer(ctx context.Context, r *role) error {
	db, s, err := r.open()
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	var bus *jetstream.Bus
	for bus == nil {
		if bus, err = jetstream.Open(ctx, jetstream.Config{URL: r.URL, Topics: crashTopics}); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			wait(ctx, 50*time.Millisecond) // NATS is away
		}
	}
	defer func() { _ = bus.Close() }()
	m, seen := &meter{Bus: bus}, new(counts)
	d, err := outbox.NewDrainer(outbox.Config{
		Store: s, Bus: m, Observer: seen, InFlight: r.Limit, Lease: crashLease, Margin: crashMargin, PublishTimeout: time.Second,
		Poll: 50 * time.Millisecond, RetryFirst: 10 * time.Millisecond, RetryMax: 200 * time.Millisecond,
	})
	if err != nil {
		return err
	}
	d.Start()
	natstest.Ready()
	for ctx.Err() == nil {
		wait(ctx, crashTell)
		var mem runtime.MemStats
		if r.Heap {
			runtime.GC()
			runtime.ReadMemStats(&mem)
		}
		line, err := json.Marshal(drained{
			Published: seen.published.Load(), Found: seen.found.Load(), Tries: m.tries.Load(), Duplicates: m.duplicates.Load(),
			Looks: m.looks.Load(), Most: m.most.Load(), Failed: seen.failed.Load(), Heap: mem.HeapAlloc,
		})
		if err != nil {
			return err
		}
		fmt.Println("s " + string(line))
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	return d.Stop(stop)
}
