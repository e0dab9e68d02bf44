package ops

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"eventhub/jetstream"
	"eventhub/jetstream/topics"
)

// listedNATS is a NATS whose lists change.
type listedNATS struct{ *natsState }

// A topic that was missing from two lists at least 10 s apart has no series any more. When the
// topic is used again, they begin at 0. Totals still count what was there.
func TestSeriesOfGoneTopicsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg := prometheus.NewRegistry()
		m := NewMetrics(reg)
		nats := listedNATS{new(natsState)}
		h := described(t, Config{Bus: busState{}, Registry: reg, Observed: m, NATS: nats, Guard: Guard{Tokens: newVerifier(t)}})
		old, stays := m.Topic("old"), m.Topic("stays")
		group := m.Group("old", "g", false)
		use := func() {
			old.Published(0)
			old.SchemaBroken(true)
			stays.Published(0)
			m.Snapshots("old", 1)
			group.Delivered(1)
			group.Settled(jetstream.Returned, 0, 0)
		}
		use()
		use()
		group.Close()
		began := time.Now()
		// shows scrapes at a time since the start.
		shows := func(at time.Duration, want bool, value string) {
			t.Helper()
			<-time.After(time.Until(began.Add(at)))
			text := scrape(h, "").Body.String()
			for _, series := range []string{
				`events_published_total{topic="old"} `, `eventhub_publish_duration_seconds_count{topic="old"} `, `eventhub_leases_returned_total{topic="old"} `,
				`eventhub_schema_violations_total{action="refused",topic="old"} `, `eventhub_snapshots_total{topic="old"} `,
				`events_delivered_total{group="g",topic="old"} `, `delivery_handler_duration_ms_count{group="g",topic="old"} `,
			} {
				if got := strings.Contains(text, "\n"+series+value+"\n"); got != want {
					t.Errorf("after %v, %s%s is there: %v", at, series, value, got)
				}
			}
			if got := strings.Contains(text, `"old"`); got != want {
				t.Errorf("after %v, the topic is there: %v:\n%s", at, got, text)
			}
			if !strings.Contains(text, "\nevents_published_total{topic=\"stays\"} ") {
				t.Errorf("after %v, the other topic is gone", at)
			}
		}
		nats.gone = []string{"old"}
		shows(0, true, "2")
		nats.gone = nil // for a moment
		shows(11*time.Second, true, "2")
		nats.gone = []string{"old"}
		shows(22*time.Second, true, "2")
		shows(31*time.Second, true, "2")
		nats.err = errors.New("away")
		shows(33*time.Second, true, "2")
		nats.err = nil
		shows(35*time.Second, false, "")
		var totals struct{ Totals map[string]float64 }
		if err := json.Unmarshal(ask(h, http.MethodGet, "/overview", "").Body.Bytes(), &totals); err != nil || totals.Totals["events_published_total"] != 4 || totals.Totals["events_delivered_total"] != 2 {
			t.Errorf("the totals are %v, %v", totals, err)
		}
		group = m.Group("old", "g", false)
		use()
		shows(40*time.Second, true, "1")
	})
}

