package facade_test

import (
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/sdk/go/wire"
)

// An event can be delayed in every way in which it can be published, and has its id from then on.
func TestDelayedEvents(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	began := time.Now()
	at := began.Add(900 * time.Millisecond).UnixMilli()
	text := strconv.FormatInt(at, 10)
	p := r.login(t)
	p.send(`{"op":"PUBLISH","topic":"later","payload":{"n": 1},"opts":{"id":"frame","key":"k","tags":["t"],"delay_ms":900},"corr":1}`)
	p.want(`{"op":"OK","corr":1,"id":"frame"}`)
	for id, a := range map[string]answer{
		"delay": r.post(t, "/publish/later", `2`, "Event-Id", "delay", "Event-Delay-Ms", "900"),
		"at":    r.post(t, "/publish/later", `3`, "Event-Id", "at", "Event-At", text, "Event-Header-X", "y"),
		"line":  r.post(t, "/publish/later", `{"payload":4,"opts":{"id":"line","at":`+text+`}}`, "Content-Type", "application/x-ndjson"),
	} {
		if a.status != http.StatusOK || strings.TrimSpace(a.text) != `{"id":"`+id+`"}` {
			t.Errorf("%s: %d %s", id, a.status, a.text)
		}
	}
	c, err := wire.Dial(t.Context(), "ws"+strings.TrimPrefix(r.ws.URL, "http"), wire.Options{Token: rigToken})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	for id, opts := range map[string]wire.PublishOptions{"client": {ID: "client", DelayMS: 900}, "client at": {ID: "client at", At: &at}} {
		if got, err := c.Publish(t.Context(), "later", []byte("5"), opts); err != nil || got != id {
			t.Errorf("%s: %s, %v", id, got, err)
		}
	}
	var events []*jetstream.Event
	eventually(t, "the events are stored", func() bool {
		events = r.stored(t, "later")
		return len(events) == 6
	})
	for _, e := range events {
		if wait := time.Unix(0, e.StoredAt).Sub(began); wait < 890*time.Millisecond {
			t.Errorf("%s was stored after %v", e.ID, wait)
		}
		switch e.ID {
		case "frame":
			if string(e.Payload) != `{"n": 1}` || e.Key != "k" || len(e.Tags) != 1 {
				t.Errorf("%+v", e)
			}
		case "at":
			if e.Headers["x"] != "y" {
				t.Errorf("%+v", e)
			}
		}
	}
}

func TestBadDelays(t *testing.T) {
	t.Parallel()
	r := newRigOn(t, jetstream.Config{Limits: jetstream.Limits{MaxDelay: time.Hour, DelayedPerClient: 2}}, func(cfg *facade.Config) { cfg.Outbox = noOutbox{} })
	for _, c := range []struct {
		path, name, value, msg string
	}{
		{"/publish/t", "Event-Delay-Ms", "-1", "The header Event-Delay-Ms must be an integer from 0 to 31536000000."},
		{"/publish/t", "Event-Delay-Ms", "1.5", "The header Event-Delay-Ms must be an integer from 0 to 31536000000."},
		{"/publish/t", "Event-Delay-Ms", "31536000001", "The header Event-Delay-Ms must be an integer from 0 to 31536000000."},
		{"/publish/t", "Event-Delay-Ms", "3600001", "opts.delay_ms is 3600001, at most 3600000 are allowed (max_delay)"},
		{"/publish/t", "Event-At", "soon", "The header Event-At must be epoch milliseconds."},
		{"/publish/t", "Event-At", "9007199254740991", "opts.at is more than 3600000 ms ahead, which is the most allowed (max_delay)"},
		{"/outbox/t", "Event-Delay-Ms", "1000", "The outbox takes no events with a delay: publish them to /publish/t."},
	} {
		a := r.post(t, c.path, "1", c.name, c.value)
		if a.status != http.StatusBadRequest || a.Code != "bad_options" || a.Error != c.msg {
			t.Errorf("%s: %s: %d %s", c.name, c.value, a.status, a.text)
		}
	}
	if a := r.post(t, "/publish/t", "1", "Event-At", "0", "Event-Delay-Ms", "0"); a.Error != "The headers Event-Delay-Ms and Event-At are two ways to say when: give one." {
		t.Errorf("both headers: %d %s", a.status, a.text)
	}
	for range 2 {
		if a := r.post(t, "/publish/t", "1", "Event-Delay-Ms", "3600000"); a.status != http.StatusOK {
			t.Errorf("at the bound: %d %s", a.status, a.text)
		}
	}
	a := r.post(t, "/publish/t", "1", "Event-Delay-Ms", "1000")
	if a.status != http.StatusServiceUnavailable || a.Code != "overloaded" || !strings.Contains(a.Error, "delayed_per_client") {
		t.Errorf("beyond the limit: %d %s", a.status, a.text)
	}
	if n := len(r.stored(t, "t")); n != 0 {
		t.Errorf("%d events are stored", n)
	}
}

func TestCancelOverHTTP(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	for _, id := range []string{"a", "a/b c:é"} {
		if a := r.post(t, "/publish/t", `{"payload":1,"opts":{"id":"`+id+`","delay_ms":3600000}}`, "Content-Type", "application/x-ndjson"); a.status != http.StatusOK {
			t.Fatal(a.text)
		}
	}
	for _, c := range []struct {
		path   string
		status int
		text   string
	}{
		{"/delayed/t/b", 404, `{"error":"No event of this id waits for this topic.","code":"not_found"}`},
		{"/delayed/u/a", 404, `{"error":"No event of this id waits for this topic.","code":"not_found"}`},
		{"/delayed/t/a", 204, ""},
		{"/delayed/t/a", 404, `{"error":"No event of this id waits for this topic.","code":"not_found"}`},
		{"/delayed/t/a%2Fb%20c%3A%C3%A9", 204, ""},
		{"/delayed/t/%00", 400, `{"error":"opts.id has a control character at byte 0","code":"bad_options"}`},
		{"/delayed/t..u/a", 400, `{"error":"topic has an empty segment at byte 2","code":"bad_topic"}`},
		{"/delayed/t/a/b", 404, `{"error":"There is nothing at this path.","code":"not_found"}`},
	} {
		if a := r.ask(t, http.MethodDelete, c.path, "", "Authorization", "Bearer "+rigToken); a.status != c.status || strings.TrimSpace(a.text) != c.text {
			t.Errorf("%s: %d %s", c.path, a.status, a.text)
		}
	}
}
