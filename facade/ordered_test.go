package facade_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"eventhub/acl"
	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/ordered"
	"eventhub/ops"
	"eventhub/sdk/go/wire"
)

// keyed is a member of an ordered group, at the level of frames. It checks what holds for each: a
// member has the slot of what it is given, no key is leased to it twice, and a slot is lost when
// none of its leases is left.
type keyed struct {
	t     *testing.T
	c     *rawConn
	topic string
	slots []int
	epoch uint64
	held  map[string]keyedFrame // leases, by key
	early []keyedFrame          // events that came before the answer to something
	corr  int
}

// keyedFrame is a frame that such a member gets.
type keyedFrame struct {
	Op, Code, Msg, Topic, Group string
	Corr                        any
	Slots                       []int
	Epoch                       uint64
	Event                       struct {
		ID, Topic, Key string
		Partition      *int
		Payload        json.RawMessage
	}
	Ctx struct {
		Attempt  int
		Deadline int64 `json:"ack_deadline_ms"`
	}
}

// dialKeyed connects and authenticates.
func dialKeyed(t *testing.T, h *testHub, topic, token string) *keyed {
	t.Helper()
	k := &keyed{t: t, c: dialRaw(t, h.url), topic: topic, held: make(map[string]keyedFrame)}
	k.send(`"op":"AUTH","token":"` + token + `"`)
	return k
}

// joinKeyed is a member of the group g with these options, beside "ordered".
func joinKeyed(t *testing.T, h *testHub, topic, more string) *keyed {
	t.Helper()
	k := dialKeyed(t, h, topic, testToken)
	k.send(`"op":"SUBSCRIBE","topic":"` + topic + `","group":"g","opts":{"ordered":"key","from":"earliest"` + more + `}`)
	return k
}

// send sends a frame, and waits for its OK. Other frames that come before are taken note of.
func (k *keyed) send(fields string) {
	k.t.Helper()
	if f := k.ask(fields); f.Op != "OK" {
		k.t.Fatalf("%s: %s %s", fields, f.Code, f.Msg)
	}
}

// ask sends a frame, and returns its answer.
func (k *keyed) ask(fields string) keyedFrame {
	k.t.Helper()
	k.corr++
	k.c.send(fmt.Sprintf(`{%s,"corr":%d}`, fields, k.corr))
	for {
		f := k.frame()
		if f.Corr == float64(k.corr) {
			return f
		}
		if f.Op == "EVENT" {
			k.early = append(k.early, f)
		}
	}
}

// frame is the next frame.
func (k *keyed) frame() keyedFrame {
	k.t.Helper()
	return k.parse(k.c.next())
}

func (k *keyed) parse(text string) keyedFrame {
	k.t.Helper()
	var f keyedFrame
	if err := json.Unmarshal([]byte(text), &f); err != nil {
		k.t.Fatal(err)
	}
	switch f.Op {
	case "ASSIGN":
		if f.Epoch <= k.epoch || f.Topic != k.topic || f.Group != "g" || f.Slots == nil {
			k.t.Errorf("%s after epoch %d", text, k.epoch)
		}
		for key, e := range k.held {
			if !slices.Contains(f.Slots, *e.Event.Partition) {
				k.t.Errorf("slot %d is lost while a lease of %s is left", *e.Event.Partition, key)
			}
		}
		k.slots, k.epoch = f.Slots, f.Epoch
	case "EVENT":
		if f.Event.Key == "" {
			break
		}
		if f.Event.Partition == nil || !slices.Contains(k.slots, *f.Event.Partition) {
			k.t.Fatalf("%s came to a member with the slots %v", text, k.slots)
		}
		if before, held := k.held[f.Event.Key]; held {
			k.t.Errorf("%s while %s is held", text, before.Event.ID)
		}
		k.held[f.Event.Key] = f
	}
	return f
}

// event is the next event. What is told before is taken note of.
func (k *keyed) event() keyedFrame {
	k.t.Helper()
	if len(k.early) > 0 {
		e := k.early[0]
		k.early = k.early[1:]
		return e
	}
	for {
		switch f := k.frame(); f.Op {
		case "EVENT":
			return f
		case "ASSIGN":
		default:
			k.t.Fatalf("%+v instead of an event", f)
		}
	}
}

