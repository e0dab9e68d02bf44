package ops

import (
	"cmp"
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"eventhub/jetstream"
)

// Bounds of the answers that show events.
const (
	defaultEvents = 50
	maxEvents     = 200
	// maxEventBytes ends a page of events: a page has the event that passes it, and no further one.
	maxEventBytes = 4 << 20
	// keysPart is how many of the newest events by key are read at a time.
	keysPart = 20
	// eventsTimeout is the timeout of a request for events.
	eventsTimeout = 10 * time.Second
)

// Events reads and publishes events. EventsOf makes one of a *jetstream.Bus.
type Events interface {
	// History gives access to the stored events of a topic.
	History(topic string) jetstream.History
	// Keys gives access to the newest event of each key of a topic.
	Keys(topic string) jetstream.Keys
	// Publish stores an event.
	Publish(ctx context.Context, topic string, payload []byte, opts jetstream.PublishOptions) (jetstream.Receipt, error)
}

var _ Events = (*jetstream.Bus)(nil)

// eventPage is a page of events.
type eventPage struct {
	Topic string `json:"topic"`
	Count int    `json:"count"`
	// Truncated says that retention may have removed events from the beginning.
	Truncated bool              `json:"truncated,omitempty"`
	Events    []json.RawMessage `json:"events"`
	// More says that further events follow.
	More bool `json:"more,omitempty"`
}

// number reads a query parameter that is a number from least to most, or says what is wrong with
// it.
func number(q url.Values, name string, otherwise, least, most int64) (n int64, fault string) {
	text := q.Get(name)
	if text == "" {
		return otherwise, ""
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < least || n > most {
		return 0, name + " must be a number from " + strconv.FormatInt(least, 10) + " to " + strconv.FormatInt(most, 10) + "."
	}
	return n, ""
}

func badQuery(w http.ResponseWriter, fault string) {
	writeError(w, http.StatusBadRequest, jetstream.CodeBadOptions, fault)
}

// events answers GET /events.
func (s *Server) events(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	if q.Has("id") {
		s.eventByID(w, r)
		return
	}
	limit, badLimit := number(q, "limit", defaultEvents, 1, maxEvents)
	ts, badTS := number(q, "ts", 0, 0, maxTime)
	if fault := cmp.Or(checkQuery(q, "topic", "from", "ts", "afterId", "key", "limit"), badLimit, badTS); fault != "" {
		badQuery(w, fault)
		return
	}
	opts := jetstream.ReadOptions{Key: q.Get("key"), Limit: int(limit) + 1, CountFor: identity(r).Key()}
	switch from := q.Get("from"); {
	case from == "earliest" && !q.Has("ts") && !q.Has("afterId"):
		opts.From = jetstream.FromEarliest
	case from == "ts" && q.Has("ts") && !q.Has("afterId"):
		opts.From = jetstream.FromTime(time.UnixMilli(ts))
	case from == "afterId" && q.Get("afterId") != "" && !q.Has("ts"):
		opts.From = jetstream.FromAfterID(q.Get("afterId"))
	case (from == "" || from == "latest") && !q.Has("ts") && !q.Has("afterId") && opts.Key == "":
		s.newest(w, r, int(limit))
		return
	default:
		badQuery(w, "from must be latest (without key), earliest, ts with ts, or afterId with afterId.")
		return
	}
	topic := q.Get("topic")
	ctx, cancel := context.WithTimeout(r.Context(), eventsTimeout)
	defer cancel()
	found, err := s.cfg.Events.History(topic).Range(ctx, opts)
	if err != nil {
		s.fail(w, r, err, "topic", "read events")
		return
	}
	page := eventPage{Topic: topic, Events: []json.RawMessage{}, Truncated: found.Truncated}
	bytes := 0
	for e, err := range found.Events(ctx) {
		if err != nil {
			s.fail(w, r, err, "topic", "read events")
			return
		}
		if len(page.Events) == int(limit) || bytes >= maxEventBytes {
			page.More = true
			break
		}
		page.Events = append(page.Events, s.shown(r, topic, e))
		bytes += len(e.Payload)
	}
	page.Count = len(page.Events)
	answer(w, page)
}

// eventByID answers with the event of a topic that has an id.
func (s *Server) eventByID(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	if fault := checkQuery(q, "topic", "id"); fault != "" {
		badQuery(w, fault+" Beside id there is only topic.")
		return
	}
	topic := q.Get("topic")
	ctx, cancel := context.WithTimeout(r.Context(), eventsTimeout)
	defer cancel()
	e, err := s.cfg.Events.History(topic).ByID(ctx, q.Get("id"), identity(r).Key())
	if err != nil {
		s.fail(w, r, err, "event on this topic", "read an event")
		return
	}
	answer(w, eventPage{Topic: topic, Count: 1, Events: []json.RawMessage{s.shown(r, topic, e)}})
}

// newest answers with the newest events of a topic.
func (s *Server) newest(w http.ResponseWriter, r *http.Request, limit int) {
	topic := r.URL.Query().Get("topic")
	ctx, cancel := context.WithTimeout(r.Context(), eventsTimeout)
	defer cancel()
	found, err := s.cfg.Events.History(topic).Newest(ctx, limit)
	if err != nil {
		s.fail(w, r, err, "topic", "read events")
		return
	}
	page := eventPage{Topic: topic, Events: []json.RawMessage{}}
	// the newest have priority
	for first, bytes := len(found), 0; first > 0 && bytes < maxEventBytes; {
		first--
		bytes += len(found[first].Payload)
		page.Events = append(page.Events, s.shown(r, topic, found[first]))
	}
	slices.Reverse(page.Events)
	page.Count = len(page.Events)
	answer(w, page)
}

// shown returns the record of an event without what the masks of the token hide.
func (s *Server) shown(r *http.Request, topic string, e *jetstream.Event) json.RawMessage {
	masks, _ := identity(r).Shows(topic, "")
	masked := *e
	masked.Payload, masked.Headers = hide(masks, e.Topic, e.Payload, e.Headers)
	return masked.AppendRecord(nil)
}

// follow answers GET /follow/{topic}: the newest events, and then each as it comes.
func (s *Server) follow(w http.ResponseWriter, r *http.Request) {
	id, topic := identity(r), pathParam(r, "topic")
	masks, _ := id.Shows(topic, "")
	var hide func([]byte) []byte
	if len(masks) > 0 {
		hide = func(frame []byte) []byte { return hideFrame(masks, topic, frame) }
	}
	s.cfg.Follow(w, r, id, topic, hide)
}

// latestByKey answers GET /latest-by-key: the record, or null.
func (s *Server) latestByKey(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	fault := checkQuery(q, "topic", "key")
	if fault == "" && q.Get("key") == "" {
		fault = "The parameter key is missing."
	}
	if fault != "" {
		badQuery(w, fault)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), eventsTimeout)
	defer cancel()
	topic, key := q.Get("topic"), q.Get("key")
	found, err := s.cfg.Events.Keys(topic).GetMany(ctx, []string{key})
	switch e := found[key]; {
	case err != nil:
		s.fail(w, r, err, "topic", "read the latest event of a key")
	case e == nil:
		answer(w, nil)
	default:
		answer(w, s.shown(r, topic, e))
	}
}

