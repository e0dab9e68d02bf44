package wire

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"
)

// call is a frame that waits for its OK or ERR.
type call struct {
	sent time.Time
	slot bool                       // a publish: it holds one of Conn.slots
	done func(id string, err error) // called exactly once; it must not block
	// began, if not nil, is called before done with what the OK of a broadcast says.
	began func(Start)
}

// end finishes a call that was removed from the waiting calls.
func (c *Conn) end(of call, id string, err error) {
	if of.slot {
		<-c.slots
	}
	of.done(id, err)
}

// send sends the frame that build begins (without its end) with a new corr, and ends the call with
// the answer. If send returns an error, no frame was sent and the call is not ended. A publish
// waits while many bytes are unsent.
func (c *Conn) send(build func([]byte) []byte, waiting call) (corr uint64, err error) {
	c.mu.Lock()
	err = c.usable()
	c.mu.Unlock()
	if err != nil {
		return 0, err
	}
	err = c.write(func(b []byte) []byte {
		corr = c.file(waiting) // as late as possible: the call's time begins here
		b = append(build(b), `,"corr":"`...)
		b = strconv.AppendUint(b, corr, 10)
		return append(b, `"}`...)
	}, waiting.slot)
	switch {
	case err != nil && corr != 0:
		if _, waits := c.take(corr); !waits {
			return corr, nil // fail ended it already
		}
		return 0, err
	case err != nil:
		return 0, err
	case corr == 0:
		return 0, c.Err()
	}
	return corr, nil
}

// file adds a waiting call and returns its corr, or 0 when the connection has ended meanwhile.
func (c *Conn) file(waiting call) uint64 {
	waiting.sent = time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.calls == nil {
		return 0
	}
	c.lastCorr++
	c.calls[c.lastCorr] = waiting
	return c.lastCorr
}

// post sends a frame and does not wait for the hub's answer, which is dropped if it is OK.
func (c *Conn) post(build func([]byte) []byte) error {
	c.mu.Lock()
	err := c.usable()
	c.mu.Unlock()
	if err != nil {
		return err
	}
	return c.write(func(b []byte) []byte { return append(build(b), '}') }, false)
}

// request is send, and waits for the answer.
func (c *Conn) request(ctx context.Context, build func([]byte) []byte) error {
	answers := make(chan error, 1)
	corr, err := c.send(build, call{done: func(_ string, err error) { answers <- err }})
	if err != nil {
		return err
	}
	select {
	case err := <-answers:
		return err
	case <-ctx.Done():
		c.take(corr)
		return fmt.Errorf("wire: wait for the hub's answer: %w", context.Cause(ctx))
	}
}

// usable returns nil while frames can be sent. mu is held.
func (c *Conn) usable() error {
	switch {
	case c.err != nil:
		return c.err
	case c.isClosing():
		return ErrClosed
	}
	return nil
}

// write adds a message to the batch. A patient message waits while many bytes are unsent.
func (c *Conn) write(build func([]byte) []byte, patient bool) error {
	err := c.wire.message(build, patient)
	if err == nil {
		return nil
	}
	if errors.Is(err, ErrStalled) {
		c.fail(ErrStalled)
	}
	// For any other error the reader finds out why the connection ended: the hub may have said why.
	return fmt.Errorf("wire: send a frame: %w", err)
}

// take removes a call and reports whether it was still waiting.
func (c *Conn) take(corr uint64) (call, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	got, ok := c.calls[corr]
	delete(c.calls, corr)
	return got, ok
}

// watch fails calls that were not answered within Options.Timeout.
func (c *Conn) watch() {
	ticker := time.NewTicker(min(time.Second, c.opts.Timeout))
	defer ticker.Stop()
	for {
		select {
		case <-c.done:
			return
		case now := <-ticker.C:
			late := c.overdue(now)
			for _, call := range late {
				c.end(call, "", ErrTimeout)
			}
			if len(late) > 0 && c.opts.EndOnTimeout {
				c.fail(ErrTimeout)
			}
		}
	}
}

func (c *Conn) overdue(now time.Time) []call {
	c.mu.Lock()
	defer c.mu.Unlock()
	var late []call
	for corr, waiting := range c.calls {
		if now.Sub(waiting.sent) >= c.opts.Timeout {
			late = append(late, waiting)
			delete(c.calls, corr)
		}
	}
	return late
}
