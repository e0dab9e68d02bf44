package facade

import (
	"context"
	"errors"
	"net/http"

	"eventhub/jetstream"
)

// serveCancel serves DELETE /delayed/{topic}/{id}. Who may publish to a topic may cancel what waits
// for it.
func (s *Server) serveCancel(w http.ResponseWriter, r *http.Request) {
	p, topic, fail := s.snapTopic(r, s.mayPublish)
	var id string
	if fail == nil {
		var err error
		if id, err = pathParam(r, "id"); err != nil {
			fail = &fault{code: codeBadOptions, msg: "The id in the path is not URL-encoded correctly."}
		}
	}
	if fail == nil {
		fail = s.throttle(p, topic)
	}
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), callTimeout)
	defer cancel()
	switch err := s.cfg.Bus.NewPublisher().Cancel(ctx, topic, id); {
	case errors.Is(err, jetstream.ErrNotFound):
		s.refuse(w, &fault{code: codeNotFound, msg: "No event of this id waits for this topic."})
	case err != nil:
		s.logFailed(r, topic, err)
		s.refuse(w, busFault(err, codeInternal, "The event may be cancelled or not: try again."))
	default:
		w.WriteHeader(http.StatusNoContent)
	}
}
