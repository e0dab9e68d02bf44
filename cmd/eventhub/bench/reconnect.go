package bench

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	psutil "github.com/shirou/gopsutil/v4/process"

	"eventhub/jetstream/natstest/freeport"
	eventhub "eventhub/sdk/go"
)

// cpuEvery is how often the CPU use of the new hub is sampled.
const cpuEvery = 250 * time.Millisecond

// Reconnect is `eventhub bench reconnect`.
type Reconnect struct {
	N          int           `env:"N" default:"10000" help:"Clients."`
	ReturnRate int           `default:"1000" help:"Clients a second that the hub asks to come back. 1000000000 asks for no pause."`
	Timeout    time.Duration `default:"2m" help:"Maximum time until all clients are back."`
}

// Return is what a restart of the hub cost.
type Return struct {
	Clients    int `json:"clients"`
	ReturnRate int `json:"return_rate"`
	// DownMS is how long no hub listened. BackMS is the time from the end of the first hub until
	// the last client was back.
	DownMS float64 `json:"down_ms"`
	BackMS float64 `json:"back_ms"`
	// Failed counts attempts that failed.
	Failed int `json:"failed_attempts"`
	// Handshakes are the times of the successful attempts, from the dial to the accepted token.
	P50MS float64 `json:"handshake_p50_ms"`
	P99MS float64 `json:"handshake_p99_ms"`
	MaxMS float64 `json:"handshake_max_ms"`
	// PeakCPU is the highest CPU use of the new hub within 250 ms, in percent of one core.
	PeakCPU float64 `json:"peak_cpu_percent"`
	// PeakPerSecond is the most clients that came back within one second.
	PeakPerSecond int `json:"peak_returns_per_second"`
}

// Help returns the detailed help text.
func (*Reconnect) Help() string {
	return `Connects Go clients to a hub, restarts the hub on the same port and data, and measures how the clients come back.
Starts a hub of its own.

  eventhub bench reconnect --n 10000
  eventhub bench reconnect --n 10000 --return-rate 1000000000`
}

// returning follows the clients.
type returning struct {
	mu      sync.Mutex
	ready   int
	failed  int
	dialled []time.Time
	took    []float64
	back    []time.Time
	changed chan struct{}
}

func (r *returning) told(i int, state eventhub.State) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	switch state {
	case eventhub.StateOpening:
		r.dialled[i] = now
	case eventhub.StateReady:
		r.ready++
		r.took = append(r.took, float64(now.Sub(r.dialled[i]))/1e6)
		r.back = append(r.back, now)
		r.dialled[i] = time.Time{}
	case eventhub.StateWaiting:
		if r.dialled[i].IsZero() {
			r.ready--
		} else {
			r.failed++
		}
	default: // the others tell nothing about time
	}
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

// until waits until n clients are connected.
func (r *returning) until(ctx context.Context, n int) error {
	for {
		r.mu.Lock()
		ready := r.ready
		r.mu.Unlock()
		if ready == n {
			return nil
		}
		select {
		case <-r.changed:
		case <-ctx.Done():
			return fmt.Errorf("%d of %d clients are connected: %w", ready, n, ctx.Err())
		}
	}
}

// Run runs the benchmark.
func (cmd *Reconnect) Run(ctx context.Context, env Env, target *Target) (err error) {
	switch {
	case cmd.N < 1 || cmd.N > 15_000:
		return fmt.Errorf("--n %d: must be 1 to 15000", cmd.N)
	case cmd.ReturnRate < 1:
		return fmt.Errorf("--return-rate %d: must be positive", cmd.ReturnRate)
	case target.URL != "":
		return errors.New("--url: this benchmark restarts the hub, so it starts one of its own; leave the flag out")
	}
	if err := errors.Join(target.validate(), allowFiles(cmd.N+spareFiles)); err != nil {
		return err
	}
	s := &system{target: target}
	defer func() { err = ended(ctx, err, s) }()
	if err := s.makeDir(); err != nil {
		return err
	}
	got, err := cmd.measure(ctx, s)
	if err != nil {
		return err
	}
	if target.JSON {
		return printJSON(env.Out, got)
	}
	_, err = fmt.Fprintf(env.Out, "%d clients, return rate %d: no hub for %.0f ms, all back after %.0f ms, %d failed attempts, at most %d back in a second;\n"+
		"handshake p50 %.1f ms, p99 %.1f ms, max %.1f ms; peak CPU %.0f %% of a core\n",
		got.Clients, got.ReturnRate, got.DownMS, got.BackMS, got.Failed, got.PeakPerSecond, got.P50MS, got.P99MS, got.MaxMS, got.PeakCPU)
	return err
}

