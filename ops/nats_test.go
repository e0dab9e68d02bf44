package ops

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/facade"
	"eventhub/jetstream"
)

// GET /nats pages through all streams, and adds them up for each server.
func TestStreamsOfNATS(t *testing.T) {
	t.Parallel()
	bus := openBus(t)
	for _, topic := range []string{"a", "b", "c"} {
		fill(t, bus, topic, 2)
	}
	h := described(t, Config{Bus: bus, Registry: prometheus.NewRegistry(), NATS: bus.Admin().NATS(), Guard: Guard{Tokens: newVerifier(t)}, Status: facade.StatusOf})
	var page natsPage
	var streams []natsStream
	for next := "/nats?limit=2"; next != ""; {
		w := ask(h, http.MethodGet, next, "Bearer "+tokenFor(t, "inspect:"+NATSTopic))
		page = natsPage{}
		if err := json.Unmarshal(w.Body.Bytes(), &page); err != nil || w.Code != http.StatusOK || page.Count != len(page.Streams) || page.Count > 2 {
			t.Fatalf("%d %s, %v", w.Code, w.Body, err)
		}
		streams = append(streams, page.Streams...)
		if next = page.Next; next != "" {
			next = "/nats?limit=2&next=" + next
		}
	}
	at := slices.IndexFunc(streams, func(s natsStream) bool { return s.Topic == "b" })
	if at < 0 || len(streams) != page.Total || streams[at].Events != 2 || streams[at].Leader == "" || len(streams[at].Copies) != 1 || !streams[at].Copies[0].Current {
		t.Errorf("of %d streams, b is at %d: %+v", page.Total, at, streams)
	}
	if len(page.Servers) != 1 || page.Servers[0].Leads != page.Total || page.Servers[0].Server != streams[at].Leader {
		t.Errorf("the servers are %+v", page.Servers)
	}
	if page.File.Left == nil || *page.File.Left == 0 {
		t.Errorf("the disk has %v left", page.File.Left)
	}
	if w := ask(h, http.MethodGet, "/nats", "Bearer "+tokenFor(t, "inspect:orders")); w.Code != http.StatusForbidden {
		t.Errorf("a token of a topic was answered with %d", w.Code)
	}
}

// A stream without a leader, and copies that are behind or away, are told apart.
func TestServersOfStreams(t *testing.T) {
	all := []jetstream.Placement{
		{Stream: "s", Leader: "one", Bytes: 10, Servers: []jetstream.Replica{{Server: "one", Current: true}, {Server: "two", Lag: 7}, {Server: "three", Offline: true}}},
		{Stream: "t", Bytes: 1, Servers: []jetstream.Replica{{Server: "two", Current: true}}},
	}
	want := []natsServer{{"four", 0, 0, 0, 0, 0}, {"one", 1, 1, 0, 0, 10}, {"three", 0, 1, 0, 1, 10}, {"two", 0, 2, 1, 0, 11}}
	if got := serversOf(all, "four"); !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := storageOf(3, 10, 7); got.Left == nil || *got.Left != 7 {
		t.Errorf("of 10 bytes, %v is left", got.Left)
	}
	if got := storageOf(3, -1, -1); got.Left != nil {
		t.Errorf("without a bound, %d is left", *got.Left)
	}
}

// The rate of a stream is known from the second request on, and not taken over less than a second.
func TestRates(t *testing.T) {
	var k rates
	now := time.Now()
	at := func(after time.Duration, stored uint64) map[string]float64 {
		return k.of([]jetstream.TopicStatus{{Stream: "s", Stored: stored}}, now.Add(after))
	}
	if got := at(0, 100); len(got) != 0 {
		t.Errorf("at first, the rate is %v", got)
	}
	if got := at(2*time.Second, 120)["s"]; got != 10 {
		t.Errorf("the rate is %v, want 10", got)
	}
	if got := at(2*time.Second+time.Millisecond, 130)["s"]; got != 10 {
		t.Errorf("a millisecond later, the rate is %v, want 10 still", got)
	}
	if got := at(4*time.Second, 120)["s"]; got != 0 {
		t.Errorf("without events, the rate is %v", got)
	}
	if got, ok := at(6*time.Second, 3)["s"]; ok {
		t.Errorf("of a stream that was created again, the rate is %v", got)
	}
}

// parkedBox is an outbox with one parked record on each of two topics.
type parkedBox struct{}

func (parkedBox) List(_ context.Context, name string, q RecordQuery) ([]OutboxRecord, error) {
	if name != "box" {
		return nil, jetstream.ErrNotFound
	}
	all := []OutboxRecord{
		{ID: "1", Topic: "open", Key: "k", Err: "no", Sequence: 1, Status: q.Status, Payload: []byte(`{"n":1}`), Headers: map[string]string{"a": "b"}},
		{ID: "2", Topic: "secret", Key: "k", Err: "no", Sequence: 2, Status: q.Status, Payload: []byte(`{"n":2}`), Headers: map[string]string{"c": "d"}},
	}
	return all[:min(q.Limit, len(all))], nil
}

