package jetstream

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/native"
)

func letterList(t *testing.T, b *Bus, filter LetterFilter) []*Letter {
	t.Helper()
	var all []*Letter
	for next := ""; ; {
		page, err := b.Admin().DeadLetters().List(t.Context(), filter, next, 7, nil)
		if err != nil {
			t.Fatal(err)
		}
		if all = append(all, page.Letters...); page.Next == "" {
			return all
		}
		next = page.Next
	}
}

// Letters that no hub has stored, and letters of older versions.
func TestForeignAndOldLetters(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t)})
	publishAll(t, b, "old", "1")
	fail(t, b, "old", "g", "x", 1)
	record := `{"id":"i%d","ts":5,"topic":"old","key":"k","headers":{"Event-Encoding":"text"},"payload":"not json"}`
	bad := []string{
		`{"no":"letter"}`, `[`, `{"topic":"other","group":"g","original":{"id":"a","topic":"other","payload":1}}`,
		`{"topic":"old","group":"","original":{"id":"a","topic":"old","payload":1}}`,
		`{"topic":"old","group":"g","original":{"id":"a\n","topic":"old","payload":1}}`,
		`{"topic":"old","group":"g","original":{"id":"a","topic":"old","headers":{"a b":"1"},"payload":1}}`,
		`{"topic":"old","group":"g","original":{"id":"a","topic":"old","headers":{"a":"1\r\nNats-Msg-Id: x"},"payload":1}}`,
	}
	for _, payload := range bad {
		publishAll(t, b, "dlq.old", payload)
	}
	publishAll(t, b, "dlq.old", `{"topic":"old","group":"g","original":`+fmt.Sprintf(record, 1)+`,"err":"y","ts":1,"attempts":5}`,
		`{"topic":"old","group":"g","original":{"id":"i2","ts":5,"topic":"old","payload":null},"err":"y (payload of 7 bytes left out: it is at old@1)","ts":1,"attempts":5}`)
	faults := 0
	for _, l := range letterList(t, b, LetterFilter{Topic: "old"}) {
		if l.Fault != "" {
			faults++
		}
	}
	if faults != len(bad) {
		t.Errorf("%d faults of %d", faults, len(bad))
	}
	if got := redriveAll(t, b, LetterFilter{Topic: "old"}, RedriveOptions{}); got.Done != 2 || got.Skipped != len(bad)+1 {
		t.Errorf("%+v", got)
	}
	k := take(t, b, "old", "g", SubscribeOptions{})
	if got := k.payloads(2); !slices.Equal(got, []string{"1", "not json"}) {
		t.Errorf("got %q", got)
	}
	got, err := b.Admin().DeadLetters().Discard(t.Context(), LetterFilter{Topic: "old"}, RedriveOptions{})
	if err != nil || got.Done != len(bad)+1 || len(letterList(t, b, LetterFilter{})) != 0 {
		t.Errorf("discarded: %+v, %v", got, err)
	}
}

// The list is in pages, and counts are right, with and without filters.
func TestListAndCountOfLetters(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t)})
	letters := b.Admin().DeadLetters()
	if page, err := letters.List(t.Context(), LetterFilter{}, "", 10, nil); err != nil || len(page.Letters) != 0 || page.Next != "" {
		t.Fatalf("no letters: %+v, %v", page, err)
	}
	publishAll(t, b, "a", numbers(20)...)
	publishAll(t, b, "b.c", numbers(10)...)
	fail(t, b, "a", "g", "timeout: x", 20)
	fail(t, b, "a", "h", "refused", 15)
	middle := time.Now()
	<-time.After(5 * time.Millisecond)
	fail(t, b, "b.c", "g", "Timeout", 10)
	for _, c := range []struct {
		filter LetterFilter
		want   int
	}{
		{LetterFilter{}, 45},
		{LetterFilter{Topic: "a"}, 35},
		{LetterFilter{Topic: "a", Group: "h"}, 15},
		{LetterFilter{Group: "g"}, 30},
		{LetterFilter{Reason: "timeout"}, 20},
		{LetterFilter{Reason: "imeout"}, 30},
		{LetterFilter{Until: middle}, 35},
		{LetterFilter{Since: middle.Add(time.Millisecond)}, 10},
		{LetterFilter{Topic: "none"}, 0},
		{LetterFilter{ID: "dlq@3"}, 1},
		{LetterFilter{ID: "dlq@3", Topic: "b.c"}, 0},
		{LetterFilter{ID: "groups@1"}, 0},
	} {
		list := letterList(t, b, c.filter)
		counts, err := letters.Count(t.Context(), c.filter, "", nil)
		if err != nil || len(list) != c.want || counts.Total != c.want {
			t.Errorf("%+v: list %d, count %+v, want %d, %v", c.filter, len(list), counts, c.want, err)
		}
		seen := make(map[uint64]bool)
		for _, l := range list {
			seen[l.Sequence] = true
		}
		if len(seen) != c.want {
			t.Errorf("%+v: %d different", c.filter, len(seen))
		}
	}
	counts, err := letters.Count(t.Context(), LetterFilter{}, "", nil)
	if err != nil || len(counts.Groups) != 3 || counts.Groups[1].Topic != "a" || counts.Groups[1].Group != "h" || counts.Groups[1].Count != 15 {
		t.Errorf("counts: %+v, %v", counts, err)
	}
	for _, filter := range []LetterFilter{{Topic: "dlq.a"}, {Topic: "a..b"}, {Group: "\n"}, {Since: middle.Add(time.Second), Until: middle}, {Reason: strings.Repeat("x", 2000)}} {
		if _, err := letters.List(t.Context(), filter, "", 1, nil); err == nil {
			t.Errorf("%+v: no error", filter)
		}
	}
	if _, err := letters.List(t.Context(), LetterFilter{}, "nonsense", 1, nil); err == nil {
		t.Error("a cursor of nonsense: no error")
	}
	progress := 0
	got, err := letters.Redrive(t.Context(), LetterFilter{Topic: "a"}, RedriveOptions{DryRun: true, Progress: func(r Redriven) error { progress = r.Matched; return nil }})
	if err != nil || got.Matched != 35 || progress != 35 || len(letterList(t, b, LetterFilter{})) != 45 {
		t.Errorf("a dry run: %+v, %v", got, err)
	}
	if _, err := letters.Discard(t.Context(), LetterFilter{ID: "dlq:none"}, RedriveOptions{}); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("an id that there is not: %v", err)
	}
}

// A dead letter of an event that its program has not read from a stream names no place.
func TestALetterOfAnEventThatWasNotRead(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "orders", "1")
	if err := b.Group("orders", "g").DeadLetter(t.Context(), &event.Event{ID: "made", Topic: "orders", Payload: []byte("1")}, "broken", 1); err != nil {
		t.Fatal(err)
	}
	l := letterList(t, b, LetterFilter{})[0]
	m, err := b.conn.GetMsg(t.Context(), l.Stream, map[string]any{"seq": l.Sequence})
	if err != nil {
		t.Fatal(err)
	}
	if place, given := m.Header[native.HeaderOriginal]; given || l.Event.ID != "made" {
		t.Errorf("the letter of %s has the place %q", l.Event.ID, place)
	}
}
