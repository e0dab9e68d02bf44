//go:build unix

package model

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/natstest"
)

// patience bounds what servers and hubs are waited for.
const patience = 60 * time.Second

// rig is what runs: hubs, nats-servers, and a link between each two of them.
type rig struct {
	testing.TB
	plan  *plan
	rec   *recorder
	nodes []*natstest.Server
	// routes are the links between nodes, by who connects and to whom.
	routes [][]*proxy
	disk   *disk // of the last node; nil where it cannot be filled
	sys    *nats.Conn
	tally  map[string]int // faults, by what -model.faults calls them
	hubs   []*hub
	rows   string // the file of the outbox
	nc     *nats.Conn
	js     natsjs.JetStream

	mu     sync.Mutex
	faults int
}

// hub is one in a process of its own.
type hub struct {
	name  string
	addr  string
	role  hubRole
	links []*proxy
	child *natstest.Child
	log   io.Writer // of a program

	mu  sync.Mutex
	up  bool // what happens to its links is its own doing otherwise
	pid int  // of the child
}

func (h *hub) set(up bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.up = up
}

func (h *hub) running() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.up
}

// process is the number of the process that it was started in last.
func (h *hub) process() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.pid
}

func startRig(tb testing.TB, p *plan, rec *recorder) *rig {
	tb.Helper()
	r := &rig{TB: tb, plan: p, rec: rec, tally: map[string]int{}, routes: make([][]*proxy, p.nodes)}
	for i := range r.routes {
		r.routes[i] = make([]*proxy, p.nodes)
	}
	if slices.Contains(p.faults, "diskfull") {
		if r.disk = newDisk(tb); r.disk == nil {
			p.faults = slices.DeleteFunc(slices.Clone(p.faults), func(f string) bool { return f == "diskfull" })
		}
	}
	r.nodes = natstest.StartSetup(tb, natstest.Setup{
		Nodes: p.nodes, Program: p.old, Metrics: p.program != "",
		Route: func(from, to int, address string) string {
			r.routes[from][to] = startProxy(tb, address, func() {})
			return strings.TrimPrefix(r.routes[from][to].url(), "nats://")
		},
		Store: func(node int) string {
			if r.disk != nil && node == p.nodes-1 {
				return r.disk.dir
			}
			return tb.TempDir()
		},
	})
	urls := make([]string, len(r.nodes))
	for i, n := range r.nodes {
		urls[i] = n.URL()
	}
	var err error
	if r.nc, err = nats.Connect(strings.Join(urls, ","), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond), nats.Timeout(2*time.Second)); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(r.nc.Close)
	operators := make([]string, len(r.nodes))
	for i, n := range r.nodes {
		operators[i] = n.OperatorURL()
	}
	if r.sys, err = nats.Connect(strings.Join(operators, ","), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond), nats.Timeout(2*time.Second)); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(r.sys.Close)
	if r.js, err = natsjs.New(r.nc); err != nil {
		tb.Fatal(err)
	}
	r.until("streams can be made", func(ctx context.Context) bool {
		_, err := r.js.CreateOrUpdateStream(ctx, natsjs.StreamConfig{Name: "ready", Replicas: p.nodes})
		return err == nil
	})
	r.until("streams can be deleted", func(ctx context.Context) bool { return r.js.DeleteStream(ctx, "ready") == nil })
	r.rows = rowsPath(r)
	for i := range p.hubs {
		r.addHub(i)
	}
	return r
}

func (r *rig) addHub(i int) {
	r.Helper()
	h := &hub{name: "h" + strconv.Itoa(i), addr: natstest.FreeAddress(r)}
	var urls []string
	for _, n := range r.nodes {
		p := startProxy(r, n.URL(), func() {
			if h.running() {
				r.rec.add(0, kindFault, fmt.Sprintf("%d cut %s 0s", r.number(), h.name))
			}
		})
		h.links = append(h.links, p)
		urls = append(urls, p.url())
	}
	h.role = hubRole{URL: strings.Join(urls, ","), Addr: h.addr, AckWaitMS: r.plan.ackWaitMS, Replicas: len(r.nodes), Besides: r.besides()}
	if r.plan.logs != "" {
		h.role.Log = filepath.Join(r.plan.logs, fmt.Sprintf("seed-%d-%s.log", r.plan.seed, h.name))
	}
	if r.plan.program != "" && h.role.Log != "" {
		f, err := os.OpenFile(h.role.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			r.Fatal(err)
		}
		r.Cleanup(func() { _ = f.Close() })
		h.log = f
	}
	r.hubs = append(r.hubs, h)
	r.startHub(h)
	// Before the child's own end, which closes its links.
	r.Cleanup(func() { h.set(false) })
}

