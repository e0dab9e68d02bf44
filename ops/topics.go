package ops

import (
	"context"
	"encoding/json"
	"net/http"
	"sync"
	"time"

	"eventhub/jetstream"
)

// topicTimeout is the timeout of a request about topics.
const topicTimeout = 20 * time.Second

// TopicsTopic is the topic that represents the streams of families in policies: GET /topics shows
// them to tokens that grant inspect, subscribe or admin on it. Nothing needs to be published there.
const TopicsTopic = "eventhub.topics"

// Topics manages topics. TopicsOf makes one of a *jetstream.Bus.
type Topics interface {
	// List lists the streams of all topics and families.
	List(ctx context.Context) ([]jetstream.TopicStatus, error)
	// Create creates a topic that counts for a client, or for nobody if client is "". It does
	// nothing if the topic exists.
	Create(ctx context.Context, topic, client string) error
	// Info, Purge and Delete return jetstream.ErrNotFound if the topic does not exist.
	Info(ctx context.Context, topic string) (*jetstream.TopicInfo, error)
	Purge(ctx context.Context, topic string, opts jetstream.PurgeOptions) (jetstream.Purged, error)
	Delete(ctx context.Context, topic string, opts jetstream.DeleteOptions) error
	// Delayed lists the events that wait for a topic. CancelDelayed returns jetstream.ErrNotFound
	// if the event does not wait.
	Delayed(ctx context.Context, topic, next string, limit int) (jetstream.DelayedPage, error)
	CancelDelayed(ctx context.Context, topic, id string) error
}

// TopicsOf returns the Topics of a bus.
func TopicsOf(bus *jetstream.Bus) Topics { return topicsOf{bus.Admin()} }

type topicsOf struct{ admin jetstream.Admin }

func (t topicsOf) List(ctx context.Context) ([]jetstream.TopicStatus, error) {
	return t.admin.Topics(ctx)
}

func (t topicsOf) Create(ctx context.Context, topic, client string) error {
	return t.admin.Topic(topic).CreateFor(ctx, client)
}

func (t topicsOf) Info(ctx context.Context, topic string) (*jetstream.TopicInfo, error) {
	return t.admin.Topic(topic).Info(ctx)
}

func (t topicsOf) Purge(ctx context.Context, topic string, opts jetstream.PurgeOptions) (jetstream.Purged, error) {
	return t.admin.Topic(topic).Purge(ctx, opts)
}

func (t topicsOf) Delete(ctx context.Context, topic string, opts jetstream.DeleteOptions) error {
	return t.admin.Topic(topic).Delete(ctx, opts)
}

func (t topicsOf) Delayed(ctx context.Context, topic, next string, limit int) (jetstream.DelayedPage, error) {
	return t.admin.Topic(topic).Delayed(ctx, next, limit)
}

func (t topicsOf) CancelDelayed(ctx context.Context, topic, id string) error {
	return t.admin.Topic(topic).CancelDelayed(ctx, id)
}

// ListedTopic is a topic in the answer of GET /topics.
type ListedTopic struct {
	// Topic is absent for the stream of a family.
	Topic  string `json:"topic,omitempty"`
	Stream string `json:"stream"`
	Rule   string `json:"rule,omitempty"`
	Events uint64 `json:"events"`
	Bytes  uint64 `json:"bytes"`
	// Rate is how many events a second were stored, by all hubs, since an earlier request; absent
	// until there was one.
	Rate      *float64  `json:"rate,omitempty"`
	FirstTS   int64     `json:"firstTs,omitempty"`
	LastTS    int64     `json:"lastTs,omitempty"`
	Retention Retention `json:"retention"`
	OnFull    string    `json:"onFull"`
	Compacted bool      `json:"compacted"`
	// Drift says how the stream differs from its rule.
	Drift []string `json:"drift,omitempty"`
}

// Retention has the bounds of a topic; 0 means none.
type Retention struct {
	AgeMS    int64 `json:"ageMs"`
	Bytes    int64 `json:"bytes"`
	Messages int64 `json:"messages"`
}

// ShownTopic is the answer of GET /topics/{topic}.
type ShownTopic struct {
	Topic  string `json:"topic"`
	Stream string `json:"stream"`
	Rule   string `json:"rule"`
	Family bool   `json:"family"`
	Events uint64 `json:"events"`
	Bytes  uint64 `json:"bytes"`
	// First and Last are the oldest and the newest event.
	First      *EventRef `json:"first,omitempty"`
	Last       *EventRef `json:"last,omitempty"`
	Retention  Retention `json:"retention"`
	OnFull     string    `json:"onFull"`
	GroupAgeMS int64     `json:"groupAgeMs,omitempty"`
	Groups     int       `json:"groups"`
	Compacted  bool      `json:"compacted"`
	Replicas   int       `json:"replicas"`
	// Needed says what the hub itself uses the topic for.
	Needed string `json:"needed,omitempty"`
	// Lost is what groups have lost.
	Lost []LostByGroup `json:"lost,omitempty"`
}

