//go:build unix

package model

import (
	"context"
	"encoding/json"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/projections"
)

// reader asks hubs for cursors, newest events and replays.
type reader struct {
	rig *rig
	rnd *rand.Rand
	ids *knownIDs
	web *http.Client
}

func newReader(r *rig, rnd *rand.Rand, ids *knownIDs) *reader {
	return &reader{rig: r, rnd: rnd, ids: ids, web: newWeb()}
}

// newWeb is a client of HTTP that gives up before the test does.
func newWeb() *http.Client {
	return &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 4, IdleConnTimeout: time.Second}, Timeout: 20 * time.Second}
}

// run asks until ctx ends.
func (a *reader) run(ctx context.Context) {
	defer a.web.CloseIdleConnections()
	for ctx.Err() == nil {
		wait(ctx, time.Duration(20+a.rnd.IntN(180))*time.Millisecond)
		topic := a.rig.plan.topics[a.rnd.IntN(len(a.rig.plan.topics))]
		h := a.rig.hubs[a.rnd.IntN(len(a.rig.hubs))]
		switch a.rnd.IntN(4) {
		case 0:
			a.cursors(ctx, h, topic)
		case 1, 2:
			a.latest(ctx, h, topic, "host:"+strconv.Itoa(a.rnd.IntN(5)), false)
		case 3:
			a.replay(ctx, h, a.someReplay(topic))
		}
	}
}

// get returns the status of an answer, 0 for none, and its body.
func (a *reader) get(ctx context.Context, address string) (int, []byte) {
	return request(ctx, a.web, http.MethodGet, address, "")
}

func request(ctx context.Context, web *http.Client, method, address, body string) (int, []byte) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+address, strings.NewReader(body))
	if err != nil {
		panic(err) // the addresses are ours
	}
	req.Header.Set("Authorization", "Bearer "+password)
	res, err := web.Do(req)
	if err != nil {
		return 0, nil
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		return 0, nil
	}
	return res.StatusCode, text
}

func (a *reader) cursors(ctx context.Context, h *hub, topic string) bool {
	lo := a.rig.rec.now()
	status, text := a.get(ctx, h.role.Besides.Ops+"/cursors?topic="+topic)
	var got struct {
		Cursors []struct{ Group, LastID string }
	}
	if status != http.StatusOK || json.Unmarshal(text, &got) != nil {
		return false
	}
	for _, c := range got.Cursors {
		a.rig.rec.read(lo, &reading{What: "cursor", Topic: topic, Group: c.Group, ID: c.LastID})
	}
	return true
}

// latest asks either of the two ports.
func (a *reader) latest(ctx context.Context, h *hub, topic, key string, final bool) bool {
	lo := a.rig.rec.now()
	var status int
	var text []byte
	if a.rnd.IntN(2) == 0 {
		status, text = a.get(ctx, h.role.Besides.Ops+"/latest-by-key?topic="+topic+"&key="+url.QueryEscape(key))
	} else if status, text = a.get(ctx, h.role.Besides.HTTP+"/snap/"+topic+"/"+url.PathEscape(key)); status == http.StatusNotFound && strings.Contains(string(text), `"not_found"`) {
		status, text = http.StatusOK, []byte("null")
	}
	var got *wireEvent
	if status != http.StatusOK || json.Unmarshal(text, &got) != nil {
		return false
	}
	r := &reading{What: "latest", Topic: topic, Key: key, Final: final}
	if got != nil {
		r.ID = got.ID
	}
	a.rig.rec.read(lo, r)
	return true
}

func (a *reader) someReplay(topic string) *reading {
	r := &reading{What: "replay", Topic: topic, From: "earliest", Limit: 1 + a.rnd.IntN(400)}
	switch a.rnd.IntN(3) {
	case 0:
		r.From = "ts"
		r.TS = a.rig.rec.began.Add(time.Duration(a.rnd.Int64N(int64(a.rig.rec.now()) + 1))).UnixMilli()
	case 1:
		if id := a.ids.any(topic, a.rnd); id != "" {
			r.From, r.AfterID = "afterId", id
		}
	}
	return r
}

func (a *reader) replay(ctx context.Context, h *hub, r *reading) bool {
	q := url.Values{"topic": {r.Topic}, "from": {r.From}, "limit": {strconv.Itoa(r.Limit)}}
	if r.From == "ts" {
		q.Set("ts", strconv.FormatInt(r.TS, 10))
	}
	if r.AfterID != "" {
		q.Set("afterId", r.AfterID)
	}
	lo := a.rig.rec.now()
	status, text := a.get(ctx, h.role.Besides.HTTP+"/replay?"+q.Encode())
	var got struct{ Events []wireEvent }
	if status != http.StatusOK || json.Unmarshal(text, &got) != nil {
		return false
	}
	for _, e := range got.Events {
		r.IDs = append(r.IDs, e.ID)
	}
	a.rig.rec.read(lo, r)
	return true
}

// last asks for everything once all is settled, and for the states of the projection.
func (a *reader) last() {
	r := a.rig
	r.Helper()
	defer a.web.CloseIdleConnections()
	for i, topic := range r.plan.topics {
		h := r.hubs[i%len(r.hubs)]
		r.until("cursors are read", func(ctx context.Context) bool { return a.cursors(ctx, h, topic) })
		for key := range 5 {
			r.until("the newest event of a key is read", func(ctx context.Context) bool {
				return a.latest(ctx, h, topic, "host:"+strconv.Itoa(key), true)
			})
		}
		r.until("a topic is replayed", func(ctx context.Context) bool {
			return a.replay(ctx, h, &reading{What: "replay", Topic: topic, From: "earliest", Limit: 1_000_000, Final: true})
		})
	}
	if !r.plan.has("projection") {
		return
	}
	bus, err := openBus(r.Context(), jetstream.Config{URL: strings.Join(r.urls(), ","), Replicas: len(r.nodes)})
	if err != nil {
		r.Fatal(err)
	}
	defer func() { _ = bus.Close() }()
	states := &reading{What: "state", Topic: r.plan.topics[0], Final: true}
	r.until("the states of the projection are read", func(ctx context.Context) bool {
		states.States = map[string]folded{}
		view, err := projections.OpenView(ctx, projections.JetStream(bus), projectionName)
		if err != nil {
			return false
		}
		return view.Each(ctx, func(key string, s projections.State) error {
			var f folded
			err := json.Unmarshal(s.Value, &f)
			states.States[key] = f
			return err
		}) == nil
	})
	r.rec.read(r.rec.now(), states)
}

// besides is what a hub of the rig is to do besides WebSockets.
func (r *rig) besides() besides {
	r.Helper()
	b := besides{}
	if r.plan.has("reads") || r.plan.has("http") {
		b.HTTP, b.Ops = natstest.FreeAddress(r), natstest.FreeAddress(r)
	}
	if r.plan.has("projection") {
		b.Projection = r.plan.topics[0]
	}
	if r.plan.has("outbox") {
		b.Outbox = r.rows
	}
	return b
}

// urls are the addresses of the nats-servers.
func (r *rig) urls() []string {
	urls := make([]string, len(r.nodes))
	for i, n := range r.nodes {
		urls[i] = n.URL()
	}
	return urls
}
