package facade

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/jsonscan"
)

// settlePaths are the routes that settle events. They are served while the hub shuts down, too.
var settlePaths = map[string]jetstream.SettleOp{
	"/ack": jetstream.SettleAck, "/nack": jetstream.SettleNack, "/modack": jetstream.SettleExtend,
}

// settleNames name the settlements for the Observer.
var settleNames = map[jetstream.SettleOp]string{jetstream.SettleAck: "ack", jetstream.SettleNack: "nack", jetstream.SettleExtend: "modack"}

// Results of a settlement, for the Observer.
const (
	resultSettled = "settled"
	resultOver    = "over"
	resultSilent  = "silent"
)

// serveSettle serves POST /ack, /nack and /modack.
func (s *Server) serveSettle(w http.ResponseWriter, r *http.Request) {
	p := principalOf(r)
	b, _ := buffers.Get().(*[]byte)
	defer putBuffer(b)
	what := jetstream.Settlement{Op: settlePaths[r.URL.Path]}
	fail := s.readRequest(w, r, p, b, false)
	var texts []string
	if fail == nil {
		texts, fail = parseSettle(*b, &what)
	}
	if fail == nil {
		fail = s.throttleSettle(r.Context(), p, len(texts))
	}
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), callTimeout)
	defer cancel()
	texts, handles, errs, fail := s.readHandles(ctx, p, texts)
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	// All of the request is permitted: nothing was settled before.
	settled := s.cfg.Bus.Handles().Settle(ctx, handles, what)
	for i, n := 0, 0; i < len(errs); i++ {
		if errs[i] == nil {
			errs[i] = settled[n]
			n++
		}
	}
	s.answerSettle(w, settleNames[what.Op], texts, errs)
}

// parseSettle reads the body of a settlement. The fields mean what they mean in frames, except that
// a reason or an extend_ms of the wrong type is refused: frames have always ignored it.
func parseSettle(body []byte, what *jetstream.Settlement) (texts []string, fail *fault) {
	var acks, reason, wait, extend []byte
	for walk := jsonscan.Walk(body, 0); walk.Next(); {
		switch string(unquoteName(walk.Key, nil)) {
		case "ack":
			acks = walk.Value
		case "reason":
			reason = walk.Value
		case "delay_ms":
			wait = walk.Value
		case "extend_ms":
			extend = walk.Value
		}
	}
	if !isArray(acks) {
		return nil, &fault{code: codeBadOptions, msg: "ack must be an array of handles, not " + kind(acks) + "."}
	}
	if what.Op == jetstream.SettleNack && !missing(reason) && !isString(reason) {
		return nil, &fault{code: codeBadOptions, msg: "reason must be a string, not " + kind(reason) + "."}
	}
	if what.Op == jetstream.SettleExtend && !missing(extend) && !isNumber(extend) {
		return nil, &fault{code: codeBadOptions, msg: "extend_ms must be a number, not " + kind(extend) + "."}
	}
	for walk := jsonscan.Walk(acks, 0); walk.Next(); {
		if !isString(walk.Value) {
			return nil, &fault{code: codeBadOptions, msg: "ack must be an array of handles, but holds " + kind(walk.Value) + "."}
		}
		if len(texts) == maxAckIDs {
			return nil, &fault{code: codeBadOptions, msg: "ack has more than " + strconv.Itoa(maxAckIDs) + " items."}
		}
		text, _ := jsonscan.Unquote(walk.Value, nil)
		texts = append(texts, string(text))
	}
	if len(texts) == 0 {
		return nil, &fault{code: codeBadOptions, msg: "ack is empty."}
	}
	switch what.Op {
	case jetstream.SettleNack:
		if isString(reason) {
			text, _ := jsonscan.Unquote(reason, nil)
			what.Reason = string(text)
		}
		what.Delay, fail = delay(wait)
	case jetstream.SettleExtend:
		what.Extend = extension(extend)
	case jetstream.SettleAck:
	}
	return texts, fail
}

