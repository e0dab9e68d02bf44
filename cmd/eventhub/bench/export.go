package bench

import (
	"bufio"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	psutil "github.com/shirou/gopsutil/v4/process"

	"eventhub/jetstream"
	"eventhub/jetstream/jsonscan"
)

// minExportRatio is the minimum accepted rate of an export, relative to nats.go.
const minExportRatio = 0.7

// rssEvery is how often the memory of the hub is read during an export.
const rssEvery = 50 * time.Millisecond

// Export is `eventhub bench export`.
type Export struct {
	N      int `default:"500000" help:"Events of the topic."`
	Size   int `default:"256" help:"Bytes of the JSON payload."`
	Rounds int `default:"5" help:"Rounds of each side, after a warm-up round."`
}

// Help returns the detailed help text.
func (*Export) Help() string {
	return `Fills a topic and writes it to a file as NDJSON, in turn with eventhub export over the hub's HTTP and with a program on the ordered
consumer of nats.go, each in a process of its own and uncompressed. Both files must be equal, byte for byte.

  eventhub bench export
  eventhub bench --external-nats export --n 5000000`
}

// exportReport is the result of the benchmark.
type exportReport struct {
	N      int     `json:"events"`
	Bytes  int64   `json:"bytes"`
	Rate   Ratio   `json:"rate"`
	Before float64 `json:"hub_rss_before_kib"`
	// Peaks are the highest memory of the hub in each round.
	Peaks []float64 `json:"hub_rss_peak_kib"`
}

// Run runs the benchmark.
func (cmd *Export) Run(ctx context.Context, env Env, target *Target) (err error) {
	switch {
	case cmd.N < 1 || cmd.N > maxEvents:
		return fmt.Errorf("--n %d: must be 1 to %d", cmd.N, maxEvents)
	case cmd.Size < minPayload || cmd.Size > 1<<20:
		return fmt.Errorf("--size %d: must be %d to %d bytes", cmd.Size, minPayload, 1<<20)
	case cmd.Rounds < 1 || cmd.Rounds > 1000:
		return fmt.Errorf("--rounds %d: must be 1 to 1000", cmd.Rounds)
	case target.URL != "":
		return errors.New("export measures a hub that bench starts, so it excludes --url")
	}
	if err := target.validate(); err != nil {
		return err
	}
	sys, err := openSystem(ctx, env, target, needs{hub: true, native: true})
	if err != nil {
		return err
	}
	defer func() { err = ended(ctx, err, sys) }()
	report, err := cmd.run(ctx, newRun(env, target, sys))
	if err != nil {
		return err
	}
	if target.JSON {
		return printJSON(env.Out, report)
	}
	verdict := "ok"
	if report.Rate.OfPairs < minExportRatio {
		verdict = fmt.Sprintf("BELOW %v", minExportRatio)
	}
	_, err = fmt.Fprintf(env.Out, `%d events, %.1f MB as NDJSON; %s
export      %12.0f events/s
nats.go     %12.0f events/s
ratio of the pairs %.3f [%.3f, %.3f]  %s
hub RSS     %.1f MiB before, peaks of the rounds %.1f MiB
`, report.N, float64(report.Bytes)/1e6, sys.describe(side{via: viaHTTP}), report.Rate.Hub, report.Rate.Other,
		report.Rate.OfPairs, report.Rate.Min, report.Rate.Max, verdict, report.Before/1024, mebibytes(report.Peaks))
	return err
}

func mebibytes(kib []float64) []float64 {
	out := make([]float64, len(kib))
	for i, v := range kib {
		out[i] = v / 1024
	}
	return out
}

func (cmd *Export) run(ctx context.Context, b *run) (*exportReport, error) {
	topic := "bench.export." + b.id
	stop := b.progress(fmt.Sprintf("publishing %d events", cmd.N))
	err := cmd.fill(ctx, b.sys, topic)
	stop()
	if err != nil {
		return nil, fmt.Errorf("fill the topic: %w", err)
	}
	hub, err := psutil.NewProcess(b.sys.hubPIDs[0])
	if err != nil {
		return nil, fmt.Errorf("process of the hub: %w", err)
	}
	report := &exportReport{N: cmd.N}
	if report.Before, err = residentKiB([]*psutil.Process{hub}); err != nil {
		return nil, err
	}
	var ours, theirs []float64
	for i := range cmd.Rounds + 1 {
		stop := b.progress(fmt.Sprintf("round %d", i))
		var rates [2]float64
		var sums [2][sha256.Size]byte
		peak := 0.0
		for turn := range 2 {
			which := (turn + i) % 2
			args := []string{"export", topic}
			if which == 1 {
				args = []string{"bench", "export-native", topic, strconv.Itoa(cmd.N)}
			}
			took, high, size, sum, err := b.sys.writer(ctx, hub, args)
			if err != nil {
				stop()
				return nil, err
			}
			rates[which], sums[which], report.Bytes = float64(cmd.N)/took.Seconds(), sum, size
			if which == 0 {
				peak = high
			}
		}
		stop()
		if sums[0] != sums[1] {
			return nil, errors.New("the export and the file of nats.go differ")
		}
		if i > 0 {
			ours, theirs, report.Peaks = append(ours, rates[0]), append(theirs, rates[1]), append(report.Peaks, peak)
		}
	}
	report.Rate = newRatio("export", "events/s", ours, theirs)
	return report, nil
}

