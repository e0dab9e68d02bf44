package acl_test

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"eventhub/acl"
)

var secret = []byte("0123456789abcdef0123456789abcdef")

func newVerifier(tb testing.TB, cfg acl.Config) *acl.Verifier {
	tb.Helper()
	v, err := acl.NewVerifier(tb.Context(), cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(v.Close)
	return v
}

// refused wants a token to be refused, by an error that shows nothing of it.
func refused(t *testing.T, v *acl.Verifier, token string, reason acl.Reason, msg string) {
	t.Helper()
	id, err := v.Verify(t.Context(), token)
	e, ok := errors.AsType[*acl.Error](err)
	if !ok || id != nil {
		t.Errorf("%v, %v: want an *acl.Error", id, err)
		return
	}
	if e.Reason != reason || !strings.Contains(e.Msg, msg) {
		t.Errorf("%v, want %s: …%s…", e, reason, msg)
	}
	for part := range strings.SplitSeq(token, ".") {
		if len(part) > 8 && strings.Contains(err.Error(), part) {
			t.Errorf("the error shows the token: %v", err)
		}
	}
	if errors.Unwrap(err) != nil {
		t.Errorf("the error wraps another, which may show the token")
	}
}

// encode makes a token of raw JSON, signed as method says.
func encode(tb testing.TB, header, payload string, method jwt.SigningMethod, key any) string {
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

const hs256 = `{"alg":"HS256","typ":"JWT"}`

func in(d time.Duration) int64 { return time.Now().Add(d).Unix() }

func TestJWTCarriesNameRightsAndExpiry(t *testing.T) {
	v := newVerifier(t, acl.Config{Secret: secret, Audience: "hub", Issuer: "me"})
	exp := in(time.Hour)
	for name, c := range map[string]struct {
		claims               string
		publish, subscribe   bool
		groupless, unrelated bool
	}{
		"scopes":              {`"scopes":["publish:heartbeat.*","subscribe:process.**"]`, true, true, true, false},
		"policy":              {`"policy":{"rules":[{"effect":"allow","action":"subscribe","topics":["process.**"],"groups":["*"]}]}`, false, true, false, false},
		"policy wins":         {`"scopes":["*:**"],"policy":{"rules":[]}`, false, false, false, false},
		"nothing":             {`"other":1`, false, false, false, false},
		"null":                {`"scopes":null,"policy":null`, false, false, false, false},
		"null policy":         {`"policy":null,"scopes":["publish:**"]`, true, false, false, true},
		"empty scopes":        {`"scopes":[]`, false, false, false, false},
		"OAuth's scope":       {`"scope":"publish:** subscribe:**"`, false, false, false, false},
		"scope of other case": {`"Scopes":["*:**"],"POLICY":{"rules":[]}`, false, false, false, false},
		"null not before":     {`"nbf":null,"iat":null,"scopes":["*:**"]`, true, true, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			token := encode(t, hs256, fmt.Sprintf(`{"sub":"me","aud":["x","hub"],"iss":"me","exp":%d,%s}`, exp, c.claims), jwt.SigningMethodHS256, secret)
			id, err := v.Verify(t.Context(), token)
			if err != nil {
				t.Fatal(err)
			}
			if id.Name() != "me" || id.Kind() != acl.KindJWT || id.Key() != "jwt:me" || !id.Expires().Equal(time.Unix(exp, 0).Add(acl.Leeway)) {
				t.Errorf("%s %s %s", id.Key(), id.Kind(), id.Expires())
			}
			got := []bool{
				id.Allows(acl.Publish, "heartbeat.received", ""), id.Allows(acl.Subscribe, "process.state", "g"),
				id.Allows(acl.Subscribe, "process.state", ""), id.Allows(acl.Publish, "other", ""),
			}
			if want := []bool{c.publish, c.subscribe, c.groupless, c.unrelated}; !slices.Equal(got, want) {
				t.Errorf("%v, want %v", got, want)
			}
			if d := id.Policy().Decide(acl.Publish, "heartbeat.received", ""); d.Allowed != c.publish {
				t.Error(d)
			}
		})
	}
}

func TestAttacksAreRefused(t *testing.T) {
	private, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKIXPublicKey(private.Public())
	if err != nil {
		t.Fatal(err)
	}
	public := pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
	payload := func(more string) string { return fmt.Sprintf(`{"sub":"eve","exp":%d%s}`, in(time.Hour), more) }
	sign := func(payload string) string { return encode(t, hs256, payload, jwt.SigningMethodHS256, secret) }
	good := sign(payload(""))
	parts := strings.Split(good, ".")
	v := newVerifier(t, acl.Config{Secret: secret, Logger: nil})
	if _, err := v.Verify(t.Context(), good); err != nil {
		t.Fatal(err)
	}
	bigPolicy := string(policyOf(slices.Repeat([]string{ruleOf("allow", "publish", "a")}, 10_001)...))
	for name, c := range map[string]struct{ token, msg string }{
		"alg none":                     {encode(t, `{"alg":"none"}`, payload(""), nil, nil), "signed"},
		"alg none with a signature":    {encode(t, `{"alg":"none"}`, payload(""), jwt.SigningMethodHS256, secret), "signed"},
		"alg None":                     {encode(t, `{"alg":"None"}`, payload(""), nil, nil), "signed"},
		"no alg":                       {encode(t, `{}`, payload(""), jwt.SigningMethodHS256, secret), "signed"},
		"alg no string":                {encode(t, `{"alg":["HS256"]}`, payload(""), jwt.SigningMethodHS256, secret), "signed"},
		"another HMAC":                 {encode(t, `{"alg":"HS512"}`, payload(""), jwt.SigningMethodHS512, secret), "signed"},
		"RS256 with a secret":          {encode(t, `{"alg":"RS256"}`, payload(""), jwt.SigningMethodRS256, private), "signed"},
		"a public key as secret":       {encode(t, hs256, payload(""), jwt.SigningMethodHS256, public), "signed"},
		"an empty secret":              {encode(t, hs256, payload(""), jwt.SigningMethodHS256, []byte{}), "signed"},
		"another secret":               {encode(t, hs256, payload(""), jwt.SigningMethodHS256, append(secret, 1)), "signed"},
		"no signature":                 {parts[0] + "." + parts[1] + ".", "signed"},
		"a signature cut off":          {good[:len(good)-2], "form"},
		"the payload of another token": {parts[0] + "." + strings.Split(sign(payload(`,"scopes":["*:**"]`)), ".")[1] + "." + parts[2], "signed"},
		"jwk in the header":            {encode(t, `{"alg":"HS256","jwk":{"kty":"oct","k":"AAAA"}}`, payload(""), jwt.SigningMethodHS256, []byte{0, 0, 0}), "signed"},
		"kid as a path":                {encode(t, `{"alg":"HS256","kid":"../../dev/null"}`, payload(""), jwt.SigningMethodHS256, []byte{}), "signed"},
		"crit":                         {encode(t, `{"alg":"HS256","crit":["b64"],"b64":false}`, payload(""), jwt.SigningMethodHS256, secret), "signed"},
		"expired":                      {sign(fmt.Sprintf(`{"exp":%d}`, in(-6*time.Second))), "expired"},
		"expired and for others":       {sign(fmt.Sprintf(`{"exp":%d,"nbf":%d}`, in(-6*time.Second), in(time.Hour))), "expired"},
		"no exp":                       {sign(`{"sub":"eve"}`), "exp"},
		"null exp":                     {sign(`{"exp":null}`), "exp"},
		"exp as text":                  {sign(fmt.Sprintf(`{"exp":"%d"}`, in(time.Hour))), "form"},
		"exp of another case":          {sign(fmt.Sprintf(`{"Exp":%d}`, in(time.Hour))), "exp"},
		"exp beyond all dates":         {sign(`{"exp":1e300}`), "form"},
		"negative exp":                 {sign(`{"exp":-1}`), "form"},
		"exp twice":                    {sign(fmt.Sprintf(`{"exp":1,"exp":%d}`, in(time.Hour))), "form"},
		"not yet valid":                {sign(payload(fmt.Sprintf(`,"nbf":%d`, in(10*time.Second)))), "not valid yet"},
		"issued in the future":         {sign(payload(fmt.Sprintf(`,"iat":%d`, in(10*time.Second)))), "issued"},
		"null payload":                 {sign(`null`), "exp"},
		"payload no object":            {sign(`[]`), "form"},
		"payload no JSON":              {sign(`{`), "form"},
		"two payloads":                 {sign(payload("") + payload("")), "form"},
		"header no JSON":               {encode(t, `{`, payload(""), jwt.SigningMethodHS256, secret), "form"},
		"padding":                      {good + "=", "form"},
		"a fourth part":                {good + ".a", "form"},
		"two parts":                    {parts[0] + "." + parts[1], "form"},
		"no JWT":                       {"token", "form"},
		"blanks around":                {" " + good, "form"},
		"oversize":                     {strings.Repeat("a", acl.MaxTokenBytes+1), "16384 bytes"},
		"a name with a line break":     {sign(payload(`,"sub2":1`)[:len(payload(""))-1] + `,"iss":7}`), "form"},
		"a name that breaks lines":     {sign(fmt.Sprintf(`{"sub":"a\nb","exp":%d}`, in(time.Hour))), "form"},
		"a jti that is a number":       {sign(payload(`,"jti":7`)), "The claim jti of the token has a value of the wrong form."},
		"a name without end":           {sign(fmt.Sprintf(`{"sub":"%s","exp":%d}`, strings.Repeat("a", 257), in(time.Hour))), "form"},
		"scopes no array":              {sign(payload(`,"scopes":"publish:**"`)), "rights are malformed: scopes is not an array of strings"},
		"scopes no strings":            {sign(payload(`,"scopes":["publish:a",1]`)), "scopes is not an array of strings"},
		"a scope without a pattern":    {sign(payload(`,"scopes":["publish:a","publish"]`)), "scope 2: there is no colon"},
		"a scope with an empty one":    {sign(payload(`,"scopes":["publish:"]`)), "scope 1: the pattern after the colon: it is empty"},
		"a policy that is malformed":   {sign(payload(`,"policy":{"rules":[{"effect":"allow","action":"publish","topics":[]}]},"scopes":["*:**"]`)), "policy: rule 1: topics is empty"},
		"a policy of too many rules":   {sign(payload(`,"policy":` + bigPolicy)), "16384 bytes"},
		"policy twice":                 {sign(payload(`,"policy":{"rules":[]},"policy":` + string(policyOf(ruleOf("allow", "*", "**"))))), "form"},
		"rules twice":                  {sign(payload(`,"policy":{"rules":[],"rules":` + `[` + ruleOf("allow", "*", "**") + `]}`)), "it has a field twice"},
		"effect twice":                 {sign(payload(`,"policy":{"rules":[{"effect":"deny","effect":"allow","action":"*","topics":["**"]}]}`)), "rule 1: it has a field twice"},
	} {
		t.Run(name, func(t *testing.T) {
			reason := acl.InvalidJWT
			if c.msg == "expired" {
				reason = acl.Expired
			}
			refused(t, v, c.token, reason, c.msg)
		})
	}
	refused(t, v, "", acl.NoToken, "required")

	t.Run("audience and issuer", func(t *testing.T) {
		v := newVerifier(t, acl.Config{Secret: secret, Audience: "hub", Issuer: "me"})
		for _, c := range []struct{ claims, msg string }{
			{`,"aud":"other","iss":"me"`, "audience"},
			{`,"aud":["Hub","hub2"],"iss":"me"`, "audience"},
			{`,"aud":[],"iss":"me"`, "aud"},
			{`,"iss":"me"`, "aud"},
			{`,"aud":"hub","iss":"other"`, "issuer"},
			{`,"aud":"hub"`, "iss"},
			{`,"aud":{"hub":1},"iss":"me"`, "form"},
			{`,"aud":[1,"hub"],"iss":"me"`, "form"},
		} {
			refused(t, v, sign(payload(c.claims)), acl.InvalidJWT, c.msg)
		}
		// What is wrong for good is said before what was right once.
		refused(t, v, sign(fmt.Sprintf(`{"exp":%d,"aud":"other","iss":"me"}`, in(-time.Hour))), acl.InvalidJWT, "audience")
	})
}

func TestLeewayIsFiveSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := newVerifier(t, acl.Config{Secret: secret})
		token := func(exp, nbf time.Duration) string {
			return encode(t, hs256, fmt.Sprintf(`{"exp":%d,"nbf":%d}`, in(exp), in(nbf)), jwt.SigningMethodHS256, secret)
		}
		for _, c := range []struct {
			exp, nbf time.Duration
			ok       bool
		}{
			{-4 * time.Second, -time.Hour, true},
			{-5 * time.Second, -time.Hour, false},
			{time.Hour, 5 * time.Second, true},
			{time.Hour, 6 * time.Second, false},
		} {
			id, err := v.Verify(t.Context(), token(c.exp, c.nbf))
			if (err == nil) != c.ok {
				t.Errorf("exp %v, nbf %v: %v", c.exp, c.nbf, err)
			}
			if err == nil && !id.Expires().After(time.Now()) {
				t.Error("it is taken, and has ended already")
			}
		}
	})
}

