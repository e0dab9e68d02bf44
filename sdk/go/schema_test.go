package eventhub_test

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"eventhub/facade/hubtest"
	eventhub "eventhub/sdk/go"
)

// A group and a broadcast get events in the version that they ask for.
func TestSchemaVersion(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	topic := newTopic()
	register := func(body string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, hub.HTTP+"/schemas/"+topic, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+hub.Token)
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		if res.StatusCode != http.StatusCreated {
			t.Fatal(res.Status)
		}
	}
	register(`{"schema":{"type":"object","required":["host"]}}`)
	register(`{"schema":{"type":"object","required":["name"]},"up":[{"rename":{"at":"/host","to":"name","required":true}}],"force":true}`)
	c := connect(t, hub.WebSocket, fast(hub.Token))
	got := make(chan string, 4)
	for group, version := range map[string]eventhub.SchemaVersion{"first": 1, "latest": eventhub.LatestVersion} {
		subscribe(t, c, topic, group, eventhub.SubscribeOptions{SchemaVersion: version}, func(_ context.Context, d *eventhub.Delivery) error {
			got <- group + " " + string(d.Payload)
			return nil
		})
	}
	b, err := c.Broadcast(t.Context(), topic, eventhub.BroadcastOptions{SchemaVersion: 2}, func(_ context.Context, e *eventhub.BroadcastEvent) {
		got <- "broadcast " + string(e.Payload)
	})
	if err != nil {
		t.Fatal(err)
	}
	publish(t, c, topic, map[string]string{"host": "a"})
	want := map[string]bool{`first {"host":"a"}`: true, `latest {"name":"a"}`: true, `broadcast {"name":"a"}`: true}
	for len(want) > 0 {
		if text := receive(t, "an event", got); want[text] {
			delete(want, text)
		} else {
			t.Fatalf("got %s", text)
		}
	}
	if err := b.Unsubscribe(t.Context()); err != nil {
		t.Error(err)
	}
}
