package jetstream

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream/event"
)

// repairs moves the group to where it is.
func repairs(t *testing.T, g Group) Moved {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	did, err := g.Move(ctx, InPlace)
	if err != nil {
		t.Fatal(err)
	}
	return did
}

// TestRepairKeepsWhatIsSettled repairs a group with events in every state: settled behind the
// floor, leased on two hubs, refused and in back-off, leased by a hub that was killed.
func TestRepairKeepsWhatIsSettled(t *testing.T) {
	t.Parallel()
	for _, servers := range []int{1, 3} {
		t.Run(strconv.Itoa(servers), func(t *testing.T) {
			t.Parallel()
			url := natsServers(t, servers)
			cfg := Config{URL: url, Replicas: servers, AckWait: time.Minute}
			one, two, doomed := openRemote(t, cfg), openRemote(t, cfg), openRemote(t, cfg)
			publishAll(t, one, "repair", counted(12)...)
			g := one.Group("repair", "g")
			if err := g.Seek(t.Context(), FromEarliest); err != nil {
				t.Fatal(err)
			}
			opts := SubscribeOptions{MaxInFlight: 3, BatchSize: 3}
			k := take(t, doomed, "repair", "g", opts)
			first := k.ack(3, func(p string) bool { return p == "2" })
			first = append(first, k.next()) // 4: the hub has asked for no more
			settledUpTo(t, g, 3)
			for _, l := range doomed.conn.Links {
				l.NC.Close()
			}
			_ = k.sub.Stop(t.Context())
			k1 := take(t, one, "repair", "g", SubscribeOptions{MaxInFlight: 4, BatchSize: 4})
			left := k1.ack(4, func(p string) bool { return p == "5" })
			for _, d := range left { // 6 7 8
				if err := d.Nack("later", time.Hour); err != nil {
					t.Fatal(err)
				}
			}
			k2 := take(t, two, "repair", "g", opts)
			var held []*Delivery
			for len(held) < 4 {
				var came *Held
				select {
				case came = <-k1.ch:
				case came = <-k2.ch:
				case <-time.After(wait):
					t.Fatalf("only %d events came", len(held))
				}
				if d, ok := came.Begin(); ok {
					held = append(held, d)
				}
			}
			if err := held[0].Ack(); err != nil {
				t.Fatal(err)
			}
			settled := string(held[0].Event.Payload)
			eventually(t, "all are settled", func() bool {
				info, err := g.Info(t.Context())
				return err == nil && info.InFlight == 9 && info.Pending == 0
			})
			would, err := g.Preview(t.Context(), InPlace)
			if err != nil || would != (Moved{Redelivered: 3, AtMost: true}) {
				t.Errorf("preview: %+v, %v", would, err)
			}
			if did := repairs(t, g); did != (Moved{}) {
				t.Errorf("the repair did %+v", did)
			}
			for _, d := range append(held[1:], first...) {
				if err := d.Ack(); err == nil {
					t.Errorf("the lease of %s outlived the repair", d.Event.Payload)
				}
			}
			want := make(map[string]int)
			for _, p := range counted(12) {
				want[p] = 2
			}
			delete(want, "2")
			delete(want, "5")
			delete(want, settled)
			got := make(map[string]int)
			for len(got) < len(want) {
				var came *Held
				select {
				case came = <-k1.ch:
				case came = <-k2.ch:
				case <-time.After(wait):
					t.Fatalf("after the repair came %v, want %v", got, want)
				}
				if d, ok := came.Begin(); ok {
					got[string(d.Event.Payload)] = d.Attempt
					if err := d.Ack(); err != nil {
						t.Error(err)
					}
				}
			}
			if !maps.Equal(got, want) {
				t.Errorf("after the repair came %v, want %v", got, want)
			}
			info := settledUpTo(t, g, 0)
			if info.Pending != 0 || info.Generation != 3 {
				t.Errorf("at the end: %+v", info)
			}
		})
	}
}

