//go:build unix

package model

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

var soakDraw = flag.Bool("soak.draw", false, "write docs/pictures/soak.svg, which TestSoakPicture compares, anew")

// soakPicture is the drawing of all pieces that are kept.
const soakPicture = "../../../docs/pictures/soak.svg"

// Measures of the picture, in pixels.
const (
	soakWidth   = 1_200
	soakPanel   = 130 // the height of one
	soakHead    = 46
	soakLeft    = 60
	soakRight   = 90
	soakBetween = 34 // panels
	soakGap     = 8  // between pieces
)

const soakStyle = `text{font:11px sans-serif}.title{font-weight:bold}.axis{stroke:#bbb;fill:none}.grid{stroke:#eee}.fault{stroke:#f90;stroke-opacity:.35}.piece{fill:#f7f7f7}
polyline{fill:none;stroke-width:1.2;stroke-linejoin:round}.h0{stroke:#06c}.h1{stroke:#0a6}.h2{stroke:#639}.n0{stroke:#c33}.n1{stroke:#c70}.n2{stroke:#999}`

// soakDrawing draws pieces beside each other: a panel for each metric, a line for each life of a
// process, and a stroke for each fault.
type soakDrawing struct {
	pieces []*soakPiece
	names  []string // of processes
	total  time.Duration
	out    bytes.Buffer
}

