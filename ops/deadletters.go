package ops

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"eventhub/acl"
	"eventhub/jetstream"
)

const (
	// defaultLetters is the size of a page of dead letters without a limit.
	defaultLetters = 100
	// lettersTimeout is the timeout of listing and counting.
	lettersTimeout = 20 * time.Second
	// maxTime is the latest time in epoch milliseconds, the largest exact integer of JavaScript.
	maxTime = 1<<53 - 1
	// lineTimeout is how long a client may take to receive a part of a long answer.
	lineTimeout = 30 * time.Second
	// ndjson is the type of an answer that reports progress.
	ndjson = "application/x-ndjson"
)

// DeadLetters manages dead letters. jetstream.DeadLetters implements it.
type DeadLetters interface {
	List(ctx context.Context, filter jetstream.LetterFilter, next string, limit int, visible func(*jetstream.Letter) bool) (jetstream.LetterPage, error)
	Count(ctx context.Context, filter jetstream.LetterFilter, client string, visible func(*jetstream.Letter) bool) (jetstream.LetterCounts, error)
	Redrive(ctx context.Context, filter jetstream.LetterFilter, opts jetstream.RedriveOptions) (jetstream.Redriven, error)
	Discard(ctx context.Context, filter jetstream.LetterFilter, opts jetstream.RedriveOptions) (jetstream.Redriven, error)
}

var _ DeadLetters = jetstream.DeadLetters{}

// letterParams are the parameters that select dead letters.
var letterParams = []string{"topic", "group", "id", "event", "reason", "fromTs", "toTs"}

// letterQuery is the query of a request about dead letters.
type letterQuery struct {
	filter   jetstream.LetterFilter
	next     string
	limit    int
	payloads bool
	opts     jetstream.RedriveOptions
}

// parseLetters reads a query. more are the parameters that the request has besides those of the
// filter. The error is for the client.
func parseLetters(raw string, more ...string) (q letterQuery, err error) {
	values, err := url.ParseQuery(raw)
	if err != nil {
		return q, badLetters("The query is not URL-encoded.")
	}
	known := append(slices.Clone(letterParams), more...)
	for name, given := range values {
		switch {
		case !slices.Contains(known, name):
			return q, badLetters("There is no parameter " + strconv.QuoteToASCII(name[:min(len(name), 64)]) + "; there are " + strings.Join(known, ", ") + ".")
		case len(given) > 1:
			return q, badLetters(name + " must be given once.")
		case given[0] == "" && name != "next":
			return q, badLetters(name + " must not be empty; leave it out.")
		}
	}
	q = letterQuery{limit: defaultLetters, payloads: true, next: values.Get("next"), filter: jetstream.LetterFilter{
		Topic: values.Get("topic"), Group: values.Get("group"), ID: values.Get("id"), EventID: values.Get("event"), Reason: values.Get("reason"),
	}}
	if q.filter.Since, err = letterTime(values, "fromTs"); err != nil {
		return q, err
	}
	if q.filter.Until, err = letterTime(values, "toTs"); err != nil {
		return q, err
	}
	if limit := values.Get("limit"); limit != "" {
		if q.limit, err = strconv.Atoi(limit); err != nil || q.limit < 1 {
			return q, badLetters("limit must be a positive number")
		}
	}
	if rate := values.Get("rate"); rate != "" {
		if q.opts.Rate, err = strconv.Atoi(rate); err != nil || q.opts.Rate < 1 {
			return q, badLetters("rate must be a positive number")
		}
	}
	flags := map[string]bool{"payloads": true}
	for _, name := range []string{"payloads", "dryRun", "all"} {
		switch values.Get(name) {
		case "":
		case "1", "true":
			flags[name] = true
		case "0", "false":
			flags[name] = false
		default:
			return q, badLetters(name + " is 1 or 0.")
		}
	}
	q.payloads, q.opts.DryRun, q.opts.Through = flags["payloads"], flags["dryRun"], values.Get("through")
	switch values.Get("to") {
	case "", "group":
	case "topic":
		q.opts.ToTopic = true
	default:
		return q, badLetters("to is group or topic.")
	}
	f := q.filter
	f.Topic = ""
	if everything := f == (jetstream.LetterFilter{}); slices.Contains(more, "all") && everything != flags["all"] && !q.opts.DryRun {
		if everything {
			return q, badLetters("Name the dead letters by group, id, event, reason, fromTs or toTs, or give all=1 for all of the topic.")
		}
		return q, badLetters("all=1 means all dead letters of the topic: leave it out, or leave out the other parameters.")
	}
	return q, nil
}

