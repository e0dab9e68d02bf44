package facade_test

import (
	"testing"

	"eventhub/acl"
)

// A rule with groups never matches a broadcast.
func TestBroadcastAsksThePolicy(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, nil)
	for _, test := range []struct {
		scopes []string
		code   string
	}{
		{[]string{"subscribe:t"}, ""},
		{[]string{"subscribe:**"}, ""},
		{[]string{"subscribe:t::*"}, "forbidden"},
		{[]string{"subscribe:**::g"}, "forbidden"},
		{[]string{"subscribe:u", "publish:t", "presence:t", "admin:t", "inspect:t"}, "forbidden"},
	} {
		p := r.dial(t)
		p.auth(grant(t, "eve", test.scopes...))
		p.send(`{"op":"SUBSCRIBE","topic":"t","opts":{"mode":"broadcast"},"corr":1}`)
		if got := p.any(); got.Code != test.code {
			t.Errorf("with %v: %+v, want %q", test.scopes, got, test.code)
		}
	}
	for policy, code := range map[string]string{
		`{"rules":[{"effect":"allow","action":"subscribe","topics":["t"],"groups":["*"]}]}`: "forbidden",
		`{"rules":[{"effect":"allow","action":"subscribe","topics":["t"]}]}`:                "",
	} {
		p := r.dial(t)
		p.auth(sign(t, acl.Grant{Subject: "eve", Policy: []byte(policy)}))
		p.send(`{"op":"SUBSCRIBE","topic":"t","opts":{"mode":"broadcast"},"corr":1}`)
		if got := p.any(); got.Code != code {
			t.Errorf("with %s: %+v, want %q", policy, got, code)
		}
	}
}

// A new token decides about the broadcasts of a connection, and so does the end of a token.
func TestBroadcastFollowsTheToken(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, nil)
	writer := grant(t, "writer", "publish:**")
	put := func(topic, payload string) { r.put(t, topic, payload, "Authorization", "Bearer "+writer) }
	p := r.dial(t)
	p.auth(grant(t, "eve", "subscribe:t", "subscribe:u"))
	p.follow("t", "")
	p.follow("u", "")
	put("t", "1")
	p.wantEvents("1")
	p.send(`{"op":"AUTH","token":"` + grant(t, "eve", "subscribe:u", "subscribe:t::g") + `","corr":7}`)
	p.next("ERR", "forbidden")
	p.want(`{"op":"OK","corr":7}`)
	put("t", "2")
	put("u", "3")
	p.wantEvents("3")
	// A refused token ends all of them.
	p.send(`{"op":"AUTH","token":"wrong","corr":8}`)
	if got := p.any(); got.Op != "ERR" {
		t.Errorf("got %+v", got)
	}
	put("u", "4")
	p.send(`{"op":"AUTH","token":"` + grant(t, "eve", "subscribe:u") + `","corr":9}`)
	p.want(`{"op":"OK","corr":9}`)
	p.send(`{"op":"UNSUBSCRIBE","topic":"u","opts":{"mode":"broadcast"},"corr":10}`)
	p.next("ERR", "not_subscribed")

	var q *peer
	shortLived(t, func(token string) bool {
		q = r.dial(t)
		return q.outcome(`{"op":"AUTH","token":"`+token+`"}`) == "OK" &&
			q.outcome(`{"op":"SUBSCRIBE","topic":"t","opts":{"mode":"broadcast"}}`) == "OK"
	}, "subscribe:t")
	q.next("ERR", "token_expired")
	q.wantClose(4003)
}
