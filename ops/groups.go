package ops

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"eventhub/jetstream"
)

// Timeouts of requests about groups.
const (
	groupTimeout = 10 * time.Second
	// moveTimeout applies to a move, which waits until no member is given what was fetched before.
	moveTimeout = 20 * time.Second
)

// groupsPage is the default number of groups of a page.
const groupsPage = 100

// Groups gives access to groups. *jetstream.Bus implements it.
type Groups interface {
	Group(topic, name string) jetstream.Group
	History(topic string) jetstream.History
	Admin() jetstream.Admin
}

// group returns the group that the path of a request names.
func (s *Server) group(r *http.Request) jetstream.Group {
	return s.cfg.Groups.Group(pathTarget(r))
}

// onGroup serves a request about a group. An error of do is answered as s.fail does.
func (s *Server) onGroup(what, failed string, do func(ctx context.Context, w http.ResponseWriter, r *http.Request) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if fault := checkQuery(r.URL.Query()); fault != "" {
			badQuery(w, fault)
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), groupTimeout)
		defer cancel()
		said, err := do(ctx, w, r)
		switch {
		case err != nil:
			s.fail(w, r, err, what, failed)
		case said != nil:
			answer(w, said)
		default:
			w.WriteHeader(http.StatusNoContent)
		}
	}
}

// groupRoutes are the routes about groups.
func (s *Server) groupRoutes() []route {
	off := s.cfg.Groups == nil
	const one, marks = "/groups/{topic}/{group}", "/groups/{topic}/{group}/bookmarks"
	const group, bookmark = "group on this topic", "bookmark, or no such group on this topic"
	type ctx = context.Context
	type writer = http.ResponseWriter
	type request = *http.Request
	return []route{
		{http.MethodGet, "/groups", lists, QueryTarget, s.listGroups, off},
		{http.MethodGet, one, shows, pathTarget, s.onGroup(group, "read the group", func(c ctx, _ writer, r request) (any, error) {
			return s.group(r).Info(c)
		}), off},
		{http.MethodDelete, one, changes, pathTarget, s.onGroup(group, "delete the group", func(c ctx, _ writer, r request) (any, error) {
			return nil, s.group(r).Delete(c)
		}), off},
		{http.MethodGet, one + "/cursor", shows, pathTarget, s.onGroup(group, "read the cursor", s.readCursor), off},
		{http.MethodPut, one + "/cursor", changes, pathTarget, s.moveGroup, off},
		{http.MethodPost, one + "/pause", changes, pathTarget, s.onGroup(group, "pause the group", func(c ctx, _ writer, r request) (any, error) {
			return nil, s.group(r).Pause(c)
		}), off},
		{http.MethodPost, one + "/resume", changes, pathTarget, s.onGroup(group, "resume the group", func(c ctx, _ writer, r request) (any, error) {
			return nil, s.group(r).Resume(c)
		}), off},
		{http.MethodGet, marks, shows, pathTarget, s.onGroup(group, "list the bookmarks", func(c ctx, _ writer, r request) (any, error) {
			list, err := s.group(r).Bookmarks().List(c)
			return map[string]any{"bookmarks": append([]jetstream.Bookmark{}, list...)}, err
		}), off},
		{http.MethodGet, marks + "/{name}", shows, pathTarget, s.onGroup(bookmark, "read the bookmark", func(c ctx, _ writer, r request) (any, error) {
			return s.group(r).Bookmarks().Get(c, pathParam(r, "name"))
		}), off},
		{http.MethodPut, marks + "/{name}", changes, pathTarget, s.onGroup(group, "store the bookmark", func(c ctx, _ writer, r request) (any, error) {
			return s.group(r).Bookmarks().Put(c, pathParam(r, "name"))
		}), off},
		{http.MethodDelete, marks + "/{name}", changes, pathTarget, s.onGroup(bookmark, "delete the bookmark", func(c ctx, _ writer, r request) (any, error) {
			return nil, s.group(r).Bookmarks().Delete(c, pathParam(r, "name"))
		}), off},
	}
}

// groupList is the answer to GET /groups.
type groupList struct {
	Groups []jetstream.GroupInfo `json:"groups"`
	Next   string                `json:"next,omitempty"`
}

