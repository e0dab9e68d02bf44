//go:build unix

package model

import (
	"bytes"
	"cmp"
	"encoding/xml"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// Bounds of a timeline: it is to be read in a browser.
const (
	timelineBefore = 4 * time.Second // shown before a violation
	timelineAfter  = 2 * time.Second
	timelineMost   = 30 * time.Second // shown in all
	timelineLanes  = 60
	timelineMarks  = 3_000
	timelineWidth  = 1_600 // pixels
	timelineMargin = 170
	barHeight      = 9
	mostStacked    = 12 // bars above each other in a lane
)

// timeline draws a history as SVG: time goes from left to right, and each connection, hub and node
// has a lane. It shows what is around the violation v. Without one, it shows the beginning.
type timeline struct {
	*ledger

	v        violation
	from, to time.Duration
	lanes    []*lane
	byName   map[string]*lane
	marks    int
	left     int // marks that were left out
	out      bytes.Buffer
}

// lane is one line of a timeline.
type lane struct {
	name string
	top  int
	bars []time.Duration // where the last bar of each row ends
	body bytes.Buffer
}

// drawTimeline returns the drawing.
func drawTimeline(l *ledger, v violation) []byte {
	t := &timeline{ledger: l, v: v, byName: map[string]*lane{}}
	t.from, t.to = max(v.from-timelineBefore, 0), v.to+timelineAfter
	if v.from == 0 && v.to == 0 {
		t.from, t.to = t.about()
	}
	t.to = min(t.to, max(l.end, time.Second))
	if t.to-t.from > timelineMost { // its end is where it shows
		t.from = max(0, t.to-timelineMost)
	}
	t.addLanes()
	t.publishes()
	t.deliveries()
	t.letters()
	return t.render()
}

// about is when the event of a violation without a time was there.
func (t *timeline) about() (from, to time.Duration) {
	for _, g := range t.sortedGroups() {
		if e := g.events[t.v.id]; e != nil && (t.v.group == "" || g.group == t.v.group) {
			ds := e.deliveries
			return max(ds[0].lo-timelineBefore, 0), ds[len(ds)-1].at + timelineAfter
		}
	}
	if s := t.byID[[2]string{t.v.topic, t.v.id}]; s != nil && t.sentN[s.n] != nil {
		return max(t.sentN[s.n].sent-timelineBefore, 0), t.sentN[s.n].sent + timelineMost/2
	}
	return 0, timelineMost
}

// addLane makes a lane, unless there is one of that name.
func (t *timeline) addLane(name string) {
	if t.byName[name] == nil {
		l := &lane{name: name}
		t.byName[name] = l
		t.lanes = append(t.lanes, l)
	}
}

// addLanes makes the lanes of nodes and hubs with faults, and of the connections that were open.
func (t *timeline) addLanes() {
	var targets []string
	for _, f := range t.faults {
		if f.target != "-" && !slices.Contains(targets, f.target) {
			targets = append(targets, f.target)
		}
	}
	for _, c := range t.order {
		if !slices.Contains(targets, c.hub) {
			targets = append(targets, c.hub)
		}
	}
	slices.SortFunc(targets, func(a, b string) int { return strings.Compare(b, a) }) // nodes first
	for _, name := range targets {
		t.addLane(name)
	}
	for _, c := range t.order {
		if c.opened <= t.to && min(c.closeAt, c.endAt) >= t.from && t.concerns(c) && len(t.lanes) < timelineLanes {
			t.addLane(c.lane())
		}
	}
	t.addLane("dead letters")
}

func (c *connection) lane() string {
	return strings.TrimSpace(fmt.Sprintf("c%d on %s %s", c.number, c.hub, c.by))
}

// concerns reports whether the connection had to do with the violation.
func (t *timeline) concerns(c *connection) bool {
	if t.v.topic == "" {
		return true
	}
	return slices.ContainsFunc(c.frames, func(f *frame) bool {
		return f.Topic == t.v.topic && (t.v.group == "" || f.Group == t.v.group || f.Op == "PUBLISH" && f.reply != nil && f.reply.ID == t.v.id)
	})
}

func (t *timeline) x(at time.Duration) float64 {
	at = min(max(at, t.from), t.to)
	return timelineMargin + float64(at-t.from)/float64(t.to-t.from)*(timelineWidth-timelineMargin-10)
}

// full reports whether nothing more is drawn. What the violation is about always is.
func (t *timeline) full(id string) bool {
	if t.marks++; t.marks > timelineMarks && id != t.v.id {
		t.left++
		return true
	}
	return false
}

func escaped(format string, args ...any) string {
	var b bytes.Buffer
	_ = xml.EscapeText(&b, []byte(strings.ToValidUTF8(fmt.Sprintf(format, args...), "?")))
	return b.String()
}

// class marks what belongs to the event of the violation.
func (t *timeline) class(id, class string) string {
	if id != "" && id == t.v.id {
		return class + " it"
	}
	return class
}

func (t *timeline) publishes() {
	for _, f := range t.frames {
		l := t.byName[f.conn.lane()]
		if f.Op != "PUBLISH" || l == nil || f.sent > t.to || f.sent < t.from || t.v.topic != "" && f.Topic != t.v.topic {
			continue
		}
		id, answer := f.given(), "no answer"
		if f.reply != nil {
			answer = fmt.Sprintf("%s %s%s at %v", f.reply.Op, f.reply.ID, f.reply.Code, short(f.answered))
			id = cmp.Or(f.reply.ID, id)
		}
		if t.full(id) {
			continue
		}
		fmt.Fprintf(&l.body, `<path class=%q d="M%.1f 2l4 8h-8z"><title>%s</title></path>`+"\n", t.class(id, "publish"), t.x(f.sent),
			escaped("PUBLISH %s %d at %v: %s", f.Topic, f.number(), short(f.sent), answer))
	}
}

// deliveries draws a bar from each delivery to its settlement, or to the end of its lease.
func (t *timeline) deliveries() {
	var all []*delivery
	t.eachEvent(func(g *group, e *event) {
		if t.v.group == "" && t.v.id == "" || (t.v.group == "" || g.group == t.v.group) && (t.v.topic == "" || g.topic == t.v.topic) {
			all = append(all, e.deliveries...)
		}
	})
	slices.SortStableFunc(all, func(a, b *delivery) int { return a.line - b.line })
	for _, d := range all {
		until, how := t.settlement(d)
		l := t.byName[d.sub.conn.lane()]
		if l == nil || d.at > t.to || until < t.from || t.full(d.id) {
			continue
		}
		row := slices.IndexFunc(l.bars, func(end time.Duration) bool { return end <= d.at })
		if row < 0 && len(l.bars) < mostStacked {
			l.bars = append(l.bars, 0)
			row = len(l.bars) - 1
		} else if row < 0 {
			row = 0 // one above the other
		}
		l.bars[row] = max(l.bars[row], until)
		x, y := t.x(d.at), 12+row*barHeight
		fmt.Fprintf(&l.body, `<rect class=%q x="%.1f" y="%d" width="%.1f" height="%d"><title>%s</title></rect>`+"\n", t.class(d.id, "lease "+how), x, y, max(t.x(until)-x, 2), barHeight-2,
			escaped("%s %s, group %s: %v; %s at %v", d.topic, d.id, d.group.group, d, how, short(until)))
		if how == "acked" || how == "refused" {
			fmt.Fprintf(&l.body, `<path class=%q d="M%.1f %dv%d"/>`+"\n", t.class(d.id, how), t.x(until), y-1, barHeight)
		}
	}
}

// settlement is when, and how, a delivery ended as far as its client knows.
func (t *timeline) settlement(d *delivery) (at time.Duration, how string) {
	at, _ = d.deadline()
	how = "expired"
	for _, f := range d.may("ACK", "NACK") {
		if f.sent >= d.at && f.sent < at {
			at = f.sent
			if how = "acked"; f.Op == "NACK" {
				how = "refused"
			}
		}
	}
	if over := d.sub.over(); over < at {
		at, how = max(over, d.at), "lost"
	}
	return at, how
}

// letters draws the dead letters, whose times are those of a hub's clock.
func (t *timeline) letters() {
	since := never // the run began at this time of the streams' clock, or a little before
	for _, all := range t.stored {
		for _, s := range all {
			if f := t.sentN[s.n]; f != nil && f.ok() {
				since = min(since, time.Duration(s.ms)*time.Millisecond-f.sent)
			}
		}
	}
	l := t.byName["dead letters"]
	for _, d := range t.letter {
		at := time.Duration(d.TS)*time.Millisecond - since
		if since == never || d.TS == 0 || at < t.from || at > t.to || t.v.group != "" && d.Group != t.v.group || t.full(d.Original.ID) {
			continue
		}
		fmt.Fprintf(&l.body, `<path class=%q d="M%.1f 3l4 4-4 4-4-4z"><title>%s</title></path>`+"\n", t.class(d.Original.ID, "letter"), t.x(at),
			escaped("dead letter of %s %s, group %s: attempts %d, %s", d.Topic, d.Original.ID, d.Group, d.Attempts, d.Err))
	}
}

const timelineStyle = `text{font:11px sans-serif}.rule{fill:#b00;font-weight:bold;font-size:14px}.lane{stroke:#ddd}
.fault{fill:#f90;fill-opacity:.25}.violation{fill:#e00;fill-opacity:.15;stroke:#e00}.publish{fill:#06c}.letter{fill:#000}
.lease{fill:#9bd;stroke:#579}.acked{fill:#9d9;stroke:#393}.refused{fill:#fc8;stroke:#c60}.lost{fill:#ccc;stroke:#666}.expired{fill:#eee;stroke:#999}
.it{stroke:#e00;stroke-width:2}`

// render puts the lanes together.
func (t *timeline) render() []byte {
	const head = 64
	height := head
	for _, l := range t.lanes {
		l.top = height
		height += max(16, 16+len(l.bars)*barHeight)
	}
	o := &t.out
	fmt.Fprintf(o, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d">`+"\n<style>%s</style>\n", timelineWidth, height+10, timelineWidth, height+10, timelineStyle)
	title := "no rule is broken"
	if t.v.rule != "" {
		title = fmt.Sprintf("seed %d: rule %q is broken, topic %s, group %s, event %s", t.set.Seed, t.v.rule, t.v.topic, t.v.group, t.v.id)
	}
	fmt.Fprintf(o, `<text class="rule" x="6" y="16">%s</text>`+"\n", escaped("%s", title))
	fmt.Fprintf(o, `<text x="6" y="32">%s</text>`+"\n", escaped("%.250s", t.v.msg))
	if t.left > 0 {
		fmt.Fprintf(o, `<text x="6" y="46">%d marks are left out</text>`+"\n", t.left)
	}
	t.axis(head-6, height)
	if t.v.to > 0 {
		x := t.x(t.v.from)
		fmt.Fprintf(o, `<rect class="violation" x="%.1f" y="%d" width="%.1f" height="%d"><title>%s</title></rect>`+"\n", x, head-6, max(t.x(t.v.to)-x, 2), height-head+6, escaped("%s", t.v.msg))
	}
	for _, f := range t.faults {
		t.fault(f, head, height)
	}
	for _, l := range t.lanes {
		fmt.Fprintf(o, `<g transform="translate(0 %d)"><path class="lane" d="M0 0h%d"/><text x="6" y="12">%s</text>`+"\n", l.top, timelineWidth, escaped("%s", l.name))
		o.Write(l.body.Bytes())
		o.WriteString("</g>\n")
	}
	o.WriteString("</svg>\n")
	return o.Bytes()
}

// axis says which time is where.
func (t *timeline) axis(top, bottom int) {
	step := 100 * time.Millisecond
	for (t.to-t.from)/step > 20 {
		step *= 5
	}
	for at := (t.from + step - 1).Truncate(step); at <= t.to; at += step {
		fmt.Fprintf(&t.out, `<path class="lane" d="M%.1f %dV%d"/><text x="%.1f" y="%d">%v</text>`+"\n", t.x(at), top, bottom, t.x(at)+2, top, at)
	}
}

// fault draws a band: over the lane of its target, and its connections' if it is a hub; over all
// if it has none.
func (t *timeline) fault(f *fault, top, bottom int) {
	if f.from > t.to || f.to < t.from {
		return
	}
	band := func(y, height int) {
		x := t.x(f.from)
		fmt.Fprintf(&t.out, `<rect class="fault" x="%.1f" y="%d" width="%.1f" height="%d"><title>%s</title></rect>`+"\n", x, y, max(t.x(f.to)-x, 2), height,
			escaped("%s %s from %v to %v", f.kind, f.target, short(f.from), short(min(f.to, t.end))))
	}
	if f.target == "-" {
		band(top, bottom-top)
		return
	}
	for _, l := range t.lanes {
		if l.name == f.target || strings.Contains(l.name, " on "+f.target+" ") || strings.HasSuffix(l.name, " on "+f.target) {
			band(l.top, max(16, 16+len(l.bars)*barHeight))
		}
		if l.name == f.target {
			fmt.Fprintf(&t.out, `<text x="%.1f" y="%d">%s</text>`+"\n", t.x(f.from)+2, l.top+12, escaped("%s", f.kind))
		}
	}
}

// draw keeps the timeline of a violation beside the history.
func draw(l *ledger, v violation, path string) error {
	return os.WriteFile(path, drawTimeline(l, v), 0o600)
}

// TestTimeline draws a small history with a violation, and compares the drawing with that in
// testdata.
func TestTimeline(t *testing.T) {
	text := anEvent + "\n200/190 c1 < " + toFirst + second("2", 1200) + "1300 - fault 1 kill-hub h0\n1600 - over 1\n1700 - fault 2 stepdown -\n1750 - over 2\n" +
		strings.Replace(letterOf("2", "no & <never>"), `"attempts"`, `"ts":1500,"attempts"`, 1)
	h, err := readHistory(strings.NewReader(strings.Replace(text, "stored t 1 e1 0", "stored t 1 e1 105", 1)))
	if err != nil {
		t.Fatal(err)
	}
	l, found, err := check(h)
	if err != nil {
		t.Fatal(err)
	}
	at := slices.IndexFunc(found, func(v violation) bool { return v.rule == "holder" })
	if at < 0 {
		t.Fatalf("found %v", found)
	}
	got := drawTimeline(l, found[at])
	golden := filepath.Join("testdata", "timeline.svg")
	if *updateFlag {
		if err := os.WriteFile(golden, got, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("the drawing is not that of %s; look at it, and write it anew with -model.update:\n%s", golden, got)
	}
	elements := wellFormed(t, got)
	for _, class := range []string{"violation", "fault", "publish it", "lease acked it", "lease expired it", "letter it", "rule"} {
		if elements[class] == 0 {
			t.Errorf("nothing has the class %q: %v", class, elements)
		}
	}
}

// A timeline is bounded, however long and crowded its history is, and shows the event of its
// violation all the same.
func TestTimelineIsBounded(t *testing.T) {
	var b strings.Builder
	b.WriteString(twoMembers)
	for i := range 10_000 {
		at := 100 + i
		fmt.Fprintf(&b, "%d c1 > {\"op\":\"PUBLISH\",\"topic\":\"t\",\"payload\":{\"n\":%d},\"corr\":\"p%d\"}\n", at, i+1, i)
		fmt.Fprintf(&b, "%d c1 < {\"op\":\"OK\",\"id\":\"e%d\",\"corr\":\"p%d\"}\n", at, i+1, i)
		fmt.Fprintf(&b, "%d c1 < {\"op\":\"EVENT\",\"topic\":\"t\",\"group\":\"g\",\"event\":{\"id\":\"e%d\",\"topic\":\"t\",\"payload\":{\"n\":%d}},\"ctx\":{\"attempt\":1,\"ack_deadline_ms\":3000}}\n", at, i+1, i+1)
	}
	h, err := readHistory(strings.NewReader(b.String()))
	if err != nil {
		t.Fatal(err)
	}
	l, err := newLedger(h)
	if err != nil {
		t.Fatal(err)
	}
	got := drawTimeline(l, violation{rule: "lost", topic: "t", group: "g", id: "e9000", from: time.Second, to: 10 * time.Second})
	if most := 1 << 20; len(got) > most {
		t.Errorf("the drawing has %d bytes, more than %d", len(got), most)
	}
	if elements := wellFormed(t, got); elements["lease expired it"] != 1 || elements["violation"] != 1 {
		t.Errorf("the violation, or its event, is missing: %v", elements)
	}
}

// wellFormed reads XML, and returns how many elements each class has.
func wellFormed(t *testing.T, text []byte) map[string]int {
	t.Helper()
	classes := map[string]int{}
	for d := xml.NewDecoder(bytes.NewReader(text)); ; {
		token, err := d.Token()
		if token == nil && err != nil {
			if d.InputOffset() < int64(len(text)) {
				t.Fatal(err)
			}
			return classes
		}
		if e, ok := token.(xml.StartElement); ok {
			for _, a := range e.Attr {
				if a.Name.Local == "class" {
					classes[a.Value]++
				}
			}
		}
	}
}
