package jetstream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/publish"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

// ended waits until a group with a TTL has ended. If the process stood still, and so lost leases,
// the server keeps the group for AckWait first.
func ended(t *testing.T, g Group) {
	t.Helper()
	eventuallyWithin(t, 30*time.Second+wait, "the group disappears", func() bool {
		_, err := g.Cursor(t.Context())
		return errors.Is(err, event.ErrNotFound)
	})
}

// A bookmark made before the group has worked off what an earlier bookmark had settled.
func TestABookmarkOfABookmark(t *testing.T) {
	t.Parallel()
	b := open(t, Config{moveWait: briefly})
	publishAll(t, b, "marks", counted(6)...)
	g := b.Group("marks", "g")
	k := take(t, b, "marks", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: 6, BatchSize: 6})
	k.ack(6, func(p string) bool { return p != "1" })
	settledUpTo(t, g, 1)
	if made, err := g.Bookmarks().Put(t.Context(), "first"); err != nil || !made.Exact || made.Floor != 0 {
		t.Fatalf("%+v, %v", made, err)
	}
	if err := g.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Move(t.Context(), AtBookmark("first")); err != nil {
		t.Fatal(err)
	}
	// only 1 is unsettled
	made, err := g.Bookmarks().Put(t.Context(), "second")
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("second: %+v", made)
	if _, err := g.Move(t.Context(), AtBookmark("second")); err != nil {
		t.Fatal(err)
	}
	if err := g.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := k.payloads(1); !slices.Equal(got, []string{"1"}) {
		t.Errorf("got %q", got)
	}
	k.quiet(time.Second)
}

// Bookmarks end with the topic, and do not count for the groups of a topic created again.
func TestBookmarksEndWithTheTopic(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	for round := range 2 {
		publishAll(t, b, "again", "1")
		k := take(t, b, "again", "g", SubscribeOptions{From: FromEarliest})
		k.payloads(1)
		marks := b.Group("again", "g").Bookmarks()
		if list, err := marks.List(t.Context()); err != nil || len(list) != 0 {
			t.Fatalf("%v, %v", list, err)
		}
		for i := range MaxBookmarks {
			if _, err := marks.Put(t.Context(), fmt.Sprint(round, "-", i)); err != nil {
				t.Fatalf("round %d, bookmark %d: %v", round, i, err)
			}
		}
		_ = k.sub.Stop(context.Background())
		if err := b.Admin().Topic("again").Delete(t.Context(), DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		if left, err := b.conn.Subjects(t.Context(), records.BookmarksBucket, ">"); err != nil || len(left) != 0 {
			t.Errorf("%d bookmarks are left, %v", len(left), err)
		}
	}
}

// A group with a TTL that has ended leaves nothing to a later group of its name: that is given all
// events, from where it asked to start.
func TestANewGroupIsGivenWhatABookmarkOfAnEndedOneSkips(t *testing.T) {
	t.Parallel()
	b := open(t, Config{moveWait: briefly})
	publishAll(t, b, "tabs", counted(6)...)
	g := b.Group("tabs", "g")
	opts := SubscribeOptions{From: FromEarliest, MaxInFlight: 6, BatchSize: 6, GroupTTL: time.Second}
	k := take(t, b, "tabs", "g", opts)
	k.ack(6, func(p string) bool { return p != "1" })
	settledUpTo(t, g, 1)
	if _, err := g.Bookmarks().Put(t.Context(), "m"); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Move(t.Context(), AtBookmark("m")); err != nil {
		t.Fatal(err)
	}
	k.payloads(1)
	_ = k.sub.Stop(context.Background())
	ended(t, g)
	k = take(t, b, "tabs", "g", opts)
	if list, err := g.Bookmarks().List(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("the new group has bookmarks %+v, %v", list, err)
	}
	if got := settledOf(k, 6); !slices.Equal(got, counted(6)) {
		t.Errorf("got %q", got)
	}
}

// A new group is not paused because an ended one of its name was.
func TestANewGroupIsNotPaused(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "tabs", counted(1)...)
	g := b.Group("tabs", "g")
	opts := SubscribeOptions{From: FromEarliest, GroupTTL: time.Second}
	k := take(t, b, "tabs", "g", opts)
	k.payloads(1)
	if err := g.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	_ = k.sub.Stop(context.Background())
	ended(t, g)
	k = take(t, b, "tabs", "g", opts)
	if got := k.payloads(1); got[0] != "1" {
		t.Errorf("got %q", got)
	}
}

