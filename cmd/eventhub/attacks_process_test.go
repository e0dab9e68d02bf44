//go:build unix

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	psutil "github.com/shirou/gopsutil/v4/process"

	"eventhub/sdk/go/wire"
)

// An attack is what a client with a narrow token of its own does to hurt the others.
type attack struct {
	name string
	// scopes are those of the attacker's token, whose subject is the attack's name.
	scopes []string
	// run attacks until ctx ends. It runs in a process of its own, which has half a core. What it
	// reports is in the test's log.
	run func(ctx context.Context, a *attacker)
	// like is the same load by a permitted client, where that of permitted is another.
	like func(ctx context.Context, a *attacker)
	// beside is what others do meanwhile, for so long, and returns their times; nil when the
	// neighbour is enough.
	beside func(t *testing.T, f *floodedHub, d time.Duration) latency
	// alone keeps the attack from those of all at once: newcomers from the attackers' address have
	// no room beside it.
	alone bool
	// check looks at the hub after the attack; nil when the neighbour's fate and the bounds of
	// memory and disk say all.
	check func(t *testing.T, f *floodedHub)
	// memory and disk are the MiB by which the hub may grow. 0 means 256 and 64.
	memory, disk int
}

// attacks are all attacks, one for each way in which a client could break the hub for others.
var attacks = slices.Concat(
	httpAttacks,
	outboxAttacks,
	groupAttacks,
	letterAttacks,
	tokenAttacks,
	schemaAttacks,
	strangerAttacks,
	nativeAttacks,
	unreadAttacks,
)

// permitted is the load of a client that keeps to its scopes and rates: what the neighbour's time
// beside an attack is held against.
var permitted = attack{name: "permitted", scopes: []string{"*:permitted.**"}, run: permittedLoad}

const (
	attackName = "attack" // this test binary when it attacks
	// attackersBegin is what its process says first.
	attackersBegin = "the attackers begin\n"
	// likeSuffix follows the name of an attack whose permitted load is meant.
	likeSuffix = ", permitted"
	// attackShare is the part of one core that an attacker's process may use.
	attackShare = 0.5
	// attackFactor is by how much an attack may raise the neighbour's 99th percentiles over those
	// beside a permitted client. Attacks of less than attackTelling do not tell.
	attackFactor  = 3
	attackTelling = 10 * time.Second
	// attackTries is how often an attack may be tried whose neighbour had to wait. Harm is done
	// each time; a machine whose disk or cores stall for a second does not do so each time.
	attackTries = 3
	// memoryKept is the MiB that the hub may have in use memoryReturns after the end of all
	// attacks, beyond what a hub has that begins with the same data. The server keeps all keys in
	// memory, also those that are removed. The resident set is larger, for Go returns only whole
	// pages.
	memoryKept    = 100
	memoryReturns = time.Minute
)

// newAttackedHub starts a hub with a topics file, an outbox, and a neighbour. The hub stores one
// part-th of the keys and topics that native attacks look through.
func newAttackedHub(t *testing.T, part int) *floodedHub {
	t.Helper()
	dir := t.TempDir()
	topics := filepath.Join(dir, "topics.yaml")
	if err := os.WriteFile(topics, []byte(attackedTopics), 0o600); err != nil {
		t.Fatal(err)
	}
	f := newFloodedHub(t, "--topics="+topics, "--data="+filepath.Join(dir, "data"), "--projector", "--nats-listen=127.0.0.1:0", "--limit-principal-held="+strconv.Itoa(heldByOne))
	fillNatively(t, f, part)
	f.dir, f.topics = filepath.Join(dir, "data"), topics
	return f
}

// attackedTopics are the topics of the hub that is attacked.
const attackedTopics = `topics:
  - topic: neighbour.kept
    retention: {messages: 100000}
    compaction: true
  - topic: attack.keys
    retention: {messages: 100000}
    compaction: true
    max_keys: 200000
  - topic: attack.removed
    retention: {messages: 100000}
    compaction: true
    max_keys: 200000
  - topic: attack.outbox
    retention: {bytes: 32MiB}
  - pattern: attack.schemas.*
    schema: enforce
  - topic: attack.schemas.without.any
    retention: {bytes: 32MiB}
  - topic: attack.pages.kept
    retention: {messages: 100000}
    compaction: true
`

