package eventhub_test

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"eventhub/acl"
	"eventhub/facade"
	"eventhub/facade/hubtest"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	eventhub "eventhub/sdk/go"
)

// patience is how long a condition is waited for that holds at once on a machine with nothing else
// to do.
const patience = 30 * time.Second

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, natstest.Leaks()...) }

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for !holds() {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
		<-time.After(2 * time.Millisecond)
	}
}

func receive[T any](t *testing.T, what string, from <-chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(patience):
		t.Fatalf("not within %v: %s", patience, what)
	}
	panic("not reached")
}

// fast are options for tests that break connections.
func fast(token string) eventhub.Options {
	return eventhub.Options{Token: token, MinPause: 5 * time.Millisecond, MaxPause: 50 * time.Millisecond}
}

func connect(t *testing.T, url string, opts eventhub.Options) *eventhub.Client {
	t.Helper()
	c, err := eventhub.Connect(t.Context(), url, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shut(c) })
	return c
}

// shut closes a client without waiting for what has not finished.
func shut(c *eventhub.Client) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_ = c.Drain(ctx)
}

func newTopic() string { return "t." + strings.ToLower(rand.Text()) }

func publish(t *testing.T, c *eventhub.Client, topic string, payloads ...any) {
	t.Helper()
	for _, p := range payloads {
		if _, err := c.Publish(t.Context(), topic, p, eventhub.PublishOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

func subscribe(t *testing.T, c *eventhub.Client, topic, group string, opts eventhub.SubscribeOptions, h eventhub.Handler) *eventhub.Subscription {
	t.Helper()
	s, err := c.Subscribe(t.Context(), topic, group, opts, h)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// failsWith wants an *Error with that code.
func failsWith(t *testing.T, err error, code string, retryable bool) {
	t.Helper()
	failure, ok := errors.AsType[*eventhub.Error](err)
	if !ok || failure.Code != code || failure.Retryable != retryable {
		t.Errorf("got %v, want %s, retryable %v", err, code, retryable)
	}
}

// stored returns the payloads that a topic has.
func stored(t *testing.T, hub *hubtest.Hub, topic string) []string {
	t.Helper()
	var all []string
	r := eventhub.Reader{URL: hub.HTTP, Token: hub.Token}
	for e, err := range r.Replay(t.Context(), topic, eventhub.ReplayOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, string(e.Payload))
	}
	return all
}

// backlog is how far a group is.
func backlog(t *testing.T, hub *hubtest.Hub, topic, group string) jetstream.Backlog {
	t.Helper()
	b, err := hub.Bus.Group(topic, group).Backlog(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// unsettled returns how many events of a group are not settled. The server counts an event a moment
// after its publish is confirmed.
func unsettled(t *testing.T, hub *hubtest.Hub, topic, group string) int {
	t.Helper()
	b := backlog(t, hub, topic, group)
	return int(b.Waiting + b.Leased)
}

// settled waits until the group g has settled all events of a topic.
func settled(t *testing.T, hub *hubtest.Hub, topic string) {
	t.Helper()
	eventually(t, "the group g has settled everything", func() bool {
		b := backlog(t, hub, topic, "g")
		return b.Waiting+b.Leased == 0 && b.Floor >= b.Tail
	})
}

// list is a list that goroutines append to.
type list[T any] struct {
	mu  sync.Mutex
	all []T
}

func (l *list[T]) add(v T) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, v)
}

func (l *list[T]) get() []T {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]T(nil), l.all...)
}

// proxy is a TCP proxy between clients and a hub, which breaks connections as a network does.
type proxy struct {
	url    string
	target string

	mu       sync.Mutex
	pairs    map[net.Conn]net.Conn
	deaf     bool          // what the hub answers does not arrive
	budget   int           // bytes of the hub until the connection is cut; -1: no end
	held     chan struct{} // while not nil, nothing of the hub is read
	refusing bool
	wg       sync.WaitGroup
}

func startProxy(t *testing.T, hub string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{url: "ws://" + l.Addr().String(), target: strings.TrimPrefix(hub, "ws://"), pairs: make(map[net.Conn]net.Conn), budget: -1}
	p.wg.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			p.pass(client)
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		p.refuse(true)
		p.cut()
		p.wg.Wait()
	})
	return p
}

