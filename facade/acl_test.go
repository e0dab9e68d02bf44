package facade_test

import (
	"bufio"
	"bytes"
	"context"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"eventhub/acl"
	"eventhub/facade"
)

var jwtSecret = []byte("a secret for tests that has more than 32 bytes")

// newVerifier takes rigToken, and JWTs that are signed with jwtSecret for the audience hub.
func newVerifier(tb testing.TB) *acl.Verifier {
	tb.Helper()
	v, err := acl.NewVerifier(tb.Context(), acl.Config{
		Static: []acl.StaticToken{{Token: rigToken}}, Secret: jwtSecret, Audience: "hub",
	})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(v.Close)
	return v
}

// jwtRig is a rig that takes JWTs as well.
func jwtRig(t *testing.T, change func(*facade.Config)) *rig {
	t.Helper()
	v := newVerifier(t)
	return newRig(t, func(cfg *facade.Config) {
		cfg.Auth = facade.Tokens(v)
		if change != nil {
			change(cfg)
		}
	})
}

// grant signs a token of sub with scopes.
func grant(tb testing.TB, sub string, scopes ...string) string {
	tb.Helper()
	return sign(tb, acl.Grant{Subject: sub, Scopes: scopes})
}

func sign(tb testing.TB, g acl.Grant) string {
	tb.Helper()
	g.TTL, g.Audience = time.Hour, "hub"
	token, err := acl.Sign(jwtSecret, g)
	if err != nil {
		tb.Fatal(err)
	}
	return token
}

// ending is a token that ends at a moment, the leeway included.
func ending(tb testing.TB, at time.Time, scopes ...string) string {
	tb.Helper()
	exp := float64(at.Add(-acl.Leeway).UnixMilli()) / 1000
	token, err := jwt.NewWithClaims(jwt.SigningMethodHS256, jwt.MapClaims{"sub": "short", "aud": "hub", "exp": exp, "scopes": scopes}).SignedString(jwtSecret)
	if err != nil {
		tb.Fatal(err)
	}
	return token
}

// shortLived calls f with a token that expires soon. f returns false if the token expired before f
// had used it, as it may on a busy machine: the next token lives for twice as long.
func shortLived(tb testing.TB, f func(token string) bool, scopes ...string) {
	tb.Helper()
	for life := 1500 * time.Millisecond; !f(ending(tb, time.Now().Add(life), scopes...)); life *= 2 {
		if life > rigPatience {
			tb.Fatalf("a token of %v expired before it was used", life)
		}
	}
}

// as connects and authenticates with a token.
func (r *rig) as(t *testing.T, token string) *peer {
	t.Helper()
	p := r.dial(t)
	p.auth(token)
	return p
}

func (p *peer) auth(token string) {
	p.t.Helper()
	p.send(`{"op":"AUTH","token":"` + token + `"}`)
	p.want(`{"op":"OK"}`)
}

// outcome sends a frame and returns the code of the answer, OK without one.
func (p *peer) outcome(frame string) string {
	p.t.Helper()
	p.send(frame)
	got := p.any()
	if got.Op == "OK" {
		return "OK"
	}
	return got.Code
}

