//go:build unix

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/sdk/go/wire"
)

var (
	mixedEvents = flag.Int("mixed.events", 1_500, "events of TestMixedGroup; 100000 is the full form")
	mixedKills  = flag.Int("mixed.kills", 1, "how often TestMixedGroup kills a hub, one after the other")
)

const (
	mixedTopic = "mixed"
	mixedGroup = "workers"
	// mixedAckWait is how long NATS waits for a hub that is dead, and for a native member.
	mixedAckWait = 5 * time.Second
)

// hold is an event in the hands of a member, as that member sees it.
type hold struct {
	member string
	hub    *mixedHub // nil for a native member
	began  time.Time
	// others are members that were given the event meanwhile.
	others []string
}

// mixedLedger knows who holds what, and what was settled.
type mixedLedger struct {
	mu       sync.Mutex
	holds    map[string]*hold // by event
	settled  map[string]int   // confirmed settlements, by event
	unknown  map[string]bool  // events with a settlement whose answer was lost
	handled  int
	refused  int // settlements that came too late
	byMember map[string]int
	faults   []string
}

// begin notes that a member was given an event.
func (l *mixedLedger) begin(member string, hub *mixedHub, id string) *hold {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := &hold{member: member, hub: hub, began: time.Now()}
	if hub != nil && hub.dead.Load() {
		return h // what still came out of the socket of a hub that was killed is not held
	}
	if other := l.holds[id]; other != nil {
		other.others = append(other.others, fmt.Sprintf("%s after %v", member, time.Since(other.began)))
	}
	l.holds[id] = h
	l.handled++
	l.byMember[member]++
	return h
}

// end notes that a member has settled an event, or has let it go. confirmed says that the answer
// says that this settlement counted, which only handles know.
func (l *mixedLedger) end(id string, h *hold, settled, confirmed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.holds[id] == h {
		delete(l.holds, id)
	}
	if !settled {
		l.refused++
		return
	}
	l.settled[id]++
	delete(l.unknown, id)
	// A member that cannot know whether its lease was over when it settled held it at least for
	// half of AckWait.
	if len(h.others) > 0 && (confirmed || time.Since(h.began) < mixedAckWait/2) {
		l.faults = append(l.faults, fmt.Sprintf("%s held and settled %s after %v, and others were given it: %s", h.member, id, time.Since(h.began), strings.Join(h.others, ", ")))
	}
}

// lost notes that the answer to a settlement was lost: it may have counted.
func (l *mixedLedger) lost(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.settled[id] == 0 {
		l.unknown[id] = true
	}
}

// endAll lets all go that members hold by way of a hub, or that one member holds.
func (l *mixedLedger) endAll(which func(*hold) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, h := range l.holds {
		if which(h) {
			delete(l.holds, id)
		}
	}
}

// mixedHub is one life of a hub.
type mixedHub struct {
	*node
	dead atomic.Bool
}

// mixedRun is a group with all kinds of members, on hubs that are killed.
type mixedRun struct {
	t      *testing.T
	nats   string
	ledger *mixedLedger
	web    *http.Client
	hubs   [2]atomic.Pointer[mixedHub]
	all    sync.WaitGroup
}

// hub returns a hub that was alive a moment ago.
func (m *mixedRun) hub() *mixedHub { return m.hubs[rand.IntN(2)].Load() }

// work is what a member does with an event.
func work() { <-time.After(time.Duration(rand.IntN(2_000)) * time.Microsecond) }

// settle acks a handle at any hub, and tries again while the answer leaves it open.
func (m *mixedRun) settle(ctx context.Context, e *pulledEvent, h *hold) {
	work()
	for ctx.Err() == nil {
		status, text := askThrough(ctx, m.web, nodeToken, http.MethodPost, m.hub().http+"/ack", strings.NewReader(`{"ack":["`+e.Ack+`"]}`))
		switch status {
		case http.StatusOK, http.StatusGone:
			m.ledger.end(e.Event.ID, h, status == http.StatusOK, true)
			return
		case 0, http.StatusServiceUnavailable: // the hub that was asked is gone, or one is silent
			m.ledger.lost(e.Event.ID)
			<-time.After(50 * time.Millisecond)
		default:
			m.t.Errorf("ack: %d %s", status, text)
			return
		}
	}
	m.ledger.end(e.Event.ID, h, false, false)
}

// pulls is a member that pulls.
func (m *mixedRun) pulls(ctx context.Context, name string) {
	for ctx.Err() == nil {
		hub := m.hub()
		status, text := askThrough(ctx, m.web, nodeToken, http.MethodPost, hub.http+"/groups/"+mixedTopic+"/"+mixedGroup+"/pull",
			strings.NewReader(`{"max":20,"wait_ms":500,"opts":{"maxAttempts":0}}`))
		var got struct{ Events []pulledEvent }
		if status != http.StatusOK || json.Unmarshal([]byte(text), &got) != nil {
			<-time.After(50 * time.Millisecond)
			continue
		}
		holds := make([]*hold, len(got.Events))
		for i := range got.Events {
			holds[i] = m.ledger.begin(name, hub, got.Events[i].Event.ID)
		}
		for i := range got.Events {
			m.settle(ctx, &got.Events[i], holds[i])
		}
	}
}

