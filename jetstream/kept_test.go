package jetstream

import (
	"context"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/native"
)

// slowProxy stands before a server and delays what passes, each way, once it is told to.
func slowProxy(t *testing.T, target string, delay *atomic.Int64) (url string) {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	t.Cleanup(func() {
		_ = l.Close()
		mu.Lock()
		for _, c := range conns {
			_ = c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	type chunk struct {
		data []byte
		due  time.Time
	}
	pipe := func(to, from net.Conn) {
		chunks := make(chan chunk, 10_000)
		wg.Go(func() {
			defer close(chunks)
			for {
				buf := make([]byte, 32<<10)
				n, err := from.Read(buf)
				if err != nil {
					return
				}
				chunks <- chunk{buf[:n], time.Now().Add(time.Duration(delay.Load()))}
			}
		})
		for c := range chunks {
			<-time.After(time.Until(c.due))
			if _, err := to.Write(c.data); err != nil {
				_ = from.Close()
			}
		}
		_ = to.Close()
	}
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(target, "nats://"))
			if err != nil {
				_ = c.Close()
				continue
			}
			mu.Lock()
			conns = append(conns, c, s)
			mu.Unlock()
			wg.Go(func() { pipe(s, c) })
			wg.Go(func() { pipe(c, s) })
		}
	})
	return "nats://" + l.Addr().String()
}

// A link whose answers take longer than the hub waits before it keeps settlements back settles all
// the same.
func TestSettlementsPassASlowLink(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	near := open(t, Config{URL: url})
	publishAll(t, near, "slow", "0")
	var delay atomic.Int64
	b := open(t, Config{URL: slowProxy(t, url, &delay), AckWait: 3 * time.Second, Connections: 1})
	k := take(t, b, "slow", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: NeverGiveUp})
	k.payloads(1)
	delay.Store(int64(150 * time.Millisecond)) // later, or the link counts as mute
	publishAll(t, near, "slow", "1")
	if err := k.next().Ack(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is settled", func() bool { return leasedOf(t, near, "slow") == 0 })
	k.quiet(7 * time.Second / 2) // longer than AckWait
}

// What was kept back is sent before the last member of a group ends.
func TestWhatIsKeptBackIsSentAtTheEnd(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), Connections: 1})
	publishAll(t, b, "kept", "1")
	k := take(t, b, "kept", "g", SubscribeOptions{From: FromEarliest})
	d := k.next()
	p, g, l := d.path(), d.group, b.conn.Links[0]
	for !p.Waiting.CompareAndSwap(false, true) { // a question to the consumer is not answered
		<-time.After(time.Millisecond)
	}
	p.Asked.Store(b.clock.Now() - int64(5*time.Second))
	if err := d.Ack(); err != nil {
		t.Fatal(err)
	}
	if !p.keeps() {
		t.Fatal("the ACK was not kept back")
	}
	var answering sync.WaitGroup
	answering.Go(func() {
		<-time.After(300 * time.Millisecond) // the answer comes late
		p.End(b.clock.Now(), true)
		p.open(g, l)
	})
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	answering.Wait()
	eventually(t, "it is settled", func() bool { return leasedOf(t, b, "kept") == 0 })
}

// What is still kept back when the last member of a group has ended is sent once the consumer
// answers again.
func TestWhatIsKeptBackIsSentAfterTheEnd(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), Connections: 1})
	publishAll(t, b, "kept", "1")
	k := take(t, b, "kept", "g", SubscribeOptions{From: FromEarliest})
	d := k.next()
	p := d.path()
	for !p.Waiting.CompareAndSwap(false, true) { // a question to the consumer is not answered
		<-time.After(time.Millisecond)
	}
	p.Asked.Store(b.clock.Now() - int64(5*time.Second))
	if err := d.Ack(); err != nil {
		t.Fatal(err)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if err := k.sub.Stop(over); err == nil {
		t.Fatal("the end of the subscription reports no error, though the ACK was not sent")
	}
	p.End(b.clock.Now(), false) // the question is asked again
	eventually(t, "it is settled", func() bool { return leasedOf(t, b, "kept") == 0 })
	eventually(t, "the group is forgotten", func() bool {
		b.groups.mu.Lock()
		defer b.groups.mu.Unlock()
		return len(b.groups.keeping) == 0
	})
}

// A hub that has just started has not been silent before it could ask anybody.
func TestAHubBeginsUnsilenced(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	var delay atomic.Int64
	delay.Store(int64(20 * time.Millisecond)) // so that Open takes longer than a hub may be silent
	b := open(t, Config{URL: slowProxy(t, url, &delay), AckWait: 3 * time.Second, Connections: 1})
	if b.probed.Load() == 0 {
		t.Errorf("%v after its start, the hub counts as silent since then", time.Duration(b.clock.Now()))
	}
}

// A delivery that is late is none that the server has forgotten.
func TestALateDeliveryIsNotTakenForForgotten(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	a := open(t, Config{URL: url, AckWait: 30 * time.Second, Connections: 1})
	publishAll(t, a, "late", "1")
	k := take(t, a, "late", "g", SubscribeOptions{From: FromEarliest})
	d := k.next()
	old := &nats.Msg{Subject: plainSubject("late"), Reply: d.reply, Data: []byte("1")}
	for range 3 {
		if err := d.Nack("no", 0); err != nil {
			t.Fatal(err)
		}
		d = k.next()
	}
	in := k.sub.members[0].inbox
	echo := &a.conn.Links[0].Echo
	for !echo.Waiting.CompareAndSwap(false, true) { // no newer answer comes
		<-time.After(time.Millisecond)
	}
	echo.Heard.Store(a.clock.Now() - int64(29*time.Second))
	in.receive(old)
	echo.Reset(a.clock.Now())
	echo.Waiting.Store(false)
	<-time.After(200 * time.Millisecond) // the time under test
	if m, err := a.conn.LastBySubject(t.Context(), "KV_"+native.AttemptsBucket, d.attemptsSubject()); err == nil {
		t.Errorf("the bucket says %s", m.Data)
	}
	b := open(t, Config{URL: url, AckWait: 30 * time.Second, Connections: 1})
	kb := take(t, b, "late", "g", SubscribeOptions{})
	if err := d.Nack("no", 300*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d := kb.next(); d.Attempt != 5 {
		t.Errorf("the fifth hand-out is attempt %d", d.Attempt)
	}
}

func TestANegativeNoteIsKept(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), Connections: 1})
	subject := "$KV." + native.AttemptsBucket + ".s.g.0.1"
	b.records.KeepNote(records.SpareNote{Subject: subject, Note: records.Note{Spared: -2}})
	b.records.SaveUnsaved(b.conn.Links[0])
	eventually(t, "it is stored", func() bool {
		m, err := b.conn.LastBySubject(t.Context(), "KV_"+native.AttemptsBucket, subject)
		return err == nil && string(m.Data) == "-2"
	})
}