// expect fails unless the next event is this one, in this attempt.
func (k *keyed) expect(id string, attempt int) keyedFrame {
	k.t.Helper()
	e := k.event()
	if e.Event.ID != id || e.Ctx.Attempt != attempt {
		k.t.Fatalf("%s, attempt %d, instead of %s, attempt %d", e.Event.ID, e.Ctx.Attempt, id, attempt)
	}
	return e
}

// until reads until the member has so many slots.
func (k *keyed) until(slots int) {
	k.t.Helper()
	for len(k.slots) != slots {
		if f := k.frame(); f.Op == "EVENT" {
			k.t.Fatalf("%s came while the member waits for %d slots", f.Event.ID, slots)
		}
	}
}

func (k *keyed) settle(op string, e keyedFrame, more string) {
	k.t.Helper()
	delete(k.held, e.Event.Key)
	k.send(`"op":"` + op + `","topic":"` + k.topic + `","group":"g","id":"` + e.Event.ID + `"` + more)
}

func (k *keyed) ack(e keyedFrame) { k.t.Helper(); k.settle("ACK", e, "") }

// publishKey publishes an event with an id.
func publishKey(t *testing.T, bus *jetstream.Bus, topic, key, id string) {
	t.Helper()
	if _, err := bus.Publish(t.Context(), topic, []byte(`"`+id+`"`), jetstream.PublishOptions{ID: id, Key: key}); err != nil {
		t.Fatal(err)
	}
}

// keyOf is a key of the slot.
func keyOf(slot, slots int) string {
	for i := 0; ; i++ {
		if key := "k" + strconv.Itoa(i); ordered.Slot(key, slots) == slot {
			return key
		}
	}
}

// A slot moves when its last lease has ended, and no sooner; its events follow it.
func TestOrderedSlotsMoveWhenTheyAreFree(t *testing.T) {
	t.Parallel()
	a, b := twoHubs(t)
	for _, other := range []*testHub{a, b} {
		topic := freshTopic()
		for n := range 2 {
			for slot := range 8 {
				publishKey(t, a.bus, topic, keyOf(slot, 8), fmt.Sprintf("%d-%d", slot, n))
			}
		}
		first := joinKeyed(t, a, topic, `,"slots":8`)
		first.until(8)
		leases := make([]keyedFrame, 8)
		for range 8 {
			e := first.event()
			leases[*e.Event.Partition] = e
		}
		second := joinKeyed(t, other, topic, "")
		for second.epoch == 0 { // it is told that it has none yet
			_ = second.frame()
		}
		for slot := range 8 {
			first.ack(leases[slot])
		}
		for len(first.held)+len(second.held) < 8 {
			if len(first.held) < 4 {
				_ = first.event()
			} else {
				_ = second.event()
			}
		}
		for len(first.slots) != 4 {
			_ = first.frame()
		}
		both := slices.Sorted(slices.Values(append(slices.Clone(first.slots), second.slots...)))
		if !slices.Equal(both, []int{0, 1, 2, 3, 4, 5, 6, 7}) || len(second.slots) != 4 {
			t.Errorf("slots %v and %v", first.slots, second.slots)
		}
	}
}

// A group keeps the number of slots with which it was made.
func TestOrderedSlotsStay(t *testing.T) {
	t.Parallel()
	h := startHub(t, openBus(t))
	topic := freshTopic()
	first := joinKeyed(t, h, topic, `,"slots":3`)
	first.until(3)
	first.send(`"op":"UNSUBSCRIBE","topic":"` + topic + `","group":"g"`)
	second := joinKeyed(t, h, topic, `,"slots":9`)
	second.until(3)
}

