// Package wire speaks the hub's WebSocket protocol over one connection. The client in the parent
// directory is built on this package and suits programs better: it reconnects. Tests and
// benchmarks, which must see each frame and each break, use this package.
//
// A Conn does not reconnect. When its connection ends, Done is closed, and Err gives the reason;
// for a *CloseError, Reconnect reports whether trying again makes sense.
package wire

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
)

// Bounds and defaults of Options.
const (
	DefaultPublishInFlight = 1024
	MaxPublishInFlight     = 65_536
	DefaultTimeout         = 15 * time.Second
	DefaultReadLimit       = 16 << 20
)

// closeTimeout bounds how long Close waits for the hub's half of the closing handshake.
const closeTimeout = 2 * time.Second

// Options configure a Conn. The zero value connects without a token.
type Options struct {
	// Token is the credential that AUTH carries.
	Token string
	// Caps are the capabilities that AUTH names, such as "events_lost". Defaults to none.
	Caps []string
	// PublishInFlight is the most publishes that wait for their answer, 1..65,536. When it is
	// reached, Publish and PublishAsync wait. Defaults to 1,024.
	PublishInFlight int
	// Timeout is how long a frame may stay unanswered before its call fails with ErrTimeout. The
	// failure is noticed within a second. Defaults to 15 s.
	Timeout time.Duration
	// EndOnTimeout ends the connection, with ErrTimeout, when a frame stays unanswered for Timeout.
	// Otherwise only that call fails.
	EndOnTimeout bool
	// ReadLimit is the largest message, in bytes, that is accepted from the hub. A larger one ends
	// the connection. Defaults to 16 MiB.
	ReadLimit int64
	// TLS is used for wss URLs. Defaults to the system's roots.
	TLS *tls.Config
	// OnError receives ERR frames that answer no waiting call, such as token_expired. It is called
	// on the reading goroutine and must not block. Defaults to dropping them.
	OnError func(*Error)
}

func (o Options) withDefaults() (Options, error) {
	if o.PublishInFlight == 0 {
		o.PublishInFlight = DefaultPublishInFlight
	}
	if o.PublishInFlight < 0 || o.PublishInFlight > MaxPublishInFlight {
		return o, fmt.Errorf("wire: PublishInFlight %d is not within 1..%d", o.PublishInFlight, MaxPublishInFlight)
	}
	if o.Timeout <= 0 {
		o.Timeout = DefaultTimeout
	}
	if o.ReadLimit <= 0 {
		o.ReadLimit = DefaultReadLimit
	}
	if o.OnError == nil {
		o.OnError = func(*Error) {}
	}
	return o, nil
}

// Conn is one authenticated connection to a hub. Its methods may be called concurrently.
type Conn struct {
	opts  Options
	ws    *websocket.Conn
	wire  *batchConn
	slots chan struct{} // an entry for each publish in flight
	wg    sync.WaitGroup
	// base is Dial's context without its end, because the connection outlives Dial.
	base    context.Context
	frames  atomic.Uint64 // read so far
	closing chan struct{} // closed when this side ends the connection
	done    chan struct{} // closed when the connection has ended
	latest  *Subscription // subscription of the last event; owned by the reader

	mu       sync.Mutex
	err      error // set before done is closed
	lastCorr uint64
	calls    map[uint64]call
	subs     map[subKey]*Subscription
	casts    map[string]*Broadcast // by topic
}

// Dial connects to a hub (ws://host:port/, or wss) and authenticates. If the hub refuses the AUTH,
// the error is an *Error. The caller closes the Conn.
func Dial(ctx context.Context, url string, opts Options) (*Conn, error) {
	c, err := Open(ctx, url, opts)
	if err != nil {
		return nil, err
	}
	if err := c.Auth(ctx, opts.Token); err != nil {
		c.Abort()
		return nil, err
	}
	return c, nil
}

// Open connects to a hub and does not authenticate: Auth has to come next. The caller closes the
// Conn.
func Open(ctx context.Context, url string, opts Options) (*Conn, error) {
	opts, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	ws, wire, err := dial(ctx, url, opts)
	if err != nil {
		return nil, fmt.Errorf("wire: connect to %s: %w", url, err)
	}
	c := &Conn{
		opts:    opts,
		ws:      ws,
		wire:    wire,
		slots:   make(chan struct{}, opts.PublishInFlight),
		base:    context.WithoutCancel(ctx),
		closing: make(chan struct{}),
		done:    make(chan struct{}),
		calls:   make(map[uint64]call),
		subs:    make(map[subKey]*Subscription),
	}
	ws.SetReadLimit(opts.ReadLimit)
	wire.start()
	c.wg.Go(c.readLoop)
	c.wg.Go(c.watch)
	return c, nil
}

