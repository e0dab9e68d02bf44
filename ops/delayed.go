package ops

import (
	"cmp"
	"context"
	"log/slog"
	"net/http"

	"eventhub/jetstream"
)

const defaultDelayed = 100

// Delayed is an event that waits to be stored in its topic.
type Delayed struct {
	ID string `json:"id"`
	// AtMS and PublishedMS are when the event is due and when it was published.
	AtMS        int64 `json:"at"`
	PublishedMS int64 `json:"published"`
	// Bytes is the size of the payload.
	Bytes int `json:"bytes"`
}

// DelayedAnswer is the answer of GET /topics/{topic}/delayed.
type DelayedAnswer struct {
	Topic   string    `json:"topic"`
	Count   int       `json:"count"`
	Delayed []Delayed `json:"delayed"`
	// Next is for the next answer; absent at the end.
	Next string `json:"next,omitempty"`
}

// listDelayed answers GET /topics/{topic}/delayed.
func (s *Server) listDelayed(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), topicTimeout)
	defer cancel()
	q := r.URL.Query()
	limit, badLimit := number(q, "limit", defaultDelayed, 1, jetstream.MaxDelayedPage)
	if fault := cmp.Or(checkQuery(q, "limit", "next"), badLimit); fault != "" {
		badQuery(w, fault)
		return
	}
	topic, _ := pathTarget(r)
	page, err := s.cfg.Topics.Delayed(ctx, topic, q.Get("next"), int(limit))
	if err != nil {
		s.fail(w, r, err, "topic", "list delayed events")
		return
	}
	list := make([]Delayed, len(page.Events))
	for i := range page.Events {
		e := &page.Events[i]
		list[i] = Delayed{e.ID, e.At.UnixMilli(), e.Published.UnixMilli(), e.Bytes}
	}
	answer(w, DelayedAnswer{topic, len(list), list, page.Next})
}

// cancelDelayed answers DELETE /topics/{topic}/delayed/{id}.
func (s *Server) cancelDelayed(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), topicTimeout)
	defer cancel()
	if fault := checkQuery(r.URL.Query()); fault != "" {
		badQuery(w, fault)
		return
	}
	topic, _ := pathTarget(r)
	id := pathParam(r, "id")
	if err := s.cfg.Topics.CancelDelayed(ctx, topic, id); err != nil {
		s.fail(w, r, err, "delayed event", "cancel the delayed event")
		return
	}
	s.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "cancelled a delayed event for an operator", slog.String("topic", topic), slog.String("id", id), slog.String("operator", identity(r).Key()))
	w.WriteHeader(http.StatusNoContent)
}
