package outbox_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/outbox"
	"eventhub/outbox/pgtest"
)

// The full form of the crash test is
// -crash.rate=0 -crash.tx=50000 -crash.kills=120 -crash.seeds=20.
var (
	crashTx    = flag.Int("crash.tx", 400, "how many transactions the crash test runs for each database")
	crashKills = flag.Int("crash.kills", 6, "how many processes it kills meanwhile")
	crashRate  = flag.Int("crash.rate", 150, "how many transactions each of its two writers begins in a second, if it can; 0: as many as it can")
	crashSeed  = flag.Uint64("crash.seed", 1, "seed of its random moments and victims")
	crashSeeds = flag.Uint64("crash.seeds", 1, "how many seeds, from that one on")
)

// TestCrash kills writers, drainers, the NATS server and the database at random moments while
// transactions commit and roll back, and wants what the database says was committed: in the topics,
// once each, in order for each key, and nothing else.
func TestCrash(t *testing.T) {
	t.Parallel()
	for seed := *crashSeed; seed < *crashSeed+*crashSeeds; seed++ {
		t.Run(fmt.Sprint("sqlite/seed=", seed), func(t *testing.T) {
			t.Parallel()
			m := &matrix{TB: t, role: role{Dialect: outbox.SQLite, Address: sqliteAddress(filepath.Join(t.TempDir(), "test.db")), Seed: seed}}
			m.run()
		})
		t.Run(fmt.Sprint("postgres/seed=", seed), func(t *testing.T) {
			t.Parallel()
			c := pgtest.StartDurable(t)
			m := &matrix{TB: t, cluster: c, role: role{Dialect: outbox.PostgreSQL, Address: c.DSN() + "&default_query_exec_mode=exec", Seed: seed}}
			m.run()
		})
	}
}

// matrix is a run of the crash test.
type matrix struct {
	testing.TB
	role    role // of all writers and drainers
	cluster *pgtest.Cluster
	rnd     *rand.Rand
	nats    *natstest.Server
	victims []*victim
	started int

	mu         sync.Mutex
	committed  []string // as the writers say
	rolledBack map[string]bool
	unknown    int
	last       map[int]drained // what each drainer said last, by the number of its start
}

// victim is what can be killed.
type victim struct {
	name        string
	kill, start func()
}

func (m *matrix) run() {
	m.Helper()
	began := time.Now()
	m.prepare()
	m.victims = append(m.victims, &victim{name: "nats", kill: m.nats.Kill, start: m.nats.Start})
	writers := []*victim{m.add("writer", m.startWriter), m.add("writer", m.startWriter)}
	drainers := []*victim{m.add("drainer", m.startDrainer), m.add("drainer", m.startDrainer)}
	if m.cluster != nil {
		m.victims = append(m.victims, &victim{
			name: "database",
			kill: func() {
				if err := m.cluster.Kill(); err != nil {
					m.Fatal(err)
				}
			},
			start: func() {
				if err := m.cluster.Restart(m.Context()); err != nil {
					m.Fatal(err)
				}
			},
		})
	}
	killed := m.killAll(drainers)
	m.until(*crashTx)
	for _, w := range writers {
		w.kill()
	}
	wrote := time.Since(began)
	m.empty()
	took := time.Since(began)
	m.check()
	var sum drained
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, d := range m.last {
		sum.Duplicates, sum.Found, sum.Looks = sum.Duplicates+d.Duplicates, sum.Found+d.Found, sum.Looks+d.Looks
	}
	m.Logf("%d transactions committed, %d rolled back, %d cut off, in %v, all drained after %v; killed: %v; %d duplicates refused, %d events found by %d look-ups",
		len(m.committed), len(m.rolledBack), m.unknown, wrote.Round(time.Millisecond), took.Round(time.Millisecond), killed, sum.Duplicates, sum.Found, sum.Looks)
}

// prepare makes the tables, and what the children are told.
func (m *matrix) prepare() {
	m.Helper()
	m.rnd = rand.New(rand.NewPCG(m.role.Seed, 0))
	m.rolledBack, m.last = make(map[string]bool), make(map[int]drained)
	m.nats = natstest.Start(m)
	m.role.URL, m.role.Keys = m.nats.URL(), 50
	if err := m.role.setUp(m.Context()); err != nil {
		m.Fatal(err)
	}
}

func (m *matrix) add(name string, start func() *natstest.Child) *victim {
	c := start()
	v := &victim{name: name, kill: func() { c.Kill() }, start: func() { c = start() }}
	m.victims = append(m.victims, v)
	return v
}

func (m *matrix) startWriter() *natstest.Child {
	m.started++
	r := m.role
	if r.Rate == 0 {
		r.Rate = *crashRate
	}
	r.Name, r.Seed = fmt.Sprint("w", m.started), m.rnd.Uint64()
	return natstest.StartChild(m, "writer", r, func(line string) {
		m.mu.Lock()
		defer m.mu.Unlock()
		switch how, id, _ := strings.Cut(line, " "); how {
		case "c":
			m.committed = append(m.committed, id)
		case "r":
			m.rolledBack[id] = true
		case "u":
			m.unknown++
		}
	})
}