// letterTime reads a time in epoch milliseconds; the zero time stands for none.
func letterTime(values url.Values, name string) (time.Time, error) {
	if !values.Has(name) {
		return time.Time{}, nil
	}
	ms, err := strconv.ParseInt(values.Get(name), 10, 64)
	if err != nil || ms < 0 || ms > maxTime {
		return time.Time{}, badLetters("range bounds must be numeric")
	}
	return time.UnixMilli(ms), nil
}

// badLetters is an error about a query.
func badLetters(msg string) error {
	return &jetstream.Error{Code: jetstream.CodeBadOptions, Msg: msg}
}

// letterRecord is a dead letter as JSON.
type letterRecord struct {
	ID       string          `json:"id"`
	At       string          `json:"at"`
	StoredTS int64           `json:"storedTs"`
	Topic    string          `json:"topic"`
	Group    string          `json:"group,omitempty"`
	Err      string          `json:"err,omitempty"`
	TS       int64           `json:"ts,omitempty"`
	Attempts int             `json:"attempts,omitempty"`
	Original json.RawMessage `json:"original,omitempty"`
	Missing  bool            `json:"payloadMissing,omitempty"`
	Fault    string          `json:"fault,omitempty"`
}

// letterName is what is shown of an event to a token that may not see its payload.
type letterName struct {
	ID    string `json:"id"`
	TS    int64  `json:"ts"`
	Topic string `json:"topic"`
	Key   string `json:"key,omitempty"`
}

// maySeeLetter reports whether the owner of a token may know that a letter is there.
func maySeeLetter(id *acl.Identity, l *jetstream.Letter) bool {
	if id.Inspects(l.Topic, l.Group) {
		return true
	}
	_, ok := showsLetters(id, l.Topic)
	return ok
}

// showsLetters reports whether the owner of a token may see the events in the dead letters of a
// topic: by a right on their dlq topic, or by admin on the topic. The masks name what is hidden.
func showsLetters(id *acl.Identity, topic string) ([]*acl.Mask, bool) {
	if masks, ok := id.Shows("dlq."+topic, ""); ok {
		return masks, true
	}
	if id.Allows(acl.Admin, topic, "") {
		return id.Shows(topic, "")
	}
	return nil, false
}

// visibleTo returns which letters the owner of a token may find. A filter by what recordOf hides
// finds no letter, because its answer would tell what is hidden.
func visibleTo(id *acl.Identity, f *jetstream.LetterFilter) func(*jetstream.Letter) bool {
	return func(l *jetstream.Letter) bool {
		if f.Reason == "" && f.EventID == "" {
			return maySeeLetter(id, l)
		}
		_, whole := showsLetters(id, l.Topic)
		_, names := id.Shows(l.Topic, l.Group)
		return whole || names
	}
}

// recordOf is what a token may see of a letter. One that may only inspect the topic sees nothing of
// the event, nor the reason, which a client wrote.
func recordOf(id *acl.Identity, l *jetstream.Letter, payloads bool) letterRecord {
	r := letterRecord{
		ID: l.ID, At: l.Stream + "@" + strconv.FormatUint(l.Sequence, 10), StoredTS: l.StoredAt / 1e6, Topic: l.Topic, Group: l.Group,
		TS: l.FailedAt, Attempts: l.Attempts, Missing: l.Bare, Fault: l.Fault,
	}
	masks, whole := showsLetters(id, l.Topic)
	_, names := id.Shows(l.Topic, l.Group)
	if !whole && !names || l.Fault != "" {
		return r
	}
	r.Err = l.Reason
	if whole && payloads {
		if r.Original = maskedOriginal(masks, l); r.Original != nil {
			return r
		}
	}
	// strings and numbers always marshal
	r.Original, _ = json.Marshal(letterName{ID: l.Event.ID, TS: l.Event.TS, Topic: l.Event.Topic, Key: l.Event.Key}) //nolint:errchkjson // see above
	return r
}

