//go:build unix

package model

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/native"
)

// guest is a member of groups without a WebSocket: one that pulls, one that reads server-sent
// events, or one that speaks NATS. It writes its history as if each membership were a connection of
// its own.
type guest struct {
	rig   *rig
	rnd   *rand.Rand
	count *counters
	web   *http.Client
}

const (
	guestLease = 3 * time.Second
	// streamInFlight is the maxInFlight of those that read server-sent events.
	streamInFlight = 20
)

// handed is an event with its handle.
type handed struct {
	Topic string    `json:"topic"`
	Group string    `json:"group"`
	Event wireEvent `json:"event"`
	Ctx   wireCtx   `json:"ctx"`
	Ack   string    `json:"ack"`
}

// membership is one of a guest's.
type membership struct {
	*guest

	number int
	plan   *groupPlan
}

func (m *membership) topic() string { return m.plan.topics[0] }

// join opens the history of a membership.
func (g *guest) join(at string, lease time.Duration) (m *membership, corr string) {
	never := 0
	m = &membership{guest: g, number: int(g.count.conns.Add(1)), plan: g.rig.plan.groups[g.rnd.IntN(2)]}
	g.rig.rec.add(m.number, kindOpen, at+" guest")
	corr = m.sent(&wireFrame{Op: "SUBSCRIBE", Topic: m.topic(), Group: m.plan.name, Opts: &wireOptions{
		From: m.plan.from, AckTimeoutMS: int(lease.Milliseconds()), MaxAttempts: &never, MaxInFlight: 1_000,
	}})
	return m, corr
}

func (m *membership) sent(f *wireFrame) (corr string) {
	corr = fmt.Sprint("g", m.count.corrs.Add(1))
	f.Corr = &corr
	m.rig.rec.add(m.number, kindSent, text(f))
	return corr
}

func (m *membership) answered(corr, code string) {
	f := &wireFrame{Op: "OK", Corr: &corr}
	if code != "" {
		f.Op, f.Code = "ERR", code
	}
	m.rig.rec.add(m.number, kindGot, text(f))
}

func (m *membership) got(lo time.Duration, e *handed) {
	m.rig.rec.received(m.number, lo, kindGot, text(&wireFrame{Op: "EVENT", Topic: m.topic(), Group: m.plan.name, Event: &e.Event, Ctx: &e.Ctx}))
}

func (m *membership) over(how, why string) {
	if how != "" {
		m.rig.rec.add(m.number, kindClose, how)
	}
	m.rig.rec.add(m.number, kindEnd, why)
}

// pulls is a member that pulls, until ctx ends.
func (g *guest) pulls(ctx context.Context) {
	defer g.web.CloseIdleConnections()
	for ctx.Err() == nil {
		g.pull(ctx)
		wait(ctx, time.Duration(50+g.rnd.IntN(400))*time.Millisecond)
	}
}

func (g *guest) pull(ctx context.Context) {
	h := g.rig.hubs[g.rnd.IntN(len(g.rig.hubs))]
	if !h.running() {
		return
	}
	m, corr := g.join(h.name, guestLease)
	lo := g.rig.rec.now()
	// The request outlives ctx: what it brings must not be lost.
	status, body := request(context.WithoutCancel(ctx), g.web, http.MethodPost, h.role.Besides.HTTP+"/groups/"+m.topic()+"/"+m.plan.name+"/pull",
		fmt.Sprintf(`{"max":%d,"wait_ms":300,"opts":{"from":%q,"ackTimeoutMs":%d,"maxAttempts":0}}`, 1+g.rnd.IntN(8), m.plan.from, guestLease.Milliseconds()))
	var got struct{ Events []handed }
	switch {
	case status == http.StatusOK && json.Unmarshal(body, &got) == nil:
	case status == 0:
		m.over("", "connection reset by peer")
		return
	default:
		m.answered(corr, "internal")
		m.over("half", "EOF")
		return
	}
	m.answered(corr, "")
	for i := range got.Events {
		m.got(lo, &got.Events[i])
	}
	if len(got.Events) == 0 {
		m.over("half", "EOF")
	}
	for i := range got.Events {
		m.settle(ctx, &got.Events[i])
	}
}

// settle does something about an event, by its handle, at any hub.
func (m *membership) settle(ctx context.Context, e *handed) {
	wait(ctx, time.Duration(m.rnd.IntN(200))*time.Millisecond)
	switch n := m.rnd.IntN(100); {
	case n < 75:
		m.tell(ctx, &wireFrame{Op: "ACK"}, "/ack", e, "")
	case n < 88:
		m.tell(ctx, &wireFrame{Op: "NACK", Reason: "by handle"}, "/nack", e, `,"reason":"by handle"`)
	case n < 95:
		m.tell(ctx, &wireFrame{Op: "MODACK", ExtendMS: 2_000}, "/modack", e, `,"extend_ms":2000`)
		wait(ctx, time.Duration(m.rnd.IntN(1_500))*time.Millisecond)
		m.tell(ctx, &wireFrame{Op: "ACK"}, "/ack", e, "")
	}
}

func (m *membership) tell(ctx context.Context, f *wireFrame, path string, e *handed, more string) {
	h := m.rig.hubs[m.rnd.IntN(len(m.rig.hubs))]
	f.Topic, f.Group, f.ID = m.topic(), m.plan.name, e.Event.ID
	corr := m.sent(f)
	status, _ := request(context.WithoutCancel(ctx), m.web, http.MethodPost, h.role.Besides.HTTP+path, `{"ack":["`+e.Ack+`"]`+more+`}`)
	switch status {
	case http.StatusOK:
		m.answered(corr, "")
	case http.StatusGone:
		m.answered(corr, "not_held")
	}
}

