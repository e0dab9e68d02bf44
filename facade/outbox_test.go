package facade_test

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/facade"
	"eventhub/jetstream"
)

// keptOutbox keeps in memory, and fails when told to.
type keptOutbox struct {
	mu   sync.Mutex
	kept []jetstream.PublishOptions
	fail error
}

func (o *keptOutbox) Add(_ context.Context, topic string, payload []byte, opts jetstream.PublishOptions) (string, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.fail != nil {
		return "", o.fail
	}
	kept := opts
	kept.Headers["is"] = topic + " " + string(payload)
	o.kept = append(o.kept, kept)
	return cmp.Or(opts.ID, "made"), nil
}

func TestOutboxTakesWhatPublishTakes(t *testing.T) {
	t.Parallel()
	box := new(keptOutbox)
	r := newRig(t, func(c *facade.Config) {
		c.Outbox = box
		c.Limits.TopicRate, c.Limits.TopicBurst = 1, 2
	})
	got := r.post(t, "/outbox/a.b", `{"n":1}`, "Event-Id", "one", "Event-Key", "k", "Event-Header-X-A", "b")
	if got.status != http.StatusAccepted || got.ID != "one" {
		t.Fatalf("got %+v", got)
	}
	if kept := box.kept[0]; len(box.kept) != 1 || kept.ID != "one" || kept.Key != "k" || kept.Headers["x-a"] != "b" || kept.Headers["is"] != `a.b {"n":1}` || kept.Headers["authorization"] != "" {
		t.Errorf("kept is %+v", box.kept)
	}
	box.fail = &jetstream.Error{Code: jetstream.CodeOverloaded, Msg: "full"}
	for _, c := range []struct {
		topic, body, code string
		headers           []string
		status            int
	}{
		{"x", "1", "overloaded", nil, http.StatusServiceUnavailable},
		{"bad..topic", "1", "bad_topic", nil, http.StatusBadRequest},
		{"y", "{", "bad_json", nil, http.StatusBadRequest},
		{"z", "1", "bad_options", []string{"Event-Unheard", "x"}, http.StatusBadRequest},
		{"lines", `{"payload":1}`, "bad_options", []string{"Content-Type", "application/x-ndjson"}, http.StatusBadRequest},
		{"t", "1", "bad_token", []string{"Authorization", "Bearer no"}, http.StatusUnauthorized},
	} {
		if got := r.post(t, "/outbox/"+c.topic, c.body, c.headers...); got.status != c.status || got.Code != c.code {
			t.Errorf("%s: got %+v, want %d %s", c.topic, got, c.status, c.code)
		}
	}
	// A failure says nothing of its cause.
	box.fail = errors.New("disk full")
	if got := r.post(t, "/outbox/x", "1"); got.status != http.StatusServiceUnavailable || got.Code != "publish_failed" || got.Error != "The event could not be published." {
		t.Errorf("got %+v", got)
	}
	if got := r.post(t, "/outbox/x", "1"); got.status != http.StatusTooManyRequests {
		t.Errorf("got %+v, want the topic's throttle", got)
	}
}

func TestNoOutbox(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	if got := r.post(t, "/outbox/t", "1"); got.status != http.StatusNotFound || got.Code != "not_found" {
		t.Errorf("got %+v", got)
	}
}

// A principal that posts too many bytes gets 429 and when to come again. Others may go on.
func TestOutboxRateOfAPrincipal(t *testing.T) {
	t.Parallel()
	box := new(keptOutbox)
	r := newRig(t, func(c *facade.Config) {
		c.Outbox = box
		c.Limits.OutboxRate, c.Limits.OutboxBurst = 1000, 10_000
		c.Auth = everybody{}
	})
	body := `"` + strings.Repeat("x", 4000) + `"`
	for i := range 2 {
		if got := r.post(t, "/outbox/a", body, "Authorization", "Bearer eve"); got.status != http.StatusAccepted {
			t.Fatalf("post %d: %+v", i, got)
		}
	}
	got := r.post(t, "/outbox/a", body, "Authorization", "Bearer eve")
	if wait, err := strconv.Atoi(got.header.Get("Retry-After")); got.status != http.StatusTooManyRequests || got.Code != "rate_limited" || err != nil || wait < 1 || wait > 5 {
		t.Errorf("got %+v", got)
	}
	if got := r.post(t, "/outbox/a", body, "Authorization", "Bearer other"); got.status != http.StatusAccepted {
		t.Errorf("another principal got %+v", got)
	}
	if len(box.kept) != 3 {
		t.Errorf("%d events were stored, want 3", len(box.kept))
	}
	// A large body is not waited for.
	conn := r.socket(t, "POST /outbox/a HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer eve\r\nContent-Length: 900000\r\n\r\n")
	if err := conn.SetReadDeadline(time.Now().Add(rigPatience)); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || !strings.HasPrefix(line, "HTTP/1.1 429 ") {
		t.Errorf("%q %v", line, err)
	}
}
