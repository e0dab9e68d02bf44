package ops

import (
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"eventhub/jetstream"
	"eventhub/jetstream/topics"
)

// use calls every method of every observer once.
func use(m *Metrics) {
	topic := m.Topic("a.b")
	topic.Published(time.Millisecond)
	topic.PublishFailed()
	topic.SchemaBroken(true)
	topic.SchemaUnversioned()
	group := m.Group("a.b", "g", false)
	group.Delivered(1)
	group.InFlight(1)
	group.Polled(time.Millisecond)
	for how := jetstream.Acked; how <= jetstream.Dropped; how++ {
		group.Settled(how, time.Millisecond, time.Second)
	}
	group.Close()
	m.LimitReached("topics")
	m.JetStreamError(10059)
	m.Gauge(jetstream.GaugeConnected, 1)
	m.Gauge(jetstream.GaugeTopics, 1)
	m.Gauge(jetstream.GaugeSubscriptions, 1)
	m.Gauge("unheard_of", 1)
	m.ConnectionOpened()
	m.ConnectionClosed(1000)
	m.FrameReceived("PUBLISH")
	m.Projected("p", "applied")
	m.Snapshots("t", 1)
	m.SpansExported(1)
	m.SpansDropped("queue", 1)
	m.ProjectionStalled("p", time.Second)
	m.ErrorSent("bad_json")
	m.RequestServed(http.StatusOK)
	m.StreamClosed(1006)
	box := m.Outbox("b")
	box.Claimed(1, time.Millisecond)
	box.Published(time.Millisecond, true)
	box.Failed(true)
	box.Backlog(1, 1, time.Second)
}

// gather gives the families of eventhub's own metrics by name.
func gather(t *testing.T, reg *prometheus.Registry) map[string]*dto.MetricFamily {
	t.Helper()
	all, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	own := make(map[string]*dto.MetricFamily)
	for _, f := range all {
		if name := f.GetName(); !strings.HasPrefix(name, "go_") && !strings.HasPrefix(name, "process_") {
			own[name] = f
		}
	}
	return own
}

// value gives the value of a counter or gauge whose label values are those given, in the order of
// the label names, and whether there is such a series.
func value(f *dto.MetricFamily, labels ...string) (float64, bool) {
	for _, m := range f.GetMetric() {
		var have []string
		for _, l := range m.GetLabel() {
			have = append(have, l.GetValue())
		}
		if slices.Equal(have, labels) {
			return m.GetCounter().GetValue() + m.GetGauge().GetValue(), true
		}
	}
	return 0, false
}

// TestTableIsWhatMetricsShows compares the table in the code with what /metrics answers, and with
// METRICS.md.
func TestTableIsWhatMetricsShows(t *testing.T) {
	reg := prometheus.NewRegistry()
	use(NewMetrics(reg))
	bus := openBus(t, topics.Rule{Pattern: "full", MaxBytes: 1 << 20})
	if _, err := bus.Publish(t.Context(), "full", []byte(`1`), jetstream.PublishOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := bus.Group("t", "g").Seek(t.Context(), jetstream.FromEarliest); err != nil {
		t.Fatal(err)
	}
	h := described(t, Config{
		Bus: busState{}, Registry: reg, Groups: bus, NATS: bus.Admin().NATS(), Guard: Guard{Tokens: newVerifier(t)},
		Outbound: func() Outbound { return Outbound{} }, Broadcasts: func() Broadcasts { return Broadcasts{} }, KeysAge: func() time.Duration { return 0 },
	})
	lags := prometheus.NewRegistry()
	registerLags(lags, bus, slog.New(slog.DiscardHandler), nil)
	shown := gather(t, reg)
	maps.Copy(shown, gather(t, lags))
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if rec.Code != http.StatusOK {
		t.Fatalf("/metrics answered %d", rec.Code)
	}
	for _, d := range definitions {
		f, ok := shown[d.name]
		if !ok {
			t.Errorf("%s is in the table but was never observed", d.name)
			continue
		}
		delete(shown, d.name)
		if got := strings.ToLower(f.GetType().String()); got != string(d.kind) {
			t.Errorf("%s is a %s, the table says %s", d.name, got, d.kind)
		}
		if f.GetHelp() != d.help {
			t.Errorf("%s has the help %q, the table says %q", d.name, f.GetHelp(), d.help)
		}
		var labels []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			labels = append(labels, l.GetName())
		}
		want := slices.Sorted(slices.Values(d.labels))
		if !slices.Equal(labels, want) {
			t.Errorf("%s has the labels %v, the table says %v", d.name, labels, want)
		}
		if line := fmt.Sprintf("# TYPE %s %s\n", d.name, d.kind); !strings.Contains(rec.Body.String(), line) {
			t.Errorf("/metrics does not show %q", line)
		}
	}
	for name := range shown {
		t.Errorf("%s is shown but not in the table", name)
	}
	for _, name := range []string{"go_goroutines", "process_resident_memory_bytes"} {
		if !strings.Contains(rec.Body.String(), "\n"+name+" ") {
			t.Errorf("/metrics does not show %s", name)
		}
	}

	doc, err := os.ReadFile("METRICS.md")
	if err != nil {
		t.Fatal(err)
	}
	var rows, want []string
	for line := range strings.Lines(string(doc)) {
		if strings.HasPrefix(line, "| `") {
			rows = append(rows, strings.TrimSpace(line))
		}
	}
	for _, d := range definitions {
		want = append(want, d.row())
	}
	if !slices.Equal(rows, want) {
		t.Errorf("the table in METRICS.md should be:\n%s", strings.Join(want, "\n"))
	}
}

