package facade_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"eventhub/docs/apitest"
	"eventhub/facade"
)

// from sends a request with a token from an address, below the listener.
func (r *rig) from(t *testing.T, remote, token string) *httptest.ResponseRecorder {
	t.Helper()
	return r.fromUntil(t.Context(), t, remote, token)
}

// fromUntil is from for a client that leaves when ctx ends.
func (r *rig) fromUntil(ctx context.Context, t *testing.T, remote, token string) *httptest.ResponseRecorder {
	t.Helper()
	req := httptest.NewRequestWithContext(ctx, http.MethodGet, "/snap/none/k", http.NoBody)
	req.RemoteAddr = remote
	req.Header.Set("Authorization", "Bearer "+token)
	w := httptest.NewRecorder()
	apitest.Handler(t, apitest.Clients, r.srv.HTTP()).ServeHTTP(w, req)
	return w
}

// Refused tokens are rationed by address. Tokens that were valid before, and other addresses, do
// not notice. A new token that is valid waits for its turn, and gets in.
func TestBadTokensOfAnAddress(t *testing.T) {
	t.Parallel()
	const rate, burst, attackers = 50, 10, 40
	r := jwtRig(t, func(cfg *facade.Config) { cfg.Limits.BadTokenRate, cfg.Limits.BadTokenBurst = rate, burst })
	known := grant(t, "known", "publish:a")
	// valid returns how long a valid token waits at best: a busy machine may be late, but not each
	// time.
	valid := func(remote string, token func(try int) string) time.Duration {
		t.Helper()
		best := time.Hour
		for try := 0; try < 5 && best > time.Second; try++ {
			began := time.Now()
			// It is valid, and may not read.
			if w := r.from(t, remote, token(try)); w.Code != http.StatusForbidden {
				t.Errorf("a valid token of %s: %d %s", remote, w.Code, w.Body)
			}
			best = min(best, time.Since(began))
		}
		return best
	}
	same := func(int) string { return known }
	another := func(name string) func(int) string {
		return func(try int) string { return grant(t, name+strconv.Itoa(try), "publish:a") }
	}
	valid("192.0.2.1:1000", same)
	bad := grant(t, "bad", "publish:a") + "x"
	var checked, refused atomic.Int64
	began := time.Now()
	stop := make(chan struct{})
	var attack sync.WaitGroup
	for i := range attackers {
		attack.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				switch r.from(t, "192.0.2.1:"+strconv.Itoa(2000+i), bad).Code {
				case http.StatusUnauthorized:
					checked.Add(1)
				case http.StatusTooManyRequests:
					refused.Add(1)
				default:
					t.Error("a bad token was not refused")
				}
			}
		})
	}
	eventually(t, "tokens wait", func() bool { return r.seen.count("limit bad_tokens") >= attackers })
	if took := valid("192.0.2.1:1001", same); took > time.Second {
		t.Errorf("a known token waited for %v", took)
	}
	if took := valid("192.0.2.2:1000", another("elsewhere")); took > time.Second {
		t.Errorf("a token from another address waited for %v", took)
	}
	if took := valid("192.0.2.1:1002", another("fresh")); took > 3*time.Second {
		t.Errorf("a new token waited for %v", took)
	}
	<-time.After(time.Second)
	close(stop)
	most := int64(burst + attackers + rate*(time.Since(began).Seconds()+1))
	attack.Wait()
	if n := checked.Load(); n > most {
		t.Errorf("%d bad tokens were checked in %v, want at most %d", n, time.Since(began), most)
	}
	if n := refused.Load(); n > 0 {
		t.Errorf("%d tokens were refused unseen, though they were few", n)
	}
}

// A host with all of an IPv6 network is one address, and so is a host over both protocols.
func TestBadTokensOfANetwork(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, func(cfg *facade.Config) { cfg.Limits.BadTokenRate, cfg.Limits.BadTokenBurst = 1, 2 })
	bad := grant(t, "bad", "publish:a") + "x"
	for i, c := range []struct {
		remote string
		waits  bool
	}{
		{"[2001:db8:0:1::1]:1", false},
		{"[2001:db8:0:1::2]:1", false},
		{"[2001:db8:0:1:ffff::3]:1", true},
		{"[2001:db8:0:2::1]:1", false},
		{"192.0.2.1:1", false},
		{"192.0.2.1:2", false},
		{"[::ffff:192.0.2.1]:3", true},
		{"192.0.2.2:1", false},
	} {
		before := r.seen.count("limit bad_tokens")
		if w := r.from(t, c.remote, bad); w.Code != http.StatusUnauthorized {
			t.Errorf("%d: %d", i, w.Code)
		}
		if waited := r.seen.count("limit bad_tokens") > before; waited != c.waits {
			t.Errorf("%s waited: %v", c.remote, waited)
		}
	}
}

