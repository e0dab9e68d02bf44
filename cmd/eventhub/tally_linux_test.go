package main

import (
	"bytes"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"
)

// On a terminal, progress is one line that changes. A message has a line of its own, and so has the
// last report.
func TestProgressOnATerminal(t *testing.T) {
	t.Parallel()
	screen, terminal, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = screen.Close() })
	p := newTally(toTerminal(terminal), "exported")
	if p.every != tallyTerminal {
		t.Errorf("a report each %v", p.every)
	}
	reportAndEnd(p)
	if err := terminal.Close(); err != nil {
		t.Fatal(err)
	}
	text, _ := io.ReadAll(screen) // ends with EIO, since the terminal is closed
	shown := strings.Split(string(text), "\r")
	for i, want := range []string{"", "exported 1000 events, 5.0 MB, ", "exported 1003 events, 5.0 MB, ", "   ", "eventhub: interrupted", "\neventhub: exported 1004 events, 5.0 MB, ", "\n"} {
		if i >= len(shown) || !strings.HasPrefix(shown[i], want) {
			t.Fatalf("the terminal got %q, want %q as part %d", shown, want, i)
		}
	}
}

// Elsewhere, each report is a line.
func TestProgressInAFile(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	p := newTally(&out, "exported")
	if p.every != tallyPlain {
		t.Errorf("a report each %v", p.every)
	}
	reportAndEnd(p)
	lines := strings.Split(out.String(), "\n")
	for i, want := range []string{"eventhub: exported 1000 events, ", "eventhub: exported 1003 events, ", "eventhub: interrupted", "eventhub: exported 1004 events, "} {
		if i >= len(lines) || !strings.HasPrefix(lines[i], want) || strings.Contains(lines[i], "\r") {
			t.Fatalf("got %q, want %q as line %d", lines, want, i)
		}
	}
}

// reportAndEnd counts events of which two are due for a report, and one is not.
func reportAndEnd(p *tally) {
	for _, events := range []int{1000, 3} {
		p.told = time.Now().Add(-p.every)
		p.add(events, events*5000)
	}
	p.say("interrupted")
	p.told = time.Now().Add(time.Hour)
	p.add(1, 5000)
	p.end()
}