// What is refused, expires or is poison stops its own key and no other.
func TestOrderedKeysDoNotWaitForOthers(t *testing.T) {
	t.Parallel()
	h := startHub(t, openBus(t))
	topic := freshTopic()
	for n := range 3 {
		for _, key := range []string{"a", "b", "c"} {
			publishKey(t, h.bus, topic, key, key+strconv.Itoa(n))
		}
	}
	k := joinKeyed(t, h, topic, `,"maxAttempts":2,"ackTimeoutMs":1000`)
	lease := make(map[string]keyedFrame)
	for range 3 {
		e := k.event()
		lease[e.Event.ID] = e
	}
	// a is refused for longer than the test takes with c, b expires, and c goes on.
	k.settle("NACK", lease["a0"], `,"delay_ms":3000`)
	began := time.Now()
	for n := range 3 {
		e := lease["c"+strconv.Itoa(n)]
		k.ack(e)
		if n < 2 {
			e = k.expect("c"+strconv.Itoa(n+1), 1)
			lease[e.Event.ID] = e
		}
	}
	delete(k.held, "b")
	b := k.expect("b0", 2)
	k.ack(b)
	k.ack(k.expect("b1", 1))
	k.ack(k.expect("b2", 1))
	a := k.expect("a0", 2)
	if waited := time.Since(began); waited < 2900*time.Millisecond {
		t.Errorf("a came again after %v", waited)
	}
	// The last attempt of a0 fails: it becomes a dead letter, and a1 follows.
	k.settle("NACK", a, `,"reason":"poison","delay_ms":0`)
	k.ack(k.expect("a1", 1))
	k.ack(k.expect("a2", 1))
	letters := h.subscribe(h.dial(), "dlq."+topic, "w", wire.SubscribeOptions{From: "earliest"})
	if e := letters.next(); !bytes.Contains(e.Record, []byte(`"a0"`)) {
		t.Errorf("the dead letter is %s", e.Record)
	}
	settled(t, h.bus, topic)
}

// settled waits until the server has nothing left for the group.
func settled(t *testing.T, bus *jetstream.Bus, topic string) {
	t.Helper()
	eventually(t, "all events are settled", func() bool {
		info, err := bus.Group(topic, "g").Info(t.Context())
		return err == nil && info.Pending == 0 && info.InFlight == 0
	})
}

// A member that has lost its connection has its events leased to others, key by key.
func TestOrderedMemberVanishes(t *testing.T) {
	t.Parallel()
	a, b := twoHubs(t)
	for _, at := range []*testHub{a, b} {
		topic := freshTopic()
		first := joinKeyed(t, a, topic, `,"slots":2`)
		first.until(2)
		second := joinKeyed(t, at, topic, "")
		second.until(1)
		first.until(1)
		publishKey(t, a.bus, topic, keyOf(second.slots[0], 2), "1")
		publishKey(t, a.bus, topic, keyOf(second.slots[0], 2), "2")
		_ = second.expect("1", 1)
		_ = second.c.ws.CloseNow()
		first.ack(first.expect("1", 2))
		first.ack(first.expect("2", 1))
		settled(t, a.bus, topic)
	}
}

// A member that pauses keeps its leases, and gives up its slots as these end. It gets slots again.
func TestOrderedPause(t *testing.T) {
	t.Parallel()
	a, b := twoHubs(t)
	for _, other := range []*testHub{a, b} {
		topic := freshTopic()
		first := joinKeyed(t, a, topic, `,"slots":4`)
		first.until(4)
		second := joinKeyed(t, other, topic, "")
		second.until(2)
		first.until(2)
		mine := second.slots[0]
		publishKey(t, a.bus, topic, keyOf(mine, 4), "1")
		e := second.expect("1", 1)
		second.send(`"op":"PAUSE","topic":"` + topic + `","group":"g"`)
		first.until(3)
		publishKey(t, a.bus, topic, keyOf(mine, 4), "2")
		publishKey(t, a.bus, topic, "", "free")
		second.ack(e)
		f, g := first.event(), first.event()
		if f.Event.ID == "2" {
			f, g = g, f
		}
		if f.Event.ID != "free" || g.Event.ID != "2" || len(first.slots) != 4 {
			t.Fatalf("%s and %s came to the member with the slots %v", f.Event.ID, g.Event.ID, first.slots)
		}
		second.send(`"op":"RESUME","topic":"` + topic + `","group":"g"`)
		first.ack(f)
		first.ack(g)
		for len(second.slots) != 2 {
			_ = second.frame()
		}
		settled(t, a.bus, topic)
	}
}

// A group that is paused as a whole gives nothing out, and goes on in order.
func TestOrderedGroupPaused(t *testing.T) {
	t.Parallel()
	a, b := twoHubs(t)
	topic := freshTopic()
	first := joinKeyed(t, a, topic, `,"slots":4`)
	first.until(4)
	second := joinKeyed(t, b, topic, "")
	second.until(2)
	first.until(2)
	members := map[int]*keyed{}
	for _, k := range []*keyed{first, second} {
		for _, slot := range k.slots {
			members[slot] = k
		}
	}
	if err := b.bus.Group(topic, "g").Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	for slot := range 4 {
		publishKey(t, a.bus, topic, keyOf(slot, 4), fmt.Sprint(slot, "-1"))
		publishKey(t, a.bus, topic, keyOf(slot, 4), fmt.Sprint(slot, "-2"))
	}
	if err := b.bus.Group(topic, "g").Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, k := range []*keyed{first, second} {
		for len(k.held) < 2 {
			_ = k.event()
		}
	}
	for slot := range 4 {
		k := members[slot]
		key := keyOf(slot, 4)
		k.ack(k.held[key])
		if e := k.event(); e.Event.Key != key {
			t.Fatalf("%s came after an event of %s", e.Event.ID, key)
		}
		k.ack(k.held[key])
	}
	settled(t, a.bus, topic)
}