func dial(ctx context.Context, url string, opts Options) (*websocket.Conn, *batchConn, error) {
	var wire *batchConn
	// Messages bypass the library, so the batch must lie above TLS.
	gather := func(dial func(context.Context, string, string) (net.Conn, error)) func(context.Context, string, string) (net.Conn, error) {
		return func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			wire = newBatchConn(conn)
			return wire, nil
		}
	}
	transport := &http.Transport{
		DialContext:       gather(new(net.Dialer).DialContext),
		DialTLSContext:    gather((&tls.Dialer{Config: opts.TLS}).DialContext),
		DisableKeepAlives: true,
	}
	ws, resp, err := websocket.Dial(ctx, url, &websocket.DialOptions{HTTPClient: &http.Client{Transport: transport}})
	if err != nil {
		if resp != nil && resp.Body != nil {
			err = errors.Join(err, resp.Body.Close())
		}
		return nil, nil, err
	}
	return ws, wire, nil
}

// Auth authenticates the connection again, with a new token. If the hub refuses the token, the
// connection is unauthenticated and the hub ends its subscriptions.
func (c *Conn) Auth(ctx context.Context, token string) error {
	return c.request(ctx, func(b []byte) []byte { return authFrame(b, token, c.opts.Caps) })
}

func authFrame(b []byte, token string, caps []string) []byte {
	b = append(b, `{"op":"AUTH"`...)
	if token != "" {
		b = appendField(b, "token", token)
	}
	if len(caps) == 0 {
		return b
	}
	b = append(b, `,"caps":[`...)
	for i, name := range caps {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendString(b, name)
	}
	return append(b, ']')
}

// Ping sends a frame that has no effect. The hub answers the frame after all earlier ones, and
// Frames then rises.
func (c *Conn) Ping() error {
	_, err := c.send(func(b []byte) []byte {
		b = append(b, `{"op":"UNSUBSCRIBE"`...)
		return appendField(appendField(b, "topic", "ping"), "group", "ping")
	}, call{done: func(string, error) {}})
	return err
}

// Frames returns how many frames the hub has sent.
func (c *Conn) Frames() uint64 { return c.frames.Load() }

// Done is closed when the connection has ended.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Err returns nil while the connection lives. Afterwards it returns ErrClosed when this side closed
// the connection, a *CloseError when the hub did, or the error that broke the connection.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close ends the connection with a closing handshake and waits until no handler runs. Calls that
// still wait fail with ErrClosed. It may be called twice, but not from a handler.
func (c *Conn) Close() error {
	if c.beginClose() {
		abort := time.AfterFunc(closeTimeout, c.wire.abort)
		err := c.ws.Close(websocket.StatusNormalClosure, "")
		abort.Stop()
		if err != nil {
			// The handshake fails when the hub is gone already; the connection ends all the same.
			c.wire.abort()
		}
	}
	c.wg.Wait()
	return nil
}

// Abort ends the connection without a closing handshake, as a crash would, and waits until no
// handler runs. It may be called twice, but not from a handler.
func (c *Conn) Abort() {
	c.beginClose()
	c.wire.abort()
	c.wg.Wait()
}

// beginClose reports whether this call is the first to close a live connection.
func (c *Conn) beginClose() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil || c.isClosing() {
		return false
	}
	close(c.closing)
	return true
}

func (c *Conn) isClosing() bool {
	select {
	case <-c.closing:
		return true
	default:
		return false
	}
}

// fail ends the connection because of err and fails every waiting call. Only the first err counts.
func (c *Conn) fail(err error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	if c.isClosing() {
		err = ErrClosed
	}
	c.err = err
	calls, subs := c.calls, c.subs
	c.calls, c.subs, c.casts = nil, nil, nil
	c.mu.Unlock()

	c.wire.abort()
	_ = c.ws.CloseNow() // the network connection is closed already; this returns the buffers
	close(c.done)
	for _, s := range subs {
		s.end()
	}
	for _, call := range calls {
		c.end(call, "", fmt.Errorf("no answer: %w", err))
	}
}
