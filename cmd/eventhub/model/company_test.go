//go:build unix

package model

import (
	"context"
	"math/rand/v2"
	"sync"
)

// company is all that acts beside the clients with WebSockets of their own.
type company struct {
	rig    *rig
	count  *counters
	rows   *rows
	reader *reader
}

func newCompany(r *rig, count *counters, ids *knownIDs) *company {
	r.Helper()
	c := &company{rig: r, count: count}
	if r.plan.has("outbox") {
		c.rows = openRows(r, count, r.rows)
	}
	if r.plan.has("reads") {
		c.reader = newReader(r, c.source(2_000), ids)
	}
	if r.plan.has("ts") {
		if err := sdkBuilt(); err != nil { // it takes longer than clients act
			r.Fatal(err)
		}
	}
	return c
}

// source is the source of randomness of one member of the company.
func (c *company) source(n uint64) *rand.Rand {
	return rand.New(rand.NewPCG(uint64(c.rig.plan.seed), n))
}

// run acts until ctx ends.
func (c *company) run(ctx context.Context) {
	var all sync.WaitGroup
	defer all.Wait()
	if c.rows != nil {
		all.Go(func() { c.rows.run(ctx, c.source(2_001)) })
	}
	if c.reader != nil {
		all.Go(func() { c.reader.run(ctx) })
	}
	guest := func(n uint64) *guest { return &guest{rig: c.rig, rnd: c.source(n), count: c.count, web: newWeb()} }
	if c.rig.plan.has("http") {
		all.Go(func() { guest(2_002).pulls(ctx) })
		all.Go(func() { guest(2_003).streams(ctx) })
	}
	if c.rig.plan.has("native") {
		all.Go(func() { guest(2_004).speaksNATS(ctx) })
	}
	if c.rig.plan.has("go") {
		all.Go(func() { c.rig.goClient(ctx, c.source(2_005), c.count) })
	}
	if c.rig.plan.has("ts") {
		all.Go(func() { c.rig.tsClient(ctx, c.source(2_006), c.count) })
	}
}

// settle waits until what the hubs do by themselves is done.
func (c *company) settle() {
	c.rig.Helper()
	if c.rows != nil {
		c.rows.empty()
	}
}

// read asks for what was settled.
func (c *company) read() {
	c.rig.Helper()
	if c.reader != nil {
		c.reader.last()
	}
}
