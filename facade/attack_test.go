package facade_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/MicahParks/jwkset"
	"github.com/coder/websocket"
	"github.com/golang-jwt/jwt/v5"

	"eventhub/acl"
	"eventhub/facade"
)

// payloadMark is in every payload that an attacker sends. It must not be found anywhere else.
const payloadMark = "xyzzy-payload"

// witness keeps all that a hub writes to its log and says to attackers, to be searched for what
// must not be there.
type witness struct {
	mu   sync.Mutex
	log  bytes.Buffer
	said bytes.Buffer
}

// listen makes the hub's log the witness's.
func (w *witness) listen(cfg *facade.Config) {
	cfg.Logger = slog.New(slog.NewTextHandler(lockedWriter{&w.mu, &w.log}, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func (w *witness) hear(text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, _ = w.said.WriteString(text + "\n") // never fails
}

// mustNotKnow wants none of the secrets, nor a part of a token, in the log and the answers.
func (w *witness) mustNotKnow(t *testing.T, secrets ...string) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.log.Len() == 0 || w.said.Len() == 0 {
		t.Error("the witness has heard nothing")
	}
	for where, text := range map[string]string{"the log": w.log.String(), "the answers": w.said.String()} {
		for _, secret := range secrets {
			for part := range strings.SplitSeq(secret, ".") {
				if len(part) >= 8 && strings.Contains(text, part) {
					t.Errorf("%.60s is in %s", part, where)
				}
			}
		}
	}
}

// asked sends a frame and returns the answer, which the witness hears.
func (p *peer) asked(w *witness, frame string) reply {
	p.t.Helper()
	p.send(frame)
	text := p.read()
	w.hear(text)
	var got reply
	if err := json.Unmarshal([]byte(text), &got); err != nil {
		p.t.Fatalf("%.300s: %v", text, err)
	}
	return got
}

// forge makes a token of raw JSON. Without a method it has no signature.
func forge(tb testing.TB, header, payload string, method jwt.SigningMethod, key any) string {
	tb.Helper()
	text := base64.RawURLEncoding.EncodeToString([]byte(header)) + "." + base64.RawURLEncoding.EncodeToString([]byte(payload))
	if method == nil {
		return text + "."
	}
	sig, err := method.Sign(text, key)
	if err != nil {
		tb.Fatal(err)
	}
	return text + "." + base64.RawURLEncoding.EncodeToString(sig)
}

// keyText is a key set with one public key, or a single key of it.
func keyText(tb testing.TB, kid string, key crypto.Signer) (set, single string) {
	tb.Helper()
	k, err := jwkset.NewJWKFromKey(key.Public(), jwkset.JWKOptions{Metadata: jwkset.JWKMetadataOptions{KID: kid}})
	if err != nil {
		tb.Fatal(err)
	}
	text, err := json.Marshal(k.Marshal())
	if err != nil {
		tb.Fatal(err)
	}
	return `{"keys":[` + string(text) + `]}`, string(text)
}

func newRSAKey(tb testing.TB) *rsa.PrivateKey {
	tb.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		tb.Fatal(err)
	}
	return key
}

// serveKeys is a server that says text and counts who asks.
func serveKeys(tb testing.TB, text string) (url string, asked *atomic.Int64) {
	tb.Helper()
	asked = new(atomic.Int64)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		_, _ = w.Write([]byte(text))
	}))
	tb.Cleanup(s.Close)
	return s.URL, asked
}

// forgery is a token that must not be taken.
type forgery struct{ name, token, code string }

