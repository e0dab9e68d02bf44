//go:build unix

package model

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// settings are what the rules must know of a run.
type settings struct {
	Seed        int64 `json:"seed"`
	AckWaitMS   int   `json:"ackWaitMs"`
	ToleranceMS int   `json:"toleranceMs"` // for what must be prompt
	// all was acknowledged at the end, and everything that is stored was read
	Drained   bool `json:"drained"`
	Disturbed bool `json:"disturbed"` // there were faults
	Cluster   bool `json:"cluster"`   // of nats-servers
}

func (s settings) ackWait() time.Duration   { return time.Duration(s.AckWaitMS) * time.Millisecond }
func (s settings) tolerance() time.Duration { return time.Duration(s.ToleranceMS) * time.Millisecond }

// ledger is a history with what belongs together put together.
type ledger struct {
	h      history
	set    settings
	faults []*fault
	conns  map[int]*connection
	order  []*connection
	frames []*frame // all that clients sent
	subs   []*sub
	groups map[groupKey]*group
	stored map[string][]*stored // by topic, in order
	byN    map[int]*stored
	byID   map[[2]string]*stored // topic and id
	sentN  map[int]*frame        // PUBLISH frames by the number in their payload
	letter []*letter
	odd    []violation // what could not be put anywhere

	readings []*reading
	rows     []*row
	saws     []*saw

	end time.Duration
}

// connection is one of a client's.
type connection struct {
	number       int
	hub          string
	small        bool   // it may be written to long before the socket has something
	by           string // the client library that speaks on it; ""
	heard        time.Duration
	guest        bool // no WebSocket: it takes events only now and then
	silent       bool // it takes events, and settles none: a fault
	opened       time.Duration
	closeAt      time.Duration // the client began to end it; never
	abrupt       bool
	endLo, endAt time.Duration // nothing more came
	why          string
	deaf         []span
	frames       []*frame // in the order they were sent
	waiting      []*frame // without corr and not answered
	byCorr       map[string]*frame
	live         map[groupKey]*sub // what frames sent now are about
	current      map[groupKey]*sub // what frames that come now are about
	// answers without corr came in another order: nobody knows what belongs to what any more
	confused bool
	resets   map[groupKey]bool
}

// over is when it was over, at the earliest. Where the client ended it, and reads, it would have
// seen the hub do so before.
func (c *connection) over() time.Duration {
	if c.closeAt < c.endAt && !c.small && (len(c.deaf) == 0 || c.deaf[len(c.deaf)-1].to < c.closeAt) {
		return min(c.closeAt, max(c.endLo, c.closeAt-100*time.Millisecond))
	}
	return min(c.closeAt, c.endLo)
}

type span struct{ from, to time.Duration }

// frame is one that a client sent, and its answer.
type frame struct {
	wireFrame

	line     int // in the history
	conn     *connection
	sent     time.Duration
	answered time.Duration // never
	lo       time.Duration // the answer was written later
	reply    *wireFrame    // nil
	sub      *sub          // that it is about; for all but AUTH and PUBLISH
}

func (f *frame) ok() bool { return f.reply != nil && f.reply.Op == "OK" }

type groupKey struct{ topic, group string }

// sub is one subscription, from SUBSCRIBE to its end.
type sub struct {
	conn      *connection
	key       groupKey
	topics    []string
	start     *frame
	stop      *frame // UNSUBSCRIBE; nil
	pauses    []*frame
	resumes   []*frame
	settles   []*frame            // ACK, NACK and MODACK
	settlesOf map[string][]*frame // the same by event, once all are there; see about
	delivered []*delivery
	assigns   map[string][]*assignment // by topic
}

// leased is the length of its leases.
func (s *sub) leased() time.Duration {
	ms := 30_000
	if o := s.start.Opts; o != nil && o.AckTimeoutMS > 0 {
		ms = o.AckTimeoutMS
	}
	return time.Duration(ms) * time.Millisecond
}

func (s *sub) maxInFlight() int {
	if o := s.start.Opts; o != nil && o.MaxInFlight > 0 {
		return o.MaxInFlight
	}
	return 100
}

// maxAttempts is 0 for a member that never gives up.
func (s *sub) maxAttempts() int {
	if o := s.start.Opts; o != nil && o.MaxAttempts != nil {
		return *o.MaxAttempts
	}
	return 5
}

