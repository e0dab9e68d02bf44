package jetstream

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/publish"
	"eventhub/jetstream/internal/reading"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
	"eventhub/jetstream/quota"
)

// Bounds of what is read of dead letters at a time.
const (
	// letterScan is the most letters that List looks at for one page.
	letterScan = 10_000
	// letterBytes is the most bytes of letters that List looks at for one page.
	letterBytes = 64 << 20
	// letterPage is the most bytes of letters on a page; the page may exceed it by its last one, as
	// letterBytes may be.
	letterPage = 4 << 20
	// maxLetterLimit is the most letters on a page.
	maxLetterLimit = 1_000
)

// letters lists, counts, redrives and discards dead letters.
type letters struct {
	*core
	streams    *streams.Streams
	reads      *reading.Reads
	records    *records.Records
	publishers *publish.Publishers
	queues     *queues
	backups    *backups // which redrives exclude

	book          *letterBook
	redrives      *quota.Places
	putBackShares *quota.Set    // bytes put back, by client
	puttingBack   chan struct{} // held by who puts events back now
}

func newLetters(c *core, s *streams.Streams, r *reading.Reads, records *records.Records, p *publish.Publishers, q *queues, k *backups) *letters {
	l := c.limits
	return &letters{
		core: c, streams: s, reads: r, records: records, publishers: p, queues: q, backups: k,
		book:          newLetterBook(),
		redrives:      quota.NewPlaces(l.Redrives, (l.Redrives+1)/2),
		putBackShares: quota.New(float64(l.PutBackShare)/publish.ShareTime.Seconds(), l.PutBackShare, l.Topics, nil),
		puttingBack:   make(chan struct{}, 1),
	}
}

// letterSubjects are the subjects of all dead letters.
var letterSubjects = []string{plainSubject("dlq.>"), keyedPattern("dlq.>")}

// DeadLetters manages dead letters: it lists them, puts their events back, and discards them. It is
// a small value that costs nothing to create. Its methods may be called concurrently. They return a
// bad_topic, bad_group or bad_options *Error for an invalid LetterFilter, and an internal *Error
// when NATS fails to answer properly.
type DeadLetters struct{ letters *letters }

// DeadLetters gives access to the dead letters of all topics.
func (a Admin) DeadLetters() DeadLetters { return DeadLetters{a.bus.letters} }

// LetterFilter selects dead letters. The zero value selects all of them.
type LetterFilter struct {
	// Topic is the topic of the event that failed, without "dlq."; "" selects all topics.
	Topic string
	// Group is the group that failed.
	Group string
	// ID is the id of one letter: its event id on the dlq topic, or <stream>@<sequence>, which is
	// found without a search.
	ID string
	// EventID is the id of the event that failed.
	EventID string
	// Reason is a part of the letter's reason. Capitals count.
	Reason string
	// Since and Until bound the time at which the letter was stored. Both are inclusive; Until
	// includes its whole millisecond. Zero times are no bound.
	Since, Until time.Time
}

// Letter is a dead letter.
type Letter struct {
	// ID is the letter's event id on the dlq topic.
	ID string
	// Stream, Sequence and StoredAt (epoch nanoseconds) are the place of the letter.
	Stream   string
	Sequence uint64
	StoredAt int64
	// Topic and Group say what failed, Reason why, and Attempts after how many attempts. FailedAt
	// is the time of the failure in epoch milliseconds, by the clock of the hub.
	Topic, Group, Reason string
	Attempts             int
	FailedAt             int64
	// Event is the event that failed. Its Stream is "" in a letter of an older version, which does
	// not say where the event was stored.
	Event event.Event
	// Record is the record of the event, as JSON.
	Record json.RawMessage
	// Bare is set when the letter does not have the payload, because of its size. A redrive then
	// reads the payload from the topic, for as long as that has it.
	Bare bool
	// Fault says why the message cannot be read as a dead letter; "" when it can. Only Topic and
	// the place are then known. A redrive leaves it alone.
	Fault string
}

func (l *Letter) ref() letterRef {
	return letterRef{stream: l.Stream, seq: l.Sequence, at: l.StoredAt}
}

// letter is a Letter as a redrive handles it.
type letter struct {
	ref    letterRef
	topic  string
	group  string
	event  event.Event
	origin originRef
	size   int
}

