package acl_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/MicahParks/jwkset"
	"github.com/golang-jwt/jwt/v5"
	"go.uber.org/goleak"

	"eventhub/acl"
)

// jwksServer is a JWKS server that can be made to fail in every way. It can die and come back on
// the same port.
type jwksServer struct {
	t       testing.TB
	address string
	server  *http.Server
	ended   chan error

	fetches atomic.Int64
	written atomic.Int64 // bytes of answers

	mu     sync.Mutex
	answer http.HandlerFunc
}

func newJWKSServer(tb testing.TB) *jwksServer {
	tb.Helper()
	s := &jwksServer{t: tb, address: "127.0.0.1:0"}
	s.start()
	tb.Cleanup(s.die)
	return s
}

func (s *jwksServer) url() string { return "http://" + s.address + "/keys?credential=hush" }

func (s *jwksServer) start() {
	s.t.Helper()
	l, err := net.Listen("tcp", s.address)
	if err != nil {
		s.t.Fatal(err)
	}
	s.address = l.Addr().String()
	s.server = &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.fetches.Add(1)
		s.mu.Lock()
		answer := s.answer
		s.mu.Unlock()
		answer(countingWriter{w, &s.written}, r)
	})}
	server, ended := s.server, make(chan error, 1)
	s.ended = ended
	go func() { ended <- server.Serve(l) }()
}

func (s *jwksServer) die() {
	if s.server != nil {
		_ = s.server.Close()
		<-s.ended
		s.server = nil
	}
}

func (s *jwksServer) serve(answer http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answer = answer
}

func (s *jwksServer) serveText(text string) {
	s.serve(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) })
}

type countingWriter struct {
	http.ResponseWriter
	n *atomic.Int64
}

func (w countingWriter) Write(p []byte) (int, error) {
	n, err := w.ResponseWriter.Write(p)
	w.n.Add(int64(n))
	return n, err
}

// jwk is the public half of a key as JSON. more overrides its members; nil removes one.
func jwk(tb testing.TB, kid string, key crypto.Signer, more map[string]any) json.RawMessage {
	tb.Helper()
	k, err := jwkset.NewJWKFromKey(key.Public(), jwkset.JWKOptions{Metadata: jwkset.JWKMetadataOptions{KID: kid}})
	if err != nil {
		tb.Fatal(err)
	}
	text, err := json.Marshal(k.Marshal())
	if err != nil {
		tb.Fatal(err)
	}
	var members map[string]any
	if err := json.Unmarshal(text, &members); err != nil {
		tb.Fatal(err)
	}
	maps.Copy(members, more)
	maps.DeleteFunc(members, func(_ string, v any) bool { return v == nil })
	text, err = json.Marshal(members)
	if err != nil {
		tb.Fatal(err)
	}
	return text
}

func jwks(tb testing.TB, keys ...json.RawMessage) string {
	tb.Helper()
	text, err := json.Marshal(map[string]any{"keys": keys})
	if err != nil {
		tb.Fatal(err)
	}
	return string(text)
}

// tokenOf signs with a key that the header names.
func tokenOf(tb testing.TB, alg, kid string, key any) string {
	tb.Helper()
	header := fmt.Sprintf(`{"alg":%q,"kid":%q}`, alg, kid)
	if kid == "" {
		header = fmt.Sprintf(`{"alg":%q}`, alg)
	}
	return encode(tb, header, fmt.Sprintf(`{"sub":"me","exp":%d,"scopes":["publish:a"]}`, in(time.Hour)), jwt.GetSigningMethod(alg), key)
}

// keys are one of each kind that a JWKS may hold.
func keys(tb testing.TB) map[string]crypto.Signer {
	tb.Helper()
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		tb.Fatal(err)
	}
	_, edKey, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	return map[string]crypto.Signer{
		"rsa": rsaKey, "ed": edKey,
		"p256": newKey(tb, elliptic.P256()), "p384": newKey(tb, elliptic.P384()), "p521": newKey(tb, elliptic.P521()),
	}
}

