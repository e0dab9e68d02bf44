package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	psutil "github.com/shirou/gopsutil/v4/process"

	"eventhub/jetstream/natstest/freeport"
	eventhub "eventhub/sdk/go"
	"eventhub/sdk/go/wire"
)

const (
	// joining is the number of subscriptions made at a time.
	joining = 16
	// askEvery is how often the hub is asked how many subscriptions it has.
	askEvery = 500 * time.Millisecond
	// scalePublishers is the number of connections that publish.
	scalePublishers = 4
)

// scaling is the state of a run.
type scaling struct {
	*Scale

	sys     *system
	run     *run
	hub     *process // nil while there is none
	servers []*psutil.Process
	clients []*eventhub.Client
	back    *returning
	times   *sharedTimes
	current atomic.Pointer[burst]
}

// burst are the events of one measurement with traffic.
type burst struct {
	begin int64
	tally *tally
}

func (z *scaling) close() error {
	closeAll(z.clients)
	if z.hub == nil {
		return nil
	}
	return z.hub.close()
}

// measure adds one thing after the other.
func (z *scaling) measure(ctx context.Context) (*Scaled, error) {
	ports, release, err := freeport.Take(ctx, 1)
	if err != nil {
		return nil, err
	}
	defer release()
	port := ports[0]
	vars := append(z.sys.hubEnv(), "EVENTHUB_LIMIT_RETURN_RATE="+strconv.Itoa(z.ReturnRate))
	if err := z.start(ctx, vars, port); err != nil {
		return nil, err
	}
	out := &Scaled{}
	for _, stage := range []struct {
		name string
		add  func(context.Context) error
	}{
		{"empty", z.warmUp},
		{"connections", z.connect},
		{"topics", z.makeTopics},
		{"groups", func(ctx context.Context) error { return z.subscribe(ctx, 0, z.Groups) }},
		{"members", func(ctx context.Context) error { return z.subscribe(ctx, z.Groups, z.Connections) }},
	} {
		began := time.Now()
		step, cancel := context.WithTimeout(ctx, z.Timeout)
		err := stage.add(step)
		cancel()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", stage.name, err)
		}
		s := Stage{Name: stage.name, MadeMS: round(float64(time.Since(began))/1e6, 0)}
		if err := z.look(ctx, &s); err != nil {
			return nil, fmt.Errorf("%s: %w", stage.name, err)
		}
		out.Stages = append(out.Stages, s)
	}
	if out.Traffic, err = z.traffic(ctx); err != nil {
		return nil, fmt.Errorf("traffic: %w", err)
	}
	if err := z.restart(ctx, vars, port, out); err != nil {
		return nil, fmt.Errorf("restart: %w", err)
	}
	if out.After, err = z.traffic(ctx); err != nil {
		return nil, fmt.Errorf("traffic after the restart: %w", err)
	}
	return out, nil
}

func (z *scaling) start(ctx context.Context, vars []string, port int) error {
	hub, err := z.sys.startHub(ctx, vars, "serve", "--ws-port="+strconv.Itoa(port), "--http-port=0", "--ops-port=0", "--log-level=warn",
		"--data="+filepath.Join(z.sys.dir, "hub"), "--nats-url="+z.sys.native.url)
	if err != nil {
		return err
	}
	z.hub, z.sys.wsURL = hub, hub.said["websocket"]
	z.servers = nil
	for _, pid := range append([]int32{pidOf(hub)}, z.sys.nativePIDs...) {
		p, err := psutil.NewProcess(pid)
		if err != nil {
			return fmt.Errorf("process %d: %w", pid, err)
		}
		z.servers = append(z.servers, p)
	}
	return nil
}

// warmUp makes a topic, a group, and a few connections, to exclude memory that all share.
func (z *scaling) warmUp(ctx context.Context) error {
	for range dialing {
		c, err := z.sys.dial(ctx, 1)
		if err != nil {
			return err
		}
		_, err = c.Publish(ctx, "bench.scale.warm", []byte(`{}`), wire.PublishOptions{})
		if err == nil {
			_, err = c.Subscribe(ctx, "bench.scale.warm", "bench", wire.SubscribeOptions{From: "latest"}, func(wire.Event) {})
		}
		if err = errors.Join(err, c.Close()); err != nil {
			return err
		}
	}
	return nil
}