// A new group is not given what was put back to an ended one.
func TestANewGroupIsNotGivenWhatWasPutBack(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "tabs", counted(1)...)
	g := b.Group("tabs", "g")
	opts := SubscribeOptions{From: FromEarliest, GroupTTL: time.Second, MaxAttempts: 1}
	k := take(t, b, "tabs", "g", opts)
	if err := k.next().Nack("no", 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the letter", func() bool { return len(letterList(t, b, LetterFilter{})) == 1 })
	if err := g.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	redriveAll(t, b, LetterFilter{}, RedriveOptions{})
	_ = k.sub.Stop(context.Background())
	ended(t, g)
	opts.From = FromLatest
	k = take(t, b, "tabs", "g", opts)
	_ = g.Resume(t.Context())
	k.quiet(2 * time.Second)
}

// A topic that is full does not hold up delayed events for others.
func TestAFullTopicDoesNotHoldUpDelayedEventsOfOthers(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: []topics.Rule{{Pattern: "full", MaxMsgs: 2, OnFull: topics.OnFullReject}}})
	take(t, b, "full", "g", SubscribeOptions{From: FromEarliest})
	publishAll(t, b, "full", "1", "2")
	var wg sync.WaitGroup
	for w := range 16 {
		wg.Go(func() {
			for i := range 8*publish.DueBatch/16 + 10 {
				// Due when all are scheduled, or when this one has long been, if that takes longer.
				opts := PublishOptions{ID: strconv.Itoa(w) + "-" + strconv.Itoa(i), Delay: 2 * time.Second}
				if _, err := b.Publish(t.Context(), "full", []byte("1"), opts); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	at := time.Now().Add(3 * time.Second) // when all those are due
	if _, err := b.Publish(t.Context(), "other", []byte("1"), PublishOptions{At: at}); err != nil {
		t.Fatal(err)
	}
	publishAll(t, b, "other", "0")
	<-time.After(time.Until(at))
	awaitStored(t, b, "other", 2)
}

// What is tried again is not counted again, and two hubs may redrive at once.
func TestTwoHubsRedriveAtOnce(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	const n = 300
	limits := Limits{PutBackShare: n * (deadOverhead + 3)}
	one, two := open(t, Config{URL: url, Limits: limits}), open(t, Config{URL: url, Limits: limits})
	for _, topic := range []string{"a", "b"} {
		publishAll(t, one, topic, numbers(n)...)
		fail(t, one, topic, "g", "no", n)
	}
	var wg sync.WaitGroup
	for i, b := range []*Bus{one, two} {
		wg.Go(func() {
			began := time.Now()
			got, err := b.Admin().DeadLetters().Redrive(t.Context(), LetterFilter{Topic: string(rune('a' + i))}, RedriveOptions{Rate: maxRedriveRate, Client: "jwt:eve"})
			t.Logf("%+v, %v, %v", got, err, time.Since(began))
			if err != nil || got.Done != n {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
	wg.Wait()
}

// What a member gave back and an operator purged was not lost.
func TestAPurgeOfWhatWasGivenBackIsNoLoss(t *testing.T) {
	t.Parallel()
	seen := new(losses)
	b := open(t, Config{Observer: seen, watchOthers: 300 * time.Millisecond})
	g := takeTold(t, b, "orders", SubscribeOptions{From: FromEarliest, MaxAttempts: 0})
	fillFrom(t, b, "orders", 1, 3)
	for range 3 {
		if err := g.next().Nack("later", time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := b.Admin().Topic("orders").Purge(t.Context(), PurgeOptions{All: true}); err != nil {
		t.Fatal(err)
	}
	looks, last := 0, int64(0)
	for n := 4; looks < 6; n++ { // events keep the group looked at
		fillFrom(t, b, "orders", n, n)
		g.payloads(1)
		if g.sum() != 0 || seen.count() != 0 {
			t.Fatalf("%d are counted as lost, though they were purged; members were told of %d", seen.count(), g.sum())
		}
		b.groups.eachGroup(func(g *group) {
			g.mu.Lock()
			defer g.mu.Unlock()
			if g.watched != last {
				last, looks = g.watched, looks+1
			}
		})
		<-time.After(20 * time.Millisecond)
	}
}

// A letter that is not put back does not count for the share of the client.
func TestOnlyWhatIsPutBackCounts(t *testing.T) {
	t.Parallel()
	const n = 25
	b := open(t, Config{Limits: Limits{PutBackShare: 15 * (deadOverhead + 1)}})
	for i := range n {
		publishAll(t, b, "a", strconv.Itoa(i%10))
	}
	fail(t, b, "a", "g", "no", n)
	got, err := b.Admin().DeadLetters().Redrive(t.Context(), LetterFilter{Topic: "a"}, RedriveOptions{Client: "jwt:eve", Rate: 100})
	if !hasCode(err, event.CodeRateLimited) || got.Done != 15 {
		t.Errorf("%+v, %v: want 15 done", got, err)
	}
}

// A group in memory that was moved is where it was moved to after its server was restarted.
func TestAMoveOfAGroupInMemorySurvivesTheServer(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t)
	b := open(t, Config{URL: s.URL()})
	publishAll(t, b, "tabs", counted(4)...)
	opts := SubscribeOptions{From: FromEarliest, GroupTTL: time.Minute}
	k := take(t, b, "tabs", "g", opts)
	k.payloads(4)
	g := b.Group("tabs", "g")
	settledUpTo(t, g, 0)
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Move(t.Context(), FromEarliest); err != nil {
		t.Fatal(err)
	}
	s.Stop()
	s.Start()
	eventually(t, "the server is back", func() bool { _, err := b.Admin().Topic("tabs").Info(t.Context()); return err == nil })
	opts.From = FromLatest
	k = take(t, b, "tabs", "g", opts)
	if got := settledOf(k, 4); !slices.Equal(got, counted(4)) {
		t.Errorf("got %q", got)
	}
}

// A bookmark of a group that is moved meanwhile does not say that there is no group.
func TestABookmarkDuringAMove(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "orders", counted(4)...)
	g := b.Group("orders", "g")
	k := take(t, b, "orders", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: 4, BatchSize: 4})
	left := k.ack(4, func(p string) bool { return p != "2" })
	if err := left[0].Nack("later", time.Hour); err != nil { // in no hub's hands
		t.Fatal(err)
	}
	settledUpTo(t, g, 1)
	done := make(chan error, 1)
	go func() {
		_, err := g.Bookmarks().Put(t.Context(), "m")
		done <- err
	}()
	<-time.After(300 * time.Millisecond)
	if _, err := g.Move(t.Context(), FromEarliest); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("put: %v", err)
	}
}

// What is due and cannot be stored counts for the limit of its client.
func TestDueEventsThatCannotBeStoredCount(t *testing.T) {
	t.Parallel()
	b := open(t, Config{
		Topics: []topics.Rule{{Pattern: "full", MaxMsgs: 2, OnFull: topics.OnFullReject}},
		Limits: Limits{DelayedPerClient: 10},
	})
	take(t, b, "full", "g", SubscribeOptions{From: FromEarliest})
	publishAll(t, b, "full", "1", "2")
	for round := range 4 {
		for range 10 {
			_, err := b.Publish(t.Context(), "full", []byte("1"), PublishOptions{CountFor: "jwt:eve", Delay: 500 * time.Millisecond})
			if hasCode(err, event.CodeOverloaded) && round > 0 {
				return
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, "all are due", func() bool { return waiting(t, b) == 0 })
		<-time.After(time.Second)
	}
	n, err := delayedCount(t, b, duePrefix+">")
	t.Errorf("a client with a limit of 10 has %d events in the stream of delayed events, %v", n, err)
}

// An event of a topic that was deleted and created again has a dead letter of its own.
func TestALetterOfATopicMadeAnew(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	for round := range 2 {
		publishAll(t, b, "orders", fmt.Sprintf(`"of round %d"`, round))
		k := take(t, b, "orders", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 1})
		if err := k.next().Nack("no", 0); err != nil {
			t.Fatal(err)
		}
		settledUpTo(t, b.Group("orders", "g"), 0)
		_ = k.sub.Stop(context.Background())
		letters := letterList(t, b, LetterFilter{Topic: "orders"})
		if len(letters) != round+1 {
			t.Errorf("round %d: %d letters", round, len(letters))
		}
		if err := b.Admin().Topic("orders").Delete(t.Context(), DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

// So has an event that fails for a new group of the name of one that has ended, after the first
// letter was discarded.
func TestALetterOfAGroupMadeAnew(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "tabs", "1")
	g := b.Group("tabs", "g")
	for round := range 2 {
		k := take(t, b, "tabs", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 1, GroupTTL: time.Second})
		if err := k.next().Nack("no", 0); err != nil {
			t.Fatal(err)
		}
		settledUpTo(t, g, 0)
		if got := len(letterList(t, b, LetterFilter{Topic: "tabs"})); got != 1 {
			t.Errorf("round %d: %d letters", round, got)
		}
		if _, err := b.Admin().DeadLetters().Discard(t.Context(), LetterFilter{Topic: "tabs"}, RedriveOptions{Rate: 1000}); err != nil {
			t.Fatal(err)
		}
		_ = k.sub.Stop(context.Background())
		ended(t, g)
	}
}
