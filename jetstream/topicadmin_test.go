package jetstream

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/native"
	"eventhub/jetstream/topics"
)

func topicState(tb testing.TB, b *Bus, topic string) *TopicInfo {
	tb.Helper()
	info, err := b.Admin().Topic(topic).Info(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	return info
}

func TestTopicInfo(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: []topics.Rule{
		{Pattern: "orders", MaxMsgs: 10},
		{Pattern: "user.*", Family: "users", MaxAge: time.Hour},
		{Pattern: "strict", MaxMsgs: 10, MaxAge: time.Hour, OnFull: topics.OnFullReject, GroupAge: time.Hour},
	}})
	if _, err := b.Admin().Topic("orders").Info(t.Context()); !errors.Is(err, event.ErrNotFound) {
		t.Fatalf("a topic that does not exist: %v", err)
	}
	g := takeTold(t, b, "orders", SubscribeOptions{MaxInFlight: 1, From: FromEarliest})
	d := g
	fillFrom(t, b, "orders", 1, 1)
	first := d.next()
	fillFrom(t, b, "orders", 2, 30)
	_ = first.Ack()
	g.payloads(1)
	info := topicState(t, b, "orders")
	if info.Events != 10 || info.First.Sequence != 21 || info.Last.Sequence != 30 || info.MaxMsgs != 10 || info.OnFull != topics.OnFullDrop || info.Groups != 1 || info.Rule != "orders" ||
		len(info.Lost) != 1 || info.Lost[0].Group != "g" || info.Lost[0].Events != 19 || time.Since(info.Lost[0].At) > time.Minute {
		t.Errorf("got %+v", info)
	}
	for _, topic := range []string{"user.a", "user.a", "user.b"} {
		publishAll(t, b, topic, "1")
	}
	take(t, b, "user.b", "other", SubscribeOptions{})
	if info := topicState(t, b, "user.a"); info.Events != 2 || info.First.Sequence != 1 || info.Last.Sequence != 2 || !info.Family || info.Groups != 0 || info.Stream != "users" {
		t.Errorf("got %+v", info)
	}
	fillFrom(t, b, "strict", 1, 1)
	if info := topicState(t, b, "strict"); info.OnFull != topics.OnFullReject || info.MaxAge != time.Hour || info.GroupAge != time.Hour {
		t.Errorf("got %+v", info)
	}
	publishAll(t, b, "dlq.orders", "1")
	if info := topicState(t, b, "dlq.orders"); info.Needed == "" || info.Events != 1 {
		t.Errorf("got %+v", info)
	}
}

func TestPurge(t *testing.T) {
	t.Parallel()
	for _, topic := range []string{"orders", "user.a"} {
		t.Run(topic, func(t *testing.T) {
			t.Parallel()
			seen := new(losses)
			b := open(t, Config{Observer: seen, Topics: []topics.Rule{{Pattern: "user.*", Family: "users"}}})
			admin := b.Admin().Topic(topic)
			publishAll(t, b, "user.b", "other")
			g := takeTold(t, b, topic, SubscribeOptions{MaxInFlight: 1, From: FromEarliest})
			fillFrom(t, b, topic, 1, 10)
			r := publishAll(t, b, topic, "11")[0]
			d := g.next()
			<-time.After(5 * time.Millisecond)
			cut := time.Now()
			fillFrom(t, b, topic, 12, 20)

			purge := func(opts PurgeOptions, want Purged) {
				t.Helper()
				got, err := admin.Purge(t.Context(), opts)
				if bounded := got.Bound != ""; bounded != opts.DryRun {
					t.Fatalf("%+v: the bound is %q", opts, got.Bound)
				}
				got.Bound = ""
				if err != nil || got != want {
					t.Fatalf("%+v: got %+v, %v; want %+v", opts, got, err, want)
				}
			}
			for _, opts := range []PurgeOptions{{}, {All: true, Through: r.ID}, {Before: cut, Through: r.ID}} {
				if _, err := admin.Purge(t.Context(), opts); codeOf(t, err) != event.CodeBadOptions {
					t.Fatalf("%+v: %v", opts, err)
				}
			}
			if _, err := admin.Purge(t.Context(), PurgeOptions{All: true, Bound: "none"}); codeOf(t, err) != event.CodeBadOptions {
				t.Fatal(err)
			}
			if _, err := admin.Purge(t.Context(), PurgeOptions{Through: "no such id"}); codeOf(t, err) != event.CodeUnknownID {
				t.Fatal(err)
			}
			purge(PurgeOptions{Through: r.ID, DryRun: true}, Purged{Removed: 11, Left: 9})
			purge(PurgeOptions{Before: cut.Add(-time.Hour)}, Purged{Left: 20})
			purge(PurgeOptions{Through: r.ID}, Purged{Removed: 11, Left: 9})
			purge(PurgeOptions{Before: cut}, Purged{Left: 9})
			_ = d.Ack()
			if got := g.payloads(1); got[0] != "12" || g.sum() != 0 || seen.count() != 0 {
				t.Errorf("the group goes on at %s, and %d are counted as lost, though they were purged", got[0], g.sum())
			}
			purge(PurgeOptions{All: true}, Purged{Removed: 9})
			publishAll(t, b, topic, "21")
			last := ""
			for last != "21" {
				last = g.payloads(1)[0]
			}
			if g.sum() != 0 || seen.count() != 0 {
				t.Errorf("%d are counted as lost, though they were purged", seen.count())
			}
			if topic == "user.a" && topicState(t, b, "user.b").Events != 1 {
				t.Error("the purge removed events of another topic")
			}
		})
	}
}