func (cmd *Reconnect) measure(ctx context.Context, s *system) (*Return, error) {
	ports, release, err := freeport.Take(ctx, 1)
	if err != nil {
		return nil, err
	}
	defer release()
	port := ports[0]
	hub, err := cmd.hub(ctx, s, port)
	if err != nil {
		return nil, err
	}
	stopped := false
	defer func() {
		if !stopped {
			_ = hub.close()
		}
	}()
	r := &returning{changed: make(chan struct{}, 1), dialled: make([]time.Time, cmd.N)}
	ctx, cancel := context.WithTimeout(ctx, 2*cmd.Timeout)
	defer cancel()
	clients, err := connectAll(ctx, hub.said["websocket"], s.token, cmd.N, r)
	defer closeAll(clients) //nolint:contextcheck // Close has a time limit of its own
	if err != nil {
		return nil, err
	}

	r.forget()
	stopped = true
	if err := hub.close(); err != nil {
		return nil, err
	}
	end := time.Now()
	if hub, err = cmd.hub(ctx, s, port); err != nil {
		return nil, err
	}
	stopped = false
	down := time.Since(end)
	peak := watchCPU(ctx, pidOf(hub))
	err = r.until(ctx, cmd.N)
	most := peak()
	if err != nil {
		return nil, err
	}
	got := r.summary(end)
	got.ReturnRate, got.DownMS, got.PeakCPU = cmd.ReturnRate, round(float64(down)/1e6, 1), most
	return got, nil
}

// connectAll connects n clients, several at a time. The caller must close those that are not nil,
// also after an error.
func connectAll(ctx context.Context, at, token string, n int, r *returning) ([]*eventhub.Client, error) {
	clients := make([]*eventhub.Client, n)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for worker := range dialing {
		wg.Go(func() {
			for i := worker; i < n; i += dialing {
				clients[i], errs[i] = eventhub.Connect(ctx, at, eventhub.Options{
					Token: token, OnState: func(state eventhub.State, _ error) { r.told(i, state) },
				})
			}
		})
	}
	wg.Wait()
	return clients, errors.Join(firstOf(errs), r.until(ctx, n))
}

// forget forgets the times so far.
func (r *returning) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.took, r.back, r.failed = nil, nil, 0
}

// summary describes how the clients came back since end, which is when the hub had gone.
func (r *returning) summary(end time.Time) *Return {
	r.mu.Lock()
	defer r.mu.Unlock()
	slices.Sort(r.took)
	slices.SortFunc(r.back, time.Time.Compare)
	at := func(q float64) float64 { return round(r.took[int(q*float64(len(r.took)-1))], 1) }
	return &Return{
		Clients: len(r.dialled), BackMS: round(float64(r.back[len(r.back)-1].Sub(end))/1e6, 1), Failed: r.failed,
		P50MS: at(0.5), P99MS: at(0.99), MaxMS: at(1), PeakPerSecond: mostWithin(r.back, time.Second),
	}
}

// watchCPU samples the CPU use of a process until the function that it returns is called, which
// returns the highest, in percent of one core.
func watchCPU(ctx context.Context, pid int32) (peak func() float64) {
	ctx, stop := context.WithCancel(ctx)
	most := make(chan float64, 1)
	go func() { most <- peakCPU(ctx, pid) }() // the caller waits for it by calling peak
	return func() float64 {
		stop()
		return <-most
	}
}

func (cmd *Reconnect) hub(ctx context.Context, s *system, port int) (*process, error) {
	vars := append(s.hubEnv(), "EVENTHUB_LIMIT_RETURN_RATE="+strconv.Itoa(cmd.ReturnRate))
	return s.startHub(ctx, vars, "serve", "--ws-port="+strconv.Itoa(port), "--http-port=0",
		"--ops-port=0", "--log-level=warn", "--data="+filepath.Join(s.dir, "hub"), "--sync="+s.target.Sync)
}

// peakCPU returns the highest CPU use of a process until ctx ends, in percent of one core.
func peakCPU(ctx context.Context, pid int32) (most float64) {
	p, err := psutil.NewProcess(pid)
	if err != nil {
		return 0
	}
	ticker := time.NewTicker(cpuEvery)
	defer ticker.Stop()
	before, last := 0.0, time.Now()
	for first := true; ; first = false {
		used, err := cpuSeconds(p)
		if now := time.Now(); err == nil {
			if over := now.Sub(last).Seconds(); !first && over > 0 {
				most = max(most, round(100*(used-before)/over, 0))
			}
			before, last = used, now
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return most
		}
	}
}

// mostWithin returns the most times, which are sorted, within a duration.
func mostWithin(times []time.Time, d time.Duration) (most int) {
	first := 0
	for i, t := range times {
		for t.Sub(times[first]) > d {
			first++
		}
		most = max(most, i-first+1)
	}
	return most
}

func closeAll(clients []*eventhub.Client) {
	var wg sync.WaitGroup
	for i := range dialing {
		wg.Go(func() {
			for n := i; n < len(clients); n += dialing {
				if clients[n] != nil {
					_ = clients[n].Close()
				}
			}
		})
	}
	wg.Wait()
}