func (p *proxy) pass(client net.Conn) {
	hub, err := net.Dial("tcp", p.target)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil || p.refusing {
		_ = client.Close()
		if err == nil {
			_ = hub.Close()
		}
		return
	}
	p.pairs[client] = hub
	p.wg.Go(func() {
		_, _ = io.Copy(hub, client)
		p.end(client, hub)
	})
	p.wg.Go(func() {
		buf := make([]byte, 32<<10)
		for {
			p.mu.Lock()
			held := p.held
			p.mu.Unlock()
			if held != nil {
				<-held
			}
			n, err := hub.Read(buf)
			if err != nil {
				break
			}
			p.mu.Lock()
			deaf, over := p.deaf, p.budget >= 0 && n >= p.budget
			switch {
			case over:
				n, p.budget = p.budget, -1
			case p.budget >= 0:
				p.budget -= n
			}
			p.mu.Unlock()
			if over {
				_, _ = client.Write(buf[:n])
				break
			}
			if !deaf {
				if _, err := client.Write(buf[:n]); err != nil {
					break
				}
			}
		}
		p.end(client, hub)
	})
}

func (p *proxy) end(client, hub net.Conn) {
	_, _ = client.Close(), hub.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.pairs, client)
}

func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for client, hub := range p.pairs {
		_, _ = client.Close(), hub.Close()
	}
}

// cutAfter cuts the connection over which the next so many bytes of the hub have come.
func (p *proxy) cutAfter(bytes int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.budget = bytes
}

// hold keeps back what the hub sends, as a slow network does, until release is called.
func (p *proxy) hold() (release func()) {
	held := make(chan struct{})
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held = held
	return sync.OnceFunc(func() {
		p.mu.Lock()
		p.held = nil
		p.mu.Unlock()
		close(held)
	})
}

func (p *proxy) deafen(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.deaf = on
}

func (p *proxy) refuse(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refusing = on
}

// cutOnce cuts a client's connection, and waits until it has another.
func cutOnce(t *testing.T, p *proxy, c *eventhub.Client, states *list[eventhub.State]) {
	t.Helper()
	ready := func() (n int) {
		for _, s := range states.get() {
			if s == eventhub.StateReady {
				n++
			}
		}
		return n
	}
	before := ready()
	p.cut()
	eventually(t, "another connection", func() bool { return ready() > before && c.State() == eventhub.StateReady })
}

// watched are fast options whose client notes its states.
func watched(token string) (eventhub.Options, *list[eventhub.State]) {
	states := new(list[eventhub.State])
	opts := fast(token)
	opts.OnState = func(s eventhub.State, _ error) { states.add(s) }
	return opts, states
}

const secret = "a secret of at least thirty-two bytes"

// jwtHub is a hub that accepts JWTs as well.
func jwtHub(t *testing.T, change ...func(*facade.Config)) *hubtest.Hub {
	t.Helper()
	const own = "the hub's own token"
	return hubtest.New(t, hubtest.Token(own), hubtest.Facade(func(c *facade.Config) {
		tokens, err := acl.NewVerifier(t.Context(), acl.Config{Secret: []byte(secret), Static: []acl.StaticToken{{Name: "hub", Token: own}}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(tokens.Close)
		c.Auth = facade.Tokens(tokens)
		for _, f := range change {
			f(c)
		}
	}))
}

// scoped is a JWT with these scopes.
func scoped(life time.Duration, jti string, scopes ...string) string {
	return jwt(map[string]any{"sub": "test", "jti": jti, "scopes": scopes, "exp": float64(time.Now().Add(life).UnixMilli()) / 1000})
}

// jwt signs claims as HS256.
func jwt(claims map[string]any) string {
	part := func(v any) string {
		text, err := json.Marshal(v)
		if err != nil {
			panic(err)
		}
		return base64.RawURLEncoding.EncodeToString(text)
	}
	text := part(map[string]string{"alg": "HS256", "typ": "JWT"}) + "." + part(claims)
	mac := hmac.New(sha256.New, []byte(secret))
	_, _ = mac.Write([]byte(text))
	return text + "." + base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}
