package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Broadcast is `eventhub bench broadcast`.
type Broadcast struct {
	Sockets int   `default:"1000" help:"Sockets."`
	N       int   `name:"n" default:"1000" help:"Events that each socket gets in a round."`
	Size    int   `default:"180" help:"Bytes of the payload. With 180, a frame of the hub has about 320."`
	Flights []int `default:"1,16" help:"Events that are on their way at a time. All sockets have them before the next ones are published."`
	Rounds  int   `default:"9" help:"Rounds, after a warm-up round. All sides run in each round."`

	Groups     bool   `help:"Compare with as many groups of one member each (bench fanout --group-ttl)."`
	Centrifugo string `placeholder:"FILE" help:"Compare with Centrifugo 5, whose binary this is, with its memory engine."`

	Stalled int           `help:"Rounds of the latency beside a socket that reads nothing, in turn with rounds without one; 0 leaves them out."`
	Rate    float64       `default:"5" help:"Events a second in these rounds."`
	For     time.Duration `default:"10s" help:"Duration of each of these rounds."`
	Joins   int           `help:"Sockets that join a topic with presence within a second; 0 leaves them out."`
}

// Help returns the detailed help text.
func (*Broadcast) Help() string {
	return `Publishes to sockets that all get every event, without a group, and compares the deliveries per second. A flight of events goes out when
all sockets have the one before. In turn:

  hub         broadcasts of the hub
  floor       a process that writes the hub's bytes to each connection in a loop, and does nothing else
  groups      groups of the hub, with one member each and with acknowledgements; with --groups
  centrifugo  Centrifugo; with --centrifugo

--stalled compares the latency and the hub's memory with and without a socket that stands still. --joins counts the PRESENCE frames
that a socket gets when many join at once.

  eventhub bench broadcast --groups --centrifugo ./centrifugo
  eventhub bench broadcast --rounds 0 --sockets 10000 --stalled 9
  eventhub bench broadcast --rounds 0 --joins 10000`
}

func (cmd *Broadcast) validate(target *Target) error {
	switch {
	case cmd.Sockets < 1 || cmd.Sockets > maxGroups || cmd.Joins < 0 || cmd.Joins > maxGroups:
		return fmt.Errorf("--sockets and --joins must be at most %d, and --sockets at least 1", maxGroups)
	case cmd.N < 1 || cmd.N > 1_000_000:
		return fmt.Errorf("--n %d: must be 1 to 1000000", cmd.N)
	case cmd.Size < minPayload || cmd.Size > 32<<10:
		return fmt.Errorf("--size %d: must be %d to %d bytes", cmd.Size, minPayload, 32<<10)
	case len(cmd.Flights) == 0 || slices.Min(cmd.Flights) < 1 || slices.Max(cmd.Flights) > 1000:
		return errors.New("--flights must be 1 to 1000")
	case cmd.Rounds < 0 || cmd.Rounds > 1000 || cmd.Stalled < 0 || cmd.Stalled > 1000:
		return errors.New("--rounds and --stalled must be 0 to 1000")
	case cmd.Rate <= 0 || cmd.Rate > 10_000:
		return fmt.Errorf("--rate %v: must be positive, and at most 10000", cmd.Rate)
	case cmd.For < time.Second || cmd.For > time.Hour:
		return fmt.Errorf("--for %v: must be 1s to 1h", cmd.For)
	case target.URL != "":
		return errors.New("--url: this benchmark starts a hub of its own; leave the flag out")
	}
	return nil
}

// castReport is the JSON report of the benchmark.
type castReport struct {
	Rates   []castRate   `json:"rates,omitempty"`
	Ratios  []Ratio      `json:"ratios,omitempty"`
	Stalled *stalledCost `json:"stalled,omitempty"`
	Joins   *joinCost    `json:"joins,omitempty"`
}

// castRate is a median of a side.
type castRate struct {
	Side   string `json:"side"`
	Flight int    `json:"flight"`
	// Rate is in deliveries per second. CPU is the time of the sending processes per delivery, in
	// microseconds.
	Rate float64 `json:"rate"`
	CPU  float64 `json:"cpu_us"`
}

// Run runs the benchmark.
func (cmd *Broadcast) Run(ctx context.Context, env Env, target *Target) (err error) {
	if err := errors.Join(target.validate(), cmd.validate(target), allowFiles(cmd.files()+spareFiles)); err != nil {
		return err
	}
	report := &castReport{}
	if cmd.Rounds > 0 {
		if err := cmd.rates(ctx, env, target, report); err != nil {
			return err
		}
	}
	if cmd.Stalled > 0 {
		if report.Stalled, err = cmd.stalled(ctx, env, target); err != nil {
			return err
		}
	}
	if cmd.Joins > 0 {
		if report.Joins, err = cmd.joins(ctx, env, target); err != nil {
			return err
		}
	}
	if target.JSON {
		return printJSON(env.Out, report)
	}
	return report.print(env.Out, cmd)
}

