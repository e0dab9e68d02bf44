// Package outboxtest is a conformance suite for implementations of outbox.Store.
package outboxtest

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/outbox"
)

// Harness is an empty store under test.
type Harness struct {
	Store outbox.Store
	// Add adds a record and commits.
	Add func(ctx context.Context, r *outbox.Record) error
	// KeepsSent means that sent records stay until they are purged.
	KeepsSent bool
}

// patience is the timeout of a wait.
const patience = 20 * time.Second

// long is a lease that outlasts every test. short is a lease that a test waits out.
const (
	long  = time.Hour
	short = 50 * time.Millisecond
)

// Run runs the suite. It calls open for an empty store at the start of each test.
func Run(t *testing.T, open func(t *testing.T) Harness) {
	t.Helper()
	tests := []struct {
		name string
		run  func(*suite)
	}{
		{"a claim hands out what was added", claimHandsOut},
		{"a record comes back whole", comesBackWhole},
		{"what is claimed is not handed out again", claimedOnce},
		{"a lane is handed out in order and without a gap", inOrder},
		{"a lane waits for what another has of it", laneWaitsForClaimed},
		{"a lane waits for a retry, others do not", laneWaitsForRetry},
		{"a lane waits for what is parked, unless told otherwise", laneWaitsForParked},
		{"a long lane that waits holds up nobody", longLaneHoldsUpNobody},
		{"many lanes that wait hold up nobody", manyLanesHoldUpNobody},
		{"the limit is kept, and all lanes have their turn", limitAndTurns},
		{"the bytes are kept", limitBytes},
		{"topics are left out", exceptTopics},
		{"an expired lease is given to others", expiry},
		{"a renewed lease is not", renewal},
		{"who has lost a record settles nothing but what is sent", lostClaim},
		{"the moment of the publish is kept until it is known to be unsent", publishBegan},
		{"the time", clock},
		{"failures are counted and told", failures},
		{"retry makes new", retry},
		{"purge", purge},
		{"list", list},
		{"statistics", stats},
		{"bad records are refused", badRecords},
		{"an id can be added once to a topic", sameID},
		{"an id in two topics is two records", idOfTwoTopics},
		{"hostile names", hostileNames},
		{"many workers: each record once, in order", manyWorkers},
	}
	for _, test := range tests {
		t.Run(strings.ReplaceAll(test.name, " ", "_"), func(t *testing.T) { test.run(&suite{T: t, Harness: open(t)}) })
	}
}

type suite struct {
	*testing.T
	Harness
}

// add adds records given as "id topic/key". Without a slash, a record has no key.
func (s *suite) add(records ...string) {
	s.Helper()
	for _, r := range records {
		id, at, _ := strings.Cut(r, " ")
		topic, key, _ := strings.Cut(at, "/")
		if err := s.Add(s.Context(), &outbox.Record{ID: id, Topic: topic, Key: key, Payload: []byte(`"` + id + `"`)}); err != nil {
			s.Fatal(err)
		}
	}
}

func (s *suite) claimWith(opts outbox.ClaimOptions) outbox.Claim {
	s.Helper()
	c, err := s.Store.Claim(s.Context(), opts)
	if err != nil {
		s.Fatal(err)
	}
	return c
}

// claim claims all available records for a worker.
func (s *suite) claim(worker string) []*outbox.Record {
	s.Helper()
	return s.claimWith(outbox.ClaimOptions{Worker: worker, Limit: 100, Lease: long}).Records
}

// ids returns the sorted ids of records. Lanes are in no particular order.
func ids(records []*outbox.Record) string {
	var list []string
	for _, r := range records {
		list = append(list, r.ID)
	}
	slices.Sort(list)
	return strings.Join(list, " ")
}

func (s *suite) want(what string, records []*outbox.Record, want string) {
	s.Helper()
	if got := ids(records); got != want {
		s.Fatalf("%s: got %q, want %q", what, got, want)
	}
}

func (s *suite) settle(worker string, st outbox.Settlement) {
	s.Helper()
	if _, err := s.Store.Settle(s.Context(), worker, st); err != nil {
		s.Fatal(err)
	}
}