// over is when it was over, at the earliest.
func (s *sub) over() time.Duration {
	end := s.conn.over()
	if s.stop != nil {
		end = min(end, s.stop.sent)
	}
	return end
}

// gone is when it was over, at the latest.
func (s *sub) gone() time.Duration {
	end := s.conn.endAt
	if s.stop != nil && s.stop.ok() {
		end = min(end, s.stop.answered)
	}
	return end
}

// group is one on one topic.
type group struct {
	groupKey

	subs   []*sub
	starts []*frame // every SUBSCRIBE that was about it
	events map[string]*event
	left   int // unsettled at the end

	ordered bool // by key: a member asked for that, and was not refused
	assigns []*assignment
}

// event is one as a group got it.
type event struct {
	id         string
	deliveries []*delivery // in the order of receipt
}

// delivery is an EVENT frame.
type delivery struct {
	line    int
	sub     *sub
	group   *group
	id      string
	topic   string // the event's own
	attempt int
	lo, at  time.Duration // it was written between these
	key     string
	slot    int // event.partition; noSlot for none
}

type stored struct {
	topic, id string
	seq       uint64
	ms        int64
	payload   string
	n         int
}

type letter struct {
	wireLetter

	line int
	seq  uint64
}

// violation is a broken promise.
type violation struct {
	rule         string
	topic, group string
	id           string
	msg          string
	from, to     time.Duration // when, roughly; both 0 for unknown
}

// newLedger puts a history together.
func newLedger(h history) (*ledger, error) {
	l := &ledger{
		h: h, set: settings{AckWaitMS: 30_000, ToleranceMS: 2_000}, conns: map[int]*connection{}, groups: map[groupKey]*group{},
		stored: map[string][]*stored{}, byN: map[int]*stored{}, byID: map[[2]string]*stored{}, sentN: map[int]*frame{},
	}
	for _, e := range h { // what is stored tells which answers without corr belong to what
		if err := l.takeStored(e); err != nil {
			return nil, fmt.Errorf("%s: %w", e, err)
		}
	}
	for i, e := range h {
		l.end = max(l.end, e.at)
		if err := l.take(i, e); err != nil {
			return nil, fmt.Errorf("line %d, %s: %w", i+1, e, err)
		}
	}
	for _, s := range l.stored {
		slices.SortFunc(s, func(a, b *stored) int { return int(int64(a.seq) - int64(b.seq)) })
	}
	return l, nil
}

func (l *ledger) take(line int, e entry) error {
	c := l.conns[e.conn]
	if e.conn > 0 && c == nil && e.kind != kindOpen {
		return fmt.Errorf("there is no connection %d", e.conn)
	}
	fields := strings.Fields(e.text)
	switch e.kind {
	case kindSet:
		return json.Unmarshal([]byte(e.text), &l.set)
	case kindOpen:
		c = &connection{
			number: e.conn, hub: fields[0], opened: e.at, closeAt: never, endLo: never, endAt: never,
			byCorr: map[string]*frame{}, live: map[groupKey]*sub{}, current: map[groupKey]*sub{}, resets: map[groupKey]bool{},
		}
		for _, f := range fields[1:] {
			by, library := strings.CutPrefix(f, "by=")
			switch {
			case library:
				c.by = by
			case f == "guest":
				c.guest, c.small = true, true
			case f == "silent":
				c.silent = true
			default:
				c.small = true
			}
		}
		l.conns[e.conn] = c
		l.order = append(l.order, c)
	case kindSent:
		f := &frame{line: line, conn: c, sent: e.at, answered: never, lo: never}
		if err := json.Unmarshal([]byte(e.text), &f.wireFrame); err != nil {
			return err
		}
		l.sent(f)
	case kindGot:
		var w wireFrame
		if err := json.Unmarshal([]byte(e.text), &w); err != nil {
			return err
		}
		l.got(line, c, e, &w)
	case kindClose:
		c.closeAt, c.abrupt = min(c.closeAt, e.at), e.text == "abrupt"
	case kindEnd:
		c.endLo, c.endAt, c.why = e.lo, e.at, e.text
		l.closeDeaf(c, e.at)
	case kindDeaf:
		c.deaf = append(c.deaf, span{e.at, never})
	case kindHears:
		l.closeDeaf(c, e.at)
	case kindFault:
		return l.faulted(fields, e.at)
	case kindOver:
		for _, f := range l.faults {
			if f.number == e.text {
				f.to = e.at
			}
		}
	case kindLetter:
		seq, payload, _ := strings.Cut(e.text, " ")
		d := &letter{line: line}
		d.seq, _ = strconv.ParseUint(seq, 10, 64)
		l.letter = append(l.letter, d)
		return json.Unmarshal([]byte(payload), &d.wireLetter)
	case kindLeft:
		n, _ := strconv.Atoi(fields[2])
		l.group(groupKey{fields[1], fields[0]}).left += n
	default:
		return l.takeOther(e)
	}
	return nil
}

