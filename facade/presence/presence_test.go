package presence_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/facade/presence"
)

const patience = 20 * time.Second

// net carries messages between boards, in order, and may lose some.
type net struct {
	mu     sync.Mutex
	boards map[string]*presence.Board
	losing bool
}

func (n *net) tell(from string, text []byte) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.losing && rand.IntN(2) == 0 {
		return
	}
	for hub, b := range n.boards {
		if hub != from {
			b.Receive(text)
		}
	}
}

func (n *net) lose(on bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.losing = on
}

func (n *net) join(t *testing.T, hub string, change func(*presence.Config)) *presence.Board {
	t.Helper()
	cfg := presence.Config{
		Hub: hub, Every: 5 * time.Millisecond, Names: 100_000, Full: func() { t.Error("the board is full") }, Shown: 100,
		Frame: func(c presence.Change) []byte {
			return fmt.Appendf(nil, "%s %d +%s -%s", c.Topic, c.Count, strings.Join(c.Joined, ","), strings.Join(c.Left, ","))
		},
		Tell: func(text []byte) { n.tell(hub, text) },
	}
	if change != nil {
		change(&cfg)
	}
	b := presence.New(cfg)
	t.Cleanup(b.Close)
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.boards == nil {
		n.boards = make(map[string]*presence.Board)
	}
	n.boards[hub] = b
	return b
}

// await waits until exactly these names are present at the topic t.
func await(t *testing.T, b *presence.Board, want ...string) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	timeout := time.After(patience)
	for {
		count, names := b.Present("t", 1_000_000)
		if count == len(want) && slices.Equal(names, want) {
			return
		}
		select {
		case <-tick.C:
		case <-timeout:
			t.Fatalf("%d names are present, want %d: %.200q", count, len(want), names)
		}
	}
}

// listener keeps the frames that it is given.
type listener struct {
	mu     sync.Mutex
	frames []string
	some   chan struct{}
}

func newListener() *listener { return &listener{some: make(chan struct{}, 1)} }

func (l *listener) Present(frame []byte) {
	l.mu.Lock()
	l.frames = append(l.frames, string(frame))
	l.mu.Unlock()
	select {
	case l.some <- struct{}{}:
	default:
	}
}

// until waits for a frame, and returns all up to it.
func (l *listener) until(t *testing.T, want string) []string {
	t.Helper()
	timeout := time.After(patience)
	for {
		l.mu.Lock()
		frames := slices.Clone(l.frames)
		l.mu.Unlock()
		if i := slices.Index(frames, want); i >= 0 {
			return frames[:i+1]
		}
		select {
		case <-l.some:
		case <-timeout:
			t.Fatalf("no frame %q; got %q", want, frames)
		}
	}
}

// Listeners are told who comes and goes, on both hubs.
func TestBoard(t *testing.T) {
	t.Parallel()
	var n net
	one := n.join(t, "one", nil)
	one.Join("t", "ann")
	two := n.join(t, "two", nil) // comes later
	l := newListener()
	two.Listen("t", l)
	l.until(t, "t 1 +ann -")
	two.Join("t", "bob")
	l.until(t, "t 2 +bob -")
	await(t, one, "ann", "bob")
	two.Join("t", "ann") // is there already
	one.Leave("t", "ann")
	one.Join("t", "cid")
	l.until(t, "t 3 +cid -")
	two.Leave("t", "ann")
	frames := l.until(t, "t 2 + -ann")
	for _, frame := range frames[:len(frames)-1] {
		if strings.Contains(frame, "-ann") {
			t.Errorf("ann was still there: %q", frames)
		}
	}
	one.Close()
	l.until(t, "t 1 + -cid")
	await(t, two, "bob")
	two.Unlisten("t", l)
	two.Leave("t", "bob")
	await(t, two)
}

// A hub that is lost without a word is forgotten.
func TestBoardForgetsSilentHubs(t *testing.T) {
	t.Parallel()
	var n net
	one, two := n.join(t, "one", nil), n.join(t, "two", nil)
	one.Join("t", "ann")
	await(t, two, "ann")
	n.mu.Lock()
	delete(n.boards, "two") // two hears nothing any more
	n.mu.Unlock()
	await(t, two)
	n.mu.Lock()
	n.boards["two"] = two
	n.mu.Unlock()
	await(t, two, "ann")
}