// fail ends the claim of a record by worker "w".
func (s *suite) fail(f outbox.Failure) {
	s.Helper()
	s.settle("w", outbox.Settlement{Failed: []outbox.Failure{f}})
}

// eventually polls f until it returns true.
func (s *suite) eventually(what string, f func() bool) {
	s.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !f() {
		select {
		case <-tick.C:
		case <-deadline:
			s.Fatalf("timed out waiting: %s", what)
		}
	}
}

func (s *suite) count(what string, got int, err error, want int) {
	s.Helper()
	if err != nil || got != want {
		s.Fatalf("%s: got %d, %v; want %d", what, got, err, want)
	}
}

func claimHandsOut(s *suite) {
	s.want("empty", s.claim("w"), "")
	s.add("1 t/a", "2 t/b", "3 t", "4 u")
	s.want("all", s.claim("w"), "1 2 3 4")
}

func comesBackWhole(s *suite) {
	r := &outbox.Record{
		ID: "whole", Topic: "orders.placed", Key: "host:1.2/\"ä'", Type: "Placed", Payload: []byte("{\"n\": 12345678901234567890,\n \"a\":\"\\u0041<&>\"}"),
		Headers: map[string]string{"x-a": "b", "Y": "ü"}, SID: "s", Tags: []string{"t1", "t2"}, CausedBy: []string{"c"}, TS: 1234567890123,
	}
	if err := s.Add(s.Context(), r); err != nil {
		s.Fatal(err)
	}
	got := s.claim("w")
	s.want("claim", got, "whole")
	g := got[0]
	if g.Status != outbox.Claimed || g.ClaimedBy != "w" || g.LeaseUntil == 0 || g.AddedAt == 0 || g.PublishBegan == 0 || g.Sequence == 0 {
		s.Errorf("record state is %+v", g)
	}
	a := outbox.Record{ID: g.ID, Topic: g.Topic, Key: g.Key, Type: g.Type, Payload: g.Payload, Headers: g.Headers, SID: g.SID, Tags: g.Tags, CausedBy: g.CausedBy, TS: g.TS}
	if !reflect.DeepEqual(&a, r) {
		s.Errorf("got\n%+v, want\n%+v", &a, r)
	}
}

func claimedOnce(s *suite) {
	s.add("1 t/a", "2 t")
	s.want("first", s.claim("w"), "1 2")
	s.want("second", s.claim("w"), "")
	s.want("other", s.claim("v"), "")
	s.add("3 t")
	s.want("new", s.claim("v"), "3")
}

func inOrder(s *suite) {
	var want []string
	for i := range 30 {
		id := fmt.Sprintf("%02d", 99-i) // insertion order, not id order
		s.add(id + " t/a")
		want = append(want, id)
	}
	var got []string
	for len(got) < len(want) {
		c := s.claimWith(outbox.ClaimOptions{Worker: "w", Limit: 7, Lease: long})
		if len(c.Records) == 0 || len(c.Records) > 7 {
			s.Fatalf("claim has %d records", len(c.Records))
		}
		for _, r := range c.Records {
			got = append(got, r.ID)
		}
		s.settle("w", outbox.Settlement{Sent: c.Records})
	}
	if !slices.Equal(got, want) {
		s.Errorf("got %q, want %q", got, want)
	}
}

func laneWaitsForClaimed(s *suite) {
	s.add("1 t/a", "2 t/a", "9 u/a")
	first := s.claimWith(outbox.ClaimOptions{Worker: "w", Limit: 100, Lease: long}).Records
	s.want("first", first, "1 2 9")
	s.add("3 t/a", "4 t/b", "5 u/a")
	s.want("other", s.claim("v"), "4")
	slices.SortFunc(first, func(a, b *outbox.Record) int { return strings.Compare(a.ID, b.ID) })
	s.settle("w", outbox.Settlement{Sent: first[:1]})
	s.want("while 2 is out", s.claim("v"), "")
	s.settle("w", outbox.Settlement{Sent: first[1:]})
	s.want("then", s.claim("v"), "3 5")
}