// EventRef names an event.
type EventRef struct {
	ID string `json:"id"`
	TS int64  `json:"ts"`
}

// LostByGroup is what a group has lost in all, and when that was last found.
type LostByGroup struct {
	Group  string `json:"group"`
	Events uint64 `json:"events"`
	TS     int64  `json:"ts"`
}

// PurgeRequest is the body of POST /topics/{topic}/purge. It has exactly one of All, BeforeTS and
// ThroughID.
type PurgeRequest struct {
	All       bool   `json:"all,omitempty"`
	BeforeTS  *int64 `json:"before_ts,omitempty"`
	ThroughID string `json:"through_id,omitempty"`
	// Needed also purges a topic that the hub itself needs.
	Needed bool `json:"needed,omitempty"`
	DryRun bool `json:"dry_run,omitempty"`
	// Bound is that of a dry run: events that came after it stay.
	Bound string `json:"bound,omitempty"`
}

// PurgeAnswer is the answer to a PurgeRequest.
type PurgeAnswer struct {
	Topic   string `json:"topic"`
	Removed uint64 `json:"removed"`
	Left    uint64 `json:"left"`
	DryRun  bool   `json:"dryRun"`
	// Bound, of a dry run, is what confines a purge to the events that there were.
	Bound string `json:"bound,omitempty"`
}

// maxPurgeTS is the last millisecond that the server can count in nanoseconds.
const maxPurgeTS = 1<<63/1_000_000 - 1

// listTopics answers GET /topics with what the token may see.
func (s *Server) listTopics(w http.ResponseWriter, r *http.Request) {
	if fault := checkQuery(r.URL.Query()); fault != "" {
		badQuery(w, fault)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), topicTimeout)
	defer cancel()
	var all []jetstream.TopicStatus
	who, err := identity(r), error(nil)
	if who.InspectsAny() {
		all, err = s.cfg.Topics.List(ctx)
	}
	if err != nil {
		s.fail(w, r, err, "topic", "list the topics")
		return
	}
	var rate map[string]float64
	if len(all) > 0 { // else the token may see none, and what is known of them stays
		rate = s.rates.of(all, time.Now())
	}
	list := struct {
		Topics []ListedTopic `json:"topics"`
	}{[]ListedTopic{}}
	for _, t := range all {
		named := t.Topic
		if named == "" {
			named = TopicsTopic
		}
		if !who.Inspects(named, "") {
			continue
		}
		shown := ListedTopic{
			Topic: t.Topic, Stream: t.Stream, Rule: t.Rule, Events: t.Messages, Bytes: t.Bytes, OnFull: string(t.OnFull), Compacted: t.Compacted,
			FirstTS: milli(t.First), LastTS: milli(t.Last), Retention: Retention{t.Age.Milliseconds(), t.MaxBytes, t.MaxMsgs},
		}
		if perSecond, ok := rate[t.Stream]; ok {
			shown.Rate = &perSecond
		}
		for i := range t.Changes {
			shown.Drift = append(shown.Drift, t.Changes[i].String())
		}
		list.Topics = append(list.Topics, shown)
	}
	answer(w, list)
}

// rateTime is the minimum time over which a rate is taken.
const rateTime = time.Second

// rates knows how many events a second streams store. It remembers the streams that it was asked
// about last, and no others. Its methods may be called concurrently.
type rates struct {
	mu   sync.Mutex
	seen map[string]storedAt
}

// storedAt is how many events a stream had stored at a moment, and its rate before that moment.
type storedAt struct {
	events uint64
	at     time.Time
	rate   float64
	known  bool
}

// of returns the rates of streams, by the names of those whose rate is known.
func (k *rates) of(all []jetstream.TopicStatus, now time.Time) map[string]float64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	found := make(map[string]float64)
	seen := make(map[string]storedAt, len(all))
	for i := range all {
		before, ok := k.seen[all[i].Stream]
		is := before
		if passed := now.Sub(before.at); !ok || passed >= rateTime {
			is = storedAt{events: all[i].Stored, at: now}
			if ok && is.events >= before.events { // else the topic was created again
				is.rate, is.known = float64(is.events-before.events)/passed.Seconds(), true
			}
		}
		seen[all[i].Stream] = is
		if is.known {
			found[all[i].Stream] = is.rate
		}
	}
	k.seen = seen
	return found
}

