package jetstream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/native"
	"eventhub/jetstream/topics"
)

// ack takes n events and settles those that pick selects.
func (k *taker) ack(n int, pick func(payload string) bool) (left []*Delivery) {
	k.t.Helper()
	for range n {
		d := k.next()
		if !pick(string(d.Event.Payload)) {
			left = append(left, d)
		} else if err := d.Ack(); err != nil {
			k.t.Error(err)
		}
	}
	return left
}

func all(string) bool { return true }

// settledUpTo waits until the server has worked the settlements off.
func settledUpTo(t *testing.T, g Group, inFlight uint64) GroupInfo {
	t.Helper()
	var info GroupInfo
	eventually(t, "the settlements are worked off", func() bool {
		var err error
		info, err = g.Info(t.Context())
		return err == nil && info.InFlight == inFlight
	})
	return info
}

// TestGroupInfo compares what is shown of a group with what was done.
func TestGroupInfo(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	g := b.Group("info", "g")
	if _, err := g.Info(t.Context()); !errors.Is(err, event.ErrNotFound) {
		t.Fatalf("no topic: %v", err)
	}
	publishAll(t, b, "info", counted(10)...)
	if _, err := g.Info(t.Context()); !errors.Is(err, event.ErrNotFound) {
		t.Fatalf("no group: %v", err)
	}
	k := take(t, b, "info", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: 6, BatchSize: 6})
	left := k.ack(4, func(p string) bool { return p != "3" })
	var info GroupInfo
	eventually(t, "the figures are those of the group", func() bool {
		var err error
		info, err = g.Info(t.Context())
		return err == nil && info.Floor == 2 && info.InFlight == 6 && info.Pending == 1
	})
	if info.Generation != 1 || info.Members != 1 || info.Paused || info.OldestUnackedMS < 0 || info.TTLMS != 0 {
		t.Errorf("%+v", info)
	}
	if err := left[0].Ack(); err != nil {
		t.Fatal(err)
	}
	k.ack(7-1, all)
	info = settledUpTo(t, g, 0)
	if info.OldestUnackedMS != 0 || info.Pending != 0 {
		t.Errorf("all is settled: %+v", info)
	}
}

// TestPreview compares what a preview says with what a move then delivers.
func TestPreview(t *testing.T) {
	t.Parallel()
	b := open(t, Config{moveWait: briefly})
	for _, tt := range []struct {
		name string
		to   func(r []event.Receipt) Position
		want Moved
		got  []string // after the move
	}{
		{"earliest", func([]event.Receipt) Position { return FromEarliest }, Moved{Redelivered: 6}, counted(12)},
		{"latest", func([]event.Receipt) Position { return FromLatest }, Moved{Skipped: 6}, nil},
		{"back 2", func([]event.Receipt) Position { return Back(2) }, Moved{Redelivered: 2 + 2}, counted(12)[2:]},
		{"back 100", func([]event.Receipt) Position { return Back(100) }, Moved{Redelivered: 6}, counted(12)},
		{"after the 9th", func(r []event.Receipt) Position { return FromAfterID(r[8].ID) }, Moved{Skipped: 3}, counted(12)[9:]},
		{"after the 5th", func(r []event.Receipt) Position { return FromAfterID(r[4].ID) }, Moved{Redelivered: 2, Skipped: 1, AtMost: true}, counted(12)[5:]},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			topic := fmt.Sprintf("preview.%x", tt.name)
			r := publishAll(t, b, topic, counted(12)...)
			g := b.Group(topic, "g")
			// 1 to 4, 6 and 8 are settled, 5 and 7 are not, 9 to 12 were not delivered
			k := take(t, b, topic, "g", SubscribeOptions{From: FromEarliest, MaxInFlight: 8, BatchSize: 8, Paused: true})
			k.sub.Resume()
			var left []*Delivery
			for range 8 {
				left = append(left, k.next())
			}
			if err := g.Pause(t.Context()); err != nil {
				t.Fatal(err)
			}
			for _, d := range left {
				if p := string(d.Event.Payload); p != "5" && p != "7" {
					if err := d.Ack(); err != nil {
						t.Fatal(err)
					}
				}
			}
			info := settledUpTo(t, g, 2)
			if info.Floor != 4 || info.Pending != 4 || !info.Paused {
				t.Fatalf("before: %+v", info)
			}
			to := tt.to(r)
			got, err := g.Preview(t.Context(), to)
			if err != nil || got != tt.want {
				t.Errorf("preview: %+v, %v, want %+v", got, err, tt.want)
			}
			if again, err := g.Info(t.Context()); err != nil || again.Generation != info.Generation {
				t.Errorf("the preview moved the group: %+v, %v", again, err)
			}
			if got, err = g.Move(t.Context(), to); err != nil || got != tt.want {
				t.Errorf("move: %+v, %v, want %+v", got, err, tt.want)
			}
			if info, err := g.Info(t.Context()); err != nil || !info.Paused || info.Generation != 2 {
				t.Errorf("after: %+v, %v", info, err)
			}
			if err := g.Resume(t.Context()); err != nil {
				t.Fatal(err)
			}
			publishAll(t, b, topic, "end")
			var payloads []string
			for len(payloads) == 0 || payloads[len(payloads)-1] != "end" {
				d := k.next()
				payloads = append(payloads, string(d.Event.Payload))
				if d.Attempt != 1 || d.Ack() != nil {
					t.Errorf("event %s has attempt %d", d.Event.Payload, d.Attempt)
				}
			}
			if want := append(slices.Clone(tt.got), "end"); !slices.Equal(payloads, want) {
				t.Errorf("got %q, want %q", payloads, want)
			}
		})
	}
	for _, to := range []Position{Back(0), Back(-1), Back(MaxBack + 1), AtBookmark("")} {
		if _, err := b.Group("preview", "g").Preview(t.Context(), to); !hasCode(err, event.CodeBadOptions) {
			t.Errorf("%+v: %v", to, err)
		}
	}
	if _, err := b.Group("none", "g").Move(t.Context(), FromEarliest); !errors.Is(err, event.ErrNotFound) || b.streams.Known("none") != nil {
		t.Errorf("a move made a topic: %v", err)
	}
	if _, err := b.Subscribe(t.Context(), "preview", "h", SubscribeOptions{From: Back(1)}, ignore); !hasCode(err, event.CodeBadOptions) {
		t.Errorf("a subscription that starts relative to a group: %v", err)
	}
}