func (l *ledger) closeDeaf(c *connection, at time.Duration) {
	if n := len(c.deaf); n > 0 && c.deaf[n-1].to == never {
		c.deaf[n-1].to = at
	}
}

func (l *ledger) faulted(fields []string, at time.Duration) error {
	if len(fields) < 2 {
		return fmt.Errorf("%d fields", len(fields))
	}
	f := &fault{number: fields[0], target: "-", from: at, to: never}
	if len(fields) > 2 {
		f.target = fields[2]
	}
	for _, a := range allowances {
		if a.kind == fields[1] {
			f.allowance = a
			l.faults = append(l.faults, f)
			if len(fields) > 3 { // it is known only now: it was there for so long
				d, err := time.ParseDuration(fields[3])
				f.from, f.to = at-d, at
				return err
			}
			return nil
		}
	}
	return fmt.Errorf("there is no fault %q in the table", fields[1])
}

func (l *ledger) group(k groupKey) *group {
	g := l.groups[k]
	if g == nil {
		g = &group{groupKey: k, events: map[string]*event{}}
		l.groups[k] = g
	}
	return g
}

// sent takes a client's frame.
func (l *ledger) sent(f *frame) {
	c := f.conn
	l.frames = append(l.frames, f)
	c.frames = append(c.frames, f)
	if f.Corr != nil {
		c.byCorr[*f.Corr] = f
	} else {
		c.waiting = append(c.waiting, f)
	}
	k := groupKey{f.Topic, f.Group}
	switch f.Op {
	case "PUBLISH":
		if n := f.number(); l.sentN[n] == nil { // a client library may send it again
			l.sentN[n] = f
		}
	case "SUBSCRIBE":
		f.sub = &sub{conn: c, key: k, topics: []string{f.Topic}, start: f}
		if f.Opts != nil {
			for _, t := range f.Opts.Topics {
				if !slices.Contains(f.sub.topics, t) {
					f.sub.topics = append(f.sub.topics, t)
				}
			}
		}
		for _, t := range f.sub.topics {
			g := l.group(groupKey{t, f.Group})
			g.starts = append(g.starts, f)
		}
		// A second SUBSCRIBE is refused, unless the one before it is over by then or was refused.
		if was := c.live[k]; was == nil || was.stop != nil || was.start.reply != nil && !was.start.ok() {
			c.live[k] = f.sub
		}
	default:
		s := c.live[k]
		if f.sub = s; s == nil {
			return
		}
		switch f.Op {
		case "ACK", "NACK", "MODACK":
			s.settles = append(s.settles, f)
		case "PAUSE":
			s.pauses = append(s.pauses, f)
		case "RESUME":
			s.resumes = append(s.resumes, f)
		case "UNSUBSCRIBE":
			if s.stop == nil {
				s.stop = f
			}
		}
	}
}

// inherit takes over the frames that were sent after the subscription's SUBSCRIBE while another
// one, which was refused meanwhile, seemed to be what they are about.
func (s *sub) inherit(refused *sub) {
	if refused.start.ok() {
		return
	}
	later := func(from *[]*frame) (taken []*frame) {
		for i, f := range *from {
			if f.line > s.start.line {
				taken, *from = (*from)[i:], (*from)[:i]
				break
			}
		}
		for _, f := range taken {
			f.sub = s
		}
		return taken
	}
	s.settles, s.pauses, s.resumes = later(&refused.settles), later(&refused.pauses), later(&refused.resumes)
	if stop := refused.stop; stop != nil && stop.line > s.start.line {
		s.stop, refused.stop, stop.sub = stop, nil, s
	}
}