// streams is a member that reads server-sent events, until ctx ends.
func (g *guest) streams(ctx context.Context) {
	defer g.web.CloseIdleConnections()
	for ctx.Err() == nil {
		one, cancel := context.WithTimeout(ctx, time.Duration(500+g.rnd.IntN(3_000))*time.Millisecond)
		g.stream(one)
		cancel()
		wait(ctx, 100*time.Millisecond)
	}
}

func (g *guest) stream(ctx context.Context) {
	h := g.rig.hubs[g.rnd.IntN(len(g.rig.hubs))]
	if !h.running() {
		return
	}
	m, corr := g.join(h.name, guestLease)
	q := url.Values{"topic": {m.topic()}, "group": {m.plan.name}, "from": {m.plan.from}, "maxAttempts": {"0"}, "maxInFlight": {strconv.Itoa(streamInFlight)}, "ackTimeoutMs": {strconv.Itoa(int(guestLease.Milliseconds()))}}
	reading, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	stop := context.AfterFunc(ctx, func() {
		g.rig.rec.add(m.number, kindClose, "abrupt")
		cancel()
	})
	why := "EOF"
	defer func() {
		stop()
		g.rig.rec.add(m.number, kindEnd, why)
	}()
	req, err := http.NewRequestWithContext(reading, http.MethodGet, "http://"+h.role.Besides.HTTP+"/subscribe?"+q.Encode(), http.NoBody)
	if err != nil {
		panic(err) // the addresses are ours
	}
	req.Header.Set("Authorization", "Bearer "+password)
	res, err := g.web.Do(req)
	if errors.Is(err, syscall.ECONNREFUSED) {
		m.answered(corr, "overloaded")
		return
	}
	if err != nil {
		why = "connection reset by peer"
		return
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK {
		m.answered(corr, "internal")
		return
	}
	m.answered(corr, "")
	// It reads at once, so that the history has what the hub wrote, and settles beside that.
	var settling sync.WaitGroup
	defer settling.Wait()
	came := make(chan handed, streamInFlight)
	defer close(came)
	settling.Go(func() {
		for e := range came {
			m.settle(ctx, &e)
		}
	})
	for lines := bufio.NewReader(res.Body); ; {
		line, err := lines.ReadString('\n')
		if err != nil {
			return
		}
		data, ok := strings.CutPrefix(line, "data: ")
		var e handed
		if !ok || json.Unmarshal([]byte(data), &e) != nil || e.Ack == "" {
			continue
		}
		m.got(g.rig.rec.now(), &e)
		select {
		case came <- e:
		default: // its lease expires
		}
	}
}

// speaksNATS is a member that speaks NATS by itself, until ctx ends.
func (g *guest) speaksNATS(ctx context.Context) {
	nc, err := nats.Connect(strings.Join(g.rig.urls(), ","), nats.MaxReconnects(-1), nats.RetryOnFailedConnect(true), nats.ReconnectWait(50*time.Millisecond),
		nats.DisconnectErrHandler(func(*nats.Conn, error) {
			if ctx.Err() == nil {
				g.rig.rec.add(0, kindFault, fmt.Sprintf("%d cut native 0s", g.rig.number()))
			}
		}))
	if err != nil {
		g.rig.Error(err)
		return
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		g.rig.Error(err)
		return
	}
	ackWait := time.Duration(g.rig.plan.ackWaitMS) * time.Millisecond
	for ctx.Err() == nil {
		m, corr := g.join("native", ackWait)
		group, err := native.New(js).Group(context.WithoutCancel(ctx), m.topic(), m.plan.name, native.GroupOptions{
			Earliest: m.plan.from == "earliest", AckWait: ackWait, MaxAttempts: native.NeverGiveUp, Workers: 3,
		})
		if err != nil { // the topic may not exist yet
			m.answered(corr, "internal")
			m.over("half", "EOF")
			wait(ctx, 300*time.Millisecond)
			continue
		}
		m.answered(corr, "")
		member, cancel := context.WithTimeout(ctx, time.Duration(2_000+g.rnd.IntN(4_000))*time.Millisecond)
		// From here on, it gives back what comes, which counts as an attempt.
		leaves := context.AfterFunc(member, func() { g.rig.rec.add(m.number, kindClose, "half") })
		err = group.Consume(member, func(ctx context.Context, d *native.Delivery) error { return m.handle(ctx, nc, d) })
		how := ""
		if leaves() { // it ended by itself
			how = "half"
		}
		cancel()
		if err != nil {
			g.rig.rec.add(0, kindNote, fmt.Sprintf("native: %v", err))
		}
		m.over(how, "EOF")
	}
}

// handle is called by several goroutines.
func (m *membership) handle(ctx context.Context, nc *nats.Conn, d *native.Delivery) error {
	e := &handed{
		Event: wireEvent{ID: d.Event.ID, Topic: d.Event.Topic, Key: d.Event.Key, Payload: d.Event.Payload},
		Ctx:   wireCtx{Attempt: d.Attempt, AckDeadlineMS: m.rig.plan.ackWaitMS},
	}
	m.got(m.rig.rec.now(), e)
	wait(ctx, time.Duration(rand.IntN(1_200))*time.Millisecond)
	f := &wireFrame{Op: "ACK", Topic: m.topic(), Group: m.plan.name, ID: e.Event.ID}
	settle := d.Ack
	if rand.IntN(5) == 0 {
		f.Op = "NACK"
		settle = func() error { return d.Nack(context.WithoutCancel(ctx), "", native.DefaultDelay) }
	}
	corr := m.sent(f)
	err := settle()
	switch {
	case errors.Is(err, native.ErrNotHeld):
		m.answered(corr, "not_held")
	case err == nil && nc.FlushTimeout(2*time.Second) == nil:
		m.answered(corr, "")
	}
	return nil
}