// Series of topics and groups that NATS has no more end. A topic of a family stays as long as the
// family, and a group with members as long as they.
func TestSeriesEndWithWhatIsInNATS(t *testing.T) {
	bus := openBus(t, topics.Rule{Pattern: "users.*", Family: "users"})
	reg := prometheus.NewRegistry()
	m := NewMetrics(reg)
	s := New(Config{Bus: bus, Registry: reg, Observed: m, Groups: bus, NATS: bus.Admin().NATS(), Guard: Guard{Tokens: newVerifier(t)}})
	for _, topic := range []string{"orders", "bills", "users.a"} {
		letter(t, bus, topic)
		for _, observed := range []string{topic, "dlq." + topic} { // as the bus does
			m.Topic(observed).Published(0)
		}
		m.Group(topic, "g", false).Close()
	}
	m.Group("orders", jetstream.DelayedGroup, false).Close()
	m.Group("bills", jetstream.DelayedGroup, false).Close()
	m.Group("bills", "joins", false)
	series := func() string {
		t.Helper()
		s.swept, s.storage.read = time.Time{}, time.Time{}
		if _, err := s.gather(); err != nil {
			t.Fatal(err)
		}
		shown := gather(t, reg)
		var all []string
		for _, of := range []struct{ metric, label string }{{"events_published_total", ""}, {"events_delivered_total", "/"}} {
			for _, one := range shown[of.metric].GetMetric() {
				all = append(all, label(one, "topic")+of.label+label(one, "group"))
			}
		}
		slices.Sort(all)
		return strings.Join(all, " ")
	}
	twice := func() string {
		t.Helper()
		series()
		for _, e := range m.topics.entries {
			e.absent = e.absent.Add(-goneAfter)
		}
		for _, e := range m.pairs.entries {
			e.absent = e.absent.Add(-goneAfter)
		}
		return series()
	}
	want := func(what, got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("%s, there are\n%s, want\n%s", what, got, want)
		}
	}
	const bills = "bills/eventhub-delayed bills/g bills/joins"
	want("at first", twice(), "bills "+bills+" dlq.bills dlq.orders dlq.users.a orders orders/eventhub-delayed orders/g users.a users.a/g")
	if err := bus.Admin().Topic("orders").Delete(t.Context(), jetstream.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	want("just after the deletion of orders", series(), "bills "+bills+" dlq.bills dlq.orders dlq.users.a orders orders/eventhub-delayed orders/g users.a users.a/g")
	want("after the deletion of orders", twice(), "bills "+bills+" dlq.bills dlq.users.a users.a users.a/g")
	if err := bus.Group("bills", "g").Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	want("after the deletion of a group", twice(), "bills bills/eventhub-delayed bills/joins dlq.bills dlq.users.a users.a users.a/g")
	if _, err := bus.Publish(t.Context(), "orders", []byte(`1`), jetstream.PublishOptions{}); err != nil {
		t.Fatal(err)
	}
	want("after orders was made again", series(), "bills bills/eventhub-delayed bills/joins dlq.bills dlq.users.a orders users.a users.a/g")
}

// A topic or group that shares the series of others gets its own when there is room, and counts
// there what it holds.
func TestSeriesWhenThereIsRoom(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := NewMetrics(reg)
	m.topics.max, m.topics.room, m.pairs.max, m.pairs.room = 1, 2, 1, 2
	has := func(metric string, want float64, labels ...string) {
		t.Helper()
		if got, ok := value(gather(t, reg)[metric], labels...); !ok || got != want {
			t.Errorf("%s of %v is %v (there: %v), want %v", metric, labels, got, ok, want)
		}
	}
	first := m.Group("first", "g", false)
	first.InFlight(1)
	var topics []jetstream.TopicObserver
	var groups []jetstream.GroupObserver
	for _, name := range []string{"second", "third"} { // the table has no room for the third
		topics = append(topics, m.Topic(name))
		groups = append(groups, m.Group(name, "g", false))
	}
	count := func() {
		for i := range topics {
			topics[i].Published(0)
			groups[i].Delivered(1)
			groups[i].InFlight(1)
		}
	}
	count()
	has("events_published_total", 2, OtherLabel)
	has("events_delivered_total", 2, OtherLabel, OtherLabel)
	has("events_inflight", 2, OtherLabel, OtherLabel)
	first.InFlight(-1)
	first.Close()
	for _, gone := range []string{"first", "second"} {
		m.mu.Lock()
		m.topics.drop(gone)
		m.pairs.drop(pair{gone, "g"})
		m.mu.Unlock()
	}
	topics, groups = topics[1:], groups[1:] // the second is used no more
	count()
	has("events_published_total", 1, "third")
	has("events_published_total", 2, OtherLabel)
	has("events_delivered_total", 1, "g", "third")
	has("events_inflight", 2, "g", "third")
	has("events_inflight", 1, OtherLabel, OtherLabel)
}

// Observers may be used while their series end.
func TestSeriesEndWhileTheyAreUsed(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := NewMetrics(reg)
	topic, group := m.Topic("t"), m.Group("t", "g", false)
	var users sync.WaitGroup
	for range 4 {
		users.Go(func() {
			for range 2_000 {
				topic.Published(0)
				topic.SchemaBroken(true)
				group.InFlight(1)
				group.Delivered(1)
				group.Settled(jetstream.Acked, 0, 0)
				group.InFlight(-1)
			}
		})
	}
	for range 200 {
		m.mu.Lock()
		for k := range m.topics.entries {
			m.topics.drop(k)
		}
		for k := range m.pairs.entries {
			m.pairs.drop(k)
		}
		m.mu.Unlock()
		gather(t, reg)
	}
	users.Wait()
	topic.Published(0)
	group.Polled(0)
	shown := gather(t, reg)
	if n, ok := value(shown["events_published_total"], "t"); !ok || n < 1 {
		t.Errorf("%v events are counted, there: %v", n, ok)
	}
	if n, ok := value(shown["events_inflight"], "g", "t"); !ok || n != 0 {
		t.Errorf("%v events are held, there: %v", n, ok)
	}
}

