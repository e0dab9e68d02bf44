package facade_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"flag"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/acl"
	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// listingWalks is larger for the long form, as in RELIABILITY.md.
var listingWalks = flag.Int("listing.walks", 3, "listings beside writers and removals, over two hubs")

// listed is what GET /snap/{topic}?next= answers.
type listed struct {
	Offset *int
	Limit  int
	Count  int
	Items  []struct {
		ID, Topic, Key string
		Payload        json.RawMessage
	}
	Next *string
}

// list asks for a page. next is "" to begin.
func (r *rig) list(t *testing.T, topic, next string, limit int) (p listed) {
	t.Helper()
	path := "/snap/" + topic + "?next=" + url.QueryEscape(next) + "&limit=" + strconv.Itoa(limit)
	got := r.get(t, path)
	if err := json.Unmarshal([]byte(got.text), &p); got.status != http.StatusOK || err != nil ||
		p.Offset != nil || p.Limit != limit || p.Count != len(p.Items) || p.Items == nil || p.Count > limit || p.Next != nil && *p.Next == "" {
		t.Fatalf("%s: %d %.300s (%v)", path, got.status, got.text, err)
	}
	return p
}

// listAll walks all pages of a size, and returns the payloads by key. No key may come twice.
func (r *rig) listAll(t *testing.T, topic string, limit int) (found map[string]string, pages int) {
	t.Helper()
	found = make(map[string]string)
	for next := ""; ; pages++ {
		p := r.list(t, topic, next, limit)
		for _, item := range p.Items {
			if _, twice := found[item.Key]; twice {
				t.Errorf("%s comes twice", item.Key)
			}
			found[item.Key] = string(item.Payload)
		}
		if p.Next == nil {
			return found, pages + 1
		}
		next = *p.Next
	}
}

func TestListing(t *testing.T) {
	t.Parallel()
	r := newSnapRig(t, nil)
	if got := r.get(t, "/snap/kept.l?next="); got.text != `{"limit":100,"count":0,"items":[]}`+"\n" {
		t.Fatal("of a topic that is not there:", got)
	}
	const keys = 100
	for i := range keys {
		r.keep(t, "kept.l", "k"+strconv.Itoa(i), strconv.Itoa(i))
	}
	for i := 0; i < keys; i += 5 {
		if got := r.ask(t, http.MethodDelete, "/snap/kept.l/k"+strconv.Itoa(i), ""); got.status != http.StatusOK {
			t.Fatal(got)
		}
	}
	e := r.keep(t, "kept.l", "k7", `"again"`)
	r.awaitItems(t, "/snap/kept.l?limit=1000", 80, `"again"`)
	for limit, want := range map[int]int{1: 80, 7: 12, 40: 2, 79: 2, 80: 1, 81: 1, 1000: 1} {
		found, pages := r.listAll(t, "kept.l", limit)
		if pages != want && pages != want+1 { // the last one may be empty
			t.Errorf("limit %d: %d pages, want %d", limit, pages, want)
		}
		for i := range keys {
			key, payload := "k"+strconv.Itoa(i), strconv.Itoa(i)
			if i == 7 {
				payload = `"again"`
			}
			if got, ok := found[key]; ok != (i%5 != 0) || ok && got != payload {
				t.Errorf("limit %d: %s is %q", limit, key, got)
			}
		}
	}
	// A record is whole and in the form that it has everywhere.
	all := r.get(t, "/snap/kept.l?next=&limit=1000").text
	if record := withoutTS(string(e.AppendRecord(nil))); !strings.HasSuffix(withoutTS(all), ","+record+"]}\n") {
		t.Errorf("%s\nends with another than %s", all, record)
	}
	if got := r.ask(t, http.MethodHead, "/snap/kept.l?next=", ""); got.status != http.StatusOK || got.text != "" {
		t.Error(got)
	}
}

