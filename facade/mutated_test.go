package facade_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"eventhub/docs/apitest"
	"eventhub/facade"
	"eventhub/jetstream/schemas"
)

// TestMutatedRequests sends every route bodies and parameters that are wrong in one place. Each
// request is answered, and none is taken for a fault of the hub.
func TestMutatedRequests(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) { cfg.Outbox = noOutbox{} })
	for _, topic := range []string{"t", "held"} {
		r.put(t, topic, "1")
	}
	if _, _, err := r.bus.Schemas().Register(t.Context(), "t", schemas.Draft{Schema: json.RawMessage("true")}); err != nil {
		t.Fatal(err)
	}
	held := func() string { return r.pullOne(t, "held", "g", `"from":"earliest"`).Ack }
	handle := held()
	bodies := map[string]string{
		"/publish":                     `{"specversion":"1.0","id":"1","source":"/s","type":"t","subject":"s","time":"2026-01-01T00:00:00Z","datacontenttype":"application/json","data":{"a":1}}`,
		"/publish/{topic}":             `{"a":1}`, // any JSON is a payload
		"/outbox/{topic}":              `{"a":1}`,
		"/groups/{topic}/{group}/pull": `{"max":1,"wait_ms":0,"opts":{"from":"ts","ts":1,"afterId":"x","ackTimeoutMs":1000,"maxAttempts":1,"topics":["t"],"groupTtlMs":60000,"ordered":"key","slots":1,"schemaVersion":1}}`,
		"/ack":                         `{"ack":["` + handle + `"]}`,
		"/nack":                        `{"ack":["` + handle + `"],"reason":"r","delay_ms":1}`,
		"/modack":                      `{"ack":["` + handle + `"],"extend_ms":1000}`,
		"/schemas/{topic}":             `{"schema":{"type":"object"},"up":{"a":1},"down":{"a":1},"description":"d","force":true}`,
		"/schemas/{topic}/check":       `{"schema":{"type":"object"},"up":{"a":1},"down":{"a":1},"description":"d","force":true}`,
	}
	required := map[string]url.Values{
		"/subscribe": {"topic": {"t"}, "group": {"g"}}, "/replay": {"topic": {"t"}}, "/export": {"topic": {"t"}},
	}
	for _, at := range apitest.Routes(t, apitest.Clients) {
		path := strings.NewReplacer("{topic}", "t", "{key}", "k", "{id}", "i", "{group}", "g", "{version}", "1").Replace(at.Path)
		ask := func(target, body string) {
			status, text := r.head(t, at.Method, target, body)
			if status >= http.StatusInternalServerError || strings.Contains(text, `"internal"`) {
				t.Errorf("%s %s %s: %d %s", at.Method, target, body, status, text)
			}
		}
		for _, query := range at.Queries(required[at.Path]) {
			ask(path+query, bodies[at.Path])
		}
		if at.Method != http.MethodPost {
			continue
		}
		if bodies[at.Path] == "" {
			t.Errorf("the test has no body for %s", at.Path)
			continue
		}
		for _, body := range apitest.Mutations(t, bodies[at.Path]) {
			ask(path, body)
		}
	}
	for path, refused := range map[string][]string{
		"/ack":    {`{}`, `{"handle":"x"}`, `{"ack":null}`, `{"ack":{}}`, `{"ack":[]}`, `{"ack":[1]}`, `{"ack":["x"]}`},
		"/nack":   {`{}`, `{"ack":["H"],"delay_ms":"x"}`, `{"ack":["H"],"delay_ms":null}`, `{"ack":["H"],"reason":1}`, `{"ack":["H"],"reason":{}}`},
		"/modack": {`{}`, `{"handle":"x"}`, `{"ack":["H"],"extend_ms":"x"}`, `{"ack":["H"],"extend_ms":"1000"}`, `{"ack":["H"],"extend_ms":[]}`, `{"ack":["H"],"extend_ms":true}`},
	} {
		r.put(t, "held", "1")
		handle := held()
		for _, body := range refused {
			if a := r.post(t, path, strings.ReplaceAll(body, "H", handle)); a.status != http.StatusBadRequest {
				t.Errorf("%s %s: %d %s", path, body, a.status, a.text)
			}
		}
		r.wantSettled(t, "ack", "", handle) // no refusal settled it
	}
}