// newKey makes a key, quickly.
func newKey(tb testing.TB, curve elliptic.Curve) crypto.Signer {
	tb.Helper()
	key, err := ecdsa.GenerateKey(curve, rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	return key
}

func taken(t *testing.T, v *acl.Verifier, token string) {
	t.Helper()
	if _, err := v.Verify(t.Context(), token); err != nil {
		t.Error(err)
	}
}

// eventually asks until ok, with a deadline.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	deadline := time.After(20 * time.Second)
	for !ok() {
		select {
		case <-ticker.C:
		case <-deadline:
			t.Fatal("it did not come to this: " + what)
		}
	}
}

// lines is a log that may be written concurrently.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func TestJWKSAlgorithms(t *testing.T) {
	all := keys(t)
	s := newJWKSServer(t)
	var served []json.RawMessage
	for name, key := range all {
		served = append(served, jwk(t, name, key, nil))
	}
	s.serveText(jwks(t, served...))
	v := newVerifier(t, acl.Config{JWKSURL: s.url()})
	algorithms := map[string][]string{
		"rsa": {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"},
		"ed":  {"EdDSA"}, "p256": {"ES256"}, "p384": {"ES384"}, "p521": {"ES512"},
	}
	for kid, algs := range algorithms {
		for _, alg := range algs {
			token := tokenOf(t, alg, kid, all[kid])
			taken(t, v, token)
			for other := range all {
				if other != kid {
					// A token that names another key than the one that signed it.
					refused(t, v, tokenOf(t, alg, other, all[kid]), acl.InvalidJWT, "signed")
				}
			}
			refused(t, v, token[:len(token)-8]+"AAAAAAAA", acl.InvalidJWT, "")
			refused(t, v, tokenOf(t, alg, "", all[kid]), acl.InvalidJWT, "signed") // which of five?
		}
	}
	if n := s.fetches.Load(); n != 1 {
		t.Errorf("%d fetches", n)
	}
}

// The public key of a JWKS is known to everybody: nothing that was signed with it as a secret may
// pass.
func TestJWKSTakesNoSecrets(t *testing.T) {
	key := keys(t)["rsa"]
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	oct := json.RawMessage(`{"kty":"oct","kid":"oct","k":"` + base64.RawURLEncoding.EncodeToString(secret) + `"}`)
	s := newJWKSServer(t)
	s.serveText(jwks(t, jwk(t, "rsa", key, nil), oct))
	v := newVerifier(t, acl.Config{JWKSURL: s.url()})
	taken(t, v, tokenOf(t, "RS256", "rsa", key))
	// There is one key that counts, so it need not be named.
	taken(t, v, tokenOf(t, "RS256", "", key))
	public, ok := key.Public().(*rsa.PublicKey)
	if !ok {
		t.Fatal("no RSA key")
	}
	for name, known := range map[string][]byte{
		"PEM": pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), "DER": der, "modulus": public.N.Bytes(),
		"JWK": jwk(t, "rsa", key, nil), "the JWKS's own secret": secret, "nothing": {},
	} {
		for _, kid := range []string{"rsa", "oct", "", "../../dev/null", "http://127.0.0.1/evil"} {
			for _, alg := range []string{"HS256", "HS384", "HS512"} {
				t.Run(name, func(t *testing.T) { refused(t, v, tokenOf(t, alg, kid, known), acl.InvalidJWT, "signed") })
			}
		}
	}
	refused(t, v, encode(t, `{"alg":"none","kid":"rsa"}`, fmt.Sprintf(`{"exp":%d}`, in(time.Hour)), nil, nil), acl.InvalidJWT, "signed")
	// A key that the token brings along, or says where to find.
	evil := keys(t)["rsa"]
	for _, header := range []string{
		fmt.Sprintf(`{"alg":"RS256","kid":"rsa","jwk":%s}`, jwk(t, "rsa", evil, nil)),
		fmt.Sprintf(`{"alg":"RS256","jwk":%s}`, jwk(t, "x", evil, nil)),
		fmt.Sprintf(`{"alg":"RS256","kid":"x","jku":%q}`, s.url()),
		`{"alg":"RS256","kid":["rsa"]}`, `{"alg":"RS256","kid":null}`, `{"alg":"RS256","kid":{"a":1}}`,
	} {
		refused(t, v, encode(t, header, fmt.Sprintf(`{"exp":%d}`, in(time.Hour)), jwt.SigningMethodRS256, evil), acl.InvalidJWT, "signed")
	}
}

