package jetstream

import (
	"testing"
	"time"

	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/native"
)

// A hub may be told late of a move, when its members are on a newer consumer already. That must not
// move the group.
func TestALateNoticeOfAMoveChangesNothing(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "late", numbers(4)...)
	if err := b.Group("late", "g").Seek(t.Context(), FromEarliest); err != nil {
		t.Fatal(err)
	}
	first := take(t, b, "late", "g", SubscribeOptions{MaxInFlight: 1, BatchSize: 1})
	held := first.next()
	second := take(t, b, "late", "g", SubscribeOptions{MaxInFlight: 1, BatchSize: 1})
	second.next()
	topic := b.streams.Known("late")
	before, err := b.records.Generation(t.Context(), topic, "g")
	if err != nil {
		t.Fatal(err)
	}
	second.sub.moved(records.GroupKey(topic, "g"), &records.Generation{Generation: native.Generation{Consumer: "g~1-0badcafe"}, Revision: before.Revision - 1})
	// and one of the future, which says no more than: look
	second.sub.moved(records.GroupKey(topic, "g"), &records.Generation{Generation: native.Generation{Consumer: "g~1-0badcafe"}, Revision: before.Revision + 1})
	eventually(t, "the member has looked", func() bool {
		second.sub.mu.Lock()
		defer second.sub.mu.Unlock()
		return !second.sub.members[0].attaching
	})
	after, err := b.records.Generation(t.Context(), topic, "g")
	if err != nil || after.Revision != before.Revision || after.Consumer != before.Consumer {
		t.Errorf("the pointer went from %+v to %+v, %v", before, after, err)
	}
	if err := held.Ack(); err != nil {
		t.Errorf("the other member's lease: %v", err)
	}
}

// A group in memory leaves nothing on disk, so it keeps its name, and no pointer stays behind.
func TestAGroupWithTTLThatWasDeletedKeepsItsName(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "ttl", "1")
	k := take(t, b, "ttl", "tab-1", SubscribeOptions{GroupTTL: time.Minute, From: FromEarliest})
	k.payloads(1)
	if err := b.conn.JS.DeleteConsumer(t.Context(), "ttl", "tab-1"); err != nil {
		t.Fatal(err)
	}
	publishAll(t, b, "ttl", "2")
	if got := k.payloads(1); got[0] != "2" {
		t.Errorf("got %q", got)
	}
	if ptr, err := b.records.Generation(t.Context(), b.streams.Known("ttl"), "tab-1"); err != nil || ptr.Revision != 0 {
		t.Errorf("a pointer was stored: %+v, %v", ptr, err)
	}
}