// files is how many sockets are open at a time.
func (cmd *Broadcast) files() int {
	n := cmd.Joins
	if cmd.Stalled > 0 {
		n = max(n, cmd.Sockets)
	}
	if cmd.Rounds > 0 {
		n = max(n, 3*cmd.Sockets) // hub, floor and Centrifugo, or groups
	}
	return n
}

func (r *castReport) print(w io.Writer, cmd *Broadcast) error {
	var b strings.Builder
	for _, rate := range r.Rates {
		fmt.Fprintf(&b, "%-10s flights of %-4d %10.0f deliveries/s to %d sockets, %.2f µs of CPU each\n", rate.Side, rate.Flight, rate.Rate, cmd.Sockets, rate.CPU)
	}
	for i := range r.Ratios {
		fmt.Fprintf(&b, "  %s\n", r.Ratios[i].line())
	}
	if s := r.Stalled; s != nil {
		fmt.Fprintf(&b, "%d sockets at %g events/s, with a socket that stands still and without:\n", cmd.Sockets, cmd.Rate)
		for i := range s.Ratios {
			fmt.Fprintf(&b, "  %s\n", s.Ratios[i].line())
		}
		fmt.Fprintf(&b, "  the hub's memory was %.1f MiB higher with it (median of the pairs)\n", s.MemoryMiB)
	}
	if j := r.Joins; j != nil {
		fmt.Fprintf(&b, "%d sockets joined within %.0f ms: at most %d PRESENCE frames a socket, %d names in the last one\n", j.Sockets, j.MS, j.MostFrames, j.Count)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// castSide sends events to all sockets.
type castSide interface {
	// open connects a socket, which gets all that is sent later.
	open(ctx context.Context) (*rawSocket, error)
	// send has n events sent to all sockets.
	send(ctx context.Context, n int) error
	// pids are the processes that send.
	pids() []int32
	close() error
}

// castSockets are the sockets of a side.
type castSockets struct {
	side    castSide
	sockets []*rawSocket
	wg      sync.WaitGroup
	got     atomic.Int64
	goal    atomic.Int64
	reached chan struct{} // has room for one
	failed  chan error    // has room for one
	sample  atomic.Pointer[[]byte]
	each    atomic.Pointer[func(i int, message []byte)] // is called with each message; may be nil
}

// openSockets opens the sockets and counts what they get. The caller must close them.
func openSockets(ctx context.Context, side castSide, n int) (*castSockets, error) {
	c := &castSockets{side: side, sockets: make([]*rawSocket, n), reached: make(chan struct{}, 1), failed: make(chan error, 1)}
	if err := eachOf(n, func(i int) (err error) {
		c.sockets[i], err = side.open(ctx)
		return err
	}); err != nil {
		return nil, errors.Join(err, c.close())
	}
	for i, s := range c.sockets {
		c.wg.Go(func() { c.count(i, s) })
	}
	return c, nil
}

// eachOf calls f for 0 to n-1, several at a time, and returns the first error.
func eachOf(n int, f func(i int) error) error {
	errs := make([]error, dialing)
	var next atomic.Int64
	var wg sync.WaitGroup
	for worker := range dialing {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n && errs[worker] == nil; i = int(next.Add(1)) - 1 {
				errs[worker] = f(i)
			}
		})
	}
	wg.Wait()
	return firstOf(errs)
}

// count counts what a socket gets until the socket ends.
func (c *castSockets) count(i int, s *rawSocket) {
	n := int64(0)
	for {
		m, err := s.next()
		if err != nil {
			select {
			case c.failed <- err:
			default:
			}
			return
		}
		if i == 0 && c.sample.Load() == nil {
			frame := appendFrame(nil, m)
			c.sample.Store(&frame)
		}
		if each := c.each.Load(); each != nil {
			(*each)(i, m)
		}
		n += int64(messagesIn(m))
		if s.more() {
			continue
		}
		if c.got.Add(n) >= c.goal.Load() {
			select {
			case c.reached <- struct{}{}:
			default:
			}
		}
		n = 0
	}
}

// flight sends n events and waits until all sockets have them.
func (c *castSockets) flight(ctx context.Context, n int) error {
	goal := c.expect(n)
	if err := c.side.send(ctx, n); err != nil {
		return err
	}
	return c.await(ctx, goal)
}

// expect returns how many deliveries there are when all sockets have n further events.
func (c *castSockets) expect(n int) (goal int64) { return c.goal.Add(int64(n * len(c.sockets))) }