func (r *rig) startHub(h *hub) {
	r.Helper()
	if r.plan.program != "" {
		h.child = natstest.StartProgram(r, natstest.Program{Path: r.plan.program, Address: h.addr, Args: r.serve(h), Log: h.log})
	} else {
		h.child = natstest.StartChild(r, "hub", h.role, func(line string) {
			if gap, ok := strings.CutPrefix(line, "stall "); ok {
				r.rec.add(0, kindFault, fmt.Sprintf("%d stall-hub %s %s", r.number(), h.name, gap))
			}
		})
	}
	h.mu.Lock()
	h.pid = h.child.PID()
	h.mu.Unlock()
	if !h.child.AwaitReady() {
		r.Fatalf("hub %s does not start", h.name)
	}
	h.set(true)
}

// serve is the command line of a hub that is the program.
func (r *rig) serve(h *hub) []string {
	port := func(addr string) string {
		_, port, err := net.SplitHostPort(addr)
		if err != nil {
			r.Fatal(err)
		}
		return port
	}
	return []string{
		"serve", "--ws-port=" + port(h.addr), "--http-port=" + port(h.role.Besides.HTTP), "--ops-port=" + port(h.role.Besides.Ops),
		"--token=" + password, "--nats-url=" + h.role.URL, "--data=" + r.TempDir(), "--topics=" + r.plan.rules,
		"--replicas=" + strconv.Itoa(h.role.Replicas), "--ack-wait=" + strconv.Itoa(h.role.AckWaitMS) + "ms",
	}
}

// number is a fault's.
func (r *rig) number() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.faults++
	return r.faults
}

// until waits for f, whose questions have a second each.
func (r *rig) until(what string, f func(context.Context) bool) {
	r.Helper()
	if !r.within(patience, f) {
		r.Fatalf("seed %d: waited in vain: %s", r.plan.seed, what)
	}
}

func (r *rig) within(limit time.Duration, f func(context.Context) bool) bool {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(limit)
	for {
		ctx, cancel := context.WithTimeout(r.Context(), 2*time.Second)
		done := f(ctx)
		cancel()
		if done {
			return true
		}
		select {
		case <-tick.C:
		case <-deadline:
			return false
		}
	}
}

// wait lets time pass.
func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// watch takes down when the harness itself stood still, until ctx ends.
func (r *rig) watch(ctx context.Context) {
	beat := time.NewTicker(stallBeat)
	defer beat.Stop()
	last := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-beat.C:
		}
		if gap := time.Since(last); gap >= stallLeast {
			r.rec.add(0, kindFault, fmt.Sprintf("%d stall-harness - %s", r.number(), gap))
		}
		last = time.Now()
	}
}

// stepDown makes the leader of a stream, of one of its consumers, or of the cluster hand over.
func (r *rig) stepDown(ctx context.Context, nc *nats.Conn, what string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	m, err := nc.RequestWithContext(ctx, "$JS.API."+what, nil)
	if err != nil {
		return err
	}
	var answer struct {
		Success bool            `json:"success"`
		Error   json.RawMessage `json:"error"`
	}
	if err := json.Unmarshal(m.Data, &answer); err != nil {
		return err
	}
	if !answer.Success {
		return fmt.Errorf("step down: %s", answer.Error)
	}
	return nil
}

// consumers are the groups' as the server has them.
func (r *rig) consumers(ctx context.Context, topic string) ([]*natsjs.ConsumerInfo, error) {
	s, err := r.js.Stream(ctx, streamName(topic))
	if err != nil {
		return nil, err
	}
	var all []*natsjs.ConsumerInfo
	list := s.ListConsumers(ctx)
	for c := range list.Info() {
		if c.Config.Metadata["eventhub.topic"] == topic {
			all = append(all, c)
		}
	}
	return all, list.Err()
}

// streamName is that of a topic: dots are escaped.
func streamName(topic string) string { return strings.ReplaceAll(topic, ".", "=2E") }
