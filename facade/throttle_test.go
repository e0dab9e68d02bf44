package facade_test

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/facade"
	"eventhub/jetstream"
)

func TestFrameRate(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) { cfg.Limits.FrameRate, cfg.Limits.FrameBurst = 1, 6 })
	began := time.Now()
	p := r.login(t)
	if got := p.outcome(`{"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"maxAttempts":1}}`); got != "OK" {
		t.Fatal(got)
	}
	const many = 20
	for i := range many {
		p.send(`{"op":"PUBLISH","topic":"t","corr":` + strconv.Itoa(i) + `}`)
	}
	stored, refused := 0, 0
	var ids []string
	for stored+refused < many || len(ids) < stored {
		switch got := p.any(); {
		case got.Op == "EVENT":
			ids = append(ids, got.Event.ID)
		case got.Op == "OK":
			stored++
		case got.Code == "rate_limited":
			// what AUTH and SUBSCRIBE left of the burst
			if corr, ok := got.Corr.(float64); !ok || corr < 4 {
				t.Fatal(got)
			}
			refused++
		default:
			t.Fatal(got)
		}
	}
	if stored < 4 || stored > 6+int(time.Since(began)/time.Second) || r.seen.count("limit frame_rate") != refused {
		t.Fatalf("%d were stored, %d refused, %d counted", stored, refused, r.seen.count("limit frame_rate"))
	}
	// What it holds it can settle meanwhile.
	for i, id := range ids {
		op := []string{"ACK", "NACK", "MODACK"}[i%3]
		if got := p.outcome(`{"op":"` + op + `","topic":"t","group":"g","id":"` + id + `"}`); got != "OK" {
			t.Fatal(op, got)
		}
	}
	if got := p.outcome(`{"op":"ACK","topic":"t","group":"g","ids":["` + ids[2] + `"]}`); got != "OK" {
		t.Fatal(got)
	}
	eventually(t, "it may publish again", func() bool { return p.outcome(`{"op":"PUBLISH","topic":"u"}`) == "OK" })
}

// Settling is slowed down, and never refused: one ACK of many ids as much as many.
func TestSettleRate(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) {
		cfg.Limits.SettleRate, cfg.Limits.SettleBurst, cfg.Limits.CloseGrace = 20, 2, 300*time.Millisecond
	})
	p := r.login(t)
	if got := p.outcome(`{"op":"SUBSCRIBE","topic":"t","group":"g"}`); got != "OK" {
		t.Fatal(got)
	}
	for round, frames := range [][]string{
		{ackOf(8), ackOf(1)},
		{ackOf(1), ackOf(1), ackOf(1), ackOf(1), ackOf(1), ackOf(1), ackOf(1), ackOf(1)},
	} {
		begun := time.Now()
		p.send(frames...)
		for range frames {
			p.want(`{"op":"OK"}`)
		}
		// At least six tokens were missing in the first round, and five in the second, which starts
		// with one missing.
		if took := time.Since(begun); took < 200*time.Millisecond {
			t.Errorf("round %d took %v", round, took)
		}
	}
	if r.seen.count("limit settle_rate") == 0 || r.seen.count("error rate_limited") > 0 {
		t.Error(r.seen.counts)
	}
	// The second frame waits for the first, and counts all the same.
	late := r.login(t)
	begun := time.Now()
	ack := strings.Replace(ackOf(8), `"g"`, `"late"`, 1)
	late.send(`{"op":"SUBSCRIBE","topic":"t","group":"late"}`, ack, ack)
	for range 3 {
		late.want(`{"op":"OK"}`)
	}
	if took := time.Since(begun); took < 200*time.Millisecond {
		t.Errorf("settling behind a frame that waits took %v", took)
	}
	// A connection that waits can be ended.
	p.send(ackOf(1000))
	p.want(`{"op":"OK"}`)
	if err := r.srv.Close(); err != nil {
		t.Fatal(err)
	}
	p.wantClose(4000)
}

