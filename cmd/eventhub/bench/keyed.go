package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"time"
)

// maxKeyedRatio is the maximum accepted time of a read by key, relative to nats.go.
const maxKeyedRatio = 1.3

// Keyed is `eventhub bench keyed`.
type Keyed struct {
	Keys   int      `default:"1000000" help:"Number of keys of the compacted topic."`
	Size   int      `default:"128" help:"Bytes of the JSON payload."`
	Again  float64  `default:"0.1" help:"Fraction of random keys that are written a second time, which leaves gaps in the bucket."`
	Rounds int      `default:"5" help:"Rounds, after a warm-up round with a tenth of the calls. All sides run in each round."`
	Only   []string `help:"Measure only these parts: keys, key, walk, pages, list, watch, watch-100. Default: all."`
}

// Help returns the detailed help text.
func (*Keyed) Help() string {
	return `Fills a compacted topic with nats.go, waits until its bucket is complete, and reads it by key with the bus and with nats.go, both
over loopback to the same server. Rounds alternate. Of several nats.go variants, the fastest counts.

  keys        1,000 random keys: Keys.GetMany; KV Get, one by one and 16 at a time
  key         one random key: Keys.Get; a raw get at the leader (STREAM.MSG.GET)
  walk        all keys: Keys.Each; WatchAll, or ListKeys and Get
  pages       all keys, 1,000 at a time: Keys.Page; WatchAll
  list        all keys, 1,000 at a time, without omissions: Keys.List; WatchAll
  watch       all keys, until all current values have arrived: Watch; WatchAll
  watch-100   100 keys, likewise: Watch; WatchFiltered

At most 100 pages, and after ListKeys at most 20,000 keys, are actually read; the total time is extrapolated.

  eventhub bench keyed
  eventhub bench keyed --again 0 --only pages
  eventhub bench --replicas 3 keyed --keys 200000`
}

func (cmd *Keyed) validate() error {
	switch {
	case cmd.Keys < keysAtOnce || cmd.Keys > 100_000_000:
		return fmt.Errorf("--keys %d: must be %d to 100000000", cmd.Keys, keysAtOnce)
	case cmd.Size < minPayload || cmd.Size > 1<<20:
		return fmt.Errorf("--size %d: must be %d to %d bytes", cmd.Size, minPayload, 1<<20)
	case cmd.Again < 0 || cmd.Again > 10:
		return fmt.Errorf("--again %v: must be 0 to 10", cmd.Again)
	case cmd.Rounds < 1 || cmd.Rounds > 1000:
		return fmt.Errorf("--rounds %d: must be 1 to 1000", cmd.Rounds)
	}
	for _, name := range cmd.Only {
		if !slices.ContainsFunc(keyedStudies, func(s keyedStudy) bool { return s.name == name }) {
			return fmt.Errorf("--only %s: unknown part", name)
		}
	}
	return nil
}

// Run runs the benchmark.
func (cmd *Keyed) Run(ctx context.Context, env Env, target *Target) (err error) {
	if err := errors.Join(target.validate(), cmd.validate()); err != nil {
		return err
	}
	sys, err := openSystem(ctx, env, target, needs{native: true})
	if err != nil {
		return err
	}
	defer func() { err = ended(ctx, err, sys) }()
	b := newRun(env, target, sys)
	results, topic, err := cmd.run(ctx, b, cmd.Rounds)
	if err != nil {
		return err
	}
	if target.JSON {
		return printJSON(env.Out, keyedReport{Keys: cmd.Keys, Size: cmd.Size, Entries: topic.entries, FilledIn: topic.filledIn.Seconds(), CaughtUpIn: topic.caughtUpIn.Seconds(), Results: results})
	}
	_, err = fmt.Fprintf(env.Out, "%d keys of %d bytes, %d events; published in %.1f s, bucket complete %.3f s later; %s\n",
		cmd.Keys, cmd.Size, topic.entries, topic.filledIn.Seconds(), topic.caughtUpIn.Seconds(), sys.describe(side{via: viaNative}))
	if err != nil {
		return err
	}
	return printKeyed(env.Out, results)
}

// run fills a topic and measures count rounds of each study.
func (cmd *Keyed) run(ctx context.Context, b *run, count int) (results []keyedResult, topic *keyedTopic, err error) {
	opened, err := cmd.open(ctx, b)
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, opened.close(ctx)) }()
	for _, study := range keyedStudies {
		if len(cmd.Only) > 0 && !slices.Contains(cmd.Only, study.name) {
			continue
		}
		stop := b.progress(study.name)
		got, err := study.measure(ctx, opened, count)
		stop()
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", study.name, err)
		}
		results = append(results, got...)
	}
	return results, opened, nil
}

