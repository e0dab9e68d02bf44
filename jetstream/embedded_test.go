package jetstream

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestLeasesEndWithTheEmbeddedServer(t *testing.T) {
	dir := t.TempDir()
	b := open(t, Config{DataDir: dir})
	publish(t, b, "again", numbers(10)...)
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
	b = open(t, Config{DataDir: dir})
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

func TestOneHubADirectory(t *testing.T) {
	dir := t.TempDir()
	open(t, Config{DataDir: dir})
	_, err := Open(context.Background(), Config{DataDir: dir})
	if err == nil || !strings.Contains(err.Error(), "another hub is using it") {
		t.Errorf("got %v", err)
	}
}

func TestOpenSaysWhatIsWrong(t *testing.T) {
	for name, c := range map[string]struct {
		cfg  Config
		want string
	}{
		"nobody there":       {Config{URL: "nats://user:secret@127.0.0.1:1"}, "nats://127.0.0.1:1"},
		"replicas alone":     {Config{Replicas: 3}, "NATS_URL"},
		"short ack wait":     {Config{AckWait: time.Millisecond}, "1s to 1h"},
		"no token to listen": {Config{Listen: "127.0.0.1:0"}, "token"},
		"bad rule":           {Config{Topics: []TopicRule{{Pattern: "a.**.b"}}}, "at the end"},
		"negative limit":     {Config{Limits: Limits{Topics: -1}}, "positive"},
	} {
		c.cfg.DataDir = t.TempDir()
		_, err := Open(context.Background(), c.cfg)
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: got %v", name, err)
		}
	}
}
