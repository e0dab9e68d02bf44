package ops

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/url"
	"time"

	"github.com/go-chi/chi/v5"

	"eventhub/jetstream"
)

// groupTimeout is the timeout of a change of a group.
const groupTimeout = 10 * time.Second

// Groups manages groups. GroupsOf makes one of a *jetstream.Bus.
type Groups interface {
	// Delete deletes a group. It returns jetstream.ErrNotFound if the group does not exist.
	Delete(ctx context.Context, topic, group string) error
}

// GroupsOf returns the Groups of a bus.
func GroupsOf(bus *jetstream.Bus) Groups { return groupsOf{bus} }

type groupsOf struct{ bus *jetstream.Bus }

func (g groupsOf) Delete(ctx context.Context, topic, group string) error {
	return g.bus.Group(topic, group).Delete(ctx)
}

// groupTarget is the Target of a path with {topic} and {group}.
func groupTarget(r *http.Request) (topic, group string) {
	return pathParam(r, "topic"), pathParam(r, "group")
}

// pathParam returns a segment of the path, URL-decoded once.
func pathParam(r *http.Request, name string) string {
	value := chi.URLParam(r, name)
	if r.URL.RawPath == "" {
		return value // chi took the value from the decoded path
	}
	decoded, err := url.PathUnescape(value)
	if err != nil {
		return "" // which is no name; net/http refuses such a path
	}
	return decoded
}

// deleteGroup answers DELETE /groups/{topic}/{group}.
func (s *Server) deleteGroup(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), groupTimeout)
	defer cancel()
	topic, group := groupTarget(r)
	err := s.cfg.Groups.Delete(ctx, topic, group)
	known, isKnown := errors.AsType[*jetstream.Error](err)
	switch {
	case err == nil:
		w.WriteHeader(http.StatusNoContent)
	case errors.Is(err, jetstream.ErrNotFound):
		writeError(w, http.StatusNotFound, "not_found", "This topic has no such group.")
	case isKnown && (known.Code == jetstream.CodeBadTopic || known.Code == jetstream.CodeBadGroup):
		writeError(w, http.StatusBadRequest, known.Code, known.Msg)
	default:
		s.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "failed to delete a group", slog.String("topic", topic), slog.String("group", group), slog.Any("error", err))
		w.Header().Set("Retry-After", "1")
		writeError(w, http.StatusServiceUnavailable, "internal", "The group could not be deleted now: try again later.")
	}
}