func laneWaitsForRetry(s *suite) {
	s.add("1 t/a", "2 t/a", "3 t/b", "4 t")
	got := s.claim("w")
	s.want("all", got, "1 2 3 4")
	var st outbox.Settlement
	for _, r := range got {
		f := outbox.Failure{Record: r}
		if r.ID == "1" {
			f.Delay = time.Hour
		}
		st.Failed = append(st.Failed, f)
	}
	s.settle("w", st)
	s.want("others", s.claim("w"), "3 4")
}

func laneWaitsForParked(s *suite) {
	s.add("1 t/a", "2 t/a", "3 t/a")
	got := s.claimWith(outbox.ClaimOptions{Worker: "w", Limit: 1, Lease: long}).Records
	s.want("first", got, "1")
	s.fail(outbox.Failure{Record: got[0], Park: true, Err: "no"})
	s.want("behind what is parked", s.claim("w"), "")
	s.want("past it", s.claimWith(outbox.ClaimOptions{Worker: "w", Limit: 100, Lease: long, PassErrors: true}).Records, "2 3")
}

func longLaneHoldsUpNobody(s *suite) {
	var first *outbox.Record
	for i := range 300 {
		s.add(fmt.Sprintf("a%03d t/a", i))
		if i == 0 {
			first = s.claim("w")[0]
			s.fail(outbox.Failure{Record: first, Delay: time.Hour})
		}
	}
	s.add("b t/b", "c t", "d s/a")
	s.want("the others", s.claimWith(outbox.ClaimOptions{Worker: "w", Limit: 5, Lease: long}).Records, "b c d")
}

func manyLanesHoldUpNobody(s *suite) {
	for i := range 120 {
		s.add(fmt.Sprintf("a%03d t/a%03d", i, i))
	}
	var st outbox.Settlement
	for range 2 {
		for _, r := range s.claim("w") {
			st.Failed = append(st.Failed, outbox.Failure{Record: r, Delay: time.Hour})
		}
	}
	s.settle("w", st)
	s.add("0 t/0", "b t/b", "c t", "d s/a", "z z/z")
	seen := make(map[string]bool)
	for range 100 {
		c := s.claimWith(outbox.ClaimOptions{Worker: "w", Limit: 2, Lease: long})
		for _, r := range c.Records {
			seen[r.ID] = true
		}
		if len(c.Records) == 0 && !c.More {
			break
		}
	}
	if len(seen) != 5 {
		s.Fatalf("claimed %d of 5 records", len(seen))
	}
}

func limitAndTurns(s *suite) {
	for i := range 40 {
		s.add(fmt.Sprintf("x%02d t/k%02d", i, i), fmt.Sprintf("y%02d t/k%02d", i, i))
	}
	seen := make(map[string]bool)
	for range 8 {
		c := s.claimWith(outbox.ClaimOptions{Worker: "w", Limit: 10, Lease: long})
		if len(c.Records) != 10 {
			s.Fatalf("claim has %d records, want 10", len(c.Records))
		}
		for _, r := range c.Records {
			if seen[r.ID] {
				s.Fatalf("%s was claimed twice", r.ID)
			}
			seen[r.ID] = true
		}
		s.settle("w", outbox.Settlement{Sent: c.Records})
	}
	if c := s.claimWith(outbox.ClaimOptions{Worker: "w", Limit: 10, Lease: long}); len(c.Records) > 0 || c.More {
		s.Errorf("got %d further records, More = %v; want none", len(c.Records), c.More)
	}
}

func limitBytes(s *suite) {
	s.add("100 t/a", "101 t/a", "102 t/a", "200 t/b") // payloads of 5 bytes each
	opts := outbox.ClaimOptions{Worker: "w", Limit: 100, Lease: long, Bytes: 12}
	for _, want := range []int{2, 2} {
		c := s.claimWith(opts)
		if len(c.Records) != want {
			s.Fatalf("got %q, want %d", ids(c.Records), want)
		}
		s.settle("w", outbox.Settlement{Sent: c.Records})
	}
	s.add("300 t/a", "301 t/b")
	opts.Bytes = 1
	if c := s.claimWith(opts); len(c.Records) != 1 || !c.More {
		s.Fatalf("got %q, More = %v; want one record and More", ids(c.Records), c.More)
	}
}