func TestJWKSLeavesOutKeysThatAreForOtherThings(t *testing.T) {
	all := keys(t)
	small, err := rsa.GenerateKey(rand.Reader, 1024)
	if err != nil {
		t.Fatal(err)
	}
	s := newJWKSServer(t)
	s.serveText(jwks(
		t,
		jwk(t, "sig", all["rsa"], map[string]any{"use": "sig", "key_ops": []string{"verify"}, "alg": "RS256"}),
		jwk(t, "enc", all["rsa"], map[string]any{"use": "enc"}),
		jwk(t, "ops", all["rsa"], map[string]any{"key_ops": []string{"encrypt"}}),
		jwk(t, "alg", all["rsa"], map[string]any{"alg": "RSA-OAEP"}),
		jwk(t, "small", small, nil),
		jwk(t, "broken", all["p256"], map[string]any{"x": "AAAA"}),
		jwk(t, "x5u", all["rsa"], map[string]any{"x5u": "http://127.0.0.1:1/cert"}),
		json.RawMessage(`{"kty":"XX","kid":"new"}`), json.RawMessage(`7`),
	))
	v := newVerifier(t, acl.Config{JWKSURL: s.url()})
	taken(t, v, tokenOf(t, "RS256", "sig", all["rsa"]))
	// This is a key like any other: its certificate is not looked at.
	taken(t, v, tokenOf(t, "RS256", "x5u", all["rsa"]))
	refused(t, v, tokenOf(t, "PS256", "sig", all["rsa"]), acl.InvalidJWT, "signed")
	refused(t, v, tokenOf(t, "RS256", "small", small), acl.InvalidJWT, "signed")
	for _, kid := range []string{"enc", "ops", "alg", "broken"} {
		refused(t, v, tokenOf(t, "RS256", kid, all["rsa"]), acl.InvalidJWT, "signed")
	}
}

func TestJWKSRotates(t *testing.T) {
	a, b := newKey(t, elliptic.P256()), newKey(t, elliptic.P256())
	s := newJWKSServer(t)
	s.serveText(jwks(t, jwk(t, "a", a, nil)))
	v := newVerifier(t, acl.Config{JWKSURL: s.url(), RefreshInterval: time.Hour, FetchInterval: 10 * time.Millisecond})
	taken(t, v, tokenOf(t, "ES256", "a", a))

	// A key that comes is found by the first token that names it, without a wait for the refresh.
	s.serveText(jwks(t, jwk(t, "a", a, nil), jwk(t, "b", b, nil)))
	taken(t, v, tokenOf(t, "ES256", "b", b))
	taken(t, v, tokenOf(t, "ES256", "a", a))

	// One that goes is not taken any more after a fetch.
	s.serveText(jwks(t, jwk(t, "b", b, nil)))
	eventually(t, "the old key is refused", func() bool {
		_, _ = v.Verify(t.Context(), tokenOf(t, "ES256", "unknown", b))
		_, err := v.Verify(t.Context(), tokenOf(t, "ES256", "a", a))
		return err != nil
	})
	taken(t, v, tokenOf(t, "ES256", "b", b))
}

