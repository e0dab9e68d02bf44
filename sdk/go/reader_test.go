package eventhub_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"

	"eventhub/facade/hubtest"
	"eventhub/jetstream/topics"
	eventhub "eventhub/sdk/go"
)

func TestReplayReadsPageByPage(t *testing.T) {
	t.Parallel()
	hub, c := rig(t)
	topic := newTopic()
	if _, err := c.PublishMany(t.Context(), topic, numbers(25, func(int) {})); err != nil {
		t.Fatal(err)
	}
	last, err := c.Publish(t.Context(), topic, "keyed", eventhub.PublishOptions{Key: "k", Headers: map[string]string{"x-kind": "a"}})
	if err != nil {
		t.Fatal(err)
	}
	r := eventhub.Reader{URL: hub.HTTP + "/", TokenProvider: func(context.Context) (string, error) { return hub.Token, nil }, Page: 10}
	replay := func(opts eventhub.ReplayOptions) (payloads []string) {
		t.Helper()
		for e, err := range r.Replay(t.Context(), topic, opts) {
			if err != nil {
				t.Fatal(err)
			}
			payloads = append(payloads, string(e.Payload))
		}
		return payloads
	}
	all := replay(eventhub.ReplayOptions{})
	if len(all) != 26 || all[0] != "0" || all[24] != "24" {
		t.Errorf("all are %q", all)
	}
	if got := replay(eventhub.ReplayOptions{Limit: 12}); !slices.Equal(got, all[:12]) {
		t.Errorf("twelve are %q", got)
	}
	if got := replay(eventhub.ReplayOptions{Limit: 20}); !slices.Equal(got, all[:20]) {
		t.Errorf("two pages are %q", got)
	}
	if got := replay(eventhub.ReplayOptions{Key: "k", Headers: map[string]string{"x-kind": "a"}}); !slices.Equal(got, []string{`"keyed"`}) {
		t.Errorf("those with a key are %q", got)
	}
	if got := replay(eventhub.ReplayOptions{From: eventhub.FromAfterID, AfterID: last}); got != nil {
		t.Errorf("after the last are %q", got)
	}
	past := int64(1)
	if got := replay(eventhub.ReplayOptions{From: eventhub.FromTS, TS: &past}); len(got) != 26 {
		t.Errorf("since then are %q", got)
	}
	n := 0
	for range r.Replay(t.Context(), topic, eventhub.ReplayOptions{}) {
		if n++; n == 3 {
			break
		}
	}
	if n != 3 {
		t.Errorf("%d events after the loop was left", n)
	}
}

func TestLatestAndSnapshot(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t, hubtest.Topics(topics.Rule{Pattern: "kept.*", Compaction: true}))
	c := connect(t, hub.WebSocket, eventhub.Options{Token: hub.Token})
	keys := []string{"a", "b/c d", "é%", "host:name:1"}
	for i, key := range keys {
		for _, value := range []int{i, i + 10} {
			if _, err := c.Publish(t.Context(), "kept.a", value, eventhub.PublishOptions{Key: key}); err != nil {
				t.Fatal(err)
			}
		}
	}
	r := eventhub.Reader{URL: hub.HTTP, Token: hub.Token, Page: 3}
	for i, key := range keys {
		e, ok, err := r.Latest(t.Context(), "kept.a", key)
		if err != nil || !ok || e.Key != key || string(e.Payload) != strconv.Itoa(i+10) {
			t.Errorf("%s: %+v, %v, %v", key, e, ok, err)
		}
	}
	if _, ok, err := r.Latest(t.Context(), "kept.a", "none"); ok || err != nil {
		t.Error(ok, err)
	}
	eventually(t, "all keys", func() bool {
		var got []string
		for e, err := range r.Snapshot(t.Context(), "kept.a") {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, e.Key)
		}
		slices.Sort(got)
		return slices.Equal(got, slices.Sorted(slices.Values(keys)))
	})
}

func TestWhatReadersAreRefused(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	first := func(r *eventhub.Reader, topic string) error {
		for _, err := range r.Replay(t.Context(), topic, eventhub.ReplayOptions{}) {
			return err
		}
		return nil
	}
	failsWith(t, first(&eventhub.Reader{URL: hub.HTTP, Token: "wrong"}, "t"), "bad_token", false)
	failsWith(t, first(&eventhub.Reader{URL: hub.HTTP, Token: hub.Token}, "a..b"), "bad_topic", false)
	failsWith(t, first(&eventhub.Reader{URL: "http://127.0.0.1:1", Token: hub.Token}, "t"), "connection_lost", true)
	failsWith(t, first(&eventhub.Reader{URL: "%"}, "t"), "gave_up", false)
	broken := errors.New("no token today")
	err := first(&eventhub.Reader{URL: hub.HTTP, TokenProvider: func(context.Context) (string, error) { return "", broken }}, "t")
	failsWith(t, err, "connection_lost", true)
	if !errors.Is(err, broken) {
		t.Errorf("%v does not wrap the provider's error", err)
	}

	// What is no answer of a hub.
	for _, body := range []string{"", "[]", `{"events":[{"id":"a"}`, `{"events":{}}`, `{"events":[1]}`} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(body)) }))
		for e, err := range (&eventhub.Reader{URL: server.URL}).Replay(t.Context(), "t", eventhub.ReplayOptions{}) {
			if e.ID == "" {
				failsWith(t, err, "connection_lost", true)
			}
		}
		server.Close()
	}
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	err = first(&eventhub.Reader{URL: server.URL}, "t")
	failsWith(t, err, "not_found", false)
	if !strings.Contains(err.Error(), "404") {
		t.Error(err)
	}
}

func TestReplayTellsWhatRetentionRemoved(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"topic":"t","count":0,"events":[],"truncated":true,"first":"i"}`))
	}))
	defer server.Close()
	var first []string
	for _, err := range (&eventhub.Reader{URL: server.URL}).Replay(t.Context(), "t", eventhub.ReplayOptions{OnTruncated: func(id string) { first = append(first, id) }}) {
		t.Error(err)
	}
	if !slices.Equal(first, []string{"i"}) {
		t.Errorf("told %q", first)
	}
}
