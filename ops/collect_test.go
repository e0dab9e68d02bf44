package ops

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/jetstream"
	"eventhub/jetstream/topics"
)

// natsState is a NATS as it says of itself.
type natsState struct {
	info    jetstream.ServerInfo
	streams []jetstream.StreamStorage
	gone    []string
	err     error
}

func (n natsState) Info(context.Context) (jetstream.ServerInfo, error) { return n.info, n.err }

func (n natsState) Placements(context.Context) ([]jetstream.Placement, error) { return nil, n.err }

func (n natsState) Gone(context.Context, []string) ([]string, error) { return n.gone, n.err }

func (n natsState) Streams(context.Context) ([]jetstream.StreamStorage, error) {
	return n.streams, n.err
}

// states returns the metrics of a server.
func states(t *testing.T, cfg Config) func(name string, labels ...string) (float64, bool) {
	t.Helper()
	cfg.Registry = prometheus.NewRegistry()
	New(cfg)
	shown := gather(t, cfg.Registry)
	return func(name string, labels ...string) (float64, bool) { return value(shown[name], labels...) }
}

func TestReadinessIsShown(t *testing.T) {
	for want, cfg := range map[float64]Config{
		1: {Bus: busState{}},
		0: {Bus: busState{}, Ready: func() error { return errors.New("draining") }},
	} {
		if got, ok := states(t, cfg)("eventhub_ready"); !ok || got != want {
			t.Errorf("eventhub_ready is %v, want %v", got, want)
		}
	}
	if got, ok := states(t, Config{Bus: busState{errors.New("away")}})("eventhub_ready"); !ok || got != 0 {
		t.Errorf("eventhub_ready is %v without NATS, want 0", got)
	}
}

// Storage without a bound has +Inf left; storage of a NATS that does not answer has no series.
func TestStorageIsShown(t *testing.T) {
	nats := natsState{
		info: jetstream.ServerInfo{FileBytes: 10, FileLeft: 90, MemoryBytes: 5, MemoryLeft: -1},
		streams: []jetstream.StreamStorage{
			{Stream: "a", Topic: "a", Bytes: 30, MaxBytes: 100, OnFull: topics.OnFullReject},
			{Stream: "b", Topic: "b", Bytes: 130, MaxBytes: 100, OnFull: topics.OnFullDrop},
			{Stream: "c", Topic: "c", Bytes: 30},
		},
	}
	shown := states(t, Config{Bus: busState{}, NATS: nats})
	for _, c := range []struct {
		name   string
		labels []string
		want   float64
	}{
		{"eventhub_storage_used_bytes", []string{"file"}, 10},
		{"eventhub_storage_left_bytes", []string{"file"}, 90},
		{"eventhub_storage_used_bytes", []string{"memory"}, 5},
		{"eventhub_storage_left_bytes", []string{"memory"}, math.Inf(1)},
		{"eventhub_stream_bytes", []string{"reject", "a"}, 30},
		{"eventhub_stream_left_bytes", []string{"reject", "a"}, 70},
		{"eventhub_stream_left_bytes", []string{"drop", "b"}, 0},
	} {
		if got, ok := shown(c.name, c.labels...); !ok || got != c.want {
			t.Errorf("%s %v is %v (there: %v), want %v", c.name, c.labels, got, ok, c.want)
		}
	}
	if _, ok := shown("eventhub_stream_bytes", "drop", "c"); ok {
		t.Error("a stream without a bound has a series")
	}
	nats.err = errors.New("away")
	shown = states(t, Config{Bus: busState{}, NATS: nats})
	if got, ok := shown("eventhub_storage_left_bytes", "file"); ok {
		t.Errorf("a NATS that does not answer has %v bytes left", got)
	}
}