func exceptTopics(s *suite) {
	s.add("1 t/a", "2 u/a", "3 v", "4 t", "5 t/b", "6 t")
	// Topics whose names sort next to those.
	s.add("7 t0/a", "8 t0", "9 t-x/a", "A t-x", "B t.x/a", "C t.x", "D tt", "E s", "F T/a", "G u")
	except := outbox.ClaimOptions{Worker: "w", Limit: 100, Lease: long, ExceptTopics: []string{"t", "v"}}
	s.want("without t and v", s.claimWith(except).Records, "2 7 8 9 A B C D E F G")
	s.add("H t", "I t/c", "J u/b", "K u")
	s.want("new", s.claimWith(except).Records, "J K")
	s.want("with them", s.claim("w"), "1 3 4 5 6 H I")
}

func expiry(s *suite) {
	s.add("1 t/a", "2 t/a")
	s.want("first", s.claimWith(outbox.ClaimOptions{Worker: "w", Limit: 1, Lease: short}).Records, "1")
	s.eventually("the lease ends", func() bool {
		n, err := s.Store.RequeueExpired(s.Context())
		if err != nil || n > 1 {
			s.Fatalf("requeue: %d, %v", n, err)
		}
		return n == 1
	})
	again := s.claim("v")
	s.want("then", again, "1 2")
	if again[0].Attempts != 0 {
		s.Errorf("lease expiry counted as an attempt")
	}
}

func renewal(s *suite) {
	s.add("1 t/a", "2 t/b")
	c := s.claimWith(outbox.ClaimOptions{Worker: "w", Limit: 100, Lease: short})
	lost, err := s.Store.Renew(s.Context(), "w", long, c.Records)
	if err != nil || len(lost) > 0 {
		s.Fatalf("renew: lost %q, %v", lost, err)
	}
	s.add("3 t/c")
	s.want("3", s.claimWith(outbox.ClaimOptions{Worker: "w", Limit: 100, Lease: short}).Records, "3")
	s.eventually("the lease of 3 ends", func() bool {
		n, err := s.Store.RequeueExpired(s.Context())
		if err != nil || n > 1 {
			s.Fatalf("requeue: %d, %v", n, err)
		}
		return n == 1
	})
	three := s.claim("v")
	s.want("only 3", three, "3")
	lost, err = s.Store.Renew(s.Context(), "w", long, append(c.Records, three...))
	if err != nil || !slices.Equal(lost, []string{"3"}) {
		s.Fatalf("renew: lost %q, %v", lost, err)
	}
}

func lostClaim(s *suite) {
	s.add("1 t/a", "2 t/b")
	old := s.claimWith(outbox.ClaimOptions{Worker: "w", Limit: 100, Lease: short}).Records
	ended := 0
	s.eventually("the leases end", func() bool {
		n, err := s.Store.RequeueExpired(s.Context())
		ended += n
		return err == nil && ended == 2
	})
	fresh := s.claim("v")
	s.want("again", fresh, "1 2")
	s.settle("w", outbox.Settlement{Failed: []outbox.Failure{{Record: old[0], Park: true}, {Record: old[1]}}})
	s.want("still claimed", s.claim("u"), "")
	if st, err := s.Store.Stats(s.Context()); err != nil || st.Claimed != 2 || st.Errors != 0 {
		s.Fatalf("got %+v, %v", st, err)
	}
	s.settle("w", outbox.Settlement{Sent: old[:1]})
	if st, err := s.Store.Stats(s.Context()); err != nil || st.Claimed != 1 {
		s.Fatalf("got %+v, %v", st, err)
	}
	s.settle("v", outbox.Settlement{Sent: fresh})
	s.settle("v", outbox.Settlement{Failed: []outbox.Failure{{Record: fresh[0]}}})
	s.want("nothing is left", s.claim("v"), "")
}