// letterBody is the payload of a dead letter.
type letterBody struct {
	Topic    string          `json:"topic"`
	Group    string          `json:"group"`
	Original json.RawMessage `json:"original"`
	Err      string          `json:"err"`
	TS       int64           `json:"ts"`
	Attempts int             `json:"attempts"`
}

// recordBody is the record of an event in a dead letter.
type recordBody struct {
	ID       string            `json:"id"`
	TS       int64             `json:"ts"`
	Topic    string            `json:"topic"`
	Key      string            `json:"key"`
	SID      string            `json:"sid"`
	Headers  map[string]string `json:"headers"`
	CausedBy []string          `json:"caused_by"`
	Tags     []string          `json:"tags"`
	Payload  json.RawMessage   `json:"payload"`
}

// leftOut is in the reason of letters of older versions that do not have the payload, and no header
// that says so.
const leftOut = " bytes left out: it is at "

// readLetter reads a stored dead letter. What is none has a Fault.
func readLetter(stream string, m *conn.StoredMsg) *Letter {
	l := &Letter{Stream: stream, Sequence: m.Seq, StoredAt: m.Time.UnixNano(), Topic: strings.TrimPrefix(subjectTopic(m.Subject), native.DeadLetterPrefix)}
	e := event.Event{Stream: stream, Sequence: m.Seq, StoredAt: l.StoredAt}
	e.ReadHeader(m.Header)
	l.ID = e.ID
	if err := l.read(m); err != nil {
		l.Fault = err.Error()
	}
	return l
}

func (l *Letter) read(m *conn.StoredMsg) error {
	var body letterBody
	var record recordBody
	if err := json.Unmarshal(m.Data, &body); err != nil {
		return errors.New("the payload is not that of a dead letter")
	}
	if ValidGroup(body.Group) != nil { // whoever may publish to a dlq topic can write anything
		body.Group = ""
	}
	l.Group, l.Reason, l.Attempts, l.FailedAt, l.Record = body.Group, body.Err, body.Attempts, body.TS, body.Original
	if err := json.Unmarshal(body.Original, &record); err != nil {
		return errors.New("the field original is not the record of an event")
	}
	origin := parseOrigin(m.Header.Get(headerOriginal))
	l.Bare = origin.bare || origin.stream == "" && strings.Contains(body.Err, leftOut)
	l.Event = event.Event{
		ID: record.ID, TS: record.TS, Topic: body.Topic, Key: record.Key, SID: record.SID, Headers: record.Headers,
		CausedBy: record.CausedBy, Tags: record.Tags, Tombstone: origin.tombstone,
		Stream: origin.stream, Sequence: origin.seq, StoredAt: origin.storedAt,
	}
	var err error
	if l.Event.Payload, err = record.payload(); err != nil {
		return err
	}
	delete(l.Event.Headers, native.HeaderEncoding)
	return l.check(record.Topic)
}

// payload is the payload as it was published.
func (r *recordBody) payload() ([]byte, error) {
	encoding := r.Headers[native.HeaderEncoding]
	if encoding == "" {
		return r.Payload, nil
	}
	var text string
	if err := json.Unmarshal(r.Payload, &text); err != nil {
		return nil, errors.New("the payload of the event is not a string, though its header Event-Encoding says so")
	}
	if encoding == native.EncodingText {
		return []byte(text), nil
	}
	raw, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil, errors.New("the payload of the event is not base64, though its header Event-Encoding says so")
	}
	return raw, nil
}

// check refuses what no hub has stored: whoever may publish to a dlq topic can store anything.
func (l *Letter) check(recordTopic string) error {
	switch {
	case l.Event.Topic != l.Topic || recordTopic != l.Topic:
		return fmt.Errorf("the letter names another topic than %s", l.Topic)
	case ValidTopic(l.Topic) != nil || ValidGroup(l.Group) != nil:
		return errors.New("the letter names no valid group")
	case native.CheckText(l.Event.ID, 2*maxTopicLen) != nil:
		return errors.New("the event has no valid id")
	case len(l.Event.Key) > MaxKey:
		return errors.New("the key of the event is too long")
	case l.Event.TS < 0 || l.Event.TS > native.MaxTS:
		return errors.New("the ts of the event is no time")
	}
	size := 0
	for name, value := range l.Event.Headers {
		size += len(name) + len(value)
		if !native.Token(name) || native.Reserved(name) || strings.ContainsFunc(value, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return errors.New("the event has a header that cannot be stored")
		}
	}
	if strings.ContainsFunc(l.Event.SID, func(r rune) bool { return r < ' ' || r == 0x7f }) || size > event.PayloadMargin/2 {
		return errors.New("the event has headers that cannot be stored")
	}
	return nil
}

