package jetstream

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

func TestLeasesEndWithTheEmbeddedServer(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	b := open(t, Config{Server: natstest.Embed(t, dir)})
	publishAll(t, b, "again", numbers(10)...)
	k := take(t, b, "again", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: 5})
	for i := range 5 {
		d := k.next()
		if i%2 == 1 { // 1 and 3 are settled; 0, 2 and 4 are not
			if err := d.Ack(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	b = open(t, Config{Server: natstest.Embed(t, dir)})
	begin := time.Now()
	got := take(t, b, "again", "g", SubscribeOptions{}).payloads(8)
	slices.Sort(got)
	if want := []string{"0", "2", "4", "5", "6", "7", "8", "9"}; !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("it took %v, as if the leases had gone on", took)
	}
}

// A native client's consumer is its own: the hub does not give back what that client still holds.
func TestNativeLeasesOutliveARestart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	b := open(t, Config{Server: natstest.Embed(t, dir)})
	publishAll(t, b, "native", "1", "2")
	c, err := b.conn.JS.CreateConsumer(t.Context(), "native", natsjs.ConsumerConfig{Durable: "mine", AckPolicy: natsjs.AckExplicitPolicy, AckWait: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Next(); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	b = open(t, Config{Server: natstest.Embed(t, dir)})
	if c, err = b.conn.JS.Consumer(t.Context(), "native", "mine"); err != nil {
		t.Fatal(err)
	}
	m, err := c.Next()
	if err != nil || string(m.Data()) != "2" {
		t.Errorf("got %s, %v", m.Data(), err)
	}
	if info := c.CachedInfo(); info.NumRedelivered > 0 {
		t.Errorf("%d events were delivered again", info.NumRedelivered)
	}
}

func TestOpenSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	server := natstest.Embed(t, t.TempDir())
	for name, c := range map[string]struct {
		cfg  Config
		want string
	}{
		"nobody there":      {Config{URL: "nats://user:secret@127.0.0.1:1"}, "nats://127.0.0.1:1"},
		"no nats":           {Config{}, "set URL, or Server"},
		"two of them":       {Config{URL: "nats://127.0.0.1:1", Server: server}, "both URL and Server"},
		"replicas alone":    {Config{Server: server, Replicas: 3}, "needs a cluster"},
		"copies of a topic": {Config{Server: server, Topics: []topics.Rule{{Pattern: "a", Replicas: 3}}}, "needs a cluster"},
		"too large payload": {Config{Server: natstest.Embed(t, t.TempDir()), Limits: Limits{MaxPayload: 5 << 20}}, "the embedded server allows at most 4128768"},
		"short ack wait":    {Config{AckWait: time.Millisecond}, "1s to 1h"},
		"bad rule":          {Config{Topics: []topics.Rule{{Pattern: "a.**.b"}}}, "at the end"},
		"negative limit":    {Config{Limits: Limits{Topics: -1}}, "positive"},
	} {
		if c.cfg.URL == "" && name != "no nats" && c.cfg.Server == nil {
			c.cfg.Server = natstest.Embed(t, t.TempDir())
		}
		_, err := Open(context.Background(), c.cfg)
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: got %v", name, err)
		}
	}
}
