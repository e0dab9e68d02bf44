package facade_test

import (
	"strings"
	"testing"

	"eventhub/facade"
	"eventhub/jetstream"
)

// TestOutboundIsWhatWaits looks at the queues of a client that does not read, until it goes.
func TestOutboundIsWhatWaits(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	if got := r.srv.Outbound(); got != (facade.Outbound{}) {
		t.Errorf("without a client %+v waits", got)
	}
	r.login(t) // waits for nothing
	p := r.login(t)
	p.send(`{"op":"SUBSCRIBE","topic":"s","group":"g","opts":{"maxInFlight":100}}`)
	p.want(`{"op":"OK"}`)
	const size = 500_000
	payload := []byte(`"` + strings.Repeat("x", size-2) + `"`)
	for range 30 {
		if _, err := r.bus.Publish(t.Context(), "s", payload, jetstream.PublishOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	// The kernel takes some events; what it does not take waits.
	eventually(t, "events wait", func() bool {
		got := r.srv.Outbound()
		return got.Frames > 1 && got.Bytes >= got.Frames*size && got.MaxBytes == got.Bytes
	})
	_ = p.conn.CloseNow()
	eventually(t, "nothing waits", func() bool { return r.srv.Outbound() == facade.Outbound{} })
}