func hasCode(err error, code string) bool {
	known, ok := errors.AsType[*event.Error](err)
	return ok && known.Code == code
}

// TestBackCountsOnlyTheTopic steps back over events of other topics and over gaps.
func TestBackCountsOnlyTheTopic(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: []topics.Rule{{Pattern: "fam.**", Family: "fam"}}})
	k := take(t, b, "fam.a", "g", SubscribeOptions{From: FromEarliest})
	for i := range 30 {
		for range i % 4 {
			publishAll(t, b, "fam.b", "x")
		}
		publishAll(t, b, "fam.a", strconv.Itoa(i))
	}
	k.ack(30, all)
	info := settledUpTo(t, b.Group("fam.a", "g"), 0)
	if info.Pending != 0 {
		t.Fatalf("%+v", info)
	}
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	stream, err := b.conn.JS.Stream(t.Context(), "fam")
	if err != nil {
		t.Fatal(err)
	}
	for seq := uint64(10); seq < 20; seq++ {
		if err := stream.DeleteMsg(t.Context(), seq); err != nil {
			t.Fatal(err)
		}
	}
	var left []string
	_ = b.History("fam.a").Scan(t.Context(), ScanOptions{From: FromEarliest}, func(e *event.Event) error {
		left = append(left, string(e.Payload))
		return nil
	})
	for _, n := range []int{1, 2, 5, 17, len(left), len(left) + 1, 1000} {
		got, err := b.Group("fam.a", "g").Preview(t.Context(), Back(n))
		if want := uint64(min(n, len(left))); err != nil || got.Redelivered != want || got.Skipped != 0 || got.AtMost {
			t.Errorf("%d back: %+v, %v, want %d", n, got, err, want)
		}
	}
}