// fill publishes the events as the hub stores them, with ids.
func (cmd *Export) fill(ctx context.Context, sys *system, topic string) error {
	bus, err := jetstream.Open(ctx, jetstream.Config{URL: sys.natsURL, Replicas: sys.target.Replicas})
	if err != nil {
		return err
	}
	defer func() { _ = bus.Close() }() //nolint:contextcheck // Close limits its own duration
	pub := bus.NewPublisher()
	failed := make(chan error, 1)
	for i := range cmd.N {
		payload := newPayload(cmd.Size)
		stamp(payload, i, now())
		err := pub.PublishAsync(ctx, topic, payload, jetstream.PublishOptions{}, func(_ jetstream.Receipt, err error) {
			if err != nil {
				select {
				case failed <- err:
				default:
				}
			}
		})
		if err != nil {
			return err
		}
	}
	if err := pub.Flush(ctx); err != nil {
		return err
	}
	select {
	case err := <-failed:
		return err
	default:
		return nil
	}
}

// writer runs this program with its output to a file. It returns how long that took, the highest
// memory of the hub meanwhile in KiB, and the size and the hash of the file.
func (s *system) writer(ctx context.Context, hub *psutil.Process, args []string) (took time.Duration, high float64, size int64, sum [sha256.Size]byte, err error) {
	fail := func(err error) (time.Duration, float64, int64, [sha256.Size]byte, error) {
		return 0, 0, 0, sum, fmt.Errorf("eventhub %s: %w", args[0], err)
	}
	binary, err := os.Executable()
	if err != nil {
		return fail(err)
	}
	path := filepath.Join(s.dir, "export.ndjson")
	out, err := os.Create(path) //nolint:gosec // in a directory of our own
	if err != nil {
		return fail(err)
	}
	defer func() { err = errors.Join(err, out.Close(), os.Remove(path)) }()
	var log logTail
	c := exec.CommandContext(ctx, binary, args...) //nolint:gosec // this program
	c.Env = append(childEnv(), "WS_TOKEN="+s.token, "EVENTHUB_URL="+s.wsURL, "EVENTHUB_HTTP_URL="+s.httpURL, "NATS_URL="+s.native.url)
	c.Stdout, c.Stderr, c.SysProcAttr = out, &log, endWithParent()
	begin := time.Now()
	if err := c.Start(); err != nil {
		return fail(err)
	}
	done := make(chan error, 1)
	go func() { done <- c.Wait() }()
	tick := time.NewTicker(rssEvery)
	defer tick.Stop()
	for waiting := true; waiting; {
		select {
		case err := <-done:
			took, waiting = time.Since(begin), false
			if err != nil {
				return fail(fmt.Errorf("%w: %s", err, log.text()))
			}
		case <-tick.C:
			if rss, err := residentKiB([]*psutil.Process{hub}); err == nil {
				high = max(high, rss)
			}
		}
	}
	if _, err := out.Seek(0, io.SeekStart); err != nil {
		return fail(err)
	}
	hash := sha256.New()
	if size, err = io.Copy(hash, out); err != nil {
		return fail(err)
	}
	return took, high, size, [sha256.Size]byte(hash.Sum(nil)), nil
}

// reader is `eventhub bench export-native`: the program on nats.go.
type reader struct {
	Topic string `arg:"" help:"Topic."`
	N     int    `arg:"" help:"Events."`
}

// Run writes the events of the topic to standard output.
func (r *reader) Run(ctx context.Context, env Env, target *Target) error {
	nc, err := nats.Connect(target.NATSURL)
	if err != nil {
		return fmt.Errorf("connect to NATS: %w", err)
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		return err
	}
	stream, err := js.StreamNameBySubject(ctx, "event."+r.Topic)
	if err != nil {
		return err
	}
	consumer, err := js.OrderedConsumer(ctx, stream, natsjs.OrderedConsumerConfig{DeliverPolicy: natsjs.DeliverAllPolicy})
	if err != nil {
		return err
	}
	messages, err := consumer.Messages()
	if err != nil {
		return err
	}
	defer messages.Stop()
	out := bufio.NewWriterSize(env.Out, 256<<10)
	var line []byte
	for range r.N {
		m, err := messages.Next()
		if err != nil {
			return err
		}
		meta, err := m.Metadata()
		if err != nil {
			return err
		}
		line = jsonscan.AppendString(append(line[:0], `{"id":`...), m.Headers().Get("Event-Id"))
		line = strconv.AppendInt(append(line, `,"ts":`...), meta.Timestamp.UnixMilli(), 10)
		line = jsonscan.AppendString(append(line, `,"topic":`...), r.Topic)
		line = append(append(line, `,"payload":`...), m.Data()...)
		if _, err := out.Write(append(line, "}\n"...)); err != nil {
			return err
		}
	}
	return out.Flush()
}