// got takes the hub's frame.
func (l *ledger) got(line int, c *connection, e entry, w *wireFrame) {
	c.heard = e.at
	if w.Op == "EVENT" {
		l.event(line, c, e, w)
		return
	}
	if w.Op == "ASSIGN" {
		l.assigned(line, c, e, w)
		return
	}
	if w.Op == "ERR" && w.Corr == nil && (w.Code == "group_reset" || w.Code == "events_lost") {
		topic, name, _ := strings.Cut(w.Msg, "::")
		c.resets[groupKey{topic, name}] = true
		return
	}
	f := l.answeredBy(c, w)
	if f == nil && c.confused && w.Corr == nil {
		return
	}
	if f == nil {
		l.odd = append(l.odd, violation{rule: "frames", msg: fmt.Sprintf("c%d got an answer to nothing: %s", c.number, e.text), from: e.at, to: e.at})
		return
	}
	f.reply, f.answered, f.lo = w, e.at, e.lo
	if f.Op == "SUBSCRIBE" && f.ok() {
		l.subs = append(l.subs, f.sub)
		c.current[f.sub.key] = f.sub
		if was := c.live[f.sub.key]; was.start.line < f.line {
			f.sub.inherit(was)
			c.live[f.sub.key] = f.sub
		}
		for _, t := range f.sub.topics {
			g := l.group(groupKey{t, f.Group})
			g.subs = append(g.subs, f.sub)
			g.ordered = g.ordered || f.Opts != nil && f.Opts.Ordered == "key"
		}
	}
	if f.Op == "UNSUBSCRIBE" && f.ok() && f.sub != nil && f.sub.stop != f {
		l.odd = append(l.odd, violation{rule: "frames", topic: f.Topic, group: f.Group, msg: fmt.Sprintf("c%d: a second UNSUBSCRIBE is answered OK", c.number), from: f.sent, to: e.at})
	}
}

// answeredBy finds the frame that w answers.
func (l *ledger) answeredBy(c *connection, w *wireFrame) *frame {
	if w.Corr != nil {
		f := c.byCorr[*w.Corr]
		if f != nil && f.reply != nil {
			return nil // answered twice
		}
		return f
	}
	// Those without corr keep the order of the frames, so it must be the first.
	at := slices.IndexFunc(c.waiting, func(f *frame) bool { return w.answers(f) && l.published(f, w.ID) })
	if at < 0 && !c.confused {
		at = slices.IndexFunc(c.waiting, w.answers)
	}
	if at < 0 {
		return nil
	}
	f := c.waiting[at]
	if first := c.waiting[0]; at > 0 && !c.confused {
		c.confused = true
		l.odd = append(l.odd, violation{rule: "frames", topic: f.Topic, group: f.Group, msg: fmt.Sprintf(
			"c%d: the answer to a %s without corr, sent at %v, overtakes that to the %s sent at %v", c.number, f.Op, short(f.sent), first.Op, short(first.sent)), from: first.sent, to: f.sent})
	}
	c.waiting = slices.Delete(c.waiting, at, at+1)
	return f
}

// published reports whether f may have published the event id. An answer without an id says nothing
// of that.
func (l *ledger) published(f *frame, id string) bool {
	if id == "" {
		return true
	}
	if f.given() != "" {
		return id == f.given()
	}
	s := l.byN[f.number()]
	return s != nil && s.id == id
}

// answers reports whether w has the form of an answer to f. Only that of a PUBLISH has an id.
func (w *wireFrame) answers(f *frame) bool {
	switch {
	case w.Op == "OK":
		return (w.ID != "") == (f.Op == "PUBLISH")
	case w.Code == "publish_failed":
		return f.Op == "PUBLISH"
	case w.Code == "not_held":
		return f.Op == "ACK" || f.Op == "NACK" || f.Op == "MODACK"
	case w.Code == "already_subscribed", w.Code == "subscribe_failed":
		return f.Op == "SUBSCRIBE"
	case w.Code == "not_subscribed":
		return f.Op != "PUBLISH" && f.Op != "SUBSCRIBE" && f.Op != "AUTH"
	case w.Code == "bad_frame": // clients send no other
		return f.Op == "ACK" && f.IDs != nil && len(f.IDs) == 0
	case w.Code == "unknown_id":
		return f.Op == "MODACK" || f.Op == "SUBSCRIBE"
	}
	return true
}
