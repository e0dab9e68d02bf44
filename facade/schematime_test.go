package facade_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/schemas"
	"eventhub/jetstream/topics"
)

// slowSchema takes milliseconds for slowPayload.
var slowSchema = func() string {
	var branches []string
	for i := range 60 {
		branches = append(branches, fmt.Sprintf(`{"items":{"properties":{"a":{"enum":[%d]}},"required":["b"]}}`, i))
	}
	return `{"anyOf":[` + strings.Join(branches, ",") + `,{"type":["array","integer"]}]}`
}()

func slowPayload(n int) string {
	return "[" + strings.Repeat(`{"b":1,"a":59},`, 3000) + strconv.Itoa(n) + "]"
}

// schemaRig is a hub with a topic slow, of a schema that takes long, whose clients may have
// payloads compared for so long in each second.
func schemaRig(t *testing.T, each time.Duration) *rig {
	t.Helper()
	r := newRigOn(t, jetstream.Config{
		Topics: []topics.Rule{{Pattern: "slow", Schema: topics.SchemaRule{Mode: topics.SchemaEnforce}}},
		Limits: jetstream.Limits{ComputeTime: each},
	}, func(cfg *facade.Config) { cfg.Auth = facade.Tokens(newVerifier(t)) })
	if _, _, err := r.bus.Schemas().Register(t.Context(), "slow", schemas.Draft{Schema: json.RawMessage(slowSchema)}); err != nil {
		t.Fatal(err)
	}
	return r
}

// TestLongComparisonsHoldUpNobody publishes what takes long to compare. Other frames of the
// connection are answered meanwhile, and the events keep their order.
func TestLongComparisonsHoldUpNobody(t *testing.T) {
	t.Parallel()
	r := schemaRig(t, time.Hour)
	p := r.dial(t)
	p.send(`{"op":"AUTH","token":"` + grant(t, "eve", "publish:slow") + `"}`)
	p.next("OK", "")
	const n = 20
	for i := range n {
		payload := slowPayload(i)
		if i%2 == 1 {
			payload = strconv.Itoa(i)
		}
		p.send(fmt.Sprintf(`{"op":"PUBLISH","topic":"slow","payload":%s,"corr":%d}`, payload, i))
	}
	p.send(`{"op":"RESUME","topic":"slow","group":"g","corr":"resume"}`)
	stored, before := 0, -1
	for stored < n {
		switch a := p.any(); {
		case a.Corr == "resume":
			before = stored
		case a.Op == "OK":
			stored++
		default:
			t.Fatalf("got %+v", a)
		}
	}
	if before < 0 || before > n/2 {
		t.Errorf("a frame behind %d publishes was answered after %d of them", n, before)
	}
	for i, e := range r.stored(t, "slow") {
		if want := strconv.Itoa(i); !strings.HasSuffix(strings.TrimSuffix(string(e.Payload), "]"), want) {
			t.Fatalf("event %d ends with %s", i, e.Payload[max(0, len(e.Payload)-20):])
		}
	}
}

// TestComparingIsRationed has one principal publish what takes long to compare, on many connections
// and over HTTP. Its publishes wait and are refused in the end, and those of others do not wait.
func TestComparingIsRationed(t *testing.T) {
	t.Parallel()
	r := schemaRig(t, 100*time.Microsecond)
	eve, bob := grant(t, "eve", "publish:slow"), grant(t, "bob", "publish:slow")
	for range 4 {
		p := r.dial(t)
		p.send(`{"op":"AUTH","token":"` + eve + `"}`)
		p.next("OK", "")
		for i := range 50 {
			p.send(fmt.Sprintf(`{"op":"PUBLISH","topic":"slow","payload":%s,"corr":%d}`, slowPayload(i), i))
		}
	}
	r.seen.await(t, "error rate_limited", 1)
	a := r.post(t, "/publish/slow", slowPayload(0), "Authorization", "Bearer "+eve)
	if a.status != http.StatusTooManyRequests || a.header.Get("Retry-After") == "" {
		t.Errorf("a principal beyond its ration: %d %s", a.status, a.text)
	}
	begun := time.Now()
	if a := r.post(t, "/publish/slow", "1", "Authorization", "Bearer "+bob); a.status != http.StatusOK {
		t.Errorf("another principal: %d %s", a.status, a.text)
	}
	if took := time.Since(begun); took > time.Second {
		t.Errorf("another principal waited for %v", took)
	}
}