func TestEnforcement(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, nil)
	scoped := grant(t, "scoped", "publish:in.*", "subscribe:out.**")
	ruled := sign(t, acl.Grant{Subject: "ruled", Policy: []byte(`{"rules":[
		{"effect":"deny","action":"publish","topics":["in.secret"]},
		{"effect":"allow","action":"publish","topics":["in.**"]},
		{"effect":"allow","action":"subscribe","topics":["out.**"],"groups":["mine","ours"]}
	]}`)})
	for _, c := range []struct{ token, frame, want string }{
		{scoped, `{"op":"PUBLISH","topic":"in.a"}`, "OK"},
		{scoped, `{"op":"PUBLISH","topic":"in"}`, "forbidden"},
		{scoped, `{"op":"PUBLISH","topic":"in.a.b"}`, "forbidden"},
		{scoped, `{"op":"PUBLISH","topic":"out.a"}`, "forbidden"},
		{scoped, `{"op":"PUBLISH","topic":"in.*"}`, "bad_topic"},
		{scoped, `{"op":"PUBLISH","topic":"in.>"}`, "bad_topic"},
		{scoped, `{"op":"PUBLISH","topic":"in.**"}`, "bad_topic"},
		{scoped, `{"op":"SUBSCRIBE","topic":"out","group":"g"}`, "OK"},
		{scoped, `{"op":"SUBSCRIBE","topic":"out.*","group":"g"}`, "bad_topic"},
		{scoped, `{"op":"SUBSCRIBE","topic":"in.a","group":"g"}`, "forbidden"},
		{scoped, `{"op":"SUBSCRIBE","topic":"out.b","group":"g","opts":{"topics":["out.c"]}}`, "OK"},
		{scoped, `{"op":"SUBSCRIBE","topic":"out.b","group":"h","opts":{"topics":["out.c","in.a"]}}`, "forbidden"},
		{scoped, `{"op":"SUBSCRIBE","topic":"dlq.out","group":"g"}`, "forbidden"},
		{ruled, `{"op":"PUBLISH","topic":"in.a.b"}`, "OK"},
		{ruled, `{"op":"PUBLISH","topic":"in.secret"}`, "forbidden"},
		{ruled, `{"op":"SUBSCRIBE","topic":"out.a","group":"mine"}`, "OK"},
		{ruled, `{"op":"SUBSCRIBE","topic":"out.a","group":"theirs"}`, "forbidden"},
		{ruled, `{"op":"SUBSCRIBE","topic":"out.a","group":"*"}`, "forbidden"},
		{grant(t, "nobody"), `{"op":"PUBLISH","topic":"in.a"}`, "forbidden"},
		{rigToken, `{"op":"PUBLISH","topic":"in.secret"}`, "OK"},
	} {
		if got := r.as(t, c.token).outcome(c.frame); got != c.want {
			t.Errorf("%s: %s, want %s", c.frame, got, c.want)
		}
	}
	for _, c := range []struct {
		token, topic string
		status       int
	}{
		{scoped, "in.a", http.StatusOK},
		{scoped, "out.a", http.StatusForbidden},
		{ruled, "in.secret", http.StatusForbidden},
		{ruled, "in.a", http.StatusOK},
	} {
		for _, kind := range []string{"application/json", "application/x-ndjson"} {
			got := r.post(t, "/publish/"+c.topic, `{"payload":1}`, "Authorization", "Bearer "+c.token, "Content-Type", kind)
			if got.status != c.status || (got.Code == "forbidden") != (c.status == http.StatusForbidden) {
				t.Errorf("%s as %s: %d %s, want %d", c.topic, kind, got.status, got.text, c.status)
			}
		}
	}
}