func TestNeededTopicsStay(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: []topics.Rule{
		{Pattern: "kept", Compaction: true, Snapshot: &topics.SnapshotRule{Topic: "kept.snapshot"}}, {Pattern: "kept.snapshot", Compaction: true},
	}})
	for _, topic := range []string{"dlq.orders", "kept.snapshot", "process.state", "heartbeat.received"} {
		if _, err := b.Publish(t.Context(), topic, []byte("1"), PublishOptions{Key: "k"}); err != nil {
			t.Fatal(err)
		}
		admin := b.Admin().Topic(topic)
		if _, err := admin.Purge(t.Context(), PurgeOptions{All: true}); codeOf(t, err) != event.CodeBadOptions {
			t.Errorf("purge of %s: %v", topic, err)
		}
		if err := admin.Delete(t.Context(), DeleteOptions{}); codeOf(t, err) != event.CodeBadOptions {
			t.Errorf("deletion of %s: %v", topic, err)
		}
		if got, err := admin.Purge(t.Context(), PurgeOptions{All: true, Needed: true}); err != nil || got.Removed != 1 {
			t.Errorf("purge of %s, asked for explicitly: %+v, %v", topic, got, err)
		}
		if err := admin.Delete(t.Context(), DeleteOptions{Needed: true}); err != nil {
			t.Errorf("deletion of %s, asked for explicitly: %v", topic, err)
		}
	}
}

// A server that led the stream may show it for a moment after another has deleted it: the deletion
// is finished nevertheless, and members that come later find its mark.
func TestDeletionWithAStaleLeader(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	proxy := startAPIProxy(t, url)
	rules := []topics.Rule{{Pattern: "kept", Compaction: true}}
	b := open(t, Config{URL: url, Domain: proxyDomain, Topics: rules})
	if _, err := b.Publish(t.Context(), "kept", []byte("1"), PublishOptions{Key: "k"}); err != nil {
		t.Fatal(err)
	}
	was, err := b.streams.Existing(t.Context(), "kept")
	if err != nil {
		t.Fatal(err)
	}
	stream := was.Stream.Name
	reply, err := proxy.nc.Request("$JS.API.STREAM.INFO."+stream, nil, wait)
	if err != nil {
		t.Fatal(err)
	}
	var deleted atomic.Bool
	var stale atomic.Int64
	proxy.meet(func(request string) bool {
		if request == "STREAM.DELETE."+stream {
			deleted.Store(true)
		}
		return true
	})
	proxy.instead(func(request string) []byte {
		if request == "STREAM.INFO."+stream && deleted.Load() && stale.Add(1) <= 2 {
			return reply.Data
		}
		return nil
	})
	if err := b.Admin().Topic("kept").Delete(t.Context(), DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if stale.Load() == 0 {
		t.Error("the deletion did not ask for the stream")
	}
	if mark, err := b.records.Deletion(t.Context(), stream); err != nil || !mark.Stream.Equal(was.Stream.Created) || mark.Unfinished != "" {
		t.Errorf("the mark of the deletion is %+v, %v", mark, err)
	}
	if _, err := b.conn.FindStream(t.Context(), was.Bucket.Stream); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("the bucket is still there: %v", err)
	}
}

