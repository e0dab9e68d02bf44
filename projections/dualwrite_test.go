package projections

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/schemas"
	"eventhub/jetstream/topics"
)

// topicSource is the topic that the tests of copies in other versions copy.
const topicSource = "orders"

// sourceRules are the rules of the source, of its copies, and of those of the tests in addition.
func sourceRules(more ...topics.Rule) []topics.Rule {
	return append(more,
		topics.Rule{Pattern: topicSource, Schema: topics.SchemaRule{Mode: topics.SchemaEnforce, Compatibility: "none", Mirrors: []int{1, 2}}},
		topics.Rule{Pattern: topicSource + ".*", Schema: topics.SchemaRule{Mode: topics.SchemaEnforce, Of: topicSource}},
	)
}

// registerVersion registers a version of the source: 1 has the member n, which 2 calls number. A
// document of version 1 without n has no version 2.
func registerVersion(tb testing.TB, bus *jetstream.Bus, version int) {
	tb.Helper()
	draft := schemas.Draft{Schema: json.RawMessage(`{"type":"object","properties":{"n":{"type":"integer"}}}`)}
	if version == 2 {
		draft = schemas.Draft{
			Schema: json.RawMessage(`{"type":"object","required":["number"],"properties":{"number":{"type":"integer"}}}`),
			Up:     json.RawMessage(`[{"rename":{"at":"/n","to":"number","required":true}}]`),
			Down:   json.RawMessage(`[{"rename":{"at":"/number","to":"n"}}]`),
			Force:  true,
		}
	}
	if _, _, err := bus.Schemas().Register(tb.Context(), topicSource, draft); err != nil {
		tb.Fatal(err)
	}
}

func registerVersions(tb testing.TB, bus *jetstream.Bus) {
	tb.Helper()
	registerVersion(tb, bus, 1)
	registerVersion(tb, bus, 2)
}

// startDualWrite copies the source in versions until stop is called, or the test ends.
func startDualWrite(tb testing.TB, bus Bus, versions []int, o Observer) (stop func()) {
	tb.Helper()
	w := NewDualWrite(DualWriteConfig{Bus: bus, Topic: topicSource, Versions: versions, Observer: o, Logger: logs(tb)})
	ctx, cancel := context.WithCancel(context.WithoutCancel(tb.Context()))
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				tb.Errorf("the copies ended with: %v", err)
			}
		case <-time.After(patience):
			tb.Error("the copies do not end")
		}
	})
	tb.Cleanup(stop)
	return stop
}

// publishVersion publishes an event in a version.
func publishVersion(tb testing.TB, bus *jetstream.Bus, version int, payload string, opts jetstream.PublishOptions) {
	tb.Helper()
	opts.Headers = maps.Clone(opts.Headers)
	if opts.Headers == nil {
		opts.Headers = map[string]string{}
	}
	opts.Headers[schemas.VersionHeader] = strconv.Itoa(version)
	if _, err := bus.Publish(tb.Context(), topicSource, []byte(payload), opts); err != nil {
		tb.Fatal(err)
	}
}

// eventsOf are the events of a topic.
func eventsOf(tb testing.TB, bus *jetstream.Bus, topic string) (all []*jetstream.Event) {
	tb.Helper()
	err := bus.History(topic).Scan(tb.Context(), jetstream.ScanOptions{Limit: 1_000_000}, func(e *jetstream.Event) error {
		all = append(all, e)
		return nil
	})
	if err != nil && !errors.Is(err, jetstream.ErrNotFound) {
		tb.Fatal(err)
	}
	return all
}

// awaitCopies waits until the copy in a version has n events, and returns them.
func awaitCopies(tb testing.TB, bus *jetstream.Bus, version, n int) (all []*jetstream.Event) {
	tb.Helper()
	poll(tb, fmt.Sprintf("%d copies in version %d", n, version), func() bool {
		all = eventsOf(tb, bus, topics.Mirror(topicSource, version))
		return len(all) >= n
	})
	return all
}

// copiedAll waits until the group has settled everything.
func copiedAll(tb testing.TB, bus *jetstream.Bus) {
	tb.Helper()
	poll(tb, "the group of the copies has settled everything", func() bool {
		b, err := bus.Group(topicSource, DualWriteGroup).Backlog(tb.Context())
		return err == nil && b.Waiting == 0 && b.Leased == 0 && b.Floor >= b.Tail
	})
}