func TestTokensThatAreRefused(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, nil)
	claims := func(change func(jwt.MapClaims)) jwt.MapClaims {
		c := jwt.MapClaims{"sub": "x", "aud": "hub", "exp": time.Now().Add(time.Hour).Unix(), "scopes": []string{"*:**"}}
		change(c)
		return c
	}
	signed := func(method jwt.SigningMethod, key any, change func(jwt.MapClaims)) string {
		token, err := jwt.NewWithClaims(method, claims(change)).SignedString(key)
		if err != nil {
			t.Fatal(err)
		}
		return token
	}
	same := func(jwt.MapClaims) {}
	for _, c := range []struct{ why, token, code string }{
		{"none", "", "no_token"},
		{"another static one", rigToken + "x", "bad_token"},
		{"expired", ending(t, time.Now().Add(-time.Second), "*:**"), "jwt_invalid"},
		{"not yet valid", signed(jwt.SigningMethodHS256, jwtSecret, func(c jwt.MapClaims) { c["nbf"] = time.Now().Add(time.Minute).Unix() }), "jwt_invalid"},
		{"another audience", signed(jwt.SigningMethodHS256, jwtSecret, func(c jwt.MapClaims) { c["aud"] = "other" }), "jwt_invalid"},
		{"without exp", signed(jwt.SigningMethodHS256, jwtSecret, func(c jwt.MapClaims) { delete(c, "exp") }), "jwt_invalid"},
		{"alg none", signed(jwt.SigningMethodNone, jwt.UnsafeAllowNoneSignatureType, same), "jwt_invalid"},
		{"HS512", signed(jwt.SigningMethodHS512, jwtSecret, same), "jwt_invalid"},
		{"another secret", signed(jwt.SigningMethodHS256, []byte("another secret that has more than 32 bytes"), same), "jwt_invalid"},
		{"malformed scope", signed(jwt.SigningMethodHS256, jwtSecret, func(c jwt.MapClaims) { c["scopes"] = []string{"publish"} }), "jwt_invalid"},
	} {
		p := r.dial(t)
		if got := p.outcome(`{"op":"AUTH","token":"` + c.token + `"}`); got != c.code {
			t.Errorf("%s: %s, want %s", c.why, got, c.code)
		}
		if got := p.outcome(`{"op":"PUBLISH","topic":"t"}`); got != "unauthorized" {
			t.Errorf("%s: then %s", c.why, got)
		}
		if got := r.post(t, "/publish/t", "1", "Authorization", "Bearer "+c.token); got.status != http.StatusUnauthorized || got.Code != c.code {
			t.Errorf("%s over HTTP: %d %s, want %s", c.why, got.status, got.text, c.code)
		}
	}
}

// An AUTH replaces the policy and what was remembered of it. What the new one does not allow ends,
// and goes to others.
func TestReauthWithFewerRights(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, nil)
	p := r.as(t, grant(t, "p", "publish:*", "subscribe:*"))
	for _, frame := range []string{
		`{"op":"SUBSCRIBE","topic":"kept","group":"g"}`,
		`{"op":"SUBSCRIBE","topic":"lost","group":"g"}`,
		`{"op":"SUBSCRIBE","topic":"kept","group":"partly","opts":{"topics":["lost"]}}`,
		`{"op":"PUBLISH","topic":"other"}`,
	} {
		if got := p.outcome(frame); got != "OK" {
			t.Fatal(frame, got)
		}
	}
	r.post(t, "/publish/lost", "1")
	for range 2 { // both groups hold it
		p.next("EVENT", "")
	}
	p.send(`{"op":"AUTH","token":"` + grant(t, "p", "subscribe:kept") + `","corr":1}`)
	ended := map[string]bool{}
	for range 2 {
		ended[p.next("ERR", "forbidden").Msg] = true
	}
	if len(ended) != 2 {
		t.Fatal(ended)
	}
	p.want(`{"op":"OK","corr":1}`)
	for frame, want := range map[string]string{
		`{"op":"PUBLISH","topic":"other"}`:                        "forbidden",
		`{"op":"SUBSCRIBE","topic":"lost","group":"g"}`:           "forbidden",
		`{"op":"ACK","topic":"lost","group":"g","id":"x"}`:        "not_subscribed",
		`{"op":"SUBSCRIBE","topic":"kept","group":"g"}`:           "already_subscribed",
		`{"op":"UNSUBSCRIBE","topic":"kept","group":"partly"}`:    "not_subscribed",
		`{"op":"PUBLISH","topic":"kept","payload":"not allowed"}`: "forbidden",
	} {
		if got := p.outcome(frame); got != want {
			t.Errorf("%s: %s, want %s", frame, got, want)
		}
	}
	q := r.login(t)
	if got := q.outcome(`{"op":"SUBSCRIBE","topic":"lost","group":"g"}`); got != "OK" {
		t.Fatal(got)
	}
	if got := q.next("EVENT", ""); got.Ctx.Attempt != 2 {
		t.Fatal(got)
	}
	r.post(t, "/publish/kept", "2")
	if got := p.next("EVENT", ""); string(got.Event.Payload) != "2" || got.Group != "g" {
		t.Fatal(got)
	}
	// And back again.
	p.send(`{"op":"AUTH","token":"` + grant(t, "p", "publish:other") + `"}`)
	p.next("ERR", "forbidden") // kept::g
	p.want(`{"op":"OK"}`)
	if got := p.outcome(`{"op":"PUBLISH","topic":"other"}`); got != "OK" {
		t.Fatal(got)
	}
}

