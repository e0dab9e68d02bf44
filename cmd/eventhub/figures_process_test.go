//go:build unix

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// groupName is a group of a topic.
type groupName struct{ topic, group string }

// groupFigures are the counts of a group.
type groupFigures struct{ pending, inFlight uint64 }

// getJSON asks the operations port of a hub, and decodes the answer.
func (n *node) getJSON(path string, into any) {
	n.t.Helper()
	status, body := request(n.t, http.MethodGet, n.ops+path, nodeToken)
	if status != http.StatusOK {
		n.t.Fatalf("%s was answered with %d %.300s", path, status, body)
	}
	if err := json.Unmarshal([]byte(body), into); err != nil {
		n.t.Fatalf("%s: %v", path, err)
	}
}

// listedFigures are those of GET /groups, which the dashboard reads.
func (n *node) listedFigures() map[groupName]groupFigures {
	n.t.Helper()
	all := make(map[groupName]groupFigures)
	for next := ""; ; {
		var page struct {
			Groups []jetstream.GroupInfo
			Next   string
		}
		n.getJSON("/groups?limit=500&next="+next, &page)
		for i := range page.Groups {
			g := &page.Groups[i]
			all[groupName{g.Topic, g.Group}] = groupFigures{g.Pending, g.InFlight}
		}
		if next = page.Next; next == "" {
			return all
		}
	}
}

// lagAnswer is what /lag answers.
type lagAnswer struct {
	LagMS    int64  `json:"lagMs"`
	Pending  uint64 `json:"pending"`
	InFlight uint64 `json:"inflight"`
	Backlog  uint64 `json:"backlog"`
}

// lagOf asks a hub for the lag of a group.
func (n *node) lagOf(at groupName) (answer lagAnswer) {
	n.t.Helper()
	n.getJSON("/lag?"+url.Values{"topic": {at.topic}, "group": {at.group}}.Encode(), &answer)
	if answer.Backlog != answer.Pending+answer.InFlight {
		n.t.Errorf("%v has the backlog %d, with %d pending and %d in flight", at, answer.Backlog, answer.Pending, answer.InFlight)
	}
	return answer
}

var figureLine = regexp.MustCompile(`(?m)^eventhub_group_(pending|unacked)\{group="([^"]*)",topic="([^"]*)"\} (\S+)$`)

// metricFigures reads the figures of groups in the text of /metrics.
func metricFigures(t *testing.T, text string) map[groupName]groupFigures {
	t.Helper()
	all := make(map[groupName]groupFigures)
	for _, m := range figureLine.FindAllStringSubmatch(text, -1) {
		value, err := strconv.ParseFloat(m[4], 64)
		if err != nil {
			t.Fatalf("%s: %v", m[0], err)
		}
		at := groupName{m[3], m[2]}
		f := all[at]
		if m[1] == "pending" {
			f.pending = uint64(value)
		} else {
			f.inFlight = uint64(value)
		}
		all[at] = f
	}
	return all
}

// serverFigures are those of the consumers themselves, each asked for on its own: a group has one
// in the stream of its topic, and perhaps one for events that were put back.
func serverFigures(ctx context.Context, v *natstest.View) (map[groupName]groupFigures, error) {
	all := make(map[groupName]groupFigures)
	streams := v.JS.StreamNames(ctx)
	for stream := range streams.Name() {
		if strings.HasPrefix(stream, "KV_") {
			continue
		}
		s, err := v.JS.Stream(ctx, stream)
		if err != nil {
			return nil, err
		}
		names := s.ConsumerNames(ctx)
		for name := range names.Name() {
			c, err := s.Consumer(ctx, name)
			if err != nil {
				return nil, fmt.Errorf("consumer %s: %w", name, err)
			}
			info := c.CachedInfo()
			at := groupName{info.Config.Metadata["eventhub.topic"], info.Config.Metadata["eventhub.group"]}
			if at.topic == "" {
				continue
			}
			f := all[at]
			f.pending += info.NumPending
			f.inFlight += uint64(max(info.NumAckPending, 0))
			all[at] = f
		}
		if err := names.Err(); err != nil {
			return nil, err
		}
	}
	return all, streams.Err()
}
