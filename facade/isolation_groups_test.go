package facade_test

import (
	"encoding/json"
	"strconv"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/golang-jwt/jwt/v5"

	"eventhub/acl"
	"eventhub/docs/apitest"
	"eventhub/jetstream"
)

// makeGroups subscribes to new groups of a topic over as many connections as that takes, without
// waiting for the answers one by one, and returns how many were made and the codes of the refusals.
func (r *rig) makeGroups(t *testing.T, token, topic, prefix string, n int) (made int, refused map[string]int) {
	t.Helper()
	const each = 25 // subscriptions of a connection: more at a time may take longer than they may
	refused = make(map[string]int)
	for from := 0; from < n; from += each {
		p := r.dial(t)
		p.auth(token)
		to := min(from+each, n)
		for i := from; i < to; i++ {
			p.send(`{"op":"SUBSCRIBE","topic":"` + topic + `","group":"` + prefix + strconv.Itoa(i) + `","corr":1}`)
		}
		for range to - from {
			if got := p.any(); got.Op == "OK" {
				made++
			} else {
				refused[got.Code]++
			}
		}
		_ = p.conn.CloseNow()
	}
	return made, refused
}

// A client that makes group after group is stopped by its quota, before the stream is full. All
// others, and the hub itself, go on making groups.
func TestNewGroupsOfAPrincipalAreRationed(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, nil)
	const tries = 250
	made, refused := r.makeGroups(t, grant(t, "eve", "subscribe:heartbeat.received"), "heartbeat.received", "g", tries)
	t.Logf("%d were made, refused: %v", made, refused)
	if made < 100 || made > 110 || refused["rate_limited"] != tries-made {
		t.Errorf("%d groups were made, want 100 and few more; refused: %v", made, refused)
	}
	if r.seen.count("error rate_limited") == 0 {
		t.Error("the refusals were not counted")
	}
	// Groups that exist can be joined, all the same.
	p := r.dial(t)
	p.auth(grant(t, "eve", "subscribe:heartbeat.received"))
	if got := p.outcome(`{"op":"SUBSCRIBE","topic":"heartbeat.received","group":"g5"}`); got != "OK" {
		t.Errorf("joining a group that exists: %s", got)
	}
	other := r.dial(t)
	other.auth(grant(t, "alice", "subscribe:heartbeat.received"))
	if got := other.outcome(`{"op":"SUBSCRIBE","topic":"heartbeat.received","group":"mine"}`); got != "OK" {
		t.Errorf("the group of another client: %s", got)
	}
	sub, err := r.bus.Subscribe(t.Context(), "heartbeat.received", "process-projector", jetstream.SubscribeOptions{}, func(*jetstream.Held) {})
	if err != nil {
		t.Fatalf("a group of the hub itself: %v", err)
	}
	_ = sub.Stop(t.Context())
}

// A group that somebody made with a TTL becomes durable when a member joins it without one: its
// owner may then be away for as long as it likes.
func TestJoiningWithoutATTLMakesAGroupDurable(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, nil)
	topic := freshTopic()
	all := grant(t, "owner", "*:**")
	member := func(token, opts string) *peer {
		p := r.dial(t)
		p.auth(token)
		p.send(`{"op":"SUBSCRIBE","topic":"` + topic + `","group":"billing"` + opts + `}`)
		p.want(`{"op":"OK"}`)
		return p
	}
	eve := member(grant(t, "eve", "subscribe:"+topic), `,"opts":{"groupTtlMs":1000}`)
	owner := member(all, "")
	_ = eve.conn.CloseNow()
	_ = owner.conn.CloseNow()
	publisher := r.dial(t)
	publisher.auth(all)
	for i := range 10 {
		publisher.send(`{"op":"PUBLISH","topic":"` + topic + `","payload":` + strconv.Itoa(i) + `}`)
		publisher.next("OK", "")
	}
	<-time.After(4 * time.Second) // the owner is away
	back := member(all, "")
	publisher.send(`{"op":"PUBLISH","topic":"` + topic + `","payload":10}`)
	came := map[string]bool{} // one that was on its way to the owner before comes later
	for range 11 {
		came[string(back.next("EVENT", "").Event.Payload)] = true
	}
	for i := range 11 {
		if !came[strconv.Itoa(i)] {
			t.Errorf("event %d is lost", i)
		}
	}
}

// A scope names the groups that its owner may join.
func TestScopesNameGroups(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, nil)
	p := r.dial(t)
	p.auth(grant(t, "billing", "subscribe:orders.*::billing", "subscribe:orders.*::tab-*"))
	for group, want := range map[string]string{"billing": "OK", "tab-7": "OK", "mailer": "forbidden", "billing2": "forbidden"} {
		if got := p.outcome(`{"op":"SUBSCRIBE","topic":"orders.placed","group":"` + group + `"}`); got != want {
			t.Errorf("group %s: %s, want %s", group, got, want)
		}
	}
	if got := r.ask(t, "GET", "/snap/orders.placed/k", "", "Authorization", "Bearer "+grant(t, "billing", "subscribe:orders.*::billing")); got.status != 403 {
		t.Errorf("a scope that names a group reads snapshots: %d %s", got.status, got.text)
	}
}