// A hub that knows public keys takes no token that was not signed with one of them, for it, by its
// issuer and now, whatever header and payload say. Each refusal is exact, counts, and gives nothing
// away.
func TestForgedTokens(t *testing.T) {
	key, eves := newRSAKey(t), newRSAKey(t)
	set, single := keyText(t, "one", key)
	evesSet, evesKey := keyText(t, "one", eves)
	url, _ := serveKeys(t, set)
	evesURL, askedEve := serveKeys(t, evesSet)
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	public := pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})

	claims := func(more string) string {
		return fmt.Sprintf(`{"sub":"eve-the-subject","aud":"hub","iss":"us","exp":%d,"scopes":["*:**"]%s}`, time.Now().Add(time.Hour).Unix(), more)
	}
	with := func(name, value string) string {
		var all map[string]json.RawMessage
		if err := json.Unmarshal([]byte(claims("")), &all); err != nil {
			t.Fatal(err)
		}
		all[name] = json.RawMessage(value)
		if value == "" {
			delete(all, name)
		}
		text, err := json.Marshal(all)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	rs, hs := jwt.SigningMethodRS256, jwt.SigningMethodHS256
	const header, hsHeader = `{"alg":"RS256","kid":"one"}`, `{"alg":"HS256","kid":"one"}`
	valid := func(payload string) string { return forge(t, header, payload, rs, key) }
	byEve := func(header string) string { return forge(t, header, claims(""), rs, eves) }
	at := func(d time.Duration) string { return strconv.FormatInt(time.Now().Add(d).Unix(), 10) }
	good := valid(claims(""))
	parts := strings.Split(good, ".")

	friend := valid(with("sub", `"a-friend"`)) // whom the log may name
	runForgeries(t, acl.Config{JWKSURL: url, Audience: "hub", Issuer: "us"}, friend, []forgery{
		{"none", "", "no_token"},
		{"no JWT", "a-static-token-that-is-wrong", "bad_token"},
		{"expired", valid(with("exp", at(-time.Minute))), "jwt_invalid"},
		{"without an end", valid(with("exp", "")), "jwt_invalid"},
		{"not yet valid", valid(with("nbf", at(time.Minute))), "jwt_invalid"},
		{"issued in the future", valid(with("iat", at(time.Minute))), "jwt_invalid"},
		{"wrong audience", valid(with("aud", `["other","hub "]`)), "jwt_invalid"},
		{"no audience", valid(with("aud", "")), "jwt_invalid"},
		{"wrong issuer", valid(with("iss", `"them"`)), "jwt_invalid"},
		{"no issuer", valid(with("iss", "")), "jwt_invalid"},
		{"alg none", forge(t, `{"alg":"none","kid":"one"}`, claims(""), nil, nil), "jwt_invalid"},
		{"alg none with the signature of another", forge(t, `{"alg":"none","kid":"one"}`, claims(""), nil, nil) + parts[2], "jwt_invalid"},
		{"alg nOnE", forge(t, `{"alg":"nOnE"}`, claims(""), nil, nil), "jwt_invalid"},
		{"no alg", forge(t, `{"kid":"one"}`, claims(""), rs, key), "jwt_invalid"},
		{"alg twice", forge(t, `{"alg":"RS256","alg":"none","kid":"one"}`, claims(""), nil, nil), "jwt_invalid"},
		{"the public key as secret, PEM", forge(t, hsHeader, claims(""), hs, public), "jwt_invalid"},
		{"the public key as secret, trimmed", forge(t, hsHeader, claims(""), hs, bytes.TrimSpace(public)), "jwt_invalid"},
		{"the public key as secret, DER", forge(t, hsHeader, claims(""), hs, der), "jwt_invalid"},
		{"the public key as secret, modulus", forge(t, hsHeader, claims(""), hs, key.N.Bytes()), "jwt_invalid"},
		{"the public key as secret, JWK", forge(t, hsHeader, claims(""), hs, []byte(single)), "jwt_invalid"},
		{"the key set as secret", forge(t, hsHeader, claims(""), hs, []byte(set)), "jwt_invalid"},
		{"an empty secret", forge(t, `{"alg":"HS256"}`, claims(""), hs, []byte{}), "jwt_invalid"},
		{"another's key under the same name", byEve(header), "jwt_invalid"},
		{"another's key without a name", byEve(`{"alg":"RS256"}`), "jwt_invalid"},
		{"the payload of another", parts[0] + "." + strings.Split(valid(with("sub", `"root"`)), ".")[1] + "." + parts[2], "jwt_invalid"},
		{"kid of a path", forge(t, `{"alg":"HS256","kid":"../../../../../../dev/null"}`, claims(""), hs, []byte{}), "jwt_invalid"},
		{"kid of SQL", forge(t, `{"alg":"HS256","kid":"x' UNION SELECT 'secret-of-eve"}`, claims(""), hs, []byte("secret-of-eve")), "jwt_invalid"},
		{"kid of a URL", byEve(`{"alg":"RS256","kid":"` + evesURL + `"}`), "jwt_invalid"},
		{"kid with a line break", byEve(`{"alg":"RS256","kid":"one\nlevel=ERROR msg=forged"}`), "jwt_invalid"},
		{"kid that is no string", byEve(`{"alg":"RS256","kid":["one"]}`), "jwt_invalid"},
		{"kid that is empty", byEve(`{"alg":"RS256","kid":""}`), "jwt_invalid"},
		{"jku", byEve(`{"alg":"RS256","kid":"one","jku":"` + evesURL + `"}`), "jwt_invalid"},
		{"jku and its kid", byEve(`{"alg":"RS256","kid":"eves","jku":"` + evesURL + `"}`), "jwt_invalid"},
		{"x5u", byEve(`{"alg":"RS256","kid":"one","x5u":"` + evesURL + `"}`), "jwt_invalid"},
		{"jwk", byEve(`{"alg":"RS256","kid":"one","jwk":` + evesKey + `}`), "jwt_invalid"},
		{"jwk of a secret", forge(t, `{"alg":"HS256","jwk":{"kty":"oct","k":"AAAA"}}`, claims(""), hs, []byte{0, 0, 0}), "jwt_invalid"},
		{"x5c", byEve(`{"alg":"RS256","kid":"one","x5c":["` + base64.StdEncoding.EncodeToString(der) + `"]}`), "jwt_invalid"},
		{"crit", forge(t, `{"alg":"RS256","kid":"one","crit":["b64"],"b64":false}`, claims(""), rs, key), "jwt_invalid"},
		{"exp twice", valid(claims(`,"exp":1`)), "jwt_invalid"},
		{"scopes twice", valid(claims(`,"scopes":["publish:a"]`)), "jwt_invalid"},
		{"sub twice", valid(claims(`,"sub":"root"`)), "jwt_invalid"},
		{"scopes that are malformed", valid(with("scopes", `["publish:a","**"]`)), "jwt_invalid"},
		{"a policy that is malformed", valid(with("policy", `{"rules":[{"effect":"permit","action":"*","topics":["**"]}]}`)), "jwt_invalid"},
		{"oversize", valid(with("padding", `"`+strings.Repeat("x", acl.MaxTokenBytes)+`"`)), "jwt_invalid"},
		{"cut off", good[:len(good)-4], "jwt_invalid"},
		{"four parts", good + ".AAAA", "bad_token"},
	})
	if n := askedEve.Load(); n > 0 {
		t.Errorf("the hub asked a server that a token named %d times", n)
	}
}

