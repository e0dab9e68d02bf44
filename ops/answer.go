package ops

import (
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"

	"eventhub/jetstream"
)

// maxBody is the maximum size of a request body.
const maxBody = 64 << 10

// answer answers a request with a value as JSON.
func answer(w http.ResponseWriter, v any) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	_ = json.NewEncoder(w).Encode(v)
}

// writeError answers {"error": msg, "code": code}.
func writeError(w http.ResponseWriter, status int, code, msg string) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	if (status == http.StatusServiceUnavailable || status == http.StatusTooManyRequests) && h.Get("Retry-After") == "" {
		h.Set("Retry-After", "1")
	}
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(struct {
		Error string `json:"error"`
		Code  string `json:"code"`
	}{msg, code})
}

// fail answers a request that the bus could not serve. An error for clients is shown, with the
// status that Config.Status has for its code. what names what does not exist, such as "group".
// Other errors are logged and not shown; failed says what was tried, such as "delete a group".
func (s *Server) fail(w http.ResponseWriter, r *http.Request, err error, what, failed string) {
	known, ok := errors.AsType[*jetstream.Error](err)
	switch {
	case errors.Is(err, jetstream.ErrNotFound):
		writeError(w, s.cfg.Status("not_found"), "not_found", "There is no such "+what+".")
	case ok && known.Code != jetstream.CodeInternal:
		(&Refusal{Status: s.cfg.Status(known.Code), Code: known.Code, Msg: known.Msg, Wait: known.Wait}).write(w)
	default:
		who, topic, group := "", "", ""
		if id := identity(r); id != nil {
			who = id.Key()
		}
		level := slog.LevelDebug // the operator has gone
		if r.Context().Err() == nil {
			level = slog.LevelWarn
			topic, group = pathTarget(r)
		}
		s.often.Log(r.Context(), level, "failed to serve an operator", who, slog.String("failed", failed),
			slog.String("topic", topic), slog.String("group", group), slog.String("operator", who), slog.Any("error", err))
		writeError(w, s.cfg.Status(jetstream.CodeInternal), jetstream.CodeInternal, "The hub failed to "+failed+": try again later.")
	}
}

// readBody reads the body of a request, one JSON object without unknown fields, into v. An empty
// body leaves v as it is if it may be empty. readBody answers the request and returns false if the
// body is not that.
func readBody(w http.ResponseWriter, r *http.Request, v any, mayBeEmpty bool) bool {
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	d.DisallowUnknownFields()
	err := d.Decode(v)
	if errors.Is(err, io.EOF) && mayBeEmpty {
		return true
	}
	if err == nil {
		if _, err = d.Token(); errors.Is(err, io.EOF) {
			return true
		}
		err = errors.New("more follows the object")
	}
	if _, large := errors.AsType[*http.MaxBytesError](err); large {
		writeError(w, http.StatusRequestEntityTooLarge, "bad_options", "The body is too large.")
		return false
	}
	writeError(w, http.StatusBadRequest, "bad_options", "The body is not what this request takes: "+bodyFault(err)+".")
	return false
}

// bodyFault says what is wrong with a body.
func bodyFault(err error) string {
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		if wrong.Field == "" {
			return "it is a JSON " + wrong.Value + " and not an object"
		}
		return wrong.Field + " must not be a JSON " + wrong.Value
	}
	if errors.Is(err, io.EOF) {
		return "it is empty"
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return "it ends early"
	}
	text := err.Error()
	if len(text) > 6 && text[:6] == "json: " {
		text = text[6:]
	}
	return text
}
