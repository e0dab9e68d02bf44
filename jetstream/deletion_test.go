package jetstream

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
	"eventhub/jetstream/topics"
)

// A hub that deletes a topic and dies after any of its requests leaves the topic as it was, or
// deletes it: then the topic that is created again has nothing of the old one.
func TestADeletionThatIsCutOff(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	rules := []topics.Rule{{Pattern: "cut.*", Compaction: true}}
	b := open(t, Config{URL: url, Topics: rules})
	proxy := startAPIProxy(t, url)
	dying := open(t, Config{URL: url, Topics: rules, Domain: proxyDomain})
	deleted := false
	for passed := int32(0); !deleted; passed++ {
		topic := fmt.Sprintf("cut.%d", passed)
		if _, err := b.Publish(t.Context(), topic, []byte("1"), PublishOptions{Key: "old"}); err != nil {
			t.Fatal(err)
		}
		k := take(t, b, topic, "g", SubscribeOptions{From: FromEarliest})
		k.payloads(1)
		g := b.Group(topic, "g")
		settledUpTo(t, g, 0)
		if _, err := g.Bookmarks().Put(t.Context(), "m"); err != nil {
			t.Fatal(err)
		}
		if err := g.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := k.sub.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		var left atomic.Int32
		left.Store(passed)
		proxy.meet(func(request string) bool {
			changes := strings.HasPrefix(request, "$KV.") || strings.Contains(request, ".DELETE.") || strings.Contains(request, ".PURGE.")
			return !changes || left.Add(-1) >= 0
		})
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		err := dying.Admin().Topic(topic).Delete(ctx, DeleteOptions{})
		cancel()
		proxy.meet(func(string) bool { return true })
		deleted = err == nil
		first := func() string {
			info, err := b.Admin().Topic(topic).Info(t.Context())
			if errors.Is(err, event.ErrNotFound) {
				return ""
			}
			if err != nil {
				t.Fatal(err)
			}
			return string(info.First.Payload)
		}
		if first() == "1" { // it was not deleted
			list, err := g.Bookmarks().List(t.Context())
			if info, ierr := g.Info(t.Context()); err != nil || ierr != nil || len(list) != 1 || !info.Paused {
				t.Errorf("after %d requests, the topic has lost something: %+v, %v, %+v, %v", passed, list, err, info, ierr)
			}
			if e, err := b.Keys(topic).Get(t.Context(), "old"); err != nil || string(e.Payload) != "1" {
				t.Errorf("after %d requests, the topic has lost a key: %v", passed, err)
			}
			continue
		}
		eventually(t, "the topic is created again", func() bool {
			_, err := b.Publish(t.Context(), topic, []byte("2"), PublishOptions{Key: "new"})
			return err == nil
		})
		if first() != "2" {
			t.Errorf("after %d requests, the topic created again begins with %s", passed, first())
		}
		if e, err := b.Keys(topic).Get(t.Context(), "old"); !errors.Is(err, event.ErrNotFound) {
			t.Errorf("after %d requests, the topic created again has a key of the old one: %v, %v", passed, e, err)
		}
		for _, bucket := range []string{native.GroupsBucket, records.BookmarksBucket, records.MarksBucket, native.AttemptsBucket, records.RetentionBucket} {
			noted, err := b.conn.Subjects(t.Context(), bucket, "$KV."+bucket+".>")
			if err != nil {
				t.Fatal(err)
			}
			for subject := range noted {
				if strings.Contains(subject, "."+objectName(topic)+".") {
					t.Errorf("after %d requests, %s is left", passed, subject)
				}
			}
		}
		k = take(t, b, topic, "g", SubscribeOptions{From: FromEarliest})
		if got := k.payloads(1); got[0] != "2" {
			t.Errorf("after %d requests, the new group was given %s", passed, got)
		}
		if err := k.sub.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// A bucket with the name of a topic's newest events is not the hub's if the topic is not compacted:
// it stays when the topic is deleted.
func TestADeletionLeavesForeignBuckets(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	b := open(t, Config{URL: url})
	publishAll(t, b, "orders", "1")
	_, js := nativeConn(t, url)
	kv, err := js.CreateKeyValue(t.Context(), natsjs.KeyValueConfig{Bucket: strings.TrimPrefix(streams.NewBucket("orders").Stream, "KV_")})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kv.Put(t.Context(), "k", []byte("mine")); err != nil {
		t.Fatal(err)
	}
	if err := b.Admin().Topic("orders").Delete(t.Context(), DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if e, err := kv.Get(t.Context(), "k"); err != nil || string(e.Value()) != "mine" {
		t.Errorf("the bucket has %v, %v", e, err)
	}
}
