//go:build unix

package model

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	eventhub "eventhub/sdk/go"
)

const (
	soakInFlight = 512                    // publishes of a publisher without an answer
	soakFull     = soakWindow / 2         // a backlog at which a publisher pauses
	soakAhead    = 2_000                  // the same, while the capacity is measured
	soakBeat     = 10 * time.Millisecond  // of a publisher
	soakCatchUp  = time.Second            // what a publisher makes up for
	soakRetry    = 100 * time.Millisecond // before a publish is repeated
	soakStay     = 1_500 * time.Millisecond

	// soakConfirmed is for the last publishes. A slow cluster may refuse an id until the duplicate
	// window of 2 min ends.
	soakConfirmed = 3 * time.Minute
)

// soakLoad are clients that publish, consume and acknowledge over WebSockets of the Go client, and
// clients that come and go.
type soakLoad struct {
	rig    *rig
	ledger *soakLedger
	groups []string
	count  counters
	churn  time.Duration // between two clients that come; 0: none come

	guests atomic.Int64 // clients that have come
	errs   atomic.Int64 // errors that clients were told, and dealt with
	last   atomic.Value // the last of them, as a string
}

// soakPayload is that of an event.
type soakPayload struct {
	Lane int    `json:"lane"`
	N    int64  `json:"n"`
	Text string `json:"text"`
}

var soakText = strings.Repeat("soak ", 20)

// failed counts an error that a client was told.
func (s *soakLoad) failed(err error) {
	s.errs.Add(1)
	s.last.Store(err.Error())
}

func (s *soakLoad) options() eventhub.Options {
	return eventhub.Options{
		Token: password, MinPause: 50 * time.Millisecond, MaxPause: time.Second, DrainTimeout: 5 * time.Second, OnError: s.failed,
		OnNotice: func(n eventhub.Notice) {
			s.ledger.mu.Lock()
			defer s.ledger.mu.Unlock()
			s.ledger.faulty("group %s of %s was told %s: %s", n.Group, n.Topic, n.Code, n.Message)
		},
	}
}

// start lets clients act at so many events a second, or as fast as groups follow. The returned
// function ends that: publishers stop, what they published is consumed, and all leave. It returns
// what groups were not given within limit.
func (s *soakLoad) start(ctx context.Context, rate float64) (end func(limit time.Duration) []string) {
	publishing, stopPublishing := context.WithCancel(ctx)
	consuming, stopConsuming := context.WithCancel(ctx)
	var publishers, members sync.WaitGroup
	for _, h := range s.rig.hubs {
		for _, topic := range s.rig.plan.topics {
			for _, group := range s.groups {
				members.Go(func() { s.member(consuming, h, topic, group) })
			}
		}
	}
	for lane := range s.ledger.lanes {
		h := s.rig.hubs[lane/len(s.rig.plan.topics)%len(s.rig.hubs)]
		publishers.Go(func() { s.publish(publishing, h, lane, rate/float64(len(s.ledger.lanes))) })
	}
	if s.churn > 0 && rate > 0 {
		publishers.Go(func() { s.visits(publishing) })
	}
	return func(limit time.Duration) []string {
		stopPublishing()
		publishers.Wait()
		at := s.ledger.position()
		s.rig.within(limit, func(context.Context) bool { return s.ledger.reached(at) })
		missing := s.ledger.missing(at)
		// What was given twice is settled by members, too.
		s.rig.within(patience, func(ctx context.Context) bool {
			left, err := s.rig.unsettled(ctx)
			return err == nil && len(left) == 0
		})
		stopConsuming()
		members.Wait()
		return missing
	}
}

// member is a member of a group, at one hub.
func (s *soakLoad) member(ctx context.Context, h *hub, topic, group string) {
	c, err := eventhub.New("ws://"+h.addr, s.options())
	if err != nil {
		s.rig.Error(err)
		return
	}
	defer func() { _ = c.Close() }()
	s.consume(ctx, c, topic, group)
}

