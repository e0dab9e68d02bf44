//go:build unix

package model

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"sync"
	"time"
)

// never is the end of what has none.
const never = time.Duration(math.MaxInt64)

// entry is one line of a history. Times count from the start of the run, on the harness's monotonic
// clock.
type entry struct {
	at time.Duration
	// lo bounds what was received from below: the socket was empty at that moment, so the hub wrote
	// it later.
	lo   time.Duration
	conn int // 0: no connection's
	kind string
	text string
}

// The kinds of entries. Those of faults are "fault NUMBER KIND TARGET" and "over NUMBER".
const (
	kindSet  = "set"  // settings, as JSON
	kindOpen = "open" // a connection to the hub named in the text; "small" if lo says nothing
	kindSent = ">"    // a frame; at is before the write
	kindGot  = "<"    // a frame
	// the client begins to end the connection; "abrupt" when what is unread is lost
	kindClose  = "close"
	kindEnd    = "end"    // nothing more can come; the text says why
	kindDeaf   = "deaf"   // the client stops reading
	kindHears  = "hears"  // and goes on
	kindFault  = "fault"  // begins
	kindOver   = "over"   // the effects of a fault end, apart from what it left to be redelivered
	kindStored = "stored" // TOPIC SEQUENCE ID MILLISECONDS PAYLOAD, at the end
	kindLetter = "letter" // SEQUENCE PAYLOAD, at the end
	kindLeft   = "left"   // GROUP TOPIC NUMBER: unsettled at the end, as the server says
	kindNote   = "note"
)

// madeNote begins the note of each fault, before what -model.faults calls it.
const madeNote = "made "

// history is what happened, in the order of observation.
type history []entry

func (e entry) String() string {
	var b strings.Builder
	b.WriteString(milliseconds(e.at))
	if e.kind == kindGot || e.kind == kindEnd || e.kind == kindRead {
		b.WriteString("/" + milliseconds(e.lo))
	}
	who := "-"
	if e.conn > 0 {
		who = "c" + strconv.Itoa(e.conn)
	}
	fmt.Fprintf(&b, " %s %s", who, e.kind)
	if e.text != "" {
		b.WriteString(" " + e.text)
	}
	return b.String()
}

func milliseconds(d time.Duration) string {
	return strconv.FormatFloat(float64(d)/float64(time.Millisecond), 'f', -1, 64)
}

// parseEntry reads what String wrote.
func parseEntry(line string) (entry, error) {
	fields := strings.SplitN(line, " ", 4)
	if len(fields) < 3 {
		return entry{}, fmt.Errorf("too few fields: %q", line)
	}
	var e entry
	at, lo, both := strings.Cut(fields[0], "/")
	if !both {
		lo = at
	}
	for _, f := range []struct {
		text string
		to   *time.Duration
	}{{at, &e.at}, {lo, &e.lo}} {
		ms, err := strconv.ParseFloat(f.text, 64)
		if err != nil {
			return entry{}, fmt.Errorf("%q: %w", line, err)
		}
		*f.to = time.Duration(math.Round(ms * float64(time.Millisecond)))
	}
	if who, ok := strings.CutPrefix(fields[1], "c"); ok {
		n, err := strconv.Atoi(who)
		if err != nil {
			return entry{}, fmt.Errorf("%q: %w", line, err)
		}
		e.conn = n
	}
	e.kind = fields[2]
	if len(fields) == 4 {
		e.text = fields[3]
	}
	return e, nil
}

// readHistory reads a history. Blank lines, and blanks around lines, do not count.
func readHistory(r io.Reader) (history, error) {
	var h history
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadString('\n')
		if line = strings.TrimSpace(line); line != "" {
			e, err := parseEntry(line)
			if err != nil {
				return nil, err
			}
			h = append(h, e)
		}
		if err == io.EOF {
			return h, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

func (h history) write(w io.Writer) error {
	b := bufio.NewWriter(w)
	for _, e := range h {
		if _, err := fmt.Fprintln(b, e); err != nil {
			return err
		}
	}
	return b.Flush()
}

// made counts the faults, by what -model.faults calls them.
func (h history) made() map[string]int {
	all := map[string]int{}
	for _, e := range h {
		if kind, ok := strings.CutPrefix(e.text, madeNote); ok && e.kind == kindNote {
			all[kind]++
		}
	}
	return all
}

// recorder takes a history down. It may be used concurrently.
type recorder struct {
	began  time.Time
	sparse bool // keeps faults and notes only, and no frames

	mu      sync.Mutex
	entries history
}

func newRecorder() *recorder { return &recorder{began: time.Now()} }

func (r *recorder) now() time.Duration { return time.Since(r.began) }

// add takes down what happens now.
func (r *recorder) add(conn int, kind, text string) {
	if r.sparse && conn > 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	at := r.now() // under the lock, so that entries are in the order of their times
	r.entries = append(r.entries, entry{at: at, lo: at, conn: conn, kind: kind, text: text})
}

// received takes down what came after lo.
func (r *recorder) received(conn int, lo time.Duration, kind, text string) {
	if r.sparse {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.entries = append(r.entries, entry{at: r.now(), lo: lo, conn: conn, kind: kind, text: text})
}

func (r *recorder) history() history {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append(history(nil), r.entries...)
}
