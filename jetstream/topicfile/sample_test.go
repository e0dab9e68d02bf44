package topicfile

import (
	"reflect"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

// TestSampleThatShips applies docs/topics.yaml to a server of its own. The second time there is
// nothing to do.
func TestSampleThatShips(t *testing.T) {
	rules, err := Load("../../docs/topics.yaml")
	if err != nil {
		t.Fatal(err)
	}
	found := make(map[string]topics.Rule)
	for _, r := range rules {
		found[r.Pattern] = r
	}
	state, readings := found["process.state"], found["sensor.reading"]
	if found["heartbeat.received"].MaxAge != 3*24*time.Hour || !state.Compaction || !found["kv.set"].Compaction ||
		!found["process.state.snapshot"].Compaction || found["user.*.events"].Family != "users" || found["**"].MaxAge == 0 ||
		state.Snapshot == nil || !reflect.DeepEqual(*state.Snapshot, topics.SnapshotRule{Topic: "process.state.snapshot", Every: 30 * time.Second}) ||
		found["payment.received"].OnFull != topics.OnFullReject || found["payment.received"].GroupAge != 3*24*time.Hour || readings.Snapshot == nil || readings.Snapshot.KeySource != "/sensor/id" ||
		found["invoice.sent"].CloudEvents != (topics.CloudEventsRule{Source: "/billing", Headers: true}) {
		t.Errorf("got %+v", rules)
	}
	bus, err := jetstream.Open(t.Context(), jetstream.Config{Server: natstest.Embed(t, t.TempDir()), Topics: rules})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = bus.Close() }()
	changes, err := bus.Admin().ApplyTopics(t.Context(), false)
	if err != nil || len(changes) != 13 { // nine streams, four of them with a bucket
		t.Errorf("%d changes, %v", len(changes), err)
	}
	for i := range changes {
		if c := &changes[i]; !c.Done {
			t.Errorf("%s: %v", c, c.Err)
		}
	}
	if changes, err = bus.Admin().ApplyTopics(t.Context(), true); err != nil || len(changes) != 0 {
		t.Errorf("the second time: %v, %v", changes, err)
	}
	for topic, key := range map[string]string{"heartbeat.received": "", "process.state": "k", "kv.set": "k", "user.7.events": "", "other": "", "dlq.x": "", "sensor.reading": ""} {
		if _, err := bus.Publish(t.Context(), topic, []byte("1"), jetstream.PublishOptions{Key: key}); err != nil {
			t.Errorf("%s: %v", topic, err)
		}
	}
	all, err := bus.Admin().Topics(t.Context())
	if err != nil || len(all) != 11 {
		t.Errorf("%+v, %v", all, err)
	}
	for _, s := range all {
		if len(s.Changes) > 0 || s.Messages > 1 || s.Rule == "" {
			t.Errorf("got %+v", s)
		}
	}
}