// The same for a hub that knows a secret: what is signed with keys is no more to it than what is
// not signed.
func TestForgedTokensOfASecret(t *testing.T) {
	eves := newRSAKey(t)
	_, evesKey := keyText(t, "one", eves)
	claims := fmt.Sprintf(`{"sub":"eve-the-subject","aud":"hub","iss":"us","exp":%d,"scopes":["*:**"]}`, time.Now().Add(time.Hour).Unix())
	hs := jwt.SigningMethodHS256
	friend := forge(t, `{"alg":"HS256"}`, strings.Replace(claims, "eve-the-subject", "a-friend", 1), hs, jwtSecret)
	runForgeries(t, acl.Config{Secret: jwtSecret, Audience: "hub", Issuer: "us"}, friend, []forgery{
		{"alg none", forge(t, `{"alg":"none"}`, claims, nil, nil), "jwt_invalid"},
		{"RS256", forge(t, `{"alg":"RS256"}`, claims, jwt.SigningMethodRS256, eves), "jwt_invalid"},
		{"RS256 with its key", forge(t, `{"alg":"RS256","jwk":`+evesKey+`}`, claims, jwt.SigningMethodRS256, eves), "jwt_invalid"},
		{"HS384 with the secret", forge(t, `{"alg":"HS384"}`, claims, jwt.SigningMethodHS384, jwtSecret), "jwt_invalid"},
		{"an empty secret", forge(t, `{"alg":"HS256","kid":"/dev/null"}`, claims, hs, []byte{}), "jwt_invalid"},
		{"the secret and more", forge(t, `{"alg":"HS256"}`, claims, hs, append(bytes.Clone(jwtSecret), 'x')), "jwt_invalid"},
		{"the secret, cut", forge(t, `{"alg":"HS256"}`, claims, hs, jwtSecret[:32]), "jwt_invalid"},
		{"the secret itself", string(jwtSecret), "bad_token"},
	})
}

