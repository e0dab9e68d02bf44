package outbox_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/outbox"
	"eventhub/outbox/outboxtest"
)

// What a NATS takes in the tests of full entries, and what an entry may have then.
const (
	kvMaxPayload = 160 << 10
	kvMaxEntry   = kvMaxPayload - 64<<10
)

// longestWorker is as long as a KVStore allows: with its quotes it has 200 bytes.
func longestWorker(c string) string { return strings.Repeat(c, 198) }

// kvRig is a KVStore of one entry on a NATS with a small max_payload.
type kvRig struct {
	*rig
	nats  *natstest.Server
	store *outbox.KVStore
}

func newKVRig(t *testing.T, cfg outbox.KVConfig) *kvRig {
	t.Helper()
	nats := natstest.Cluster(t, 1)[0]
	nats.SetMaxPayload(kvMaxPayload)
	nats.Start()
	bus := openBus(t, jetstream.Config{URL: nats.URL()})
	cfg.Collection, cfg.Shards = openCollection(t, bus, "outbox"), 1
	s, err := outbox.NewKVStore(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return &kvRig{newRig(t, outboxtest.Harness{Store: s, Add: s.Add}, bus), nats, s}
}

// limit starts the server again with another max_payload.
func limit(nats *natstest.Server, maxPayload int32) {
	nats.Stop()
	nats.SetMaxPayload(maxPayload)
	nats.Start()
}

// fill adds records of three keys until there is no room, and returns the one that was refused and
// why.
func (r *kvRig) fill(payload string) (*outbox.Record, error) {
	r.Helper()
	for {
		r.n++
		rec := &outbox.Record{ID: fmt.Sprintf("id-%06d", r.n), Topic: "orders", Key: fmt.Sprint("k", r.n%3), Payload: []byte(payload)}
		if err := r.store.Add(r.Context(), rec); err != nil {
			return rec, err
		}
		lane := rec.Topic + "/" + rec.Key
		r.added[lane] = append(r.added[lane], rec.ID)
	}
}

func (r *kvRig) total() (n int) {
	for _, ids := range r.added {
		n += len(ids)
	}
	return n
}

// claimAll claims everything at once.
func (r *kvRig) claimAll(worker string) []*outbox.Record {
	r.Helper()
	c, err := r.store.Claim(r.Context(), outbox.ClaimOptions{Worker: worker, Limit: 1000, Lease: 24 * time.Hour})
	if err != nil {
		r.Fatal(err)
	}
	got := make(map[string][]string)
	for _, rec := range c.Records {
		lane := rec.Topic + "/" + rec.Key
		got[lane] = append(got[lane], rec.ID)
	}
	for lane, want := range r.added {
		if !slices.Equal(got[lane], want) {
			r.Fatalf("lane %s: got %q, want %q", lane, got[lane], want)
		}
	}
	if len(c.Records) != r.total() {
		r.Fatalf("got %d records, want %d", len(c.Records), r.total())
	}
	return c.Records
}

func (r *kvRig) settle(worker string, st outbox.Settlement) {
	r.Helper()
	if _, err := r.store.Settle(r.Context(), worker, st); err != nil {
		r.Fatal(err)
	}
}

// failAll settles records as failed with a long text.
func (r *kvRig) failAll(worker string, records []*outbox.Record, text string, park bool) {
	r.Helper()
	var st outbox.Settlement
	for _, rec := range records {
		st.Failed = append(st.Failed, outbox.Failure{Record: rec, Counts: true, Park: park, Err: text})
	}
	r.settle(worker, st)
}

// What was added to an entry until it was full can be claimed, renewed, failed, parked and sent,
// however long the names and the texts are.
func TestKVFullEntry(t *testing.T) {
	t.Parallel()
	texts := []string{
		strings.Repeat("x", 2000),
		strings.Repeat("\x01", 2000), // six bytes each as JSON
		"no " + strings.Repeat("\"\\\xff\x00<é\u2028", 1000),
	}
	for name, payload := range map[string]string{
		"text":   `"` + strings.Repeat("x", 2<<10) + `"`,
		"quotes": `[""` + strings.Repeat(`,"\""`, 400) + `]`,
		"tags":   `"` + strings.Repeat("<&>", 700) + `"`,
		"tiny":   `1`,
	} {
		t.Run(name, func(t *testing.T) {
			r := newKVRig(t, outbox.KVConfig{})
			if _, err := r.fill(payload); !errors.Is(err, outbox.ErrFull) {
				t.Fatalf("got %v, want ErrFull", err)
			}
			t.Logf("%d records", r.total())
			for i, text := range texts {
				w := longestWorker(strconv.Itoa(i))
				records := r.claimAll(w)
				if lost, err := r.store.Renew(t.Context(), w, 48*time.Hour, records); err != nil || len(lost) > 0 {
					t.Fatalf("renew: lost %q, %v", lost, err)
				}
				r.failAll(w, records, text, i == 1)
				if i == 1 {
					if n, err := r.store.Retry(t.Context()); err != nil || n != len(records) {
						t.Fatalf("retry: %d, %v", n, err)
					}
				}
			}
			w := longestWorker("w")
			records := r.claimAll(w)
			for _, rec := range records {
				if !strings.HasPrefix(rec.LastErr, "no \"\\<é") || len(rec.LastErr) < 50 || rec.Attempts != 1 {
					t.Fatalf("%s has %d attempts, %q", rec.ID, rec.Attempts, rec.LastErr)
				}
			}
			r.settle(w, outbox.Settlement{Sent: records})
			if st := r.stats(); st != (outbox.Stats{}) {
				t.Errorf("%+v is left", st)
			}
		})
	}
}

// A drainer empties an entry that is full.
func TestKVFullEntryDrains(t *testing.T) {
	t.Parallel()
	r := newKVRig(t, outbox.KVConfig{})
	if _, err := r.fill(`"` + strings.Repeat("x", 2<<10) + `"`); !errors.Is(err, outbox.ErrFull) {
		t.Fatalf("got %v, want ErrFull", err)
	}
	if did := r.drain(nil); did.Published != r.total() {
		t.Errorf("drained %+v, want %d", did, r.total())
	}
	r.exactly()
}

// kvEntry is an entry as the first version wrote it.
type kvEntry struct {
	Last int64   `json:"last"`
	Rows []kvRow `json:"records"`
}

type kvRow struct {
	*outbox.Record
	Payload string `json:"payload"`
}

func (e *kvEntry) add(rec *outbox.Record, payload string) {
	e.Last++
	rec.ID, rec.Sequence, rec.Status = fmt.Sprintf("id-%06d", e.Last), e.Last, outbox.Pending
	rec.TS, rec.AddedAt, rec.Payload = 1_700_000_000_000, 1_700_000_000_000, []byte("null")
	e.Rows = append(e.Rows, kvRow{rec, payload})
}

func (e *kvEntry) encode(tb testing.TB) []byte {
	tb.Helper()
	value, err := json.Marshal(e)
	if err != nil {
		tb.Fatal(err)
	}
	return value
}

func (r *kvRig) put(value []byte) {
	r.Helper()
	if _, err := openCollection(r, r.bus.Bus, "outbox").Put(r.Context(), "shard-0", value, nil, 0); err != nil {
		r.Fatal(err)
	}
}

// putOld writes an entry of the size as the first version did, with records of three keys.
func (r *kvRig) putOld(size int, state func(*outbox.Record)) []*outbox.Record {
	r.Helper()
	var entry kvEntry
	var records []*outbox.Record
	for len(entry.encode(r)) < size-4<<10 {
		rec := &outbox.Record{Topic: "orders", Key: fmt.Sprint("k", len(records)%3)}
		entry.add(rec, `"`+strings.Repeat("x", 1<<10)+`"`)
		if state != nil {
			state(rec)
		}
		records = append(records, rec)
		r.added["orders/"+rec.Key] = append(r.added["orders/"+rec.Key], rec.ID)
	}
	last := &entry.Rows[len(entry.Rows)-1].Payload
	*last = `"` + strings.Repeat("x", size-len(entry.encode(r))) + (*last)[1:]
	value := entry.encode(r)
	if len(value) != size {
		r.Fatalf("the entry has %d bytes, want %d", len(value), size)
	}
	r.put(value)
	return records
}

// An entry that an earlier version filled to the last byte takes no more, and is drained.
func TestKVOldEntryDrains(t *testing.T) {
	t.Parallel()
	for _, spare := range []int{0, 100, 1000} {
		t.Run(strconv.Itoa(spare), func(t *testing.T) {
			r := newKVRig(t, outbox.KVConfig{})
			r.putOld(kvMaxEntry-spare, nil)
			if err := r.store.Add(t.Context(), &outbox.Record{Topic: "orders", Key: "k1"}); !errors.Is(err, outbox.ErrFull) {
				t.Fatalf("got %v, want ErrFull", err)
			}
			if did := r.drain(nil); did.Published != r.total() {
				t.Errorf("drained %+v, want %d", did, r.total())
			}
			r.exactly()
		})
	}
}

// Where there is no room for the texts of errors, records fail without them.
func TestKVOldEntrySettles(t *testing.T) {
	t.Parallel()
	r := newKVRig(t, outbox.KVConfig{})
	old := r.putOld(kvMaxEntry, func(rec *outbox.Record) {
		rec.Status, rec.ClaimedBy, rec.LeaseUntil, rec.PublishBegan, rec.Attempts = outbox.Claimed, "w", 1_900_000_000_000, 1_700_000_000_000, 9
	})
	r.failAll("w", old, strings.Repeat("no", 1000), true)
	parked, err := r.store.List(t.Context(), outbox.ListOptions{Status: outbox.Errored, Limit: 1000})
	if err != nil || len(parked) != len(old) {
		t.Fatalf("got %d records, %v: want %d", len(parked), err, len(old))
	}
	for _, rec := range parked {
		if rec.Attempts != 10 || rec.LastErr != "" {
			t.Fatalf("%s has %d attempts, %q", rec.ID, rec.Attempts, rec.LastErr)
		}
	}
}

// While what is claimed fills an entry, there is nothing to claim, and no error.
func TestKVOldEntryWaits(t *testing.T) {
	t.Parallel()
	r := newKVRig(t, outbox.KVConfig{})
	old := r.putOld(kvMaxEntry, func(rec *outbox.Record) {
		rec.Attempts = 9
		if rec.Sequence == 1 {
			rec.Status, rec.ClaimedBy, rec.LeaseUntil, rec.PublishBegan = outbox.Claimed, "v", 1_900_000_000_000, 1_700_000_000_000
		}
	})
	opts := outbox.ClaimOptions{Worker: "w", Limit: 100, Lease: time.Hour}
	if c, err := r.store.Claim(t.Context(), opts); err != nil || len(c.Records) > 0 {
		t.Fatalf("got %d records, %v", len(c.Records), err)
	}
	r.settle("v", outbox.Settlement{Sent: old[:1]})
	if c, err := r.store.Claim(t.Context(), opts); err != nil || len(c.Records) == 0 || !c.More {
		t.Fatalf("got %d records, more: %v, %v", len(c.Records), c.More, err)
	}
}

// When NATS takes less than it took, the error says what to do, and that done nothing is lost.
func TestKVLoweredMaxPayload(t *testing.T) {
	t.Parallel()
	r := newKVRig(t, outbox.KVConfig{})
	if _, err := r.fill(`"` + strings.Repeat("x", 2<<10) + `"`); !errors.Is(err, outbox.ErrFull) {
		t.Fatalf("got %v, want ErrFull", err)
	}
	opts := outbox.ClaimOptions{Worker: "w", Limit: 100, Lease: time.Hour}
	restart := func(maxPayload int32) {
		limit(r.nats, maxPayload)
		eventually(t, "the bus is there", func() bool { return r.bus.Ready(t.Context()) == nil })
	}
	restart(kvMaxPayload - kvMaxEntry/2)
	for range 2 {
		if c, err := r.store.Claim(t.Context(), opts); !errors.Is(err, jetstream.ErrTooLarge) || !strings.Contains(err.Error(), "raise max_payload") {
			t.Fatalf("got %d records, %v", len(c.Records), err)
		}
	}
	restart(kvMaxPayload)
	if did := r.drain(nil); did.Published != r.total() {
		t.Errorf("drained %+v, want %d", did, r.total())
	}
	r.exactly()
}

// ErrFull says which bound was met and what to do. What was refused can be added when others are
// published.
func TestKVFullSaysWhatToDo(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		cfg     outbox.KVConfig
		payload string
		why     string
	}{
		{outbox.KVConfig{}, `"` + strings.Repeat("x", 2<<10) + `"`, "max_payload"},
		{outbox.KVConfig{ShardRecords: 7}, "1", "ShardRecords"},
	} {
		t.Run(test.why, func(t *testing.T) {
			r := newKVRig(t, test.cfg)
			rec, err := r.fill(test.payload)
			if !errors.Is(err, outbox.ErrFull) {
				t.Fatalf("got %v, want ErrFull", err)
			}
			for _, says := range []string{"shard-0", fmt.Sprint(r.total(), " records"), test.why, "retry after", "retry or purge"} {
				if !strings.Contains(err.Error(), says) {
					t.Errorf("%q does not say %q", err, says)
				}
			}
			first := &outbox.Record{ID: "id-000001", Topic: "orders", Key: "k1"}
			if err := r.store.Add(t.Context(), first); !errors.Is(err, outbox.ErrExists) {
				t.Errorf("one that waits: got %v, want ErrExists", err)
			}
			if st := r.stats(); st.Pending != r.total() {
				t.Errorf("%+v waits, want %d", st, r.total())
			}
			r.drain(nil)
			r.exactly()
			if err := r.store.Add(t.Context(), rec); err != nil {
				t.Fatal(err)
			}
			r.added["orders/"+rec.Key] = append(r.added["orders/"+rec.Key], rec.ID)
			r.drain(nil)
			r.exactly()
		})
	}
}