func (z *scaling) connect(ctx context.Context) (err error) {
	z.clients, err = connectAll(ctx, z.sys.wsURL, z.sys.token, z.Connections, z.back)
	return err
}

func (*scaling) topic(i int) string { return fmt.Sprintf("bench.scale.%d", i) }

// makeTopics publishes an event to each topic, which makes its stream.
func (z *scaling) makeTopics(ctx context.Context) error {
	for i := range z.Topics {
		if _, err := z.clients[i%len(z.clients)].Publish(ctx, z.topic(i), struct{}{}, eventhub.PublishOptions{}); err != nil {
			return fmt.Errorf("publish to %s: %w", z.topic(i), err)
		}
	}
	return nil
}

// subscribe makes each client from first to before end a member of a group.
func (z *scaling) subscribe(ctx context.Context, first, end int) error {
	errs := make([]error, joining)
	var next atomic.Int64
	var wg sync.WaitGroup
	for worker := range joining {
		wg.Go(func() {
			for i := first + int(next.Add(1)) - 1; i < end && errs[worker] == nil; i = first + int(next.Add(1)) - 1 {
				group := i % z.Groups
				// The subscription is to outlive this step.
				sub, cancel := context.WithCancel(context.WithoutCancel(ctx))
				stop := context.AfterFunc(ctx, cancel)
				_, errs[worker] = z.clients[i].Subscribe(sub, z.topic(group%z.Topics), fmt.Sprintf("bench-%d", group),
					eventhub.SubscribeOptions{From: "latest"}, z.handler(group/z.Topics, i))
				stop()
				_ = cancel // the clients' Close ends the subscriptions
			}
		})
	}
	wg.Wait()
	return firstOf(errs)
}

// handler counts the events of the groups of a topic, of which each has a number.
func (z *scaling) handler(number, member int) eventhub.Handler {
	timed := z.times.stamped(member)
	return func(_ context.Context, d *eventhub.Delivery) error {
		b := z.current.Load()
		seq, at, err := readStamp(d.Payload)
		if err != nil || b == nil || at < b.begin {
			return nil //nolint:nilerr // the event that made the topic, or one of an earlier burst
		}
		if _, err := timed(d.Payload, 0); err != nil {
			b.tally.failed(err)
		}
		b.tally.mark(seq*(z.Groups/z.Topics) + number)
		return nil
	}
}

// gauges reads the metrics of the hub that have no labels.
func (z *scaling) gauges(ctx context.Context) (map[string]float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, z.hub.said["ops"]+"/metrics", http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("metrics of the hub: %w", err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("metrics of the hub: %w", err)
	}
	defer resp.Body.Close() //nolint:errcheck // of an answer
	out := make(map[string]float64)
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), " ")
		if v, err := strconv.ParseFloat(value, 64); err == nil && !strings.ContainsAny(name, "{#") {
			out[name] = v
		}
	}
	if err := lines.Err(); err != nil || resp.StatusCode != http.StatusOK {
		return nil, errors.Join(fmt.Errorf("metrics of the hub: status %d", resp.StatusCode), err)
	}
	return out, nil
}

// look measures what is there.
func (z *scaling) look(ctx context.Context, s *Stage) error {
	if _, _, err := settledKiB(ctx, z.servers, z.Settle); err != nil {
		return err
	}
	for i, cpu := range []*float64{&s.HubCPU, &s.NATSCPU} {
		used, err := cpuSeconds(z.servers[i])
		if err != nil {
			return err
		}
		*cpu = -used
	}
	began := time.Now()
	select {
	case <-time.After(z.For):
	case <-ctx.Done():
		return ctx.Err()
	}
	over := time.Since(began).Seconds()
	for i, of := range []struct{ cpu, kib, files *float64 }{{&s.HubCPU, &s.HubKiB, &s.HubFiles}, {&s.NATSCPU, &s.NATSKiB, &s.NATSFiles}} {
		used, err := cpuSeconds(z.servers[i])
		if err != nil {
			return err
		}
		*of.cpu = round(100*(*of.cpu+used)/over, 2)
		if *of.kib, err = residentKiB(z.servers[i : i+1]); err != nil {
			return err
		}
		files, err := z.servers[i].NumFDsWithContext(ctx)
		if err != nil {
			return fmt.Errorf("open files of process %d: %w", z.servers[i].Pid, err)
		}
		*of.files = float64(files)
	}
	g, err := z.gauges(ctx)
	if err != nil {
		return err
	}
	s.HeapKiB, s.StacksKiB = g["go_memstats_heap_inuse_bytes"]/1024, g["go_memstats_stack_inuse_bytes"]/1024
	s.Goroutines, s.Connections, s.Subscriptions = g["go_goroutines"], int(g["eventhub_connections"]), int(g["eventhub_subscriptions"])
	switch s.Name {
	case "members", "groups":
		s.Topics, s.Groups = z.Topics, z.Groups
	case "topics":
		s.Topics = z.Topics
	}
	return nil
}