// wantCopies wants exactly one copy of each event of the source that has one, in order per key.
func wantCopies(tb testing.TB, bus *jetstream.Bus, version int) {
	tb.Helper()
	want := map[string][]string{} // ids by key
	for _, e := range eventsOf(tb, bus, topicSource) {
		want[e.Key] = append(want[e.Key], copyID(e, version))
	}
	got := map[string][]string{}
	for _, e := range eventsOf(tb, bus, topics.Mirror(topicSource, version)) {
		got[e.Key] = append(got[e.Key], e.ID)
	}
	slices.Sort(want[""]) // in no order
	slices.Sort(got[""])
	for key := range want {
		if !slices.Equal(got[key], want[key]) {
			tb.Errorf("key %q has %d copies in version %d, want %d in order", key, len(got[key]), version, len(want[key]))
		}
	}
	if len(got) > len(want) {
		tb.Errorf("%d keys have copies, of %d", len(got), len(want))
	}
}

func TestDualWriteCasts(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{URL: startNATS(t), Topics: sourceRules()})
	registerVersions(t, bus)
	count := newTally()
	startDualWrite(t, JetStream(bus), []int{1, 2}, count)
	publishVersion(t, bus, 1, `{"n":1,"x":[1.50]}`, jetstream.PublishOptions{
		Key: "a", TS: 1234, HasTS: true, SID: "s", Tags: []string{"t"}, CausedBy: []string{"c"}, Headers: map[string]string{"Trace": "y"},
	})
	publishVersion(t, bus, 2, `{"number":2}`, jetstream.PublishOptions{Key: "b"})
	publishVersion(t, bus, 2, ``, jetstream.PublishOptions{Key: "a", Tombstone: true})
	publishVersion(t, bus, 1, `{"n":3}`, jetstream.PublishOptions{})
	sources := eventsOf(t, bus, topicSource)
	for version, payloads := range map[int][]string{
		1: {`{"n":1,"x":[1.50]}`, `{"n":2}`, ``, `{"n":3}`},
		2: {`{"number":1,"x":[1.50]}`, `{"number":2}`, ``, `{"number":3}`},
	} {
		copies := map[string]*jetstream.Event{}
		for _, e := range awaitCopies(t, bus, version, len(sources)) {
			copies[e.ID] = e
		}
		for i, source := range sources {
			got := copies[copyID(source, version)]
			if got == nil {
				t.Errorf("event %d has no copy in version %d", i, version)
				continue
			}
			want := *source
			want.Topic, want.ID, want.Payload = topics.Mirror(topicSource, version), got.ID, []byte(payloads[i])
			want.Stream, want.Sequence, want.StoredAt = got.Stream, got.Sequence, got.StoredAt
			want.Headers = inVersion(source.Headers, version)
			if string(got.Payload) != payloads[i] {
				t.Errorf("copy of event %d in version %d is %s, want %s", i, version, got.Payload, payloads[i])
			}
			got.Payload, want.Payload = nil, nil
			if !reflect.DeepEqual(got, &want) {
				t.Errorf("copy of event %d in version %d is\n%+v, want\n%+v", i, version, got, &want)
			}
		}
		wantCopies(t, bus, version)
	}
	poll(t, "the outcomes are counted", func() bool { return count.outcome(Applied) == 8 })
}

// An event to which a hub adds a version has room for that version in its copies, too.
func TestDualWriteOfManyHeaders(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{URL: startNATS(t), Topics: sourceRules()})
	registerVersions(t, bus)
	count := newTally()
	startDualWrite(t, JetStream(bus), []int{1, 2}, count)
	headers := map[string]string{}
	taken := 0
	for n := range 64 {
		headers[fmt.Sprint("h", n)] = "v"
		if n < 61 {
			continue
		}
		_, err := bus.Publish(t.Context(), topicSource, []byte(`{"number":1}`), jetstream.PublishOptions{Headers: headers})
		if known, ok := errors.AsType[*jetstream.Error](err); err != nil && (!ok || known.Code != jetstream.CodeBadOptions) {
			t.Fatal(err)
		}
		if err == nil {
			taken++
		}
	}
	for version := 1; version <= 2; version++ {
		awaitCopies(t, bus, version, taken)
		wantCopies(t, bus, version)
	}
	if n := count.outcome(Poisoned); n != 0 || taken != 2 {
		t.Errorf("%d of %d events count as poisoned", n, taken)
	}
}

