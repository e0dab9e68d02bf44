package ops

import (
	"context"
	"net/http"
	"time"

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

// deleteGroup answers DELETE /groups/{topic}/{group}.
func (s *Server) deleteGroup(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), groupTimeout)
	defer cancel()
	topic, group := pathTarget(r)
	if err := s.cfg.Groups.Delete(ctx, topic, group); err != nil {
		s.fail(w, r, err, "group on this topic", "delete the group")
		return
	}
	w.WriteHeader(http.StatusNoContent)
}