// Over WebSocket the same ration holds, together with HTTP. A token that waits takes no place of a
// request, and beyond the bound on what waits, tokens are refused with a time to come back.
func TestBadTokensThatWait(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, func(cfg *facade.Config) {
		cfg.Limits.BadTokenRate, cfg.Limits.BadTokenBurst, cfg.Limits.Requests = 1, 1, 8
	})
	known := grant(t, "known", "publish:a")
	r.from(t, "127.0.0.1:1", known)
	p := r.dial(t)
	if got := p.outcome(`{"op":"AUTH","token":"x.y.z"}`); got != "jwt_invalid" {
		t.Fatal(got)
	}
	const waiting = 300
	var crowd sync.WaitGroup
	var tooMany atomic.Int64
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	for range waiting {
		crowd.Go(func() {
			w := r.fromUntil(ctx, t, "127.0.0.1:2", "x.y.z")
			if w.Code == http.StatusTooManyRequests {
				tooMany.Add(1)
				if w.Header().Get("Retry-After") == "" {
					t.Error("no Retry-After")
				}
			}
		})
	}
	eventually(t, "some are too many", func() bool { return tooMany.Load() > 0 })
	began := time.Now()
	eventually(t, "a known token is served", func() bool { return r.from(t, "127.0.0.1:3", known).Code == http.StatusForbidden })
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("a known token waited for %v", took)
	}
	leave()
	crowd.Wait()
	if got := p.outcome(`{"op":"AUTH","token":"` + known + `"}`); got != "OK" {
		t.Error(got)
	}
}

// checks counts the tokens that an Authenticator refuses.
type checks struct {
	facade.Authenticator
	refused atomic.Int64
}

func (c *checks) Authenticate(ctx context.Context, token string) (facade.Principal, error) {
	p, err := c.Authenticator.Authenticate(ctx, token)
	if err != nil {
		c.refused.Add(1)
	}
	return p, err
}

// A crowd that sends bad tokens over more connections than refusals may wait delays no valid token
// from the same address, though the hub has never seen the token. Each bad token that is checked
// costs the crowd a turn or a connection.
func TestNewTokensBesideACrowd(t *testing.T) {
	t.Parallel()
	// At this rate, refusals wait for half of the time that they may.
	const rate, burst, crowd, newcomers = 100, 10, 300, 10
	var tally *checks
	r := jwtRig(t, func(cfg *facade.Config) {
		tally = &checks{Authenticator: cfg.Auth}
		cfg.Auth = tally
		cfg.Limits.BadTokenRate, cfg.Limits.BadTokenBurst = rate, burst
	})
	bad := grant(t, "bad", "publish:a") + "x"
	kept := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: crowd}}
	defer kept.CloseIdleConnections()
	ask := func(token string) (status int, closed bool) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, r.http.URL+"/snap/none/k", http.NoBody)
		if err != nil {
			t.Error(err)
			return 0, false
		}
		req.Header.Set("Authorization", "Bearer "+token)
		resp, err := kept.Do(req)
		if err != nil {
			return 0, true
		}
		_ = resp.Body.Close()
		return resp.StatusCode, resp.Close
	}
	var inTurn, ended, fault atomic.Int64
	stop := make(chan struct{})
	began := time.Now()
	var attack sync.WaitGroup
	for range crowd {
		attack.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(100 * time.Millisecond): // leave room for the others
				}
				switch status, closed := ask(bad); {
				case status == http.StatusUnauthorized:
					inTurn.Add(1)
				case closed:
					ended.Add(1)
				default:
					fault.Store(int64(status))
				}
			}
		})
	}
	eventually(t, "refusals wait", func() bool { return r.seen.count("limit bad_tokens") >= crowd })
	for i := range newcomers {
		began := time.Now()
		// It is valid, and may not read.
		if status, _ := ask(grant(t, "new-http-"+strconv.Itoa(i), "publish:a")); status != http.StatusForbidden {
			t.Errorf("token %d over HTTP: %d after %v", i, status, time.Since(began))
		}
		p := r.dial(t)
		if got := p.outcome(`{"op":"AUTH","token":"` + grant(t, "new-ws-"+strconv.Itoa(i), "publish:a") + `"}`); got != "OK" {
			t.Errorf("token %d over WebSocket: %s after %v", i, got, time.Since(began))
		}
		_ = p.conn.CloseNow()
	}
	close(stop)
	attack.Wait()
	most := int64(burst + rate*(time.Since(began).Seconds()+1))
	if n := inTurn.Load(); n > most {
		t.Errorf("%d bad tokens were refused in turn, want at most %d", n, most)
	}
	if checked, paid := tally.refused.Load(), inTurn.Load()+ended.Load(); checked > paid {
		t.Errorf("%d bad tokens were checked, for %d turns and connections", checked, paid)
	}
	if n := fault.Load(); n != 0 {
		t.Errorf("a bad token was answered %d, and its connection goes on", n)
	}
}

