package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"eventhub/acl"
)

const (
	// stalledEvents of stalledSize bytes are sent at once to the socket that reads nothing. They
	// are more than the buffers between the hub and the socket hold.
	stalledEvents = 1000
	stalledSize   = 16 << 10
	// joinWithin is how long PRESENCE frames are counted after the last join.
	joinWithin = 3 * time.Second
)

// stalledCost compares rounds with and without a socket that stands still.
type stalledCost struct {
	Ratios []Ratio `json:"ratios"`
	// MemoryMiB is how much more memory the hub had with it, the median of the pairs.
	MemoryMiB float64 `json:"memory_mib"`
}

// stalled measures the latency beside a socket that stands still.
func (cmd *Broadcast) stalled(ctx context.Context, env Env, target *Target) (cost *stalledCost, err error) {
	sys, err := openSystem(ctx, env, target, needs{hub: true})
	if err != nil {
		return nil, err
	}
	defer func() { err = ended(ctx, err, sys) }()
	b := newRun(env, target, sys)
	hub, err := newCastHub(ctx, b, stalledSize, stalledEvents)
	if err != nil {
		return nil, err
	}
	hub.payload = newPayload(cmd.Size)
	sockets, err := openSockets(ctx, hub, cmd.Sockets)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, sockets.close()) }()
	var p99s, memory [2][]float64 // with and without
	for i := range 2*cmd.Stalled + 2 {
		with := (i + i/2) % 2 // both orders
		stop := b.progress(fmt.Sprintf("stalled, round %d", i))
		p99, kib, err := cmd.latency(ctx, sockets, hub, with == 0)
		stop()
		if err != nil {
			return nil, err
		}
		if i >= 2 {
			p99s[with], memory[with] = append(p99s[with], p99), append(memory[with], kib/1024)
		}
	}
	more := make([]float64, cmd.Stalled)
	for i := range more {
		more[i] = memory[0][i] - memory[1][i]
	}
	return &stalledCost{
		Ratios: []Ratio{
			newRatio("p99, with the stalled socket to without", "ms", p99s[0], p99s[1]),
			newRatio("memory of the hub", "MiB", memory[0], memory[1]),
		},
		MemoryMiB: median(more),
	}, nil
}

// latency is the 99th percentile from the moment in which an event is due until a socket has it, in
// milliseconds, and the memory of the hub at the end in KiB.
func (cmd *Broadcast) latency(ctx context.Context, sockets *castSockets, hub *castHub, stalled bool) (p99, kib float64, err error) {
	if stalled {
		s, err := hub.openStalled(ctx)
		if err != nil {
			return 0, 0, err
		}
		defer s.close()
	}
	times := &sharedTimes{all: newTimes(8)}
	record := func(i int, m []byte) {
		if at := bytes.Index(m, []byte(payloadHead[:seqAt])); at >= 0 {
			_, _ = times.stamped(i)(m[at:], 0)
		}
	}
	sockets.each.Store(&record)
	defer sockets.each.Store(nil)
	n := max(1, int(cmd.Rate*cmd.For.Seconds()))
	begin := now()
	goal := sockets.expect(n)
	for i := range n {
		due := begin + int64(float64(i)/cmd.Rate*1e9)
		sleepUntil(due)
		if err := hub.sendDue(due); err != nil {
			return 0, 0, err
		}
	}
	if err := sockets.await(ctx, goal); err != nil {
		return 0, 0, err
	}
	servers, err := hub.sys.servers(viaWS)
	if err != nil {
		return 0, 0, err
	}
	kib, err = residentKiB(servers)
	return newQuantiles(times.all...).P99, kib, err
}

// sendDue publishes an event that was due at a moment.
func (h *castHub) sendDue(due int64) error {
	h.sent++
	stamp(h.payload, h.sent, due)
	return h.publisher.send(h.payload, "", due)
}