// head sends a request and returns the status, and the beginning of what is answered at once.
func (r *rig) head(t *testing.T, method, target, body string) (status int, text string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel() // some answers do not end
	req, err := http.NewRequestWithContext(ctx, method, r.http.URL+target, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+rigToken)
	if strings.Contains(body, "specversion") {
		req.Header.Set("Content-Type", "application/cloudevents+json")
	}
	res, err := r.ws.Client().Do(req) // a client that holds no request against the documents
	if err != nil {
		t.Fatalf("%s %s %s: %v", method, target, body, err)
	}
	defer func() { _ = res.Body.Close() }()
	if strings.Contains(res.Header.Get("Content-Type"), "json") {
		var b [1024]byte
		n, _ := res.Body.Read(b[:])
		text = string(b[:n])
	}
	return res.StatusCode, text
}

// TestMutatedFrames sends every frame with fields that are wrong in one place. Each is answered,
// and the connection goes on.
func TestMutatedFrames(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) { cfg.Limits.FrameRate, cfg.Limits.Faults = facade.NoLimit, 1<<30 })
	conn := r.login(t).conn // no frames here are those of a document
	ctx, cancel := context.WithTimeout(t.Context(), rigPatience)
	defer cancel()
	for _, frame := range []string{
		`{"op":"PUBLISH","topic":"t","payload":{"a":1},"opts":{"id":"1","ts":1,"key":"k","headers":{"a":"b"},"tags":["a"],"caused_by":"c","sid":"s","tombstone":false,"delay_ms":1}}`,
		`{"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"from":"ts","ts":1,"afterId":"x","batchSize":1,"maxInFlight":1,"ackTimeoutMs":1000,"maxAttempts":1,"topics":["t"],"groupTtlMs":60000,"ordered":"key","slots":1,"schemaVersion":1}}`,
		`{"op":"SUBSCRIBE","topic":"t","opts":{"mode":"broadcast","from":"ts","ts":1,"afterId":"x","history":1,"snapshot":true,"pos":"x","slow":"skip","conflate":"key","minIntervalMs":1}}`,
		`{"op":"ACK","topic":"t","group":"g","id":"i"}`,
		`{"op":"ACK","topic":"t","group":"g","ids":["i"]}`,
		`{"op":"NACK","topic":"t","group":"g","id":"i","reason":"r","delay_ms":1}`,
		`{"op":"MODACK","topic":"t","group":"g","id":"i","extend_ms":1000}`,
		`{"op":"PAUSE","topic":"t","group":"g"}`,
		`{"op":"RESUME","topic":"t","group":"g"}`,
		`{"op":"UNSUBSCRIBE","topic":"t","group":"g","opts":{"mode":"broadcast"}}`,
		`{"op":"AUTH","token":"` + rigToken + `","caps":["retry_after"]}`,
	} {
		for _, mutated := range append(apitest.Mutations(t, frame), frame) {
			if strings.Contains(frame, `"AUTH"`) && !strings.Contains(mutated, rigToken) {
				continue // a connection may send a few wrong tokens only
			}
			if err := conn.Write(ctx, websocket.MessageText, []byte(mutated)); err != nil {
				t.Fatalf("%s: %v", mutated, err)
			}
			for a := (reply{}); a.Op != "OK" && a.Op != "ERR"; {
				_, text, err := conn.Read(ctx)
				if err != nil {
					t.Fatalf("after %s: %v", mutated, err)
				}
				if err := json.Unmarshal(text, &a); err != nil {
					t.Fatal(err)
				}
				if a.Code == "internal" {
					t.Errorf("%s: %s", mutated, a.Msg)
				}
			}
		}
	}
}
