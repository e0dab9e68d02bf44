package jetstream

import (
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

// probeWait is how long a probe is waited for before another is sent.
const probeWait = 2 * time.Second

// probe is a question that is asked again and again, to know that the way to and from somebody is
// open. Its methods may be called concurrently.
type probe struct {
	asked   atomic.Int64 // when the oldest question that was not answered was asked; 0: all were
	heard   atomic.Int64 // when the newest question that was answered was asked
	waiting atomic.Bool  // a question is under way
}

// begin reports whether a question is to be asked now.
func (p *probe) begin(now int64) bool {
	if !p.waiting.CompareAndSwap(false, true) {
		return false
	}
	p.asked.CompareAndSwap(0, max(now, 1))
	return true
}

// end takes the outcome of the question that was asked at the given time.
func (p *probe) end(sent int64, answered bool) {
	if answered {
		p.heard.Store(max(sent, p.heard.Load()))
		p.asked.Store(0)
	}
	p.waiting.Store(false)
}

// reset is for a way that is new.
func (p *probe) reset(now int64) {
	p.asked.Store(0)
	p.heard.Store(now)
}

// silent reports whether a question waits for its answer for longer than limit.
func (p *probe) silent(now, limit int64) bool {
	asked := p.asked.Load()
	return asked != 0 && now-asked > limit
}

// probeEvery is how often each connection, and each consumer of which the hub holds something, is
// asked.
func (p *pool) probeEvery() time.Duration { return max(p.cfg.margin/5, 10*time.Millisecond) }

// probe asks the server, over the connection, for an answer to the hub itself. After a silence, the
// answer counts when all that came before the answer was received: deliveries wait for their inbox
// to look at them, and are as old as the silence.
func (l *link) probe(now int64) {
	if l.mute || !l.up.Load() || !l.echo.begin(now) {
		return
	}
	answered := func() {
		l.echo.end(now, true)
		l.pool.hooks.heard(l)
	}
	err := l.askUntil(&nats.Msg{Subject: echoSubject}, now+int64(probeWait), askerFunc(func(_ *nats.Msg, err error) {
		switch {
		case err != nil:
			l.echo.end(now, false)
		case now-l.echo.heard.Load() <= 2*int64(l.pool.probeEvery()):
			answered()
		case l.nc.Barrier(answered) != nil:
			l.echo.end(now, false)
		}
	}))
	if err != nil {
		l.echo.end(now, false)
	}
}

// sentSince is a moment after which the server sent what arrives now over the link: the newest that
// an answer stands for.
func (l *link) sentSince(now int64) int64 {
	if l.mute {
		return now
	}
	return min(now, l.echo.heard.Load())
}
