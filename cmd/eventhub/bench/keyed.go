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

// maxKeyedRatio is the most that a read by key may take, as a multiple of the same with nats.go.
const maxKeyedRatio = 1.3

// Keyed is `eventhub bench keyed`.
type Keyed struct {
	Keys   int      `default:"1000000" help:"Keys of the compacted topic."`
	Size   int      `default:"128" help:"Bytes of the JSON payload."`
	Again  float64  `default:"0.1" help:"The share of keys, drawn at random, that are written a second time, which leaves holes in the bucket."`
	Rounds int      `default:"5" help:"Rounds, in each of which all sides have a turn, after one with a tenth of the calls to warm up."`
	Only   []string `help:"Measure these only: keys, key, walk, pages, list, watch, watch-100. Default: all."`
}

// Help is shown by --help.
func (*Keyed) Help() string {
	return `Fills a compacted topic with nats.go, waits until its bucket has all, and reads it by key: with the bus, and the same with nats.go, both
over loopback to the same server. Rounds alternate; where there are several ways with nats.go, the fastest counts.

  keys        1,000 random keys: Keys.GetMany; KV Get, one by one and 16 at a time
  key         one random key: Keys.Get; a raw get at the leader (STREAM.MSG.GET)
  walk        all keys: Keys.Each; WatchAll, or ListKeys and Get
  pages       all keys, 1,000 at a time: Keys.Page; WatchAll
  list        all keys, 1,000 at a time, and none left out: Keys.List; WatchAll
  watch       all keys, until what there is has come: Watch; WatchAll
  watch-100   100 keys, likewise: Watch; WatchFiltered

Of more than 100 pages, or 20,000 keys that are got one by one after ListKeys, so many are read, and the time of all is reckoned.

  eventhub bench keyed
  eventhub bench keyed --again 0 --only pages
  eventhub bench --replicas 3 keyed --keys 200000`
}

func (cmd *Keyed) validate() error {
	switch {
	case cmd.Keys < keysAtOnce || cmd.Keys > 100_000_000:
		return fmt.Errorf("--keys %d: %d to 100000000 are allowed", cmd.Keys, keysAtOnce)
	case cmd.Size < minPayload || cmd.Size > 1<<20:
		return fmt.Errorf("--size %d: %d to %d bytes are allowed", cmd.Size, minPayload, 1<<20)
	case cmd.Again < 0 || cmd.Again > 10:
		return fmt.Errorf("--again %v: 0 to 10 are allowed", cmd.Again)
	case cmd.Rounds < 1 || cmd.Rounds > 1000:
		return fmt.Errorf("--rounds %d: 1 to 1000 are allowed", cmd.Rounds)
	}
	for _, name := range cmd.Only {
		if !slices.ContainsFunc(keyedStudies, func(s keyedStudy) bool { return s.name == name }) {
			return fmt.Errorf("--only %s: there is no such part", name)
		}
	}
	return nil
}

// Run measures.
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
	_, err = fmt.Fprintf(env.Out, "%d keys of %d bytes, %d events; published in %.1f s, in the bucket %.3f s later; %s\n",
		cmd.Keys, cmd.Size, topic.entries, topic.filledIn.Seconds(), topic.caughtUpIn.Seconds(), sys.describe(side{via: viaNative}))
	if err != nil {
		return err
	}
	return printKeyed(env.Out, results)
}

// run fills a topic, and measures so many rounds of each study.
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

// keyedReport is the JSON of the benchmark.
type keyedReport struct {
	Keys int `json:"keys"`
	Size int `json:"size"`
	// Entries are the events that were published.
	Entries uint64 `json:"events"`
	// FilledIn and CaughtUpIn are the seconds that publishing took, and the bucket after it.
	FilledIn   float64       `json:"filled_s"`
	CaughtUpIn float64       `json:"caught_up_s"`
	Results    []keyedResult `json:"results"`
}

// keyedResult compares one way with the bus with one way with nats.go, by time.
type keyedResult struct {
	Ours   string `json:"ours"`
	Theirs string `json:"theirs"`
	Ratio
	// Counts is whether this is the fastest way with nats.go.
	Counts bool `json:"counts"`

	median bool // of the calls of a round, not their mean
}

// printKeyed prints a table.
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

// keyedStudy is a part of the benchmark.
type keyedStudy struct {
	name  string
	calls int // a round; 0: of all keys, as many as 100,000 keys are read with, but one at least
	// each is whether the median of the calls is compared beside their mean.
	each   bool
	ours   contender
	theirs []contender
}

// contender is one way to read. It returns the time of one call, and fails unless all came that should. n is the number of
// the call: the same one means the same keys.
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
			n := (turn + i) % len(all) // nobody always profits from what the one before left in the server's caches
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

// round makes the calls of one round, and returns the mean and the median of their times in milliseconds.
func (c *contender) round(ctx context.Context, t *keyedTopic, round, calls int) (mean, mid float64, err error) {
	runtime.GC() // nobody pays for what the one before left behind
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

// compare sets what the bus took against each of the others.
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
