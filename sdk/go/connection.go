package eventhub

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"sync"
	"time"

	"eventhub/sdk/go/wire"
)

const (
	// answerTimeout ends a connection on which a frame stays unanswered. The hub answers within
	// 15 seconds.
	answerTimeout = 20 * time.Second
	// goodAfter is how long a connection has to last before the pauses begin again.
	goodAfter = 5 * time.Second
	// maxRefusals in a row mean that the provider has no better token.
	maxRefusals = 3
	// refreshPause is the shortest time between two questions for the same connection.
	refreshPause = time.Second
)

// connection keeps one connection to the hub, as the table in machine.go says. One goroutine, run,
// owns all fields but those of the first group.
type connection struct {
	url    string
	opts   Options
	owner  owner
	tokens *tokens
	ctx    context.Context // ends with run
	cancel context.CancelFunc
	events chan func()   // run on the goroutine of run
	over   chan struct{} // closed when run has returned
	wg     sync.WaitGroup

	state State
	// epoch counts transitions. An answer to what an earlier state began changes nothing.
	epoch      uint64
	stop       context.CancelFunc // ends what the state began
	conn       *wire.Conn
	token      string
	failures   int
	retryAfter time.Duration // what the hub that ended asked for
	refusals   int
	err        *Error
	readySince time.Time
	timer      *time.Timer // of the attempt or the pause
	refresh    *time.Timer
	look       *time.Timer
	looked     time.Time
	frames     uint64
	pinged     bool
}

// owner is what a connection needs of its client.
type owner interface {
	resume(conn *wire.Conn)
	suspend()
	ended(err *Error)
	changed(state State, err *Error)
	told(refused *wire.Error)
}

func newConnection(ctx context.Context, url string, opts Options, owner owner) *connection {
	ctx, cancel := context.WithCancel(ctx)
	return &connection{
		url: url, opts: opts, owner: owner, ctx: ctx, cancel: cancel, state: StateIdle,
		tokens: &tokens{fixed: opts.Token, provider: opts.TokenProvider, timeout: opts.AttemptTimeout},
		events: make(chan func()), over: make(chan struct{}), stop: func() {},
		timer: stoppedTimer(), refresh: stoppedTimer(), look: stoppedTimer(),
	}
}

func stoppedTimer() *time.Timer {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return t
}

// run lives the connection until it has failed or is closed, and returns when nothing of the
// connection is left.
func (c *connection) run() {
	c.input(inputStart)
	for c.state != StateFailed && c.state != StateClosed {
		select {
		case f := <-c.events:
			f()
		case <-c.timer.C:
			if c.state == StateWaiting {
				c.input(inputWake)
			} else {
				c.lost(newError(CodeConnectTimeout, "the hub did not answer in time", nil))
			}
		case <-c.refresh.C:
			c.askAgain()
		case <-c.look.C:
			c.watch()
		}
	}
	c.cancel()
	close(c.over)
	c.wg.Wait()
	c.tokens.wg.Wait()
}

// post runs f on the goroutine of run, and reports whether f runs.
func (c *connection) post(f func()) bool {
	select {
	case c.events <- f:
		return true
	case <-c.over:
		return false
	}
}

// close closes the connection. run then returns.
func (c *connection) close() {
	c.post(func() {
		c.err = closedError()
		c.input(inputClose)
	})
}

func (c *connection) input(in input) {
	t, ok := table[c.state][in]
	if !ok {
		return
	}
	c.epoch++
	c.state = t.next
	for _, a := range t.actions {
		c.act(a)
	}
	c.owner.changed(t.next, c.err)
}

func (c *connection) lost(err *Error) {
	c.err = err
	c.input(inputLost)
}

func (c *connection) refused(err *Error) {
	c.err = err
	c.input(inputRefused)
}

func (c *connection) act(a action) {
	switch a {
	case actFetch:
		c.fetch()
	case actDial:
		c.dial()
	case actAuth:
		c.auth(func() { c.input(inputAccepted) })
	case actResume:
		c.timer.Stop()
		c.readySince = time.Now()
		c.refusals = 0
		c.err = nil
		c.planRefresh(0)
		c.pinged, c.frames, c.looked = false, c.conn.Frames(), time.Now()
		c.look.Reset(c.opts.PingEvery)
		c.owner.resume(c.conn)
	case actSuspend:
		if time.Since(c.readySince) >= goodAfter {
			c.failures = 0
		}
		c.owner.suspend()
	case actDrop:
		c.drop()
	case actPause:
		pause := c.opts.MaxPause
		if c.failures < 30 {
			pause = min(pause, c.opts.MinPause<<c.failures)
		}
		c.failures++
		c.timer.Reset(c.retryAfter + jitter(pause))
		c.retryAfter = 0
	case actEnd:
		c.timer.Stop()
		c.owner.ended(c.err)
	}
}

// jitter shortens a pause by up to half, so that the clients of a hub that ended do not all come
// back at once.
func jitter(d time.Duration) time.Duration {
	return d - rand.N(d/2+1) //nolint:gosec // not security-relevant
}

