package jetstream

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/natstest"
)

// makes subscribes to a group for a client, ends that, and returns the code of a refusal.
func makes(t *testing.T, b *Bus, topic, group string, opts SubscribeOptions) string {
	t.Helper()
	sub, err := b.Subscribe(t.Context(), topic, group, opts, ignore)
	if refused, ok := errors.AsType[*event.Error](err); ok {
		return refused.Code
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	return ""
}

// What a client has made counts on all hubs, and after all of them were started again.
func TestGroupsThatExistCountForTheirMaker(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	obs := &counter{}
	limits := Limits{ClientGroups: 5, GroupsPerClient: 1000}
	eve := SubscribeOptions{CountFor: "jwt:eve"}
	first := open(t, Config{Server: natstest.Embed(t, dir), Limits: limits})
	for i := range 5 {
		if code := makes(t, first, "made."+strconv.Itoa(i%2), "g"+strconv.Itoa(i), eve); code != "" {
			t.Fatalf("group %d: %s", i, code)
		}
	}
	if code := makes(t, first, "made.0", "g5", eve); code != event.CodeOverloaded {
		t.Errorf("a group more than allowed: %q", code)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	b := open(t, Config{Server: natstest.Embed(t, dir), Limits: limits, Observer: obs})
	if code := makes(t, b, "made.0", "g5", eve); code != event.CodeOverloaded || obs.limit("client_groups") != 1 {
		t.Errorf("after a restart: %q, counted %d times", code, obs.limit("client_groups"))
	}
	// What exists can be joined, others make groups of their own, and the program makes any.
	for group, opts := range map[string]SubscribeOptions{"g0": eve, "alices": {CountFor: "jwt:alice"}, "own": {}, "free": {CountFor: "jwt:eve", FreeGroups: true}} {
		if code := makes(t, b, "made.0", group, opts); code != "" {
			t.Errorf("%s: %s", group, code)
		}
	}
	// A seek keeps the group's maker.
	if err := b.Group("made.0", "g0").Seek(t.Context(), FromEarliest); err != nil {
		t.Fatal(err)
	}
	if err := b.Group("made.1", "g1").Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	if code := makes(t, b, "made.0", "g5", eve); code != "" {
		t.Errorf("after one was deleted: %s", code)
	}
	if code := makes(t, b, "made.0", "g6", eve); code != event.CodeOverloaded {
		t.Errorf("one more: %q", code)
	}
	if err := b.Group("made.0", "g0").Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	if code := makes(t, b, "made.0", "g6", eve); code != "" {
		t.Errorf("after one that was moved was deleted: %s", code)
	}
}

// Groups that ended by their TTL, and those of deleted topics, count no more, and it is free to
// make one again.
func TestGroupsThatEndedCountNoMore(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Limits: Limits{ClientGroups: 3, GroupsPerClient: 4}})
	tab := SubscribeOptions{CountFor: "jwt:eve", GroupTTL: minGroupTTL}
	for i := range 3 {
		if code := makes(t, b, "tabs", "tab-"+strconv.Itoa(i), tab); code != "" {
			t.Fatalf("tab %d: %s", i, code)
		}
	}
	gone := func() bool {
		info, err := b.conn.FindStream(t.Context(), "tabs")
		return err == nil && info.State.Consumers == 0
	}
	eventually(t, "the groups have ended", gone)
	for range 3 { // the same tab again and again: no new group
		if code := makes(t, b, "tabs", "tab-1", tab); code != "" {
			t.Errorf("a tab that comes again: %s", code)
		}
		if err := b.conn.JS.DeleteConsumer(t.Context(), "tabs", b.streams.Known("tabs").ConsumerName("tab-1")); err != nil {
			t.Fatal(err)
		}
	}
	noted := func() int {
		t.Helper()
		noted, err := b.conn.Subjects(t.Context(), records.MakersBucket, "$KV."+records.MakersBucket+".*.*.*")
		if err != nil {
			t.Fatal(err)
		}
		return len(noted)
	}
	// Notes are kept for as long as a group may take to be made, and those of others.
	for _, sweep := range []struct {
		client string
		age    time.Duration
	}{{"jwt:eve", 2 * conn.PublishWait}, {"jwt:alice", 0}} {
		if err := b.records.Makers.Sweep(t.Context(), sweep.client, sweep.age); err != nil {
			t.Fatal(err)
		}
		if n := noted(); n != 3 {
			t.Fatalf("%d are noted", n)
		}
	}
	if code := makes(t, b, "tabs", "stays", SubscribeOptions{CountFor: "jwt:bob"}); code != "" {
		t.Fatal(code)
	}
	if err := b.records.Makers.Sweep(t.Context(), "", 0); err != nil {
		t.Fatal(err)
	}
	if n := noted(); n != 1 {
		t.Errorf("%d are noted after the sweep, want that of bob", n)
	}
}