// streams is a member that reads server-sent events. It closes its stream now and then, with what
// it holds.
func (m *mixedRun) streams(ctx context.Context, name string) {
	for ctx.Err() == nil {
		m.oneStream(ctx, name)
		<-time.After(20 * time.Millisecond)
	}
}

func (m *mixedRun) oneStream(ctx context.Context, name string) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	hub := m.hub()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, hub.http+"/subscribe?topic="+mixedTopic+"&group="+mixedGroup+"&maxInFlight=20&maxAttempts=0", nil)
	if err != nil {
		m.t.Error(err)
		return
	}
	req.Header.Set("Authorization", "Bearer "+nodeToken)
	res, err := m.web.Do(req)
	if err != nil {
		return
	}
	defer res.Body.Close() //nolint:errcheck // it is cut
	if res.StatusCode != http.StatusOK {
		return
	}
	lines := bufio.NewReader(res.Body)
	for left := 200 + rand.IntN(400); left > 0; {
		line, err := lines.ReadString('\n')
		if err != nil {
			m.ledger.endAll(func(h *hold) bool { return h.member == name })
			return
		}
		data, ok := strings.CutPrefix(line, "data: ")
		var e pulledEvent
		if !ok || json.Unmarshal([]byte(data), &e) != nil || e.Ack == "" {
			continue
		}
		h := m.ledger.begin(name, hub, e.Event.ID)
		if left--; left > 0 {
			m.settle(ctx, &e, h)
		}
	}
	m.ledger.endAll(func(h *hold) bool { return h.member == name })
}

// sockets is a member over a WebSocket. It aborts its connection now and then.
func (m *mixedRun) sockets(ctx context.Context, name string) {
	for ctx.Err() == nil {
		m.oneSocket(ctx, name)
		<-time.After(20 * time.Millisecond)
	}
}

func (m *mixedRun) oneSocket(ctx context.Context, name string) {
	hub := m.hub()
	c, err := wire.Dial(ctx, hub.url, wire.Options{Token: nodeToken})
	if err != nil {
		return
	}
	defer func() {
		m.ledger.endAll(func(h *hold) bool { return h.member == name })
		c.Abort()
	}()
	type given struct {
		wire.Event
		hold *hold
	}
	events := make(chan given, 100)
	never := 0
	_, err = c.Subscribe(ctx, mixedTopic, mixedGroup, wire.SubscribeOptions{MaxInFlight: 20, MaxAttempts: &never}, func(e wire.Event) {
		events <- given{e, m.ledger.begin(name, hub, e.ID)}
	})
	if err != nil {
		return
	}
	for range 200 + rand.IntN(400) {
		select {
		case e := <-events:
			work()
			err := e.AckWait(ctx)
			if err != nil {
				m.ledger.lost(e.ID)
			}
			m.ledger.end(e.ID, e.hold, err == nil, false)
		case <-c.Done():
			return
		case <-ctx.Done():
			return
		}
	}
}

// natives is a member that speaks NATS. It loses its connection now and then.
func (m *mixedRun) natives(ctx context.Context, name string) {
	for ctx.Err() == nil {
		if err := m.oneNative(ctx, name); err != nil && ctx.Err() == nil {
			m.t.Errorf("native: %v", err)
			return
		}
	}
}

func (m *mixedRun) oneNative(ctx context.Context, name string) error {
	nc, err := nats.Connect(m.nats, nats.Timeout(patience))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		return err
	}
	consumer, err := js.Consumer(ctx, mixedTopic, mixedGroup)
	if err != nil {
		return err
	}
	for range 20 {
		batch, err := consumer.Fetch(10, natsjs.FetchMaxWait(time.Second))
		if err != nil {
			return err
		}
		for msg := range batch.Messages() {
			id := msg.Headers().Get("Event-Id")
			h := m.ledger.begin(name, nil, id)
			work()
			err := msg.DoubleAck(ctx)
			if err != nil {
				m.ledger.lost(id)
			}
			m.ledger.end(id, h, err == nil, false)
		}
		if err := batch.Error(); err != nil && !errors.Is(err, nats.ErrTimeout) && ctx.Err() == nil {
			return err
		}
		if ctx.Err() != nil {
			return nil
		}
	}
	return nil
}

// start starts the hub at a place.
func (m *mixedRun) start(place int) {
	m.hubs[place].Store(&mixedHub{node: startNode(m.t, "--nats-url="+m.nats, "--ack-wait="+mixedAckWait.String())})
}