// restart ends the hub and starts it with the same data. The neighbour is served at most 10 s
// later.
func (f *floodedHub) restart(t *testing.T) *node {
	t.Helper()
	f.neighbour.stop()
	f.hub.terminateWithin(syscall.SIGTERM, 30*time.Second)
	began := time.Now()
	n := startNode(t, "--jwt-secret-file="+f.secretFile, "--topics="+f.topics, "--data="+f.dir)
	c := n.dialWith(f.sign(t, "neighbour", "*:neighbour.**"))
	publishTo(t, c, "neighbour", "1")
	took := time.Since(began)
	t.Logf("restarted in %v", took.Round(time.Millisecond))
	if took > slowdown*10*time.Second {
		t.Errorf("the hub took %v to restart", took)
	}
	return n
}

// live returns the MiB that objects in the heap of a hub take right after a collection. Go collects
// every two minutes at least.
func live(t *testing.T, n *node) int {
	t.Helper()
	began := float64(time.Now().Unix())
	for metricOf(t, n, "go_memstats_last_gc_time_seconds") <= began {
		if float64(time.Now().Unix()) > began+300 {
			t.Fatal("the hub does not collect garbage")
		}
		<-time.After(100 * time.Millisecond)
	}
	return int(metricOf(t, n, "go_memstats_heap_alloc_bytes")) >> 20
}

// times are how long the neighbour's events, requests and joins took beside an attack, and what
// others did, which may take twice as long.
type times struct{ events, requests, joins, others latency }

func (l times) String() string {
	return fmt.Sprintf("events %v; requests %v; joins %v; others %v", l.events, l.requests, l.joins, l.others)
}

// patient reports whether nobody waited for longer than factor times what the neighbour bears. On a
// machine on which it waits beside a permitted client, too, it bears more.
func (l times) patient(factor int, permitted times) bool {
	bears := func(beside latency) time.Duration {
		return time.Duration(factor) * max(neighbourPatience, attackFactor*beside.p99)
	}
	return l.events.p99 <= bears(permitted.events) && l.requests.p99 <= bears(permitted.requests) &&
		l.joins.p99 <= bears(permitted.joins) && l.others.p99 <= 2*bears(permitted.requests)
}

// under runs attacks in one process for a while.
func (f *floodedHub) under(t *testing.T, d time.Duration, all ...attack) (got times) {
	t.Helper()
	plans := make([]attackPlan, len(all))
	for i, a := range all {
		plans[i] = attackPlan{Name: a.name, Token: f.sign(t, "attacker-"+strings.ReplaceAll(strings.TrimSuffix(a.name, likeSuffix), " ", "-"), a.scopes...)}
	}
	p := startAttackers(t, attackTarget{WS: f.hub.url, HTTP: f.hub.http, Ops: f.hub.ops, NATS: f.hub.nats, Plans: plans})
	requested, joined := f.neighbour.requests.mark(), f.neighbour.joins.mark()
	got.events = f.neighbour.during(func() {
		beside := func(*testing.T, *floodedHub, time.Duration) latency {
			f.pass(d)
			return latency{}
		}
		for _, a := range all {
			if a.beside != nil {
				beside = a.beside
			}
		}
		got.others = beside(t, f, d)
	})
	got.requests = f.neighbour.requests.since(t, requested)
	got.joins = f.neighbour.joins.since(t, joined)
	used := p.stop()
	t.Logf("%v; attackers used %.2f of a core", got, used)
	return got
}

// disk is the size of the hub's data directory, in MiB.
func (f *floodedHub) disk(t *testing.T) int {
	t.Helper()
	var bytes int64
	// Files come and go meanwhile.
	_ = filepath.Walk(f.dir, func(_ string, info os.FileInfo, err error) error {
		if err == nil && info.Mode().IsRegular() {
			bytes += info.Size()
		}
		return nil
	})
	return int(bytes >> 20)
}

func orDefault(n, otherwise int) int {
	if n == 0 {
		return otherwise
	}
	return n
}

// attackPlan is one attack of an attackers' process.
type attackPlan struct{ Name, Token string }

// attackTarget is what an attackers' process attacks.
type attackTarget struct {
	WS, HTTP, Ops, NATS string

	Plans []attackPlan
}

// attackers is a process that attacks. It is stopped whenever it has had more than its share of a
// core.
type attackers struct {
	t       *testing.T
	cmd     *exec.Cmd
	process *psutil.Process
	began   time.Time // of the attacks, without the start of the process
	before  float64   // what the process had used by then, in seconds of a core
	stopped chan struct{}
	held    chan struct{} // closed when nobody holds the process any more
	out     lockedBuffer
}

