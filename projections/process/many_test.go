package process

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
	"eventhub/projections"
)

// A full topic of states takes no new process. The processes that it has go on, and a new one is
// taken when another has gone.
func TestAFullTopicOfStatesHoldsUpNoProcess(t *testing.T) {
	t.Parallel()
	const known = 3
	bus := openBus(t, jetstream.Config{
		Server: natstest.Embed(t, t.TempDir()),
		Topics: []topics.Rule{{Pattern: TopicState, Compaction: true, MaxKeys: known}},
	})
	start(t, Config{Bus: projections.JetStream(bus), StaleAfter: time.Hour})
	for n := range known {
		publish(t, bus, heartbeat(n, 0))
	}
	await(t, bus, TopicState, atLeast(known))
	for n := range 20 {
		publish(t, bus, heartbeat(known+n, 0))
	}
	var last jetstream.Receipt
	for n := range known {
		last = publish(t, bus, heartbeat(n, 1))
	}
	all := await(t, bus, TopicState, atLeast(2*known))
	settle(t, bus, last.ID)
	wantEachOnce(t, all, known, 2)
	if dead := letters(t, bus); dead != 0 {
		t.Errorf("%d heartbeats became dead letters, which anybody could make many of", dead)
	}

	if _, err := bus.Publish(t.Context(), TopicState, nil, jetstream.PublishOptions{Key: "node:worker:0", Tombstone: true}); err != nil {
		t.Fatal(err)
	}
	settle(t, bus, publish(t, bus, heartbeat(known+1, 1)).ID)
	if e, err := bus.Keys(TopicState).Get(t.Context(), "node:worker:"+strconv.Itoa(known+1)); err != nil || e.Tombstone {
		t.Errorf("a new process after another has gone: %v", err)
	}
}

// A principal that may only publish heartbeats makes so many processes. Others, and the processes
// that it has, are not held up.
func TestNewProcessesOfAClientAreRationed(t *testing.T) {
	t.Parallel()
	const burst = 5
	bus := openBus(t, jetstream.Config{
		Server: natstest.Embed(t, t.TempDir()), Derived: []jetstream.DerivedKeys{Keys()},
		Limits: jetstream.Limits{DerivedKeysPerClient: burst, DerivedKeyRate: 1},
	})
	start(t, Config{Bus: projections.JetStream(bus), StaleAfter: time.Hour})
	send := func(client string, n, i int) error {
		_, err := bus.Publish(t.Context(), TopicHeartbeat, []byte(heartbeat(n, i)), jetstream.PublishOptions{CountFor: client})
		return err
	}
	began, made := time.Now(), 0
	for n := range 20 * burst {
		err := send("eve", n, 0)
		if err == nil {
			made++
			continue
		}
		if refused, ok := errors.AsType[*jetstream.Error](err); !ok || refused.Code != jetstream.CodeRateLimited {
			t.Fatal(err)
		}
	}
	if most := burst + int(time.Since(began).Seconds()) + 1; made < burst || made > most {
		t.Fatalf("a client made %d processes at once, want %d to %d", made, burst, most)
	}
	for range 10 { // again and again, before and after they are projected
		for n := range burst {
			if err := send("eve", n, 1); err != nil {
				t.Fatalf("a process that exists: %v", err)
			}
		}
	}
	for _, client := range []string{"victim", ""} {
		if err := send(client, 1_000+len(client), 0); err != nil {
			t.Errorf("client %q: %v", client, err)
		}
	}
	await(t, bus, TopicState, func(all []stored) bool {
		return slices.ContainsFunc(all, func(s stored) bool { return s.PID == 1_006 })
	})
	after := openBus(t, jetstream.Config{URL: startNATS(t), Derived: []jetstream.DerivedKeys{Keys()}})
	if _, err := after.Publish(t.Context(), TopicHeartbeat, []byte("no heartbeat"), jetstream.PublishOptions{CountFor: "eve"}); err != nil {
		t.Errorf("what is no heartbeat makes no key: %v", err)
	}
}

// letters counts the dead letters of heartbeats.
func letters(tb testing.TB, bus *jetstream.Bus) (n int) {
	tb.Helper()
	err := bus.History("dlq."+TopicHeartbeat).Scan(tb.Context(), jetstream.ScanOptions{}, func(*jetstream.Event) error {
		n++
		return nil
	})
	if err != nil && !strings.Contains(err.Error(), "not found") {
		tb.Fatal(err)
	}
	return n
}

// BenchmarkNewProcesses projects a backlog of heartbeats, each of another process; so many are more
// than are kept in memory.
func BenchmarkNewProcesses(b *testing.B) {
	bus := openBus(b, jetstream.Config{Server: natstest.Embed(b, b.TempDir()), Topics: []topics.Rule{{Pattern: TopicState, Compaction: true, MaxKeys: 10_000_000}}})
	p := bus.NewPublisher()
	for i := range b.N {
		if err := p.PublishAsync(b.Context(), TopicHeartbeat, []byte(heartbeat(i, 0)), jetstream.PublishOptions{}, func(_ jetstream.Receipt, err error) {
			if err != nil {
				b.Error(err)
			}
		}); err != nil {
			b.Fatal(err)
		}
	}
	if err := p.Flush(b.Context()); err != nil {
		b.Fatal(err)
	}
	b.ResetTimer()
	start(b, Config{Bus: projections.JetStream(bus)})
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	timeout := time.After(10 * time.Minute)
	began, shown := time.Now(), 0
	for {
		backlog, err := bus.Group(TopicHeartbeat, Group).Backlog(b.Context())
		done := int(backlog.Floor)
		if err == nil && done >= b.N {
			break
		}
		if testing.Verbose() && done-shown >= 10_000 {
			shown = done
			fmt.Printf("%d after %v\n", done, time.Since(began).Round(time.Millisecond))
		}
		select {
		case <-tick.C:
		case <-timeout:
			b.Fatalf("%d of %d processes after 10 minutes", done, b.N)
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "processes/s")
}
