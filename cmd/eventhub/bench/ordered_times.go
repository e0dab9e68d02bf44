package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"eventhub/jetstream"
)

// handOverRate is how many events a second are published around a hand-over, and handOverTime how
// long. The owner ends after a third of it.
const (
	handOverRate = 1000
	handOverTime = 3 * time.Second
)

// handOver closes the hub that owns a group, whose members are on another hub, and returns the
// longest time from when an event was due to its delivery, in milliseconds.
func (o *orderedRun) handOver(ctx context.Context) (_ float64, err error) {
	topic := o.topic()
	if err := o.hubs[1].Admin().Topic(topic).Create(ctx); err != nil {
		return 0, err
	}
	owner, err := jetstream.Open(ctx, jetstream.Config{URL: o.run.sys.native.url, Replicas: o.run.target.Replicas})
	if err != nil {
		return 0, err
	}
	closeOwner := sync.OnceValue(owner.Close)
	defer func() { err = errors.Join(err, closeOwner()) }()
	if _, err := owner.Subscribe(ctx, topic, "bench", jetstream.SubscribeOptions{From: jetstream.FromEarliest, OrderByKey: true, Paused: true}, func(*jetstream.Held) {}); err != nil {
		return 0, err
	}
	n := int(handOverRate * handOverTime.Seconds())
	began := time.Now()
	var longest, got atomic.Int64
	done := make(chan struct{})
	var waits sync.WaitGroup // for the slots of the members
	opts := jetstream.SubscribeOptions{From: jetstream.FromEarliest, MaxInFlight: 1000, OrderByKey: true}
	for range o.cmd.Members {
		waits.Add(1)
		opts.OnAssign = func() func(jetstream.Assignment) {
			once := sync.OnceFunc(waits.Done)
			return func(jetstream.Assignment) { once() }
		}()
		s, err := o.hubs[1].Subscribe(ctx, topic, "bench", opts, func(h *jetstream.Held) {
			d, ok := h.Begin()
			if !ok {
				return
			}
			took := int64(time.Since(began)) - int64(binary.LittleEndian.Uint64(d.Event.Payload)) //nolint:gosec // 63 bits
			for most := longest.Load(); took > most && !longest.CompareAndSwap(most, took); most = longest.Load() {
			}
			if d.Ack() == nil && got.Add(1) == int64(n) {
				close(done)
			}
		})
		if err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, s.Stop(context.WithoutCancel(ctx))) }()
	}
	assigned := make(chan struct{})
	go func() { // it ends with the slots, which all members get
		waits.Wait()
		close(assigned)
	}()
	if err := await(ctx, assigned); err != nil {
		return 0, err
	}
	closing := time.AfterFunc(handOverTime/3, func() { _ = closeOwner() })
	defer closing.Stop()
	if err := o.pacedKeys(ctx, topic, n, handOverRate, began); err != nil {
		return 0, err
	}
	if err := await(ctx, done); err != nil {
		return 0, err
	}
	return float64(longest.Load()) / 1e6, o.run.remove(ctx, viaNative, topic)
}

// idleCost is what an ordered group costs that has one member and no events.
type idleCost struct {
	Groups    int     `json:"groups"`
	Consumers int     `json:"consumers"`
	KiB       float64 `json:"kib_per_group"`
	// HubCPU and NATSCPU are microseconds per second and group.
	HubCPU  float64 `json:"hub_us"`
	NATSCPU float64 `json:"nats_us"`
}

// idleRest is how long the groups have to settle before they are measured, and idleTime how long
// they are.
const (
	idleRest = 5 * time.Second
	idleTime = 20 * time.Second
)

// idle measures ordered groups without events.
func (o *orderedRun) idle(ctx context.Context, n int) (_ *idleCost, err error) {
	topic := o.topic()
	if err := o.hubs[0].Admin().Topic(topic).Create(ctx); err != nil {
		return nil, err
	}
	before := heapBytes()
	for i := range n {
		s, err := o.hubs[0].Subscribe(ctx, topic, fmt.Sprint("idle", i), jetstream.SubscribeOptions{OrderByKey: true}, func(*jetstream.Held) {})
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, s.Stop(context.WithoutCancel(ctx))) }()
	}
	if err := sleep(ctx, idleRest); err != nil {
		return nil, err
	}
	info, err := o.hubs[0].Admin().Topic(topic).Info(ctx)
	if err != nil {
		return nil, err
	}
	cost := &idleCost{Groups: n, Consumers: info.Groups, KiB: float64(heapBytes()-before) / 1024 / float64(n)}
	m, err := o.run.sys.newMeter(viaNative)
	if err != nil {
		return nil, err
	}
	first, err := m.read()
	if err != nil {
		return nil, err
	}
	if err := sleep(ctx, idleTime); err != nil {
		return nil, err
	}
	last, err := m.read()
	if err != nil {
		return nil, err
	}
	each := func(seconds float64) float64 { return seconds * 1e6 / idleTime.Seconds() / float64(n) }
	cost.HubCPU, cost.NATSCPU = each(last.client-first.client), each(last.server-first.server)
	return cost, nil
}

// heapBytes is what lives on the heap.
func heapBytes() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc) //nolint:gosec // it fits
}