// An event that has no version 2 is copied in version 1 and becomes a dead letter. Others go on.
func TestDualWriteDeadLettersWhatCannotBeCast(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{URL: startNATS(t), Topics: sourceRules()})
	registerVersions(t, bus)
	count := newTally()
	startDualWrite(t, JetStream(bus), []int{1, 2}, count)
	publishVersion(t, bus, 1, `{"other":"secret"}`, jetstream.PublishOptions{Key: "a", ID: "broken"})
	publishVersion(t, bus, 1, `{"n":1}`, jetstream.PublishOptions{Key: "a"})
	publishVersion(t, bus, 1, `{"n":2}`, jetstream.PublishOptions{Key: "b"})
	copies := awaitCopies(t, bus, 2, 1)
	if string(copies[0].Payload) != `{"number":2}` {
		t.Errorf("a key waits for another: %s is the first copy", copies[0].Payload)
	}
	letters := awaitLetters(t, bus, "dlq."+topicSource)
	var letter struct {
		Original struct {
			ID, Key string
			Payload json.RawMessage
		}
		Group string
		Err   string
	}
	if err := json.Unmarshal(letters[0].Payload, &letter); err != nil {
		t.Fatal(err)
	}
	if letter.Original.ID != "broken" || letter.Original.Key != "a" || string(letter.Original.Payload) != `{"other":"secret"}` {
		t.Errorf("the dead letter is of %+v", letter.Original)
	}
	if letter.Group != DualWriteGroup || letter.Err != "orders.v2: upcast v1→v2: /n: nothing is there" {
		t.Errorf("the dead letter is of group %s, by %q", letter.Group, letter.Err)
	}
	awaitCopies(t, bus, 2, 2)
	copiedAll(t, bus)
	wantCopies(t, bus, 1)
	if n := len(eventsOf(t, bus, "dlq."+topicSource)); n != 1 {
		t.Errorf("%d dead letters", n)
	}
	if n := count.outcome(Poisoned); n != 1 {
		t.Errorf("%d events count as poisoned", n)
	}
}

// Two hubs share the events.
func TestDualWriteOfTwoHubs(t *testing.T) {
	t.Parallel()
	const events, keys = 300, 100
	url := startNATS(t)
	one := openBus(t, jetstream.Config{URL: url, Topics: sourceRules()})
	two := openBus(t, jetstream.Config{URL: url, Topics: sourceRules()})
	registerVersions(t, one)
	tallies := []*tally{newTally(), newTally()}
	startDualWrite(t, JetStream(one), []int{1, 2}, tallies[0])
	stop := startDualWrite(t, JetStream(two), []int{1, 2}, tallies[1])
	next := 0
	publish := func() {
		for range events {
			next++
			opts := jetstream.PublishOptions{Key: strconv.Itoa(next % keys)}
			if next%10 == 0 {
				opts.Key = ""
			}
			publishVersion(t, one, 1, fmt.Sprintf(`{"n":%d}`, next), opts)
		}
	}
	shared := func() bool { return tallies[0].outcome(Applied) > 0 && tallies[1].outcome(Applied) > 0 }
	for publish(); !shared() && next < 100*events; {
		publish() // the second hub may not have been given its slots yet
	}
	if !shared() {
		t.Errorf("the hubs have copied %d and %d events", tallies[0].outcome(Applied), tallies[1].outcome(Applied))
	}
	stop() // and the first goes on alone
	publish()
	copiedAll(t, one)
	wantCopies(t, one, 1)
	wantCopies(t, one, 2)
}

// The events of a stream that was made again have the places of earlier ones, and are copied all
// the same.
func TestDualWriteOfARemadeStream(t *testing.T) {
	t.Parallel()
	// An event that comes at the moment at which the group joins again may wait for AckWait.
	bus := openBus(t, jetstream.Config{URL: startNATS(t), Topics: sourceRules(), AckWait: ackWait / 2})
	registerVersions(t, bus)
	startDualWrite(t, JetStream(bus), []int{1, 2}, nil)
	for _, key := range []string{"a", "a", ""} {
		publishVersion(t, bus, 1, `{"n":1}`, jetstream.PublishOptions{Key: key})
	}
	copiedAll(t, bus)
	if err := bus.Admin().Topic(topicSource).Delete(t.Context(), jetstream.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"a", ""} {
		publishVersion(t, bus, 1, `{"n":2}`, jetstream.PublishOptions{Key: key})
	}
	copies := awaitCopies(t, bus, 2, 5)
	ids := map[string]bool{}
	later := 0
	for _, e := range copies {
		ids[e.ID] = true
		if string(e.Payload) == `{"number":2}` {
			later++
		}
	}
	if len(ids) != 5 || len(copies) != 5 || later != 2 {
		t.Errorf("%d copies with %d ids, %d of the stream made again", len(copies), len(ids), later)
	}
}

