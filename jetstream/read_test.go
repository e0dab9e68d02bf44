package jetstream

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/topics"
)

// readAllOf returns the payloads of a range, in order.
func readAllOf(tb testing.TB, b *Bus, topic string, opts ReadOptions) (payloads []string) {
	tb.Helper()
	for e, err := range b.History(topic).Read(tb.Context(), opts) {
		if err != nil {
			tb.Fatal(err)
		}
		payloads = append(payloads, string(e.Payload))
	}
	return payloads
}

// fromTo is the payloads from..to.
func fromTo(from, to int) (list []string) {
	for i := from; i <= to; i++ {
		list = append(list, strconv.Itoa(i))
	}
	return list
}

func fillTopic(tb testing.TB, b *Bus, topic string, from, to int) {
	tb.Helper()
	pub := b.NewPublisher()
	for i := from; i <= to; i++ {
		opts := PublishOptions{ID: fmt.Sprintf("id-%d", i), Key: fmt.Sprintf("k%d", i%3), Headers: map[string]string{"correlationId": strconv.Itoa(i % 5)}}
		if err := pub.PublishAsync(tb.Context(), topic, []byte(strconv.Itoa(i)), opts, func(_ event.Receipt, err error) {
			if err != nil {
				tb.Error(err)
			}
		}); err != nil {
			tb.Fatal(err)
		}
	}
	if err := pub.Flush(tb.Context()); err != nil {
		tb.Fatal(err)
	}
}

// TestReadEveryEventOnce reads a topic in pages by id, at sizes that tear milliseconds apart: every
// event comes once, in order.
func TestReadEveryEventOnce(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	const n = 3_000
	fillTopic(t, b, "pages", 1, n)
	if got := readAllOf(t, b, "pages", ReadOptions{}); !slices.Equal(got, fromTo(1, n)) {
		t.Fatalf("read %d events, want %d in order", len(got), n)
	}
	stamps := make(map[int64]int)
	for _, size := range []int{1_000, 333} {
		var got []string
		from := FromEarliest
		for {
			page := 0
			for e, err := range b.History("pages").Read(t.Context(), ReadOptions{From: from, Limit: size}) {
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, string(e.Payload))
				from = FromAfterID(e.ID)
				stamps[e.StoredAt/1e6]++
				page++
			}
			if page < size {
				break
			}
		}
		if !slices.Equal(got, fromTo(1, n)) {
			t.Fatalf("pages of %d have %d events, want %d in order", size, len(got), n)
		}
	}
	if len(stamps) >= n {
		t.Fatal("no two events share a millisecond: the test shows nothing")
	}
}