func (m *matrix) startDrainer() *natstest.Child {
	m.started++
	n := m.started
	return natstest.StartChild(m, "drainer", m.role, func(line string) {
		var d drained
		if err := json.Unmarshal([]byte(strings.TrimPrefix(line, "s ")), &d); err != nil {
			m.Errorf("a drainer says %q: %v", line, err)
			return
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		m.last[n] = d
	})
}

// killAll kills and restarts, evenly over the transactions, and says how often what. It begins with
// all drainers, which come back when topicShort has forgotten what they had published.
func (m *matrix) killAll(drainers []*victim) map[string]int {
	m.Helper()
	killed := make(map[string]int)
	for kill := 0; kill < *crashKills; {
		m.until(*crashTx * (kill + 1) / (*crashKills + 1))
		wait(m.Context(), time.Duration(m.rnd.IntN(200))*time.Millisecond)
		down, away := m.choose()
		if kill == 0 {
			down, away = drainers, shortWindow+200*time.Millisecond
		}
		for _, v := range down {
			v.kill()
			killed[v.name]++
		}
		kill += len(down)
		wait(m.Context(), away)
		for _, v := range down {
			v.start()
		}
	}
	return killed
}

// choose says what to kill, and for how long: back at once, or after others noticed, or after
// leases and windows.
func (m *matrix) choose() (down []*victim, away time.Duration) {
	together := 1
	if m.rnd.IntN(4) == 0 {
		together += 1 + m.rnd.IntN(2)
	}
	for _, i := range m.rnd.Perm(len(m.victims))[:together] {
		down = append(down, m.victims[i])
	}
	most := 100
	if m.rnd.IntN(8) == 0 {
		most = 3_000
	}
	return down, time.Duration(m.rnd.IntN(most)) * time.Millisecond
}

// until waits for so many transactions.
func (m *matrix) until(n int) {
	m.Helper()
	have := -1
	for {
		before := have
		eventually(m, "transactions go on", func() bool {
			m.mu.Lock()
			defer m.mu.Unlock()
			have = len(m.committed) + len(m.rolledBack)
			return have > before
		})
		if have >= n {
			return
		}
	}
}

// empty waits until the outbox has nothing to publish.
func (m *matrix) empty() {
	m.Helper()
	db, s, err := m.role.open()
	if err != nil {
		m.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	for left := -1; left != 0; {
		before := left
		eventually(m, "records are drained", func() bool {
			st, err := s.Stats(m.Context())
			if err != nil {
				m.Fatal(err)
			}
			if st.Errors > 0 {
				list, err := s.List(m.Context(), outbox.ListOptions{Status: outbox.Errored})
				m.Fatalf("%d records are parked, %v: the first is %+v", st.Errors, err, list[0])
			}
			left = st.Pending + st.Claimed
			return left != before
		})
	}
}

// check compares the topics with the business.
func (m *matrix) check() {
	m.Helper()
	db, _, err := m.role.open()
	if err != nil {
		m.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	rows, err := db.QueryContext(m.Context(), "SELECT topic, key, id FROM changes ORDER BY n")
	if err != nil {
		m.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	want, all := make(map[string][]string), make(map[string]bool)
	for rows.Next() {
		var topic, key, id string
		if err := rows.Scan(&topic, &key, &id); err != nil {
			m.Fatal(err)
		}
		want[topic+"/"+key] = append(want[topic+"/"+key], id)
		all[id] = true
	}
	if err := rows.Err(); err != nil {
		m.Fatal(err)
	}
	m.mu.Lock()
	for _, id := range m.committed {
		if !all[id] {
			m.Errorf("%s was committed, and the database has lost it", id)
		}
	}
	m.mu.Unlock()
	bus := openBus(m, jetstream.Config{URL: m.role.URL})
	got, total := make(map[string][]string), 0
	for _, topic := range []string{topicLong, topicShort} {
		if err := bus.History(topic).Scan(m.Context(), jetstream.ScanOptions{Limit: 10_000_000}, func(e *jetstream.Event) error {
			if !all[e.ID] {
				m.Errorf("%s is in the topic, and was not committed (rolled back: %v)", e.ID, m.rolledBack[e.ID])
			}
			got[topic+"/"+e.Key] = append(got[topic+"/"+e.Key], e.ID)
			total++
			return nil
		}); err != nil {
			m.Fatal(err)
		}
	}
	if total != len(all) {
		m.Errorf("the topics have %d events, and %d transactions were committed", total, len(all))
	}
	for lane, want := range want {
		got := got[lane]
		if strings.HasSuffix(lane, "/") { // no key, no order
			slices.Sort(got)
			slices.Sort(want)
		}
		if !slices.Equal(got, want) {
			m.Errorf("lane %s has %d events, want %d; %s", lane, len(got), len(want), firstDifference(got, want))
		}
	}
}

func firstDifference(got, want []string) string {
	for i, id := range got {
		if i >= len(want) || want[i] != id {
			return fmt.Sprintf("from %d on: %q, want %q", i, got[i:min(i+5, len(got))], want[min(i, len(want)):min(i+5, len(want))])
		}
	}
	return fmt.Sprintf("the last %d are not there", len(want)-len(got))
}