// openStalled opens a socket that asks for stored events and reads none.
func (h *castHub) openStalled(ctx context.Context) (*rawSocket, error) {
	s, err := h.connect(ctx, h.sys.bearer)
	if err != nil {
		return nil, err
	}
	if tcp, ok := s.conn.(*net.TCPConn); ok {
		err = tcp.SetReadBuffer(4 << 10)
	}
	if err == nil {
		err = s.send(h.subscribe(`,"history":` + strconv.Itoa(stalledEvents) + `,"slow":"catchup"`))
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// joinCost is what many joins at once lead to.
type joinCost struct {
	Sockets int `json:"sockets"`
	// MS is the time from the first SUBSCRIBE to the last OK, in milliseconds.
	MS float64 `json:"ms"`
	// MostFrames is the most PRESENCE frames that a socket got until 3 s later. Count is the count
	// in the last of them.
	MostFrames int `json:"most_presence_frames"`
	Count      int `json:"count"`
}

// joins has many sockets join a topic with presence at once.
func (cmd *Broadcast) joins(ctx context.Context, env Env, target *Target) (cost *joinCost, err error) {
	s := &system{target: target}
	defer func() { err = ended(ctx, err, s) }()
	if err := s.makeDir(); err != nil {
		return nil, err
	}
	rules := filepath.Join(s.dir, "topics.yaml")
	if err := os.WriteFile(rules, []byte("topics:\n  - pattern: bench.**\n    presence: true\n"), 0o600); err != nil {
		return nil, err
	}
	process, err := s.startHub(ctx, s.hubEnv(), "serve", "--ws-port=0", "--http-port=0", "--ops-port=0", "--log-level=warn",
		"--data="+filepath.Join(s.dir, "hub"), "--topics="+rules)
	if err != nil {
		return nil, err
	}
	s.owned = append(s.owned, process)
	s.wsURL, s.hubPIDs = process.said["websocket"], []int32{pidOf(process)}
	b := newRun(env, target, s)
	hub, err := newCastHub(ctx, b, minPayload, 1)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, hub.close()) }()
	sockets := make([]*rawSocket, cmd.Joins)
	defer func() {
		for _, s := range sockets {
			if s != nil {
				s.close()
			}
		}
	}()
	stop := b.progress("connect")
	err = eachOf(cmd.Joins, func(i int) error {
		token, err := acl.Sign([]byte(s.secret), acl.Grant{
			Subject: fmt.Sprintf("user-%d", i), Policy: []byte(`{"rules":[{"effect":"allow","action":"*","topics":["**"]}]}`), TTL: time.Hour,
		})
		if err == nil {
			sockets[i], err = hub.connect(ctx, token)
		}
		return err
	})
	stop()
	if err != nil {
		return nil, err
	}
	return hub.joinAll(ctx, sockets)
}

// joinAll has all sockets subscribe, and counts their PRESENCE frames.
func (h *castHub) joinAll(ctx context.Context, sockets []*rawSocket) (*joinCost, error) {
	var joined atomic.Int64
	var last atomic.Int64 // when the last one joined
	frames, counts, errs := make([]int, len(sockets)), make([]int, len(sockets)), make([]error, len(sockets))
	var wg sync.WaitGroup
	defer wg.Wait()
	for i, s := range sockets {
		wg.Go(func() {
			for {
				m, err := s.next()
				switch {
				case err != nil:
					if !over(err) {
						errs[i] = err
					}
					return
				case bytes.Contains(m, []byte(`"op":"ERR"`)):
					errs[i] = fmt.Errorf("the hub answered %.300s", m)
					return
				case bytes.Contains(m, []byte(`"corr":2`)):
					last.Store(now())
					joined.Add(1)
				case bytes.Contains(m, []byte(`"op":"PRESENCE"`)):
					frames[i]++
					if _, rest, ok := bytes.Cut(m, []byte(`"count":`)); ok {
						_, _ = fmt.Sscan(string(rest[:min(len(rest), 10)]), &counts[i])
					}
				}
			}
		})
	}
	begin := now()
	request := h.subscribe(`,"presence":true`)
	if err := eachOf(len(sockets), func(i int) error { return sockets[i].send(request) }); err != nil {
		return nil, err
	}
	for joined.Load() < int64(len(sockets)) {
		if time.Duration(now()-begin) > stallAfter {
			return nil, fmt.Errorf("%d of %d sockets joined within %v", joined.Load(), len(sockets), stallAfter)
		}
		if err := sleep(ctx, 10*time.Millisecond); err != nil {
			return nil, err
		}
	}
	if err := sleep(ctx, joinWithin); err != nil {
		return nil, err
	}
	for _, s := range sockets {
		s.close()
	}
	wg.Wait()
	cost := &joinCost{Sockets: len(sockets), MS: round(float64(last.Load()-begin)/1e6, 1)}
	for i := range sockets {
		if errs[i] != nil {
			return nil, fmt.Errorf("socket %d: %w", i, errs[i])
		}
		cost.MostFrames, cost.Count = max(cost.MostFrames, frames[i]), max(cost.Count, counts[i])
	}
	return cost, nil
}
