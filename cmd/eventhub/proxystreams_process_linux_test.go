package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/ops"
)

// behind is a hub behind a proxy, and the client of a member over HTTP.
type behind struct {
	*proxy
	hub   *node
	web   *http.Client
	packs bool // the proxy compresses, whatever Cache-Control says
}

// members returns what operators see of the members over HTTP.
func (b *behind) members(ctx context.Context) (all []ops.Connection) {
	b.t.Helper()
	status, text := askThrough(ctx, http.DefaultClient, nodeToken, http.MethodGet, b.hub.ops+"/connections?topic=orders", nil)
	var page struct{ Connections []ops.Connection }
	if err := json.Unmarshal([]byte(text), &page); status != http.StatusOK || err != nil {
		b.t.Fatalf("%d %s, %v", status, text, err)
	}
	return page.Connections
}

// ask sends a request through the proxy, and returns the text of the answer.
func (b *behind) ask(ctx context.Context, path, body string) string {
	b.t.Helper()
	resp, err := b.web.Do(b.request(ctx, http.MethodPost, path, nodeToken, strings.NewReader(body)))
	if err != nil {
		b.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		b.t.Fatalf("%s: %s %s, %v", path, resp.Status, text, err)
	}
	return string(text)
}

// open opens a stream of server-sent events. Its lines come from the channel, which is closed at
// its end.
func (b *behind) open(ctx context.Context) <-chan string {
	b.t.Helper()
	req := b.request(ctx, http.MethodGet, "/subscribe?topic=orders&group=g", nodeToken, http.NoBody)
	req.Header.Set("Accept", "text/event-stream")
	resp, err := b.web.Do(req) //nolint:bodyclose // the goroutine below closes it
	if err != nil {
		b.t.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK || resp.Uncompressed && !b.packs {
		b.t.Fatalf("%s, compressed: %v", resp.Status, resp.Uncompressed)
	}
	lines := make(chan string, 1000)
	done := make(chan struct{})
	b.t.Cleanup(func() { <-done })
	go func() {
		defer close(done)
		defer close(lines)
		defer func() { _ = resp.Body.Close() }()
		for text := bufio.NewScanner(resp.Body); text.Scan(); {
			lines <- text.Text()
		}
	}()
	return lines
}

// find returns what follows a prefix in the next line that has it.
func (b *behind) find(ctx context.Context, lines <-chan string, prefix string) (rest string, ok bool) {
	for {
		select {
		case line, open := <-lines:
			if !open {
				return "", false
			}
			if rest, found := strings.CutPrefix(line, prefix); found {
				return rest, true
			}
		case <-ctx.Done():
			return "", false
		}
	}
}

// settle acknowledges the events of a text.
func (b *behind) settle(ctx context.Context, text string) {
	b.t.Helper()
	_, rest, found := strings.Cut(text, `"ack":"`)
	handle, _, ended := strings.Cut(rest, `"`)
	if !found || !ended {
		b.t.Fatalf("no handle in %s", text)
	}
	if got := b.ask(ctx, "/ack", `{"ack":["`+handle+`"]}`); got != `{"settled":1}`+"\n" {
		b.t.Errorf("the acknowledgement was answered %s", got)
	}
}

// The proxies of docs/operations.md, and those that buffer and compress whatever they may: what the
// hub sends over streams and pulls arrives at once, silent streams live on, and the hub notices
// when a client leaves.
func TestStreamsBehindProxies(t *testing.T) {
	t.Parallel()
	const compressing = "nginx that buffers and compresses"
	patient := substitution{"proxy_read_timeout 1s;", "proxy_read_timeout 75s;"}
	for name, front := range map[string]struct {
		start   func(*testing.T, *node, ...substitution) *proxy
		changes []substitution
	}{
		"nginx":     {nginx, []substitution{patient}},
		compressing: {nginx, []substitution{patient, {"proxy_buffering off;", "gzip on; gzip_types *; gzip_min_length 1; gzip_proxied any;"}}},
		"caddy":     {caddy, nil},
		"caddy that compresses": {caddy, []substitution{
			{"\theader Strict", "\tencode {\n\t\tminimum_length 1\n\t\tmatch status 2xx\n\t}\n\theader Strict"},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			// Without beats, nothing pushes an event out that a proxy keeps.
			hub := startNode(t, "--trusted-proxies=127.0.0.1", "--limit-stream-beat=10m")
			p := front.start(t, hub, front.changes...)
			b := &behind{proxy: p, hub: hub, web: p.client("127.0.0.2"), packs: name == compressing}

			reading, leave := context.WithCancel(ctx)
			defer leave()
			lines := b.open(reading)
			if _, ok := b.find(ctx, lines, ": subscribed"); !ok {
				t.Fatal("the stream did not begin")
			}
			for i := range 3 {
				b.ask(ctx, "/publish/orders", strconv.Itoa(i))
				text, ok := b.find(ctx, lines, "data: ")
				if !ok || !strings.Contains(text, fmt.Sprintf(`"payload":%d`, i)) {
					t.Fatalf("event %d: %s", i, text)
				}
				b.settle(ctx, text)
			}
			if all := b.members(ctx); len(all) != 1 || all[0].Kind != "stream" || all[0].Remote != "127.0.0.2" {
				t.Errorf("operators see %+v", all)
			}
			leave()
			eventually(t, "the hub notices that the client of the stream has left", func() bool { return len(b.members(ctx)) == 0 })

			// A pull that waits is answered as soon as there is an event.
			waits := func() bool { return len(b.members(ctx)) == 1 }
			pulled := make(chan string, 1)
			const wait = `{"wait_ms":30000}`
			go func() {
				resp, err := b.web.Do(b.request(ctx, http.MethodPost, "/groups/orders/g/pull", nodeToken, strings.NewReader(wait)))
				if err != nil {
					pulled <- err.Error()
					return
				}
				text, _ := io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				pulled <- string(text)
			}()
			eventually(t, "a pull waits", waits)
			b.ask(ctx, "/publish/orders", "3")
			text := <-pulled
			if !strings.Contains(text, `"payload":3`) {
				t.Fatalf("the pull got %s", text)
			}
			b.settle(ctx, text)
			eventually(t, "the pull has ended", func() bool { return len(b.members(ctx)) == 0 })

			// A pull whose client leaves takes nothing.
			waiting, leave := context.WithCancel(ctx)
			defer leave()
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				resp, err := b.web.Do(b.request(waiting, http.MethodPost, "/groups/orders/g/pull", nodeToken, strings.NewReader(wait)))
				if err == nil {
					_ = resp.Body.Close()
				}
			}()
			eventually(t, "a pull waits", waits)
			leave()
			<-gone
			eventually(t, "the hub notices that the client of the pull has left", func() bool { return len(b.members(ctx)) == 0 })
			b.ask(ctx, "/publish/orders", "4")
			if text := b.ask(ctx, "/groups/orders/g/pull", wait); !strings.Contains(text, `"ctx":{"attempt":1,`) {
				t.Errorf("the next pull got %s", text)
			}
		})
	}
}

// Beats keep a stream over which no event comes, though nginx gives up what is silent for a second.
func TestBeatsBehindNginx(t *testing.T) {
	t.Parallel()
	for beat, lives := range map[string]bool{"200ms": true, "10m": false} {
		t.Run(beat, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			hub := startNode(t, "--trusted-proxies=127.0.0.1", "--limit-stream-beat="+beat)
			p := nginx(t, hub)
			b := &behind{proxy: p, hub: hub, web: p.client("127.0.0.2")}
			// On a busy machine, a beat may be late: then another stream shows the same.
			for {
				reading, leave := context.WithTimeout(ctx, 3*time.Second)
				_, cut := b.find(reading, b.open(reading), "never")
				ended := reading.Err() == nil && !cut
				leave()
				if ended != lives {
					return
				}
				if ctx.Err() != nil {
					t.Fatalf("nginx ends the stream: %v", ended)
				}
			}
		})
	}
}