func TestParseSeries(t *testing.T) {
	for text, want := range map[string]Series{"all": AllSeries, "none": NoSeries, "1": 1, "5000": 5000} {
		if got, err := ParseSeries(text); got != want || err != nil {
			t.Errorf("%q is %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "ALL", "0", "-1", "5001", "1.5", "ten", "99999999999999999999"} {
		if _, err := ParseSeries(text); err == nil || err.Error() != fmt.Sprintf("%q: use all, none, or a number from 1 to 5000", text) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// pairsOf returns the pairs of a metric as topic/group, in order.
func pairsOf(f *dto.MetricFamily) string {
	var all []string
	for _, one := range f.GetMetric() {
		all = append(all, label(one, "topic")+"/"+label(one, "group"))
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

// Of the groups, those with the most lag have series of their own, and those whose lag is about the
// same do not take turns. Whatever others count is in the series of other.
func TestSeriesOfTheMostLag(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := NewMetrics(reg)
	m.limit(2)
	lag := func(name string, oldest time.Duration) jetstream.Lag {
		return jetstream.Lag{Topic: "of-" + name, Group: name, OldestUnacked: oldest}
	}
	stuck := func(l jetstream.Lag) jetstream.Lag {
		l.StuckSince = time.Now()
		return l
	}
	waiting := func(l jetstream.Lag) jetstream.Lag {
		l.Pending = 1
		return l
	}
	tabs := func(oldest time.Duration) jetstream.Lag {
		return jetstream.Lag{Topic: "of-a", Group: "tab", Ephemeral: true, OldestUnacked: oldest}
	}
	const s = time.Second
	for _, step := range []struct {
		what string
		lags []jetstream.Lag
		want string
	}{
		{"there is room", []jetstream.Lag{lag("c", 0), lag("d", 0)}, "of-c/c of-d/d"},
		{"no lag", []jetstream.Lag{lag("a", 0), lag("b", 0), lag("c", 0), lag("d", 0)}, "of-c/c of-d/d"},
		{"a little lag", []jetstream.Lag{lag("a", 9*s), lag("b", 0), lag("c", 0), lag("d", 0)}, "of-c/c of-d/d"},
		{"much lag", []jetstream.Lag{lag("a", 20*s), lag("b", 40*s), lag("c", 30*s), lag("d", 0)}, "of-b/b of-c/c"},
		{"a stuck group", []jetstream.Lag{stuck(lag("a", 0)), lag("b", 40*s), lag("c", 30*s), lag("d", 0)}, "of-a/a of-b/b"},
		{"no lags were read", nil, "of-a/a of-b/b"},
		{"groups with a TTL that are of other hubs", []jetstream.Lag{lag("a", 0), lag("b", 40*s), tabs(90 * s), lag("c", 30*s)}, "of-b/b of-c/c"},
		{"a backlog, by the same lag", []jetstream.Lag{lag("a", 90*s), lag("b", 90*s), waiting(lag("c", 70*s)), waiting(lag("d", 90*s))}, "of-b/b of-d/d"},
	} {
		m.exist(nil, step.lags)
		shown := gather(t, reg)
		if got := pairsOf(shown["events_acked_total"]); got != step.want {
			t.Errorf("%s: the groups are %s, want %s", step.what, got, step.want)
		}
		if own := m.chosen(); len(step.lags) > 0 {
			var pairs []string
			for _, l := range summed(step.lags, own) {
				if l.Topic != OtherLabel {
					pairs = append(pairs, l.Topic+"/"+l.Group)
				}
			}
			if got := strings.Join(pairs, " "); got != step.want {
				t.Errorf("%s: the lags are of %s, want %s", step.what, got, step.want)
			}
		}
		if n := len(shown["events_published_total"].GetMetric()); n != 2 {
			t.Errorf("%s: %d topics have series", step.what, n)
		}
	}
	tab := m.Group("of-a", "tab", true)
	m.exist(nil, []jetstream.Lag{lag("a", 0), lag("d", 30*s), tabs(90 * s)})
	tab.Delivered(1)
	shown := gather(t, reg)
	if n, _ := value(shown["events_delivered_total"], EphemeralLabel, "of-a"); n != 1 {
		t.Errorf("the groups with a TTL of this hub were given %v events, and there are %s", n, pairsOf(shown["events_delivered_total"]))
	}
	if n, _ := value(shown["eventhub_limit_reached_total"], limitPairs); n != 0 {
		t.Errorf("a limit was reached %v times", n)
	}
}

// A hub shows the topics and groups that the setting allows, and the sums are the same.
func TestSeriesOfAHub(t *testing.T) {
	bus := openBus(t, topics.Rule{Pattern: "**", MaxBytes: 1 << 20, OnFull: topics.OnFullReject})
	for _, topic := range []string{"a", "b", "c"} {
		if err := bus.Group(topic, "g").Seek(t.Context(), jetstream.FromEarliest); err != nil {
			t.Fatal(err)
		}
		if topic != "b" {
			continue
		}
		for range 3 {
			if _, err := bus.Publish(t.Context(), topic, []byte(`1`), jetstream.PublishOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, c := range []struct{ setting, topics, groups, lags, streams string }{
		{"all", "a/ b/ c/", "a/g b/g c/g", "a/g b/g c/g", "a b c"},
		{"1", "b/ other/", "b/g other/other", "b/g other/other", "b other"},
		{"none", "other/", "other/other", "other/other", "other"},
	} {
		series, err := ParseSeries(c.setting)
		if err != nil {
			t.Fatal(err)
		}
		reg := prometheus.NewRegistry()
		m := NewMetrics(reg)
		observers := make(map[string]jetstream.TopicObserver)
		groups := make(map[string]jetstream.GroupObserver)
		observe := func() {
			for _, topic := range []string{"a", "b", "c"} {
				observers[topic], groups[topic] = m.Topic(topic), m.Group(topic, "g", false)
			}
		}
		if series == NoSeries {
			observe() // before the setting is known
		}
		s := New(Config{Bus: bus, Registry: reg, Observed: m, Series: series, Groups: bus, NATS: bus.Admin().NATS(), Guard: Guard{Tokens: newVerifier(t)}})
		collect := func() map[string]*dto.MetricFamily {
			t.Helper()
			all, err := s.gather()
			if err != nil {
				t.Fatal(err)
			}
			shown := make(map[string]*dto.MetricFamily)
			for _, f := range all {
				shown[f.GetName()] = f
			}
			return shown
		}
		collect()
		if series != NoSeries {
			observe()
		}
		for topic := range observers {
			observers[topic].Published(0)
			groups[topic].Delivered(1)
			groups[topic].InFlight(1)
		}
		shown := collect()
		for metric, want := range map[string]string{
			"events_published_total": c.topics, "events_delivered_total": c.groups, "events_inflight": c.groups, "eventhub_group_pending": c.lags,
		} {
			if got := pairsOf(shown[metric]); got != want {
				t.Errorf("%s: %s has %s, want %s", c.setting, metric, got, want)
			}
			if sum := total(shown[metric]); sum != 3 {
				t.Errorf("%s: the sum of %s is %v", c.setting, metric, sum)
			}
		}
		var streams []string
		for _, one := range shown["eventhub_stream_left_bytes"].GetMetric() {
			streams = append(streams, label(one, "stream"))
		}
		if got := strings.Join(streams, " "); got != c.streams {
			t.Errorf("%s: the streams are %s, want %s", c.setting, got, c.streams)
		}
	}
}

// TestOthersTakeNoSeries has more topics come than may have series of their own, with more lag than
// those that have them. These keep them, unless a number of series was chosen.
func TestOthersTakeNoSeries(t *testing.T) {
	for _, ranked := range []bool{false, true} {
		ended := 0
		series := table[string, struct{}]{
			max: 2, ranked: ranked, room: 10, other: OtherLabel, compare: strings.Compare, entries: make(map[string]*entry[struct{}]),
			resolve: func(string) struct{} { return struct{}{} }, end: func(string) { ended++ },
		}
		series.choose([]string{"first", "second"}, nil)
		late := rank{oldest: time.Hour, backlog: 1000}
		series.choose([]string{"first", "second", "a", "b"}, map[string]rank{"a": late, "b": late})
		if want := map[bool]int{false: 0, true: 2}[ranked]; ended != want {
			t.Errorf("ranked is %v: %d topics lost their series, want %d", ranked, ended, want)
		}
	}
}