// keys answers GET /keys: the newest event of each key, newest first.
func (s *Server) keys(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	limit, badLimit := number(q, "limit", defaultEvents, 1, maxEvents)
	offset, badOffset := number(q, "offset", 0, 0, 1<<31-1)
	if fault := cmp.Or(checkQuery(q, "topic", "offset", "limit"), badLimit, badOffset); fault != "" {
		badQuery(w, fault)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), eventsTimeout)
	defer cancel()
	topic := q.Get("topic")
	items, bytes, more := []json.RawMessage{}, 0, true
	for more && len(items) < int(limit) && bytes < maxEventBytes {
		part := min(keysPart, int(limit)-len(items))
		found, err := s.cfg.Events.Keys(topic).Page(ctx, int(offset)+len(items), part)
		if err != nil {
			s.fail(w, r, err, "topic", "read the latest events")
			return
		}
		for _, e := range found {
			items = append(items, s.shown(r, topic, e))
			bytes += len(e.Payload)
		}
		more = len(found) == part
	}
	answer(w, struct {
		Topic  string            `json:"topic"`
		Offset int64             `json:"offset"`
		Count  int               `json:"count"`
		Items  []json.RawMessage `json:"items"`
		More   bool              `json:"more,omitempty"`
	}{topic, offset, len(items), items, more})
}

// publish answers POST /publish/{topic}. As on the port for clients, a refused publish is not read.
func (s *Server) publish(w http.ResponseWriter, r *http.Request) {
	if fault := checkQuery(r.URL.Query()); fault != "" {
		badQuery(w, fault)
		return
	}
	if s.cfg.Throttle != nil {
		if refused := s.cfg.Throttle(identity(r), pathParam(r, "topic")); refused != nil {
			refused.write(w)
			return
		}
	}
	var body struct {
		Payload json.RawMessage   `json:"payload"`
		ID      string            `json:"id"`
		Key     string            `json:"key"`
		Headers map[string]string `json:"headers"`
	}
	if !readBody(w, r, &body, false) {
		return
	}
	if body.Payload == nil {
		badQuery(w, "payload is missing; null is a payload, too.")
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), eventsTimeout)
	defer cancel()
	opts := jetstream.PublishOptions{ID: body.ID, Key: body.Key, Headers: body.Headers, CountFor: identity(r).Key()}
	receipt, err := s.cfg.Events.Publish(ctx, pathParam(r, "topic"), body.Payload, opts)
	if err != nil {
		s.fail(w, r, err, "topic", "publish")
		return
	}
	answer(w, struct {
		ID        string `json:"id"`
		Duplicate bool   `json:"duplicate"`
	}{receipt.ID, receipt.Duplicate})
}
