package eventhub

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"
)

var (
	allStates = []State{StateIdle, StateToken, StateOpening, StateAuthenticating, StateReady, StateWaiting, StateFailed, StateClosed}
	allInputs = []input{inputStart, inputToken, inputOpen, inputAccepted, inputLost, inputRefused, inputWake, inputClose}
)

// README.md, and that of the client in TypeScript, show the table.
func TestTheReadmesShowTheTable(t *testing.T) {
	var want []string
	for _, s := range allStates {
		for _, in := range allInputs {
			if tr, ok := table[s][in]; ok {
				var actions []string
				for _, a := range tr.actions {
					actions = append(actions, string(a))
				}
				want = append(want, fmt.Sprintf("%s %s %s %s", s, in, tr.next, strings.Join(actions, ", ")))
			}
		}
	}
	row := regexp.MustCompile("(?m)^\\| `(\\w+)` \\| `(\\w+)` \\| `(\\w+)` \\| (.*?) \\|$")
	for _, name := range []string{"README.md", "../README.md"} {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, m := range row.FindAllStringSubmatch(string(text), -1) {
			got = append(got, strings.Join(m[1:], " "))
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s has\n%s\nwant\n%s", name, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
}

const within = 30 * time.Second

func get[T any](t *testing.T, what string, from <-chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(within):
		t.Fatalf("not within %v: %s", within, what)
	}
	panic("not reached")
}

// end is the hub's end of a connection, which the test plays.
type end struct {
	t  *testing.T
	ws *websocket.Conn
}

type sent struct {
	Op    string   `json:"op"`
	Corr  string   `json:"corr"`
	Token string   `json:"token"`
	Caps  []string `json:"caps"`
	Topic string   `json:"topic"`
	Group string   `json:"group"`
	Opts  struct {
		ID string `json:"id"`
	} `json:"opts"`
	IDs []string `json:"ids"`
}

func (e *end) next() sent {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	_, b, err := e.ws.Read(ctx)
	if err != nil {
		e.t.Fatalf("read a frame: %v", err)
	}
	var f sent
	if err := json.Unmarshal(b, &f); err != nil {
		e.t.Fatal(err)
	}
	return f
}

// of returns the next frame with that op, and skips others.
func (e *end) of(op string) sent {
	e.t.Helper()
	for {
		if f := e.next(); f.Op == op {
			return f
		}
	}
}

func (e *end) says(format string, args ...any) {
	e.t.Helper()
	if err := e.ws.Write(context.Background(), websocket.MessageText, fmt.Appendf(nil, format, args...)); err != nil {
		e.t.Errorf("write a frame: %v", err)
	}
}

func (e *end) ok(f sent) { e.says(`{"op":"OK","corr":%q}`, f.Corr) }

func (e *end) refuses(f sent, code string) {
	e.says(`{"op":"ERR","code":%q,"msg":"no","corr":%q}`, code, f.Corr)
}

// ended waits until the client has ended the connection.
func (e *end) ended() {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	for {
		if _, _, err := e.ws.Read(ctx); err != nil {
			if ctx.Err() != nil {
				e.t.Error("the connection stays")
			}
			return
		}
	}
}

func (e *end) breaks() { _ = e.ws.CloseNow() }

type answer struct {
	token string
	err   error
}

// life is a client, and what it lives through. The test plays the hub and the token provider.
type life struct {
	t      *testing.T
	client *Client
	asked  chan chan answer // questions to the token provider
	opened chan *end        // connections
	knocks chan net.Conn    // TCP connections, while holding
	states chan string
	errors chan error

	mu      sync.Mutex
	holding bool
	ends    []*end
	server  *httptest.Server
}

func live(t *testing.T, change func(*Options)) *life {
	t.Helper()
	l := &life{
		t: t, asked: make(chan chan answer, 100), opened: make(chan *end, 100), knocks: make(chan net.Conn, 100),
		states: make(chan string, 1000), errors: make(chan error, 100),
	}
	var handlers sync.WaitGroup
	l.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handlers.Add(1)
		defer handlers.Done()
		l.mu.Lock()
		holding := l.holding
		l.mu.Unlock()
		if holding {
			conn, _, err := w.(http.Hijacker).Hijack() //nolint:errcheck // HTTP/1
			if err == nil {
				l.knocks <- conn
			}
			return
		}
		ws, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		e := &end{t, ws}
		l.mu.Lock()
		l.ends = append(l.ends, e)
		l.mu.Unlock()
		l.opened <- e
	}))
	opts := Options{
		MinPause: time.Millisecond, MaxPause: time.Millisecond,
		TokenProvider: func(ctx context.Context) (string, error) {
			question := make(chan answer, 1)
			l.asked <- question
			select {
			case a := <-question:
				return a.token, a.err
			case <-ctx.Done():
				return "", ctx.Err()
			}
		},
		OnState: func(s State, err error) {
			text := string(s)
			if e, ok := errors.AsType[*Error](err); ok {
				text += ": " + e.Code
			}
			l.states <- text
		},
		OnError: func(err error) { l.errors <- err },
	}
	if change != nil {
		change(&opts)
	}
	var err error
	if l.client, err = New("ws"+strings.TrimPrefix(l.server.URL, "http"), opts); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		l.mu.Lock()
		for _, e := range l.ends { // which do not answer a closing handshake
			e.breaks()
		}
		l.mu.Unlock()
		l.close()
		for len(l.knocks) > 0 {
			_ = (<-l.knocks).Close()
		}
		for len(l.opened) > 0 {
			(<-l.opened).breaks()
		}
		l.server.Close()
		handlers.Wait()
	})
	return l
}