// Events that are delivered again when the copies' streams have forgotten their ids are not copied
// twice: for the first time, as by a server that forgot its last acks, or after a change of the
// group.
func TestDualWriteLooksForOldCopies(t *testing.T) {
	t.Parallel()
	rule := topics.Rule{Pattern: topicSource + ".v2", DuplicateWindow: time.Second, Schema: topics.SchemaRule{Mode: topics.SchemaEnforce, Of: topicSource}}
	bus := openBus(t, jetstream.Config{URL: startNATS(t), Topics: sourceRules(rule)})
	registerVersions(t, bus)
	stop := startDualWrite(t, JetStream(bus), []int{1, 2}, nil)
	for i := range 60 {
		publishVersion(t, bus, 1, fmt.Sprintf(`{"n":%d}`, i), jetstream.PublishOptions{Key: []string{"a", "b", ""}[i%3]})
	}
	copiedAll(t, bus)
	stop()
	forgotten := eventsOf(t, bus, topics.Mirror(topicSource, 2))[0]
	poll(t, "the stream forgets an id", func() bool {
		// the server sweeps once a window
		return time.Since(time.Unix(0, forgotten.StoredAt)) > 3*time.Second
	})
	count := newTally()
	if err := bus.Group(topicSource, DualWriteGroup).Seek(t.Context(), jetstream.FromEarliest); err != nil {
		t.Fatal(err)
	}
	startDualWrite(t, JetStream(bus), []int{1, 2}, count)
	publishVersion(t, bus, 1, `{"n":60}`, jetstream.PublishOptions{Key: "a"})
	poll(t, "all are delivered", func() bool { return count.outcome(Known)+count.outcome(Applied) >= 2*61 })
	if n := count.outcome(Applied); n != 2 {
		t.Errorf("%d copies were written again", n-2)
	}
	wantCopies(t, bus, 1)
	wantCopies(t, bus, 2)
}

// A version that is added later has all events once, after the group was moved back, however often.
// They come behind later events of their keys.
func TestDualWriteAddsAVersion(t *testing.T) {
	t.Parallel()
	var rules []topics.Rule
	for version := 1; version <= 2; version++ {
		rules = append(rules, topics.Rule{
			Pattern: topics.Mirror(topicSource, version), DuplicateWindow: time.Second,
			Schema: topics.SchemaRule{Mode: topics.SchemaEnforce, Of: topicSource},
		})
	}
	bus := openBus(t, jetstream.Config{URL: startNATS(t), Topics: sourceRules(rules...)})
	registerVersions(t, bus)
	publish := func(n int) {
		for i := range n {
			publishVersion(t, bus, 1, fmt.Sprintf(`{"n":%d}`, i), jetstream.PublishOptions{Key: []string{"a", "b", ""}[i%3]})
		}
		copiedAll(t, bus)
	}
	stop := startDualWrite(t, JetStream(bus), []int{1}, nil)
	publish(30)
	stop()
	for range 2 {
		stop = startDualWrite(t, JetStream(bus), []int{1, 2}, nil)
		publish(3)
		stop()
		if err := bus.Group(topicSource, DualWriteGroup).Seek(t.Context(), jetstream.FromEarliest); err != nil {
			t.Fatal(err)
		}
	}
	startDualWrite(t, JetStream(bus), []int{1, 2}, nil)
	publish(3)
	wantCopies(t, bus, 1)
	var want, got []string
	for _, e := range eventsOf(t, bus, topicSource) {
		want = append(want, copyID(e, 2))
	}
	late := 0
	for _, e := range eventsOf(t, bus, topics.Mirror(topicSource, 2)) {
		id, is := strings.CutSuffix(e.ID, lateCopy)
		if is {
			late++
		}
		got = append(got, id)
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("version 2 has %d copies of %d events", len(got), len(want))
	}
	if late == 0 {
		t.Error("no copy is late")
	}
}

// A version may be registered later.
func TestDualWriteWaitsForItsVersions(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{URL: startNATS(t), Topics: sourceRules()})
	registerVersion(t, bus, 1)
	publishVersion(t, bus, 1, `{"n":1}`, jetstream.PublishOptions{Key: "a"})
	asked := make(chan struct{}, 1_000)
	startDualWrite(t, askedBus{JetStream(bus), asked}, []int{1, 2}, nil)
	for range 4 { // versions 1 and 2, twice
		select {
		case <-asked:
		case <-time.After(patience):
			t.Fatal("it does not ask for its versions")
		}
	}
	registerVersion(t, bus, 2)
	if got := awaitCopies(t, bus, 2, 1); string(got[0].Payload) != `{"number":1}` {
		t.Errorf("the copy is %s", got[0].Payload)
	}
}