func TestTokenExpiresOnALiveConnection(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, nil)
	var p, refreshed *peer
	var topic string
	shortLived(t, func(token string) bool {
		p, refreshed, topic = r.dial(t), r.dial(t), freshTopic()
		auth := `{"op":"AUTH","token":"` + token + `"}`
		return p.outcome(auth) == "OK" && refreshed.outcome(auth) == "OK" &&
			p.outcome(`{"op":"SUBSCRIBE","topic":"`+topic+`","group":"g"}`) == "OK" &&
			refreshed.outcome(`{"op":"AUTH","token":"`+grant(t, "short", "publish:t")+`"}`) == "OK" &&
			r.post(t, "/publish/"+topic, "1").status == http.StatusOK && p.any().Op == "EVENT"
	}, "*:**")
	if got := p.next("ERR", "token_expired"); got.Corr != nil {
		t.Fatal(got)
	}
	p.wantClose(4003)
	// Its lease goes to another, and a fresh AUTH came first for the other connection.
	q := r.login(t)
	q.outcome(`{"op":"SUBSCRIBE","topic":"` + topic + `","group":"g"}`)
	if got := q.next("EVENT", ""); got.Ctx.Attempt != 2 {
		t.Fatal(got)
	}
	if got := refreshed.outcome(`{"op":"PUBLISH","topic":"t"}`); got != "OK" {
		t.Fatal(got)
	}
}

// counting counts how often an Authenticator is asked.
type counting struct {
	facade.Authenticator
	mu    sync.Mutex
	asked int
}

func (c *counting) Authenticate(ctx context.Context, token string) (facade.Principal, error) {
	c.mu.Lock()
	c.asked++
	c.mu.Unlock()
	return c.Authenticator.Authenticate(ctx, token)
}

func TestHTTPTokensAreVerifiedOnce(t *testing.T) {
	t.Parallel()
	auth := &counting{Authenticator: facade.Tokens(newVerifier(t))}
	r := newRig(t, func(cfg *facade.Config) { cfg.Auth = auth })
	long := ending(t, time.Now().Add(time.Hour), "publish:t")
	for range 20 {
		if got := r.post(t, "/publish/t", "1", "Authorization", "Bearer "+long); got.status != http.StatusOK {
			t.Fatal(got)
		}
		if got := r.post(t, "/publish/t", "1", "Authorization", "Bearer no"); got.status != http.StatusUnauthorized {
			t.Fatal(got)
		}
	}
	if auth.asked != 1+20 {
		t.Errorf("asked %d times", auth.asked)
	}
	// That a token is remembered does not keep it valid.
	short := ""
	eventually(t, "a short token is taken", func() bool {
		short = ending(t, time.Now().Add(1500*time.Millisecond), "publish:t")
		return r.post(t, "/publish/t", "1", "Authorization", "Bearer "+short).status == http.StatusOK
	})
	eventually(t, "the token expires", func() bool {
		got := r.post(t, "/publish/t", "1", "Authorization", "Bearer "+short)
		return got.status == http.StatusUnauthorized && got.Code == "jwt_invalid"
	})
}

