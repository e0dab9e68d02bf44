package facade_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/facade"
)

// A browser page of an allowed origin may use the HTTP API with its token, and none of another
// origin. The browser's own credentials are never allowed.
func TestPagesOfOtherOrigins(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) { cfg.Origins = []string{"https://app.example.com"} })
	preflight := func(origin string) answer {
		return r.ask(t, http.MethodOptions, "/publish/t", "", "Origin", origin, "Access-Control-Request-Method", "POST",
			"Access-Control-Request-Headers", "authorization,content-type,event-header-x-team")
	}
	got := preflight("https://app.example.com")
	if got.status != http.StatusNoContent || got.header.Get("Access-Control-Allow-Origin") != "https://app.example.com" ||
		!strings.Contains(got.header.Get("Access-Control-Allow-Headers"), "event-header-x-team") ||
		got.header.Get("Access-Control-Allow-Methods") != "POST" || got.header.Get("Access-Control-Allow-Credentials") != "" {
		t.Errorf("%d %v", got.status, got.header)
	}
	if got := preflight("https://evil.test"); got.header.Get("Access-Control-Allow-Origin") != "" {
		t.Errorf("%d %v", got.status, got.header)
	}
	for origin, want := range map[string]string{"https://app.example.com": "https://app.example.com", "https://evil.test": "", "": ""} {
		got := r.post(t, "/publish/t", "1", "Origin", origin)
		if got.status != http.StatusOK || got.header.Get("Access-Control-Allow-Origin") != want || got.header.Get("Access-Control-Allow-Credentials") != "" {
			t.Errorf("%q: %d %v", origin, got.status, got.header)
		}
	}
	if got := r.ask(t, http.MethodOptions, "/publish/t", ""); got.status != http.StatusMethodNotAllowed {
		t.Errorf("OPTIONS that is no preflight: %d", got.status)
	}
}

func TestRequestHeadersThatAreRefused(t *testing.T) {
	t.Parallel()
	bus := newRig(t, nil).bus
	for _, bad := range []string{"", "*", "a b", "Cookie", "authorization", "proxy-*", "auth*", "Event-Id", "e*", "nats-*", "KV-Operation"} {
		if _, err := facade.New(facade.Config{Bus: facade.JetStream(bus), Auth: facade.StaticToken("x"), Headers: []string{bad}}); err == nil {
			t.Errorf("the header %q was taken", bad)
		}
	}
}

// dialHTTP opens a raw connection to the HTTP side.
func (r *rig) dialHTTP(t *testing.T) net.Conn {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", r.http.addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(rigPatience))
	return conn
}

// One principal has a part of all requests that are served at a time, and leaves the rest to
// others.
func TestRequestsOfOnePrincipal(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) {
		cfg.Auth = everybody{}
		cfg.Limits.Requests = 12 // 3 for one principal
	})
	type request struct {
		net.Conn

		answers *bufio.Reader
	}
	// begin returns when the hub serves the request, and waits for its body.
	begin := func(token string) request {
		conn := r.dialHTTP(t)
		if _, err := fmt.Fprintf(conn, "POST /publish/t HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %s\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n", token); err != nil {
			t.Fatal(err)
		}
		answers := bufio.NewReader(conn)
		res, err := http.ReadResponse(answers, nil)
		if err != nil || res.StatusCode != http.StatusContinue {
			t.Fatal(res, err)
		}
		_ = res.Body.Close()
		if _, err := io.WriteString(conn, "1"); err != nil {
			t.Fatal(err)
		}
		return request{conn, answers}
	}
	var slow []request
	for range 3 {
		slow = append(slow, begin("mallory"))
	}
	if got := r.post(t, "/publish/t", "1", "Authorization", "Bearer mallory"); got.status != http.StatusTooManyRequests || got.Code != "rate_limited" || got.header.Get("Retry-After") == "" {
		t.Errorf("beyond its share: %d %s", got.status, got.text)
	}
	if r.seen.count("limit principal_requests") == 0 {
		t.Error("the limit was not counted")
	}
	if got := r.post(t, "/publish/t", "1", "Authorization", "Bearer alice"); got.status != http.StatusOK {
		t.Errorf("another principal: %d %s", got.status, got.text)
	}
	for _, conn := range slow {
		if _, err := io.WriteString(conn, "2"); err != nil {
			t.Fatal(err)
		}
		res, err := http.ReadResponse(conn.answers, nil)
		if err != nil || res.StatusCode != http.StatusOK {
			t.Fatal(res, err)
		}
		_ = res.Body.Close()
	}
	if got := r.post(t, "/publish/t", "1", "Authorization", "Bearer mallory"); got.status != http.StatusOK {
		t.Errorf("afterwards: %d %s", got.status, got.text)
	}
}