func TestStaticTokens(t *testing.T) {
	limited, err := acl.ParseScopes([]string{"subscribe:process.**"})
	if err != nil {
		t.Fatal(err)
	}
	jwtOf := func(key []byte) string {
		return encode(t, hs256, fmt.Sprintf(`{"sub":"static","exp":%d}`, in(time.Hour)), jwt.SigningMethodHS256, key)
	}
	static := []acl.StaticToken{{Token: "dev-token"}, {Name: "dash", Token: "a.b.c", Policy: limited}}
	v := newVerifier(t, acl.Config{Static: static})
	both := newVerifier(t, acl.Config{Static: static, Secret: secret})
	for _, v := range []*acl.Verifier{v, both} {
		full, err := v.Verify(t.Context(), "dev-token")
		if err != nil {
			t.Fatal(err)
		}
		if full.Key() != "static:static" || !full.Expires().IsZero() || !full.Allows(acl.Admin, "a", "") || !full.Allows(acl.Publish, "a", "") || !full.Unlimited() {
			t.Errorf("%+v", full)
		}
		dash, err := v.Verify(t.Context(), "a.b.c") // it looks like a JWT, and is none
		if err != nil {
			t.Fatal(err)
		}
		if dash.Name() != "dash" || dash.Allows(acl.Publish, "process.state", "") || !dash.Allows(acl.Subscribe, "process.state", "g") || dash.Unlimited() {
			t.Errorf("%+v", dash)
		}
		refused(t, v, "", acl.NoToken, "required")
		for _, token := range []string{"dev-toke", "dev-token ", "Dev-token", "a.b", "a.b.c.d", "x"} {
			refused(t, v, token, acl.BadToken, "not valid")
		}
	}
	refused(t, v, jwtOf(secret), acl.BadToken, "not valid")
	refused(t, v, strings.Repeat("a", acl.MaxTokenBytes+1), acl.BadToken, "bytes")
	refused(t, both, jwtOf(append(secret, 1)), acl.InvalidJWT, "signed")
	refused(t, both, "a.b.d", acl.InvalidJWT, "form")
	id, err := both.Verify(t.Context(), jwtOf(secret))
	if err != nil {
		t.Fatal(err)
	}
	if id.Key() != "jwt:static" {
		t.Errorf("a JWT can pass for a static token: %s", id.Key())
	}
}