// New groups are rationed on each hub as new topics are, and what is refused leaves nothing behind.
func TestNewGroupsAreRationed(t *testing.T) {
	t.Parallel()
	obs := &counter{}
	b := open(t, Config{Observer: obs, Limits: Limits{GroupsPerClient: 3}})
	eve := SubscribeOptions{CountFor: "jwt:eve"}
	for i := range 5 {
		want := ""
		if i >= 3 {
			want = event.CodeRateLimited
		}
		if code := makes(t, b, "rationed", "g"+strconv.Itoa(i), eve); code != want {
			t.Errorf("group %d: %q, want %q", i, code, want)
		}
	}
	if n := obs.limit("groups_per_client"); n != 2 {
		t.Errorf("counted %d times", n)
	}
	if noted, err := b.conn.Subjects(t.Context(), records.MakersBucket, "$KV."+records.MakersBucket+".*.*.*"); err != nil || len(noted) != 3 {
		t.Errorf("noted are %v, %v", noted, err)
	}
}

// Clients do not get the last places of a stream, and no client gets more than half of them: one
// stream holds all dead letters.
func TestAStreamKeepsRoom(t *testing.T) {
	t.Parallel()
	obs := &counter{}
	b := open(t, Config{Observer: obs, Limits: Limits{StreamGroups: 10, GroupsPerClient: 1000}})
	eve, bob := SubscribeOptions{CountFor: "jwt:eve"}, SubscribeOptions{CountFor: "jwt:bob"}
	for i := range 6 {
		want := ""
		if i >= 5 {
			want = event.CodeOverloaded
		}
		if code := makes(t, b, "dlq.mine."+strconv.Itoa(i), "g", eve); code != want {
			t.Errorf("group %d of eve: %q, want %q", i, code, want)
		}
	}
	for i := range 5 {
		if code := makes(t, b, "dlq.other", "g"+strconv.Itoa(i), bob); code != "" {
			t.Errorf("group %d of bob: %s", i, code)
		}
	}
	if code := makes(t, b, "dlq.third", "g", SubscribeOptions{CountFor: "static:hub", FreeGroups: true}); code != event.CodeOverloaded || obs.limit("stream_groups") == 0 {
		t.Errorf("when clients have what there is for them: %q", code)
	}
	for i := range 3 {
		if code := makes(t, b, "dlq.mine.1", "own"+strconv.Itoa(i), SubscribeOptions{}); code != "" {
			t.Errorf("the program's own: %s", code)
		}
	}
	publishAll(t, b, "dlq.mine.1", "1")
	if _, _, err := b.History("dlq.mine.1").FindIDs(t.Context(), IDSearch{IDs: []string{"x"}}); err != nil {
		t.Errorf("a look-up: %v", err)
	}
}

// A stream of another NATS that was made by others has the limit of its server.
func TestRoomOnForeignStreams(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t)})
	for have, want := range map[int]int{-1: 900, 0: 900, 100: 90, 20_000: 10_000, 11_000: 10_000, 1: 1} {
		if got := b.streams.RoomFor(&natsjs.StreamConfig{MaxConsumers: have}); got != want {
			t.Errorf("a stream of %d consumers has room for %d groups, want %d", have, got, want)
		}
	}
	publishAll(t, b, "new", "1")
	s, err := b.conn.JS.Stream(context.Background(), "new")
	if err != nil || s.CachedInfo().Config.MaxConsumers != 11_000 {
		t.Errorf("a new stream takes %d consumers, %v", s.CachedInfo().Config.MaxConsumers, err)
	}
}