// runForgeries tries each token over WebSocket and HTTP at a hub that is configured so. good is one
// that is taken.
func runForgeries(t *testing.T, cfg acl.Config, good string, forgeries []forgery) {
	t.Helper()
	cfg.Static = []acl.StaticToken{{Token: rigToken}}
	v, err := acl.NewVerifier(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(v.Close)
	var w witness
	r := newRig(t, func(cfg *facade.Config) {
		w.listen(cfg)
		cfg.Auth, cfg.Limits.AuthTries = facade.Tokens(v), 1
	})
	const publish = `{"op":"PUBLISH","topic":"t","payload":"` + payloadMark + `","corr":"p"}`
	if got := r.as(t, good).outcome(`{"op":"PUBLISH","topic":"t","payload":"the good one"}`); got != "OK" {
		t.Fatalf("the good token: %s", got)
	}
	secrets := []string{good, payloadMark, "eve-the-subject", string(jwtSecret)}
	for _, f := range forgeries {
		t.Run(f.name, func(t *testing.T) {
			p := r.dial(t)
			auth := `{"op":"AUTH","token":"` + f.token + `","corr":"a"}`
			if got := p.asked(&w, auth); got.Op != "ERR" || got.Code != f.code || got.Corr != "a" || got.Msg == "" {
				t.Fatalf("AUTH: %+v, want %s", got, f.code)
			}
			for _, frame := range []string{
				publish, `{"op":"SUBSCRIBE","topic":"t","group":"g","corr":"p"}`, `{"op":"ACK","topic":"t","group":"g","id":"x","corr":"p"}`,
			} {
				p.send(frame)
				p.want(`{"op":"ERR","code":"unauthorized","msg":"Call AUTH first.","corr":"p"}`)
			}
			// One more, and it may not try again.
			if got := p.asked(&w, auth); got.Code != f.code {
				t.Fatalf("AUTH again: %+v", got)
			}
			p.wantClose(4103)
			r.wantClosed(t, 4103)

			for _, kind := range []string{"application/json", "application/x-ndjson"} {
				got := r.post(t, "/publish/t", `{"payload":"`+payloadMark+`"}`, "Authorization", "Bearer "+f.token, "Content-Type", kind)
				w.hear(got.text)
				if got.status != http.StatusUnauthorized || got.Code != f.code {
					t.Errorf("over HTTP as %s: %d %s, want %s", kind, got.status, got.text, f.code)
				}
			}
		})
		secrets = append(secrets, f.token)
	}
	if n := len(r.stored(t, "t")); n != 1 {
		t.Errorf("%d events are stored, want the good one", n)
	}
	if res, err := http.Get(r.ws.URL + "?token=" + good); err == nil { // no upgrade: this is logged
		_ = res.Body.Close()
	}
	w.mustNotKnow(t, secrets...)
}

// Whoever does not authenticate in time is closed, busy or not, and what comes afterwards has no
// effect.
func TestAuthThatComesLate(t *testing.T) {
	t.Parallel()
	const limit = 400 * time.Millisecond
	var w witness
	r := newRig(t, func(cfg *facade.Config) {
		w.listen(cfg)
		cfg.Limits.AuthTimeout, cfg.Limits.AuthTries = limit, 1_000_000
	})
	for name, frame := range map[string]string{
		"silent":         "",
		"other frames":   `{"op":"PUBLISH","topic":"late","payload":"` + payloadMark + `"}`,
		"no JSON":        `{"op":`,
		"refused tokens": `{"op":"AUTH","token":"a-token-that-is-wrong"}`,
	} {
		t.Run(name, func(t *testing.T) {
			begun := time.Now()
			p := r.dial(t)
			if frame != "" {
				keepSending(t, p, frame)
			}
			p.wantClose(4002)
			r.wantClosed(t, 4002)
			if took := time.Since(begun); took < limit {
				t.Errorf("closed after %v", took)
			}
			ctx, cancel := context.WithTimeout(t.Context(), rigPatience)
			defer cancel()
			if p.conn.Write(ctx, websocket.MessageText, []byte(`{"op":"AUTH","token":"`+rigToken+`"}`)) == nil {
				if _, b, err := p.conn.Read(ctx); err == nil {
					t.Errorf("answered with %s", b)
				}
			}
		})
	}
	// A token that was taken and then replaced by a bad one starts the time anew.
	p := r.login(t)
	if got := p.asked(&w, `{"op":"AUTH","token":"a-token-that-is-wrong"}`); got.Code != "bad_token" {
		t.Fatal(got)
	}
	p.wantClose(4002)
	if n := r.seen.count("opened"); n != 5 {
		t.Errorf("%d connections", n)
	}
}

// keepSending sends a frame every few milliseconds until the connection ends or the test does.
func keepSending(t *testing.T, p *peer, frame string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	wg.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			if p.conn.Write(ctx, websocket.MessageText, []byte(frame)) != nil {
				return
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	})
}