// await waits for as many deliveries.
func (c *castSockets) await(ctx context.Context, goal int64) error {
	timer := time.NewTimer(stallAfter)
	defer timer.Stop()
	for c.got.Load() < goal {
		select {
		case <-c.reached:
		case err := <-c.failed:
			return fmt.Errorf("a socket ended: %w", err)
		case <-timer.C:
			return fmt.Errorf("%d of %d deliveries came within %v", c.got.Load(), goal, stallAfter)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if got := c.got.Load(); got > goal {
		return fmt.Errorf("%d deliveries came, and %d were expected", got, goal)
	}
	return nil
}

func (c *castSockets) close() error {
	for _, s := range c.sockets {
		if s != nil {
			s.close()
		}
	}
	c.wg.Wait()
	return c.side.close()
}

// rates compares the sides.
func (cmd *Broadcast) rates(ctx context.Context, env Env, target *Target, report *castReport) (err error) {
	sys, err := openSystem(ctx, env, target, needs{hub: true})
	if err != nil {
		return err
	}
	defer func() { err = ended(ctx, err, sys) }()
	b := newRun(env, target, sys)
	sides, err := cmd.open(ctx, b)
	defer func() {
		for _, s := range sides {
			err = errors.Join(err, s.sockets.close())
		}
	}()
	if err != nil {
		return err
	}
	names := make([]string, 0, len(sides)+1)
	for _, s := range sides {
		names = append(names, s.name)
	}
	if cmd.Groups {
		names = append(names, "groups")
	}
	for _, flight := range cmd.Flights {
		rates, cpu := make([][]float64, len(names)), make([][]float64, len(names))
		for round := range cmd.Rounds + 1 {
			for turn := range names {
				i := (turn + round) % len(names)
				stop := b.progress(fmt.Sprintf("flights of %d, round %d, %s", flight, round, names[i]))
				var rate, each float64
				if names[i] == "groups" {
					rate, each, err = cmd.groups(ctx, b, flight)
				} else {
					rate, each, err = cmd.round(ctx, sides[i].sockets, flight)
				}
				stop()
				if err != nil {
					return fmt.Errorf("%s: %w", names[i], err)
				}
				if round > 0 {
					rates[i], cpu[i] = append(rates[i], rate), append(cpu[i], each)
				}
			}
		}
		for i, name := range names {
			report.Rates = append(report.Rates, castRate{Side: name, Flight: flight, Rate: median(rates[i]), CPU: median(cpu[i])})
			if i > 0 {
				report.Ratios = append(report.Ratios, newRatio(fmt.Sprintf("hub to %s, flights of %d", name, flight), "1/s", rates[0], rates[i]))
			}
		}
	}
	return nil
}

// castOpened is a side with its sockets.
type castOpened struct {
	name    string
	sockets *castSockets
}

// open opens all sides but the groups. It returns those that are open also with an error.
func (cmd *Broadcast) open(ctx context.Context, b *run) (sides []castOpened, err error) {
	add := func(name string, side castSide, err error) error {
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		sockets, err := openSockets(ctx, side, cmd.Sockets)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		sides = append(sides, castOpened{name, sockets})
		return nil
	}
	hub, err := newCastHub(ctx, b, cmd.Size, 0)
	if err := add("hub", hub, err); err != nil {
		return sides, err
	}
	// A first event brings the frame that the floor sends.
	if err := sides[0].sockets.flight(ctx, 1); err != nil {
		return sides, fmt.Errorf("hub: %w", err)
	}
	floor, err := newCastFloor(ctx, *sides[0].sockets.sample.Load())
	if err := add("floor", floor, err); err != nil {
		return sides, err
	}
	if cmd.Centrifugo != "" {
		peer, err := newCentrifugo(ctx, cmd.Centrifugo, cmd.Size)
		if err := add("centrifugo", peer, err); err != nil {
			return sides, err
		}
	}
	return sides, nil
}

// round is the rate of a side, and the CPU time of its processes per delivery in microseconds.
func (cmd *Broadcast) round(ctx context.Context, c *castSockets, flight int) (rate, each float64, err error) {
	flights := max(1, cmd.N/flight)
	before, err := cpuOf(c.side.pids())
	if err != nil {
		return 0, 0, err
	}
	begin := time.Now()
	for range flights {
		if err := c.flight(ctx, flight); err != nil {
			return 0, 0, err
		}
	}
	took := time.Since(begin)
	after, err := cpuOf(c.side.pids())
	n := float64(flights * flight * len(c.sockets))
	return n / took.Seconds(), (after - before) * 1e6 / n, err
}

// groups is the rate of as many groups.
func (cmd *Broadcast) groups(ctx context.Context, b *run, flight int) (rate, each float64, err error) {
	fan := Fanout{load: load{Size: cmd.Size, InFlight: 256}, GroupTTL: time.Minute, PublishInFlight: flight}
	events := max(20, cmd.N/20)
	result, err := b.round(ctx, func(ctx context.Context, s side, topic string, n int) (*Result, error) {
		return fan.round(ctx, b, s, topic, n/s.groups)
	}, side{via: viaWS, groups: cmd.Sockets}, "bench.groups", events*cmd.Sockets)
	if err != nil {
		return 0, 0, err
	}
	return result.MPS, result.ServerCPU, nil
}