// TestPausedGroup pauses a group that has members on two hubs, and resumes it.
func TestPausedGroup(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	one, two := openRemote(t, Config{URL: url}), openRemote(t, Config{URL: url})
	publishAll(t, one, "pause", counted(4)...)
	k := take(t, two, "pause", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: 4, BatchSize: 4})
	d := k.next()
	g := one.Group("pause", "g")
	for range 2 {
		if err := g.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	// The hub gives back what it holds.
	eventually(t, "only the lease is left", func() bool {
		k.sub.mu.Lock()
		defer k.sub.mu.Unlock()
		return len(k.sub.out) == 1
	})
	late := take(t, one, "pause", "g", SubscribeOptions{})
	publishAll(t, one, "pause", "5")
	if err := d.Extend(time.Minute); err != nil {
		t.Errorf("a lease of before: %v", err)
	}
	if err := d.Ack(); err != nil {
		t.Errorf("a lease of before: %v", err)
	}
	for range 30 { // for a while
		for _, m := range []*taker{k, late} {
			select {
			case h := <-m.ch:
				if _, ok := h.Begin(); ok {
					t.Fatalf("event %d came while the group was paused", h.Event.Sequence)
				}
			case <-time.After(10 * time.Millisecond):
			}
		}
	}
	if info, err := g.Info(t.Context()); err != nil || !info.Paused || info.Floor != 1 {
		t.Errorf("%+v, %v", info, err)
	}
	if err := g.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	var got []string
	deadline := time.After(wait)
	for len(got) < 4 {
		var h *Held
		select {
		case h = <-k.ch:
		case h = <-late.ch:
		case <-deadline:
			t.Fatalf("got only %q", got)
		}
		if d, ok := h.Begin(); ok {
			if d.Attempt != 1 {
				t.Errorf("event %s has attempt %d", d.Event.Payload, d.Attempt)
			}
			got = append(got, string(d.Event.Payload))
			_ = d.Ack()
		}
	}
	slices.Sort(got)
	if !slices.Equal(got, counted(5)[1:]) {
		t.Errorf("got %q", got)
	}
	if err := one.Group("pause", "other").Pause(t.Context()); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("no such group: %v", err)
	}
}

// TestBookmark goes back to bookmarks, with what was settled out of order.
func TestBookmark(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	one, two := openRemote(t, Config{URL: url, moveWait: briefly}), openRemote(t, Config{URL: url})
	publishAll(t, one, "marks", counted(10)...)
	g := one.Group("marks", "g")
	k := take(t, two, "marks", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: 8, BatchSize: 8})
	left := k.ack(8, func(p string) bool { return p != "3" && p != "6" })
	// the next two are delivered meanwhile
	left = append(left, k.next(), k.next())
	settledUpTo(t, g, 4)
	made, err := g.Bookmarks().Put(t.Context(), "before/the upgrade")
	if err != nil || !made.Exact || made.Floor != 2 || made.Newest != 10 || made.Unsettled != 4 {
		t.Fatalf("%+v, %v", made, err)
	}
	for _, d := range left {
		if err := d.Ack(); err != nil {
			t.Errorf("the bookmark took a lease: %v", err)
		}
	}
	settledUpTo(t, g, 0)
	second, err := g.Bookmarks().Put(t.Context(), "after")
	if err != nil || !second.Exact || second.Floor != 10 || second.Unsettled != 0 {
		t.Fatalf("%+v, %v", second, err)
	}
	list, err := g.Bookmarks().List(t.Context())
	if err != nil || len(list) != 2 || list[0].Name != "after" || list[1] != made {
		t.Errorf("%+v, %v", list, err)
	}
	for range 2 {
		if _, err := g.Move(t.Context(), AtBookmark("before/the upgrade")); err != nil {
			t.Fatal(err)
		}
		if got := settledOf(k, 4); !slices.Equal(got, []string{"3", "6", "9", "10"}) {
			t.Errorf("after the bookmark came %q", got)
		}
		settledUpTo(t, g, 0)
	}
	publishAll(t, one, "marks", "11")
	if got := settledOf(k, 1); got[0] != "11" {
		t.Errorf("then came %q", got)
	}
	if _, err := g.Move(t.Context(), AtBookmark("none")); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("no such bookmark: %v", err)
	}
	if err := g.Bookmarks().Delete(t.Context(), "after"); err != nil {
		t.Error(err)
	}
	if err := g.Bookmarks().Delete(t.Context(), "after"); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("deleted twice: %v", err)
	}
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := g.Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	if left, err := one.conn.Subjects(t.Context(), records.BookmarksBucket, ">"); err != nil || len(left) != 0 {
		t.Errorf("after the group was deleted, there is %v, %v", left, err)
	}
	if left, err := one.conn.Subjects(t.Context(), native.GroupsBucket, "$KV."+native.GroupsBucket+"."+"HELD."+">"); err != nil || len(left) != 0 {
		t.Errorf("questions were left: %v, %v", left, err)
	}
}

// settledOf takes n events, settles them, and returns them in order.
func settledOf(k *taker, n int) []string {
	k.t.Helper()
	var got []string
	for range n {
		d := k.next()
		got = append(got, string(d.Event.Payload))
		if err := d.Ack(); err != nil {
			k.t.Error(err)
		}
	}
	slices.SortFunc(got, func(a, b string) int { return len(a)*1000 + int(a[0]) - len(b)*1000 - int(b[0]) })
	return got
}