// TestRepairKeepsTheGroup repairs a group that is paused, has a bookmark and events with attempts,
// several times.
func TestRepairKeepsTheGroup(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	one, two := openRemote(t, Config{URL: url, moveWait: briefly}), openRemote(t, Config{URL: url})
	publishAll(t, one, "kept", counted(4)...)
	g := one.Group("kept", "g")
	k := take(t, two, "kept", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: 4, BatchSize: 4, GroupTTL: time.Hour, MaxAttempts: NeverGiveUp})
	made, err := g.Bookmarks().Put(t.Context(), "m")
	if err != nil {
		t.Fatal(err)
	}
	left := k.ack(4, func(p string) bool { return p != "2" })
	if err := left[0].Nack("no", time.Hour); err != nil {
		t.Fatal(err)
	}
	settledUpTo(t, g, 1)
	for attempt := 2; attempt <= 6; attempt += 2 {
		repairs(t, g)
		d := k.next()
		if string(d.Event.Payload) != "2" || d.Attempt != attempt {
			t.Fatalf("got %s, attempt %d, want attempt %d", d.Event.Payload, d.Attempt, attempt)
		}
		if err := d.Nack("no", 0); err != nil {
			t.Fatal(err)
		}
		d = k.next()
		if d.Attempt != attempt+1 {
			t.Fatalf("got attempt %d, want %d", d.Attempt, attempt+1)
		}
		// the repair takes the lease: it counts
	}
	if err := g.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	repairs(t, g)
	info, err := g.Info(t.Context())
	if err != nil || !info.Paused || info.TTLMS != time.Hour.Milliseconds() {
		t.Errorf("%+v, %v", info, err)
	}
	publishAll(t, one, "kept", "5")
	k.quiet(300 * time.Millisecond)
	if err := g.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := settledOf(k, 2); !slices.Equal(got, []string{"2", "5"}) {
		t.Errorf("then came %q", got)
	}
	if mark, err := g.Bookmarks().Get(t.Context(), "m"); err != nil || mark != made {
		t.Errorf("the bookmark is %+v, %v", mark, err)
	}
	if _, err := one.Group("kept", "none").Move(t.Context(), InPlace); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("no such group: %v", err)
	}
	if _, err := one.Group("none", "g").Move(t.Context(), InPlace); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("no such topic: %v", err)
	}
	if _, err := one.Subscribe(t.Context(), "kept", "new", SubscribeOptions{From: InPlace}, ignore); !hasCode(err, event.CodeBadOptions) {
		t.Errorf("a group cannot begin in place: %v", err)
	}
}

// TestTwoRepairsAtOnce repairs a group on two hubs at once, while a third pauses and resumes, and
// takes bookmarks.
func TestTwoRepairsAtOnce(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	var hubs []*Bus
	for range 3 {
		hubs = append(hubs, openRemote(t, Config{URL: url, AckWait: 3 * time.Second, moveWait: briefly}))
	}
	const events = 60
	publishAll(t, hubs[0], "twice", counted(events)...)
	g := hubs[0].Group("twice", "g")
	k := take(t, hubs[2], "twice", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: events, BatchSize: events, MaxAttempts: NeverGiveUp})
	odd := func(p string) bool { n, _ := strconv.Atoi(p); return n%2 == 1 }
	k.ack(events, odd)
	settledUpTo(t, g, events/2)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for _, hub := range hubs[:2] {
		wg.Go(func() {
			if _, err := hub.Group("twice", "g").Move(ctx, InPlace); err != nil {
				t.Errorf("repair: %v", err)
			}
		})
	}
	wg.Go(func() {
		for i := range 3 {
			h := hubs[2].Group("twice", "g")
			_, err := h.Bookmarks().Put(ctx, fmt.Sprint("m", i))
			if err := errors.Join(err, h.Pause(ctx), h.Resume(ctx)); err != nil {
				t.Error(err)
			}
		}
	})
	wg.Wait()
	got := make(map[string]bool)
	for len(got) < events/2 {
		d := k.next()
		if odd(string(d.Event.Payload)) {
			t.Errorf("event %s came again, attempt %d", d.Event.Payload, d.Attempt)
		}
		if d.Ack() == nil {
			got[string(d.Event.Payload)] = true
		}
	}
	if info := settledUpTo(t, g, 0); info.Pending != 0 || info.Paused {
		t.Errorf("at the end: %+v", info)
	}
}