// validate checks the filter.
func (f *LetterFilter) validate() error {
	if f.Topic != "" {
		if err := ValidTopic(f.Topic); err != nil {
			return err
		}
		if streams.IsDead(f.Topic) {
			return &event.Error{Code: event.CodeBadTopic, Msg: fmt.Sprintf("topic %s holds dead letters, and has none of its own: name the topic whose events failed", f.Topic)}
		}
	}
	if f.Group != "" {
		if err := ValidGroup(f.Group); err != nil {
			return err
		}
	}
	if len(f.Reason) > native.MaxReason {
		return event.BadOptions("reason has %d bytes, at most %d are allowed", len(f.Reason), native.MaxReason)
	}
	if !f.Since.IsZero() && !f.Until.IsZero() && f.Since.After(f.Until) {
		return event.BadOptions("fromTs must be less than or equal to toTs")
	}
	return nil
}

// selects reports whether a letter is selected. One that cannot be read is, by its topic and time.
func (f *LetterFilter) selects(l *Letter) bool {
	switch {
	case f.Topic != "" && l.Topic != f.Topic,
		!f.Since.IsZero() && l.StoredAt < f.Since.UnixNano(),
		!f.Until.IsZero() && l.StoredAt/1e6 > f.Until.UnixMilli(),
		f.ID != "" && l.ID != f.ID && l.place() != f.ID,
		f.EventID != "" && l.Event.ID != f.EventID,
		f.Group != "" && l.Group != f.Group,
		f.Reason != "" && !strings.Contains(l.Reason, f.Reason):
		return false
	}
	return true
}

// place is the id of the letter that is found without a search.
func (l *Letter) place() string { return l.Stream + "@" + strconv.FormatUint(l.Sequence, 10) }

// letterStream is a stream that has dead letters.
type letterStream struct {
	name     string
	created  time.Time
	subjects []string // to be read; nil: all
	// the sequences and the number of its messages
	first, last, messages uint64
}

// letterStreams are the streams that may have letters of the filter, in order of their names.
func (d *letters) letterStreams(ctx context.Context, f *LetterFilter) ([]letterStream, error) {
	if f.Topic != "" {
		t, state, err := d.streams.FreshExisting(ctx, native.DeadLetterPrefix+f.Topic)
		if errors.Is(err, event.ErrNotFound) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		return []letterStream{{name: t.Stream.Name, created: t.Stream.Created, subjects: t.Filters(), first: state.FirstSeq, last: state.LastSeq, messages: state.Msgs}}, nil
	}
	names := make(map[string]bool)
	for _, subject := range letterSubjects {
		list := d.conn.JS.StreamNames(ctx, natsjs.WithStreamListSubject(subject))
		for name := range list.Name() {
			names[name] = true
		}
		if err := list.Err(); err != nil {
			return nil, d.conn.Unavailable(fmt.Errorf("jetstream: list the streams of dead letters: %w", err))
		}
	}
	var found []letterStream
	for name := range names {
		info, err := d.conn.FindStream(ctx, name)
		if errors.Is(err, event.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, d.conn.Unavailable(err)
		}
		s := letterStream{name: name, created: native.StreamMade(info), first: info.State.FirstSeq, last: info.State.LastSeq, messages: info.State.Msgs}
		for _, has := range info.Config.Subjects {
			for _, all := range letterSubjects {
				switch {
				case streams.Covers(all, has):
					s.subjects = append(s.subjects, has)
				case streams.Covers(has, all):
					s.subjects = append(s.subjects, all)
				}
			}
		}
		if len(s.subjects) > 0 {
			found = append(found, s)
		}
	}
	slices.SortFunc(found, func(a, b letterStream) int { return strings.Compare(a.name, b.name) })
	return found, nil
}