func startAttackers(t *testing.T, target attackTarget) *attackers {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(target)
	if err != nil {
		t.Fatal(err)
	}
	p := &attackers{t: t, cmd: exec.Command(path), stopped: make(chan struct{}), held: make(chan struct{})}
	p.cmd.Args = []string{attackName}
	p.cmd.Stdin = bytes.NewReader(text)
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.out
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if p.process, err = psutil.NewProcess(int32(p.cmd.Process.Pid)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.stop() })
	waitFor(t, "the attackers begin", func() bool { return strings.HasPrefix(p.out.String(), attackersBegin) })
	p.began, p.before = time.Now(), p.cpu()
	go p.hold()
	return p
}

// hold keeps the process to attackShare.
func (p *attackers) hold() {
	defer close(p.held)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	resting := false
	for {
		select {
		case <-p.stopped:
			return
		case <-tick.C:
		}
		over := p.cpu()-p.before > attackShare*time.Since(p.began).Seconds()
		if over != resting {
			resting = over
			if over {
				_ = p.cmd.Process.Signal(syscall.SIGSTOP)
			} else {
				_ = p.cmd.Process.Signal(syscall.SIGCONT)
			}
		}
	}
}

// cpu is how many seconds of a core the process has used.
func (p *attackers) cpu() float64 {
	times, err := p.process.Times()
	if err != nil {
		return 0
	}
	return times.User + times.System
}

// stop ends the process and returns the part of a core it had.
func (p *attackers) stop() (used float64) {
	p.t.Helper()
	select {
	case <-p.stopped:
		return 0
	default:
	}
	close(p.stopped)
	if !p.began.IsZero() {
		<-p.held
	}
	used = (p.cpu() - p.before) / time.Since(p.began).Seconds()
	_ = p.cmd.Process.Signal(syscall.SIGCONT)
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	limit := time.AfterFunc(patience, func() { _ = p.cmd.Process.Kill() })
	defer limit.Stop()
	if err := p.cmd.Wait(); err != nil {
		p.t.Errorf("the attackers failed: %v", err)
	}
	for line := range strings.Lines(strings.TrimPrefix(p.out.String(), attackersBegin)) {
		p.t.Log(strings.TrimSpace(line))
	}
	return used
}