// churn changes what is in a topic while others read: keys of their own are written, removed and
// written again; others are written and never removed.
type churn struct {
	still, kept, wild int // keys that nobody touches; that are written; that are also removed
}

func (c churn) steady() []string {
	var keys []string
	for i := range c.still {
		keys = append(keys, "still-"+strconv.Itoa(i))
	}
	for i := range c.kept {
		keys = append(keys, "kept-"+strconv.Itoa(i))
	}
	return keys
}

// start makes the keys, in random order, and then changes them until stop is called.
func (c churn) start(t *testing.T, bus *jetstream.Bus, topic string) (stop func()) {
	t.Helper()
	pub := bus.NewPublisher()
	write := func(ctx context.Context, key string, remove bool, n int) {
		opts := jetstream.PublishOptions{Key: key, Tombstone: remove}
		payload := []byte(strconv.Itoa(n))
		if remove {
			payload = nil
		}
		if err := pub.PublishAsync(ctx, topic, payload, opts, func(_ jetstream.Receipt, err error) {
			if err != nil && ctx.Err() == nil {
				t.Error(err)
			}
		}); err != nil && ctx.Err() == nil {
			t.Error(err)
		}
	}
	keys := c.steady()
	for i := range c.wild {
		keys = append(keys, "wild-"+strconv.Itoa(i))
	}
	for _, i := range rand.Perm(len(keys)) {
		write(t.Context(), keys[i], false, 0)
	}
	if err := pub.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var wg sync.WaitGroup
	wg.Go(func() {
		for n := 1; ctx.Err() == nil; n++ {
			if c.kept > 0 {
				write(ctx, "kept-"+strconv.Itoa(rand.IntN(c.kept)), false, n)
			}
			if c.wild > 0 {
				write(ctx, "wild-"+strconv.Itoa(rand.IntN(c.wild)), rand.IntN(2) == 0, n)
			}
			if n%25 == 0 { // what is changed while a page is read should differ from page to page
				_ = pub.Flush(ctx)
				select {
				case <-time.After(time.Duration(rand.IntN(10)) * time.Millisecond):
				case <-ctx.Done():
				}
			}
		}
	})
	return sync.OnceFunc(func() {
		cancel()
		wg.Wait()
		if err := pub.Flush(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// await waits until all keys are in the bucket.
func (c churn) await(t *testing.T, bus *jetstream.Bus, topic string) {
	t.Helper()
	eventually(t, "all keys", func() bool {
		found, err := bus.Keys(topic).GetMany(t.Context(), c.steady())
		return err == nil && len(found) == c.still+c.kept
	})
}

// TestListingMissesNoKey walks over two hubs, in pages of random sizes some of which are asked for
// twice, while keys are written and removed. Each key that is there all the time comes once.
func TestListingMissesNoKey(t *testing.T) {
	t.Parallel()
	nats := natstest.Start(t)
	on := jetstream.Config{URL: nats.URL(), Topics: keptRules}
	hubs := []*rig{newRigOn(t, on, nil), newRigOn(t, on, nil)}
	c := churn{still: 400, kept: 300, wild: 300}
	stop := c.start(t, hubs[0].bus, "kept.churn")
	defer stop()
	c.await(t, hubs[0].bus, "kept.churn")
	pages := 0
	for walk := range *listingWalks {
		found := make(map[string]int)
		for next := ""; ; pages++ {
			limit := 1 + rand.IntN(150)
			p := hubs[rand.IntN(2)].list(t, "kept.churn", next, limit)
			if rand.IntN(5) == 0 { // the answer was lost
				p = hubs[rand.IntN(2)].list(t, "kept.churn", next, limit)
			}
			for _, item := range p.Items {
				found[item.Key]++
			}
			if p.Next == nil {
				break
			}
			next = *p.Next
		}
		missing := 0
		for _, key := range c.steady() {
			if found[key] == 0 {
				missing++
			}
		}
		twice := 0
		for _, n := range found {
			if n > 1 {
				twice++
			}
		}
		if missing > 0 || twice > 0 {
			t.Errorf("walk %d: %d keys are missing, %d came twice", walk, missing, twice)
		}
	}
	t.Logf("%d walks of %d pages", *listingWalks, pages)
}

// TestListingEndsBesideWriters has writers that change all keys all the time.
func TestListingEndsBesideWriters(t *testing.T) {
	t.Parallel()
	r := newSnapRig(t, nil)
	c := churn{kept: 500}
	defer c.start(t, r.bus, "kept.busy")()
	c.await(t, r.bus, "kept.busy")
	for range 2 {
		if found, _ := r.listAll(t, "kept.busy", 50); len(found) != c.kept {
			t.Errorf("%d keys came, want %d", len(found), c.kept)
		}
	}
}

// TestListingRefusals has cursors that are none, or of another topic, and queries that do not go
// with one.
func TestListingRefusals(t *testing.T) {
	t.Parallel()
	r := newSnapRig(t, nil)
	for _, topic := range []string{"kept.a", "kept.b"} {
		for i := range 5 {
			r.keep(t, topic, strconv.Itoa(i), "1")
		}
		r.awaitItems(t, "/snap/"+topic, 5, "")
	}
	r.keep(t, "plain", "k", "1")
	good := *r.list(t, "kept.a", "", 2).Next
	if len(good) > 128 || strings.Trim(good, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
		t.Errorf("the cursor %q is long, or needs escapes", good)
	}
	raw, err := base64.RawURLEncoding.DecodeString(good)
	if err != nil {
		t.Fatal(err)
	}
	type refusal struct{ query, names string }
	refusals := []refusal{
		{"next=x", "is no cursor"},
		{"next=" + good[:len(good)-1], "is no cursor"},
		{"next=" + good + "A", "is no cursor"},
		{"next=" + strings.Repeat("A", len(good)), "is no cursor"},
		{"next=" + strings.Repeat("A", 60_000), "is no cursor"},
		{"next=%00", "is no cursor"},
		{"next=%ff", "is no cursor"},
		{"next=" + url.QueryEscape(good+"\n"), "is no cursor"},
		{"next=&next=" + good, "given once"},
		{"next=&offset=0", "next goes with limit and schemaVersion only"},
		{"next=&keys=1", "next goes with limit and schemaVersion only"},
		{"next=&consistent=true", "next goes with limit and schemaVersion only"},
		{"next=&limit=0", "limit must be an integer from 1 to 1000"},
		{"next=&limit=1001", "limit must be an integer from 1 to 1000"},
	}
	for i := range raw {
		raw[i] ^= 1 << rand.IntN(8)
		broken := base64.RawURLEncoding.EncodeToString(raw)
		refusals = append(refusals, refusal{"next=" + broken, "is no cursor"})
		copy(raw, mustDecode(t, good))
	}
	for _, c := range refusals {
		got := r.get(t, "/snap/kept.a?"+c.query)
		if got.status != http.StatusBadRequest || got.Code != "bad_options" || !strings.Contains(got.Error, c.names) {
			t.Errorf("%.100s: %d %s, want %q", c.query, got.status, got.text, c.names)
		}
	}
	if got := r.get(t, "/snap/kept.b?next="+good); got.Code != "bad_options" || !strings.Contains(got.Error, "another topic") {
		t.Error("of another topic:", got)
	}
	if got := r.get(t, "/snap/plain?next="); got.Code != "bad_topic" || !strings.Contains(got.Error, "not compacted") {
		t.Error("of a topic that is not compacted:", got)
	}
	if p := r.list(t, "kept.a", good, 3); p.Count != 3 || p.Next != nil {
		t.Errorf("the cursor leads to %+v", p)
	}
}

func mustDecode(t *testing.T, text string) []byte {
	t.Helper()
	b, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestListingPolicy(t *testing.T) {
	t.Parallel()
	v := newVerifier(t)
	r := newSnapRig(t, func(cfg *facade.Config) { cfg.Auth = facade.Tokens(v) })
	for i := range 3 {
		r.keep(t, "kept.a", strconv.Itoa(i), "1")
	}
	r.awaitItems(t, "/snap/kept.a", 3, "")
	next := *r.list(t, "kept.a", "", 1).Next
	for _, c := range []struct {
		token  string
		status int
	}{
		{"", 401},
		{"x", 401},
		{grant(t, "writer", "publish:kept.*"), 403},
		{grant(t, "stranger", "subscribe:other.*"), 403},
		{grant(t, "reader", "subscribe:kept.*"), 200},
		{sign(t, acl.Grant{Subject: "groups", Policy: []byte(`{"rules":[{"effect":"allow","action":"subscribe","topics":["kept.*"],"groups":["g"]}]}`)}), 403},
	} {
		for _, query := range []string{"next=", "next=" + next, "next=x"} {
			got := r.get(t, "/snap/kept.a?"+query, "Authorization", "Bearer "+c.token)
			if status := got.status; status != c.status && (c.status != 200 || query != "next=x" || status != 400) {
				t.Errorf("%s: %d %s, want %d", query, status, got.text, c.status)
			}
		}
	}
}

// TestListingBeginsAnew has cursors that cannot be continued: their bucket was created again, or is
// gone, or what was given on earlier pages is not known any more.
func TestListingBeginsAnew(t *testing.T) {
	t.Parallel()
	r := newSnapRig(t, nil)
	c := churn{still: 50, kept: 20}
	c.start(t, r.bus, "kept.anew")()
	c.await(t, r.bus, "kept.anew")
	_, js := r.native(t)
	anew := func(next, why string) {
		t.Helper()
		for range 100 {
			got := r.get(t, "/snap/kept.anew?limit=10&next="+next)
			var p listed
			if err := json.Unmarshal([]byte(got.text), &p); err != nil {
				t.Fatal(err)
			}
			switch {
			case got.status == http.StatusOK && p.Next != nil:
				next = *p.Next
				continue
			case got.status == http.StatusBadRequest && got.Code == "bad_options" && strings.Contains(got.Error, "begin again with an empty next"):
				return
			}
			t.Fatalf("%s: %d %s", why, got.status, got.text)
		}
		t.Fatalf("%s: it goes on and on", why)
	}

	next := *r.list(t, "kept.anew", "", 10).Next
	next = *r.list(t, "kept.anew", next, 10).Next
	for i := range c.kept {
		// only of these it matters what was given
		r.keep(t, "kept.anew", "kept-"+strconv.Itoa(i), `"new"`)
	}
	if err := js.DeleteStream(t.Context(), "KV_eventhub_listings"); err != nil {
		t.Fatal(err)
	}
	anew(next, "what was given is not known")

	next = *r.list(t, "kept.anew", "", 10).Next
	next = *r.list(t, "kept.anew", next, 10).Next
	if err := js.DeleteKeyValue(t.Context(), "latest_kept_anew"); err != nil {
		t.Fatal(err)
	}
	anew(next, "the bucket is gone")
	if _, err := r.bus.Admin().RepairBucket(t.Context(), "kept.anew", jetstream.RepairOptions{}); err != nil {
		t.Fatal(err)
	}
	c.await(t, r.bus, "kept.anew")
	anew(next, "the bucket was created again")
	if found, _ := r.listAll(t, "kept.anew", 10); len(found) != c.still+c.kept {
		t.Errorf("%d keys came", len(found))
	}
}

// TestListingOverRestarts continues a cursor after the server, or the hub, was killed.
func TestListingOverRestarts(t *testing.T) {
	t.Parallel()
	nats := natstest.Start(t)
	on := jetstream.Config{URL: nats.URL(), Topics: keptRules}
	r := newRigOn(t, on, nil)
	c := churn{still: 200, kept: 100, wild: 100}
	c.start(t, r.bus, "kept.restart")()
	c.await(t, r.bus, "kept.restart")
	found := make(map[string]int)
	pages := 0
	for next := ""; ; pages++ {
		var p listed
		eventually(t, "a page", func() bool {
			got := r.get(t, "/snap/kept.restart?limit=50&next="+next)
			return got.status == http.StatusOK && json.Unmarshal([]byte(got.text), &p) == nil
		})
		for _, item := range p.Items {
			found[item.Key]++
		}
		if p.Next == nil {
			break
		}
		next = *p.Next
		for range 20 {
			r.keepSoon(t, "kept.restart", "kept-"+strconv.Itoa(rand.IntN(c.kept)))
		}
		if pages%2 == 0 {
			nats.Kill()
			nats.Start()
		} else {
			r = newRigOn(t, on, nil)
		}
	}
	for _, key := range c.steady() {
		if found[key] != 1 {
			t.Errorf("%s came %d times", key, found[key])
		}
	}
	if pages < 6 {
		t.Errorf("there were %d pages: this tested little", pages)
	}
}

// keepSoon stores an event of a key, as soon as the bus can.
func (r *rig) keepSoon(t *testing.T, topic, key string) {
	t.Helper()
	eventually(t, "a publish", func() bool {
		_, err := r.bus.Publish(t.Context(), topic, []byte(`"new"`), jetstream.PublishOptions{Key: key})
		return err == nil
	})
}

// TestListingBytes has records of which few fit into a page.
func TestListingBytes(t *testing.T) {
	t.Parallel()
	const size = 10_000
	r := newSnapRig(t, func(cfg *facade.Config) { cfg.Limits.PageBytes = 4 * size })
	const keys = 20
	for i := range keys {
		r.keep(t, "kept.b", "k"+strconv.Itoa(i), `"`+strings.Repeat("x", size)+`"`)
	}
	r.keep(t, "kept.b", "large", `"`+strings.Repeat("x", 6*size)+`"`)
	eventually(t, "the large one is there", func() bool { return r.page(t, "/snap/kept.b").keys() == "large" })
	found, pages := r.listAll(t, "kept.b", 10)
	if len(found) != keys+1 || pages != 8 { // three a page, then the large one
		t.Errorf("%d keys on %d pages", len(found), pages)
	}
	if r.seen.count("limit page_bytes") == 0 {
		t.Error("the limit is not counted")
	}
}

// TestListingLeavesNothingBehind wants no consumer of a walk that was left, and bounds for what is
// kept of it.
func TestListingLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	r := newSnapRig(t, nil)
	c := churn{still: 3_000}
	c.start(t, r.bus, "kept.left")()
	c.await(t, r.bus, "kept.left")
	_, js := r.native(t)
	bucket, err := js.Stream(t.Context(), "KV_latest_kept_left")
	if err != nil {
		t.Fatal(err)
	}
	count := func() int {
		n := 0
		for range bucket.ListConsumers(t.Context()).Info() {
			n++
		}
		return n
	}
	// Each reads ahead from its second page on, but no more of them at a time than the limit.
	const walks = 20
	for range walks {
		next := *r.list(t, "kept.left", "", 10).Next
		r.list(t, "kept.left", next, 10)
	}
	if n := count(); n == 0 || n > 16 {
		t.Errorf("%d consumers read ahead, want 1 to 16", n)
	}
	eventually(t, "the consumers are gone", func() bool { return count() == 0 })
	if found, _ := r.listAll(t, "kept.left", 1000); len(found) != c.still {
		t.Errorf("%d keys came", len(found))
	}
	listings, err := js.Stream(t.Context(), "KV_eventhub_listings")
	if err != nil {
		t.Fatal(err)
	}
	cfg := listings.CachedInfo().Config
	if cfg.MaxAge <= 0 || cfg.MaxAge > 2*time.Hour || cfg.MaxBytes <= 0 || cfg.Discard != natsjs.DiscardOld {
		t.Errorf("what was given is bounded by %+v", cfg)
	}
}