type askedBus struct {
	Bus
	asked chan struct{}
}

func (b askedBus) SchemaView(ctx context.Context, topic string, version int) (SchemaView, error) {
	b.asked <- struct{}{}
	return b.Bus.SchemaView(ctx, topic, version)
}

// A publish whose outcome is unknown is repeated, costs no attempt, and leaves one copy: also where
// the copy's stream has forgotten the id.
func TestDualWriteRepeatsWhatIsUnknown(t *testing.T) {
	t.Parallel()
	for name, window := range map[string]time.Duration{"the id is forgotten": 0, "the id is known": time.Hour} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			repeatUnknown(t, window)
		})
	}
}

func repeatUnknown(t *testing.T, window time.Duration) {
	t.Helper()
	bus := openBus(t, jetstream.Config{URL: startNATS(t), Topics: sourceRules()})
	registerVersions(t, bus)
	shaky := &shakyBus{Bus: JetStream(bus), window: window}
	startDualWrite(t, shaky, []int{1, 2}, nil)
	for i := range 30 {
		publishVersion(t, bus, 1, fmt.Sprintf(`{"n":%d}`, i), jetstream.PublishOptions{Key: []string{"a", "b", ""}[i%3]})
	}
	copiedAll(t, bus)
	for version := 1; version <= 2; version++ {
		wantPlaces := map[string]int{}
		for _, e := range eventsOf(t, bus, topics.Mirror(topicSource, version)) {
			wantPlaces[string(e.Payload)]++
		}
		if len(wantPlaces) != 30 {
			t.Errorf("version %d has copies of %d events", version, len(wantPlaces))
		}
		for payload, n := range wantPlaces {
			if n != 1 {
				t.Errorf("%s has %d copies in version %d", payload, n, version)
			}
		}
	}
	if n := len(eventsOf(t, bus, "dlq."+topicSource)); n > 0 {
		t.Errorf("%d dead letters", n)
	}
	if shaky.failed.Load() == 0 {
		t.Error("no publish has failed")
	}
}

// shakyBus loses the answer to every second publish. Its streams know ids for as long as it says:
// where that is not at all, none may be published again. Of an event with a key, no id ever is.
type shakyBus struct {
	Bus
	window        time.Duration
	calls, failed atomic.Int64
}

func (b *shakyBus) History(topic string) History {
	return shakyHistory{b.Bus.History(topic), b.window}
}

type shakyHistory struct {
	History
	window time.Duration
}

func (h shakyHistory) DuplicateWindow(context.Context) (time.Duration, error) { return h.window, nil }

func (b *shakyBus) Publish(ctx context.Context, topic string, payload []byte, opts jetstream.PublishOptions) (jetstream.Receipt, error) {
	r, err := b.Bus.Publish(ctx, topic, payload, opts)
	if err == nil && !r.Duplicate && b.calls.Add(1)%2 == 0 {
		b.failed.Add(1)
		return jetstream.Receipt{}, &jetstream.Error{Code: jetstream.CodePublishFailed, Msg: "the outcome is unknown"}
	}
	if r.Duplicate && (b.window == 0 || opts.Key != "") {
		return jetstream.Receipt{}, errors.New("a copy was published again")
	}
	return r, err
}

func TestDualWriteRefusesWrongConfigurations(t *testing.T) {
	t.Parallel()
	bus := JetStream(openBus(t, jetstream.Config{URL: startNATS(t)}))
	for want, cfg := range map[string]DualWriteConfig{
		"field Bus is missing":              {Topic: "a", Versions: []int{1}},
		"0 versions; 1 to 4":                {Bus: bus, Topic: "a"},
		"version 0: 1 to 500":               {Bus: bus, Topic: "a", Versions: []int{0}},
		"version 3 is given twice":          {Bus: bus, Topic: "a", Versions: []int{3, 3}},
		"in flight 10001: 1 to 10000":       {Bus: bus, Topic: "a", Versions: []int{1}, InFlight: 10_001},
		"copies of a..b in other versions:": {Bus: bus, Topic: "a..b", Versions: []int{1}},
	} {
		if err := NewDualWrite(cfg).Run(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v", want, err)
		}
	}
}