func ackOf(n int) string {
	ids, _ := json.Marshal(make([]string, n))
	return `{"op":"ACK","topic":"t","group":"g","ids":` + string(ids) + `}`
}

// publishBy publishes one event in each of the ways there are, and returns the codes, "OK" without
// one.
func (r *rig) publishBy(t *testing.T, token, topic string) map[string]string {
	t.Helper()
	codes := map[string]string{"ws": r.as(t, token).outcome(`{"op":"PUBLISH","topic":"` + topic + `"}`)}
	for way, kind := range map[string]string{"http": "application/json", "ndjson": "application/x-ndjson"} {
		got := r.post(t, "/publish/"+topic, `{"payload":1}`, "Authorization", "Bearer "+token, "Content-Type", kind)
		if way == "ndjson" {
			got.parse(t, []byte(got.text))
		} else if after, err := strconv.Atoi(got.header.Get("Retry-After")); (got.status == http.StatusTooManyRequests) != (err == nil && after >= 1) {
			t.Errorf("%d with Retry-After %q", got.status, got.header.Get("Retry-After"))
		}
		if codes[way] = got.Code; got.Code == "" {
			codes[way] = "OK"
		}
	}
	return codes
}

// wantClosedWays publishes until each way has been refused. On a slow machine there may be room for
// an event again meanwhile.
func (r *rig) wantClosedWays(t *testing.T, token, topic string) {
	t.Helper()
	closed := make(map[string]bool)
	eventually(t, "all ways are closed", func() bool {
		for way, code := range r.publishBy(t, token, topic) {
			closed[way] = closed[way] || code == "rate_limited"
		}
		return closed["ws"] && closed["http"] && closed["ndjson"]
	})
}

func wantAll(t *testing.T, codes map[string]string, want string) {
	t.Helper()
	for way, got := range codes {
		if got != want {
			t.Errorf("%s: %s, want %s", way, got, want)
		}
	}
}

func TestPrincipalRate(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, func(cfg *facade.Config) {
		cfg.Limits.PrincipalRate, cfg.Limits.PrincipalBurst = 1, 600
	})
	greedy, other := grant(t, "greedy", "publish:**"), grant(t, "other", "publish:**")
	p := r.as(t, greedy)
	refused := 0
	for range 640 {
		p.send(`{"op":"PUBLISH","topic":"t"}`)
	}
	for range 640 {
		if p.any().Code == "rate_limited" {
			refused++
		}
	}
	if refused < 20 || refused > 40 || r.seen.count("limit principal_rate") != refused {
		t.Fatalf("%d of 640 were refused", refused)
	}
	// A token with other rights is the same principal.
	again := grant(t, "greedy", "publish:t")
	r.wantClosedWays(t, again, "t")
	wantAll(t, r.publishBy(t, other, "t"), "OK")
	wantAll(t, r.publishBy(t, rigToken, "t"), "OK")
	if got := p.outcome(`{"op":"PUBLISH","topic":"t..t"}`); got != "bad_topic" {
		t.Fatal(got)
	}
}

func TestTopicRate(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, func(cfg *facade.Config) { cfg.Limits.TopicRate, cfg.Limits.TopicBurst = 1, 3 })
	one, two := grant(t, "one", "publish:**"), grant(t, "two", "publish:**")
	wantAll(t, r.publishBy(t, one, "busy"), "OK")
	r.wantClosedWays(t, two, "busy")
	wantAll(t, r.publishBy(t, two, "quiet"), "OK")
	// Who may not publish there uses nothing up.
	wantAll(t, r.publishBy(t, grant(t, "nobody"), "free"), "forbidden")
	wantAll(t, r.publishBy(t, one, "free"), "OK")
	if r.seen.count("limit topic_rate") == 0 {
		t.Error("the limit was not counted")
	}
}