// What no entry could hold is not full, for it would be so for ever.
func TestKVTooLargeForAnyEntry(t *testing.T) {
	t.Parallel()
	r := newKVRig(t, outbox.KVConfig{MaxPayload: 1 << 20})
	err := r.store.Add(t.Context(), &outbox.Record{Topic: "orders", Payload: []byte(`"` + strings.Repeat("x", kvMaxEntry) + `"`)})
	if _, ok := errors.AsType[*jetstream.Error](err); !ok || !errors.Is(err, jetstream.ErrTooLarge) || errors.Is(err, outbox.ErrFull) {
		t.Errorf("got %v", err)
	}
}

// A name of a worker that has no room is refused.
func TestKVLongWorker(t *testing.T) {
	t.Parallel()
	r := newKVRig(t, outbox.KVConfig{})
	for _, worker := range []string{longestWorker("w") + "w", strings.Repeat("\x01", 34)} {
		if _, err := r.store.Claim(t.Context(), outbox.ClaimOptions{Worker: worker, Limit: 1, Lease: time.Hour}); err == nil {
			t.Errorf("%q was taken", worker)
		}
	}
}

// The default number of records fits with payloads of 1 KiB, on a NATS that is not configured.
func TestKVDefaults(t *testing.T) {
	t.Parallel()
	r := newKVRig(t, outbox.KVConfig{})
	limit(r.nats, 0)
	eventually(t, "the bus is there", func() bool { return r.bus.Ready(t.Context()) == nil })
	payload := `{"a":"` + strings.Repeat("x", 1<<10-8) + `"}`
	var entry kvEntry
	for range outbox.DefaultKVShardRecords - 1 {
		entry.add(&outbox.Record{Topic: "orders.placed", Key: "customer:0815"}, payload)
	}
	for i := range entry.Rows {
		entry.Rows[i].ID = fmt.Sprintf("01890a5d-ac96-774b-bcce-b302099a%04d", i)
	}
	r.put(entry.encode(r))
	if err := r.store.Add(t.Context(), &outbox.Record{Topic: "orders.placed", Key: "customer:0815", Payload: []byte(payload)}); err != nil {
		t.Fatal(err)
	}
	err := r.store.Add(t.Context(), &outbox.Record{Topic: "orders.placed", Key: "customer:0815", Payload: []byte(payload)})
	if !errors.Is(err, outbox.ErrFull) || !strings.Contains(err.Error(), "ShardRecords") {
		t.Fatalf("got %v", err)
	}
}
