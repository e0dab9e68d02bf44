package main

import (
	"net/http"
	"strconv"
	"strings"
	"testing"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/natstest"
	"eventhub/sdk/go/wire"
)

// One principal publishes until it has stored its share, and another stores on. When the room that
// is not the hub's is full, no client stores, but events are delivered, acknowledged and
// dead-lettered, and records wait in the outbox. When there is room, all goes on.
func TestAClientFillsTheStore(t *testing.T) {
	t.Parallel()
	const account, room, share, size = 16 << 30, 32 << 20, 8 << 20, 900_000
	flag, eve, victim := rivals(t)
	server := natstest.Run(t)
	limits := natsserver.JetStreamAccountLimits{MaxMemory: -1, MaxStore: account, MaxStreams: -1, MaxConsumers: -1, MaxAckPending: -1}
	if err := server.GlobalAccount().UpdateJetStreamLimits(map[string]natsserver.JetStreamAccountLimits{"": limits}); err != nil {
		t.Fatal(err)
	}
	n := startNode(t, flag, "--nats-url="+server.ClientURL(), "--data="+t.TempDir(),
		"--limit-storage-reserve="+strconv.Itoa(account-room), "--limit-principal-stored="+strconv.Itoa(share))
	p := posting{t, n}
	large := `"` + strings.Repeat("x", size) + `"`
	c := n.dial()
	one := 1
	in := subscribeTo(t, c, "theirs.orders", "g", wire.SubscribeOptions{MaxAttempts: &one})
	for range 2 {
		p.post(victim, "/publish/theirs.orders", "1", http.StatusOK, "")
	}
	events := in.take(2)
	shows(t, n.ops+"/metrics", http.StatusOK, `eventhub_storage_low{storage="file"} 0`)

	for range share / size {
		p.post(eve, "/publish/mine.a", large, http.StatusOK, "")
	}
	p.post(eve, "/publish/mine.a", large, http.StatusInsufficientStorage, "storage_low")
	shows(t, n.ops+"/metrics", http.StatusOK, `eventhub_limit_reached_total{limit="storage_share"} 1`)
	p.post(victim, "/publish/theirs.orders", "2", http.StatusOK, "")

	f := &floodedHub{secret: []byte("0123456789abcdef0123456789abcdef")}
	for i := range room / share {
		token := f.sign(t, "eve"+strconv.Itoa(i), "publish:mine.**")
		for range share / size {
			askWith(t.Context(), token, http.MethodPost, n.http+"/publish/mine.a", strings.NewReader(large))
		}
	}
	p.post(victim, "/publish/theirs.orders", "3", http.StatusInsufficientStorage, "storage_low")
	p.post(victim, "/publish/theirs.new", "1", http.StatusInsufficientStorage, "storage_low")
	shows(t, n.ops+"/readyz", http.StatusOK, `"storage":"low: `)
	shows(t, n.ops+"/metrics", http.StatusOK, `eventhub_storage_low{storage="file"} 1`)
	p.post(victim, "/outbox/theirs.orders", "4", http.StatusAccepted, "")
	if err := events[0].Ack(); err != nil {
		t.Error(err)
	}
	if err := events[1].Nack("no", 0); err != nil {
		t.Error(err)
	}
	ackAll(t, in.take(1)) // of the second publish
	dead := subscribeTo(t, c, "dlq.theirs.orders", "d", wire.SubscribeOptions{From: "earliest"})
	ackAll(t, dead.take(1))
	if got := pendingOf(t, n); got != 1 {
		t.Errorf("%d records wait in the outbox, want 1", got)
	}

	nc, err := nats.Connect(server.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	s, err := js.Stream(t.Context(), "mine=2Ea")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	ackAll(t, in.take(1)) // from the outbox
	p.post(victim, "/publish/theirs.orders", "5", http.StatusOK, "")
	shows(t, n.ops+"/metrics", http.StatusOK, `eventhub_storage_low{storage="file"} 0`)
	shows(t, n.ops+"/metrics", http.StatusOK, `eventhub_outbox_parked{outbox="http"} 0`)
}
