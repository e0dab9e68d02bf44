// Package eventhub is the client of a hub: it publishes and consumes events over a WebSocket, and
// reads stored events over HTTP. A Client reconnects, renews its token, subscribes again and
// repeats publishes in doubt.
//
//	hub, err := eventhub.Connect(ctx, "ws://127.0.0.1:8090", eventhub.Options{Token: token})
//	if err != nil {
//		return err
//	}
//	defer hub.Close()
//	_, err = hub.Subscribe(ctx, "orders.placed", "mailer", eventhub.SubscribeOptions{},
//		func(ctx context.Context, d *eventhub.Delivery) error { return mail(ctx, d.Payload) })
//	id, err := hub.Publish(ctx, "orders.placed", Order{Number: 7}, eventhub.PublishOptions{})
//
// The package links no code of the hub. README.md beside it describes all features.
package eventhub

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"eventhub/sdk/go/wire"
)

// Defaults of Options.
const (
	DefaultMinPause        = time.Second
	DefaultMaxPause        = 30 * time.Second
	DefaultAttemptTimeout  = 10 * time.Second
	DefaultConnectTimeout  = 30 * time.Second
	DefaultPingEvery       = 15 * time.Second
	DefaultBufferEvents    = 10_000
	DefaultBufferBytes     = 16 << 20
	DefaultWindow          = 1_000
	DefaultDuplicateWindow = 2 * time.Minute
	DefaultRetry           = 30 * time.Second
	DefaultDrainTimeout    = 10 * time.Second
)

// caps are the capabilities that AUTH names.
var caps = []string{"group_reset", "events_lost", "retry_after"}

// Options configure a Client. Zero fields take the defaults.
type Options struct {
	// Token is the credential that AUTH carries.
	Token string
	// TokenProvider is asked for each connection, and before a JWT expires, instead of Token. It is
	// asked for one token at a time. It must return when its context ends, which is after
	// AttemptTimeout at the latest.
	TokenProvider func(ctx context.Context) (string, error)
	// TLS is used for wss URLs. Defaults to the system's roots.
	TLS *tls.Config
	// ReadLimit is the largest message, in bytes, that is accepted from the hub. Defaults to 16
	// MiB.
	ReadLimit int64

	// MinPause is the first pause before a new attempt. Each further pause is twice as long, up to
	// MaxPause, less a random part of up to a half. Default to 1 s and 30 s.
	MinPause, MaxPause time.Duration
	// AttemptTimeout is how long an attempt may take, from the socket to the accepted token.
	// Defaults to 10 s.
	AttemptTimeout time.Duration
	// ConnectTimeout is how long Connect waits for the first connection. Defaults to 30 s.
	ConnectTimeout time.Duration
	// PingEvery is how long the hub may be silent before the client asks whether it is there.
	// Defaults to 15 s.
	PingEvery time.Duration

	// BufferEvents and BufferBytes bound the publishes that wait for their answers, sent or not.
	// Default to 10,000 and 16 MiB.
	BufferEvents, BufferBytes int
	// Window is the most publishes that are on their way to the hub at a time, 1..65,536. Defaults
	// to 1,000.
	Window int
	// DuplicateWindow is for how long the hub knows an id. A publish in doubt is sent again only
	// within five sixths of this time. Defaults to two minutes, as topics do.
	DuplicateWindow time.Duration
	// Retry is for how long a publish is repeated that the hub refuses for the moment. Defaults to
	// 30 s.
	Retry time.Duration
	// DrainTimeout is how long Close lets handlers and publishes finish. Defaults to 10 s.
	DrainTimeout time.Duration

	// OnState is told each change of the connection, with the reason unless all is well. OnNotice
	// is told when a group missed events. OnError is told when the hub has ended a subscription,
	// when the client has given up, and when a handler panicked. These functions must not block,
	// and must not close the client. Default to dropping the news.
	OnState  func(State, error)
	OnNotice func(Notice)
	OnError  func(error)
}

