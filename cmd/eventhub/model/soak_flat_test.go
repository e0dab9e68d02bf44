//go:build unix

package model

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// A life of a process is judged if it has soakQuarter samples in both of the quarters that are
// compared, not counting those that were taken during a fault, or within soakCalm after one. What
// is warmed up is judged if a quarter is at least soakWarm: as long as ids of events are
// remembered.
const (
	soakQuarter = 4
	soakCalm    = 2 * time.Second
	soakWarm    = 2 * time.Minute
)

// flatness is by how much the median of a metric in the last quarter of a life may exceed that in
// an earlier one: by the larger of a share and an amount, which is in KiB for memory.
type flatness struct {
	earlier int // the quarter, of 0 to 3
	share   float64
	amount  int64
	warms   bool
}

// soakFlat has the rules by the first letter of a process.
//
// A node is full later than a hub, because a stream must first have all its events. Its connections
// and leaders move with the faults, and goroutines and files with them. The threads of a node are
// not judged: Go keeps the threads that it has made, and so many are made as calls block at a time,
// which is up to the disk.
var soakFlat = map[byte]map[string]flatness{
	'h': {
		"rss":        {1, 0.15, 16 << 10, true},
		"heap":       {1, 0.15, 6 << 10, true},
		"goroutines": {1, 0.02, 6, false},
		"fds":        {1, 0.02, 4, false},
		"threads":    {1, 0.10, 4, false},
	},
	'n': {
		"rss":        {2, 0.15, 16 << 10, true},
		"heap":       {2, 0.15, 6 << 10, true},
		"goroutines": {2, 0.10, 6, true},
		"fds":        {2, 0.10, 6, true},
	},
}

// life is one of a process, and its samples without those of faults.
type life struct {
	name    string
	number  int
	from    time.Duration
	to      time.Duration
	samples []soakSample
}

// lives returns those of all processes of a piece, by name and number.
func (p *soakPiece) lives() []*life {
	var all []*life
	for _, s := range p.samples {
		i := slices.IndexFunc(all, func(l *life) bool { return l.name == s.name && l.number == s.life })
		if i < 0 {
			i = len(all)
			all = append(all, &life{name: s.name, number: s.life, from: s.at})
		}
		all[i].to = s.at
		if !p.during(s.at) {
			all[i].samples = append(all[i].samples, s)
		}
	}
	slices.SortFunc(all, func(a, b *life) int { return strings.Compare(a.name, b.name)*1_000_000 + a.number - b.number })
	return all
}

// quarter returns the median of a metric in a quarter of the life, 0 to 3. Samples without the
// metric do not count.
func (l *life) quarter(n int, of func(soakSample) int64) (median int64, ok bool) {
	var values []int64
	length := l.to - l.from
	for _, s := range l.samples {
		if v := of(s); v > 0 && s.at >= l.from+length*time.Duration(n)/4 && s.at <= l.from+length*time.Duration(n+1)/4 {
			values = append(values, v)
		}
	}
	if len(values) < soakQuarter {
		return 0, false
	}
	slices.Sort(values)
	return values[len(values)/2], true
}

// growth is a metric of a life in an earlier quarter and in its last one.
type growth struct {
	life          *life
	metric        string
	earlier, last int64
	grown, judged bool
}

// growths compares the quarters of all lives.
func (p *soakPiece) growths() []growth {
	var all []growth
	for _, l := range p.lives() {
		for _, m := range soakMetrics {
			g := growth{life: l, metric: m.name}
			most, rule := soakFlat[l.name[0]][m.name]
			earlier, ok := l.quarter(max(most.earlier, 1), m.of)
			last, too := l.quarter(3, m.of)
			g.earlier, g.last = earlier, last
			g.judged = rule && ok && too && (!most.warms || (l.to-l.from)/4 >= soakWarm)
			g.grown = g.judged && last-earlier > max(int64(most.share*float64(earlier)), most.amount)
			all = append(all, g)
		}
	}
	return all
}

func (g growth) String() string {
	return fmt.Sprintf("%s of %s, life %d (%v to %v): %d in an earlier quarter, %d in the last", g.metric, g.life.name, g.life.number, g.life.from.Round(time.Second), g.life.to.Round(time.Second), g.earlier, g.last)
}

// leaks are the growths that are too large.
func (p *soakPiece) leaks() []growth {
	return slices.DeleteFunc(p.growths(), func(g growth) bool { return !g.grown })
}

// quietSoak makes up a piece of 20 minutes without a leak: a fault every 25 s, during which
// everything goes up and down, noise, garbage collection, and lives of h1 that end at 8 and 14
// minutes. change is applied to each sample, with the life's age.
func quietSoak(seed int64, change func(s *soakSample, age time.Duration)) *soakPiece {
	rnd := rand.New(rand.NewPCG(uint64(seed), 0))
	p := &soakPiece{seed: seed, when: time.Unix(1_780_000_000, 0).UTC(), length: 20 * time.Minute, capacity: 4_000, rate: 2_000}
	for at := 25 * time.Second; at < p.length; at += 25 * time.Second {
		over := at + time.Duration(rnd.IntN(6_000))*time.Millisecond
		p.faults = append(p.faults, soakFault{at, over, over + time.Second, "hold-link h0"})
	}
	for at := 5 * time.Second; at < p.length; at += 5 * time.Second {
		for _, name := range []string{"h0", "h1", "n0"} {
			s := soakSample{at: at, name: name, rss: 90<<10 + rnd.Int64N(6<<10), heap: 24<<10 + rnd.Int64N(8<<10), goroutines: 180 + rnd.Int64N(5), fds: 40 + rnd.Int64N(4), threads: 12 + rnd.Int64N(2)}
			age := at
			if name == "h1" {
				for _, born := range []time.Duration{8 * time.Minute, 14 * time.Minute} {
					if at >= born {
						s.life++
						age = at - born
					}
				}
			}
			if p.during(at) {
				s.rss += rnd.Int64N(60 << 10)
				s.goroutines += max(-50, s.goroutines*rnd.Int64N(2)-50)
				s.fds += rnd.Int64N(60) - 30
			}
			if name == "n0" {
				s.heap, s.goroutines = 0, 0
			}
			change(&s, age)
			p.samples = append(p.samples, s)
		}
	}
	return p
}

