package natstest

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
)

// View is a native client that looks at what servers hold, and tells them to do what operators may.
// Its methods wait for what they ask for, and fail the test when it does not come.
type View struct {
	tb testing.TB
	nc *nats.Conn
	JS natsjs.JetStream
}

// Look connects a View to servers for the time of the test.
func Look(tb testing.TB, urls ...string) *View {
	tb.Helper()
	nc, err := nats.Connect(strings.Join(urls, ","), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond), nats.ReconnectJitter(0, 0))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(nc.Close)
	js, err := natsjs.New(nc)
	if err != nil {
		tb.Fatal(err)
	}
	return &View{tb: tb, nc: nc, JS: js}
}

// URLs are the addresses of servers.
func URLs(servers []*Server) []string {
	urls := make([]string, len(servers))
	for i, s := range servers {
		urls[i] = s.URL()
	}
	return urls
}

// Until asks every 20 ms, with a second for each question, until the answer is yes.
func (v *View) Until(what string, ask func(context.Context) bool) {
	v.tb.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(2 * patience)
	for {
		ctx, cancel := context.WithTimeout(v.tb.Context(), time.Second)
		yes := ask(ctx)
		cancel()
		if yes {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			v.tb.Fatalf("waited in vain: %s", what)
		}
	}
}

// Replicating waits until the servers make streams with n copies.
func (v *View) Replicating(n int) {
	v.tb.Helper()
	v.Until("streams can be made", func(ctx context.Context) bool {
		_, err := v.JS.CreateOrUpdateStream(ctx, natsjs.StreamConfig{Name: "ready", Replicas: n})
		return err == nil
	})
	v.Until("streams can be deleted", func(ctx context.Context) bool { return v.JS.DeleteStream(ctx, "ready") == nil })
}

// consumers are those of a stream, or nil where the servers do not answer.
func (v *View) consumers(ctx context.Context, stream string) []*natsjs.ConsumerInfo {
	s, err := v.JS.Stream(ctx, stream)
	if err != nil {
		return nil
	}
	list := s.ListConsumers(ctx)
	var all []*natsjs.ConsumerInfo
	for c := range list.Info() {
		all = append(all, c)
	}
	if list.Err() != nil {
		return nil
	}
	return all
}

// Consumer waits until a stream has one consumer and that has a leader, and returns it.
func (v *View) Consumer(stream string) *natsjs.ConsumerInfo {
	v.tb.Helper()
	var only *natsjs.ConsumerInfo
	v.Until("stream "+stream+" has one consumer", func(ctx context.Context) bool {
		all := v.consumers(ctx, stream)
		if len(all) != 1 || all[0].Cluster != nil && all[0].Cluster.Leader == "" {
			return false
		}
		only = all[0]
		return true
	})
	return only
}

// Still waits until the consumers of a stream have delivered nothing and heard of nothing for a
// fifth of a second, or for 5 s: what moves on then does so for ever.
func (v *View) Still(stream string) {
	v.tb.Helper()
	var last [3]uint64
	same := 0
	deadline := time.Now().Add(5 * time.Second)
	v.Until("stream "+stream+" stands still", func(ctx context.Context) bool {
		var now [3]uint64
		for _, c := range v.consumers(ctx, stream) {
			now[0] += c.Delivered.Consumer
			now[1] += c.AckFloor.Consumer
			now[2] += uint64(max(c.NumAckPending, 0))
		}
		if now != last {
			last, same = now, 0
			return time.Now().After(deadline)
		}
		same++
		return same >= 10
	})
}

// StepDown makes the leader of a stream's only consumer hand over to another server, and returns
// when one leads. It returns the name of the new leader.
func (v *View) StepDown(stream string) (leader string) {
	v.tb.Helper()
	was := v.Consumer(stream).Cluster.Leader
	v.stepDown(stream, "")
	v.Until("another server leads the consumer of "+stream, func(context.Context) bool {
		leader = v.Consumer(stream).Cluster.Leader //nolint:contextcheck // it asks until there is an answer, as Until does
		return leader != was
	})
	return leader
}

// Lead makes a server, by its name, the leader of a stream's only consumer.
func (v *View) Lead(stream, leader string) {
	v.tb.Helper()
	v.Until(leader+" leads the consumer of "+stream, func(context.Context) bool {
		if v.Consumer(stream).Cluster.Leader == leader { //nolint:contextcheck // as in StepDown
			return true
		}
		v.stepDown(stream, `{"placement":{"preferred":"`+leader+`"}}`) //nolint:contextcheck // as in StepDown
		return false
	})
}

func (v *View) stepDown(stream, how string) {
	v.tb.Helper()
	c := v.Consumer(stream)
	v.Until("the leader of "+c.Name+" steps down", func(ctx context.Context) bool {
		m, err := v.nc.RequestWithContext(ctx, "$JS.API.CONSUMER.LEADER.STEPDOWN."+stream+"."+c.Name, []byte(how))
		if err != nil {
			return false
		}
		var answer struct{ Success bool }
		return json.Unmarshal(m.Data, &answer) == nil && answer.Success
	})
}

// DeleteConsumers deletes all consumers of a stream.
func (v *View) DeleteConsumers(stream string) {
	v.tb.Helper()
	for _, c := range v.consumers(v.tb.Context(), stream) {
		if err := v.JS.DeleteConsumer(v.tb.Context(), stream, c.Name); err != nil {
			v.tb.Fatal(err)
		}
	}
}