// Notice is what the hub tells about a group without being asked.
type Notice struct {
	// Code is "group_reset" when a group had to start anew and may have missed events, or
	// "events_lost" when retention dropped events that it had not read.
	Code         string
	Topic, Group string
	// Message says more, for people.
	Message string
}

func (o Options) withDefaults() (Options, *Error) {
	wrong := func(text string) (Options, *Error) { return o, newError("bad_options", text, nil) }
	if o.Token != "" && o.TokenProvider != nil {
		return wrong("Token and TokenProvider are two ways to give a token; set one")
	}
	for name, d := range map[string]struct {
		value     *time.Duration
		otherwise time.Duration
	}{
		"MinPause": {&o.MinPause, DefaultMinPause}, "MaxPause": {&o.MaxPause, DefaultMaxPause},
		"AttemptTimeout": {&o.AttemptTimeout, DefaultAttemptTimeout}, "ConnectTimeout": {&o.ConnectTimeout, DefaultConnectTimeout},
		"PingEvery": {&o.PingEvery, DefaultPingEvery}, "DuplicateWindow": {&o.DuplicateWindow, DefaultDuplicateWindow},
		"Retry": {&o.Retry, DefaultRetry}, "DrainTimeout": {&o.DrainTimeout, DefaultDrainTimeout},
	} {
		if *d.value < 0 {
			return wrong(fmt.Sprintf("%s %v must not be negative", name, *d.value))
		}
		if *d.value == 0 {
			*d.value = d.otherwise
		}
	}
	for name, n := range map[string]struct {
		value     *int
		otherwise int
		most      int
	}{
		"BufferEvents": {&o.BufferEvents, DefaultBufferEvents, 10_000_000}, "BufferBytes": {&o.BufferBytes, DefaultBufferBytes, 1 << 40},
		"Window": {&o.Window, DefaultWindow, wire.MaxPublishInFlight},
	} {
		if *n.value < 0 || *n.value > n.most {
			return wrong(fmt.Sprintf("%s %d is not within 1..%d", name, *n.value, n.most))
		}
		if *n.value == 0 {
			*n.value = n.otherwise
		}
	}
	if o.OnState == nil {
		o.OnState = func(State, error) {}
	}
	if o.OnNotice == nil {
		o.OnNotice = func(Notice) {}
	}
	if o.OnError == nil {
		o.OnError = func(error) {}
	}
	return o, nil
}

type subKey struct{ topic, group string }

// Client publishes and consumes over a connection that it keeps. Its methods may be called
// concurrently.
type Client struct {
	opts       Options
	connection *connection
	pub        *publisher
	work       sync.WaitGroup // all goroutines
	gone       chan struct{}  // closed when Close has finished

	mu      sync.Mutex
	state   State
	last    *Error // with the state
	failure *Error // ends all calls, now and from now on
	closing bool
	changes chan struct{} // closed, and made anew, at each change of the state
	conn    *wire.Conn    // nil unless ready
	subs    map[subKey]*Subscription
	casts   map[string]*Broadcast // by topic
}

// New makes a client and does not wait for its connection. The caller closes the client.
func New(url string, opts Options) (*Client, error) {
	opts, failure := opts.withDefaults()
	if failure != nil {
		return nil, failure
	}
	c := &Client{
		opts: opts, pub: newPublisher(opts), gone: make(chan struct{}),
		state: StateIdle, changes: make(chan struct{}), subs: make(map[subKey]*Subscription), casts: make(map[string]*Broadcast),
	}
	c.connection = newConnection(context.Background(), url, opts, c)
	c.work.Go(func() { c.pub.run(c.connection.ctx) })
	c.work.Go(c.connection.run)
	return c, nil
}

