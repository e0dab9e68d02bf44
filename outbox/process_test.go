package outbox_test

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats-server/v2/server"

	"eventhub/jetstream"
	"eventhub/outbox"
)

// childEnv says which program this test binary is to be: see TestMain.
const childEnv = "EVENTHUB_TEST_OUTBOX_CHILD"

// role is a program that a test starts, and may kill.
type role struct {
	What string // "nats", "writer" or "drainer"

	Port int    // nats
	Dir  string // nats

	Dialect outbox.Dialect // writer and drainer: the database
	Address string

	Name string // writer: begins the ids of its records
	Seed uint64
	Keys int
	Rate int // writer: transactions in a second; 0: as many as it can

	URL   string // drainer
	Heap  bool   // drainer: collect garbage before the heap is measured
	Limit int    // drainer: Config.InFlight; 0: default
}

// runChild ends with its standard input.
func runChild(what string) int {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	var r role
	err := json.Unmarshal([]byte(what), &r)
	if err == nil {
		switch r.What {
		case "nats":
			err = r.nats(ctx)
		case "writer":
			err = r.writer(ctx)
		case "drainer":
			err = r.drainer(ctx)
		default:
			err = fmt.Errorf("no such program: %q", r.What)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func (r *role) nats(ctx context.Context) error {
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: r.Port, JetStream: true, StoreDir: r.Dir, NoLog: true, NoSigs: true, SyncInterval: time.Second})
	if err != nil {
		return err
	}
	s.Start()
	if !s.ReadyForConnections(patience) {
		return errors.New("the server is not ready")
	}
	fmt.Println("ready")
	<-ctx.Done()
	s.Shutdown()
	s.WaitForShutdown()
	return nil
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

// The business of the writers: lanes that count their changes, and the changes. Whoever changes a lane has its row, so that
// the changes of a lane follow each other.
var business = []string{
	"CREATE TABLE lanes (topic TEXT NOT NULL, key TEXT NOT NULL, n BIGINT NOT NULL, PRIMARY KEY (topic, key))",
	"CREATE TABLE changes (topic TEXT NOT NULL, key TEXT NOT NULL, n BIGINT NOT NULL, id TEXT NOT NULL)",
}

// Topics of the writers. That which is short remembers ids for so short a time that what may have been published before is
// looked up.
const (
	topicLong  = "orders"
	topicShort = "bills"
)

const shortWindow = 2 * time.Second

var crashTopics = []jetstream.TopicRule{{Pattern: topicShort, DuplicateWindow: shortWindow}}

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

// writer commits and rolls back transactions, some at a time, and says which: "c <id>" and "r <id>".
func (r *role) writer(ctx context.Context) error {
	db, s, err := r.open()
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	fmt.Println("ready")
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

func (m *meter) FindIDs(ctx context.Context, s jetstream.IDSearch) (map[string]bool, bool, error) {
	m.looks.Add(1)
	return m.Bus.FindIDs(ctx, s)
}

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

func (r *role) drainer(ctx context.Context) error {
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
		Poll: 50 * time.Millisecond, RetryFirst: 10 * time.Millisecond, RetryMost: 200 * time.Millisecond,
	})
	if err != nil {
		return err
	}
	d.Start()
	fmt.Println("ready")
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

// child is a program that runs.
type child struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	ready chan struct{} // closed when it says so, or ends
	ended chan struct{} // closed when all that it said was heard
}

// startChild starts a program. heard is called for each line that it says once it is ready, by one goroutine.
func startChild(tb testing.TB, r role, heard func(line string)) *child {
	tb.Helper()
	path, err := os.Executable()
	if err != nil {
		tb.Fatal(err)
	}
	what, err := json.Marshal(r)
	if err != nil {
		tb.Fatal(err)
	}
	c := &child{cmd: exec.Command(path), ready: make(chan struct{}), ended: make(chan struct{})}
	c.cmd.Env = append(os.Environ(), childEnv+"="+string(what))
	c.cmd.Stderr = tb.Output()
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		tb.Fatal(err)
	}
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		tb.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	go func() {
		defer close(c.ended)
		in := bufio.NewReader(out)
		_, err := in.ReadString('\n')
		close(c.ready)
		for err == nil {
			var line string
			if line, err = in.ReadString('\n'); err == nil && heard != nil { // one without an end was cut off
				heard(strings.TrimSuffix(line, "\n"))
			}
		}
	}()
	tb.Cleanup(c.kill)
	return c
}

func (c *child) awaitReady(tb testing.TB) {
	tb.Helper()
	select {
	case <-c.ready:
	case <-time.After(patience):
		tb.Fatal("a child process is not ready")
	}
}

// kill kills it by SIGKILL, if it runs, and waits until it is gone.
func (c *child) kill() {
	if c.cmd.ProcessState != nil {
		return
	}
	_ = c.cmd.Process.Kill() // an error means that it has ended
	<-c.ended
	_ = c.cmd.Wait()
	_ = c.stdin.Close()
}

// stop ends it in good order.
func (c *child) stop(tb testing.TB) {
	tb.Helper()
	_ = c.stdin.Close()
	select {
	case <-c.ended:
	case <-time.After(patience):
		tb.Error("a child process does not end")
		c.kill()
		return
	}
	if err := c.cmd.Wait(); err != nil {
		tb.Errorf("a child process: %v", err)
	}
}

// freePort is a TCP port of this host that nobody listens at. A server keeps its when it comes back.
func freePort(tb testing.TB) int {
	tb.Helper()
	l, err := (&net.ListenConfig{}).Listen(tb.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	addr, ok := l.Addr().(*net.TCPAddr)
	if !ok {
		tb.Fatal("no TCP address")
	}
	return addr.Port
}
