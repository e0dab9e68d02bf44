//go:build unix

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"eventhub/jetstream/embedded"
	"eventhub/jetstream/natstest"
	"eventhub/sdk/go/wire"
)

// posting posts to a hub's outbox and compares the answer.
type posting struct {
	t    *testing.T
	node *node
}

func (p posting) post(token, path, body string, status int, code string, header ...string) {
	p.t.Helper()
	got, text := askWith(p.t.Context(), token, http.MethodPost, p.node.http+path, strings.NewReader(body), header...)
	var answer struct{ Code string }
	_ = json.Unmarshal([]byte(text), &answer)
	if got != status || answer.Code != code {
		p.t.Fatalf("POST %s: %d %s, want %d %q", path, got, text, status, code)
	}
}

// rivals are tokens of two principals.
func rivals(t *testing.T) (flag, eve, victim string) {
	t.Helper()
	f := &floodedHub{secret: []byte("0123456789abcdef0123456789abcdef")}
	file := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(file, f.secret, 0o600); err != nil {
		t.Fatal(err)
	}
	return "--jwt-secret-file=" + file, f.sign(t, "eve", "publish:mine.**"), f.sign(t, "victim", "publish:theirs.**")
}

// A topic that an outbox makes counts for the principal that posted, as one that PUBLISH makes: at
// the post while NATS answers or not, and again for what waits when the hub restarts.
func TestOutboxTopicsCountForTheirPoster(t *testing.T) {
	flag, eve, victim := rivals(t)
	server := natstest.Run(t)
	data := t.TempDir()
	p := posting{t, startNode(t, flag, "--nats-url="+server.ClientURL(), "--data="+data, "--limit-new-topics=4")}
	for i := range 2 {
		p.post(eve, fmt.Sprint("/outbox/mine.", i), "1", http.StatusAccepted, "")
	}
	p.post(eve, "/outbox/mine.0", "1", http.StatusAccepted, "")
	p.post(eve, "/publish/mine.2", "1", http.StatusOK, "")
	p.post(eve, "/outbox/mine.3", "1", http.StatusAccepted, "")
	p.post(eve, "/outbox/mine.4", "1", http.StatusTooManyRequests, "rate_limited")
	p.post(eve, "/publish/mine.4", "1", http.StatusTooManyRequests, "rate_limited")
	p.post(eve, "/outbox/mine.3", "1", http.StatusAccepted, "")
	p.post(victim, "/outbox/theirs", "1", http.StatusAccepted, "")
	shows(t, p.node.ops+"/metrics", http.StatusOK, `eventhub_limit_reached_total{limit="topics_per_client"} 2`)
	eventually(t, "the outbox is empty", func() bool { return pendingOf(t, p.node) == 0 })
	p.node.terminate()

	p.node = startNode(t, flag, "--nats-url="+server.ClientURL(), "--data="+data, "--limit-new-topics=4")
	again := natstest.Again(server)
	embedded.Shutdown(server)
	for i := range 4 {
		p.post(eve, fmt.Sprint("/outbox/mine.late.", i), "1", http.StatusAccepted, "")
	}
	p.post(eve, "/outbox/mine.late.4", "1", http.StatusTooManyRequests, "rate_limited")
	p.post(victim, "/outbox/theirs.late", "1", http.StatusAccepted, "")
	p.node.kill()

	server = natstest.Run(t, again)
	p.node = startNode(t, flag, "--nats-url="+server.ClientURL(), "--data="+data, "--limit-new-topics=4")
	eventually(t, "the outbox is empty", func() bool { return pendingOf(t, p.node) == 0 })
	p.post(eve, "/publish/mine.last", "1", http.StatusTooManyRequests, "rate_limited")
	p.post(victim, "/outbox/theirs.last", "1", http.StatusAccepted, "")
}

// pendingOf is what the metrics say of the hub's own outbox now: scrapes may be a second old.
func pendingOf(t *testing.T, n *node) int {
	t.Helper()
	_, body := get(t, n.ops+"/overview")
	var now struct{ Totals map[string]float64 }
	if err := json.Unmarshal([]byte(body), &now); err != nil {
		t.Fatal(err)
	}
	return int(now.Totals["eventhub_outbox_pending"])
}

