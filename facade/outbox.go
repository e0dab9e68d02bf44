package facade

import (
	"context"
	"net/http"

	"eventhub/jetstream"
)

// Outbox stores events that are published later, for clients that must not wait for NATS. Its
// methods may be called concurrently.
type Outbox interface {
	// Add stores an event so that the event survives the process, and returns its id. An event
	// whose id is stored already is not stored again. The error is a *jetstream.Error when the
	// client is at fault or when there is no room. Any other error goes to the log, and the client
	// may repeat the event with the same id. opts.CountFor is the key of the principal, for which
	// the event and a new topic count. Add does not keep payload or opts.
	Add(ctx context.Context, topic string, payload []byte, opts jetstream.PublishOptions) (id string, err error)
}

// serveOutbox serves POST /outbox/{topic}. It differs from POST /publish/{topic} in that it answers
// 202 as soon as the event is stored in the outbox, and takes one event per request.
func (s *Server) serveOutbox(w http.ResponseWriter, r *http.Request) {
	if s.cfg.Outbox == nil {
		s.refuse(w, &fault{code: codeNotFound, msg: "This hub has no outbox."})
		return
	}
	p, topic, form, fail := s.publication(r)
	if fail == nil && form.many() {
		fail = &fault{code: codeBadOptions, msg: "The outbox takes one event a request, and neither " + ndjsonType + " nor a batch."}
	}
	if fail == nil {
		fail = s.mayPost(p, r.ContentLength)
	}
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	s.publishBody(w, r, p, topic, form, func(ctx context.Context, topic string, payload []byte, opts jetstream.PublishOptions) (int, string, error) {
		switch {
		case len(payload) == 0:
			payload = nullPayload
		case !jetstream.ValidPayload(payload):
			return 0, "", &fault{code: codeBadOptions, msg: "The outbox takes JSON: publish other data to /publish/" + topic + "."}
		}
		if opts.Delayed() {
			return 0, "", &fault{code: codeBadOptions, msg: "The outbox takes no events with a delay: publish them to /publish/" + topic + "."}
		}
		if fail := s.throttleOutbox(p, len(payload)); fail != nil {
			return 0, "", fail
		}
		opts.CountFor = p.Key()
		id, err := s.cfg.Outbox.Add(ctx, topic, payload, opts)
		return http.StatusAccepted, id, err
	})
}
