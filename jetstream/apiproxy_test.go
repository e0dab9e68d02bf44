package jetstream

import (
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats.go"
)

// apiProxy passes requests of hubs to the JetStream of a server, and lets a test hold some back,
// drop them, or change their answers. Hubs reach it by the domain of its name.
type apiProxy struct {
	nc *nats.Conn
	wg sync.WaitGroup
	// meets is called for each request, before it is passed on, with the subject behind the prefix.
	// It may wait. With false, the request is dropped.
	meets atomic.Pointer[func(request string) bool]
	// changes, if set, changes the answers to one request.
	changes atomic.Pointer[answerChange]
	// answers, if set, answers a request instead of the server; nil passes the request on.
	answers atomic.Pointer[func(request string) []byte]
	// unanswered, if set, reports that a request gets 503 (no responders).
	unanswered atomic.Pointer[func(request string) bool]
}

// answerChange changes the answers to a request.
type answerChange struct {
	request string
	change  func(answer []byte) []byte
}

const proxyDomain = "proxied"

// startAPIProxy starts a proxy on the server, for buses with Config.Domain proxyDomain.
func startAPIProxy(tb testing.TB, url string) *apiProxy {
	tb.Helper()
	nc, err := nats.Connect(url)
	if err != nil {
		tb.Fatal(err)
	}
	p := &apiProxy{nc: nc}
	prefix := "$JS." + proxyDomain + ".API."
	sub, err := nc.Subscribe(prefix+">", func(m *nats.Msg) {
		request := strings.TrimPrefix(m.Subject, prefix)
		p.wg.Go(func() { p.pass(request, m) })
	})
	if err != nil {
		tb.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		_ = sub.Unsubscribe()
		p.wg.Wait()
		nc.Close()
	})
	return p
}

func (p *apiProxy) pass(request string, m *nats.Msg) {
	if meets := p.meets.Load(); meets != nil && !(*meets)(request) {
		return
	}
	if answers := p.answers.Load(); answers != nil {
		if answer := (*answers)(request); answer != nil {
			_ = p.nc.Publish(m.Reply, answer)
			return
		}
	}
	if f := p.unanswered.Load(); f != nil && (*f)(request) {
		_ = p.nc.PublishMsg(&nats.Msg{Subject: m.Reply, Header: nats.Header{"Status": {"503"}}})
		return
	}
	subject := "$JS.API." + request
	if strings.HasPrefix(request, "$KV.") { // so nats.go writes to buckets of a domain
		subject = request
	}
	to := &nats.Msg{Subject: subject, Reply: m.Reply, Header: m.Header, Data: m.Data}
	changes := p.changes.Load()
	if changes == nil || changes.request != request {
		_ = p.nc.PublishMsg(to) // it fails at the end of the test
		return
	}
	reply, err := p.nc.RequestMsg(to, wait)
	if err != nil {
		return
	}
	if answer := changes.change(reply.Data); answer != nil {
		_ = p.nc.PublishMsg(&nats.Msg{Subject: m.Reply, Header: reply.Header, Data: answer})
	}
}

// meet sets what is called for each request.
func (p *apiProxy) meet(f func(request string) bool) { p.meets.Store(&f) }

// answer sets what changes the answers to one request. An answer that becomes nil is lost.
func (p *apiProxy) answer(request string, change func([]byte) []byte) {
	p.changes.Store(&answerChange{request, change})
}

// instead sets what answers requests instead of the server.
func (p *apiProxy) instead(f func(request string) []byte) { p.answers.Store(&f) }

// leaveUnanswered sets which requests get 503 (no responders).
func (p *apiProxy) leaveUnanswered(f func(request string) bool) { p.unanswered.Store(&f) }
