package conn

import (
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

// ProbeWait is how long a probe is waited for before another is sent.
const ProbeWait = 2 * time.Second

// Probe is a question that is asked again and again, to know that the way to and from somebody is
// open. Its methods may be called concurrently.
type Probe struct {
	Asked   atomic.Int64 // when the oldest question that was not answered was asked; 0: all were
	Heard   atomic.Int64 // when the newest question that was answered was asked
	Waiting atomic.Bool  // a question is under way
}

// Begin reports whether a question is to be asked now.
func (p *Probe) Begin(now int64) bool {
	if !p.Waiting.CompareAndSwap(false, true) {
		return false
	}
	p.Asked.CompareAndSwap(0, max(now, 1))
	return true
}

// End takes the outcome of the question that was asked at the given time.
func (p *Probe) End(sent int64, answered bool) {
	if answered {
		p.Heard.Store(max(sent, p.Heard.Load()))
		p.Asked.Store(0)
	}
	p.Waiting.Store(false)
}

// Reset is for a way that is new.
func (p *Probe) Reset(now int64) {
	p.Asked.Store(0)
	p.Heard.Store(now)
}

// Silent reports whether a question waits for its answer for longer than limit.
func (p *Probe) Silent(now, limit int64) bool {
	asked := p.Asked.Load()
	return asked != 0 && now-asked > limit
}

// ProbeEvery is how often each connection, and each consumer of which the hub holds something, is
// asked.
func (p *Pool) ProbeEvery() time.Duration { return max(p.cfg.Margin/5, 10*time.Millisecond) }

// Probe asks the server, over the connection, for an answer to the hub itself. After a silence, the
// answer counts when all that came before the answer was received: deliveries wait for their inbox
// to look at them, and are as old as the silence.
func (l *Link) Probe(now int64) {
	if l.mute || !l.Up.Load() || !l.Echo.Begin(now) {
		return
	}
	answered := func() {
		l.Echo.End(now, true)
		l.Pool.Hooks.Heard(l)
	}
	err := l.AskUntil(&nats.Msg{Subject: echoSubject}, now+int64(ProbeWait), AskerFunc(func(_ *nats.Msg, err error) {
		switch {
		case err != nil:
			l.Echo.End(now, false)
		case now-l.Echo.Heard.Load() <= 2*int64(l.Pool.ProbeEvery()):
			answered()
		case l.NC.Barrier(answered) != nil:
			l.Echo.End(now, false)
		}
	}))
	if err != nil {
		l.Echo.End(now, false)
	}
}

// SentSince is a moment after which the server sent what arrives now over the link: the newest that
// an answer stands for.
func (l *Link) SentSince(now int64) int64 {
	if l.mute {
		return now
	}
	return min(now, l.Echo.Heard.Load())
}