// eachLetter calls f for the letters of a stream from a sequence on that are in the filter's time,
// until f returns reading.ErrStop. It reads ahead, a bounded number of bytes.
func (d *letters) eachLetter(ctx context.Context, s *letterStream, from uint64, filter *LetterFilter, f func(*Letter, *conn.StoredMsg) error) error {
	if stream, seq, ok := native.ParsePlace(filter.ID); ok {
		if stream != s.name || seq < from || seq > s.last {
			return nil
		}
		m, err := d.conn.GetMsg(ctx, s.name, map[string]any{"seq": seq})
		if errors.Is(err, event.ErrNotFound) {
			return nil
		}
		if err != nil {
			return d.conn.Unavailable(err)
		}
		if !slices.ContainsFunc(letterSubjects, func(all string) bool { return streams.Covers(all, m.Subject) }) {
			return nil
		}
		err = f(readLetter(s.name, m), m)
		if errors.Is(err, reading.ErrStop) {
			return nil
		}
		return err
	}
	next := max(from, 1)
	if !filter.Since.IsZero() {
		first, err := d.messages.LeaderNext(ctx, s.name, 0, streams.Farthest(filter.Since), s.subjects)
		if err != nil {
			return d.conn.Unavailable(err)
		}
		if first == nil {
			return nil
		}
		next = max(next, first.Seq)
	}
	if next > s.last {
		return nil
	}
	q := reading.Query{From: next, Last: s.last, Subjects: s.subjects}
	if !filter.Until.IsZero() { // the whole millisecond
		q.Until = time.UnixMilli(filter.Until.UnixMilli()).Add(time.Millisecond - 1)
	}
	return d.messages.Walk(ctx, s.name, q, func(m *conn.StoredMsg) error { return f(readLetter(s.name, m), m) })
}

// streamCursor is a place in a stream: where a list goes on, or what a dry run has seen ends.
type streamCursor struct {
	Stream  string `json:"s"`
	Created int64  `json:"c"`
	Next    uint64 `json:"n"`
}

func (c streamCursor) String() string {
	text, _ := json.Marshal(c) //nolint:errchkjson // strings and numbers always marshal
	return base64.RawURLEncoding.EncodeToString(text)
}

// parseStreamCursor reads what String has written.
func parseStreamCursor(s string) (c streamCursor, ok bool) {
	text, err := base64.RawURLEncoding.DecodeString(s)
	if err == nil {
		err = json.Unmarshal(text, &c)
	}
	return c, err == nil && c.Stream != "" && c.Next > 0
}

// LetterPage is a page of dead letters.
type LetterPage struct {
	Letters []*Letter
	// Next continues the list behind this page; "" at its end. A page that looked at many letters
	// may have few, or none, and still have a Next.
	Next string
}

// List returns a page of the selected letters, oldest first, of at most limit (1..1,000), and the
// Next of the page before, "" to begin. visible, if not nil, hides letters for which it returns
// false. List looks at no more than 10,000 letters and 64 MiB, and a page has about 4 MiB at most.
func (d DeadLetters) List(ctx context.Context, filter LetterFilter, next string, limit int, visible func(*Letter) bool) (LetterPage, error) {
	l := d.letters
	if err := filter.validate(); err != nil {
		return LetterPage{}, err
	}
	if limit < 1 || limit > maxLetterLimit {
		return LetterPage{}, event.BadOptions("limit is %d: 1 to %d are allowed", limit, maxLetterLimit)
	}
	var from streamCursor
	if next != "" {
		var ok bool
		if from, ok = parseStreamCursor(next); !ok {
			return LetterPage{}, event.BadOptions("next is not the next of an earlier answer: begin without it")
		}
	}
	streams, err := l.letterStreams(ctx, &filter)
	if err != nil {
		return LetterPage{}, err
	}
	var page LetterPage
	scanned, read, size := 0, 0, 0
	for i := range streams {
		s := &streams[i]
		start := uint64(1)
		switch {
		case s.name < from.Stream:
			continue
		case s.name == from.Stream && s.created.UnixNano() == from.Created:
			start = from.Next
		case s.name == from.Stream:
			return LetterPage{}, event.BadOptions("the dead letters were removed since next was given: begin without it")
		}
		err := l.eachLetter(ctx, s, start, &filter, func(l *Letter, m *conn.StoredMsg) error {
			if len(page.Letters) == limit || scanned == letterScan || read > letterBytes || size > letterPage {
				page.Next = streamCursor{Stream: s.name, Created: s.created.UnixNano(), Next: l.Sequence}.String()
				return reading.ErrStop
			}
			scanned++
			read += len(m.Data)
			if filter.selects(l) && (visible == nil || visible(l)) {
				page.Letters = append(page.Letters, l)
				size += len(m.Data)
			}
			return nil
		})
		if err != nil || page.Next != "" {
			return page, err
		}
	}
	return page, nil
}