func TestConfigIsChecked(t *testing.T) {
	for want, cfg := range map[string]acl.Config{
		"no token would be accepted":                     {},
		"choose one":                                     {Secret: secret, JWKSURL: "https://localhost/"},
		"without a way to verify JWTs":                   {Static: []acl.StaticToken{{Token: "t"}}, Audience: "hub"},
		"openssl rand -hex 32":                           {Secret: secret[:31]},
		"JWT secret has 0 bytes":                         {Secret: []byte{}},
		"JWT secret has 5000 bytes":                      {Secret: make([]byte, 5000)},
		"JWKS intervals must":                            {JWKSURL: "https://localhost/", FetchInterval: -1},
		"invalid JWKS URL":                               {JWKSURL: "localhost/keys"},
		"use https://HOST/PATH":                          {JWKSURL: "file:///etc/passwd"},
		"static token 1: it is empty":                    {Static: []acl.StaticToken{{}}},
		"static token 2: it is a duplicate":              {Static: []acl.StaticToken{{Token: "t"}, {Token: "t"}}},
		"static token 1: it has surrounding spaces":      {Static: []acl.StaticToken{{Token: "t\n"}}},
		"static token 1: it has 5000":                    {Static: []acl.StaticToken{{Token: strings.Repeat("t", 5000)}}},
		"static token 1: name has":                       {Static: []acl.StaticToken{{Token: "t", Name: "a\n"}}},
		"tokens: 101 static tokens; at most 100 are all": {Static: make([]acl.StaticToken, 101)},
	} {
		v, err := acl.NewVerifier(t.Context(), cfg)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
		if v != nil {
			v.Close()
		}
		if err != nil && (strings.Contains(err.Error(), string(secret[:31])) || strings.Contains(err.Error(), "passwd")) {
			t.Errorf("the error shows the configuration: %v", err)
		}
	}
}