// A seek gives all events again, from the oldest on, and what was leased before counts no more.
func TestOrderedSeek(t *testing.T) {
	t.Parallel()
	a, b := twoHubs(t)
	for name, at := range map[string]*testHub{"the owner's hub": a, "another hub": b} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			topic := freshTopic()
			owner := joinKeyed(t, a, topic, `,"slots":1`)
			owner.until(1)
			k := owner
			if at == b { // the member with the slot is on the other hub
				owner.send(`"op":"PAUSE","topic":"` + topic + `","group":"g"`)
				owner.until(0)
				k = joinKeyed(t, b, topic, "")
				k.until(1)
			}
			for n := 1; n <= 3; n++ {
				publishKey(t, a.bus, topic, "a", strconv.Itoa(n))
			}
			k.ack(k.expect("1", 1))
			stale := k.expect("2", 1)
			if err := b.bus.Group(topic, "g").Seek(t.Context(), jetstream.FromEarliest); err != nil {
				t.Fatal(err)
			}
			delete(k.held, "a")
			e := k.expect("1", 1)
			k.settle("ACK", stale, "") // settles nothing
			k.held["a"] = e
			k.ack(e)
			k.ack(k.expect("2", 1))
			k.ack(k.expect("3", 1))
			settled(t, a.bus, topic)
		})
	}
}

// The members of a group that is deleted are told so, wherever they are.
func TestOrderedGroupDeleted(t *testing.T) {
	t.Parallel()
	a, b := twoHubs(t)
	topic := freshTopic()
	first := joinKeyed(t, a, topic, `,"slots":2`)
	first.until(2)
	second := joinKeyed(t, b, topic, "")
	second.until(1)
	if err := b.bus.Group(topic, "g").Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, k := range []*keyed{first, second} {
		for {
			if f := k.frame(); f.Op == "ERR" {
				if f.Code != "not_subscribed" {
					t.Errorf("%s %s", f.Code, f.Msg)
				}
				break
			}
		}
	}
	// A new group may be of the other kind.
	k := dialKeyed(t, a, topic, testToken)
	k.send(`"op":"SUBSCRIBE","topic":"` + topic + `","group":"g"`)
}

// An event that is put back is leased when it is its turn within its key, on either hub. A test of
// package jetstream has when that is.
func TestOrderedPutBack(t *testing.T) {
	t.Parallel()
	a, b := twoHubs(t)
	for _, at := range []*testHub{a, b} {
		topic := freshTopic()
		k := joinKeyed(t, at, topic, `,"maxAttempts":1`)
		publishKey(t, a.bus, topic, "a", "1")
		publishKey(t, a.bus, topic, "a", "2")
		k.settle("NACK", k.expect("1", 1), "")
		e := k.expect("2", 1)
		publishKey(t, a.bus, topic, "a", "3")
		eventually(t, "the dead letter is put back", func() bool {
			got, err := a.bus.Admin().DeadLetters().Redrive(t.Context(), jetstream.LetterFilter{Topic: topic}, jetstream.RedriveOptions{})
			return err == nil && got.Done == 1
		})
		k.ack(e)
		e = k.event()
		k.ack(e)
		rest := "3"
		if e.Event.ID == rest {
			rest = "1"
		}
		k.ack(k.expect(rest, 1))
		settled(t, a.bus, topic)
	}
}