// Topics are names. No policy, however wide, lets a pattern of ours or of NATS pass for one, in any
// place where a topic can be; and what JSON allows in a frame does not make the policy see another
// topic than the bus.
func TestTopicsThatAreNone(t *testing.T) {
	t.Parallel()
	var w witness
	r := jwtRig(t, w.listen)
	all, some := r.as(t, grant(t, "all", "*:**")), r.as(t, grant(t, "some", "*:a.**"))
	for _, topic := range []string{
		"*", "**", "a.**", "a.*", "*.a", "a.*.b", ">", "a.>", ".", ".a", "a.", "a..b", "a b", "a/b", `a.\u002a`, `a.\u003e`, `a.\u0000`,
		"$SYS.REQ.SERVER.PING", "$JS.API.STREAM.LIST", "$KV.a", "a.\\r\\nPUB b 1", "ä", "a\\\\b", `\uff0a`, strings.Repeat("a.", 126) + "a",
	} {
		for who, p := range map[string]*peer{"all": all, "some": some} {
			for _, frame := range []string{
				`{"op":"PUBLISH","topic":"` + topic + `","payload":"` + payloadMark + `"}`,
				`{"op":"SUBSCRIBE","topic":"` + topic + `","group":"g"}`,
				`{"op":"SUBSCRIBE","topic":"a.b","group":"g","opts":{"topics":["a.c","` + topic + `"]}}`,
			} {
				if got := p.asked(&w, frame); got.Op != "ERR" || got.Code != "bad_topic" {
					t.Errorf("%s, %s: %+v", who, frame, got)
				}
			}
		}
	}
	for _, path := range []string{"*", "**", "a.**", "a.%2A", "%3E", "a.%3E", "a..b", "a%00", "a%2Fb"} {
		got := r.post(t, "/publish/"+path, `"`+payloadMark+`"`, "Authorization", "Bearer "+grant(t, "all", "*:**"))
		w.hear(got.text)
		if got.status != http.StatusBadRequest || got.Code != "bad_topic" {
			t.Errorf("/publish/%s: %d %s", path, got.status, got.text)
		}
	}

	// Two topics in one frame, and two spellings of one.
	for frame, want := range map[string][]string{
		`{"op":"PUBLISH","topic":"a.ok","topic":"secret","payload":1}`:               {"forbidden", "bad_frame", "bad_json"},
		`{"op":"PUBLISH","topic":"secret","topic":"a.ok","payload":1}`:               {"forbidden", "bad_frame", "bad_json", ""},
		`{"op":"PUBLISH","topic":"a.ok","Topic":"secret","TOPIC":"secret"}`:          {""},
		`{"op":"PUBLISH","\u0074opic":"secret"}`:                                     {"forbidden"},
		`{"op":"PUBLISH","topic":"s\u0065cret"}`:                                     {"forbidden"},
		`{"op":"PUBLISH","topic":"a.ok","opts":{"topic":"secret","topics":["b"]}}`:   {"", "bad_options"},
		`{"op":"SUBSCRIBE","topic":"a.ok","group":"g","opts":{"topics":["secret"]}}`: {"forbidden"},
		`{"op":"SUBSCRIBE","topic":"secret","group":"g","opts":{"topics":["a.ok"]}}`: {"forbidden"},
	} {
		got := some.asked(&w, frame)
		found := false
		for _, code := range want {
			found = found || got.Code == code
		}
		if !found {
			t.Errorf("%s: %+v, want one of %q", frame, got, want)
		}
	}
	if got := r.as(t, rigToken).outcome(`{"op":"PUBLISH","topic":"secret","payload":"known"}`); got != "OK" {
		t.Fatal(got)
	}
	if events := r.stored(t, "secret"); len(events) != 1 || string(events[0].Payload) != `"known"` {
		t.Errorf("%d events got to where they must not", len(events))
	}
	w.mustNotKnow(t, payloadMark)
}