// Groups that the hub itself runs can be joined with admin only.
func TestTheHubsOwnGroupsNeedAdmin(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, nil)
	for _, test := range []struct {
		name   string
		scopes []string
		want   string
	}{
		{"subscribe", []string{"subscribe:**"}, "forbidden"},
		{"subscribe and the name", []string{"subscribe:**::process-projector"}, "forbidden"},
		{"subscribe and a pattern", []string{"subscribe:**::*"}, "forbidden"},
		{"admin alone", []string{"admin:**"}, "forbidden"},
		{"both", []string{"subscribe:**", "admin:heartbeat.received"}, "OK"},
		{"all", []string{"*:**"}, "OK"},
	} {
		p := r.dial(t)
		p.auth(grant(t, "eve", test.scopes...))
		if got := p.outcome(`{"op":"SUBSCRIBE","topic":"heartbeat.received","group":"process-projector"}`); got != test.want {
			t.Errorf("%s: %s, want %s", test.name, got, test.want)
		}
	}
	p := r.dial(t)
	p.auth(sign(t, acl.Grant{Subject: "eve", Policy: []byte(`{"rules":[{"effect":"allow","action":"subscribe","topics":["**"],"groups":["process-projector"]}]}`)}))
	if got := p.outcome(`{"op":"SUBSCRIBE","topic":"heartbeat.received","group":"process-projector"}`); got != "forbidden" {
		t.Errorf("by a policy: %s", got)
	}
}

// A scope that is not well formed is refused at AUTH, and never taken for a wider one.
func TestMalformedGroupScopesAreRefused(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, nil)
	for _, scope := range []string{
		"subscribe:orders::", "subscribe::billing", "subscribe:::billing", "publish:orders::billing", "admin:orders::billing",
		"*:orders::billing", "subscribe:orders:billing", "subscribe:orders:::billing", "subscribe:orders::bil\u0001ling",
	} {
		p := r.dial(t)
		p.send(`{"op":"AUTH","token":"` + rawGrant(t, "eve", scope) + `"}`)
		if got := p.any(); got.Code != "jwt_invalid" {
			t.Errorf("%q: %+v", scope, got)
		}
	}
}

// rawGrant is a token that no sane tool would sign.
func rawGrant(t *testing.T, sub, scope string) string {
	t.Helper()
	payload, err := json.Marshal(map[string]any{"sub": sub, "aud": "hub", "exp": time.Now().Add(time.Hour).Unix(), "scopes": []string{scope}})
	if err != nil {
		t.Fatal(err)
	}
	return forge(t, `{"alg":"HS256","typ":"JWT"}`, string(payload), jwt.SigningMethodHS256, jwtSecret)
}

// When somebody deletes a group, its members on all hubs are told, and their subscriptions have
// ended. The name is free for a new group.
func TestDeletingAGroupEndsItsSubscriptions(t *testing.T) {
	t.Parallel()
	a, b := twoHubs(t)
	topic, other := freshTopic(), freshTopic()
	a.publish(a.dial(), other, `0`) // it exists
	var members []*peer
	for _, hub := range []*testHub{a, b} {
		p := hub.peer(t)
		p.send(`{"op":"SUBSCRIBE","topic":"`+topic+`","group":"g","opts":{"topics":["`+other+`"]}}`, `{"op":"SUBSCRIBE","topic":"`+other+`","group":"stays"}`)
		p.want(`{"op":"OK"}`)
		p.want(`{"op":"OK"}`)
		members = append(members, p)
	}
	if err := b.bus.Group(topic, "g").Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, p := range members {
		p.want(`{"op":"ERR","code":"not_subscribed","msg":"` + topic + `::g"}`)
		p.send(`{"op":"ACK","topic":"` + topic + `","group":"g","id":"1"}`)
		p.want(`{"op":"ERR","code":"not_subscribed","msg":"` + topic + `::g"}`)
		p.send(`{"op":"SUBSCRIBE","topic":"` + topic + `","group":"g"}`)
		p.want(`{"op":"OK"}`)
	}
	for _, p := range members {
		p.send(`{"op":"UNSUBSCRIBE","topic":"` + other + `","group":"stays"}`)
		p.want(`{"op":"OK"}`)
	}
}

// peer connects and authenticates a client that sends texts.
func (h *testHub) peer(t *testing.T) *peer {
	t.Helper()
	conn, _, err := websocket.Dial(t.Context(), h.url, nil) //nolint:bodyclose // the library closes it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.CloseNow() })
	p := &peer{t: t, conn: conn, frames: apitest.NewFrames(t)}
	p.auth(testToken)
	return p
}