// maskedOriginal is the record in a letter without what masks hide; nil if it cannot be read.
func maskedOriginal(masks []*acl.Mask, l *jetstream.Letter) json.RawMessage {
	if len(masks) == 0 {
		return l.Record
	}
	body := append(append([]byte(`{"original":`), l.Record...), '}')
	body, _ = hide(masks, "dlq."+l.Topic, body, nil)
	var masked struct {
		Original json.RawMessage `json:"original"`
	}
	if json.Unmarshal(body, &masked) != nil {
		return nil
	}
	return masked.Original
}

// listLetters answers GET /dlq.
func (s *Server) listLetters(w http.ResponseWriter, r *http.Request) {
	q, err := parseLetters(r.URL.RawQuery, "limit", "next", "payloads")
	if err != nil {
		s.fail(w, r, err, "dead letter", "list dead letters")
		return
	}
	id := identity(r)
	ctx, cancel := context.WithTimeout(r.Context(), lettersTimeout)
	defer cancel()
	var page jetstream.LetterPage
	if id.InspectsAny() {
		page, err = s.cfg.DeadLetters.List(ctx, q.filter, q.next, q.limit, visibleTo(id, &q.filter))
	}
	if err != nil {
		s.fail(w, r, err, "dead letter", "list dead letters")
		return
	}
	out := struct {
		Count   int            `json:"count"`
		Letters []letterRecord `json:"letters"`
		Next    string         `json:"next,omitempty"`
	}{len(page.Letters), make([]letterRecord, 0, len(page.Letters)), page.Next}
	for _, l := range page.Letters {
		out.Letters = append(out.Letters, recordOf(id, l, q.payloads))
	}
	extend(w)
	answer(w, out)
}

// countLetters answers GET /dlq/counts.
func (s *Server) countLetters(w http.ResponseWriter, r *http.Request) {
	q, err := parseLetters(r.URL.RawQuery)
	if err != nil {
		s.fail(w, r, err, "dead letter", "count dead letters")
		return
	}
	id := identity(r)
	ctx, cancel := context.WithTimeout(r.Context(), lettersTimeout)
	defer cancel()
	var counts jetstream.LetterCounts
	if id.InspectsAny() {
		counts, err = s.cfg.DeadLetters.Count(ctx, q.filter, id.Key(), visibleTo(id, &q.filter))
	}
	if err != nil {
		s.fail(w, r, err, "dead letter", "count dead letters")
		return
	}
	type group struct {
		Topic   string `json:"topic"`
		Group   string `json:"group"`
		Count   int    `json:"count"`
		FirstTS int64  `json:"firstTs"`
		LastTS  int64  `json:"lastTs"`
	}
	out := struct {
		Total  int     `json:"total"`
		Groups []group `json:"groups"`
	}{counts.Total, make([]group, 0, len(counts.Groups))}
	for _, c := range counts.Groups {
		out.Groups = append(out.Groups, group{c.Topic, c.Group, c.Count, c.First, c.Last})
	}
	extend(w)
	answer(w, out)
}

// extend gives the client time for the next part of an answer that took long.
func extend(w http.ResponseWriter) {
	// without a connection, as in tests, there is no deadline
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(lineTimeout))
}

// redriveLetters answers POST /dlq/redrive.
func (s *Server) redriveLetters(w http.ResponseWriter, r *http.Request) {
	s.changeLetters(w, r, s.cfg.DeadLetters.Redrive, "redrive dead letters", "to", "rate", "dryRun", "all", "through")
}

// discardLetters answers POST /dlq/discard.
func (s *Server) discardLetters(w http.ResponseWriter, r *http.Request) {
	s.changeLetters(w, r, s.cfg.DeadLetters.Discard, "discard dead letters", "rate", "dryRun", "all", "through")
}

// redriven is the progress and the outcome of a redrive or a discard, as JSON.
type redriven struct {
	Matched int            `json:"matched"`
	Done    int            `json:"done"`
	Skipped int            `json:"skipped"`
	Reasons map[string]int `json:"reasons,omitempty"`
	// Through, of a dry run, is what confines a request to the letters that there were.
	Through string `json:"through,omitempty"`
	// Ended is set in the last line of an answer that reports progress.
	Ended bool `json:"ended,omitempty"`
	// Error and Code say why the rest was not done.
	Error string `json:"error,omitempty"`
	Code  string `json:"code,omitempty"`
}