// attackProcess is the program of attackers. It reads its target from the standard input.
func attackProcess() {
	runtime.GOMAXPROCS(1)
	var target attackTarget
	if err := json.NewDecoder(os.Stdin).Decode(&target); err != nil {
		fmt.Println("failed to read the target:", err)
		os.Exit(1)
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer cancel()
	fmt.Print(attackersBegin)
	var wg sync.WaitGroup
	for _, plan := range target.Plans {
		name, like := strings.CutSuffix(plan.Name, likeSuffix)
		run := permitted.run
		if i := slices.IndexFunc(attacks, func(a attack) bool { return a.name == name }); i >= 0 {
			run = attacks[i].run
			if like {
				run = attacks[i].like
			}
		}
		wg.Go(func() {
			run(ctx, &attacker{name: plan.Name, token: plan.Token, ws: target.WS, http: target.HTTP, ops: target.Ops, nats: target.NATS})
		})
	}
	wg.Wait()
}

// attacker is one attack in the attackers' process.
type attacker struct {
	name                string
	token               string
	ws, http, ops, nats string // URLs of the hub
}

// report writes a line to the test's log.
func (a *attacker) report(format string, args ...any) {
	fmt.Println(a.name+":", fmt.Sprintf(format, args...))
}

// dial connects with the attacker's token. It returns nil when ctx has ended.
func (a *attacker) dial(ctx context.Context) *wire.Conn {
	for ctx.Err() == nil {
		c, err := wire.Dial(ctx, a.ws, wire.Options{Token: a.token})
		if err == nil {
			return c
		}
		select { // the hub may refuse, for it is attacked
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
	return nil
}

// ask sends a request with the attacker's token, and header as name, value, name, value … It
// returns 0 when there was no answer.
func (a *attacker) ask(ctx context.Context, method, path string, body io.Reader, header ...string) (status int, answer string) {
	return askWith(ctx, a.token, method, a.http+path, body, header...)
}

// crowd runs n workers until ctx ends. each is called again and again.
func (a *attacker) crowd(ctx context.Context, n int, each func(worker, round int)) {
	crowd(n, func(w int) {
		for round := 0; ctx.Err() == nil; round++ {
			each(w, round)
		}
	})
}

func askWith(ctx context.Context, token, method, url string, body io.Reader, header ...string) (status int, answer string) {
	return askThrough(ctx, http.DefaultClient, token, method, url, body, header...)
}

// askThrough is askWith with a client.
func askThrough(ctx context.Context, web *http.Client, token, method, url string, body io.Reader, header ...string) (status int, answer string) {
	req, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		return 0, err.Error()
	}
	req.Header.Set("Authorization", "Bearer "+token)
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := web.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close() //nolint:errcheck // of a body that was read
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(text)
}

// permittedLoad publishes and consumes near the rate that one connection may have.
func permittedLoad(ctx context.Context, a *attacker) {
	c := a.dial(ctx)
	if c == nil {
		return
	}
	defer c.Abort()
	_, err := c.Subscribe(ctx, "permitted.t", "g", wire.SubscribeOptions{}, func(e wire.Event) { _ = e.Ack() })
	if err != nil {
		a.report("subscribe: %v", err)
		return
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for ctx.Err() == nil {
		<-tick.C
		for range 80 {
			_ = c.PublishAsync("permitted.t", []byte(`{"n":1}`), wire.PublishOptions{}, func(string, error) {})
		}
	}
}

// requestEvery and joinEvery are the pace of the neighbour's requests and joins, and requesters and
// joiners how many clients it has for them: fewer could not keep the pace where each waits for some
// tenths of a second.
const (
	requestEvery = 25 * time.Millisecond
	requesters   = 16
	joinEvery    = 400 * time.Millisecond
	joiners      = 4
)

// requestInTurn is the neighbour's use of the HTTP API, in turn: it publishes, posts to the outbox,
// stores a key, and reads it again.
func requestInTurn(ctx context.Context, web *http.Client, hub, token string, i int) error {
	var status int
	var answer string
	switch n := strconv.Itoa(i); i % 4 {
	case 0:
		status, answer = askThrough(ctx, web, token, http.MethodPost, hub+"/publish/neighbour.http", strings.NewReader(n))
	case 1:
		status, answer = askThrough(ctx, web, token, http.MethodPost, hub+"/outbox/neighbour.outbox", strings.NewReader(n), "Event-Id", "order-"+n)
	case 2:
		status, answer = askThrough(ctx, web, token, http.MethodPost, hub+"/publish/neighbour.kept", strings.NewReader(n), "Event-Key", strconv.Itoa(i%100))
	case 3:
		status, answer = askThrough(ctx, web, token, http.MethodGet, hub+"/snap/neighbour.kept/"+strconv.Itoa((i-1)%100), nil)
	}
	if status == http.StatusNotFound && i%4 == 3 && i < 200 {
		return nil // the key may not have been stored yet
	}
	if status/100 != 2 {
		return fmt.Errorf("request %d: %d %.300s", i, status, answer)
	}
	return nil
}

// join is the neighbour's coming to a group, and its going.
func join(ctx context.Context, c *wire.Conn) error {
	sub, err := c.Subscribe(ctx, "neighbour.joined", "g", wire.SubscribeOptions{}, func(wire.Event) {})
	if err != nil {
		return fmt.Errorf("join: %w", err)
	}
	return sub.Unsubscribe(ctx)
}

// paced is what the neighbour does at a steady pace, by some workers, and how long each took.
type paced struct {
	mu    sync.Mutex
	took  []time.Duration
	fault error
	marks int // measurements that have begun
}

// run calls do at each tick of every until stopped is closed, by workers in turn. A call that takes
// longer delays the next one of its worker, whose time counts from when it was due, until a mark
// ends the delay.
func (p *paced) run(workers int, every time.Duration, stopped <-chan struct{}, do func(ctx context.Context, worker, i int) error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-stopped:
			cancel()
		case <-ctx.Done():
		}
	}()
	var all sync.WaitGroup
	defer all.Wait()
	for worker := range workers {
		all.Go(func() {
			later := time.Duration(worker) * every
			marks := 0
			for i, due := worker, time.Now().Add(later); ; i, due = i+workers, due.Add(time.Duration(workers)*every) {
				p.mu.Lock()
				if marks != p.marks {
					marks, due = p.marks, time.Now().Add(later)
				}
				p.mu.Unlock()
				select {
				case <-ctx.Done():
					return
				case <-time.After(time.Until(due)):
				}
				err := do(ctx, worker, i)
				if ctx.Err() != nil {
					return
				}
				p.mu.Lock()
				if marks == p.marks {
					p.took = append(p.took, max(time.Since(due), 1))
				}
				if p.fault == nil {
					p.fault = err
				}
				p.mu.Unlock()
			}
		})
	}
}

// mark begins a measurement, which what was late before has no part in.
func (p *paced) mark() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.marks++
	return len(p.took)
}

func (p *paced) since(t *testing.T, from int) latency {
	t.Helper()
	waitFor(t, "the neighbour's requests are answered", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.fault != nil || len(p.took) > from
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fault != nil {
		t.Fatalf("the neighbour: %v", p.fault)
	}
	return latencyOf(slices.Clone(p.took[from:]))
}
