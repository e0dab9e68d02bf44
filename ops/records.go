package ops

import (
	"cmp"
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"eventhub/jetstream"
)

// OutboxTopic is the topic that represents the hub's outboxes in policies. Seeing their records
// needs inspect on this topic, and changing them needs admin. Payloads are shown only of topics
// whose events the token may see.
const OutboxTopic = "eventhub.outbox"

const (
	// defaultRecords and maxRecords bound the number of records in an answer.
	defaultRecords = 50
	maxRecords     = 200
	// recordsAtOnce is how many records are read at a time: their payloads are in memory, however
	// few of them the answer has room for.
	recordsAtOnce = 16
	// recordsTimeout is the timeout of a request about records. A change may touch all of them.
	recordsTimeout = 20 * time.Second
)

// Outboxes shows and changes the records of the hub's outboxes. Its methods may be called
// concurrently. They return jetstream.ErrNotFound for an outbox that the hub does not have, or has
// not opened.
type Outboxes interface {
	// List returns up to limit records with a status, in order of their sequences.
	List(ctx context.Context, name string, q RecordQuery) ([]OutboxRecord, error)
	// Retry makes parked records pending, and returns their number: those with an id, or with ""
	// all of them.
	Retry(ctx context.Context, name, id string) (int, error)
	// Discard deletes the parked record of a topic with an id, and returns how many there were.
	Discard(ctx context.Context, name, topic, id string) (int, error)
}

// RecordQuery selects records of an outbox.
type RecordQuery struct {
	Status string
	// After is a sequence; only records with a higher one are returned.
	After int64
	Limit int
}

// OutboxRecord is a record of an outbox.
type OutboxRecord struct {
	ID       string `json:"id"`
	Topic    string `json:"topic"`
	Key      string `json:"key,omitempty"`
	Sequence int64  `json:"sequence"`
	Status   string `json:"status"`
	// Attempts counts failed attempts, and Err is what the last one met.
	Attempts int    `json:"attempts"`
	Err      string `json:"err,omitempty"`
	// AddedTS, NextTS and SentTS are epoch milliseconds of the outbox's clock: when the record was
	// added, is tried again, and was published.
	AddedTS int64 `json:"addedTs"`
	NextTS  int64 `json:"nextTs,omitempty"`
	SentTS  int64 `json:"sentTs,omitempty"`
	// Payload is absent if the token may not see events of the topic, as are Headers, Key and Err.
	Payload json.RawMessage   `json:"payload,omitempty"`
	Headers map[string]string `json:"headers,omitempty"`
}

// recordStates are the states of records.
var recordStates = []string{"pending", "claimed", "sent", "error"}

// listRecords answers GET /outboxes/{name}.
func (s *Server) listRecords(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	limit, badLimit := number(q, "limit", defaultRecords, 1, maxRecords)
	after, badAfter := number(q, "after", 0, 0, 1<<63-1)
	status := cmp.Or(q.Get("status"), "error")
	badStatus := ""
	if !slices.Contains(recordStates, status) {
		badStatus = "status must be pending, claimed, sent or error."
	}
	if fault := cmp.Or(checkQuery(q, "status", "after", "limit"), badLimit, badAfter, badStatus); fault != "" {
		badQuery(w, fault)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), recordsTimeout)
	defer cancel()
	page := struct {
		Outbox  string         `json:"outbox"`
		Count   int            `json:"count"`
		Records []OutboxRecord `json:"records"`
		More    bool           `json:"more,omitempty"`
	}{Outbox: pathParam(r, "name"), Records: []OutboxRecord{}}
	for bytes, ended := 0, false; !ended && !page.More; {
		found, err := s.cfg.Outboxes.List(ctx, page.Outbox, RecordQuery{status, after, min(recordsAtOnce, int(limit)+1)})
		if err != nil {
			s.fail(w, r, err, "outbox on this hub", "list the records of the outbox")
			return
		}
		ended = len(found) < min(recordsAtOnce, int(limit)+1)
		for i := range found {
			if page.More = len(page.Records) == int(limit) || bytes >= maxEventBytes; page.More {
				break
			}
			after = found[i].Sequence
			bytes += len(found[i].Payload)
			page.Records = append(page.Records, shownRecord(r, found[i]))
		}
	}
	page.Count = len(page.Records)
	answer(w, page)
}

// shownRecord returns a record without what the token of the request may not see.
func shownRecord(r *http.Request, o OutboxRecord) OutboxRecord {
	masks, ok := identity(r).Shows(o.Topic, "")
	if !ok {
		o.Key, o.Err, o.Payload, o.Headers = "", "", nil, nil
		return o
	}
	payload, headers := hide(masks, o.Topic, o.Payload, o.Headers)
	o.Payload, o.Headers = payload, headers
	return o
}

// changedRecords is the answer to a change of records.
type changedRecords struct {
	Outbox string `json:"outbox"`
	Done   int    `json:"done"`
}

// retryRecords answers POST /outboxes/{name}/retry.
func (s *Server) retryRecords(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	fault := checkQuery(q, "id", "all")
	if fault == "" && (q.Get("id") != "") == (q.Get("all") == "1") {
		fault = "Give id, or all=1 for all parked records."
	}
	if fault != "" {
		badQuery(w, fault)
		return
	}
	s.changeRecords(w, r, "retry parked records", func(ctx context.Context, name string) (int, error) {
		return s.cfg.Outboxes.Retry(ctx, name, q.Get("id"))
	})
}

// discardRecord answers POST /outboxes/{name}/discard.
func (s *Server) discardRecord(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	fault := checkQuery(q, "id", "topic")
	if fault == "" && (q.Get("id") == "" || q.Get("topic") == "") {
		fault = "Give the topic and the id of the record."
	}
	if fault != "" {
		badQuery(w, fault)
		return
	}
	s.changeRecords(w, r, "discard a parked record", func(ctx context.Context, name string) (int, error) {
		return s.cfg.Outboxes.Discard(ctx, name, q.Get("topic"), q.Get("id"))
	})
}

func (s *Server) changeRecords(w http.ResponseWriter, r *http.Request, what string, change func(ctx context.Context, name string) (int, error)) {
	ctx, cancel := context.WithTimeout(r.Context(), recordsTimeout)
	defer cancel()
	name := pathParam(r, "name")
	n, err := change(ctx, name)
	if err == nil && n == 0 {
		err = jetstream.ErrNotFound
	}
	if err != nil {
		s.fail(w, r, err, "parked record, or no such outbox on this hub", what)
		return
	}
	s.cfg.Logger.LogAttrs(r.Context(), slog.LevelInfo, "changed records of an outbox for an operator",
		slog.String("did", what), slog.String("outbox", name), slog.Int("records", n), slog.String("operator", identity(r).Key()))
	answer(w, changedRecords{name, n})
}