// traffic publishes to all topics at the fixed rate until every group has every event.
func (z *scaling) traffic(ctx context.Context) (*Traffic, error) {
	p := &publishers{}
	defer p.close()
	topics := make([]string, z.Topics)
	for i := range topics {
		topics[i] = z.topic(i)
	}
	for i := range scalePublishers {
		w, err := z.sys.newWSPublisher(ctx, publishing{inFlight: 256}, nil)
		if err != nil {
			return nil, err
		}
		p.all = append(p.all, &manyTopics{wsPublisher: w, topics: topics, next: i * z.Topics / scalePublishers})
	}
	n := max(1, int(z.Rate*z.For.Seconds()))
	b := &burst{begin: now(), tally: newTally(n * (z.Groups / z.Topics))}
	for i := range z.times.all {
		z.times.mu[i].Lock()
		z.times.all[i].Reset()
		z.times.mu[i].Unlock()
	}
	z.current.Store(b)
	var before [2]float64
	for i := range before {
		var err error
		if before[i], err = cpuSeconds(z.servers[i]); err != nil {
			return nil, err
		}
	}
	if err := p.onSchedule(ctx, n, z.Size, z.Rate, ids{}, newHistogram()); err != nil {
		return nil, err
	}
	if err := waitAll(ctx, nil, b.tally); err != nil {
		return nil, err
	}
	out := &Traffic{Rate: z.Rate, Published: n, Deliveries: int(b.tally.want), Redelivered: b.tally.again.Load()}
	for i, of := range []struct{ cpu, kib *float64 }{{&out.HubCPU, &out.HubKiB}, {&out.NATSCPU, &out.NATSKiB}} {
		after, err := cpuSeconds(z.servers[i])
		if err != nil {
			return nil, err
		}
		*of.cpu = round((after-before[i])*1e6/float64(out.Deliveries), 1)
		if *of.kib, err = residentKiB(z.servers[i : i+1]); err != nil {
			return nil, err
		}
	}
	out.Quantiles = newQuantiles(z.times.all...)
	return out, nil
}

// restart restarts the hub, and waits for all clients and subscriptions.
func (z *scaling) restart(ctx context.Context, vars []string, port int, out *Scaled) error {
	z.back.forget()
	hub := z.hub
	z.hub = nil
	if err := hub.close(); err != nil {
		return err
	}
	end := time.Now()
	if err := z.start(ctx, vars, port); err != nil { // the hub outlives this step
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, z.Timeout)
	defer cancel()
	down := time.Since(end)
	peak := watchCPU(ctx, pidOf(z.hub))
	err := z.back.until(ctx, z.Connections)
	if err == nil {
		err = z.subscribed(ctx)
	}
	most := peak()
	if err != nil {
		return err
	}
	out.SubscribedMS = round(float64(time.Since(end))/1e6, 0)
	out.Return = z.back.summary(end)
	out.Return.ReturnRate, out.Return.DownMS, out.Return.PeakCPU = z.ReturnRate, round(float64(down)/1e6, 1), most
	return nil
}

// subscribed waits until the hub has all subscriptions.
func (z *scaling) subscribed(ctx context.Context) error {
	ticker := time.NewTicker(askEvery)
	defer ticker.Stop()
	for {
		g, err := z.gauges(ctx)
		if err != nil {
			return err
		}
		if int(g["eventhub_subscriptions"]) >= z.Connections {
			return nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return fmt.Errorf("%.0f of %d clients are subscribed: %w", g["eventhub_subscriptions"], z.Connections, ctx.Err())
		}
	}
}