// A body that comes byte by byte ends the request, though no pause is long. Lines may be far apart.
func TestBodiesThatAreTooSlow(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) {
		cfg.Limits.BodyStall = 2 * time.Second // less than all lines take, and far more than one
		cfg.Limits.BodyRate = 1000
	})
	conn := r.dialHTTP(t)
	if _, err := fmt.Fprintf(conn, "POST /publish/t HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %s\r\nContent-Length: 1000\r\n\r\n", rigToken); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	go func() {
		for range 1000 {
			if _, err := conn.Write([]byte(" ")); err != nil {
				return
			}
			<-time.After(50 * time.Millisecond) // the pace under test
		}
	}()
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || res.StatusCode != http.StatusBadRequest {
		t.Fatal(res, err)
	}
	_ = res.Body.Close()
	if took := time.Since(began); took > 20*time.Second { // 50 s at that pace
		t.Errorf("it took %v", took)
	}
	if r.seen.count("limit body_rate") == 0 {
		t.Error("the limit was not counted")
	}

	lines := r.dialHTTP(t)
	if _, err := fmt.Fprintf(lines, "POST /publish/t HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %s\r\nContent-Type: application/x-ndjson\r\n"+
		"Transfer-Encoding: chunked\r\n\r\n", rigToken); err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(lines)
	if res, err = http.ReadResponse(in, nil); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	answers := bufio.NewScanner(res.Body)
	for i := range 8 {
		<-time.After(300 * time.Millisecond) // the pace under test
		line := `{"payload":` + strconv.Itoa(i) + "}\n"
		if _, err := fmt.Fprintf(lines, "%x\r\n%s\r\n", len(line), line); err != nil {
			t.Fatal(err)
		}
		if !answers.Scan() || parseAnswer(t, answers.Text()).ID == "" {
			t.Fatal(i, answers.Text(), answers.Err())
		}
	}
}

// A client that does not read its page loses it within seconds, and with it nothing that others
// need.
func TestAnswersThatAreNotRead(t *testing.T) {
	t.Parallel()
	r := newSnapRig(t, func(cfg *facade.Config) { cfg.Limits.AnswerStall = 300 * time.Millisecond })
	payload := `"` + strings.Repeat("x", 1<<20-2) + `"`
	var keys []string
	for i := range 15 {
		keys = append(keys, strconv.Itoa(i))
		r.keep(t, "kept.u", keys[i], payload)
	}
	eventually(t, "the bucket has all", func() bool { // a page shows what it has by now
		found, err := r.bus.Keys("kept.u").GetMany(t.Context(), keys)
		return err == nil && len(found) == len(keys)
	})
	served := r.seen.count("request")
	conn := r.dialHTTP(t)
	if _, err := fmt.Fprintf(conn, "GET /snap/kept.u HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %s\r\n\r\n", rigToken); err != nil {
		t.Fatal(err)
	}
	r.seen.await(t, "request", served+1) // the hub is through with it, though nobody has read
	if b, _ := io.ReadAll(conn); bytes.HasSuffix(b, []byte("\r\n0\r\n\r\n")) {
		t.Errorf("the whole page came, with %d bytes", len(b))
	}
}

// everybody is an Authenticator that takes every token for the name of a principal with full
// access.
type everybody struct{}

func (everybody) Authenticate(_ context.Context, token string) (facade.Principal, error) {
	return person{name: token}, nil
}

// person is a principal of that name.
type person struct{ name string }

func (p person) Name() string                            { return p.name }
func (p person) Key() string                             { return p.name }
func (person) Allows(facade.Action, string, string) bool { return true }
func (person) Expires() time.Time                        { return time.Time{} }

// Pages that wait for their turn take no memory, so a principal that asks for many at a time gets
// all of them.
func TestManyPagesAtATime(t *testing.T) {
	t.Parallel()
	r := newSnapRig(t, func(cfg *facade.Config) {
		cfg.Limits.PageBytes, cfg.Limits.PageTotal, cfg.Limits.PrincipalPageTotal = 1<<20, 8<<20, 3<<20
	})
	for i := range 20 {
		r.keep(t, "kept.m", strconv.Itoa(i), `"`+strings.Repeat("x", 1000)+`"`)
	}
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if got := r.get(t, "/snap/kept.m?limit=1000"); got.status != http.StatusOK {
				t.Errorf("%d %.200s", got.status, got.text)
			}
		})
	}
	wg.Wait()
}