// A second AUTH with fewer rights takes effect with the frame that follows it. What it ends goes to
// others at once, however long the leases are, and cannot be settled any more by who held it.
func TestLesserRightsInTheMiddle(t *testing.T) {
	t.Parallel()
	var w witness
	r := jwtRig(t, w.listen)
	p := r.as(t, grant(t, "p", "*:**"))
	long := `"opts":{"ackTimeoutMs":43200000,"maxAttempts":0}`
	for _, frame := range []string{
		`{"op":"SUBSCRIBE","topic":"kept","group":"g",` + long + `}`,
		`{"op":"SUBSCRIBE","topic":"lost","group":"g",` + long + `}`,
	} {
		if got := p.outcome(frame); got != "OK" {
			t.Fatal(frame, got)
		}
	}
	r.post(t, "/publish/lost", `"lost"`)
	lost := p.next("EVENT", "").Event.ID
	r.post(t, "/publish/kept", `"kept"`)
	kept := p.next("EVENT", "").Event.ID

	fewer := grant(t, "p", "subscribe:kept")
	for _, frame := range []string{
		`{"op":"AUTH","token":"` + fewer + `","corr":1}`,
		`{"op":"ACK","topic":"lost","group":"g","id":"` + lost + `","corr":2}`,
		`{"op":"PUBLISH","topic":"lost","payload":"` + payloadMark + `","corr":3}`,
		`{"op":"SUBSCRIBE","topic":"lost","group":"h","corr":4}`,
		`{"op":"MODACK","topic":"kept","group":"g","id":"` + kept + `","corr":5}`,
		`{"op":"ACK","topic":"kept","group":"g","id":"` + kept + `","corr":6}`,
	} {
		p.send(frame)
	}
	for _, want := range []struct{ op, code string }{
		{"ERR", "forbidden"}, {"OK", ""}, {"ERR", "not_subscribed"}, {"ERR", "forbidden"}, {"ERR", "forbidden"}, {"OK", ""}, {"OK", ""},
	} {
		text := p.read()
		w.hear(text)
		if got := parseReply(t, text); got.Op != want.op || got.Code != want.code {
			t.Fatalf("%s, want %v", text, want)
		}
	}
	q := r.login(t)
	if got := q.outcome(`{"op":"SUBSCRIBE","topic":"lost","group":"g"}`); got != "OK" {
		t.Fatal(got)
	}
	begun := time.Now()
	if got := q.next("EVENT", ""); got.Event.ID != lost || got.Ctx.Attempt != 2 {
		t.Fatal(got)
	}
	t.Logf("the lease went to another after %v", time.Since(begun))
	if n := len(r.stored(t, "lost")); n != 1 {
		t.Errorf("%d events are stored", n)
	}
	w.mustNotKnow(t, fewer, payloadMark)
}

func parseReply(t *testing.T, text string) (got reply) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), &got); err != nil {
		t.Fatalf("%.300s: %v", text, err)
	}
	return got
}