func drawSoak(pieces []*soakPiece) []byte {
	d := &soakDrawing{pieces: pieces}
	for _, p := range pieces {
		d.total += p.extent()
		for _, s := range p.samples {
			if !slices.Contains(d.names, s.name) {
				d.names = append(d.names, s.name)
			}
		}
	}
	slices.Sort(d.names)
	height := soakHead + len(soakMetrics)*(soakPanel+soakBetween)
	fmt.Fprintf(&d.out, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d">`+"\n<style>%s</style>\n<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n", soakWidth, height, soakWidth, height, soakStyle)
	for i, m := range soakMetrics {
		d.panel(soakHead+i*(soakPanel+soakBetween), m.title, m.unit, m.of)
	}
	for i, name := range d.names {
		y := soakHead + 14 + 16*i
		fmt.Fprintf(&d.out, `<polyline class=%q points="%d,%d %d,%d"/><text x="%d" y="%d">%s</text>`+"\n", name, soakWidth-soakRight+10, y-4, soakWidth-soakRight+34, y-4, soakWidth-soakRight+40, y, legend(name))
	}
	d.out.WriteString("</svg>\n")
	return d.out.Bytes()
}

func legend(name string) string {
	return map[byte]string{'h': "hub ", 'n': "node "}[name[0]] + name[1:]
}

// extent is for how long there are samples.
func (p *soakPiece) extent() time.Duration {
	if len(p.samples) == 0 {
		return p.length
	}
	return max(p.length, p.samples[len(p.samples)-1].at)
}

// x is where a moment of a piece is.
func (d *soakDrawing) x(piece int, at time.Duration) float64 {
	var before time.Duration
	for _, p := range d.pieces[:piece] {
		before += p.extent()
	}
	room := float64(soakWidth - soakLeft - soakRight - soakGap*(len(d.pieces)-1))
	return soakLeft + float64(soakGap*piece) + float64(before+at)/float64(d.total)*room
}

// panel draws one metric.
func (d *soakDrawing) panel(top int, title, unit string, of func(soakSample) int64) {
	most := int64(1)
	for _, p := range d.pieces {
		for _, s := range p.samples {
			most = max(most, of(s))
		}
	}
	scale := int64(1)
	if unit == "MiB" {
		scale = 1 << 10
	}
	step := soakStep(float64(most) / float64(scale))
	room := step * float64(int(float64(most)/float64(scale)/step)+1)
	y := func(v float64) float64 { return float64(top+soakPanel) - v/room*soakPanel }
	fmt.Fprintf(&d.out, `<text class="title" x="%d" y="%d">%s</text>`+"\n", soakLeft, top-6, strings.TrimSuffix(title+", "+unit, ", "))
	for i, p := range d.pieces {
		left, right := d.x(i, 0), d.x(i, p.extent())
		fmt.Fprintf(&d.out, `<rect class="piece" x="%.1f" y="%d" width="%.1f" height="%d"/>`+"\n", left, top, right-left, soakPanel)
		if top == soakHead {
			fmt.Fprintf(&d.out, `<text x="%.1f" y="14">seed %d, %.0f min</text><text x="%.1f" y="28">%.0f/s</text>`+"\n", left, p.seed, p.length.Minutes(), left, p.rate)
		}
		for _, f := range p.faults {
			x := d.x(i, f.from)
			fmt.Fprintf(&d.out, `<path class="fault" d="M%.1f %dv%d"><title>%s at %v</title></path>`+"\n", x, top, soakPanel, escaped("%s", f.what), f.from.Round(time.Second))
		}
	}
	for v := 0.0; v <= room; v += step {
		fmt.Fprintf(&d.out, `<path class="grid" d="M%d %.1fH%d"/><text x="%d" y="%.1f" text-anchor="end">%g</text>`+"\n", soakLeft, y(v), soakWidth-soakRight, soakLeft-6, y(v)+4, v)
	}
	for i, p := range d.pieces {
		lines := map[string][]string{}
		var order []string
		for _, s := range p.samples {
			if of(s) == 0 {
				continue
			}
			key := fmt.Sprintf("%s %d", s.name, s.life)
			if lines[key] == nil {
				order = append(order, key)
			}
			lines[key] = append(lines[key], fmt.Sprintf("%.1f,%.1f", d.x(i, s.at), y(float64(of(s))/float64(scale))))
		}
		for _, key := range order {
			name, _, _ := strings.Cut(key, " ")
			fmt.Fprintf(&d.out, `<polyline class=%q points=%q/>`+"\n", name, strings.Join(lines[key], " "))
		}
	}
}

// soakStep is a round step of an axis with about five.
func soakStep(most float64) float64 {
	step := 1.0
	for _, factor := range []float64{2, 2.5, 2} {
		if most/step > 5 {
			step *= factor
		}
	}
	if most/step > 5 {
		return 10 * soakStep(most/10)
	}
	return step
}

// soakTable has a row for each piece, as RELIABILITY.md has them, and one for each life that was
// long enough to be judged by its memory.
func soakTable(pieces []*soakPiece) string {
	var b strings.Builder
	b.WriteString("| seed | minutes | capacity | rate | events | deliveries | of them again | clients that came and went | faults | longest wait for a backlog |\n|---|---|---|---|---|---|---|---|---|---|\n")
	for _, p := range pieces {
		longest := soakFault{}
		for _, f := range p.faults {
			if f.back-f.over >= longest.back-longest.over {
				longest = f
			}
		}
		fmt.Fprintf(&b, "| %d | %.0f | %.0f/s | %.0f/s | %d | %d | %d | %d | %d | %.1f s after %s |\n", p.seed, p.length.Minutes(), p.capacity, p.rate,
			p.totals.confirmed, p.totals.deliveries, p.totals.again, p.guests, len(p.faults), (longest.back - longest.over).Seconds(), longest.what)
	}
	b.WriteString("\n| seed | process | life | resident MiB | heap MiB | goroutines | files | threads |\n|---|---|---|---|---|---|---|---|\n")
	for _, p := range pieces {
		for all := range slices.Chunk(p.growths(), len(soakMetrics)) {
			if !all[0].judged {
				continue
			}
			l := all[0].life
			fmt.Fprintf(&b, "| %d | %s | %.0f to %.0f min |", p.seed, legend(l.name), l.from.Minutes(), l.to.Minutes())
			for i, g := range all {
				scale := int64(1)
				if soakMetrics[i].unit == "MiB" {
					scale = 1 << 10
				}
				fmt.Fprintf(&b, " %d, %d |", g.earlier/scale, g.last/scale)
			}
			b.WriteString("\n")
		}
	}
	return b.String()
}

// TestSoakPicture judges the pieces of the soak that are kept, and compares their drawing with that
// in the documents.
func TestSoakPicture(t *testing.T) {
	t.Parallel()
	pieces := soakPieces(t)
	var length time.Duration
	faults := 0
	for _, p := range pieces {
		length += p.length
		faults += len(p.faults)
		for _, g := range p.leaks() {
			t.Errorf("seed %d: grown: %v", p.seed, g)
		}
		if p.totals.published != p.totals.confirmed || p.totals.confirmed == 0 {
			t.Errorf("seed %d: %+v", p.seed, p.totals)
		}
	}
	t.Logf("%d pieces, %v, %d faults\n%s", len(pieces), length, faults, soakTable(pieces))
	got := drawSoak(pieces)
	if *soakDraw {
		if err := os.WriteFile(soakPicture, got, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(soakPicture)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s is not the drawing of testdata/soak; write it anew with -soak.draw", soakPicture)
	}
}

// A drawing has a line for each life of each process and metric, and a stroke for each fault.
func TestSoakDrawing(t *testing.T) {
	t.Parallel()
	a, b := quietSoak(1, func(*soakSample, time.Duration) {}), quietSoak(2, func(*soakSample, time.Duration) {})
	a.faults[0].what = "kill-hub <h1>"
	classes := wellFormed(t, drawSoak([]*soakPiece{a, b}))
	legend := 1
	for class, want := range map[string]int{
		"h0": legend + 2*len(soakMetrics), "h1": legend + 2*3*len(soakMetrics), "n0": legend + 2*(len(soakMetrics)-2),
		"fault": (len(a.faults) + len(b.faults)) * len(soakMetrics), "piece": 2 * len(soakMetrics), "title": len(soakMetrics),
	} {
		if classes[class] != want {
			t.Errorf("%d elements have the class %s, want %d", classes[class], class, want)
		}
	}
	for most, want := range map[float64]float64{1: 1, 5: 1, 6: 2, 11: 5, 26: 10, 180: 50, 900: 200} {
		if got := soakStep(most); cmp.Compare(got, want) != 0 {
			t.Errorf("an axis up to %g has steps of %g, want %g", most, got, want)
		}
	}
}
