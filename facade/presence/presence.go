// Package presence keeps who listens to which topics, on this hub and on the others. Each hub tells
// the others which names it has, and adds up what it is told: a hub that falls silent is forgotten.
//
// The package decides nothing about rights, and knows nothing of sockets.
package presence

import (
	"encoding/json"
	"maps"
	"slices"
	"sync"
	"time"
)

const (
	// beats is after how many rounds a hub tells everything again, and silent after how many a hub
	// that tells nothing is forgotten.
	beats  = 10
	silent = 3 * beats
	// maxName is the longest name in bytes.
	maxName = 256
	// partBytes is about how many bytes of names a message to the other hubs has. With one name
	// more, and all of them escaped, it stays below the 1 MiB that NATS takes by default.
	partBytes = 128 << 10
)

// Change is what is new about a topic.
type Change struct {
	Topic string
	// Count is how many names are present.
	Count int
	// Joined and Left are names that have come and gone, in order, and at most Config.Shown each.
	Joined, Left []string
}

// Listener is told of changes. It must not block, and must not call the Board.
type Listener interface {
	Present(frame []byte)
}

// Config configures a Board. All fields are required.
type Config struct {
	// Hub names this hub among all hubs.
	Hub string
	// Tell sends a message to all other hubs. What is lost is told again later.
	Tell func(message []byte)
	// Frame makes what listeners get of a change.
	Frame func(Change) []byte
	// Every is the least time between two changes that listeners get of a topic. A change waits for
	// no longer.
	Every time.Duration
	// Names is the most names that are kept, of all topics and all hubs. A name counts once for
	// each topic and hub. Further ones are left out, and Full is called.
	Names int
	Full  func()
	// Shown is the most names of a list in a Change.
	Shown int
}

// Board keeps who is present. Its methods may be called concurrently.
type Board struct {
	cfg  Config
	stop func()        // closes over, once
	over chan struct{} // the Board ends
	done chan struct{} // it has ended

	mu     sync.Mutex
	topics map[string]*topic
	names  int // that are kept
	round  uint64
	seq    uint64 // of the newest message
}

// topic is what is known of a topic.
type topic struct {
	own       map[string]int    // names at this hub, and how often each is there
	others    map[string]*other // by hub
	all       map[string]int    // names, and how many hubs have each
	listeners map[Listener]struct{}

	joined, left map[string]struct{} // since the last Change
	fresh        bool                // a listener has not been told anything yet
	untold       bool                // the other hubs do not know the newest
}

// other is what another hub has told of a topic.
type other struct {
	names []string
	heard uint64 // the round of the newest message
	// The parts of a list that is not whole yet.
	seq   uint64
	next  int // the part that comes next
	parts []string
}

// message is what hubs tell one another.
type message struct {
	Hub   string   `json:"hub"`
	Topic string   `json:"topic,omitempty"`
	Seq   uint64   `json:"seq,omitempty"`  // of the list
	Part  int      `json:"part,omitempty"` // of the list, from 0
	More  bool     `json:"more,omitempty"` // parts follow
	Names []string `json:"names,omitempty"`
	Hello bool     `json:"hello,omitempty"` // the others tell what they have
	Bye   bool     `json:"bye,omitempty"`   // the hub has nobody any more
}

// New makes a Board. The caller calls Close.
func New(cfg Config) *Board {
	b := &Board{cfg: cfg, over: make(chan struct{}), done: make(chan struct{}), topics: make(map[string]*topic)}
	b.stop = sync.OnceFunc(func() { close(b.over) })
	go b.run()
	return b
}

// Close ends the Board, and tells the other hubs that nobody is here any more. It may be called
// again.
func (b *Board) Close() {
	b.stop()
	<-b.done
}

func (b *Board) run() {
	defer close(b.done)
	b.tell(message{Hello: true})
	timer := time.NewTimer(b.cfg.Every)
	defer timer.Stop()
	for {
		select {
		case <-b.over:
			b.tell(message{Bye: true})
			return
		case <-timer.C:
			b.turn()
			timer.Reset(b.cfg.Every)
		}
	}
}

// topicLocked returns a topic, and makes it if it is not there.
func (b *Board) topicLocked(name string) *topic {
	t := b.topics[name]
	if t == nil {
		t = &topic{
			own: make(map[string]int), others: make(map[string]*other), all: make(map[string]int), listeners: make(map[Listener]struct{}),
			joined: make(map[string]struct{}), left: make(map[string]struct{}),
		}
		b.topics[name] = t
	}
	return t
}

// Join notes that a name has come to a topic, once more if it is there. It returns false when there
// is no room; the caller does not call Leave then.
func (b *Board) Join(topicName, name string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	t := b.topicLocked(topicName)
	if t.own[name] == 0 {
		if len(name) > maxName || b.names >= b.cfg.Names {
			b.cfg.Full()
			return false
		}
		b.names++
		t.untold = true
		t.add(name)
	}
	t.own[name]++
	return true
}

// Leave notes that a name has left that came with Join.
func (b *Board) Leave(topicName, name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	t := b.topicLocked(topicName)
	if t.own[name]--; t.own[name] > 0 {
		return
	}
	delete(t.own, name)
	b.names--
	t.untold = true
	t.remove(name)
}

// Listen has a listener told of what changes, beginning with the present count.
func (b *Board) Listen(topicName string, l Listener) {
	b.mu.Lock()
	defer b.mu.Unlock()
	t := b.topicLocked(topicName)
	t.listeners[l] = struct{}{}
	t.fresh = true
}

// Unlisten ends Listen. The listener may be told once more.
func (b *Board) Unlisten(topicName string, l Listener) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if t := b.topics[topicName]; t != nil {
		delete(t.listeners, l)
	}
}