// consume takes and acknowledges events until ctx ends.
func (s *soakLoad) consume(ctx context.Context, c *eventhub.Client, topic, group string) {
	for ctx.Err() == nil {
		for d, err := range c.Events(ctx, topic, group, eventhub.SubscribeOptions{From: "earliest", MaxInFlight: 256, MaxAttempts: new(int)}) {
			if err != nil {
				if ctx.Err() == nil {
					s.failed(err)
				}
				break
			}
			s.took(d.Topic, group, d.Payload)
			d.Ack()
		}
		wait(ctx, soakRetry)
	}
}

func (s *soakLoad) took(topic, group string, payload []byte) {
	p := soakPayload{Lane: -1}
	_ = json.Unmarshal(payload, &p) // lane -1 is not there
	s.ledger.deliver(topic, group, p.Lane, p.N)
}

// publisher publishes the events of a lane, and each until it is confirmed.
type publisher struct {
	*soakLoad

	lane    int
	client  *eventhub.Client
	answers chan soakAnswer
	again   []soakAnswer // to be repeated
	flying  int
}

type soakAnswer struct {
	n   int64
	err error
	at  time.Time
}

// publish publishes at a rate until ctx ends, and returns when all that it published is confirmed.
// With no rate, it publishes as fast as groups follow.
func (s *soakLoad) publish(ctx context.Context, h *hub, lane int, rate float64) {
	c, err := eventhub.New("ws://"+h.addr, s.options())
	if err != nil {
		s.rig.Error(err)
		return
	}
	p := &publisher{soakLoad: s, lane: lane, client: c, answers: make(chan soakAnswer, soakInFlight)}
	beat := time.NewTicker(soakBeat)
	defer beat.Stop()
	last, due, full := time.Now(), 0.0, int64(soakFull)
	if rate == 0 {
		full = soakAhead
	}
	for ctx.Err() == nil {
		select {
		case a := <-p.answers:
			p.answered(a)
		case <-beat.C:
			p.repeat(ctx)
		case <-ctx.Done():
		}
		now := time.Now()
		due = min(due+rate*now.Sub(last).Seconds(), max(1, rate*soakCatchUp.Seconds()))
		last = now
		for (rate == 0 || due >= 1) && p.flying+len(p.again) < soakInFlight {
			n, ok := s.ledger.begin(lane, full)
			if !ok {
				break
			}
			due--
			p.send(ctx, n)
		}
	}
	limit := time.After(soakConfirmed)
	for p.flying+len(p.again) > 0 {
		select {
		case a := <-p.answers:
			p.answered(a)
		case <-beat.C:
			p.repeat(ctx)
		case <-limit:
			s.rig.Errorf("%d events of lane %d have no answer %v after the end", p.flying+len(p.again), lane, soakConfirmed)
			p.again, p.flying = nil, 0
		}
	}
	_ = c.Close()
}

func (p *publisher) send(ctx context.Context, n int64) {
	payload, err := json.Marshal(soakPayload{Lane: p.lane, N: n, Text: soakText})
	if err != nil {
		panic(err) // nothing in it can fail
	}
	p.flying++ // answers has room for all that fly
	err = p.client.PublishAsync(context.WithoutCancel(ctx), p.ledger.lanes[p.lane].topic, json.RawMessage(payload), eventhub.PublishOptions{ID: fmt.Sprintf("%d-%d-%d", p.rig.plan.seed, p.lane, n)},
		func(_ string, err error) { p.answers <- soakAnswer{n: n, err: err} })
	if err != nil {
		p.answered(soakAnswer{n: n, err: err})
	}
}

func (p *publisher) answered(a soakAnswer) {
	p.flying--
	if a.err == nil {
		p.ledger.confirm(p.lane, a.n)
		return
	}
	p.failed(a.err)
	a.at = time.Now().Add(soakRetry)
	p.again = append(p.again, a)
}

// repeat sends what failed again, under the same ids.
func (p *publisher) repeat(ctx context.Context) {
	for len(p.again) > 0 && time.Now().After(p.again[0].at) {
		n := p.again[0].n
		p.again = p.again[1:]
		p.send(ctx, n)
	}
}