// A principal whose events cannot be published fills its own share of the outbox, in events or in
// bytes. The file stays within the bound, the metric is right at any moment, and others post on,
// also after a restart.
func TestOutboxHasRoomForOthers(t *testing.T) {
	const size = 500_000
	for _, c := range []struct {
		limit, body, reached string
		most                 int // events of one principal
	}{
		{"--limit-outbox-bytes=16777216", `"` + strings.Repeat("x", size) + `"`, "principal_outbox_bytes", 8 << 20 / size},
		{"--limit-outbox-pending=20", "1", "principal_outbox_pending", 10},
	} {
		t.Run(c.reached, func(t *testing.T) {
			flag, eve, victim := rivals(t)
			server := natstest.Run(t)
			data := t.TempDir()
			p := posting{t, startNode(t, flag, "--nats-url="+server.ClientURL(), "--data="+data, c.limit)}
			again := natstest.Again(server)
			embedded.Shutdown(server)
			full := func() {
				t.Helper()
				p.post(eve, "/outbox/mine", c.body, http.StatusServiceUnavailable, "overloaded")
				shows(t, p.node.ops+"/metrics", http.StatusOK, fmt.Sprintf(`eventhub_limit_reached_total{limit=%q} `, c.reached))
			}
			for i := range c.most {
				p.post(eve, "/outbox/mine", c.body, http.StatusAccepted, "", "Event-Id", fmt.Sprint("e", i))
				if got := pendingOf(t, p.node); got != i+1 {
					t.Fatalf("%d events are pending, want %d", got, i+1)
				}
			}
			full()
			// it is known
			p.post(eve, "/outbox/mine", c.body, http.StatusAccepted, "", "Event-Id", "e0")
			for range 3 {
				p.post(victim, "/outbox/theirs", c.body, http.StatusAccepted, "")
			}
			if got := pendingOf(t, p.node); got != c.most+3 {
				t.Errorf("%d events are pending, want %d", got, c.most+3)
			}
			p.node.kill()
			var bytes int64
			files, err := filepath.Glob(filepath.Join(data, "outbox.db*"))
			for _, file := range files {
				info, err := os.Stat(file)
				if err != nil {
					t.Fatal(err)
				}
				bytes += info.Size()
			}
			if err != nil || bytes > 40<<20 { // the log of changes may be as large as the file
				t.Errorf("the files have %d bytes, %v", bytes, err)
			}

			server = natstest.Run(t, again)
			p.node = startNode(t, flag, "--nats-url="+server.ClientURL(), "--data="+data, c.limit)
			eventually(t, "the outbox is empty", func() bool { return pendingOf(t, p.node) == 0 })
			p.post(eve, "/outbox/mine", c.body, http.StatusAccepted, "")
		})
	}
}

// The id of a principal's event keeps nobody else's event out of the outbox, and tells nobody which
// ids exist.
func TestOutboxIDsOfOthers(t *testing.T) {
	t.Parallel()
	flag, eve, victim := rivals(t)
	n := startNode(t, flag)
	p := posting{t, n}
	p.post(eve, "/outbox/mine", `"eve"`, http.StatusAccepted, "", "Event-Id", "order-1001")
	p.post(victim, "/outbox/theirs", `"victim"`, http.StatusAccepted, "", "Event-Id", "order-1001")
	p.post(victim, "/outbox/theirs", `"again"`, http.StatusAccepted, "", "Event-Id", "order-1001")
	f := &floodedHub{secret: []byte("0123456789abcdef0123456789abcdef")}
	c := n.dialWith(f.sign(t, "reader", "subscribe:**"))
	for topic, want := range map[string]string{"mine": `"eve"`, "theirs": `"victim"`} {
		events := subscribeTo(t, c, topic, "g", wire.SubscribeOptions{From: "earliest"})
		if e := events.next(); e.ID != "order-1001" || string(e.Payload) != want {
			t.Errorf("%s: got %s %s, want %s", topic, e.ID, e.Payload, want)
		}
	}
	eventually(t, "the outbox is empty", func() bool { return pendingOf(t, n) == 0 })
}
