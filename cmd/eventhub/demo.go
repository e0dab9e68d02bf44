package main

import (
	"crypto/rand"
	"embed"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"eventhub/acl"
	"eventhub/ops"
	"eventhub/projections/process"
)

// demoFiles are the files of the demo. eventhub.js is the client of sdk/, which `npm run bundle`
// writes there.
//
//go:embed demo
var demoFiles embed.FS

// Paths of the demo, on the port of the WebSocket.
const (
	demoPath      = "/demo/"
	demoTokenPath = demoPath + "token"
)

// demoRights are the rights of the token that the demo's page gets on loopback. It may follow the
// states of processes, and join no group of theirs.
const demoRights = `{"rules":[
	{"effect":"deny","action":"subscribe","topics":["` + process.TopicState + `"],"groups":["*"]},
	{"effect":"allow","action":"subscribe","topics":["demo.*","` + process.TopicState + `"]},
	{"effect":"allow","action":"publish","topics":["demo.*"]}
]}`

// addDemoToken makes the token of the demo's page, another one at each start. Where clients may be
// on other hosts, the page gets none and asks its visitor.
func (h *hub) addDemoToken() error {
	if !h.cmd.Demo || !h.cmd.local() {
		return nil
	}
	policy, err := acl.ParsePolicy([]byte(demoRights))
	if err != nil {
		return fmt.Errorf("token of the demo: %w", err)
	}
	h.demoToken = rand.Text()
	h.auth.Static = append(h.auth.Static, acl.StaticToken{Name: "demo", Token: h.demoToken, Policy: policy, Limited: true})
	return nil
}

// besideDemo returns the handler of the port of the WebSocket: sockets, and the demo if it runs.
func (h *hub) besideDemo(sockets http.Handler) http.Handler {
	if !h.cmd.Demo {
		return sockets
	}
	return &demoPage{sockets: sockets, token: h.demoToken, overTLS: h.cert != nil}
}

// demoPage serves the demo and its token beside WebSockets, which any path may open.
type demoPage struct {
	sockets http.Handler
	// token is the token for pages, or "" if visitors bring their own.
	token string
	// overTLS says that browsers must keep using TLS.
	overTLS bool
}

// ServeHTTP serves GET requests for the demo that open no WebSocket, and gives all others to
// sockets.
func (p *demoPage) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	isDemo := r.URL.Path+"/" == demoPath || strings.HasPrefix(r.URL.Path, demoPath)
	if !isDemo || r.Header.Get("Upgrade") != "" || r.Method != http.MethodGet && r.Method != http.MethodHead {
		if ownOrigin(r) {
			r.Header.Del("Origin") // the demo's page may connect, whatever EVENTHUB_ORIGINS says
		}
		p.sockets.ServeHTTP(w, r)
		return
	}
	secure(http.HandlerFunc(p.page), p.overTLS).ServeHTTP(w, r)
}

func (p *demoPage) page(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case demoTokenPath:
		p.giveToken(w, r)
	case strings.TrimSuffix(demoPath, "/"):
		http.Redirect(w, r, demoPath, http.StatusMovedPermanently)
	default:
		ops.ServePage(w, r, demoFiles, "demo")
	}
}

// ownOrigin reports whether a request comes from a page of the host and port that it goes to. The
// name of another host may be that of a page that made its own name resolve to this host.
func ownOrigin(r *http.Request) bool {
	_, host, ok := strings.Cut(r.Header.Get("Origin"), "://")
	return ok && strings.EqualFold(host, r.Host) && ops.IsLocal(r.Host)
}

// giveToken gives the demo's token to the demo's page. A page of another origin cannot read the
// answer, and is refused where the browser tells. Checking the Host keeps out pages whose name
// resolves to this host. A request that a proxy passed on may come from anywhere.
func (p *demoPage) giveToken(w http.ResponseWriter, r *http.Request) {
	site := r.Header.Get("Sec-Fetch-Site")
	h := w.Header()
	h.Set("Content-Type", "application/json")
	if p.token == "" || !ops.IsLocal(r.Host) || passedOn(r.Header) || site != "" && site != "same-origin" {
		w.WriteHeader(http.StatusForbidden)
		_ = json.NewEncoder(w).Encode(map[string]string{
			"error": "The demo has no token for this request: use one of your own, such as the hub's.", "code": "forbidden",
		})
		return
	}
	_ = json.NewEncoder(w).Encode(map[string]string{"token": p.token})
}

// passedOn reports whether a proxy says that it passed the request on.
func passedOn(h http.Header) bool {
	for _, name := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-Ip", "Via"} {
		if h.Get(name) != "" {
			return true
		}
	}
	return false
}
