package facade_test

import (
	"io"
	"net/http"
	"net/http/httptrace"
	"strings"
	"testing"

	"eventhub/docs/apitest"
	"eventhub/sdk/go/wire"
)

// 1 MiB of payload passes, with headers on top; above it HTTP answers 413 and WebSocket
// publish_failed (frames/payload_size), and the connection lives on.
func TestPayloadLimit(t *testing.T) {
	t.Parallel()
	bus := openBus(t)
	hub := startHub(t, bus)
	c := hub.dial()
	topic := freshTopic()
	in := hub.subscribe(c, topic, "g", wire.SubscribeOptions{})
	web := &http.Client{Transport: apitest.Transport(t, apitest.Clients, &http.Transport{MaxConnsPerHost: 1})}
	defer web.CloseIdleConnections()
	post := func(size int) (status int, body string) {
		t.Helper()
		payload := `"` + strings.Repeat("x", size-2) + `"`
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, hub.http+"/publish/"+topic, strings.NewReader(payload))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+testToken)
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Event-Key", "k")
		req.Header.Set("X-Big", strings.Repeat("h", 15_000))
		res, err := web.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = res.Body.Close() }()
		text, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return res.StatusCode, string(text)
	}
	if status, body := post(1 << 20); status != http.StatusOK {
		t.Errorf("1 MiB: %d %s", status, body)
	}
	if status, body := post(1<<20 + 1); status != http.StatusRequestEntityTooLarge || !strings.Contains(body, "1048576") {
		t.Errorf("more than 1 MiB: %d %s", status, body)
	}
	if status, body := post(100); status != http.StatusOK {
		t.Errorf("afterwards: %d %s", status, body)
	}
	for _, size := range []int{1 << 20, 100} {
		e := in.next()
		if len(e.Payload) != size || e.Key != "k" {
			t.Errorf("%d bytes came, not %d", len(e.Payload), size)
		}
	}
	in.empty()
}

// A connection that was answered 413 is used again.
func TestTooLargeLeavesTheHTTPConnectionOpen(t *testing.T) {
	t.Parallel()
	hub := startHub(t, openBus(t))
	web := &http.Client{Transport: apitest.Transport(t, apitest.Clients, &http.Transport{MaxConnsPerHost: 1})}
	defer web.CloseIdleConnections()
	var reused bool
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) { reused = info.Reused }})
	for i, size := range []int{1<<20 + 1, 10} {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, hub.http+"/publish/"+freshTopic(), strings.NewReader(`"`+strings.Repeat("x", size-2)+`"`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+testToken)
		res, err := web.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, res.Body)
		_ = res.Body.Close()
		if want := []int{http.StatusRequestEntityTooLarge, http.StatusOK}[i]; res.StatusCode != want || reused != (i == 1) {
			t.Errorf("request %d: status %d, on a used connection: %v", i+1, res.StatusCode, reused)
		}
	}
}
