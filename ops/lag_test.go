package ops

import (
	"fmt"
	"log/slog"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

func openBus(t *testing.T, topics ...topics.Rule) *jetstream.Bus {
	t.Helper()
	bus, err := jetstream.Open(t.Context(), jetstream.Config{Server: natstest.Embed(t, t.TempDir()), Topics: topics})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bus.Close() })
	return bus
}

// The figures of a group are equal in /lag, /cursors, /metrics and the group itself.
func TestLag(t *testing.T) {
	t.Parallel()
	bus := openBus(t)
	reg := prometheus.NewRegistry()
	lags := prometheus.NewRegistry()
	registerLags(lags, bus, slog.New(slog.DiscardHandler), nil)
	h := described(t, Config{Bus: busState{}, Registry: reg, Groups: bus, Events: bus, Guard: Guard{Tokens: newVerifier(t)}, Status: facade.StatusOf})
	get := func(path string) (status int, body string) {
		t.Helper()
		w := ask(h, http.MethodGet, path, "")
		return w.Code, strings.TrimSpace(w.Body.String())
	}
	var ids []string
	publish := func() {
		t.Helper()
		r, err := bus.Publish(t.Context(), "orders", []byte(`1`), jetstream.PublishOptions{})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, r.ID)
	}
	publish()
	if err := bus.Group("orders", "billing").Seek(t.Context(), jetstream.FromEarliest); err != nil {
		t.Fatal(err)
	}
	held := make(chan *jetstream.Held, 10)
	sub, err := bus.Subscribe(t.Context(), "orders", "billing", jetstream.SubscribeOptions{MaxInFlight: 2}, func(h *jetstream.Held) { held <- h })
	if err != nil {
		t.Fatal(err)
	}
	for range 4 {
		publish()
	}
	take := func() *jetstream.Held {
		t.Helper()
		select {
		case h := <-held:
			return h
		case <-time.After(10 * time.Second):
			t.Fatal("no event came")
			return nil
		}
	}
	first := take()
	take()
	await := func(what string, is func() bool) {
		t.Helper()
		for end := time.Now().Add(10 * time.Second); !is(); <-time.After(5 * time.Millisecond) {
			if time.Now().After(end) {
				_, body := get("/lag?topic=orders&group=billing")
				t.Fatalf("waited in vain: %s: %s", what, body)
			}
		}
	}
	var body string
	want := fmt.Sprintf(`"lastCursor":null,"tail":%q`, ids[4])
	await("all events count before an ack", func() bool {
		var status int
		status, body = get("/lag?topic=orders&group=billing")
		return status == 200 && strings.Contains(body, want) && strings.Contains(body, `"backlog":5`)
	})
	if _, ok := first.Begin(); !ok || !sub.Ack(first.Event.ID) {
		t.Fatal("the event is not leased")
	}
	take() // the figures stand still from now on
	await("the ack counts", func() bool {
		_, body = get("/lag?topic=orders&group=billing")
		return strings.Contains(body, `"backlog":4`)
	})
	shape := fmt.Sprintf(`^\{"topic":"orders","group":"billing","lastCursor":\{"topic":"orders","lastId":"%s","lastTs":\d+\},"tail":"%s","lagMs":\d+,"pending":2,"inflight":2,"backlog":4,"oldestUnackedMs":\d+\}$`, ids[0], ids[4])
	if !regexp.MustCompile(shape).MatchString(body) {
		t.Errorf("got %s, want %s", body, shape)
	}
	if status, body := get("/cursors?topic=orders"); status != 200 || !strings.Contains(body, `{"topic":"orders","cursors":[{"group":"billing","lastId":"`+ids[0]+`","lastTs":`) {
		t.Errorf("cursors: %d %s", status, body)
	}
	info, err := bus.Group("orders", "billing").Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	all, err := bus.Admin().Groups().Lags(t.Context(), 10)
	if err != nil || all.More || all.Unknown != 0 || len(all.Lags) != 1 || all.Lags[0].Pending != info.Pending || all.Lags[0].InFlight != info.InFlight || all.Lags[0].OldestUnacked <= 0 {
		t.Errorf("all lags are %+v, %v; the group is %+v", all, err, info)
	}
	await("the metrics show the same", func() bool {
		shown := gather(t, lags)
		pending, _ := value(shown["eventhub_group_pending"], "billing", "orders")
		unacked, _ := value(shown["eventhub_group_unacked"], "billing", "orders")
		oldest, _ := value(shown["eventhub_group_oldest_unacked_seconds"], "billing", "orders")
		return pending+unacked == 4 && oldest > 0
	})
	for path, want := range map[string]string{
		"/lag?topic=orders&group=none":  `404 {"error":"There is no such group on this topic.","code":"not_found"}`,
		"/lag?topic=none&group=billing": `404 {"error":"There is no such group on this topic.","code":"not_found"}`,
		"/lag?topic=orders":             `400 {"error":"topic and group required","code":"bad_options"}`,
		"/lag?group=billing":            `400 {"error":"topic required","code":"bad_topic"}`,
		"/cursors":                      `400 {"error":"topic required","code":"bad_topic"}`,
		"/cursors?topic=none":           `200 {"topic":"none","cursors":[]}`,
	} {
		if status, body := get(path); fmt.Sprint(status, " ", body) != want {
			t.Errorf("%s: %d %s, want %s", path, status, body, want)
		}
	}
}