func (l *life) hold(on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.holding = on
}

// close closes the client without draining.
func (l *life) close() {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_ = l.client.Drain(ctx)
}

// becomes waits for a state, with the code of its reason if want has one, and fails for any other
// that comes first than those to skip.
func (l *life) becomes(want string, skip ...string) {
	l.t.Helper()
	for {
		got := get(l.t, want, l.states)
		name, _, _ := strings.Cut(got, ":")
		if got == want || name == want {
			return
		}
		if !slices.Contains(skip, name) {
			l.t.Fatalf("the state is %q, want %q", got, want)
		}
	}
}

func (l *life) answers(token string) { get(l.t, "a question", l.asked) <- answer{token: token} }

// authenticating brings the client there, and returns the hub's end with the AUTH.
func (l *life) authenticating(token string) (*end, sent) {
	l.t.Helper()
	l.answers(token)
	e := get(l.t, "a connection", l.opened)
	f := e.next()
	if f.Op != "AUTH" || f.Token != token || !slices.Equal(f.Caps, caps) {
		l.t.Fatalf("the first frame is %+v", f)
	}
	return e, f
}

func (l *life) ready(token string) *end {
	l.t.Helper()
	e, f := l.authenticating(token)
	e.ok(f)
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	if err := l.client.Ready(ctx); err != nil {
		l.t.Fatal(err)
	}
	return e
}

func TestTheWayToAConnection(t *testing.T) {
	l := live(t, nil)
	e := l.ready("a token")
	for _, s := range []string{"token", "opening", "authenticating", "ready"} {
		l.becomes(s)
	}
	closed := make(chan error, 1)
	go func() { closed <- l.client.Close() }()
	e.ended()
	if err := get(t, "Close", closed); err != nil {
		t.Error(err)
	}
	l.becomes("closed: closed")
}

// A hub that ends may ask for a pause, which holds for the next attempt alone.
func TestPauseThatTheHubAsksFor(t *testing.T) {
	l := live(t, func(o *Options) { o.MinPause, o.MaxPause = time.Millisecond, time.Millisecond })
	e := l.ready("t")
	begin := time.Now()
	_ = e.ws.Close(4000, "draining retry_after_ms=300")
	e = l.ready("t")
	if took := time.Since(begin); took < 300*time.Millisecond {
		t.Errorf("the client came back after %v", took)
	}
	begin = time.Now()
	for _, reason := range []string{"", "draining retry_after_ms=", "draining retry_after_ms=-60000", "draining retry_after_ms=60000x", "draining 60000"} {
		_ = e.ws.Close(4000, reason)
		e = l.ready("t")
	}
	if took := time.Since(begin); took > 50*time.Second {
		t.Errorf("the client came back after %v", took)
	}
}