// A bookmark that cannot tell which events are unsettled takes all behind the floor for unsettled.
func TestBookmarkThatIsNotExact(t *testing.T) {
	t.Parallel()
	b := open(t, Config{moveWait: briefly})
	publishAll(t, b, "rough", counted(4)...)
	g := b.Group("rough", "g")
	k := take(t, b, "rough", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: 4, BatchSize: 4})
	left := k.ack(4, func(p string) bool { return p != "2" })
	if err := left[0].Nack("later", time.Hour); err != nil { // in no hub's hands
		t.Fatal(err)
	}
	settledUpTo(t, g, 1)
	made, err := g.Bookmarks().Put(t.Context(), "m")
	if err != nil || made.Exact || made.Floor != 1 || made.Unsettled != 1 {
		t.Fatalf("%+v, %v", made, err)
	}
	if _, err := g.Move(t.Context(), AtBookmark("m")); err != nil {
		t.Fatal(err)
	}
	if got := settledOf(k, 3); !slices.Equal(got, []string{"2", "3", "4"}) {
		t.Errorf("got %q", got)
	}
}

// TestBookmarksAreBounded fills a group's bookmarks.
func TestBookmarksAreBounded(t *testing.T) {
	t.Parallel()
	reached := &counter{}
	b := open(t, Config{Observer: reached})
	publishAll(t, b, "many", "1")
	k := take(t, b, "many", "g", SubscribeOptions{})
	marks := b.Group("many", "g").Bookmarks()
	for i := range MaxBookmarks {
		if _, err := marks.Put(t.Context(), strconv.Itoa(i)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := marks.Put(t.Context(), "0"); err != nil {
		t.Errorf("replacing a bookmark: %v", err)
	}
	if _, err := marks.Put(t.Context(), "more"); !hasCode(err, event.CodeOverloaded) || reached.limit("bookmarks") != 1 {
		t.Errorf("one more than allowed: %v", err)
	}
	if _, err := marks.Put(t.Context(), "a\x00"); !hasCode(err, event.CodeBadOptions) {
		t.Errorf("a name with a control character: %v", err)
	}
	_ = k.sub.Stop(context.Background())
}

// TestGroupsPages lists groups page by page.
func TestGroupsPages(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: []topics.Rule{{Pattern: "fam.**", Family: "fam"}}})
	var want []string
	for _, topic := range []string{"fam.x", "fam.y", "orders"} {
		for i := range 5 {
			name := fmt.Sprintf("g%d", i)
			if err := b.Group(topic, name).Seek(t.Context(), FromLatest); err != nil {
				t.Fatal(err)
			}
			want = append(want, topic+" "+name)
		}
	}
	if err := b.Group("orders", "g3").Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	want = slices.DeleteFunc(want, func(s string) bool { return s == "orders g3" })
	list := func(page GroupsPage) (names []string, pages int) {
		t.Helper()
		for {
			groups, next, err := b.Admin().Groups().List(t.Context(), page)
			if err != nil {
				t.Fatal(err)
			}
			for _, g := range groups {
				names = append(names, g.Topic+" "+g.Group)
			}
			if pages++; next == "" {
				return names, pages
			}
			page.Next = next
		}
	}
	for _, limit := range []int{1, 3, 500} {
		got, _ := list(GroupsPage{Limit: limit})
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("pages of %d: %q", limit, got)
		}
	}
	if got, pages := list(GroupsPage{Limit: 2, Topic: "fam.x"}); len(got) != 5 || pages != 3 {
		t.Errorf("of one topic: %q on %d pages", got, pages)
	}
	if got, _ := list(GroupsPage{Limit: 9, Visible: func(topic, group string) bool { return topic == "orders" && group == "g1" }}); !slices.Equal(got, []string{"orders g1"}) {
		t.Errorf("visible: %q", got)
	}
	if got, _ := list(GroupsPage{Limit: 9, Topic: "none"}); len(got) != 0 {
		t.Errorf("of no topic: %q", got)
	}
	for _, page := range []GroupsPage{{Limit: 0}, {Limit: MaxGroupsPage + 1}, {Limit: 1, Next: "?"}, {Limit: 1, Next: "YQ"}} {
		if _, _, err := b.Admin().Groups().List(t.Context(), page); !hasCode(err, event.CodeBadOptions) {
			t.Errorf("%+v: %v", page, err)
		}
	}
}

// counted are the numbers from 1 to n.
func counted(n int) []string {
	s := make([]string, n)
	for i := range s {
		s[i] = strconv.Itoa(i + 1)
	}
	return s
}
