package facade_test

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"regexp"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"eventhub/facade"
)

// behind makes the addresses in ranges trusted proxies.
func behind(t *testing.T, cfg *facade.Config, ranges ...string) {
	t.Helper()
	for _, text := range ranges {
		p, err := facade.ParseProxy(text)
		if err != nil {
			t.Fatal(err)
		}
		cfg.TrustedProxies = append(cfg.TrustedProxies, p)
	}
}

// forwarded sends a bad token over HTTP from a peer that forwards for others.
func (r *rig) forwarded(t *testing.T, peer, token string, hops ...string) int {
	t.Helper()
	req := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/snap/none/k", http.NoBody)
	req.RemoteAddr = peer
	req.Header["X-Forwarded-For"] = hops
	req.Header.Set("Authorization", "Bearer "+token)
	w := httptest.NewRecorder()
	r.srv.HTTP().ServeHTTP(w, req)
	return w.Code
}

// The address of a client is the last one in X-Forwarded-For that is no trusted proxy. A client
// that reaches the hub itself, or puts addresses into the header, gains nothing.
func TestAddressOfAClientBehindProxies(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		peer string
		hops []string
		want string
	}{
		{"10.0.0.1:9", []string{"192.0.2.1"}, "192.0.2.1"},
		{"10.0.0.1:9", []string{"192.0.2.1, 192.0.2.2"}, "192.0.2.2"},
		{"10.0.0.1:9", []string{"192.0.2.1,10.0.0.2 , 10.0.0.3"}, "192.0.2.1"},
		{"10.0.0.1:9", []string{"203.0.113.9", "192.0.2.1, 10.0.0.2"}, "192.0.2.1"},
		{"10.0.0.1:9", []string{"192.0.2.1:4711"}, "192.0.2.1"},
		{"10.0.0.1:9", []string{"[2001:db8::1]:4711"}, "2001:db8::1"},
		{"10.0.0.1:9", []string{"2001:db8::1"}, "2001:db8::1"},
		{"[::ffff:10.0.0.1]:9", []string{"::ffff:192.0.2.1"}, "192.0.2.1"},
		{"[2001:db8:7::1]:9", []string{"192.0.2.1"}, "192.0.2.1"},
		{"10.0.0.1:9", []string{"10.0.0.2, 10.0.0.3"}, "10.0.0.2"},
		{"10.0.0.1:9", []string{"192.0.2.1, unknown"}, "10.0.0.1:9"},
		{"10.0.0.1:9", []string{"192.0.2.1, , 10.0.0.3"}, "10.0.0.3"},
		{"10.0.0.1:9", []string{""}, "10.0.0.1:9"},
		{"10.0.0.1:9", nil, "10.0.0.1:9"},
		{"192.0.2.7:9", []string{"203.0.113.9"}, "192.0.2.7:9"},
		{"10.0.1.1:9", []string{"203.0.113.9"}, "10.0.1.1:9"},
		{"@", []string{"203.0.113.9"}, "@"},
	} {
		var log journal
		r := jwtRig(t, func(cfg *facade.Config) {
			cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
			behind(t, cfg, "10.0.0.0/24", "2001:db8:7::1")
		})
		if code := r.forwarded(t, c.peer, "bad", c.hops...); code != http.StatusUnauthorized {
			t.Errorf("%s for %q: %d", c.peer, c.hops, code)
		}
		found := regexp.MustCompile(`remote=(\S+)`).FindStringSubmatch(log.String())
		if len(found) != 2 || strings.Trim(found[1], `"`) != c.want {
			t.Errorf("%s for %q has the address %q, want %s", c.peer, c.hops, found, c.want)
		}
	}
}

// Refused tokens behind a proxy count for the client, over HTTP and WebSocket. Without a trusted
// proxy they count for the peer, whatever the header has.
func TestBadTokensBehindAProxy(t *testing.T) {
	t.Parallel()
	scarce := func(cfg *facade.Config) { cfg.Limits.BadTokenRate, cfg.Limits.BadTokenBurst = 1, 1 }
	r := jwtRig(t, func(cfg *facade.Config) {
		scarce(cfg)
		behind(t, cfg, "127.0.0.1", "10.0.0.0/24")
	})
	waited := func(r *rig, guess func()) bool {
		t.Helper()
		before := r.seen.count("limit bad_tokens")
		guess()
		return r.seen.count("limit bad_tokens") > before
	}
	over := func(client string) func() {
		return func() {
			if code := r.forwarded(t, "10.0.0.1:9", "bad", client); code != http.StatusUnauthorized {
				t.Errorf("%s: %d", client, code)
			}
		}
	}
	socket := func(client string) func() {
		return func() {
			conn, resp, err := websocket.Dial(t.Context(), r.ws.URL, &websocket.DialOptions{HTTPHeader: http.Header{"X-Forwarded-For": {client}}})
			if err != nil {
				t.Fatal(err)
			}
			if resp.Body != nil {
				_ = resp.Body.Close()
			}
			defer func() { _ = conn.CloseNow() }()
			if err := conn.Write(t.Context(), websocket.MessageText, []byte(`{"op":"AUTH","token":"x.y.z"}`)); err != nil {
				t.Fatal(err)
			}
			if _, answer, err := conn.Read(t.Context()); err != nil || !strings.Contains(string(answer), "jwt_invalid") {
				t.Errorf("%s: %s %v", client, answer, err)
			}
		}
	}
	for i, c := range []struct {
		guess func()
		waits bool
	}{
		{over("192.0.2.1"), false},
		{over("2001:db8:0:1::1"), false},
		{over("2001:db8:0:1::2"), true},
		{over("192.0.2.2"), false},
		{socket("192.0.2.2"), true},
		{socket("192.0.2.3"), false},
		{over("192.0.2.3"), true},
	} {
		if got := waited(r, c.guess); got != c.waits {
			t.Errorf("guess %d waited: %v", i, got)
		}
	}
	bare := jwtRig(t, scarce)
	for i, waits := range []bool{false, true} {
		if got := waited(bare, func() { bare.forwarded(t, "10.0.0.1:9", "bad", netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}).String()) }); got != waits {
			t.Errorf("without a trusted proxy, guess %d waited: %v", i, got)
		}
	}
}

func TestProxiesThatCannotBe(t *testing.T) {
	for text, want := range map[string]string{
		"":                  "neither an address nor a range",
		"proxy.example.com": "neither an address nor a range",
		"10.0.0.1:80":       "neither an address nor a range",
		"10.0.0.0/33":       "neither an address nor a range",
		"fe80::1%eth0":      "neither an address nor a range",
		"10.0.0.1/24":       "write 10.0.0.0/24",
		"0.0.0.0/0":         "trusts every client",
		"::/0":              "trusts every client",
		"::ffff:0.0.0.0/96": "in the form of IPv4",
	} {
		if _, err := facade.ParseProxy(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	for _, text := range []string{"10.0.0.7", "::ffff:10.0.0.7", "10.0.0.0/24", "2001:db8::/32", "::1"} {
		if _, err := facade.ParseProxy(text); err != nil {
			t.Error(err)
		}
	}
}