func (parkedBox) Retry(_ context.Context, _, id string) (int, error) {
	return map[string]int{"": 2, "1": 1}[id], nil
}

func (parkedBox) Discard(_ context.Context, _, topic, id string) (int, error) {
	return map[string]int{"open 1": 1}[topic+" "+id], nil
}

// Records are listed and changed with rights on eventhub.outbox. Payloads need rights on the topic,
// too.
func TestRecordsOfAnOutbox(t *testing.T) {
	h := described(t, Config{Bus: busState{}, Registry: prometheus.NewRegistry(), Outboxes: parkedBox{}, Guard: Guard{Tokens: newVerifier(t)}, Status: facade.StatusOf})
	for _, tt := range []struct {
		method, path, scope string
		status              int
		want                string
	}{
		{"GET", "/outboxes/box", "admin:open", 403, "forbidden"},
		{"GET", "/outboxes/none", "inspect:eventhub.outbox", 404, "There is no such outbox on this hub."},
		{"GET", "/outboxes/box?limit=1", "inspect:eventhub.outbox", 200, `"count":1,"records":[{"id":"1","topic":"open","sequence":1,"status":"error","attempts":0,"addedTs":0}],"more":true`},
		{"GET", "/outboxes/box?status=sent", "inspect:eventhub.outbox subscribe:open", 200, `{"id":"1","topic":"open","key":"k","sequence":1,"status":"sent","attempts":0,"err":"no","addedTs":0,"payload":{"n":1},"headers":{"a":"b"}},{"id":"2","topic":"secret","sequence":2,"status":"sent","attempts":0,"addedTs":0}]`},
		{"GET", "/outboxes/box?status=parked", "inspect:eventhub.outbox", 400, "status must be"},
		{"POST", "/outboxes/box/retry?id=1", "inspect:eventhub.outbox", 403, "forbidden"},
		{"POST", "/outboxes/box/retry?id=1", "admin:eventhub.outbox", 200, `{"outbox":"box","done":1}`},
		{"POST", "/outboxes/box/retry?all=1", "admin:eventhub.outbox", 200, `{"outbox":"box","done":2}`},
		{"POST", "/outboxes/box/retry?id=3", "admin:eventhub.outbox", 404, "There is no such parked record"},
		{"POST", "/outboxes/box/retry", "admin:eventhub.outbox", 400, "Give id"},
		{"POST", "/outboxes/box/discard?topic=open&id=1", "admin:eventhub.outbox", 200, `{"outbox":"box","done":1}`},
		{"POST", "/outboxes/box/discard?topic=secret&id=1", "admin:eventhub.outbox", 404, "There is no such parked record"},
		{"POST", "/outboxes/box/discard?id=1", "admin:eventhub.outbox", 400, "Give the topic"},
	} {
		w := ask(h, tt.method, tt.path, "Bearer "+tokenFor(t, strings.Fields(tt.scope)...))
		if w.Code != tt.status || !strings.Contains(w.Body.String(), tt.want) {
			t.Errorf("%s %s with %s: %d %s, want %d %s", tt.method, tt.path, tt.scope, w.Code, w.Body, tt.status, tt.want)
		}
	}
}

// An event is found by its id, and by nothing that merely tells a place.
func TestEventByID(t *testing.T) {
	t.Parallel()
	bus := openBus(t)
	ids := fill(t, bus, "orders", 3)
	h := described(t, Config{Bus: busState{}, Registry: prometheus.NewRegistry(), Events: bus, Guard: Guard{Tokens: newVerifier(t)}, Status: facade.StatusOf})
	for _, tt := range []struct {
		query  string
		status int
		want   string
	}{
		{"topic=orders&id=" + ids[1], 200, `"count":1,"events":[{"id":"` + ids[1] + `"`},
		{"topic=orders&id=00000000-0000-7000-8000-000000000000", 404, "There is no such event on this topic."},
		{"topic=orders&id=none", 404, "There is no such event on this topic."},
		{"topic=orders&id=orders@99", 404, "There is no such event on this topic."},
		{"topic=none&id=" + ids[1], 404, "There is no such event on this topic."},
		{"topic=orders&id=" + ids[1] + "&key=k", 400, "bad_options"},
	} {
		w := ask(h, http.MethodGet, "/events?"+tt.query, "Bearer "+tokenFor(t, "subscribe:**"))
		if w.Code != tt.status || !strings.Contains(w.Body.String(), tt.want) {
			t.Errorf("%s: %d %s, want %d %s", tt.query, w.Code, w.Body, tt.status, tt.want)
		}
	}
}
