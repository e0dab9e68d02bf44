package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"eventhub/facade/hubtest"
	"eventhub/jetstream"
)

// cutting ends a body early.
type cutting struct {
	io.ReadCloser
	left int
}

func (c *cutting) Read(p []byte) (int, error) {
	if c.left <= 0 {
		return 0, errors.New("cut")
	}
	n, err := c.ReadCloser.Read(p[:min(len(p), c.left)])
	c.left -= n
	return n, err
}

// TestExportGoesOn exports through a proxy that cuts answers off again and again. Each event is
// written once, in order.
func TestExportGoesOn(t *testing.T) {
	t.Parallel()
	const n = 1_500
	hub := hubtest.New(t, hubtest.Token("token"))
	pub := hub.Bus.NewPublisher()
	var want []string
	for i := range n {
		payload := strconv.Itoa(i)
		want = append(want, payload)
		if err := pub.PublishAsync(t.Context(), "cut", []byte(payload), jetstream.PublishOptions{ID: "id-" + payload}, func(jetstream.Receipt, error) {}); err != nil {
			t.Fatal(err)
		}
	}
	if err := pub.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	at, err := url.Parse(hub.HTTP)
	if err != nil {
		t.Fatal(err)
	}
	var cuts, answers atomic.Int64
	proxy := httputil.NewSingleHostReverseProxy(at)
	proxy.ErrorLog = log.New(io.Discard, "", 0)
	proxy.ModifyResponse = func(res *http.Response) error {
		if answers.Add(1)%2 == 1 {
			cuts.Add(1)
			res.Body = &cutting{res.Body, 1 + rand.IntN(15_000)}
		}
		return nil
	}
	between := httptest.NewServer(proxy)
	defer between.Close()

	flags := httpFlags{HTTPURL: between.URL}
	flags.Token, flags.WSPort = "token", 1
	x := &exporter{size: 300, query: url.Values{"topic": {"cut"}, "ndjson": {"1"}}, progress: newTally(io.Discard, "exported")}
	if x.hub, err = flags.hub(false); err != nil {
		t.Fatal(err)
	}
	defer x.hub.close()
	var out bytes.Buffer
	x.line = func(lines []byte) error {
		out.Write(lines)
		return nil
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := x.run(ctx); err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.Lines(out.String()) {
		_, payload, _ := strings.Cut(line, `"payload":`)
		got = append(got, strings.TrimSuffix(payload, "}\n"))
	}
	if !slices.Equal(got, want) {
		t.Errorf("%d events, want %d in order", len(got), n)
	}
	if cuts.Load() < 3 {
		t.Errorf("%d answers were cut off: the test shows nothing", cuts.Load())
	}
}

// An export that is interrupted says how to go on: anew while nothing was written, and behind the
// last line afterwards.
func TestInterruptedExport(t *testing.T) {
	t.Parallel()
	for answer, want := range map[string]string{
		"":                  "interrupted before the first event; nothing was written, repeat the command",
		`{"id":"1"}` + "\n": "interrupted; continue with --after-id and the id of the last line",
	} {
		ctx, interrupt := context.WithCancel(t.Context())
		hub := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.WriteString(w, answer)
			_ = http.NewResponseController(w).Flush()
			if answer == "" {
				interrupt()
			}
			<-r.Context().Done()
		}))
		t.Cleanup(hub.Close)
		cmd := exportCmd{rangeFlags: rangeFlags{Topic: "a", httpFlags: httpFlags{HTTPURL: hub.URL, hubFlags: hubFlags{credentialFlags: credentialFlags{Token: "token"}}}}}
		out := writerFunc(func(p []byte) (int, error) {
			interrupt()
			return len(p), nil
		})
		if err := cmd.Run(ctx, streams{out: out, err: io.Discard}); err == nil || err.Error() != want {
			t.Errorf("after %q: %v, want %s", answer, err, want)
		}
		interrupt()
	}
}

// writerFunc is a function that takes what is written.
type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