// Ten thousand clients that come within a second are told of it at most twice.
func TestBoardTellsOfManyAtOnce(t *testing.T) {
	t.Parallel()
	const clients = 10_000
	var n net
	b := n.join(t, "one", func(cfg *presence.Config) { cfg.Every = time.Second })
	other := n.join(t, "two", func(cfg *presence.Config) { cfg.Every = 10 * time.Millisecond })
	all := make([]*listener, clients)
	names := make([]string, clients)
	begun := time.Now()
	for i := range all {
		all[i], names[i] = newListener(), fmt.Sprintf("client %05d", i)
		b.Join("t", names[i])
		b.Listen("t", all[i])
	}
	within := time.Since(begun)
	await(t, other, names...)
	await(t, b, names...)
	b.Join("t", "last")
	var newest string
	for _, l := range all {
		timeout := time.After(patience)
		for newest = ""; !strings.HasPrefix(newest, "t 10001 "); {
			l.mu.Lock()
			if len(l.frames) > 0 {
				newest = l.frames[len(l.frames)-1]
			}
			frames := len(l.frames)
			l.mu.Unlock()
			// One more for each further second, and one for the last name.
			if most := 3 + int(within/time.Second); frames > most {
				t.Fatalf("%d frames within %v", frames, within)
			}
			if strings.HasPrefix(newest, "t 10001 ") {
				break
			}
			select {
			case <-l.some:
			case <-timeout:
				t.Fatalf("got %.100q at last", newest)
			}
		}
		if joined := strings.Count(newest, ",") + 1; joined > 100 {
			t.Fatalf("%d names in a frame", joined)
		}
	}
}

// Names beyond the limit are left out, and there is room again when others leave.
func TestBoardIsBounded(t *testing.T) {
	t.Parallel()
	var n net
	full := make(chan struct{}, 100)
	change := func(cfg *presence.Config) {
		cfg.Names = 3
		cfg.Full = func() {
			select {
			case full <- struct{}{}:
			default:
			}
		}
	}
	one, two := n.join(t, "one", change), n.join(t, "two", nil)
	for _, name := range []string{"a", "b", "c"} {
		if !one.Join("t", name) {
			t.Fatalf("no room for %s", name)
		}
	}
	if one.Join("t", "d") || !one.Join("t", "a") || one.Join("u", strings.Repeat("x", 257)) {
		t.Error("the limit counts wrongly")
	}
	two.Join("t", "e")
	await(t, two, "a", "b", "c", "e")
	for range 2 {
		select {
		case <-full:
		case <-time.After(patience):
			t.Fatal("nothing was reported")
		}
	}
	await(t, one, "a", "b", "c")
	one.Leave("t", "b")
	await(t, one, "a", "c", "e")
	one.Receive([]byte(`{"hub":"x","topic":"t","names":["f"],"part":3}`))
	one.Receive([]byte(`{"hub":"x","topic":"none"}`))
	one.Receive([]byte(`no message`))
	await(t, one, "a", "c", "e")
}

// Whatever hubs lose of what they tell one another, they agree in the end, also on lists that take
// several messages.
func TestBoardsAgree(t *testing.T) {
	t.Parallel()
	var n net
	n.lose(true)
	boards := []*presence.Board{n.join(t, "one", nil), n.join(t, "two", nil), n.join(t, "three", nil)}
	present := make([]map[string]int, len(boards))
	for i := range present {
		present[i] = make(map[string]int)
	}
	long := strings.Repeat("n", 200)
	for range 20_000 {
		i, name := rand.IntN(len(boards)), fmt.Sprint(long, rand.IntN(3_000))
		switch {
		case rand.IntN(3) > 0:
			boards[i].Join("t", name)
			present[i][name]++
		case present[i][name] > 0:
			boards[i].Leave("t", name)
			if present[i][name]--; present[i][name] == 0 {
				delete(present[i], name)
			}
		}
	}
	n.lose(false)
	union := make(map[string]int)
	for _, p := range present {
		maps.Copy(union, p)
	}
	want := slices.Sorted(maps.Keys(union))
	for _, b := range boards {
		await(t, b, want...)
	}
}