// The age of the keys is the time since the last fetch that succeeded.
func TestKeysAge(t *testing.T) {
	if age := newVerifier(t, acl.Config{Static: []acl.StaticToken{{Token: "a token of some length"}}}).KeysAge(); age != 0 {
		t.Errorf("without a JWKS URL the keys are %v old", age)
	}
	s := newJWKSServer(t)
	key := newKey(t, elliptic.P256())
	s.serveText(jwks(t, jwk(t, "k", key, nil)))
	v := newVerifier(t, acl.Config{JWKSURL: s.url(), RefreshInterval: 10 * time.Millisecond, FetchInterval: 10 * time.Millisecond})
	start := time.Now()
	grows := func(since time.Time) func() bool {
		return func() bool { return v.KeysAge() >= time.Since(since) }
	}
	eventually(t, "the keys are fetched anew", func() bool { return !grows(start)() })
	s.serveText("no keys")
	failing := s.fetches.Load()
	eventually(t, "a fetch has failed", func() bool { return s.fetches.Load() > failing+2 })
	failed := time.Now()
	eventually(t, "failed fetches leave the age", grows(failed))
	s.serveText(jwks(t, jwk(t, "k", key, nil)))
	eventually(t, "the keys are fetched again", func() bool { return !grows(failed)() })
}

func TestJWKSRefreshesByItself(t *testing.T) {
	a, b := newKey(t, elliptic.P256()), newKey(t, elliptic.P256())
	s := newJWKSServer(t)
	s.serveText(jwks(t, jwk(t, "same", a, nil)))
	v := newVerifier(t, acl.Config{JWKSURL: s.url(), RefreshInterval: 10 * time.Millisecond})
	taken(t, v, tokenOf(t, "ES256", "same", a))
	s.serveText(jwks(t, jwk(t, "same", b, nil)))
	eventually(t, "the new key is in use", func() bool {
		_, err := v.Verify(t.Context(), tokenOf(t, "ES256", "same", b))
		return err == nil
	})
	refused(t, v, tokenOf(t, "ES256", "same", a), acl.InvalidJWT, "signed")
}