// keyedReport is the JSON report of the benchmark.
type keyedReport struct {
	Keys int `json:"keys"`
	Size int `json:"size"`
	// Entries is the number of published events.
	Entries uint64 `json:"events"`
	// FilledIn is the time for publishing in seconds. CaughtUpIn is the further time until the
	// bucket was complete.
	FilledIn   float64       `json:"filled_s"`
	CaughtUpIn float64       `json:"caught_up_s"`
	Results    []keyedResult `json:"results"`
}

// keyedResult compares the time of one bus operation with one nats.go variant.
type keyedResult struct {
	Ours   string `json:"ours"`
	Theirs string `json:"theirs"`
	Ratio
	// Counts marks the fastest nats.go variant.
	Counts bool `json:"counts"`

	median bool // compares medians of calls rather than means
}

// printKeyed prints the results as a table.
func printKeyed(w io.Writer, results []keyedResult) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%-20s %12s   %-34s %12s   %s\n", "bus", "ms", "nats.go", "ms", "ratio of the pairs")
	for _, r := range results {
		verdict := ""
		switch {
		case !r.Counts:
		case r.OfPairs <= maxKeyedRatio:
			verdict = "  ok"
		default:
			verdict = fmt.Sprintf("  OVER %v", maxKeyedRatio)
		}
		fmt.Fprintf(&b, "%-20s %12.3f   %-34s %12.3f   %.3f [%.3f, %.3f]%s\n", r.Ours, r.Hub, r.Theirs, r.Other, r.OfPairs, r.Min, r.Max, verdict)
	}
	_, err := fmt.Fprint(w, b.String())
	return err
}

// keyedStudy is one part of the benchmark.
type keyedStudy struct {
	name  string
	calls int // calls per round; 0 means 100,000 divided by the number of keys, at least one
	// each adds a comparison of the medians of the calls to that of the means.
	each   bool
	ours   contender
	theirs []contender
}

// contender is one way to read. call returns the duration of one call and fails if the result is
// incomplete. n is the number of the call; equal numbers read equal keys.
type contender struct {
	name string
	call func(ctx context.Context, t *keyedTopic, n int) (time.Duration, error)
}

// measure runs all contenders in turn.
func (s *keyedStudy) measure(ctx context.Context, t *keyedTopic, count int) ([]keyedResult, error) {
	all := append([]contender{s.ours}, s.theirs...)
	most := s.calls
	if most == 0 {
		most = max(1, 100_000/t.keys)
	}
	means, medians := make([][]float64, len(all)), make([][]float64, len(all))
	for i := range count + 1 {
		calls := most
		if i == 0 {
			calls = (most + 9) / 10
		}
		for turn := range all {
			// rotate, so that no contender always profits from warm caches of the server
			n := (turn + i) % len(all)
			mean, mid, err := all[n].round(ctx, t, i, calls)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", all[n].name, err)
			}
			if i > 0 {
				means[n], medians[n] = append(means[n], mean), append(medians[n], mid)
			}
		}
	}
	results := s.compare("", means)
	if s.each {
		results = append(results, s.compare(", p50", medians)...)
	}
	return results, nil
}

// round makes the calls of one round and returns the mean and median of their times in
// milliseconds.
func (c *contender) round(ctx context.Context, t *keyedTopic, round, calls int) (mean, mid float64, err error) {
	runtime.GC() // so that no contender pays for the garbage of the previous one
	times := make([]float64, calls)
	for i := range times {
		took, err := c.call(ctx, t, round*calls+i)
		if err != nil {
			return 0, 0, err
		}
		times[i] = took.Seconds() * 1e3
		mean += times[i] / float64(calls)
	}
	return mean, median(times), nil
}

// compare compares the times of the bus with those of each nats.go variant.
func (s *keyedStudy) compare(suffix string, times [][]float64) []keyedResult {
	var results []keyedResult
	fastest := 0
	for i, way := range s.theirs {
		r := keyedResult{Ours: s.ours.name + suffix, Theirs: way.name + suffix, Ratio: newRatio(s.name+suffix, "ms", times[0], times[i+1]), median: suffix != ""}
		results = append(results, r)
		if r.Other < results[fastest].Other {
			fastest = i
		}
	}
	results[fastest].Counts = true
	return results
}
