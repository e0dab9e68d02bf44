package facade_test

import (
	"net/http"
	"strconv"
	"strings"
	"testing"

	"eventhub/facade"
	"eventhub/jetstream"
)

// TestPublishedDeadLettersCount publishes to topics of dead letters, over HTTP and a WebSocket. One
// principal stores no more than its share, and the dead letters of others are stored at once.
func TestPublishedDeadLettersCount(t *testing.T) {
	t.Parallel()
	const size, share = 10 << 10, 200 << 10
	r := newRigOn(t, jetstream.Config{Limits: jetstream.Limits{DeadLetterShare: share}}, func(cfg *facade.Config) {
		cfg.Auth = facade.Tokens(newVerifier(t))
	})
	// What is not stored takes nothing of the share.
	retrying := grant(t, "retrying", "publish:dlq.again.**")
	for range 3 * share / size {
		a := r.post(t, "/publish/dlq.again.x", strconv.Quote(strings.Repeat("x", size)), "Authorization", "Bearer "+retrying, "Event-Id", "same")
		if a.status != http.StatusOK {
			t.Fatalf("an event that is stored already: %d %s", a.status, a.text)
		}
	}
	attacker := grant(t, "attacker", "publish:dlq.att.**")
	payload := strconv.Quote(strings.Repeat("x", size))
	stored := 0
	var a answer
	for a = r.post(t, "/publish/dlq.att.x", payload, "Authorization", "Bearer "+attacker); a.status == http.StatusOK && stored < 100; stored++ {
		a = r.post(t, "/publish/dlq.att.x", payload, "Authorization", "Bearer "+attacker)
	}
	if wait, err := strconv.Atoi(a.header.Get("Retry-After")); a.Code != "rate_limited" || err != nil || wait < 3600 {
		t.Errorf("after %d events: %d %s, Retry-After %q; want the time for one more", stored, a.status, a.text, a.header.Get("Retry-After"))
	}
	if stored > share/size || stored < share/size/2 {
		t.Errorf("%d events of %d bytes were stored, with a share of %d", stored, size, share)
	}
	p := r.dial(t)
	p.send(`{"op":"AUTH","token":"` + attacker + `"}`)
	p.next("OK", "")
	p.send(`{"op":"PUBLISH","topic":"dlq.att.y","payload":` + payload + `}`)
	p.next("ERR", "rate_limited")
	r.seen.await(t, "error rate_limited", 2)

	other := grant(t, "other", "publish:t", "subscribe:t", "subscribe:dlq.t", "publish:dlq.t")
	p = r.dial(t)
	p.send(`{"op":"AUTH","token":"`+other+`"}`, `{"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"maxAttempts":1}}`, `{"op":"PUBLISH","topic":"t","payload":1}`)
	for e := (reply{}); e.Op != "EVENT"; {
		if e = p.any(); e.Op == "EVENT" {
			p.send(`{"op":"NACK","topic":"t","group":"g","id":"` + e.Event.ID + `","delay_ms":0}`)
		}
	}
	eventually(t, "the dead letter of another client is stored", func() bool { return len(r.stored(t, "dlq.t")) == 1 })
	if a := r.post(t, "/publish/dlq.t", payload, "Authorization", "Bearer "+other); a.status != http.StatusOK {
		t.Errorf("another client publishes to its dead letters: %d %s", a.status, a.text)
	}
}