// A group has at most 36 series, because there may be thousands of groups.
func TestSeriesOfAGroup(t *testing.T) {
	n := 0
	for _, d := range definitions {
		switch {
		case !slices.Contains(d.labels, "group"):
		case d.kind == histogram:
			n += len(groupBuckets) + len([]string{"+Inf", "sum", "count"})
		default:
			n++
		}
	}
	if n > 35 {
		t.Errorf("a group has %d series, at most 35 are allowed", n)
	}
}

func TestTableIsSorted(t *testing.T) {
	if !slices.IsSortedFunc(definitions, func(a, b definition) int { return strings.Compare(a.name, b.name) }) {
		t.Error("the table is not sorted by name")
	}
}

func TestOutcomesAreCountedApart(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := NewMetrics(reg)
	group := m.Group("t", "g", false)
	names := map[jetstream.Outcome]string{
		jetstream.Acked:        "events_acked_total",
		jetstream.Nacked:       "events_nacked_total",
		jetstream.Expired:      "eventhub_leases_expired_total",
		jetstream.DeadLettered: "events_dead_lettered_total",
	}
	perTopic := map[jetstream.Outcome]string{
		jetstream.Returned: "eventhub_leases_returned_total",
		jetstream.Dropped:  "eventhub_leases_dropped_total",
	}
	for how := jetstream.Acked; how <= jetstream.Dropped; how++ {
		for range int(how) + 1 {
			group.Settled(how, time.Millisecond, time.Second)
		}
	}
	for attempt := range 3 {
		group.Delivered(attempt + 1)
	}
	group.InFlight(3)
	group.InFlight(-1)
	group.Reset()
	shown := gather(t, reg)
	if got, _ := value(shown["eventhub_group_resets_total"], "g", "t"); got != 1 {
		t.Errorf("eventhub_group_resets_total is %v, want 1", got)
	}
	for how, name := range names {
		if got, _ := value(shown[name], "g", "t"); got != float64(how)+1 {
			t.Errorf("%s is %v, want %v", name, got, float64(how)+1)
		}
	}
	for how, name := range perTopic {
		if got, _ := value(shown[name], "t"); got != float64(how)+1 {
			t.Errorf("%s is %v, want %v", name, got, float64(how)+1)
		}
	}
	for name, want := range map[string]float64{"events_delivered_total": 3, "eventhub_redeliveries_total": 2} {
		if got, _ := value(shown[name], "g", "t"); got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	for _, name := range []string{"events_inflight", "ws_inflight"} {
		if got, _ := value(shown[name], "g", "t"); got != 2 {
			t.Errorf("%s is %v, want 2", name, got)
		}
	}
	// Latency is of acknowledged events alone, the time held of all.
	if n := shown["delivery_latency_ms"].GetMetric()[0].GetHistogram().GetSampleCount(); n != 1 {
		t.Errorf("delivery_latency_ms has %d samples, want 1", n)
	}
	if n := shown["delivery_handler_duration_ms"].GetMetric()[0].GetHistogram().GetSampleCount(); n != 1+2+3+4+5+6 {
		t.Errorf("delivery_handler_duration_ms has %d samples, want 21", n)
	}
}

func TestSeriesAreBounded(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := NewMetrics(reg)
	for i := range MaxTopics + 5 {
		m.Topic(fmt.Sprintf("topic%d", i)).Published(0)
	}
	for i := range MaxPairs + 7 {
		m.Group("topic0", fmt.Sprintf("group%d", i), false).Delivered(1)
	}
	shown := gather(t, reg)
	if n := len(shown["events_published_total"].GetMetric()); n != MaxTopics+1 {
		t.Errorf("%d topics have series, want %d", n, MaxTopics+1)
	}
	if got, _ := value(shown["events_published_total"], OtherLabel); got != 5 {
		t.Errorf("%v publishes are counted under %s, want 5", got, OtherLabel)
	}
	if n := len(shown["events_delivered_total"].GetMetric()); n != MaxPairs+1 {
		t.Errorf("%d pairs have series, want %d", n, MaxPairs+1)
	}
	if got, _ := value(shown["events_delivered_total"], OtherLabel, OtherLabel); got != 7 {
		t.Errorf("%v deliveries are counted under %s, want 7", got, OtherLabel)
	}
	for limit, want := range map[string]float64{limitTopics: 5, limitPairs: 7} {
		if got, _ := value(shown["eventhub_limit_reached_total"], limit); got != want {
			t.Errorf("the limit %s was reached %v times, want %v", limit, got, want)
		}
	}
}

func TestOnlyEphemeralSeriesAreRemoved(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := NewMetrics(reg)
	durable := m.Group("t", "durable", false)
	tab1, tab2 := m.Group("t", "tab-1", true), m.Group("t", "tab-2", true)
	for _, o := range []jetstream.GroupObserver{durable, tab1, tab2} {
		o.Delivered(1)
	}
	if got, _ := value(gather(t, reg)["events_delivered_total"], EphemeralLabel, "t"); got != 2 {
		t.Errorf("%v deliveries are counted under %s, want 2", got, EphemeralLabel)
	}
	durable.Close()
	tab1.Close()
	tab1.Close() // counts once
	if _, ok := value(gather(t, reg)["events_delivered_total"], EphemeralLabel, "t"); !ok {
		t.Error("the ephemeral series went while one of its groups was observed")
	}
	tab2.Close()
	shown := gather(t, reg)
	for _, d := range definitions {
		if !slices.Equal(d.labels, pairLabels) || slices.Contains(lagMetrics, d.name) {
			continue
		}
		if n := len(shown[d.name].GetMetric()); n != 1 {
			t.Errorf("%s has %d series after the last Close, want that of the durable group alone", d.name, n)
		}
	}
}

func TestTrafficLabelsAreBounded(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := NewMetrics(reg)
	for code := range 5_000 {
		m.ConnectionOpened()
		m.ConnectionClosed(code)
	}
	m.FrameReceived("PUBLISH")
	m.FrameReceived("no such op")
	shown := gather(t, reg)
	if n := len(shown["eventhub_connections_closed_total"].GetMetric()); n != 16+200+1 {
		t.Errorf("close codes have %d series, want 217", n)
	}
	if got, _ := value(shown["eventhub_connections"]); got != 0 {
		t.Errorf("%v connections are open, want 0", got)
	}
	if n := len(shown["eventhub_frames_total"].GetMetric()); n != len(ops)+1 {
		t.Errorf("ops have %d series, want %d", n, len(ops)+1)
	}
	for _, op := range []string{"PUBLISH", OtherLabel} {
		if got, _ := value(shown["eventhub_frames_total"], op); got != 1 {
			t.Errorf("%v frames are counted as %s, want 1", got, op)
		}
	}
}

func BenchmarkDeliverAndSettle(b *testing.B) {
	group := NewMetrics(prometheus.NewRegistry()).Group("t", "g", false)
	b.ReportAllocs()
	for b.Loop() {
		group.Delivered(1)
		group.InFlight(1)
		group.Settled(jetstream.Acked, time.Millisecond, time.Millisecond)
		group.InFlight(-1)
	}
}