// Each way in which an attempt or a connection is lost, the next with a token of its own.
func TestLost(t *testing.T) {
	for name, breaks := range map[string]func(*life) string{
		"token": func(l *life) string {
			get(l.t, "a question", l.asked) <- answer{err: errors.New("no")}
			return "connection_lost"
		},
		"empty token": func(l *life) string {
			l.answers("")
			return "connection_lost"
		},
		"opening": func(l *life) string {
			l.hold(true)
			l.answers("t")
			_ = get(l.t, "a connection", l.knocks).Close()
			l.hold(false)
			return "connection_lost"
		},
		"opening, by the other's silence": func(l *life) string {
			l.hold(true)
			l.answers("t")
			c := get(l.t, "a connection", l.knocks)
			l.t.Cleanup(func() { _ = c.Close() })
			l.hold(false)
			return "connect_timeout"
		},
		"authenticating": func(l *life) string {
			e, _ := l.authenticating("t")
			e.breaks()
			return "connection_lost"
		},
		"authenticating, by the other's silence": func(l *life) string {
			e, _ := l.authenticating("t")
			e.ended()
			return "connect_timeout"
		},
		"authenticating, with a token that is refused": func(l *life) string {
			e, f := l.authenticating("t")
			e.refuses(f, "jwt_invalid")
			return "jwt_invalid"
		},
		"ready": func(l *life) string {
			l.ready("t").breaks()
			return "connection_lost"
		},
		"ready, by a close code of the hub": func(l *life) string {
			_ = l.ready("t").ws.Close(4000, "draining")
			return "connection_lost"
		},
		"ready, by silence": func(l *life) string {
			e := l.ready("t")
			if f := e.next(); f.Op != "UNSUBSCRIBE" || f.Topic != "ping" {
				l.t.Errorf("asked with %+v", f)
			}
			e.ended()
			return "connection_lost"
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := live(t, func(o *Options) {
				if strings.Contains(name, "silence") {
					o.AttemptTimeout, o.PingEvery = 200*time.Millisecond, 200*time.Millisecond
				}
			})
			code := breaks(l)
			l.becomes("waiting: "+code, "token", "opening", "authenticating", "ready")
			l.hold(false)
			l.ready("another")
		})
	}
}

// What is refused in each state, after which there is no other attempt.
func TestRefused(t *testing.T) {
	giveUp := func(e *end) { _ = e.ws.Close(4103, "auth_refused") }
	for name, refuses := range map[string]func(*life) string{
		"authenticating": func(l *life) string {
			e, _ := l.authenticating("t")
			giveUp(e)
			return "gave_up"
		},
		"ready": func(l *life) string {
			giveUp(l.ready("t"))
			return "gave_up"
		},
		"the third token in a row": func(l *life) string {
			for range 3 {
				e, f := l.authenticating("t")
				e.refuses(f, "jwt_invalid")
			}
			return "jwt_invalid"
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := live(t, nil)
			code := refuses(l)
			l.becomes("failed: "+code, "token", "opening", "authenticating", "ready", "waiting")
			for what, err := range map[string]error{
				"Ready":   l.client.Ready(context.Background()),
				"report":  get(t, "a report", l.errors),
				"Publish": func() error { _, err := l.client.Publish(context.Background(), "t", 1, PublishOptions{}); return err }(),
			} {
				if e, ok := errors.AsType[*Error](err); !ok || e.Code != code || e.Retryable {
					t.Errorf("%s: %v", what, err)
				}
			}
			if err := l.client.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestAFixedTokenThatIsRefusedIsNotTriedAgain(t *testing.T) {
	fixed := func(o *Options) { o.Token, o.TokenProvider = "fixed", nil }
	l := live(t, fixed)
	e := get(t, "a connection", l.opened)
	e.refuses(e.next(), "bad_token")
	l.becomes("failed: bad_token", "token", "opening", "authenticating")

	// A hub at its limits is asked again, whatever the token.
	l = live(t, fixed)
	e = get(t, "a connection", l.opened)
	e.refuses(e.next(), "overloaded")
	l.becomes("waiting: overloaded", "token", "opening", "authenticating")
	e = get(t, "another connection", l.opened)
	e.ok(e.next())
	l.becomes("ready", "token", "opening", "authenticating")
}

// Close in each state leaves nothing, and what comes later changes nothing.
func TestCloseInEachState(t *testing.T) {
	for name, to := range map[string]func(*life) (later func()){
		"token": func(l *life) func() {
			q := get(l.t, "a question", l.asked)
			return func() { q <- answer{token: "too late"} }
		},
		"opening": func(l *life) func() {
			l.hold(true)
			l.answers("t")
			c := get(l.t, "a connection", l.knocks)
			return func() { _ = c.Close() }
		},
		"authenticating": func(l *life) func() {
			e, _ := l.authenticating("t")
			go e.ended()
			return e.breaks
		},
		"ready": func(l *life) func() {
			e := l.ready("t")
			go e.ended()
			return e.breaks
		},
		"waiting": func(l *life) func() {
			get(l.t, "a question", l.asked) <- answer{err: errors.New("no")}
			l.becomes("waiting: connection_lost", "token")
			return func() {}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := live(t, func(o *Options) { o.MinPause, o.MaxPause = time.Hour, time.Hour })
			later := to(l)
			if got := l.client.State(); string(got) != name {
				eventuallyState(t, l.client, State(name))
			}
			l.close()
			l.close()
			later()
			if got := l.client.State(); got != StateClosed {
				t.Errorf("the state is %s", got)
			}
			if len(l.asked) > 0 || len(l.opened) > 0 {
				t.Error("another attempt")
			}
		})
	}
}

func eventuallyState(t *testing.T, c *Client, want State) {
	t.Helper()
	for deadline := time.Now().Add(within); c.State() != want; <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the state is %s, want %s", c.State(), want)
		}
	}
}

