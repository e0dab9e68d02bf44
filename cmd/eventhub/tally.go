package main

import (
	"fmt"
	"io"
	"strings"
	"time"
)

// Intervals between reports of progress.
const (
	tallyTerminal = 200 * time.Millisecond
	tallyPlain    = 10 * time.Second
)

// tally reports how far a command has come: on a terminal as a line that changes, otherwise as
// a line from time to time. It is for one goroutine.
type tally struct {
	out    io.Writer
	screen io.Writer // takes control sequences; nil unless out is a terminal
	what   string
	every  time.Duration
	began  time.Time
	told   time.Time
	width  int // of the line on the terminal

	events int
	bytes  int64
}

// newTally reports to out. what names what is counted, such as "exported".
func newTally(out io.Writer, what string) *tally {
	p := &tally{out: out, what: what, every: tallyPlain, began: time.Now()}
	if screen, is := screenOf(out); is {
		p.screen, p.every = screen, tallyTerminal
	}
	p.told = p.began
	return p
}

// add counts events and bytes.
func (p *tally) add(events, bytes int) {
	p.events += events
	p.bytes += int64(bytes)
	if now := time.Now(); now.Sub(p.told) >= p.every {
		p.told = now
		p.show(p.line(now))
	}
}

func (p *tally) line(now time.Time) string {
	rate := float64(p.events) / max(now.Sub(p.began).Seconds(), 0.001)
	return fmt.Sprintf("%s %d events, %.1f MB, %.0f events/s", p.what, p.events, float64(p.bytes)/1e6, rate)
}

func (p *tally) show(line string) {
	if p.screen == nil {
		_, _ = fmt.Fprintln(p.out, "eventhub: "+line)
		return
	}
	_, _ = io.WriteString(p.screen, "\r")
	_, _ = io.WriteString(p.out, line+strings.Repeat(" ", max(p.width-len(line), 0)))
	p.width = len(line)
}

// say prints a message on a line of its own.
func (p *tally) say(text string) {
	p.clear()
	_, _ = fmt.Fprintln(p.out, "eventhub: "+text)
}

func (p *tally) clear() {
	if p.width > 0 {
		_, _ = io.WriteString(p.screen, "\r"+strings.Repeat(" ", p.width)+"\r")
		p.width = 0
	}
}

// end prints the last report.
func (p *tally) end() { p.say(p.line(time.Now())) }

// portion reports how many messages of all are done.
func (p *tally) portion(done, all uint64) {
	p.events = int(done) //nolint:gosec // a count
	if now := time.Now(); now.Sub(p.told) >= p.every {
		p.told = now
		line := fmt.Sprintf("%s %d of %d messages", p.what, done, all)
		if p.screen != nil && all > 0 {
			line = meter(int(min(done, all)), int(all)) + line //nolint:gosec // counts
		}
		p.show(line)
	}
}

// meter is a bar for a terminal.
func meter(done, all int) string {
	const width = 30
	n := done * width / all
	return "[" + strings.Repeat("#", n) + strings.Repeat(".", width-n) + "] "
}