func publishBegan(s *suite) {
	s.add("1 t/a")
	first := s.claimWith(outbox.ClaimOptions{Worker: "w", Limit: 1, Lease: long})
	if began := first.Records[0].PublishBegan; began != first.Now {
		s.Fatalf("new record: PublishBegan is %d, want claim time %d", began, first.Now)
	}
	began := first.Records[0].PublishBegan
	s.eventually("a millisecond passes", func() bool { return time.Now().UnixMilli() > began+1 })
	s.fail(outbox.Failure{Record: first.Records[0]})
	second := s.claimWith(outbox.ClaimOptions{Worker: "w", Limit: 1, Lease: long})
	if got := second.Records[0].PublishBegan; got != began || got >= second.Now {
		s.Fatalf("second claim: PublishBegan is %d, want %d, before %d", got, began, second.Now)
	}
	s.fail(outbox.Failure{Record: second.Records[0], Unsent: true})
	third := s.claimWith(outbox.ClaimOptions{Worker: "w", Limit: 1, Lease: long})
	if got := third.Records[0].PublishBegan; got != third.Now {
		s.Fatalf("after Unsent: PublishBegan is %d, want claim time %d", got, third.Now)
	}
	if third.Began != third.Now {
		s.Fatalf("claim: Began is %d, want %d", third.Began, third.Now)
	}
	s.fail(outbox.Failure{Record: third.Records[0], Unsent: true})

	// ClaimOptions.Began replaces the store's time for records without PublishBegan.
	const early, late = 1_000_000_000_000, 2_000_000_000_000
	for _, step := range []struct {
		began, want int64
		unsent      bool
	}{{early, early, false}, {late, early, true}, {late, late, false}, {early, late, false}} {
		c := s.claimWith(outbox.ClaimOptions{Worker: "w", Limit: 1, Lease: long, Began: step.began})
		if got := c.Records[0].PublishBegan; got != step.want || c.Began != step.began {
			s.Fatalf("PublishBegan is %d, want %d; Began is %d, want %d", got, step.want, c.Began, step.began)
		}
		s.fail(outbox.Failure{Record: c.Records[0], Unsent: step.unsent})
	}
}

func clock(s *suite) {
	now, err := s.Store.Now(s.Context())
	if err != nil || time.Since(now).Abs() > time.Minute {
		s.Fatalf("store time is %v, %v; local time is %v", now, err, time.Now())
	}
	s.add("1 t/a")
	claimed := s.claimWith(outbox.ClaimOptions{Worker: "w", Limit: 1, Lease: long}).Now
	if after, err := s.Store.Now(s.Context()); err != nil || claimed < now.UnixMilli() || claimed > after.UnixMilli() {
		s.Fatalf("claim time is %d, want between %v and %v, %v", claimed, now, after, err)
	}
}

func failures(s *suite) {
	s.add("1 t/a")
	for i := range 3 {
		r := s.claim("w")[0]
		if r.Attempts != i {
			s.Fatalf("attempts %d, want %d", r.Attempts, i)
		}
		s.fail(outbox.Failure{Record: r, Counts: true, Err: fmt.Sprint("no ", i, "\x00\xff ", strings.Repeat("ü", 1000))})
	}
	r := s.claim("w")[0]
	if r.Attempts != 3 || !strings.HasPrefix(r.LastErr, "no 2") || len(r.LastErr) > 1000 {
		s.Fatalf("got %d attempts, %q", r.Attempts, r.LastErr)
	}
	s.fail(outbox.Failure{Record: r})
	if r = s.claim("w")[0]; r.Attempts != 3 || !strings.HasPrefix(r.LastErr, "no 2") {
		s.Fatalf("after an uncounted failure: %d attempts, %q", r.Attempts, r.LastErr)
	}
}

// park adds a record and parks it.
func (s *suite) park(record string) {
	s.Helper()
	s.add(record)
	for _, r := range s.claim("w") {
		s.fail(outbox.Failure{Record: r, Park: true, Counts: true, Err: "no"})
	}
}

func retry(s *suite) {
	s.park("1 t/a")
	s.park("2 t/b")
	s.park("3 t/c")
	n, err := s.Store.Retry(s.Context(), "2", "unknown")
	s.count("retry", n, err, 1)
	got := s.claim("w")
	s.want("retried", got, "2")
	if r := got[0]; r.Attempts != 0 || r.LastErr != "no" {
		s.Errorf("got %d attempts, %q", r.Attempts, r.LastErr)
	}
	n, err = s.Store.Retry(s.Context(), "2")
	s.count("retry of what is claimed", n, err, 0)
	n, err = s.Store.Retry(s.Context())
	s.count("retry of all", n, err, 2)
	s.want("retried", s.claim("w"), "1 3")
}

