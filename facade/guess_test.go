package facade_test

import (
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
	req := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/snap/none/k", http.NoBody)
	req.RemoteAddr = remote
	req.Header.Set("Authorization", "Bearer "+token)
	w := httptest.NewRecorder()
	apitest.Handler(t, apitest.Clients, r.srv.HTTP()).ServeHTTP(w, req)
	return w
}

// Refused tokens are rationed by address. Tokens that were valid before, and other addresses, do
// not notice. A new token that is valid waits for its turn, and gets in.
func TestBadTokensOfAnAddress(t *testing.T) {
	const rate, burst, attackers = 50, 10, 40
	r := jwtRig(t, func(cfg *facade.Config) { cfg.Limits.BadTokenRate, cfg.Limits.BadTokenBurst = rate, burst })
	known, fresh := grant(t, "known", "publish:a"), grant(t, "fresh", "publish:a")
	valid := func(remote, token string) time.Duration {
		t.Helper()
		began := time.Now()
		// It is valid, and may not read.
		if w := r.from(t, remote, token); w.Code != http.StatusForbidden {
			t.Errorf("a valid token of %s: %d %s", remote, w.Code, w.Body)
		}
		return time.Since(began)
	}
	valid("192.0.2.1:1000", known)
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
	if took := valid("192.0.2.1:1001", known); took > time.Second {
		t.Errorf("a known token waited for %v", took)
	}
	if took := valid("192.0.2.2:1000", grant(t, "elsewhere", "publish:a")); took > time.Second {
		t.Errorf("a token from another address waited for %v", took)
	}
	if took := valid("192.0.2.1:1002", fresh); took > 3*time.Second {
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
	for range waiting {
		crowd.Go(func() {
			w := r.from(t, "127.0.0.1:2", "x.y.z")
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
	crowd.Wait()
	if got := p.outcome(`{"op":"AUTH","token":"` + known + `"}`); got != "OK" {
		t.Error(got)
	}
}