// listGroups answers GET /groups.
func (s *Server) listGroups(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	page := jetstream.GroupsPage{Topic: q.Get("topic"), Limit: groupsPage, Next: q.Get("next")}
	if fault := checkQuery(q, "topic", "limit", "next"); fault != "" {
		writeError(w, http.StatusBadRequest, jetstream.CodeBadOptions, fault)
		return
	}
	if q.Has("topic") && page.Topic == "" {
		writeError(w, http.StatusBadRequest, jetstream.CodeBadTopic, "topic is empty; leave it out to list the groups of all topics.")
		return
	}
	if q.Has("limit") {
		n, err := strconv.Atoi(q.Get("limit"))
		if err != nil || n < 1 || n > jetstream.MaxGroupsPage {
			writeError(w, http.StatusBadRequest, jetstream.CodeBadOptions, fmt.Sprintf("limit must be a number from 1 to %d.", jetstream.MaxGroupsPage))
			return
		}
		page.Limit = n
	}
	id := identity(r)
	page.Visible = func(topic, group string) bool { return id.Inspects(topic, group) }
	ctx, cancel := context.WithTimeout(r.Context(), moveTimeout)
	defer cancel()
	var groups []jetstream.GroupInfo
	next, err := "", error(nil)
	if id.InspectsAny() {
		groups, next, err = s.cfg.Groups.Admin().Groups().List(ctx, page)
	}
	if err != nil {
		s.fail(w, r, err, "topic", "list the groups")
		return
	}
	answer(w, groupList{Groups: append([]jetstream.GroupInfo{}, groups...), Next: next})
}

// checkQuery returns what is wrong with the names in a query, or "".
func checkQuery(q url.Values, known ...string) string {
	for name, values := range q {
		if !slices.Contains(known, name) {
			return "The query has the unknown parameter " + strconv.Quote(name) + "."
		}
		if len(values) > 1 {
			return name + " is given more than once."
		}
	}
	return ""
}

// cursor is the answer to GET /groups/{topic}/{group}/cursor.
type cursor struct {
	Topic  string `json:"topic"`
	Group  string `json:"group"`
	LastID string `json:"lastId,omitempty"`
	LastTS int64  `json:"lastTs,omitempty"`
}

func (s *Server) readCursor(ctx context.Context, _ http.ResponseWriter, r *http.Request) (any, error) {
	topic, group := pathTarget(r)
	c, err := s.group(r).Cursor(ctx)
	return cursor{Topic: topic, Group: group, LastID: c.LastID, LastTS: c.LastTS}, err
}

// seek is the body of PUT /groups/{topic}/{group}/cursor.
type seek struct {
	To      string `json:"to"`
	TS      *int64 `json:"ts"`
	AfterID string `json:"afterId"`
	N       *int   `json:"n"`
	Name    string `json:"name"`
	DryRun  bool   `json:"dry_run"`
}

// position returns where the seek goes, or what is wrong with it.
func (b *seek) position() (to jetstream.Position, fault string) {
	given := map[string]bool{"ts": b.TS != nil, "afterId": b.AfterID != "", "n": b.N != nil, "name": b.Name != ""}
	needs := map[string]string{"earliest": "", "latest": "", "ts": "ts", "afterId": "afterId", "back": "n", "bookmark": "name"}
	need, known := needs[b.To]
	if !known {
		return to, "to must be earliest, latest, ts, afterId, back or bookmark."
	}
	for _, name := range []string{"ts", "afterId", "n", "name"} {
		if given[name] && name != need {
			return to, name + " does not go with to " + strconv.Quote(b.To) + "."
		}
	}
	if need != "" && !given[need] {
		return to, need + " is missing: to " + strconv.Quote(b.To) + " needs it."
	}
	switch b.To {
	case "earliest":
		return jetstream.FromEarliest, ""
	case "latest":
		return jetstream.FromLatest, ""
	case "ts":
		if *b.TS < 0 {
			return to, "ts must be epoch milliseconds, 0 or more."
		}
		return jetstream.FromTime(time.UnixMilli(*b.TS)), ""
	case "afterId":
		return jetstream.FromAfterID(b.AfterID), ""
	case "back":
		if *b.N < 1 || *b.N > jetstream.MaxBack {
			return to, fmt.Sprintf("n must be a number from 1 to %d.", jetstream.MaxBack)
		}
		return jetstream.Back(*b.N), ""
	default:
		return jetstream.AtBookmark(b.Name), ""
	}
}

// moved is the answer to PUT /groups/{topic}/{group}/cursor.
type moved struct {
	Redelivered uint64 `json:"redelivered"`
	Skipped     uint64 `json:"skipped"`
	AtMost      bool   `json:"atMost,omitempty"`
}

// moveGroup answers PUT /groups/{topic}/{group}/cursor.
func (s *Server) moveGroup(w http.ResponseWriter, r *http.Request) {
	if fault := checkQuery(r.URL.Query()); fault != "" {
		badQuery(w, fault+" The body says where to move.")
		return
	}
	var body seek
	if !readBody(w, r, &body, false) {
		return
	}
	to, fault := body.position()
	if fault != "" {
		writeError(w, http.StatusBadRequest, jetstream.CodeBadOptions, fault)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), moveTimeout)
	defer cancel()
	move := s.group(r).Move
	if body.DryRun {
		move = s.group(r).Preview
	}
	did, err := move(ctx, to)
	if err != nil {
		what := "group on this topic"
		if body.To == "bookmark" {
			what = "bookmark, or no such group on this topic"
		}
		s.fail(w, r, err, what, "move the group")
		return
	}
	answer(w, moved(did))
}
