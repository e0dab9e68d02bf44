package facade_test

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"

	"eventhub/acl"
	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/sdk/go/wire"
)

// The hub's own token has no quota of groups, unless it is configured.
func TestTheHubsOwnTokenMakesGroupsFreely(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name  string
		count bool
		want  int
	}{{"by default", false, 150}, {"counted", true, 100}} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, func(cfg *facade.Config) { cfg.Limits.CountOwnToken = test.count })
			if made, refused := r.makeGroups(t, rigToken, "own.groups", "g", 150); made < test.want || made > test.want+5 {
				t.Errorf("%d were made, want %d; refused: %v", made, test.want, refused)
			}
		})
	}
}

// A static token that is not the hub's own, as that of the demo, has the quota.
func TestALimitedStaticTokenHasQuotas(t *testing.T) {
	t.Parallel()
	v, err := acl.NewVerifier(t.Context(), acl.Config{Static: []acl.StaticToken{{Token: rigToken}, {Name: "demo", Token: "guest", Limited: true}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(v.Close)
	r := newRig(t, func(cfg *facade.Config) { cfg.Auth = facade.Tokens(v) })
	if made, refused := r.makeGroups(t, "guest", "own.groups", "g", 150); made < 100 || len(refused) == 0 {
		t.Errorf("%d were made, want 100 and refusals; refused: %v", made, refused)
	}
}

// One principal holds no more events than it may, over all its subscriptions. What is beyond waits,
// and goes to others: a member that holds all it can takes no more than that from them.
func TestAPrincipalHoldsNoMoreThanItMay(t *testing.T) {
	t.Parallel()
	const most, n, later = 10, 100, 20
	r := jwtRig(t, func(cfg *facade.Config) { cfg.Limits.PrincipalHeld = most })
	topic := freshTopic()
	all := grant(t, "owner", "*:**")
	join := func(token string, handle func(wire.Event)) *wire.Conn {
		c, err := wire.Dial(t.Context(), "ws"+r.ws.URL[len("http"):], wire.Options{Token: token})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		if handle == nil {
			return c
		}
		if _, err := c.Subscribe(t.Context(), topic, "billing", wire.SubscribeOptions{MaxInFlight: 10_000, AckTimeoutMS: 43_200_000}, handle); err != nil {
			t.Fatal(err)
		}
		return c
	}
	held := make(chan wire.Event, n+later)
	for range 2 {
		join(grant(t, "eve", "subscribe:"+topic), func(e wire.Event) { held <- e })
	}
	publisher := join(all, nil)
	for range n {
		if _, err := publisher.Publish(t.Context(), topic, []byte(`1`), wire.PublishOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	r.seen.await(t, "limit principal_held", 1)
	settled := make(chan struct{}, n+later)
	join(all, func(e wire.Event) {
		if err := e.Ack(); err != nil {
			t.Error(err)
		}
		settled <- struct{}{}
	})
	eventually(t, "the owner has all that eve does not hold", func() bool { return len(settled) == n-most })
	if len(held) != most {
		t.Errorf("eve holds %d events, at most %d are allowed", len(held), most)
	}
	// As fast as eve settles, eve gets more.
	for range most {
		e := <-held
		if err := e.Ack(); err != nil {
			t.Fatal(err)
		}
	}
	for range later {
		if _, err := publisher.Publish(t.Context(), topic, []byte(`2`), wire.PublishOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "all events are delivered", func() bool { return len(settled)+len(held) >= n-most+later })
	if len(held) == 0 {
		t.Error("eve got nothing after it had settled what it held")
	}
}

// A lease is no longer than the operator allows: ackTimeoutMs and MODACK are cut.
func TestLeasesAreCut(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, func(cfg *facade.Config) { cfg.Limits.Lease = 1e9 })
	topic := freshTopic()
	p := r.dial(t)
	p.auth(grant(t, "eve", "*:"+topic))
	p.send(`{"op":"SUBSCRIBE","topic":"` + topic + `","group":"g","opts":{"ackTimeoutMs":43200000}}`)
	p.want(`{"op":"OK"}`)
	p.send(`{"op":"PUBLISH","topic":"` + topic + `","payload":1,"opts":{"id":"1"}}`)
	got := map[string]reply{}
	for range 2 {
		f := p.any()
		got[f.Op] = f
	}
	if got["EVENT"].Ctx.Attempt != 1 {
		t.Fatalf("got %+v", got)
	}
	p.send(`{"op":"MODACK","topic":"` + topic + `","group":"g","id":"1","extend_ms":43200000}`)
	p.want(`{"op":"OK"}`)
	if again := p.next("EVENT", ""); again.Ctx.Attempt != 2 {
		t.Errorf("got %+v", again)
	}
}

// slowBus takes long to make subscriptions on the topic slow.
type slowBus struct {
	facade.Bus
	making atomic.Int64
	goOn   chan struct{}
}

func (b *slowBus) Subscribe(ctx context.Context, topic, group string, opts jetstream.SubscribeOptions, handler func(*jetstream.Held)) (facade.Subscription, error) {
	if topic == "slow" {
		b.making.Add(1)
		defer b.making.Add(-1)
		select {
		case <-b.goOn:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return b.Bus.Subscribe(ctx, topic, group, opts, handler)
}

// SUBSCRIBEs of one principal that take long hold up no other principal, whatever their number and
// that of their connections.
func TestSlowJoinsOfOnePrincipal(t *testing.T) {
	t.Parallel()
	const own = 3
	slow := &slowBus{goOn: make(chan struct{})}
	r := jwtRig(t, func(cfg *facade.Config) {
		slow.Bus, cfg.Bus = cfg.Bus, slow
		cfg.Limits.PrincipalJoins = own
	})
	var eves []*peer
	for i := range 2 {
		p := r.dial(t)
		p.auth(grant(t, "eve", "subscribe:slow"))
		for g := range 10 {
			p.send(`{"op":"SUBSCRIBE","topic":"slow","group":"g` + strconv.Itoa(10*i+g) + `"}`)
		}
		eves = append(eves, p)
	}
	r.seen.await(t, "limit joins", 20-own)
	alice := r.dial(t)
	alice.auth(grant(t, "alice", "subscribe:quick"))
	if got := alice.outcome(`{"op":"SUBSCRIBE","topic":"quick","group":"g"}`); got != "OK" {
		t.Errorf("another principal: %s", got)
	}
	if n := slow.making.Load(); n != own {
		t.Errorf("%d are made at a time, want %d", n, own)
	}
	close(slow.goOn)
	for _, p := range eves {
		for range 10 {
			p.want(`{"op":"OK"}`)
		}
	}
}
