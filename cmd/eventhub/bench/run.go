package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// run is one execution of a benchmark.
type run struct {
	env    Env
	target *Target
	sys    *system
	id     string // makes the topics and ids of the run unique
	count  int    // number of rounds so far
	exact  bool   // single round on a running hub: use the topic unchanged
}

// side is one of the systems that a benchmark compares, or the only one.
type side struct {
	via    string
	groups int // number of groups of a fan-out
	rules  int // number of policy rules of the clients; 0 means that they use the hub's own token
}

// roundFunc measures one round of n events on a topic.
type roundFunc func(ctx context.Context, s side, topic string, n int) (*Result, error)

// Report is the JSON report of a benchmark with several rounds.
type Report struct {
	Bench  string    `json:"bench"`
	Hub    string    `json:"hub"`
	Other  string    `json:"other,omitempty"`
	Median *Result   `json:"median"`
	Versus *Result   `json:"other_median,omitempty"`
	Ratios []Ratio   `json:"ratios,omitempty"`
	Rounds []*Result `json:"rounds"`
}

// plan describes the benchmark to run.
type plan struct {
	name    string
	sides   []side // one or two
	rounds  *rounds
	load    *load
	metrics []metric
}

// sidesOf returns the measured side and, in a comparison, the other side.
func (r *rounds) sidesOf(via string) []side {
	if r.Compare == comparePolicy && r.PolicyRules == 0 {
		r.PolicyRules = policyRules
	}
	sides := []side{{via: via, rules: r.PolicyRules}}
	switch r.Compare {
	case "":
	case comparePolicy:
		sides = append(sides, side{via: via})
	default:
		sides = append(sides, side{via: r.Compare})
	}
	return sides
}

// measure runs a benchmark, including warm-up and output. It calls newRound once the system is
// running.
func measure(ctx context.Context, env Env, target *Target, p plan, newRound func(*run) roundFunc) (err error) {
	if err := errors.Join(target.validate(), p.rounds.validate(p.sides), p.load.validate()); err != nil {
		return err
	}
	if p.sides[0].rules > 0 && target.URL != "" {
		return errors.New("--policy-rules requires a hub that bench starts, because bench signs the tokens; leave out --url")
	}
	sys, err := openSystem(ctx, env, target, needsOf(p.sides))
	if err != nil {
		return err
	}
	defer func() { err = ended(ctx, err, sys) }()
	b := newRun(env, target, sys)
	b.exact = target.URL != "" && p.rounds.Rounds == 1 && len(p.sides) == 1
	report, err := b.rounds(ctx, p, newRound(b))
	if err != nil {
		return err
	}
	return report.print(env, target)
}

func newRun(env Env, target *Target, sys *system) *run {
	return &run{env: env, target: target, sys: sys, id: strings.ToLower(rand.Text()[:8])}
}

// errInterrupted is returned by an interrupted benchmark.
var errInterrupted = errors.New("interrupted")

// ended closes the system after a benchmark and returns the benchmark's error. After an
// interruption, it returns errInterrupted, because other errors are consequences.
func ended(ctx context.Context, err error, sys *system) error {
	if err = errors.Join(err, sys.close()); err != nil && ctx.Err() != nil {
		return errInterrupted
	}
	return err
}