// What topics a client has made counts on all hubs and after a restart, however it makes them.
// Other clients make theirs, and a topic that is deleted gives its place back at once, on all hubs.
func TestTopicsThatExistCountForTheirMaker(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	obs := &counter{}
	limits := Limits{ClientTopics: 3, Topics: 20}
	b := open(t, Config{Server: natstest.Embed(t, dir), Limits: limits})
	full := func(name string, make func(topic string) error) {
		t.Helper()
		err := make(name)
		if fail, ok := errors.AsType[*event.Error](err); !ok || fail.Code != event.CodeRateLimited || !strings.Contains(fail.Msg, "3 topics") {
			t.Errorf("%s is one topic more than allowed: %v", name, err)
		}
		if s, err := b.conn.FindStream(t.Context(), name); !errors.Is(err, event.ErrNotFound) {
			t.Errorf("%s was made: %v, %v", name, s, err)
		}
	}
	publishes := func(topic string) error {
		_, err := b.Publish(t.Context(), topic, []byte("1"), PublishOptions{CountFor: "jwt:eve"})
		return err
	}
	operates := func(topic string) error { return b.Admin().Topic(topic).CreateFor(t.Context(), "jwt:eve") }
	subscribes := func(topic string) error {
		_, err := b.Subscribe(t.Context(), topic, "g", SubscribeOptions{CountFor: "jwt:eve"}, ignore)
		return err
	}
	posts := func(topic string) error { return b.NewPublisher().Reserve(t.Context(), topic, "", "jwt:eve") }
	for topic, make := range map[string]func(string) error{"published": publishes, "operated": operates, "subscribed": subscribes} {
		if err := make(topic); err != nil {
			t.Fatalf("%s: %v", topic, err)
		}
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	b = open(t, Config{Server: natstest.Embed(t, dir), Limits: limits, Observer: obs})
	full("one", publishes)
	full("two", operates)
	full("three", subscribes)
	full("four", posts)
	if n := obs.limit("client_topics"); n != 4 {
		t.Errorf("the limit counts %d times, want 4", n)
	}
	for topic, client := range map[string]string{"alices": "jwt:alice", "nobodys": ""} {
		if err := b.Admin().Topic(topic).CreateFor(t.Context(), client); err != nil {
			t.Errorf("a topic of %q: %v", client, err)
		}
	}
	if _, err := b.NewPublisher().Publish(t.Context(), "unnamed", []byte("1"), PublishOptions{}); err != nil {
		t.Error(err)
	}
	if err := b.Admin().Topic("operated").Delete(t.Context(), DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := posts("five"); err != nil {
		t.Errorf("after a topic was deleted: %v", err)
	}
	if err := publishes("five"); err != nil {
		t.Errorf("a topic that was reserved: %v", err)
	}
	full("six", publishes)
	// Another program deletes a topic. The sweep finds that, at once if a client needs the place.
	if err := b.conn.JS.DeleteStream(t.Context(), "published"); err != nil {
		t.Fatal(err)
	}
	if err := b.records.Makers.Sweep(t.Context(), "", 0); err != nil {
		t.Fatal(err)
	}
	if err := publishes("six"); err != nil {
		t.Errorf("after another program deleted a topic: %v", err)
	}
}

// A hub that knows as many topics as it may takes new ones when some were deleted, here, on another
// hub, or by another program.
func TestDeletedTopicsMakeRoom(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	limits := Limits{Topics: 4}
	a, b := open(t, Config{URL: url, Limits: limits}), open(t, Config{URL: url, Limits: limits})
	for _, bus := range []*Bus{a, b} {
		for topic := range 4 {
			publishAll(t, bus, "room."+strconv.Itoa(topic), "1")
		}
		if _, err := bus.Publish(t.Context(), "more", []byte("1"), PublishOptions{}); err == nil {
			t.Fatal("a topic more than allowed was made")
		}
	}
	if err := a.Admin().Topic("room.0").Delete(t.Context(), DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	publishAll(t, a, "more", "1")
	eventually(t, "the other hub has room for the new topic", func() bool {
		_, err := b.Publish(t.Context(), "more", []byte("1"), PublishOptions{})
		return err == nil
	})
}