// A leader of the marks that was just elected may lack the one that the hub of a member has met.
func TestDeletionWhoseMarkIsNotReadYet(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	proxy := startAPIProxy(t, url)
	far, b := open(t, Config{URL: url, Domain: proxyDomain}), open(t, Config{URL: url})
	publishAll(t, b, "orders", "1")
	ended := make(chan string, 1)
	k := take(t, far, "orders", "g", SubscribeOptions{From: FromEarliest, OnDeleted: func(topic string) { ended <- topic }})
	k.payloads(1)
	proxy.instead(func(request string) []byte {
		if request == "STREAM.MSG.GET.KV_"+native.GroupsBucket {
			return []byte(`{"type":"io.nats.jetstream.api.v1.stream_msg_get_response","error":{"code":404,"err_code":10037,"description":"no message found"}}`)
		}
		return nil
	})
	at, err := b.streams.Existing(t.Context(), "orders")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.records.MarkDeleted(t.Context(), at.Stream, "orders", 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the member ends", func() bool { return len(ended) == 1 })
}

// The sweep takes back the mark of a deletion that was cut off before the stream was deleted, once
// the mark is old. A young mark stays, and so does one that has replaced an old one.
func TestTheSweepTakesBackMarks(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "orders", "1")
	at, err := b.streams.Existing(t.Context(), "orders")
	if err != nil {
		t.Fatal(err)
	}
	rev, err := b.records.MarkDeleted(t.Context(), at.Stream, "orders", 0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := b.admin.finishDeletion(ctx, "orders"); err == nil {
		t.Error("a deletion is finished whose stream is there")
	}
	if err := errors.Join(b.admin.takeBack(t.Context(), "orders", rev-1), b.records.SweepGenerations(t.Context(), time.Hour)); err != nil {
		t.Fatal(err)
	}
	if deleted, err := b.records.Deleted(t.Context(), at.Stream); err != nil || !deleted {
		t.Errorf("a young mark is gone: %v", err)
	}
	if err := b.records.SweepGenerations(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	if deleted, err := b.records.Deleted(t.Context(), at.Stream); err != nil || deleted {
		t.Errorf("the stream is marked as deleted: %t, %v", deleted, err)
	}
	if got := topicState(t, b, "orders").Events; got != 1 {
		t.Errorf("%d events are left", got)
	}
}

// A deleted topic is gone on all hubs, members learn of it, and the next publish creates it again.
func TestDeleteTopic(t *testing.T) {
	t.Parallel()
	for _, servers := range []int{1, 3} {
		for _, topic := range []string{"orders", "kept", "user.a"} {
			t.Run(fmt.Sprintf("%s on %d", topic, servers), func(t *testing.T) {
				t.Parallel()
				url := natsServers(t, servers)
				cfg := Config{URL: url, Replicas: servers, Topics: []topics.Rule{{Pattern: "user.*", Family: "users"}, {Pattern: "kept", Compaction: true}}}
				a, b := open(t, cfg), open(t, cfg)
				put := func(bus *Bus, payload string) error {
					_, err := bus.Publish(t.Context(), topic, []byte(payload), PublishOptions{Key: "k"})
					return err
				}
				var ended atomic.Int32
				opts := SubscribeOptions{From: FromEarliest, OnDeleted: func(string) { ended.Add(1) }}
				first, second := take(t, a, topic, "g", opts), take(t, b, topic, "h", opts)
				if err := errors.Join(put(a, "1"), put(b, "2")); err != nil {
					t.Fatal(err)
				}
				first.payloads(2)
				second.payloads(1)
				if err := b.Admin().Topic(topic).Delete(t.Context(), DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
				eventually(t, "both members hear of it", func() bool { return ended.Load() == 2 })
				_ = first.sub.Stop(t.Context())
				_ = second.sub.Stop(t.Context())
				if topic != "user.a" { // that stream has others
					if _, err := a.Admin().Topic(topic).Info(t.Context()); !errors.Is(err, event.ErrNotFound) {
						t.Fatalf("the topic is still there: %v", err)
					}
				}
				eventually(t, "the topic is created again", func() bool { return put(a, "3") == nil })
				eventually(t, "on the other hub too", func() bool { return put(b, "4") == nil })
				if info := topicState(t, a, topic); info.Events != 2 || info.Groups != 0 {
					t.Fatalf("got %+v", info)
				}
				if got := take(t, a, topic, "g", SubscribeOptions{From: FromEarliest}).payloads(2); got[0] != "3" || got[1] != "4" {
					t.Fatalf("a new group of the name got %v", got)
				}
				if topic == "kept" {
					eventually(t, "the newest event of the key", func() bool {
						e, err := b.Keys(topic).Get(t.Context(), "k")
						return err == nil && string(e.Payload) == "4"
					})
				}
			})
		}
	}
}