func (c *connection) fetch() {
	epoch := c.epoch
	c.wg.Go(func() {
		token, err := c.tokens.ask(c.ctx)
		c.post(func() {
			switch {
			case c.epoch != epoch:
			case err != nil:
				c.lost(newError(CodeConnectionLost, fmt.Sprintf("the token provider failed: %v", err), err))
			default:
				c.token = token
				c.input(inputToken)
			}
		})
	})
}

func (c *connection) dial() {
	if u, err := url.Parse(c.url); err != nil || u.Host == "" || u.Scheme != "ws" && u.Scheme != "wss" {
		epoch := c.epoch
		c.wg.Go(func() {
			c.post(func() {
				if c.epoch == epoch {
					c.refused(newError(CodeGaveUp, fmt.Sprintf("the address %q is not usable; use ws://HOST:PORT or wss://HOST:PORT", c.url), err))
				}
			})
		})
		return
	}
	c.timer.Reset(c.opts.AttemptTimeout)
	ctx, cancel := context.WithCancel(c.ctx)
	c.stop = cancel
	epoch := c.epoch
	c.wg.Go(func() {
		conn, err := wire.Open(ctx, c.url, wire.Options{
			Caps: caps, TLS: c.opts.TLS, ReadLimit: c.opts.ReadLimit, OnError: c.owner.told,
			PublishInFlight: c.opts.Window, Timeout: answerTimeout, EndOnTimeout: true,
		})
		opened := func() { //nolint:contextcheck // runs later, on the goroutine of run
			switch {
			case c.epoch != epoch && err == nil:
				conn.Abort()
			case c.epoch != epoch:
			case err != nil:
				c.lost(newError(CodeConnectionLost, fmt.Sprintf("no connection to the hub: %v", err), err))
			default:
				c.conn = conn
				c.wg.Go(func() { c.await(conn) })
				c.input(inputOpen)
			}
		}
		if !c.post(opened) && err == nil {
			conn.Abort()
		}
	})
}

// await reports the end of conn.
func (c *connection) await(conn *wire.Conn) {
	<-conn.Done()
	c.post(func() {
		if c.conn != conn {
			return
		}
		err := conn.Err()
		text := fmt.Sprintf("the connection ended: %v", err)
		if closed, ok := errors.AsType[*wire.CloseError](err); ok {
			if !closed.Reconnect() {
				c.refused(newError(CodeGaveUp, text, err))
				return
			}
			c.retryAfter = closed.RetryAfter()
		}
		c.lost(newError(CodeConnectionLost, text, err))
	})
}

// auth sends AUTH. accepted runs when the hub accepts the token.
func (c *connection) auth(accepted func()) {
	conn, token := c.conn, c.token
	c.wg.Go(func() {
		err := conn.Auth(c.ctx, token)
		c.post(func() {
			switch {
			case c.conn != conn:
			case err == nil:
				accepted()
			case lost(err): // await tells
			default:
				c.notAccepted(fromWire(err))
			}
		})
	})
}

// notAccepted ends a connection whose token the hub refused. A hub that is at its limits may accept
// the token later, and another token may be better.
func (c *connection) notAccepted(err *Error) {
	if c.tokens.changes() && !err.Retryable {
		c.refusals++
	}
	if err.Retryable || c.tokens.changes() && c.refusals < maxRefusals {
		c.lost(err)
		return
	}
	c.refused(err)
}

func (c *connection) drop() {
	c.timer.Stop()
	c.refresh.Stop()
	c.look.Stop()
	c.stop()
	conn := c.conn
	c.conn = nil
	switch {
	case conn == nil:
	case c.state == StateClosed:
		_ = conn.Close() // sends what is still to be sent
	default:
		conn.Abort()
	}
}

// planRefresh plans to replace the token before it expires.
func (c *connection) planRefresh(atLeast time.Duration) {
	expires, ok := expiry(c.token)
	if !ok || !c.tokens.changes() {
		c.refresh.Stop()
		return
	}
	c.refresh.Reset(max(atLeast, refreshDelay(time.Until(expires))))
}

// askAgain replaces the token. A token that comes when its connection has gone is not used.
func (c *connection) askAgain() {
	conn := c.conn
	c.wg.Go(func() {
		token, err := c.tokens.ask(c.ctx)
		c.post(func() {
			switch {
			case c.conn != conn || c.state != StateReady:
			case err != nil || token == c.token: // the hub says when the old token has expired
				c.planRefresh(refreshPause)
			default:
				c.token = token
				c.auth(func() {
					c.refusals = 0
					c.planRefresh(0)
				})
			}
		})
	})
}

// watch notices a connection that is dead without having ended.
func (c *connection) watch() {
	now, frames := time.Now(), c.conn.Frames()
	heard := frames != c.frames
	// A machine that slept has to listen first.
	late := now.Sub(c.looked) > 2*c.opts.PingEvery
	c.looked, c.frames = now, frames
	if c.pinged && !heard && !late {
		c.lost(newError(CodeConnectionLost, "the hub does not answer", nil))
		return
	}
	if c.pinged = !heard; c.pinged {
		_ = c.conn.Ping() // await tells when the connection has ended
	}
	c.look.Reset(c.opts.PingEvery)
}