// TestReadBounds cuts a topic in two at every kind of bound. Both parts together are the whole,
// without an overlap.
func TestReadBounds(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	const n = 500
	fillTopic(t, b, "bounds", 1, n)
	var events []*event.Event
	for e, err := range b.History("bounds").Read(t.Context(), ReadOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		events = append(events, e)
	}
	for _, i := range []int{0, 1, n / 3, n / 2, n - 2, n - 1} {
		at := time.UnixMilli(events[i].StoredAt / 1e6)
		before := readAllOf(t, b, "bounds", ReadOptions{Until: at.Add(-time.Millisecond)})
		since := readAllOf(t, b, "bounds", ReadOptions{From: FromTime(at)})
		if got := slices.Concat(before, since); !slices.Equal(got, fromTo(1, n)) {
			t.Errorf("until and from the time of event %d: %d and %d events", i+1, len(before), len(since))
		}
		same := readAllOf(t, b, "bounds", ReadOptions{Since: at, Until: at})
		if !slices.Contains(same, strconv.Itoa(i+1)) {
			t.Errorf("the millisecond of event %d has only %v", i+1, same)
		}
		after := readAllOf(t, b, "bounds", ReadOptions{From: FromAfterID(events[i].ID)})
		if !slices.Equal(after, fromTo(i+2, n)) {
			t.Errorf("after event %d: %d events", i+1, len(after))
		}
	}
	for _, c := range []struct {
		opts ReadOptions
		want []string
	}{
		{ReadOptions{Limit: 2}, fromTo(1, 2)},
		{ReadOptions{Key: "k1", Limit: 3}, []string{"1", "4", "7"}},
		{ReadOptions{Headers: map[string]string{"CORRELATIONID": "2"}, Limit: 3}, []string{"2", "7", "12"}},
		{ReadOptions{Headers: map[string]string{"correlationId": "2"}, Key: "k1", Limit: 2}, []string{"7", "22"}},
		{ReadOptions{Headers: map[string]string{"other": "2"}}, nil},
		{ReadOptions{Key: "none"}, nil},
		{ReadOptions{From: FromTime(time.Now().Add(time.Hour))}, nil},
	} {
		if got := readAllOf(t, b, "bounds", c.opts); !slices.Equal(got, c.want) {
			t.Errorf("%+v: %v, want %v", c.opts, got, c.want)
		}
	}
	if got := readAllOf(t, b, "missing", ReadOptions{}); got != nil {
		t.Errorf("a topic that does not exist has %v", got)
	}
	for e, err := range b.History("bounds").Read(t.Context(), ReadOptions{From: FromAfterID("nobody")}) {
		if known, ok := errors.AsType[*event.Error](err); !ok || known.Code != event.CodeUnknownID || e != nil {
			t.Errorf("an unknown id: %v, %v", e, err)
		}
	}
}

// TestReadEndsAtTheCall does not follow those who publish meanwhile.
func TestReadEndsAtTheCall(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	fillTopic(t, b, "moving", 1, 1_500)
	n := 0
	for _, err := range b.History("moving").Read(t.Context(), ReadOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		if n++; n%10 == 1 {
			fillTopic(t, b, "moving", 1_500+n, 1_500+n)
		}
	}
	if n != 1_500 {
		t.Fatalf("read %d events, want 1500", n)
	}
}

// TestReadLargeEvents reads events that are larger than a pull, among small ones.
func TestReadLargeEvents(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	var want []int
	for i := range 40 {
		size := 10
		if i%7 == 3 {
			size = 1_000_000
		} else if i%5 == 0 {
			size = 300_000
		}
		if _, err := b.Publish(t.Context(), "large", []byte(`"`+strings.Repeat("x", size)+`"`), PublishOptions{}); err != nil {
			t.Fatal(err)
		}
		want = append(want, size+2)
	}
	// What is waited for in vain is waited for at each try.
	for try := 1; ; try++ {
		var got []int
		begun := time.Now()
		for e, err := range b.History("large").Read(t.Context(), ReadOptions{}) {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, len(e.Payload))
		}
		took := time.Since(begun)
		if !slices.Equal(got, want) {
			t.Fatalf("sizes %v, want %v", got, want)
		}
		if took <= 2*time.Second {
			break
		}
		if try == 3 {
			t.Fatalf("it took %v: a pull was waited for in vain", took)
		}
	}
}

// TestReadFamily reads one topic of a stream with many.
func TestReadFamily(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: []topics.Rule{{Pattern: "family.*", Family: "families"}}})
	for i := range 300 {
		fillTopic(t, b, fmt.Sprintf("family.%d", i%3), i, i)
	}
	var want []string
	for i := 1; i < 300; i += 3 {
		want = append(want, strconv.Itoa(i))
	}
	if got := readAllOf(t, b, "family.1", ReadOptions{}); !slices.Equal(got, want) {
		t.Errorf("read %v", got)
	}
	r, err := b.History("family.1").Range(t.Context(), ReadOptions{})
	if err != nil || r.LastID != "id-298" {
		t.Errorf("the last id is %q (%v), want id-298", r.LastID, err)
	}
}