// readHandles checks handles, and asks the policy about each group once. It returns each text once,
// with an error or nil, and the handles whose lease may still exist.
func (s *Server) readHandles(ctx context.Context, p Principal, given []string) (texts []string, handles []jetstream.Handle, errs []error, fail *fault) {
	known := make(map[string]bool, len(given))
	allowed := make(map[[2]string]bool)
	all, faults := s.cfg.Bus.Handles().Read(ctx, given)
	for i, text := range given {
		if known[text] {
			continue
		}
		known[text] = true
		h, err := all[i], faults[i]
		switch {
		case errors.Is(err, jetstream.ErrNotLeased):
			texts, errs = append(texts, text), append(errs, err)
			continue
		case errors.Is(err, jetstream.ErrBadHandle):
			return nil, nil, nil, &fault{code: codeBadHandle, msg: "ack[" + strconv.Itoa(i) + "] is not a handle of this hub. Nothing was settled."}
		case err != nil:
			s.logCause(ctx, "", p.Key(), err)
			return nil, nil, nil, busFault(err, codeAckFailed, "The handles could not be checked. Nothing was settled.")
		}
		if group := [2]string{h.Topic, h.Group}; !allowed[group] {
			if !s.allows(p, ActionSubscribe, h.Topic, h.Group) {
				return nil, nil, nil, deniedGroup(h.Topic, h.Group)
			}
			allowed[group] = true
		}
		texts, handles, errs = append(texts, text), append(handles, h), append(errs, nil)
	}
	return texts, handles, errs, nil
}

// throttleSettle takes settlements from the quota of the principal, and waits for them: a refusal
// would cost the client its leases.
func (s *Server) throttleSettle(ctx context.Context, p Principal, n int) *fault {
	for end := time.Now().Add(callTimeout); ; {
		wait := s.settling.TakeN(p.Key(), n)
		if wait == 0 {
			return nil
		}
		s.cfg.Observer.LimitReached("settle_rate")
		if time.Now().Add(wait).After(end) {
			return &fault{code: codeRateLimited, msg: "This client settles more than " + strconv.Itoa(s.cfg.Limits.SettleRate) + " events a second: slow down.", wait: wait}
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return &fault{code: codeRateLimited, msg: "The client has gone.", wait: wait}
		}
	}
}

// answerSettle answers with how many events were settled, and with the handles of the others. If
// none was, the status is that of their error.
func (s *Server) answerSettle(w http.ResponseWriter, op string, texts []string, errs []error) {
	counts := make(map[string]int)
	var failed []byte
	var fail *fault
	for i, err := range errs {
		var f *fault
		switch {
		case err == nil:
			counts[resultSettled]++
			continue
		case errors.Is(err, jetstream.ErrNotLeased):
			counts[resultOver]++
			f = &fault{code: codeLeaseOver, msg: "The lease is over: the event was settled, or comes again. Nothing was settled."}
		default:
			counts[resultSilent]++
			f = &fault{code: codeAckFailed, msg: "The hub that holds the lease does not answer. It may have settled the event: try again."}
		}
		if fail == nil || f.rule().retry {
			fail = f
		}
		if failed != nil {
			failed = append(failed, ',')
		}
		failed = jsonscan.AppendString(append(failed, `{"ack":`...), texts[i])
		failed = append(append(append(failed, `,"code":"`...), f.code...), `"}`...)
	}
	for result, n := range counts {
		s.cfg.Observer.Settled(op, result, n)
	}
	status := http.StatusOK
	out := []byte{'{'}
	header := w.Header()
	if counts[resultSettled] == 0 {
		s.cfg.Observer.ErrorSent(string(fail.code))
		status = fail.rule().status
		if fail.rule().retry {
			header.Set("Retry-After", fail.retryAfter())
		}
		out = appendError(nil, fail.code, fail.msg)
		out[len(out)-1] = ','
	}
	header.Set("Content-Type", "application/json")
	header.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	out = strconv.AppendInt(append(out, `"settled":`...), int64(counts[resultSettled]), 10)
	if failed != nil {
		out = append(append(append(out, `,"failed":[`...), failed...), ']')
	}
	_, _ = w.Write(append(out, "}\n"...))
}