func purge(s *suite) {
	s.park("1 t/a")
	s.add("2 t/a", "3 t/b", "4 t/c", "5 t/d")
	got := s.claim("w")
	s.want("claim", got, "3 4 5")
	s.settle("w", outbox.Settlement{Sent: got})
	if _, err := s.Store.Purge(s.Context(), outbox.PurgeOptions{Status: outbox.Pending}); err == nil {
		s.Fatal("pending records were purged")
	}
	for _, status := range []outbox.Status{outbox.Sent, outbox.Errored} {
		n, err := s.Store.Purge(s.Context(), outbox.PurgeOptions{Status: status, OlderThan: time.Hour})
		s.count("purge of what is old", n, err, 0)
	}
	if s.KeepsSent {
		n, err := s.Store.Purge(s.Context(), outbox.PurgeOptions{Status: outbox.Sent, IDs: []string{"3"}})
		s.count("purge of one", n, err, 1)
		n, err = s.Store.Purge(s.Context(), outbox.PurgeOptions{Status: outbox.Sent, Limit: 1})
		s.count("purge with a limit", n, err, 1)
		n, err = s.Store.Purge(s.Context(), outbox.PurgeOptions{Status: outbox.Sent})
		s.count("purge", n, err, 1)
	}
	n, err := s.Store.Purge(s.Context(), outbox.PurgeOptions{Status: outbox.Errored, IDs: []string{"2"}})
	s.count("purge of another", n, err, 0)
	n, err = s.Store.Purge(s.Context(), outbox.PurgeOptions{Status: outbox.Errored, IDs: []string{"1"}})
	s.count("purge of what is parked", n, err, 1)
	s.want("its lane goes on", s.claim("w"), "2")
}

func list(s *suite) {
	s.park("1 t/a")
	s.add("2 t/a", "3 t/a", "4 t/a")
	for _, want := range []struct {
		opts outbox.ListOptions
		ids  string
	}{
		{outbox.ListOptions{Status: outbox.Errored}, "1"},
		{outbox.ListOptions{Status: outbox.Pending}, "2 3 4"},
		{outbox.ListOptions{Status: outbox.Pending, Limit: 2}, "2 3"},
		{outbox.ListOptions{Status: outbox.Claimed}, ""},
		{outbox.ListOptions{Status: outbox.Sent}, ""},
	} {
		got, err := s.Store.List(s.Context(), want.opts)
		if err != nil {
			s.Fatal(err)
		}
		s.want("list", got, want.ids)
		if want.ids == "2 3" {
			got, err = s.Store.List(s.Context(), outbox.ListOptions{Status: outbox.Pending, After: got[1].Sequence})
			if err != nil {
				s.Fatal(err)
			}
			s.want("the next page", got, "4")
		}
	}
	if !s.KeepsSent {
		return
	}
	s.add("5 t/b")
	s.settle("w", outbox.Settlement{Sent: s.claim("w")})
	got, err := s.Store.List(s.Context(), outbox.ListOptions{Status: outbox.Sent})
	if err != nil || len(got) != 1 || got[0].SentAt == 0 || got[0].LastErr != "" || got[0].ClaimedBy != "" {
		s.Fatalf("got %+v, %v", got, err)
	}
}

func stats(s *suite) {
	st, err := s.Store.Stats(s.Context())
	if err != nil || st != (outbox.Stats{}) {
		s.Fatalf("empty: %+v, %v", st, err)
	}
	s.park("1 t/a")
	s.add("2 t/b")
	s.claim("w")
	s.add("3 t/c", "4 t/d")
	s.eventually("the oldest gets older", func() bool {
		st, err = s.Store.Stats(s.Context())
		return err != nil || st.OldestAge > 0
	})
	if err != nil || st.Pending != 2 || st.Claimed != 1 || st.Errors != 1 || st.OldestAge > patience {
		s.Fatalf("got %+v, %v", st, err)
	}
}