// The rule of the soak accepts noise, faults and restarts, and finds leaks that are as small as one
// for every third fault.
func TestSoakFindsLeaks(t *testing.T) {
	t.Parallel()
	faults := func(age time.Duration) int64 { return int64(age / (25 * time.Second)) }
	for _, c := range []struct {
		what   string
		change func(s *soakSample, age time.Duration)
		want   string // the metric and the process
	}{
		{"no leak", func(*soakSample, time.Duration) {}, ""},
		{"one that is larger than another", func(s *soakSample, _ time.Duration) {
			if s.name == "n0" {
				s.rss *= 3
				s.fds *= 3
			}
		}, ""},
		{"what is cached in the first quarter", func(s *soakSample, age time.Duration) {
			if s.name != "h1" {
				s.rss += min(int64(age/time.Second), 200) << 8
			}
		}, ""},
		{"a goroutine for each third connection, of which two come a second", func(s *soakSample, age time.Duration) {
			if s.name == "h0" {
				s.goroutines += int64(age/time.Second) * 2 / 3
			}
		}, "goroutines of h0"},
		{"a goroutine for each reconnect", func(s *soakSample, age time.Duration) {
			if s.name == "h0" {
				s.goroutines += faults(age) / 2
			}
		}, "goroutines of h0"},
		{"a goroutine for each connection of a hub that is restarted", func(s *soakSample, age time.Duration) {
			if s.name == "h1" {
				s.goroutines += int64(age / time.Second)
			}
		}, "goroutines of h1"},
		{"a file for every third fault", func(s *soakSample, age time.Duration) {
			if s.name == "h0" {
				s.fds += faults(age) / 3
			}
		}, "fds of h0"},
		{"a file of a node for each fault", func(s *soakSample, age time.Duration) {
			if s.name == "n0" {
				s.fds += faults(age)
			}
		}, "fds of n0"},
		{"a thread for every third fault", func(s *soakSample, age time.Duration) {
			if s.name == "h0" {
				s.threads += faults(age) / 3
			}
		}, "threads of h0"},
		{"32 bytes for each event of 2,000 a second", func(s *soakSample, age time.Duration) {
			if s.name == "h0" {
				s.rss += int64(age/time.Second) * 2_000 * 32 >> 10
				s.heap += int64(age/time.Second) * 2_000 * 32 >> 10
			}
		}, "heap of h0"},
	} {
		for seed := range int64(20) {
			p := quietSoak(seed, c.change)
			var found []string
			for _, g := range p.leaks() {
				if name := g.metric + " of " + g.life.name; !slices.Contains(found, name) {
					found = append(found, name)
				}
			}
			if c.want == "" && len(found) > 0 || c.want != "" && !slices.Contains(found, c.want) {
				t.Errorf("%s, seed %d: found %v", c.what, seed, found)
			}
		}
	}
}

// Lives that are too short are not judged, and no other ones.
func TestSoakJudgesLives(t *testing.T) {
	t.Parallel()
	p := quietSoak(1, func(*soakSample, time.Duration) {})
	p.samples = append(p.samples, soakSample{at: p.length, name: "n1", rss: 1, fds: 1, threads: 1})
	judged := map[string]int{}
	for _, g := range p.growths() {
		if g.judged {
			judged[fmt.Sprint(g.life.name, " ", g.life.number)]++
		}
	}
	if got, want := fmt.Sprint(judged), "map[h0 0:5 h1 0:3 h1 1:3 h1 2:3 n0 0:2]"; got != want {
		t.Errorf("judged %s, want %s", got, want)
	}
}

// A piece is the same after it was written and read.
func TestSoakPieceIsKept(t *testing.T) {
	t.Parallel()
	p := quietSoak(1, func(*soakSample, time.Duration) {})
	p.totals, p.guests = soakTotals{4, 3, 2, 1}, 5
	var b bytes.Buffer
	if err := p.write(&b); err != nil {
		t.Fatal(err)
	}
	text := b.String()
	got, err := readSoakPiece(&b)
	if err != nil {
		t.Fatal(err)
	}
	var again bytes.Buffer
	if err := got.write(&again); err != nil {
		t.Fatal(err)
	}
	if again.String() != text || len(got.samples) != len(p.samples) || got.totals != p.totals || !got.when.Equal(p.when) {
		t.Errorf("written again, it is\n%.2000s\nand was\n%.2000s", again.String(), text)
	}
	for _, wrong := range []string{"sample,1\n", "fault,x,2,3,kill\n", "piece,1,yesterday,1,1,1,1,1,1,1,1\n", "other,1\n"} {
		if _, err := readSoakPiece(strings.NewReader(wrong)); err == nil {
			t.Errorf("%q was read", wrong)
		}
	}
}