// A connection over which a bad token came out of turn ends.
func TestBadTokenOutOfTurnEndsItsConnection(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, func(cfg *facade.Config) { cfg.Limits.BadTokenRate, cfg.Limits.BadTokenBurst = 1, 1 })
	// The turns of the next 5 s are taken, and each that gets free is taken at once.
	var crowd sync.WaitGroup
	defer crowd.Wait()
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	const waits = 10
	for range waits {
		crowd.Go(func() {
			for ctx.Err() == nil {
				r.fromUntil(ctx, t, "127.0.0.1:1", "x.y.z")
				select {
				case <-time.After(10 * time.Millisecond): // leave room for the others
				case <-ctx.Done():
				}
			}
		})
	}
	eventually(t, "refusals wait", func() bool { return r.seen.count("limit bad_tokens") >= 2*waits })
	// On a slow machine, a turn may be free.
	var p *peer
	eventually(t, "a token comes out of turn", func() bool {
		p = r.dial(t)
		return p.outcome(`{"op":"AUTH","token":"x.y.z"}`) == "rate_limited"
	})
	p.wantClose(4103)
	var w *httptest.ResponseRecorder
	eventually(t, "a token comes out of turn over HTTP", func() bool {
		w = r.from(t, "127.0.0.1:2", "x.y.z")
		return w.Code == http.StatusTooManyRequests
	})
	if w.Header().Get("Connection") != "close" || w.Header().Get("Retry-After") == "" {
		t.Errorf("over HTTP: %d %v", w.Code, w.Header())
	}
}

// An address has so many bad tokens checked. Beyond that, tokens that are not known are refused
// unseen, but for those with which connections renew theirs.
func TestTokenChecksOfAnAddress(t *testing.T) {
	t.Parallel()
	const burst = 5
	var tally *checks
	r := jwtRig(t, func(cfg *facade.Config) {
		tally = &checks{Authenticator: cfg.Auth}
		cfg.Auth = tally
		cfg.Limits.TokenCheckRate, cfg.Limits.TokenCheckBurst = 1, burst
	})
	known := grant(t, "known", "publish:a")
	auth := func(p *peer, name string) string {
		return p.outcome(`{"op":"AUTH","token":"` + grant(t, name, "publish:a") + `"}`)
	}
	r.from(t, "127.0.0.1:1", known)
	in, out := r.dial(t), r.dial(t)
	if got := auth(in, "in"); got != "OK" {
		t.Fatal(got)
	}
	limited := 0
	for i := range 3 * burst {
		switch w := r.from(t, "127.0.0.1:2", "x.y."+strconv.Itoa(i)); {
		case w.Code == http.StatusTooManyRequests && w.Header().Get("Retry-After") != "":
			limited++
		case w.Code != http.StatusUnauthorized:
			t.Errorf("token %d: %d", i, w.Code)
		}
	}
	if n := tally.refused.Load(); n > burst+3 || limited+int(n) != 3*burst || r.seen.count("limit token_checks") != limited {
		t.Errorf("%d bad tokens were checked, and %d refused unseen", n, limited)
	}
	eventually(t, "a new token is refused unseen", func() bool {
		r.from(t, "127.0.0.1:2", "x.y.z") // there may be room for one again
		return r.from(t, "127.0.0.1:4", grant(t, "new", "publish:a")).Code == http.StatusTooManyRequests
	})
	for remote, token := range map[string]string{"127.0.0.1:3": known, "127.0.0.2:1": grant(t, "elsewhere", "publish:a")} {
		if w := r.from(t, remote, token); w.Code != http.StatusForbidden {
			t.Errorf("%s: %d", remote, w.Code)
		}
	}
	if got := auth(in, "renewed"); got != "OK" {
		t.Errorf("a connection that renews its token: %s", got)
	}
	eventually(t, "a new token is checked again", func() bool { return auth(out, "new") == "OK" })
}