// Connect makes a client, and returns when it is connected. It gives up when ctx ends, after
// Options.ConnectTimeout, or when the hub refuses the token. The caller closes the client.
func Connect(ctx context.Context, url string, opts Options) (*Client, error) {
	c, err := New(url, opts) //nolint:contextcheck // the client outlives ctx
	if err != nil {
		return nil, err
	}
	limited, cancel := context.WithTimeout(ctx, c.opts.ConnectTimeout)
	defer cancel()
	err = c.Ready(limited)
	if err == nil {
		return c, nil
	}
	c.mu.Lock()
	last, failed := c.last, c.failure != nil
	c.mu.Unlock()
	c.end() //nolint:contextcheck // the connection has a context of its own
	switch {
	case failed || last == nil && ctx.Err() == nil && limited.Err() == nil:
		return nil, err
	case ctx.Err() != nil:
		failure := aborted(ctx)
		if last != nil {
			failure.Message += "; " + last.Message
			failure.Cause = errors.Join(failure.Cause, last)
		}
		return nil, failure
	}
	text := "the hub does not answer"
	var cause error
	if last != nil {
		text, cause = last.Message, last
	}
	return nil, newError(CodeConnectTimeout, fmt.Sprintf("no connection after %v: %s", c.opts.ConnectTimeout, text), cause)
}

// Ready waits until the client is connected. It returns an error when the client has given up or is
// closed, or when ctx ends.
func (c *Client) Ready(ctx context.Context) error {
	for {
		c.mu.Lock()
		ready, failure, changes := c.state == StateReady, c.failure, c.changes
		c.mu.Unlock()
		if failure != nil {
			return failure
		}
		if ready {
			return nil
		}
		select {
		case <-changes:
		case <-ctx.Done():
			return aborted(ctx)
		}
	}
}

// State returns the state of the connection.
func (c *Client) State() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state
}

// Pending returns how many publishes have no answer yet.
func (c *Client) Pending() int { return c.pub.pending() }

// Close lets handlers and publishes finish for up to Options.DrainTimeout, and closes the
// connection, as Drain does. It may be called twice, but not from a handler.
func (c *Client) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), c.opts.DrainTimeout)
	defer cancel()
	return c.Drain(ctx)
}

// Drain lets handlers and publishes finish, and closes the connection. Events that no handler has
// begun go to other members. When ctx ends first, publishes without an answer fail, and the
// contexts of handlers that still run end; Drain waits for these handlers, and returns an error.
// Drain may be called twice, but not from a handler.
func (c *Client) Drain(ctx context.Context) error {
	c.mu.Lock()
	first := !c.closing
	c.closing = true
	subs, casts := slices.Collect(maps.Values(c.subs)), slices.Collect(maps.Values(c.casts))
	c.mu.Unlock()
	if !first {
		<-c.gone
		return nil
	}
	var wg sync.WaitGroup
	late := make(chan error, len(subs)+len(casts)+1)
	for _, s := range subs {
		wg.Go(func() { late <- s.Drain(ctx) })
	}
	for _, b := range casts {
		wg.Go(func() { late <- b.drain(ctx) })
	}
	wg.Wait()
	if c.pub.idle(ctx) != nil {
		late <- aborted(ctx)
	}
	close(late)
	var err error
	for l := range late {
		if l != nil && err == nil {
			err = newError(CodeAborted, "the client is closed, and not all handlers and publishes had finished", l)
		}
	}
	c.end() //nolint:contextcheck // the connection has a context of its own
	return err
}

// end closes the connection, waits until no goroutine is left, and opens gone.
func (c *Client) end() {
	c.mu.Lock()
	c.closing = true
	c.mu.Unlock()
	c.connection.close()
	c.work.Wait()
	close(c.gone)
}

// join registers a subscription, and returns the connection on which it is to subscribe, or nil.
// Each connection is returned here, or known to resume after the subscription: never both.
func (c *Client) join(s *Subscription) (*wire.Conn, *Error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := subKey{s.topic, s.group}
	if failure := c.mayJoin(c.subs[key] != nil, s.topic+"::"+s.group); failure != nil {
		return nil, failure
	}
	c.subs[key] = s
	c.work.Go(s.run)
	return c.conn, nil
}

// joinBroadcast is join for a broadcast.
func (c *Client) joinBroadcast(b *Broadcast) (*wire.Conn, *Error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if failure := c.mayJoin(c.casts[b.topic] != nil, b.topic); failure != nil {
		return nil, failure
	}
	c.casts[b.topic] = b
	c.work.Go(b.run)
	c.work.Go(b.work)
	return c.conn, nil
}

