// Package pacedlog logs lines that clients or an outage can repeat at any rate. For each kind and
// source of a line, the log gets at most one a minute, and then how many it did not get.
package pacedlog

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"
)

// sweepEvery is how often Run sweeps.
const sweepEvery = 5 * time.Second

const (
	// Window is the least time between two lines of a kind and source.
	Window = time.Minute
	// MaxKeys bounds the pairs of a kind and a source that are followed at a time. Beyond them, all
	// further sources of a kind count as one.
	MaxKeys = 1000
)

// NotLogged is the key of the attribute that says how many lines were left out since the last line
// of the same kind and source.
const NotLogged = "not_logged"

// Log is a logger for such lines. Its methods may be called concurrently. It has no goroutine: the
// owner calls Sweep every few seconds, so that counts come on time, and End when it closes; or the
// owner has a goroutine for Run. Without either, counts come with later lines, of any kind.
type Log struct {
	log *slog.Logger

	mu    sync.Mutex
	seen  map[key]*window
	swept time.Time
}

// key is the kind of a line, which is its level and message, and its source.
type key struct {
	level       slog.Level
	msg, source string
}

// window follows the last line of a key.
type window struct {
	began     time.Time
	notLogged int
	last      []slog.Attr // of the last line that was not logged
}

// New makes a Log that writes to log.
func New(log *slog.Logger) *Log {
	return &Log{log: log, seen: make(map[key]*window), swept: time.Now()}
}

// Log logs a line, unless one of the same level, msg and source was logged less than a Window ago:
// then the line is counted, and a later line has the count as NotLogged. msg is a constant. source
// is the client that can repeat the line, or else the topic, the group or the server; attrs should
// name it. Log keeps attrs.
func (l *Log) Log(ctx context.Context, level slog.Level, msg, source string, attrs ...slog.Attr) {
	if !l.log.Enabled(ctx, level) {
		return
	}
	k := key{level, msg, source}
	before, now, due := l.admit(k, attrs)
	if now {
		l.write(ctx, k, before, attrs)
	}
	if due {
		l.Sweep()
	}
}

// admit reports whether a line may be logged now, and how many before were not. It counts the line
// otherwise. due says that nobody has called Sweep for a Window.
func (l *Log) admit(k key, attrs []slog.Attr) (notLogged int, now, due bool) {
	at := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	due = at.Sub(l.swept) >= Window
	w := l.seen[k]
	if w == nil && len(l.seen) >= MaxKeys {
		k.source = ""
		w = l.seen[k]
	}
	if w != nil && at.Sub(w.began) < Window {
		w.notLogged++
		w.last = attrs
		return 0, false, due
	}
	if w != nil {
		notLogged = w.notLogged
	}
	l.seen[k] = &window{began: at}
	return notLogged, true, due
}

func (l *Log) write(ctx context.Context, k key, notLogged int, attrs []slog.Attr) {
	if notLogged > 0 {
		attrs = append(slices.Clip(attrs), slog.Int(NotLogged, notLogged))
	}
	l.log.LogAttrs(ctx, k.level, k.msg, attrs...) //nolint:sloglint // callers of Log give constants
}

// Sweep logs the counts whose Window is over, each with the attributes of the last line that it
// counts.
func (l *Log) Sweep() { l.flush(Window) }

// Run calls Sweep every few seconds until ctx ends, and then End.
func (l *Log) Run(ctx context.Context) {
	defer l.End()
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			l.Sweep()
		}
	}
}

// End logs all counts. Lines that come later are logged as before, and counts of them only by
// another End.
func (l *Log) End() { l.flush(0) }

// flush logs the counts of windows that are at least as old as age.
//
//nolint:contextcheck,nolintlint // counts belong to no request; nolintlint does not see its use
func (l *Log) flush(age time.Duration) {
	now := time.Now()
	due := make(map[key]*window)
	l.mu.Lock()
	l.swept = now
	for k, w := range l.seen {
		switch {
		case now.Sub(w.began) < age:
		case w.notLogged == 0:
			delete(l.seen, k)
		default:
			due[k] = w
			l.seen[k] = &window{began: now}
		}
	}
	l.mu.Unlock()
	for k, w := range due {
		l.write(context.Background(), k, w.notLogged, w.last)
	}
}