func TestASubscriptionMadeWhileTheTokenIsFetchedIsSentOnce(t *testing.T) {
	l := live(t, nil)
	q := get(t, "a question", l.asked)
	type joined struct {
		s   *Subscription
		err error
	}
	answered := make(chan joined, 1)
	go func() {
		s, err := l.client.Subscribe(context.Background(), "t", "g", SubscribeOptions{}, func(context.Context, *Delivery) error { return nil })
		answered <- joined{s, err}
	}()
	for joined := false; !joined; {
		l.client.mu.Lock()
		joined = len(l.client.subs) == 1
		l.client.mu.Unlock()
	}
	q <- answer{token: "t"}
	e := get(t, "a connection", l.opened)
	e.ok(e.next())
	f := e.next()
	if f.Op != "SUBSCRIBE" || f.Topic != "t" || f.Group != "g" {
		t.Fatalf("came %+v", f)
	}
	e.ok(f)
	j := get(t, "Subscribe", answered)
	if j.err != nil {
		t.Fatal(j.err)
	}

	// One that is left while there is no connection is not made again.
	e.breaks()
	q = get(t, "a question", l.asked)
	if err := j.s.Unsubscribe(context.Background()); err != nil {
		t.Error(err)
	}
	q <- answer{token: "t"}
	e = get(t, "a connection", l.opened)
	e.ok(e.next())
	published := make(chan error, 1)
	if err := l.client.PublishAsync(context.Background(), "t", 1, PublishOptions{}, func(_ string, err error) { published <- err }); err != nil {
		t.Fatal(err)
	}
	f = e.next()
	if f.Op != "PUBLISH" {
		t.Errorf("came %+v", f)
	}
	e.ok(f)
	if err := get(t, "an answer", published); err != nil {
		t.Error(err)
	}
}

// expiring is a JWT that expires soon; nobody checks its signature here.
func expiring(in time.Duration, name string) string {
	claims := fmt.Sprintf(`{"exp":%f}`, float64(time.Now().Add(in).UnixMilli())/1000)
	return name + "." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".x"
}

func TestATokenIsReplacedOnItsConnection(t *testing.T) {
	l := live(t, nil)
	e := l.ready(expiring(200*time.Millisecond, "first"))
	l.answers(expiring(time.Hour, "second"))
	f := e.next()
	if f.Op != "AUTH" || !strings.HasPrefix(f.Token, "second.") {
		t.Fatalf("came %+v", f)
	}
	e.ok(f)
	if len(l.opened) > 0 {
		t.Error("another connection")
	}
}

func TestATokenThatComesAfterABreakIsNotUsedForTheConnectionThatWas(t *testing.T) {
	l := live(t, nil)
	e := l.ready(expiring(100*time.Millisecond, "first"))
	q := get(t, "the question of the refresh", l.asked)
	e.breaks()
	l.becomes("waiting: connection_lost", "token", "opening", "authenticating", "ready")
	l.becomes("token")
	second := answer{token: expiring(time.Hour, "second")}
	q <- second
	e = nil
	for e == nil {
		select {
		case q = <-l.asked: // the reconnect came too late for the answer to the first question
			q <- second
		case e = <-l.opened:
		case <-time.After(within):
			t.Fatal("no connection")
		}
	}
	f := e.next()
	if !strings.HasPrefix(f.Token, "second.") {
		t.Errorf("came %+v", f)
	}
	e.ok(f)
	if err := l.client.Ready(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestFramesBehindATokenThatIsRefusedAreSentAgain(t *testing.T) {
	l := live(t, nil)
	e := l.ready(expiring(100*time.Millisecond, "first"))
	l.answers(expiring(time.Hour, "second"))
	auth := e.next()
	published := make(chan error, 1)
	if err := l.client.PublishAsync(context.Background(), "t", 1, PublishOptions{}, func(_ string, err error) { published <- err }); err != nil {
		t.Fatal(err)
	}
	first := e.of("PUBLISH")
	e.refuses(auth, "jwt_invalid")
	e.refuses(first, "unauthorized")
	e = l.ready("third")
	again := e.of("PUBLISH")
	if again.Opts.ID != first.Opts.ID || first.Opts.ID == "" {
		t.Errorf("came %+v after %+v", again, first)
	}
	e.ok(again)
	if err := get(t, "an answer", published); err != nil {
		t.Error(err)
	}
}

// All who ask while a question is open get the answer to that question.
func TestQuestionsAtTheSameTimeAreOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		tokens := tokens{timeout: time.Second, provider: func(context.Context) (string, error) {
			asked++
			<-time.After(time.Millisecond)
			return fmt.Sprint("token ", asked), nil
		}}
		got := make(chan string, 3)
		for range 3 {
			go func() {
				token, _ := tokens.ask(t.Context())
				got <- token
			}()
		}
		for range 3 {
			if token := <-got; token != "token 1" {
				t.Error(token)
			}
		}
		if token, err := tokens.ask(t.Context()); token != "token 2" || err != nil {
			t.Error(token, err)
		}
		tokens.wg.Wait()
	})
}