// mayJoin returns why there can be no further subscription, or nil. mu is held.
func (c *Client) mayJoin(exists bool, name string) *Error {
	switch {
	case c.failure != nil:
		return c.failure
	case c.closing:
		return newError(CodeClosed, "the client is closing", nil)
	case exists:
		return newError("already_subscribed", name, nil)
	}
	return nil
}

func (c *Client) removeBroadcast(b *Broadcast) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.casts[b.topic] == b {
		delete(c.casts, b.topic)
	}
}

func (c *Client) remove(s *Subscription) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if key := (subKey{s.topic, s.group}); c.subs[key] == s {
		delete(c.subs, key)
	}
}

func (c *Client) report(err error) { c.opts.OnError(err) }

// setConn notes the connection, and returns the subscriptions and broadcasts that have to know.
func (c *Client) setConn(conn *wire.Conn) ([]*Subscription, []*Broadcast) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conn = conn
	return slices.Collect(maps.Values(c.subs)), slices.Collect(maps.Values(c.casts))
}

func (c *Client) resume(conn *wire.Conn) {
	subs, casts := c.setConn(conn)
	for _, s := range subs {
		s.connected(conn)
	}
	for _, b := range casts {
		b.connected(conn)
	}
	c.pub.connected(conn)
}

func (c *Client) suspend() {
	c.pub.connected(nil)
	subs, casts := c.setConn(nil)
	for _, s := range subs {
		s.disconnected()
	}
	for _, b := range casts {
		b.disconnected()
	}
}

func (c *Client) ended(err *Error) {
	c.mu.Lock()
	c.failure = err
	subs, casts := slices.Collect(maps.Values(c.subs)), slices.Collect(maps.Values(c.casts))
	c.mu.Unlock()
	why := err
	if err.Code == CodeClosed {
		why = nil
	}
	for _, s := range subs {
		s.end(why)
	}
	for _, b := range casts {
		b.end(why)
	}
	c.pub.end(err)
	if why != nil {
		c.report(err)
	}
}

func (c *Client) changed(state State, err *Error) {
	c.mu.Lock()
	c.state, c.last = state, err
	close(c.changes)
	c.changes = make(chan struct{})
	c.mu.Unlock()
	if err == nil {
		c.opts.OnState(state, nil)
	} else {
		c.opts.OnState(state, err)
	}
}

// told is called with an error that answers no frame.
func (c *Client) told(refused *wire.Error) {
	s := c.named(refused.Msg)
	b := c.broadcastNamed(refused)
	switch {
	case b != nil:
		b.end(fromWire(refused))
	case s != nil && (refused.Code == "group_reset" || refused.Code == "events_lost"):
		c.opts.OnNotice(Notice{Code: refused.Code, Topic: s.topic, Group: s.group, Message: refused.Msg})
	case s != nil && (refused.Code == "not_subscribed" || refused.Code == "forbidden"):
		s.end(fromWire(refused))
	case refused.Code != "token_expired": // the connection's end tells that
		c.report(fromWire(refused))
	}
}

// named returns the subscription that a message names as topic::group, or nil.
func (c *Client) named(message string) *Subscription {
	c.mu.Lock()
	defer c.mu.Unlock()
	var named *Subscription
	longest := 0
	for key, s := range c.subs {
		if name := key.topic + "::" + key.group; len(name) > longest && strings.Contains(message, name) {
			named, longest = s, len(name)
		}
	}
	return named
}

// broadcastNamed returns the broadcast that a message ends, or nil.
func (c *Client) broadcastNamed(refused *wire.Error) *Broadcast {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch refused.Code {
	case "not_subscribed":
		return c.casts[refused.Msg]
	case "forbidden":
		for topic, b := range c.casts {
			if strings.Contains(refused.Msg, " "+topic+"; the broadcast") {
				return b
			}
		}
	}
	return nil
}
