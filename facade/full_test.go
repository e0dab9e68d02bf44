package facade_test

import (
	"net/http"
	"strings"
	"testing"

	"eventhub/jetstream"
	"eventhub/jetstream/topics"
)

// A topic that rejects is full: over HTTP, line by line, and over the WebSocket.
func TestTopicFull(t *testing.T) {
	t.Parallel()
	r := newRigOn(t, jetstream.Config{Topics: []topics.Rule{{Pattern: "strict", MaxMsgs: 10, OnFull: topics.OnFullReject}}}, nil)
	p := r.login(t)
	p.send(`{"op":"SUBSCRIBE","topic":"strict","group":"g","opts":{"maxInFlight":1}}`)
	p.want(`{"op":"OK"}`)
	for range 10 {
		if got := r.post(t, "/publish/strict", "1"); got.status != http.StatusOK {
			t.Fatal(got)
		}
	}
	got := r.post(t, "/publish/strict", "1")
	if got.status != http.StatusInsufficientStorage || got.Code != "topic_full" || got.header.Get("Retry-After") == "" || strings.Contains(got.Error, "maximum") {
		t.Fatal(got)
	}
	if got := r.post(t, "/publish/strict", `{"payload":1}`, "Content-Type", "application/x-ndjson"); got.status != http.StatusOK || !strings.Contains(got.text, `"code":"topic_full"`) {
		t.Fatal(got)
	}
	held := p.next("EVENT", "")
	p.send(`{"op":"PUBLISH","topic":"strict","payload":1,"corr":1}`)
	p.next("ERR", "topic_full")
	for acked := 0; ; {
		p.send(`{"op":"ACK","topic":"strict","group":"g","id":"` + held.Event.ID + `"}`)
		acked++
		// the OK of the ACK and the next EVENT come in either order
		if a, b := p.any(), p.any(); a.Op == "EVENT" {
			held = a
		} else {
			held = b
		}
		if acked == 9 {
			eventually(t, "there is room", func() bool { return r.post(t, "/publish/strict", "1").status == http.StatusOK })
			return
		}
		if r.post(t, "/publish/strict", "1").status == http.StatusOK {
			return // there is room
		}
	}
}