// TestReadSaysWhatWasDropped reads topics whose beginning is gone.
func TestReadSaysWhatWasDropped(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	begin := time.Now()
	fillTopic(t, b, "short", 1, 100)
	before, err := b.History("short").Range(t.Context(), ReadOptions{From: FromTime(begin)})
	if err != nil || before.Truncated || before.FirstID != "" || before.LastID != "id-100" {
		t.Fatalf("nothing is gone yet: %+v, %v", before, err)
	}
	var events []*event.Event
	for e, err := range before.Events(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		events = append(events, e)
	}
	purge(t, b, "short", 61)
	for _, c := range []struct {
		why       string
		from      Position
		truncated bool
		n         int
	}{
		{"the beginning", FromTime(time.UnixMilli(0)), true, 40},
		{"whatever is left", FromEarliest, false, 40},
		{"an event that is left", FromAfterID("id-61"), false, 39},
		{"after that is left", FromTime(time.Unix(0, events[99].StoredAt)), false, 1},
		{"a native id that is gone", FromAfterID(events[0].Stream + "@10"), true, 40},
		{"the native id of the last that is gone", FromAfterID(events[0].Stream + "@60"), false, 40},
		{"an id older than all that are left", FromAfterID("01a00000-0000-7000-8000-000000000000"), true, 40},
	} {
		r, err := b.History("short").Range(t.Context(), ReadOptions{From: c.from})
		if err != nil {
			t.Errorf("%s: %v", c.why, err)
			continue
		}
		n := 0
		for _, err := range r.Events(t.Context()) {
			if err != nil {
				t.Error(err)
			}
			n++
		}
		first := ""
		if c.truncated {
			first = "id-61"
		}
		if r.Truncated != c.truncated || r.FirstID != first || n != c.n {
			t.Errorf("from %s: truncated %v, first %q, %d events; want %v, %q, %d", c.why, r.Truncated, r.FirstID, n, c.truncated, first, c.n)
		}
	}
	purge(t, b, "short", 101)
	r, err := b.History("short").Range(t.Context(), ReadOptions{From: FromTime(begin)})
	if err != nil || !r.Truncated || r.FirstID != "" || r.LastID != "" {
		t.Errorf("nothing is left: %+v, %v", r, err)
	}
}

// purge removes the events of a topic before a sequence.
func purge(tb testing.TB, b *Bus, topic string, before uint64) {
	tb.Helper()
	s, err := b.conn.JS.Stream(tb.Context(), objectName(topic))
	if err != nil {
		tb.Fatal(err)
	}
	if err := s.Purge(tb.Context(), natsjs.WithPurgeSequence(before)); err != nil {
		tb.Fatal(err)
	}
}

// TestReadIsOvertaken ends with an error, and with no event from behind the gap, when events are
// dropped that come next. Single events that were deleted are no gap.
func TestReadIsOvertaken(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	const n = 5_000
	fillTopic(t, b, "overtaken", 1, n)
	s, err := b.conn.JS.Stream(t.Context(), objectName("overtaken"))
	if err != nil {
		t.Fatal(err)
	}
	for _, seq := range []uint64{2, 10, 700} {
		if err := s.DeleteMsg(t.Context(), seq); err != nil {
			t.Fatal(err)
		}
	}
	if got := readAllOf(t, b, "overtaken", ReadOptions{}); len(got) != n-3 {
		t.Fatalf("read %d events, want %d", len(got), n-3)
	}
	last, purged := 0, false
	var end error
	for e, err := range b.History("overtaken").Read(t.Context(), ReadOptions{From: FromTime(time.UnixMilli(0))}) {
		if err != nil {
			end = err
			break
		}
		if purged && int(e.Sequence) > last+1 && e.Sequence != 700+1 && e.Sequence != 11 {
			t.Fatalf("event %d came after %d", e.Sequence, last)
		}
		last = int(e.Sequence)
		if !purged && last > 50 {
			purge(t, b, "overtaken", n-10)
			purged = true
		}
	}
	if !errors.Is(end, ErrDropped) || last >= n-10 {
		t.Fatalf("ended with %v after event %d", end, last)
	}
}