// killOne kills a hub, and starts another in its place.
func (m *mixedRun) killOne(place int) {
	hub := m.hubs[place].Load()
	hub.dead.Store(true)
	m.ledger.endAll(func(h *hold) bool { return h.hub == hub }) // their leases are over
	hub.kill()
	m.start(place)
}

// A group has two members of each kind: native, WebSocket, server-sent events and pulls. Hubs are
// killed, and members lose their connections. Each event is settled, and nobody settles an event
// that another member holds.
func TestMixedGroup(t *testing.T) {
	t.Parallel()
	m := &mixedRun{t: t, nats: runNATS(t), web: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}}
	t.Cleanup(m.web.CloseIdleConnections)
	m.ledger = &mixedLedger{holds: make(map[string]*hold), settled: make(map[string]int), unknown: make(map[string]bool), byMember: make(map[string]int)}
	m.start(0)
	m.start(1)
	if status, text := m.hubs[0].Load().postTo("/groups/"+mixedTopic+"/"+mixedGroup+"/pull", `{"wait_ms":0}`); status != http.StatusOK {
		t.Fatalf("%d %s", status, text)
	}
	began := time.Now()
	ctx, cancel := context.WithCancel(t.Context())
	defer func() {
		cancel()
		m.all.Wait()
	}()
	for kind, member := range map[string]func(context.Context, string){"native": m.natives, "websocket": m.sockets, "stream": m.streams, "pull": m.pulls} {
		for i := range 2 {
			m.all.Go(func() { member(ctx, fmt.Sprintf("%s %d", kind, i)) })
		}
	}
	publishMixed(t, m.nats, *mixedEvents)
	for kill := range *mixedKills {
		goal := *mixedEvents * (kill + 1) / (*mixedKills + 2)
		until(t, "the group goes on", func() bool { return m.done() >= goal })
		m.killOne(kill % 2)
	}
	for end := time.Now().Add(patience + time.Duration(*mixedEvents)*2*time.Millisecond); m.done() < *mixedEvents; {
		if time.Now().After(end) {
			t.Fatalf("%d of %d events are settled", m.done(), *mixedEvents)
		}
		<-time.After(50 * time.Millisecond)
	}
	until(t, "NATS has nothing left", func() bool {
		info := consumerInfo(t, m.nats, mixedTopic, mixedGroup)
		return info.NumPending == 0 && info.NumAckPending == 0
	})
	cancel()
	m.all.Wait()
	m.report(time.Since(began))
}

// done is how many events were settled, or may have been: at the end, NATS tells.
func (m *mixedRun) done() int {
	m.ledger.mu.Lock()
	defer m.ledger.mu.Unlock()
	return len(m.ledger.settled) + len(m.ledger.unknown)
}

func (m *mixedRun) report(took time.Duration) {
	l := m.ledger
	twice := 0
	for _, n := range l.settled {
		if n > 1 {
			twice++
		}
	}
	m.t.Logf("%d events in %v, %d kills: handled %d times, %d settled more than once, %d settlements refused, %d answers lost; by member %v",
		len(l.settled)+len(l.unknown), took.Round(time.Millisecond), *mixedKills, l.handled, twice, l.refused, len(l.unknown), l.byMember)
	if n := len(l.settled) + len(l.unknown); n != *mixedEvents {
		m.t.Errorf("%d events were settled, want %d", n, *mixedEvents)
	}
	for _, fault := range l.faults {
		m.t.Error(fault)
	}
	for kind, n := range l.byMember {
		if n == 0 {
			m.t.Errorf("%s has handled nothing", kind)
		}
	}
	if len(l.byMember) != 8 {
		m.t.Errorf("only %d members had events: %v", len(l.byMember), l.byMember)
	}
}

// publishMixed publishes natively.
func publishMixed(t *testing.T, url string, n int) {
	t.Helper()
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := natsjs.New(nc, natsjs.WithPublishAsyncMaxPending(1_000))
	if err != nil {
		t.Fatal(err)
	}
	storeAll(t, js, n, func(i int) *nats.Msg {
		return &nats.Msg{Subject: "event." + mixedTopic, Data: fmt.Append(nil, i), Header: nats.Header{"Event-Id": {fmt.Sprint("e", i)}}}
	})
}

// storeAll stores n events natively, and waits until all are confirmed.
func storeAll(t *testing.T, js natsjs.JetStream, n int, message func(i int) *nats.Msg) {
	t.Helper()
	const most = 5 * time.Minute // for a slow server
	for i := range n {
		if _, err := js.PublishMsgAsync(message(i), natsjs.WithStallWait(most)); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-time.After(most):
		t.Fatalf("%d events are not confirmed", js.PublishAsyncPending())
	}
}