// Whatever the server does, known keys go on working, and new ones come when it is well again.
func TestJWKSSurvivesItsServer(t *testing.T) {
	key, fresh := newKey(t, elliptic.P256()), newKey(t, elliptic.P256())
	good := jwks(t, jwk(t, "known", key, nil))
	big := func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"keys":[`)
		for block := []byte(strings.Repeat(" ", 64<<10)); ; {
			if _, err := w.Write(block); err != nil {
				return
			}
		}
	}
	for name, fail := range map[string]struct {
		how   func(*jwksServer)
		cause string
	}{
		"dead":           {func(s *jwksServer) { s.die() }, "connection refused"},
		"status":         {func(s *jwksServer) { s.serve(http.NotFound) }, "status 404"},
		"garbage":        {func(s *jwksServer) { s.serveText("<html>hush</html>") }, "response is not a JWKS"},
		"empty":          {func(s *jwksServer) { s.serveText("") }, "response is not a JWKS"},
		"null":           {func(s *jwksServer) { s.serveText("null") }, "no key that can verify"},
		"another object": {func(s *jwksServer) { s.serveText(`{"error":"hush"}`) }, "no key that can verify"},
		"no keys":        {func(s *jwksServer) { s.serveText(`{"keys":[]}`) }, "no key that can verify"},
		"useless keys":   {func(s *jwksServer) { s.serveText(`{"keys":[{"kty":"oct","kid":"known","k":"AAAA"},7]}`) }, "no key that can verify"},
		"too many keys": {func(s *jwksServer) {
			s.serveText(jwks(t, slices.Repeat([]json.RawMessage{jwk(t, "known", fresh, nil)}, acl.MaxJWKSKeys+1)...))
		}, "101 keys; at most 100 are allowed"},
		"10 MB":   {func(s *jwksServer) { s.serveText(good + strings.Repeat(" ", 10<<20)) }, "exceeds 1048576 bytes"},
		"endless": {func(s *jwksServer) { s.serve(big) }, "exceeds 1048576 bytes"},
		"a bomb": {func(s *jwksServer) {
			var zipped bytes.Buffer
			z := gzip.NewWriter(&zipped)
			_, _ = io.WriteString(z, good+strings.Repeat(" ", 10<<20))
			_ = z.Close()
			s.serve(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Encoding", "gzip")
				_, _ = w.Write(zipped.Bytes())
			})
		}, "exceeds 1048576 bytes"},
		"a loop": {func(s *jwksServer) {
			s.serve(func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, r.URL.Path, http.StatusFound) })
		}, "more than 3 redirects"},
		"cut off": {func(s *jwksServer) {
			s.serve(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Length", "1000")
				_, _ = io.WriteString(w, good)
			})
		}, "read response"},
		"a header without end": {func(s *jwksServer) {
			s.serve(func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("X", strings.Repeat("x", 128<<10)) })
		}, "header"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newJWKSServer(t)
			s.serveText(good)
			log := &lines{}
			v := newVerifier(t, acl.Config{
				JWKSURL: s.url(), RefreshInterval: 10 * time.Millisecond, FetchInterval: 10 * time.Millisecond,
				Logger: slog.New(slog.NewTextHandler(log, nil)),
			})
			token := tokenOf(t, "ES256", "known", key)
			taken(t, v, token)

			fail.how(s)
			eventually(t, "the log says why", func() bool {
				taken(t, v, token)
				return strings.Contains(log.String(), fail.cause)
			})
			eventually(t, "an unknown key is a matter of later", func() bool {
				_, err := v.Verify(t.Context(), tokenOf(t, "ES256", "fresh", fresh))
				return err != nil && err.Error() == "unavailable: The token cannot be checked now: try again later."
			})
			taken(t, v, token)

			s.serveText(jwks(t, jwk(t, "known", key, nil), jwk(t, "fresh", fresh, nil)))
			if s.server == nil {
				s.start()
			}
			eventually(t, "the fresh key is found", func() bool {
				taken(t, v, token)
				_, err := v.Verify(t.Context(), tokenOf(t, "ES256", "fresh", fresh))
				return err == nil
			})
			eventually(t, "the log says that it is over", func() bool { return strings.Contains(log.String(), "fetching keys works again") })
			if strings.Contains(log.String(), "hush") {
				t.Errorf("the log shows a credential or the answer:\n%s", log)
			}
		})
	}
}

func TestJWKSReadsNoMoreThanItMust(t *testing.T) {
	s := newJWKSServer(t)
	done := make(chan struct{})
	s.serve(func(w http.ResponseWriter, _ *http.Request) {
		defer close(done)
		for block := []byte(strings.Repeat(" ", 64<<10)); s.written.Load() < 1<<30; {
			if _, err := w.Write(block); err != nil {
				return
			}
		}
	})
	newVerifier(t, acl.Config{JWKSURL: s.url(), FetchInterval: time.Hour})
	<-done
	// What is beyond the limit lay in the buffers of the sockets.
	if n := s.written.Load(); n > 32<<20 {
		t.Errorf("%d bytes were sent", n)
	}
}

func TestJWKSServerMayBeDownAtTheStart(t *testing.T) {
	key := newKey(t, elliptic.P256())
	s := newJWKSServer(t)
	s.serveText(jwks(t, jwk(t, "a", key, nil)))
	s.die()
	v := newVerifier(t, acl.Config{JWKSURL: s.url(), FetchInterval: 10 * time.Millisecond})
	for _, kid := range []string{"a", ""} {
		refused(t, v, tokenOf(t, "ES256", kid, key), acl.Unavailable, "later")
	}
	s.start()
	for _, kid := range []string{"a", ""} {
		eventually(t, "the key is found", func() bool {
			_, err := v.Verify(t.Context(), tokenOf(t, "ES256", kid, key))
			return err == nil
		})
	}
}

// Tokens that name unknown keys, in any number, make the verifier fetch the keys at a bounded rate
// only. No caller waits for long.
func TestUnknownKeysAreAskedForAtABoundedRate(t *testing.T) {
	key := newKey(t, elliptic.P256())
	s := newJWKSServer(t)
	s.serveText(jwks(t, jwk(t, "a", key, nil)))
	v := newVerifier(t, acl.Config{JWKSURL: s.url(), FetchInterval: time.Hour})
	begin := time.Now()
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			for j := range 50 {
				refused(t, v, tokenOf(t, "ES256", fmt.Sprint("unknown-", i, "-", j), key), acl.InvalidJWT, "signed")
			}
		})
	}
	wg.Wait()
	if n := s.fetches.Load(); n != 2 {
		t.Errorf("%d fetches, want the first and one more", n)
	}
	if d := time.Since(begin); d > 10*time.Second {
		t.Errorf("1,000 tokens took %v", d)
	}
	taken(t, v, tokenOf(t, "ES256", "a", key))
}

func TestVerifyWaitsNoLongerThanItsContext(t *testing.T) {
	key := newKey(t, elliptic.P256())
	s := newJWKSServer(t)
	s.serveText(jwks(t, jwk(t, "a", key, nil)))
	v := newVerifier(t, acl.Config{JWKSURL: s.url()})
	asked, release := make(chan struct{}), make(chan struct{})
	defer close(release)
	s.serve(func(http.ResponseWriter, *http.Request) {
		close(asked)
		<-release
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { // ends with the test at the latest
		<-asked
		cancel()
	}()
	begin := time.Now()
	_, err := v.Verify(ctx, tokenOf(t, "ES256", "b", key))
	if err == nil || time.Since(begin) > 4*time.Second {
		t.Errorf("%v after %v", err, time.Since(begin))
	}
	taken(t, v, tokenOf(t, "ES256", "a", key)) // while the fetch hangs
}

func TestCloseWaitsAndMayBeCalledTwice(t *testing.T) {
	key := newKey(t, elliptic.P256())
	s := newJWKSServer(t)
	s.serveText(jwks(t, jwk(t, "a", key, nil)))
	before := goleak.IgnoreCurrent()
	v, err := acl.NewVerifier(t.Context(), acl.Config{JWKSURL: s.url(), RefreshInterval: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "it refreshes", func() bool { return s.fetches.Load() > 5 })
	// A fetch that hangs does not hold up Close.
	asked, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	s.serve(func(http.ResponseWriter, *http.Request) {
		once.Do(func() { close(asked) })
		<-release
	})
	<-asked
	begin := time.Now()
	v.Close()
	v.Close()
	if d := time.Since(begin); d > 3*time.Second {
		t.Errorf("Close took %v", d)
	}
	close(release)
	s.die()
	if err := goleak.Find(before); err != nil {
		t.Error(err)
	}
	n := s.fetches.Load()
	taken(t, v, tokenOf(t, "ES256", "a", key))
	refused(t, v, tokenOf(t, "ES256", "b", key), acl.Unavailable, "later")
	if s.fetches.Load() != n {
		t.Error("it fetches after Close")
	}
}

func BenchmarkVerifyJWKS(b *testing.B) {
	all := keys(b)
	s := newJWKSServer(b)
	s.serveText(jwks(b, jwk(b, "rsa", all["rsa"], nil), jwk(b, "p256", all["p256"], nil), jwk(b, "ed", all["ed"], nil)))
	v := newVerifier(b, acl.Config{JWKSURL: s.url()})
	for alg, kid := range map[string]string{"RS256": "rsa", "ES256": "p256", "EdDSA": "ed"} {
		token := tokenOf(b, alg, kid, all[kid])
		b.Run(alg, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := v.Verify(b.Context(), token); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
