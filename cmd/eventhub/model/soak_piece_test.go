//go:build unix

package model

import (
	"encoding/csv"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"
)

// soakPiece is what came of one run: its figures, its faults, and what its processes needed.
type soakPiece struct {
	seed     int64
	when     time.Time
	length   time.Duration
	capacity float64 // events a second
	rate     float64
	totals   soakTotals
	guests   int64 // clients that came and went
	faults   []soakFault
	samples  []soakSample
}

// soakFault is a fault: when it began, when it was over, and when groups had been given all that
// was confirmed until then.
type soakFault struct {
	from, over, back time.Duration
	what             string
}

// soakSample is what a process needed at a moment. A process that is started again has another
// life. heap is the size at which the Go heap is collected next, about twice of what was live after
// the last collection: what is in use goes up and down between collections. heap and goroutines are
// 0 if the process did not answer.
type soakSample struct {
	at                       time.Duration
	name                     string
	life                     int
	rss, heap                int64 // KiB
	goroutines, fds, threads int64
}

// soakMetrics are what must stay flat.
var soakMetrics = []struct {
	name, title, unit string
	of                func(soakSample) int64
}{
	{"rss", "resident memory", "MiB", func(s soakSample) int64 { return s.rss }},
	{"heap", "Go heap at which it is collected, about twice what is live", "MiB", func(s soakSample) int64 { return s.heap }},
	{"goroutines", "goroutines", "", func(s soakSample) int64 { return s.goroutines }},
	{"fds", "file descriptors", "", func(s soakSample) int64 { return s.fds }},
	{"threads", "threads", "", func(s soakSample) int64 { return s.threads }},
}

// during reports whether the effects of a fault were there at a moment.
func (p *soakPiece) during(at time.Duration) bool {
	return slices.ContainsFunc(p.faults, func(f soakFault) bool { return at >= f.from && at <= f.back+soakCalm })
}

func secondsOf(d time.Duration) string { return strconv.FormatFloat(d.Seconds(), 'f', 1, 64) }

// write writes a piece as CSV: a row "piece", and rows "fault" and "sample".
func (p *soakPiece) write(w io.Writer) error {
	out := csv.NewWriter(w)
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	rows := [][]string{
		{
			"piece", number(p.seed), p.when.UTC().Format(time.RFC3339), secondsOf(p.length), strconv.FormatFloat(p.capacity, 'f', 0, 64), strconv.FormatFloat(p.rate, 'f', 0, 64),
			number(p.totals.published), number(p.totals.confirmed), number(p.totals.deliveries), number(p.totals.again), number(p.guests),
		},
	}
	for _, f := range p.faults {
		rows = append(rows, []string{"fault", secondsOf(f.from), secondsOf(f.over), secondsOf(f.back), f.what})
	}
	for _, s := range p.samples {
		rows = append(rows, []string{"sample", secondsOf(s.at), s.name, strconv.Itoa(s.life), number(s.rss), number(s.heap), number(s.goroutines), number(s.fds), number(s.threads)})
	}
	return out.WriteAll(rows)
}

// readSoakPiece reads what write wrote.
func readSoakPiece(r io.Reader) (*soakPiece, error) {
	in := csv.NewReader(r)
	in.FieldsPerRecord = -1
	rows, err := in.ReadAll()
	if err != nil {
		return nil, err
	}
	p, columns := &soakPiece{}, map[string]int{"piece": 11, "fault": 5, "sample": 9}
	for _, row := range rows {
		if len(row) != columns[row[0]] {
			return nil, fmt.Errorf("row %q has %d columns", row, len(row))
		}
		var fault error
		float := func(i int) float64 {
			f, err := strconv.ParseFloat(row[i], 64)
			if err != nil {
				fault = fmt.Errorf("row %q: %w", row, err)
			}
			return f
		}
		number := func(i int) int64 { return int64(float(i)) }
		at := func(i int) time.Duration {
			return time.Duration(float(i) * float64(time.Second)).Round(time.Millisecond)
		}
		switch row[0] {
		case "piece":
			if p.when, err = time.Parse(time.RFC3339, row[2]); err != nil {
				return nil, err
			}
			p.seed, p.length, p.capacity, p.rate = number(1), at(3), float(4), float(5)
			p.totals, p.guests = soakTotals{number(6), number(7), number(8), number(9)}, number(10)
		case "fault":
			p.faults = append(p.faults, soakFault{at(1), at(2), at(3), row[4]})
		case "sample":
			p.samples = append(p.samples, soakSample{at(1), row[2], int(number(3)), number(4), number(5), number(6), number(7), number(8)})
		}
		if fault != nil {
			return nil, fault
		}
	}
	return p, nil
}

// soakPieces reads the pieces that are kept, in the order of their times.
func soakPieces(tb testing.TB) []*soakPiece {
	tb.Helper()
	paths, err := filepath.Glob("testdata/soak/*.csv")
	if err != nil || len(paths) == 0 {
		tb.Fatalf("pieces of the soak: %v, %v", paths, err)
	}
	var all []*soakPiece
	for _, path := range paths {
		f, err := os.Open(path)
		if err != nil {
			tb.Fatal(err)
		}
		p, err := readSoakPiece(f)
		_ = f.Close()
		if err != nil {
			tb.Fatalf("%s: %v", path, err)
		}
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b *soakPiece) int { return a.when.Compare(b.when) })
	return all
}
