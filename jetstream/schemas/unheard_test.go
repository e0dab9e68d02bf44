package schemas_test

import (
	"encoding/json"
	"errors"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/event"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/schemas"
	"eventhub/jetstream/topics"
)

// Two versions of a machine, and the casts between them.
const (
	hostV1 = `{"type":"object","required":["host"],"properties":{"host":{"type":"string"}},"additionalProperties":false}`
	hostV2 = `{"type":"object","required":["name"],"properties":{"name":{"type":"string"}},"additionalProperties":false}`
	hostUp = `[{"rename":{"at":"/host","to":"name"}}]`
	hostDo = `[{"rename":{"at":"/name","to":"host"}}]`
)

// hub opens a hub on a server, with a topic that needs a schema.
func hub(t *testing.T, url string) *jetstream.Bus {
	t.Helper()
	rules := topics.Rules{{Pattern: "t.a", MaxAge: time.Hour, Schema: topics.SchemaRule{Mode: topics.SchemaEnforce, Compatibility: "none"}}}
	b, err := jetstream.Open(t.Context(), jetstream.Config{URL: url, Topics: rules})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	return b
}

// TestAVersionThatAHubHasNotHeardOf reads events of a version that another hub has just registered.
func TestAVersionThatAHubHasNotHeardOf(t *testing.T) {
	t.Parallel()
	server := natstest.Start(t)
	first, second := hub(t, server.URL()), hub(t, server.URL())
	register := func(d schemas.Draft) {
		t.Helper()
		d.Force = true
		if _, _, err := first.Schemas().Register(t.Context(), "t.a", d); err != nil {
			t.Fatal(err)
		}
	}
	register(schemas.Draft{Schema: json.RawMessage(hostV1)})
	view, err := second.Schemas().View(t.Context(), "t.a", 1)
	if err != nil {
		t.Fatal(err)
	}
	view.Deafen()
	register(schemas.Draft{Schema: json.RawMessage(hostV2), Up: json.RawMessage(hostUp), Down: json.RawMessage(hostDo)})
	e := &event.Event{Payload: []byte(`{"name":"x"}`), Headers: map[string]string{schemas.VersionHeader: "2"}}
	if err := view.CastUnasked(t.Context(), e); !errors.Is(err, schemas.ErrVersionUnknown) {
		t.Errorf("%v", err)
	}
	// View asks the leader of the bucket.
	latest, err := second.Schemas().View(t.Context(), "t.a", 2)
	if err != nil {
		t.Fatal(err)
	}
	if err := latest.Cast(t.Context(), e); err != nil || string(e.Payload) != `{"name":"x"}` {
		t.Errorf("%s, %v", e.Payload, err)
	}
	// A version that does not exist is asked for now and then.
	e.Headers[schemas.VersionHeader] = "9"
	for range 2 {
		if err := latest.Cast(t.Context(), e); !errors.Is(err, schemas.ErrVersionUnknown) || !latest.Asked() {
			t.Errorf("%v", err)
		}
	}
}