// A request that goes on for long does not outlive its token.
func TestNDJSONEndsWithItsToken(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, nil)
	var req *bufio.Scanner
	var feed func(line string)
	shortLived(t, func(token string) bool {
		req, feed = r.stream(t, "/publish/t", token)
		return req != nil
	}, "publish:t")
	eventually(t, "the token expires", func() bool {
		feed(`{"payload":1}`)
		if !req.Scan() {
			t.Fatal(req.Err())
		}
		got := parseAnswer(t, req.Text())
		return got.Code == "token_expired"
	})
}

// A decision is logged with the rule behind it, and nothing secret.
func TestDenialsAreLogged(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var text bytes.Buffer
	r := jwtRig(t, func(cfg *facade.Config) {
		cfg.Logger = slog.New(slog.NewTextHandler(lockedWriter{&mu, &text}, &slog.HandlerOptions{Level: slog.LevelDebug}))
	})
	token := sign(t, acl.Grant{Subject: "somebody", Policy: []byte(`{"rules":[{"effect":"deny","action":"publish","topics":["in.**"]}]}`)})
	p := r.as(t, token)
	if got := p.outcome(`{"op":"PUBLISH","topic":"in.a","payload":"a payload"}`); got != "forbidden" {
		t.Fatal(got)
	}
	r.post(t, "/publish/in.a", `"a payload"`, "Authorization", "Bearer "+token+"x")
	mu.Lock()
	defer mu.Unlock()
	for _, want := range []string{"principal=somebody", "topic=in.a", `"denied by rule 1: deny publish in.**"`} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("%s is missing in %s", want, &text)
		}
	}
	for _, secret := range []string{token, strings.Split(token, ".")[2], "a payload"} {
		if strings.Contains(text.String(), secret) {
			t.Errorf("%s is in %s", secret, &text)
		}
	}
}

type lockedWriter struct {
	mu *sync.Mutex
	to *bytes.Buffer
}

func (w lockedWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.to.Write(p)
}

// TestRefusedSubscriptionNamesItsTopic refuses subscriptions because of a further topic: the first
// time, and by a new token.
func TestRefusedSubscriptionNamesItsTopic(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, nil)
	p := r.as(t, grant(t, "narrow", "subscribe:a", "subscribe:b"))
	p.send(`{"op":"SUBSCRIBE","topic":"a","group":"g","opts":{"topics":["b","c","d"]},"corr":1}`)
	p.want(`{"op":"ERR","code":"forbidden","msg":"The policy does not allow to subscribe to c::g.","corr":1}`)
	p.send(`{"op":"SUBSCRIBE","topic":"a","group":"g","opts":{"topics":["b"]},"corr":2}`)
	p.want(`{"op":"OK","corr":2}`)
	p.send(`{"op":"AUTH","token":"` + grant(t, "narrow", "subscribe:a") + `","corr":3}`)
	p.want(`{"op":"ERR","code":"forbidden","msg":"The new policy does not allow b::g; the subscription a::g has ended."}`)
	p.want(`{"op":"OK","corr":3}`)
}

// TestDenialCoversSnapshotsAndDeadLetters denies one topic, and allows all others.
func TestDenialCoversSnapshotsAndDeadLetters(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, nil)
	p := r.as(t, sign(t, acl.Grant{Subject: "no state", Policy: []byte(`{"rules":[
		{"effect":"deny","action":"subscribe","topics":["process.state","a.*"]},
		{"effect":"allow","action":"*","topics":["dlq.a.named","**"]}
	]}`)}))
	for topic, want := range map[string]string{
		"process.state": "forbidden", "process.state.snapshot": "forbidden", "dlq.process.state": "forbidden",
		"dlq.process.state.snapshot": "forbidden", "dlq.a.x": "forbidden", "dlq.a.named": "OK", "dlq.b": "OK",
	} {
		if got := p.outcome(`{"op":"SUBSCRIBE","topic":"` + topic + `","group":"g"}`); got != want {
			t.Errorf("%s: %s, want %s", topic, got, want)
		}
	}
}