func badRecords(s *suite) {
	for name, r := range map[string]outbox.Record{
		"no topic":         {},
		"bad topic":        {Topic: "a..b"},
		"wildcard":         {Topic: "a.*"},
		"bad id":           {Topic: "t", ID: " x"},
		"native id":        {Topic: "t", ID: "stream@7"},
		"long key":         {Topic: "t", Key: strings.Repeat("k", 513)},
		"NUL in key":       {Topic: "t", Key: "a\x00b"},
		"no UTF-8":         {Topic: "t", Key: "\xff"},
		"nor in the id":    {Topic: "t", ID: "\xff"},
		"type":             {Topic: "t", Type: "\xff"},
		"header":           {Topic: "t", Headers: map[string]string{"x": "\xff"}},
		"header name":      {Topic: "t", Headers: map[string]string{"\xff": "x"}},
		"sid":              {Topic: "t", SID: "\xff"},
		"tag":              {Topic: "t", Tags: []string{"a", "\xff"}},
		"cause":            {Topic: "t", CausedBy: []string{"a", "\xff"}},
		"payload":          {Topic: "t", Payload: []byte("\"\xff\"")},
		"reserved header":  {Topic: "t", Headers: map[string]string{"nats-x": "y"}},
		"bad header":       {Topic: "t", Headers: map[string]string{"x": "a\nb"}},
		"two types":        {Topic: "t", Type: "a", Headers: map[string]string{"Type": "b"}},
		"no JSON":          {Topic: "t", Payload: []byte("{")},
		"large payload":    {Topic: "t", Payload: []byte(`"` + strings.Repeat("x", 2<<20) + `"`)},
		"keyless removal":  {Topic: "t", Tombstone: true},
		"removal with one": {Topic: "t", Key: "k", Tombstone: true, Payload: []byte("1")},
		"negative ts":      {Topic: "t", TS: -1},
	} {
		if err := s.Add(s.Context(), &r); err == nil {
			s.Errorf("%s: record was added", name)
		}
	}
	s.want("nothing was added", s.claim("w"), "")
}

func sameID(s *suite) {
	s.add("1 t/a")
	if err := s.Add(s.Context(), &outbox.Record{ID: "1", Topic: "t", Key: "a"}); err == nil {
		s.Error("id was added twice")
	}
	s.want("once", s.claim("w"), "1")
}

// idOfTwoTopics uses one id in three topics. What is done to one of the records leaves the others
// alone.
func idOfTwoTopics(s *suite) {
	s.add("1 t/a", "1 u/a", "1 v", "2 u/a")
	if err := s.Add(s.Context(), &outbox.Record{ID: "1", Topic: "u", Key: "a"}); err == nil {
		s.Error("id was added twice to a topic")
	}
	one := func(worker, topic string, all ...string) *outbox.Record {
		s.Helper()
		except := slices.DeleteFunc(all, func(other string) bool { return other == topic })
		c := s.claimWith(outbox.ClaimOptions{Worker: worker, Limit: 1, Lease: long, ExceptTopics: except})
		if len(c.Records) != 1 || c.Records[0].Topic != topic || c.Records[0].ID != "1" || string(c.Records[0].Payload) != `"1"` {
			s.Fatalf("claimed %+v, want record 1 of %s", c.Records, topic)
		}
		return c.Records[0]
	}
	topics := func() []string { return []string{"t", "u", "v"} }
	ofT := one("w", "t", topics()...)
	ofU := one("x", "u", topics()...)
	if lost, err := s.Store.Renew(s.Context(), "w", long, []*outbox.Record{ofT}); err != nil || len(lost) > 0 {
		s.Errorf("renew: lost %q, %v", lost, err)
	}
	if lost, err := s.Store.Renew(s.Context(), "w", long, []*outbox.Record{ofU}); err != nil || !slices.Equal(lost, []string{"1"}) {
		s.Errorf("renew what another holds: lost %q, %v", lost, err)
	}
	s.settle("x", outbox.Settlement{Failed: []outbox.Failure{{Record: ofU, Park: true, Err: "parked"}}})
	s.settle("w", outbox.Settlement{Sent: []*outbox.Record{ofT}})
	if st, err := s.Store.Stats(s.Context()); err != nil || st.Errors != 1 || st.Pending != 2 || st.Claimed != 0 {
		s.Fatalf("after one was sent and one was parked: %+v, %v", st, err)
	}
	ofV := one("w", "v", topics()...)
	s.settle("w", outbox.Settlement{Failed: []outbox.Failure{{Record: ofV, Park: true, Err: "parked"}}})
	n, err := s.Store.Purge(s.Context(), outbox.PurgeOptions{Status: outbox.Errored, IDs: []string{"1"}, Topic: "v"})
	s.count("purged of v", n, err, 1)
	n, err = s.Store.Retry(s.Context(), "1")
	s.count("retried", n, err, 1)
	s.want("then of u", s.claim("w"), "1 2")
}