// JSON has no infinity, and the overview is there all the same.
func TestOverviewWithoutABound(t *testing.T) {
	h := described(t, Config{
		Bus: busState{}, Registry: prometheus.NewRegistry(), Events: openBus(t), NATS: natsState{info: jetstream.ServerInfo{FileLeft: -1, MemoryLeft: -1, FileBytes: 7}},
		Guard: Guard{Tokens: newVerifier(t)},
	})
	if w := ask(h, http.MethodGet, "/overview", ""); w.Code != http.StatusOK || !strings.Contains(w.Body.String(), `"eventhub_storage_used_bytes":7`) {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// Beyond a number, the streams with the largest part left share a label for each OnFull, which
// shows the fullest of them.
func TestStreamsAreBounded(t *testing.T) {
	var all []jetstream.StreamStorage
	for i := range MaxTopics + 3 {
		s := jetstream.StreamStorage{Stream: strconv.Itoa(i), Bytes: 1, MaxBytes: int64(100 + i), OnFull: topics.OnFullDrop}
		if i%2 == 0 {
			s.OnFull = topics.OnFullReject
		}
		all = append(all, s)
	}
	got := bounded(all, MaxTopics)
	if len(got) != MaxTopics+2 {
		t.Fatalf("%d streams are shown", len(got))
	}
	for _, s := range got[MaxTopics:] {
		want := jetstream.StreamStorage{Stream: OtherLabel, Bytes: 1, MaxBytes: 101 + MaxTopics, OnFull: topics.OnFullDrop}
		if s.OnFull == topics.OnFullReject {
			want = jetstream.StreamStorage{Stream: OtherLabel, Bytes: 1, MaxBytes: 100 + MaxTopics, OnFull: topics.OnFullReject}
		}
		if s != want {
			t.Errorf("the rest is %+v, want %+v", s, want)
		}
	}
	large := jetstream.StreamStorage{Stream: "large", Topic: "large", Bytes: 95e9, MaxBytes: 100e9, OnFull: topics.OnFullReject}
	named := jetstream.StreamStorage{Stream: OtherLabel, Topic: OtherLabel, Bytes: 99, MaxBytes: 100, OnFull: topics.OnFullReject}
	if got := bounded(append(all, named, large), 1); len(got) != 3 || got[0] != large {
		t.Errorf("of one stream and the rest, there are %+v", got)
	}
}

// Groups beyond MaxPairs share one label, and so do all groups with a TTL of a topic.
func TestLagsAreBounded(t *testing.T) {
	all := []jetstream.Lag{{Topic: "t", Group: "tab", Ephemeral: true, Pending: 1}}
	for i := range MaxPairs + 2 {
		all = append(all, jetstream.Lag{Topic: "t", Group: strconv.Itoa(i), Pending: 1, OldestUnacked: 1})
	}
	all = append(all, jetstream.Lag{Topic: "t", Group: EphemeralLabel, Pending: 1}, jetstream.Lag{Topic: "u", Group: "tab3", Ephemeral: true, Pending: 1})
	got := summed(all, func(pair) bool { return true })
	if len(got) != MaxPairs+2 || got[0] != (jetstream.Lag{Topic: "t", Group: EphemeralLabel, Pending: 2}) {
		t.Fatalf("%d groups are shown, the first is %+v", len(got), got[0])
	}
	if want := (jetstream.Lag{Topic: OtherLabel, Group: OtherLabel, Pending: 3, OldestUnacked: 1}); got[MaxPairs] != want {
		t.Errorf("the rest is %+v, want %+v", got[MaxPairs], want)
	}
	if want := (jetstream.Lag{Topic: OtherLabel, Group: EphemeralLabel, Pending: 1}); got[MaxPairs+1] != want {
		t.Errorf("the rest of the groups with a TTL is %+v, want %+v", got[MaxPairs+1], want)
	}
}

// Codes that are not known share a label.
func TestCodesAreBounded(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := NewMetrics(reg)
	m.Codes([]string{"forbidden", "internal"}, func(string) int { return http.StatusForbidden }, []int{4000})
	for _, code := range []string{"forbidden", "x1", "x2"} {
		m.ErrorSent(code)
	}
	for code := range 20_000 {
		m.JetStreamError(code)
	}
	shown := gather(t, reg)
	for code, want := range map[string]float64{"forbidden": 1, "internal": 0, OtherLabel: 2} {
		if got, ok := value(shown["eventhub_errors_total"], code); !ok || got != want {
			t.Errorf("%v errors are counted as %s, want %v", got, code, want)
		}
	}
	if n := len(shown["eventhub_errors_total"].GetMetric()); n != 3 {
		t.Errorf("errors have %d series, want 3", n)
	}
	labels := len(jetstreamCodes) + len([]string{"no_responders", "no_reply", OtherLabel})
	if n := len(shown["eventhub_jetstream_errors_total"].GetMetric()); n != labels {
		t.Errorf("errors of JetStream have %d series, want %d", n, labels)
	}
	if got, _ := value(shown["eventhub_jetstream_errors_total"], OtherLabel); got != float64(20_000-labels+1) {
		t.Errorf("%v errors of JetStream are counted as %s", got, OtherLabel)
	}
}

// Topics and groups that exist get their series, within the bounds, and no limit is said to be
// reached by that.
func TestSeriesOfWhatExists(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := NewMetrics(reg)
	var topics []string
	var lags []jetstream.Lag
	for i := range MaxTopics + 5 {
		topics = append(topics, fmt.Sprint("t", i))
	}
	for i := range MaxPairs + 5 {
		lags = append(lags, jetstream.Lag{Topic: "t0", Group: fmt.Sprint("g", i)})
	}
	m.exist(topics, append(lags, jetstream.Lag{Topic: "t0", Group: "tab", Ephemeral: true}))
	shown := gather(t, reg)
	if n := len(shown["events_published_total"].GetMetric()); n != MaxTopics {
		t.Errorf("%d topics have series, want %d", n, MaxTopics)
	}
	if n := len(shown["events_acked_total"].GetMetric()); n != MaxPairs {
		t.Errorf("%d groups have series, want %d", n, MaxPairs)
	}
	for _, limit := range []string{limitTopics, limitPairs} {
		if got, _ := value(shown["eventhub_limit_reached_total"], limit); got != 0 {
			t.Errorf("the limit %s was reached %v times", limit, got)
		}
	}
}