// A token needs the same for an ordered group as for another one.
func TestOrderedNeedsPermission(t *testing.T) {
	t.Parallel()
	v := newVerifier(t)
	h := startHub(t, openBus(t), func(cfg *facade.Config) { cfg.Auth = facade.Tokens(v) })
	k := dialKeyed(t, h, "mine", sign(t, acl.Grant{Subject: "s", Scopes: []string{"subscribe:mine"}}))
	if f := k.ask(`"op":"SUBSCRIBE","topic":"other","group":"g","opts":{"ordered":"key"}`); f.Code != "forbidden" {
		t.Errorf("%+v", f)
	}
	k.send(`"op":"SUBSCRIBE","topic":"mine","group":"g","opts":{"ordered":"key"}`)
	k.until(ordered.DefaultSlots)
}

// One key may have more events than the hub keeps whole, and comes in order all the same.
func TestOrderedManyEventsOfOneKey(t *testing.T) {
	t.Parallel()
	h := startHub(t, openBus(t), unthrottled)
	topic := freshTopic()
	const events = 1050 // of which the hub keeps 1000
	p := h.bus.NewPublisher()
	for n := range events {
		err := p.PublishAsync(t.Context(), topic, []byte(`{"n":`+strconv.Itoa(n)+`}`), jetstream.PublishOptions{Key: "a", Headers: map[string]string{"n": strconv.Itoa(n)}}, func(_ jetstream.Receipt, err error) {
			if err != nil {
				t.Error(err)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	k := joinKeyed(t, h, topic, "")
	for n := range events {
		e := k.event()
		if string(e.Event.Payload) != `{"n":`+strconv.Itoa(n)+`}` {
			t.Fatalf("%s instead of %d", e.Event.Payload, n)
		}
		k.ack(e)
	}
	settled(t, h.bus, topic)
}

// limitsSeen is an observer of a bus that notes limits.
type limitsSeen struct {
	jetstream.Observer
	mu   sync.Mutex
	seen map[string]int
}

func (l *limitsSeen) LimitReached(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen[name]++
}

func (l *limitsSeen) count(name string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.seen[name]
}

// lines is a log that may be read while it is written.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// A key that fills the window is noticed, and named nowhere but in the log of a developer.
func TestOrderedWindowFull(t *testing.T) {
	t.Parallel()
	began := time.Now()
	var log lines
	seen := &limitsSeen{Observer: ops.NewMetrics(prometheus.NewRegistry()), seen: make(map[string]int)}
	h := startHub(t, openBus(t, func(cfg *jetstream.Config) {
		cfg.Limits.OrderedWindow, cfg.Observer = 20, seen
		cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	}))
	topic := freshTopic()
	for n := range 30 {
		publishKey(t, h.bus, topic, "secret", "s"+strconv.Itoa(n))
	}
	publishKey(t, h.bus, topic, "b", "b")
	k := joinKeyed(t, h, topic, "")
	e := k.expect("s0", 1)
	eventually(t, "the full window is counted", func() bool { return seen.count("ordered_window") > 0 })
	eventually(t, "the full window is logged", func() bool { return strings.Contains(log.text(), "fills the window") })
	if text := log.text(); !strings.Contains(text, "group=g") || strings.Contains(text, "secret") {
		t.Errorf("the log has %s", text)
	}
	other := false
	for next := 1; next < 30 || !other; { // the other key comes when there is room
		k.ack(e)
		if e = k.event(); e.Event.ID == "b" {
			other = true
			continue
		}
		if want := "s" + strconv.Itoa(next); e.Event.ID != want {
			t.Fatalf("%s instead of %s", e.Event.ID, want)
		}
		next++
	}
	k.ack(e)
	settled(t, h.bus, topic)
	if lines, most := strings.Count(log.text(), "fills the window"), 1+int(time.Since(began)/(10*time.Second)); lines > most {
		t.Errorf("%d lines of the log in %v", lines, time.Since(began))
	}
}

// A client of NATS that pulls from the consumer is noticed: nothing is given out until what it has
// has ended, and the order is kept.
func TestOrderedForeignPull(t *testing.T) {
	t.Parallel()
	url := startNATS(t)
	const wait, window, events = 2 * time.Second, 4, 8
	seen := &limitsSeen{Observer: ops.NewMetrics(prometheus.NewRegistry()), seen: make(map[string]int)}
	h := startHub(t, openBus(t, at(url), ackWait(wait), func(cfg *jetstream.Config) { cfg.Observer, cfg.Limits.OrderedWindow = seen, window }))
	topic := freshTopic()
	for n := range events {
		publishKey(t, h.bus, topic, "a", strconv.Itoa(n))
	}
	k := joinKeyed(t, h, topic, "")
	e := k.expect("0", 1)
	eventually(t, "the window of the hub is full", func() bool {
		info, err := h.bus.Group(topic, "g").Info(t.Context())
		return err == nil && info.InFlight == window
	})
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	batch, err := consumerOf(t, js).Fetch(1)
	if err != nil {
		t.Fatal(err)
	}
	foreign := ""
	for m := range batch.Messages() {
		foreign = m.Headers().Get("Nats-Msg-Id")
	}
	if foreign == "" {
		t.Fatal("the foreign client got nothing")
	}
	taken := time.Now()
	k.ack(e)
	// The hub pulls now, and sees the hole. What it had lent until then is nobody's.
	eventually(t, "the hub notices that somebody else pulled", func() bool { return seen.count("ordered_foreign_pull") > 0 })
	for next := 1; next < events; {
		e := k.event()
		delete(k.held, "a")
		if time.Since(taken) < wait && e.Event.ID == "1" {
			continue // lent before the hub saw the hole
		}
		if e.Event.ID != strconv.Itoa(next) {
			t.Fatalf("%s instead of %d", e.Event.ID, next)
		}
		if passed := time.Since(taken); passed < wait {
			t.Fatalf("%s came %v after the foreign pull", e.Event.ID, passed)
		}
		k.ack(e)
		next++
	}
	settled(t, h.bus, topic)
}

// consumerOf is the consumer of the only ordered group.
func consumerOf(t *testing.T, js natsjs.JetStream) (only natsjs.Consumer) {
	t.Helper()
	eventually(t, "there is a consumer of an ordered group", func() bool {
		for stream := range js.ListStreams(t.Context()).Info() {
			s, err := js.Stream(t.Context(), stream.Config.Name)
			if err != nil {
				return false
			}
			for info := range s.ListConsumers(t.Context()).Info() {
				if info.Config.Metadata["eventhub.slots"] != "" {
					only, err = s.Consumer(t.Context(), info.Name)
					return err == nil
				}
			}
		}
		return false
	})
	return only
}

// Streams and pulls are members of ordered groups, too.
func TestOrderedOverHTTP(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	for n := range 2 {
		publishKey(t, r.bus, "orders", "a", "a"+strconv.Itoa(n))
	}
	const opts = `"ordered":"key","slots":4,"from":"earliest"`
	r.pull(t, "orders", "plain", `{"wait_ms":0}`)
	if a := r.post(t, "/groups/orders/plain/pull", `{"opts":{"ordered":"key"}}`); a.status != http.StatusConflict || !strings.Contains(a.text, `"subscribe_failed"`) {
		t.Errorf("an ordered member of a group that is not: %d %s", a.status, a.text)
	}
	if a := r.post(t, "/groups/orders/g/pull", `{"opts":{"slots":4}}`); a.status != http.StatusBadRequest {
		t.Errorf("slots without ordered: %d %s", a.status, a.text)
	}
	first := r.pullOne(t, "orders", "g", opts)
	if a := r.post(t, "/groups/orders/g/pull", `{}`); a.status != http.StatusConflict || !strings.Contains(a.text, `"subscribe_failed"`) {
		t.Errorf("a member of an ordered group that does not say so: %d %s", a.status, a.text)
	}
	if first.Event.ID != "a0" || first.Event.Partition == nil || *first.Event.Partition != ordered.Slot("a", 4) {
		t.Errorf("pulled %+v", first)
	}
	if got := r.pull(t, "orders", "g", `{"wait_ms":100,"opts":{`+opts+`}}`); len(got) != 0 {
		t.Errorf("pulled %+v while the key is leased", got)
	}
	r.settle(t, "ack", "", first.Ack)
	s := r.subscribe(t, "topic=orders&group=g&ordered=key")
	for {
		m, ok := s.next()
		if !ok || m.name != "assign" {
			t.Fatalf("%+v before the slots", m)
		}
		var a keyedFrame
		if err := json.Unmarshal([]byte(m.data), &a); err != nil || a.Op != "ASSIGN" || a.Epoch == 0 {
			t.Fatalf("%s: %v", m.data, err)
		}
		if len(a.Slots) == 4 {
			break
		}
	}
	e := s.event()
	if e.Event.ID != "a1" || *e.Event.Partition != ordered.Slot("a", 4) {
		t.Errorf("the stream has %+v", e)
	}
	r.settle(t, "ack", "", e.Ack)
	settled(t, r.bus, "orders")
}