// visits lets clients come, stay for a moment, and go, until ctx ends.
func (s *soakLoad) visits(ctx context.Context) {
	var guests sync.WaitGroup
	defer guests.Wait()
	web := &http.Client{Transport: &http.Transport{}, Timeout: 30 * time.Second}
	defer web.CloseIdleConnections()
	rnd := rand.New(rand.NewPCG(uint64(s.rig.plan.seed), 2))
	for {
		wait(ctx, s.churn)
		if ctx.Err() != nil {
			return
		}
		n := int(s.guests.Add(1))
		h := s.rig.hubs[rnd.IntN(len(s.rig.hubs))]
		topic, group := s.rig.plan.topics[rnd.IntN(len(s.rig.plan.topics))], s.groups[rnd.IntN(len(s.groups))]
		guests.Go(func() {
			switch n % 4 {
			case 0:
				s.comes(ctx, h, topic, group)
			case 1:
				s.breaksOff(ctx, h, topic, group, n)
			case 2:
				s.listens(ctx, web, h, topic, group)
			default:
				s.pulls(ctx, web, h, topic, group)
			}
		})
	}
}

// comes is a member that comes and goes in good order.
func (s *soakLoad) comes(ctx context.Context, h *hub, topic, group string) {
	ctx, cancel := context.WithTimeout(ctx, soakStay)
	defer cancel()
	s.member(ctx, h, topic, group)
}

// breaksOff is a member whose connection breaks while it holds events.
func (s *soakLoad) breaksOff(ctx context.Context, h *hub, topic, group string, n int) {
	came := make(chan struct{}, 1)
	conn, err := dialHub(s.rig.rec, n, h.addr, h.name, false, func(text []byte) {
		if strings.Contains(string(text), `"op":"EVENT"`) {
			select {
			case came <- struct{}{}:
			default:
			}
		}
	})
	if err != nil {
		return // the hub is away
	}
	never := 0
	conn.send(&wireFrame{Op: "AUTH", Token: password})
	conn.send(&wireFrame{Op: "SUBSCRIBE", Topic: topic, Group: group, Opts: &wireOptions{MaxInFlight: 8, AckTimeoutMS: 5_000, MaxAttempts: &never}})
	stay := time.NewTimer(soakStay)
	defer stay.Stop()
	select {
	case <-came:
	case <-conn.ended:
	case <-stay.C:
	case <-ctx.Done():
	}
	conn.end(endAbrupt)
	<-conn.ended
}

// listens is a member that reads server-sent events, and leaves without settling them.
func (s *soakLoad) listens(ctx context.Context, web *http.Client, h *hub, topic, group string) {
	ctx, cancel := context.WithTimeout(ctx, soakStay/3)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+h.role.Besides.HTTP+"/subscribe?maxAttempts=0&maxInFlight=8&ackTimeoutMs=5000&topic="+topic+"&group="+group, http.NoBody)
	if err != nil {
		panic(err) // the addresses are ours
	}
	req.Header.Set("Authorization", "Bearer "+password)
	res, err := web.Do(req)
	if err != nil {
		return // the hub is away
	}
	defer func() { _ = res.Body.Close() }()
	var some [4 << 10]byte
	for {
		if _, err := res.Body.Read(some[:]); err != nil {
			return
		}
	}
}

// pulls is a member that pulls some events over HTTP, and settles them by their handles.
func (s *soakLoad) pulls(ctx context.Context, web *http.Client, h *hub, topic, group string) {
	status, body := request(context.WithoutCancel(ctx), web, http.MethodPost, h.role.Besides.HTTP+"/groups/"+topic+"/"+group+"/pull", `{"max":8,"wait_ms":300,"opts":{"ackTimeoutMs":5000,"maxAttempts":0}}`)
	var got struct{ Events []handed }
	if status != http.StatusOK || json.Unmarshal(body, &got) != nil {
		return // they come again
	}
	for i := range got.Events {
		e := &got.Events[i]
		s.took(topic, group, e.Event.Payload)
		request(context.WithoutCancel(ctx), web, http.MethodPost, h.role.Besides.HTTP+"/ack", `{"ack":["`+e.Ack+`"]}`)
	}
}