func TestSecretIsCopied(t *testing.T) {
	mine := slices.Clone(secret)
	v := newVerifier(t, acl.Config{Secret: mine})
	clear(mine)
	token := encode(t, hs256, fmt.Sprintf(`{"exp":%d}`, in(time.Hour)), jwt.SigningMethodHS256, secret)
	if _, err := v.Verify(t.Context(), token); err != nil {
		t.Error(err)
	}
}

func TestVerifyConcurrently(t *testing.T) {
	v := newVerifier(t, acl.Config{Secret: secret, Static: []acl.StaticToken{{Token: "t"}}})
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			name := fmt.Sprint("user-", i)
			token, err := acl.Sign(secret, acl.Grant{Subject: name, Scopes: []string{"publish:" + name}, TTL: time.Hour})
			if err != nil {
				t.Error(err)
				return
			}
			for range 100 {
				id, err := v.Verify(t.Context(), token)
				if err != nil || id.Name() != name || !id.Allows(acl.Publish, name, "") || id.Allows(acl.Publish, "user-x", "") {
					t.Errorf("%v %v", id, err)
					return
				}
			}
		})
	}
	wg.Wait()
}

func BenchmarkVerify(b *testing.B) {
	scopes, err := acl.Sign(secret, acl.Grant{Subject: "s", Scopes: []string{"publish:heartbeat.*", "subscribe:process.**"}, TTL: time.Hour})
	if err != nil {
		b.Fatal(err)
	}
	v := newVerifier(b, acl.Config{Secret: secret, Static: []acl.StaticToken{{Token: "static"}}})
	for _, c := range []struct{ name, token string }{{"static", "static"}, {"HS256", scopes}} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := v.Verify(context.Background(), c.token); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func FuzzVerify(f *testing.F) {
	v, err := acl.NewVerifier(context.Background(), acl.Config{Secret: secret})
	if err != nil {
		f.Fatal(err)
	}
	defer v.Close()
	f.Add(`{"sub":"a","exp":4000000000,"scopes":["publish:**"]}`)
	f.Add(`{"exp":4e9,"aud":["a"],"policy":{"rules":[]}}`)
	f.Add(`{"exp":1,"exp":4000000000}`)
	f.Add(`null`)
	f.Fuzz(func(t *testing.T, payload string) {
		id, err := v.Verify(t.Context(), encode(t, hs256, payload, jwt.SigningMethodHS256, secret))
		if err != nil {
			if _, ok := errors.AsType[*acl.Error](err); !ok {
				t.Fatal(err)
			}
			return
		}
		// What was taken says the same to a plain reader.
		var got map[string]any
		if err := json.Unmarshal([]byte(payload), &got); err != nil {
			t.Fatalf("taken, though %v", err)
		}
		if name, _ := got["sub"].(string); name != id.Name() {
			t.Fatalf("%q became %q", name, id.Name())
		}
		if exp, ok := got["exp"].(float64); !ok || id.Expires().Sub(time.UnixMilli(int64(exp*1000))) != acl.Leeway || id.Expires().Before(time.Now()) {
			t.Fatalf("%v became %v", got["exp"], id.Expires())
		}
		if got["scopes"] == nil && got["policy"] == nil && id.Policy().Len() != 0 {
			t.Fatal("rights out of nothing")
		}
	})
}

func TestConfigCheck(t *testing.T) {
	good := acl.Config{Secret: []byte(strings.Repeat("s", acl.MinSecretBytes))}
	if err := good.Validate(); err != nil || good.Logger != nil {
		t.Errorf("a good configuration: %v", err)
	}
	err := acl.Config{Static: []acl.StaticToken{{Token: " x"}}, Secret: []byte("short"), JWKSURL: "ftp://x"}.Validate()
	if err == nil {
		t.Fatal("a bad configuration passed")
	}
	for _, want := range []string{"choose one", "static token 1", "invalid JWKS URL"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
}

// TestConfiguredSnapshotTopicsAreCovered denies a topic whose snapshots have a name of their own.
func TestConfiguredSnapshotTopicsAreCovered(t *testing.T) {
	policy, err := acl.ParsePolicy(policyOf(ruleOf("deny", "subscribe", "orders"), ruleOf("allow", "subscribe", "**")))
	if err != nil {
		t.Fatal(err)
	}
	secret := []byte("0123456789abcdef0123456789abcdef")
	v, err := acl.NewVerifier(t.Context(), acl.Config{
		Static: []acl.StaticToken{{Token: "own", Policy: policy}}, Secret: secret,
		Snapshots: map[string]string{"copies.of-orders": "orders"},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close()
	signed, err := acl.Sign(secret, acl.Grant{TTL: time.Minute, Policy: policyOf(ruleOf("deny", "subscribe", "orders"), ruleOf("allow", "subscribe", "**"))})
	if err != nil {
		t.Fatal(err)
	}
	for _, token := range []string{"own", signed} {
		id, err := v.Verify(t.Context(), token)
		if err != nil {
			t.Fatal(err)
		}
		for topic, want := range map[string]bool{"copies.of-orders": false, "dlq.copies.of-orders": false, "copies.of-others": true} {
			if got := id.Allows(acl.Subscribe, topic, "g"); got != want {
				t.Errorf("%s: %v", topic, got)
			}
		}
	}
}