// Present returns how many names are present at a topic, and the first ones in order.
func (b *Board) Present(topicName string, limit int) (count int, names []string) {
	b.mu.Lock()
	var all []string
	if t := b.topics[topicName]; t != nil {
		all = slices.Collect(maps.Keys(t.all))
	}
	b.mu.Unlock()
	return len(all), first(all, limit)
}

// first returns the first names in order. It may reorder all.
func first(all []string, limit int) []string {
	slices.Sort(all)
	return all[:min(len(all), limit)]
}

// add notes that one more hub has a name.
func (t *topic) add(name string) {
	if t.all[name]++; t.all[name] > 1 {
		return
	}
	if _, was := t.left[name]; was {
		delete(t.left, name)
		return
	}
	t.joined[name] = struct{}{}
}

// remove notes that one hub less has a name.
func (t *topic) remove(name string) {
	if t.all[name]--; t.all[name] > 0 {
		return
	}
	delete(t.all, name)
	if _, was := t.joined[name]; was {
		delete(t.joined, name)
		return
	}
	t.left[name] = struct{}{}
}

// turn tells what has changed since the last turn.
func (b *Board) turn() {
	type news struct {
		frame Change
		to    []Listener
	}
	var all []news
	var out []message
	b.mu.Lock()
	b.round++
	for name, t := range b.topics {
		b.expireLocked(t)
		if len(t.joined)+len(t.left) > 0 || t.fresh {
			if len(t.listeners) > 0 {
				change := Change{Topic: name, Count: len(t.all)}
				change.Joined = first(slices.Collect(maps.Keys(t.joined)), b.cfg.Shown)
				change.Left = first(slices.Collect(maps.Keys(t.left)), b.cfg.Shown)
				all = append(all, news{change, slices.Collect(maps.Keys(t.listeners))})
			}
			clear(t.joined)
			clear(t.left)
			t.fresh = false
		}
		if t.untold || len(t.own) > 0 && b.round%beats == 0 {
			t.untold = false
			out = b.listLocked(out, name, t)
		}
		if len(t.own)+len(t.others)+len(t.listeners) == 0 {
			delete(b.topics, name)
		}
	}
	b.mu.Unlock()
	for _, n := range all {
		frame := b.cfg.Frame(n.frame)
		for _, l := range n.to {
			l.Present(frame)
		}
	}
	for _, m := range out {
		b.tell(m)
	}
}

// listLocked appends the messages that tell who is at a topic of this hub.
func (b *Board) listLocked(out []message, name string, t *topic) []message {
	b.seq++
	m := message{Topic: name, Seq: b.seq}
	size := 0
	for who := range t.own {
		if size > partBytes {
			m.More = true
			out = append(out, m)
			m, size = message{Topic: name, Seq: b.seq, Part: m.Part + 1}, 0
		}
		m.Names = append(m.Names, who)
		size += len(who) + len(`"",`)
	}
	return append(out, m)
}

func (b *Board) tell(m message) {
	m.Hub = b.cfg.Hub
	text, err := json.Marshal(m)
	if err != nil {
		return // strings and numbers can be marshaled
	}
	b.cfg.Tell(text)
}

// Receive takes a message of a hub. Messages of this hub itself, and what is no message, are
// ignored.
func (b *Board) Receive(text []byte) {
	var m message
	if err := json.Unmarshal(text, &m); err != nil || m.Hub == b.cfg.Hub || m.Hub == "" || len(m.Hub) > maxName {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case m.Hello:
		for _, t := range b.topics {
			t.untold = t.untold || len(t.own) > 0
		}
	case m.Bye:
		for _, t := range b.topics {
			b.forgetLocked(t, m.Hub)
		}
	default:
		b.heardLocked(&m)
	}
}

// heardLocked takes a part of a list.
func (b *Board) heardLocked(m *message) {
	if b.topics[m.Topic] == nil && len(m.Names) == 0 {
		return
	}
	t := b.topicLocked(m.Topic)
	o := t.others[m.Hub]
	if o == nil {
		if len(m.Names) == 0 {
			return
		}
		o = new(other)
		t.others[m.Hub] = o
	}
	o.heard = b.round
	if m.Part == 0 {
		b.names -= len(o.parts)
		o.parts, o.seq, o.next = nil, m.Seq, 0
	}
	if m.Seq != o.seq || m.Part != o.next {
		return // a part was lost: the next list is whole
	}
	o.next++
	for _, name := range m.Names {
		if len(name) > maxName || b.names-len(o.names) >= b.cfg.Names {
			b.cfg.Full()
			continue
		}
		b.names++
		o.parts = append(o.parts, name)
	}
	if m.More {
		return
	}
	slices.Sort(o.parts)
	whole := slices.Compact(o.parts)
	b.names += len(whole) - len(o.parts)
	before := o.names
	o.names, o.parts = whole, nil
	// Those that stay are added before they are removed, so nobody is told of them.
	for _, name := range o.names {
		t.add(name)
	}
	for _, name := range before {
		t.remove(name)
	}
	b.names -= len(before)
	if len(o.names) == 0 {
		delete(t.others, m.Hub)
	}
}

// expireLocked forgets what silent hubs have told.
func (b *Board) expireLocked(t *topic) {
	for hub, o := range t.others {
		if b.round-o.heard > silent {
			b.forgetLocked(t, hub)
		}
	}
}

func (b *Board) forgetLocked(t *topic, hub string) {
	o := t.others[hub]
	if o == nil {
		return
	}
	delete(t.others, hub)
	b.names -= len(o.names) + len(o.parts)
	for _, name := range o.names {
		t.remove(name)
	}
}