func hostileNames(s *suite) {
	keys := []string{"'; DROP TABLE outbox; --", "a/b", "/", "//", "?", "$1", "{table}", "ü\u0001\n", strings.Repeat("ß", 256), "\\", "%", " "}
	for i, key := range keys {
		for n := range 2 {
			if err := s.Add(s.Context(), &outbox.Record{ID: fmt.Sprintf("/'\"?%d %d", i, n), Topic: "t", Key: key}); err != nil {
				s.Fatal(err)
			}
		}
	}
	seen := make(map[string]int)
	for _, r := range s.claim("w") {
		if want := fmt.Sprintf("/'\"?%d %d", slices.Index(keys, r.Key), seen[r.Key]); r.ID != want {
			s.Errorf("key %q: got %q, want %q", r.Key, r.ID, want)
		}
		seen[r.Key]++
	}
	if len(seen) != len(keys) {
		s.Errorf("got %d keys, want %d", len(seen), len(keys))
	}
}

// manyWorkers checks the guarantees of Claim while several workers claim, settle, and give back
// records, and further records are added.
func manyWorkers(s *suite) {
	const keys, each, workers = 7, 40, 4
	var mu sync.Mutex
	next := make(map[string]int)      // by lane: the next expected record number
	holder := make(map[string]string) // by lane: the worker that holds records of the lane
	done := 0
	ctx, cancel := context.WithTimeout(s.Context(), 60*time.Second)
	defer cancel()
	var all sync.WaitGroup
	all.Go(func() {
		for n := range each {
			for k := range keys {
				if err := s.Add(ctx, &outbox.Record{ID: fmt.Sprintf("%d-%d", k, n), Topic: "t", Key: fmt.Sprint("k", k)}); err != nil {
					s.Error(err)
					return
				}
			}
		}
	})
	for w := range workers {
		name := fmt.Sprint("w", w)
		all.Go(func() {
			for round := 0; ctx.Err() == nil; round++ {
				mu.Lock()
				over := done == keys*each
				mu.Unlock()
				if over {
					return
				}
				c, err := s.Store.Claim(ctx, outbox.ClaimOptions{Worker: name, Limit: 10, Lease: long})
				if err != nil {
					s.Error(err)
					return
				}
				var st outbox.Settlement
				mu.Lock()
				at := make(map[string]int)
				for i, r := range c.Records {
					if h := holder[r.Key]; h != "" && h != name {
						s.Errorf("%s was claimed by %s while %s holds records of the same key", r.ID, name, h)
					}
					holder[r.Key] = name
					if _, met := at[r.Key]; !met {
						at[r.Key] = next[r.Key]
					}
					if want := strings.TrimPrefix(r.Key, "k") + "-" + strconv.Itoa(at[r.Key]); r.ID != want {
						s.Errorf("%s claimed %s, want %s", name, r.ID, want)
					}
					at[r.Key]++
					if (round+i)%5 == 4 || slices.ContainsFunc(st.Failed, func(f outbox.Failure) bool { return f.Record.Key == r.Key }) {
						st.Failed = append(st.Failed, outbox.Failure{Record: r})
						continue
					}
					st.Sent = append(st.Sent, r)
					next[r.Key]++
					done++
				}
				for key := range at {
					holder[key] = ""
				}
				mu.Unlock()
				for len(st.Sent)+len(st.Failed) > 0 { // claims of others may lock records
					left, err := s.Store.Settle(ctx, name, st)
					if err != nil {
						s.Error(err)
						return
					}
					st = left.Locked
				}
			}
		})
	}
	all.Wait()
	if done != keys*each {
		s.Errorf("%d records were sent, want %d", done, keys*each)
	}
}