// rounds runs the warm-up and the rounds of all sides in turn.
func (b *run) rounds(ctx context.Context, p plan, once roundFunc) (*Report, error) {
	if warm := min(p.rounds.WarmUp, p.load.N); warm > 0 && !b.exact {
		for _, s := range p.sides {
			if _, err := b.round(ctx, once, s, p.load.Topic, warm); err != nil {
				return nil, fmt.Errorf("warm up %s: %w", s.via, err)
			}
		}
	}
	results := make([][]*Result, len(p.sides))
	report := &Report{Bench: p.name, Hub: b.sys.describe(p.sides[0])}
	for i := range p.rounds.Rounds {
		for n, s := range p.sides {
			result, err := b.round(ctx, once, s, p.load.Topic, p.load.N)
			if err != nil {
				return nil, fmt.Errorf("round %d, %s: %w", i+1, s.via, err)
			}
			results[n] = append(results[n], result)
			report.Rounds = append(report.Rounds, result)
			if b.target.JSON || p.rounds.Rounds*len(p.sides) == 1 {
				continue
			}
			if _, err := fmt.Fprintf(b.env.Out, "%2d %s\n", i+1, result.line()); err != nil {
				return nil, err
			}
		}
	}
	report.Median = medians(results[0])
	if len(p.sides) == 1 {
		return report, nil
	}
	report.Other, report.Versus = b.sys.describe(p.sides[1]), medians(results[1])
	for _, m := range p.metrics {
		hub, other := values(results[0], m), values(results[1], m)
		if slices.Contains(other, 0) {
			continue // the rounds were too short for the resolution of the CPU clock
		}
		report.Ratios = append(report.Ratios, newRatio(m.name, m.unit, hub, other))
	}
	return report, nil
}

func values(results []*Result, m metric) []float64 {
	out := make([]float64, len(results))
	for i, r := range results {
		out[i] = m.of(r)
	}
	return out
}

// round runs one round on a fresh topic.
func (b *run) round(ctx context.Context, once roundFunc, s side, topic string, n int) (*Result, error) {
	b.count++
	if !b.exact {
		topic = fmt.Sprintf("%s.%s.%d", topic, b.id, b.count)
	}
	stop := b.progress(fmt.Sprintf("round %d, %s, %d events", b.count, s.via, n))
	var result *Result
	err := b.sys.become(s.rules)
	if err == nil {
		result, err = once(ctx, s, topic, n)
	}
	stop()
	if err == nil {
		result.Via, result.Groups = s.via, s.groups
	}
	if !b.exact {
		err = errors.Join(err, b.remove(ctx, s.via, topic))
	}
	return result, err
}

// remove deletes the topic of a round if the stream is accessible natively.
func (b *run) remove(ctx context.Context, via, topic string) error {
	a, err := b.sys.admin(via)
	if a == nil || err != nil {
		return err
	}
	return a.remove(context.WithoutCancel(ctx), topic)
}

// progress shows the current work and its duration until stop is called.
func (b *run) progress(what string) (stop func()) {
	if b.env.Screen == nil || b.target.JSON {
		return func() {}
	}
	over, ended := make(chan struct{}), make(chan struct{})
	begin := time.Now()
	go func() { // the caller waits for it by calling stop
		defer close(ended)
		ticker := time.NewTicker(time.Second)
		defer ticker.Stop()
		for {
			_, _ = io.WriteString(b.env.Screen, "\r")
			_, _ = fmt.Fprintf(b.env.Err, "%s: %.0f s ", what, time.Since(begin).Seconds())
			select {
			case <-ticker.C:
			case <-over:
				_, _ = io.WriteString(b.env.Screen, "\r\x1b[K")
				return
			}
		}
	}()
	return func() {
		close(over)
		<-ended
	}
}

// print writes the report as text or JSON. For a single round, it writes only the result.
func (p *Report) print(env Env, target *Target) error {
	single := len(p.Rounds) == 1
	if target.JSON {
		if single {
			return printJSON(env.Out, p.Rounds[0])
		}
		return printJSON(env.Out, p)
	}
	var b strings.Builder
	if single {
		fmt.Fprintf(&b, "%s\n", p.Rounds[0].line())
	} else {
		fmt.Fprintf(&b, "median %s\n", p.Median.line())
	}
	if p.Versus != nil {
		fmt.Fprintf(&b, "median %s\n%s, compared with %s:\n", p.Versus.line(), p.Hub, p.Other)
		for i := range p.Ratios {
			fmt.Fprintf(&b, "  %s\n", p.Ratios[i].line())
		}
	} else {
		fmt.Fprintf(&b, "measured: %s\n", p.Hub)
	}
	_, err := fmt.Fprint(env.Out, b.String())
	return err
}