// A provider that takes for ever does not hold up what else the client does for ever.
func TestAProviderThatTakesTooLong(t *testing.T) {
	l := live(t, func(o *Options) { o.AttemptTimeout = 50 * time.Millisecond })
	get(t, "a question", l.asked)
	l.becomes("waiting: connection_lost", "token")
	l.ready("in time")
}

// PublishMany sends as many as it may without an answer, and takes no more from its source.
func TestPublishManySendsManyAtATime(t *testing.T) {
	l := live(t, nil)
	e := l.ready("t")
	const n = DefaultManyInFlight + 10
	taken := make(chan int, n)
	published := make(chan error, 1)
	go func() {
		_, err := l.client.PublishMany(context.Background(), "t", func(yield func(Outgoing) bool) {
			for i := range n {
				taken <- i
				if !yield(Outgoing{Payload: i}) {
					return
				}
			}
		})
		published <- err
	}()
	var frames []sent
	for range DefaultManyInFlight {
		frames = append(frames, e.of("PUBLISH"))
	}
	// The one that is taken, and waits for its place, is not sent.
	if len(taken) > DefaultManyInFlight+1 {
		t.Errorf("%d were taken", len(taken))
	}
	for _, f := range frames {
		e.ok(f)
	}
	for range 10 {
		e.ok(e.of("PUBLISH"))
	}
	if err := get(t, "the answers", published); err != nil {
		t.Error(err)
	}
}

// Acknowledgements that come together leave in one frame.
func TestAcknowledgementsLeaveTogether(t *testing.T) {
	l := live(t, nil)
	e := l.ready("t")
	subscribed := make(chan error, 1)
	const n = 100
	var began sync.WaitGroup
	began.Add(n)
	going := make(chan struct{})
	go func() {
		_, err := l.client.Subscribe(context.Background(), "t", "g", SubscribeOptions{Concurrency: n}, func(context.Context, *Delivery) error {
			began.Done()
			<-going
			return nil
		})
		subscribed <- err
	}()
	e.ok(e.of("SUBSCRIBE"))
	if err := get(t, "Subscribe", subscribed); err != nil {
		t.Fatal(err)
	}
	for i := range n {
		e.says(`{"op":"EVENT","topic":"t","group":"g","event":{"id":"%d","ts":1,"topic":"t","payload":1},"ctx":{"attempt":1,"ack_deadline_ms":30000}}`, i)
	}
	began.Wait()
	close(going)
	frames, ids := 0, map[string]bool{}
	for len(ids) < n {
		f := e.of("ACK")
		frames++
		for _, id := range f.IDs {
			ids[id] = true
		}
		e.ok(f)
	}
	if frames > n/2 {
		t.Errorf("%d frames for %d acknowledgements", frames, n)
	}
}

func TestTheTimeOfARefresh(t *testing.T) {
	for left, want := range map[time.Duration]time.Duration{
		10 * time.Second: 8 * time.Second, time.Hour: 59 * time.Minute, 0: 0, -time.Minute: 0,
	} {
		if got := refreshDelay(left); got != want {
			t.Errorf("%v left: %v, want %v", left, got, want)
		}
	}
	for _, token := range []string{"", "a", "a.b", "a.b.c", "a." + base64.RawURLEncoding.EncodeToString([]byte(`{"sub":"x"}`)) + ".c"} {
		if _, ok := expiry(token); ok {
			t.Errorf("%q expires", token)
		}
	}
}

func TestIDsRise(t *testing.T) {
	m := newIDMaker()
	last := ""
	for range 10_000 {
		id := m.next()
		if id <= last {
			t.Fatalf("%s after %s", id, last)
		}
		last = id
	}
	form := regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
	if !form.MatchString(last) {
		t.Error(last)
	}
}
