package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"
)

// run is one call of a benchmark.
type run struct {
	env    Env
	target *Target
	sys    *system
	id     string // makes topics and ids of this run its own
	count  int    // of rounds so far
	exact  bool   // one round on a running hub: the topic is used as it is
}

// round measures one round of n events on a topic, through one way to the stream.
type roundFunc func(ctx context.Context, via, topic string, n int) (*Result, error)

// Report is the JSON of a benchmark with more than one round.
type Report struct {
	Bench  string    `json:"bench"`
	Hub    string    `json:"hub"`
	Other  string    `json:"other,omitempty"`
	Median *Result   `json:"median"`
	Versus *Result   `json:"other_median,omitempty"`
	Ratios []Ratio   `json:"ratios,omitempty"`
	Rounds []*Result `json:"rounds"`
}

// measure runs a benchmark: what it warms up with, its rounds, and what it prints.
func measure(ctx context.Context, env Env, target *Target, name, via string, r rounds, l *load, metrics []metric, make func(*run) roundFunc) (err error) {
	if err := errors.Join(target.check(), r.check(via), l.check()); err != nil {
		return err
	}
	vias := []string{via}
	if r.Compare != "" {
		vias = append(vias, r.Compare)
	}
	sys, err := openSystem(ctx, env, target, needsOf(vias...))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.close()) }()
	b := &run{env: env, target: target, sys: sys, id: strings.ToLower(rand.Text()[:8])}
	b.exact = target.URL != "" && r.Rounds == 1 && r.Compare == ""
	once := make(b)

	if warm := min(r.WarmUp, l.N); warm > 0 && !b.exact {
		for _, v := range vias {
			if _, err := b.round(ctx, once, v, l.Topic, warm); err != nil {
				return fmt.Errorf("warming up %s: %w", v, err)
			}
		}
	}
	sides := [][]*Result{nil, nil}
	report := Report{Bench: name, Hub: sys.describe(via)}
	for i := range r.Rounds {
		for side, v := range vias {
			result, err := b.round(ctx, once, v, l.Topic, l.N)
			if err != nil {
				return fmt.Errorf("round %d, %s: %w", i+1, v, err)
			}
			sides[side] = append(sides[side], result)
			report.Rounds = append(report.Rounds, result)
			if !target.JSON && (r.Rounds > 1 || len(vias) > 1) {
				if _, err := fmt.Fprintf(env.Out, "%2d %s\n", i+1, result.line()); err != nil {
					return err
				}
			}
		}
	}
	report.Median = medians(sides[0])
	if len(vias) > 1 {
		report.Other, report.Versus = sys.describe(r.Compare), medians(sides[1])
		for _, m := range metrics {
			report.Ratios = append(report.Ratios, newRatio(m.name, m.unit, values(sides[0], m), values(sides[1], m)))
		}
	}
	return report.print(env, target)
}

func values(results []*Result, m metric) []float64 {
	out := make([]float64, len(results))
	for i, r := range results {
		out[i] = m.of(r)
	}
	return out
}

// round runs one round on a topic of its own.
func (b *run) round(ctx context.Context, once roundFunc, via, topic string, n int) (*Result, error) {
	b.count++
	if !b.exact {
		topic = fmt.Sprintf("%s.%s.%d", topic, b.id, b.count)
	}
	stop := b.progress(fmt.Sprintf("round %d, %s, %d events", b.count, via, n))
	result, err := once(ctx, via, topic, n)
	stop()
	if err == nil {
		result.Via = via
	}
	if !b.exact {
		err = errors.Join(err, b.remove(ctx, via, topic))
	}
	return result, err
}

// remove deletes the round's topic where that is possible.
func (b *run) remove(ctx context.Context, via, topic string) error {
	a, err := b.sys.admin(via)
	if a == nil || err != nil {
		return err
	}
	return a.remove(context.WithoutCancel(ctx), topic)
}

// progress shows what runs, and for how long, until the returned function is called.
func (b *run) progress(what string) (stop func()) {
	if !b.env.Progress || b.target.JSON {
		return func() {}
	}
	over, ended := make(chan struct{}), make(chan struct{})
	begin := time.Now()
	go func() { // owned by the caller, who calls stop
		defer close(ended)
		ticker := time.NewTicker(time.Second)
		defer ticker.Stop()
		for {
			_, _ = fmt.Fprintf(b.env.Err, "\r%s: %.0f s ", what, time.Since(begin).Seconds())
			select {
			case <-ticker.C:
			case <-over:
				_, _ = fmt.Fprint(b.env.Err, "\r\x1b[K")
				return
			}
		}
	}()
	return func() {
		close(over)
		<-ended
	}
}

// print writes the report as text or JSON. A single round is its result alone.
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