// milli is a time in epoch milliseconds; 0 for the zero time.
func milli(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

// showTopic answers GET /topics/{topic}.
func (s *Server) showTopic(w http.ResponseWriter, r *http.Request) {
	if fault := checkQuery(r.URL.Query()); fault != "" {
		badQuery(w, fault)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), topicTimeout)
	defer cancel()
	s.answerTopic(ctx, w, r)
}

// createTopic answers PUT /topics/{topic}.
func (s *Server) createTopic(w http.ResponseWriter, r *http.Request) {
	if fault := checkQuery(r.URL.Query()); fault != "" {
		badQuery(w, fault)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), topicTimeout)
	defer cancel()
	topic, _ := pathTarget(r)
	client := ""
	if id := identity(r); id.Limited() {
		client = id.Key()
	}
	if err := s.cfg.Topics.Create(ctx, topic, client); err != nil {
		s.fail(w, r, err, "topic", "create the topic")
		return
	}
	s.answerTopic(ctx, w, r)
}

// answerTopic answers with the state of a topic.
func (s *Server) answerTopic(ctx context.Context, w http.ResponseWriter, r *http.Request) {
	topic, _ := pathTarget(r)
	info, err := s.cfg.Topics.Info(ctx, topic)
	if err != nil {
		s.fail(w, r, err, "topic", "look at the topic")
		return
	}
	shown := ShownTopic{
		Topic: info.Topic, Stream: info.Stream, Rule: info.Rule, Family: info.Family, Events: info.Events, Bytes: info.Bytes,
		First: refTo(info.First), Last: refTo(info.Last), Retention: Retention{info.MaxAge.Milliseconds(), info.MaxBytes, info.MaxMsgs},
		OnFull: string(info.OnFull), GroupAgeMS: info.GroupAge.Milliseconds(), Groups: info.Groups, Compacted: info.Compacted,
		Replicas: info.Replicas, Needed: info.Needed,
	}
	who := identity(r)
	for _, l := range info.Lost {
		if who.Inspects(topic, l.Group) {
			shown.Lost = append(shown.Lost, LostByGroup{l.Group, l.Events, l.At.UnixMilli()})
		}
	}
	answer(w, shown)
}

func refTo(e *jetstream.Event) *EventRef {
	if e == nil {
		return nil
	}
	return &EventRef{e.ID, e.StoredAt / int64(time.Millisecond)}
}

// purgeTopic answers POST /topics/{topic}/purge.
func (s *Server) purgeTopic(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), topicTimeout)
	defer cancel()
	if fault := checkQuery(r.URL.Query()); fault != "" {
		badQuery(w, fault+" The body says what to purge.")
		return
	}
	var asked PurgeRequest
	if !readBody(w, r, &asked, false) {
		return
	}
	opts := jetstream.PurgeOptions{All: asked.All, Through: asked.ThroughID, Needed: asked.Needed, DryRun: asked.DryRun, Bound: asked.Bound}
	if asked.BeforeTS != nil {
		if *asked.BeforeTS < 0 || *asked.BeforeTS > maxPurgeTS {
			writeError(w, http.StatusBadRequest, jetstream.CodeBadOptions, "before_ts is no time in epoch milliseconds.")
			return
		}
		opts.Before = time.UnixMilli(*asked.BeforeTS)
	}
	given := 0
	for _, is := range []bool{asked.All, asked.BeforeTS != nil, asked.ThroughID != ""} {
		if is {
			given++
		}
	}
	if given != 1 {
		writeError(w, http.StatusBadRequest, jetstream.CodeBadOptions, "Give exactly one of all, before_ts and through_id.")
		return
	}
	topic, _ := pathTarget(r)
	done, err := s.cfg.Topics.Purge(ctx, topic, opts)
	if err != nil {
		s.fail(w, r, err, "topic", "purge the topic")
		return
	}
	answer(w, PurgeAnswer{topic, done.Removed, done.Left, asked.DryRun, done.Bound})
}

// deleteTopic answers DELETE /topics/{topic}.
func (s *Server) deleteTopic(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), topicTimeout)
	defer cancel()
	if fault := checkQuery(r.URL.Query(), "needed"); fault != "" {
		badQuery(w, fault)
		return
	}
	needed := false
	switch q := r.URL.Query()["needed"]; {
	case len(q) == 0:
	case len(q) == 1 && json.Unmarshal([]byte(q[0]), &needed) == nil:
	default:
		writeError(w, http.StatusBadRequest, jetstream.CodeBadOptions, "needed must be true or false.")
		return
	}
	topic, _ := pathTarget(r)
	if err := s.cfg.Topics.Delete(ctx, topic, jetstream.DeleteOptions{Needed: needed}); err != nil {
		s.fail(w, r, err, "topic", "delete the topic")
		return
	}
	w.WriteHeader(http.StatusNoContent)
}