// TestReadLeavesNothingBehind removes the consumer at the end, when the caller stops, and when the
// context ends. It is not listed as a group.
func TestReadLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	fillTopic(t, b, "clean", 1, 2_000)
	consumers := func() (names []string) {
		s, err := b.conn.JS.Stream(t.Context(), objectName("clean"))
		if err != nil {
			t.Fatal(err)
		}
		list := s.ListConsumers(t.Context())
		for info := range list.Info() {
			if info.Config.Durable != "" {
				t.Errorf("a reader made the durable consumer %s", info.Config.Durable)
			}
			names = append(names, info.Name)
		}
		if list.Err() != nil && !errors.Is(list.Err(), natsjs.ErrEndOfData) {
			t.Fatal(list.Err())
		}
		return names
	}
	readAllOf(t, b, "clean", ReadOptions{})
	n := 0
	for range b.History("clean").Read(t.Context(), ReadOptions{}) {
		if n++; n == 10 {
			if got := consumers(); len(got) != 1 {
				t.Errorf("while it reads there are the consumers %v, want 1", got)
			}
			break
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var end error
	for _, err := range b.History("clean").Read(ctx, ReadOptions{}) {
		cancel()
		end = err
	}
	if !errors.Is(end, context.Canceled) {
		t.Errorf("a cancelled read ended with %v", end)
	}
	if got := consumers(); len(got) != 0 {
		t.Errorf("the consumers %v are left", got)
	}
}

// TestReadGoesOn reads on when its consumer is removed, as the server does when the reader holds
// still.
func TestReadGoesOn(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	const n = 4_000
	fillTopic(t, b, "on", 1, n)
	var got []string
	for e, err := range b.History("on").Read(t.Context(), ReadOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, string(e.Payload))
		if len(got)%1_500 == 0 {
			s, err := b.conn.JS.Stream(t.Context(), objectName("on"))
			if err != nil {
				t.Fatal(err)
			}
			for name := range s.ConsumerNames(t.Context()).Name() {
				if err := s.DeleteConsumer(t.Context(), name); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if !slices.Equal(got, fromTo(1, n)) {
		t.Fatalf("read %d events, want %d in order", len(got), n)
	}
}

// TestReadNative reads what native clients published: without an id, and with a payload that is no
// JSON.
func TestReadNative(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	b := openRemote(t, Config{URL: url})
	fillTopic(t, b, "native", 1, 1)
	nc, js := nativeConn(t, url)
	defer nc.Close()
	if _, err := js.PublishMsg(t.Context(), &nats.Msg{Subject: "event.native", Data: []byte("plain")}); err != nil {
		t.Fatal(err)
	}
	var ids []string
	for e, err := range b.History("native").Read(t.Context(), ReadOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, e.ID)
	}
	if want := []string{"id-1", objectName("native") + "@2"}; !slices.Equal(ids, want) {
		t.Errorf("ids %q, want %q", ids, want)
	}
}

// A reader whose context has ended gets what it was given at once, and no more: it does not read on
// because the server is quicker than it is.
func TestRangeEndsWithItsContext(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	const n, size = 300, 100_000
	payload := `"` + strings.Repeat("x", size) + `"`
	for range n {
		publishAll(t, b, "t", payload)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	read := 0
	var end error
	work := make([]byte, 1<<20)
	for _, err := range b.History("t").Read(ctx, ReadOptions{}) {
		if end = err; err != nil {
			break
		}
		if read++; read == 1 {
			cancel()
		}
		sha256.Sum256(work)
	}
	if most := (512<<10)/size + 1; !errors.Is(end, context.Canceled) || read > most {
		t.Errorf("%d events were read, and then: %v; want at most %d", read, end, most)
	}
}