func redrivenOf(r jetstream.Redriven) redriven {
	return redriven{Matched: r.Matched, Done: r.Done, Skipped: r.Skipped, Reasons: r.Reasons, Through: r.Through}
}

// errEnding ends a redrive of a token that is not valid any more, or of a hub that drains.
var errEnding = errors.New("ops: the token was revoked or has expired, or the hub drains")

// changeLetters redrives or discards. A client that accepts NDJSON gets a line after each batch,
// and others get the outcome at the end. When the client disconnects, the rest stays.
func (s *Server) changeLetters(w http.ResponseWriter, r *http.Request, change func(context.Context, jetstream.LetterFilter, jetstream.RedriveOptions) (jetstream.Redriven, error), what string, params ...string) {
	q, err := parseLetters(r.URL.RawQuery, params...)
	if err != nil {
		s.fail(w, r, err, "dead letter", what)
		return
	}
	id := identity(r)
	q.opts.Client = id.Key()
	lines := strings.Contains(r.Header.Get("Accept"), ndjson)
	encode := json.NewEncoder(w)
	began := false
	line := func(v redriven) {
		if !began {
			began = true
			w.Header().Set("Content-Type", ndjson)
			w.Header().Set("Cache-Control", "no-store")
		}
		extend(w)
		_ = encode.Encode(v) // a client that is gone ends the context
		_ = http.NewResponseController(w).Flush()
	}
	ctx, cancel := r.Context(), context.CancelFunc(func() {})
	if at := id.Expires(); !at.IsZero() {
		ctx, cancel = context.WithDeadline(ctx, at)
	}
	defer cancel()
	q.opts.Progress = func(done jetstream.Redriven) error {
		if id.Revoked() || s.cfg.Ready != nil && s.cfg.Ready() != nil {
			return errEnding
		}
		if lines {
			line(redrivenOf(done))
		}
		return nil
	}
	done, err := change(ctx, q.filter, q.opts)
	if r.Context().Err() != nil {
		return // nobody listens
	}
	if !q.opts.DryRun {
		s.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "a change of dead letters has ended", slog.String("change", what), slog.String("topic", q.filter.Topic), slog.String("group", q.filter.Group),
			slog.String("by", id.Key()), slog.Int("matched", done.Matched), slog.Int("done", done.Done), slog.Int("skipped", done.Skipped))
	}
	extend(w)
	if err != nil && !began && done.Matched == 0 {
		if errors.Is(err, jetstream.ErrNoTopic) {
			writeError(w, s.cfg.Status("not_found"), "not_found", noTopic(q.filter.Topic))
			return
		}
		s.fail(w, r, err, s.missing(&q.filter), what)
		return
	}
	out := redrivenOf(done)
	if err != nil {
		out.Code, out.Error = s.whyEnded(r, err, &q.filter, what)
	}
	if lines {
		out.Ended = true
		line(out)
		return
	}
	if err != nil {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(s.cfg.Status(out.Code))
	}
	answer(w, out)
}

// missing names what a redrive did not find.
func (s *Server) missing(f *jetstream.LetterFilter) string {
	if f.ID != "" || f.EventID != "" {
		return "dead letter"
	}
	return "group on this topic"
}

// noTopic says that a redrive names a topic that is not there.
func noTopic(topic string) string {
	return "There is no topic " + topic + ", and no dead letter of one."
}

// whyEnded is the code and the text of an error that ended a redrive.
func (s *Server) whyEnded(r *http.Request, err error, f *jetstream.LetterFilter, what string) (code, msg string) {
	known, ok := errors.AsType[*jetstream.Error](err)
	switch {
	case errors.Is(err, errEnding), errors.Is(err, context.DeadlineExceeded):
		return "overloaded", "The token is not valid any more, or the hub shuts down: the rest stays, repeat the request."
	case ok && known.Code != jetstream.CodeInternal:
		return known.Code, known.Msg
	case errors.Is(err, jetstream.ErrNoTopic):
		return "not_found", noTopic(f.Topic)
	case errors.Is(err, jetstream.ErrNotFound):
		return "not_found", "There is no such dead letter any more."
	}
	s.cfg.Logger.LogAttrs(r.Context(), slog.LevelWarn, "failed to change dead letters", slog.String("change", what), slog.Any("error", err))
	return jetstream.CodeInternal, "The hub failed to " + what + ": the rest stays, try again later."
}