func TestPrincipalConnections(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, func(cfg *facade.Config) { cfg.Limits.PrincipalConnections = 2 })
	token := func(sub string) string { return grant(t, sub, "publish:**") }
	first, second := r.as(t, token("a")), r.as(t, token("a"))
	third := r.dial(t)
	auth := func(sub string) string { return `{"op":"AUTH","token":"` + token(sub) + `"}` }
	// One that is told so may try again as often as it likes.
	for range 20 {
		if got := third.outcome(auth("a")); got != "overloaded" {
			t.Fatal(got)
		}
	}
	if got := third.outcome(`{"op":"PUBLISH","topic":"t"}`); got != "unauthorized" {
		t.Fatal(got)
	}
	// A fresh token takes no second place; others have places of their own; who becomes somebody
	// else leaves one.
	first.auth(token("a"))
	r.as(t, token("b"))
	second.auth(token("b"))
	third.auth(token("a"))
	if got := second.outcome(auth("a")); got != "overloaded" {
		t.Fatal(got)
	}
	// That has cost it the place it had.
	fourth := r.as(t, token("b"))
	_ = fourth.conn.CloseNow()
	eventually(t, "the place is free", func() bool { return second.outcome(auth("b")) == "OK" })
	if got := r.dial(t).outcome(auth("b")); got != "overloaded" {
		t.Fatal(got)
	}
	if got := first.outcome(`{"op":"AUTH","token":"no"}`); got != "bad_token" {
		t.Fatal(got)
	}
	r.as(t, token("a"))
}

// New topics count for a principal, whatever it uses.
func TestNewTopicsOfAPrincipal(t *testing.T) {
	t.Parallel()
	bus := openBus(t, func(cfg *jetstream.Config) { cfg.MemoryStorage, cfg.Limits.TopicsPerClient = true, 4 })
	r := jwtRig(t, func(cfg *facade.Config) { cfg.Bus = facade.JetStream(bus) })
	token := grant(t, "a", "*:**")
	n := 0
	topic := func() string { n++; return "new" + strconv.Itoa(n) }
	if got := r.as(t, token).outcome(`{"op":"PUBLISH","topic":"` + topic() + `"}`); got != "OK" {
		t.Fatal(got)
	}
	if got := r.as(t, token).outcome(`{"op":"SUBSCRIBE","topic":"` + topic() + `","group":"g"}`); got != "OK" {
		t.Fatal(got)
	}
	p := r.as(t, grant(t, "b", "*:**"))
	p.auth(token)
	if got := p.outcome(`{"op":"PUBLISH","topic":"` + topic() + `"}`); got != "OK" {
		t.Fatal(got)
	}
	if got := r.post(t, "/publish/"+topic(), "1", "Authorization", "Bearer "+token); got.status != http.StatusOK {
		t.Fatal(got)
	}
	for range 2 {
		wantAll(t, r.publishBy(t, token, topic()), "rate_limited")
	}
	if got := r.as(t, token).outcome(`{"op":"SUBSCRIBE","topic":"` + topic() + `","group":"g"}`); got != "rate_limited" {
		t.Fatal(got)
	}
	wantAll(t, r.publishBy(t, token, "new1"), "OK")
	wantAll(t, r.publishBy(t, rigToken, topic()), "OK")
}

func TestLimitsThatMakeNoSense(t *testing.T) {
	t.Parallel()
	open := newRig(t, nil)
	for _, l := range []facade.Limits{
		{FrameRate: -2}, {FrameBurst: -1}, {SettleRate: -5}, {TopicBurst: -1}, {Quotas: -1}, {Bearers: -1}, {PrincipalConnections: -3},
	} {
		if _, err := facade.New(facade.Config{Bus: facade.JetStream(open.bus), Auth: facade.StaticToken("x"), Limits: l}); err == nil {
			t.Errorf("%+v was taken", l)
		} else {
			t.Log(err)
		}
	}
}
