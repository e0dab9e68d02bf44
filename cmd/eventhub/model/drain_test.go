//go:build unix

package model

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// drain is a member of every group that acknowledges all that is left.
type drain struct {
	rig   *rig
	count *counters
	conn  *wsConn

	mu    sync.Mutex
	asked map[string]*groupPlan // by corr
	again []*groupPlan          // their SUBSCRIBE is to be sent again
}

// drain acknowledges all that the groups have left, and takes down what does not come.
func (r *rig) drain(count *counters) {
	r.Helper()
	d := &drain{rig: r, count: count}
	var left map[groupKey]int
	still := 0
	r.within(60*time.Second, func(ctx context.Context) bool {
		if !d.join() {
			return false
		}
		var err error
		if left, err = r.unsettled(ctx); err != nil || len(left) > 0 {
			still = 0
			return false
		}
		still++
		return still > 5
	})
	for k, n := range left {
		r.rec.add(0, kindLeft, fmt.Sprintf("%s %s %d", k.group, k.topic, n))
	}
	if d.conn != nil {
		d.conn.end(endHalf)
		select {
		case <-d.conn.ended:
		case <-time.After(20 * time.Second):
			_ = d.conn.tcp.Close() // that the hub does not end it is the rules' business
			<-d.conn.ended
		}
	}
}

// join connects where there is no connection, and subscribes to what it is not subscribed to. It
// reports whether it has asked for everything.
func (d *drain) join() bool {
	if d.conn != nil {
		select {
		case <-d.conn.ended:
			d.conn = nil
		default:
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.conn == nil {
		h := d.rig.hubs[0]
		ready := make(chan *wsConn, 1)
		var to *wsConn
		conn, err := dialHub(d.rig.rec, int(d.count.conns.Add(1)), h.addr, h.name, false, func(text []byte) {
			if to == nil {
				to = <-ready
			}
			d.heard(to, text)
		})
		if err != nil {
			return false
		}
		ready <- conn
		d.conn, d.asked, d.again = conn, map[string]*groupPlan{}, d.rig.plan.groups
		d.send(conn, &wireFrame{Op: "AUTH", Token: "x", Caps: []string{"group_reset", "events_lost"}})
	}
	never, all := 0, len(d.again) == 0
	for _, g := range d.again {
		o := &wireOptions{Topics: g.topics[1:], GroupTTLMS: g.ttlMS, MaxInFlight: 1_000, MaxAttempts: &never, AckTimeoutMS: 10_000}
		if g.ordered {
			o.Ordered, o.Slots = "key", g.slots
		}
		d.asked[d.send(d.conn, &wireFrame{Op: "SUBSCRIBE", Topic: g.topics[0], Group: g.name, Opts: o})] = g
	}
	d.again = nil
	return all
}

func (d *drain) send(to *wsConn, f *wireFrame) (corr string) {
	corr = fmt.Sprint("d", d.count.corrs.Add(1))
	f.Corr = &corr
	to.send(f)
	return corr
}

// heard is called by the reader.
func (d *drain) heard(from *wsConn, text []byte) {
	var f wireFrame
	switch err := json.Unmarshal(text, &f); {
	case err != nil:
	case f.Op == "EVENT" && f.Event != nil:
		d.send(from, &wireFrame{Op: "ACK", Topic: f.Topic, Group: f.Group, ID: f.Event.ID})
	case f.Op == "ERR" && f.Corr != nil:
		d.mu.Lock()
		defer d.mu.Unlock()
		if g := d.asked[*f.Corr]; g != nil {
			d.again = append(d.again, g)
		}
	}
}

// unsettled is what the server says that groups have left, but for none.
func (r *rig) unsettled(ctx context.Context) (map[groupKey]int, error) {
	left := map[groupKey]int{}
	for _, topic := range r.plan.topics {
		all, err := r.consumers(ctx, topic)
		if isMissing(err) {
			continue // nobody ever used it
		}
		if err != nil {
			return nil, err
		}
		newest := map[string]*natsjs.ConsumerInfo{}
		for _, c := range all {
			g := c.Config.Metadata["eventhub.group"]
			if was := newest[g]; was == nil || was.Created.Before(c.Created) {
				newest[g] = c
			}
		}
		for g, c := range newest {
			if n := int(c.NumPending) + c.NumAckPending; n > 0 {
				left[groupKey{topic, g}] = n
			}
		}
	}
	return left, nil
}

func isMissing(err error) bool { return errors.Is(err, natsjs.ErrStreamNotFound) }

// readAll takes down all that is stored.
func (r *rig) readAll() {
	r.Helper()
	for _, topic := range r.plan.topics {
		r.readStream(streamName(topic), func(m *natsjs.RawStreamMsg) {
			id := m.Header.Get("Nats-Msg-Id")
			if id == "" {
				id = m.Header.Get("Event-Id")
			}
			r.rec.add(0, kindStored, fmt.Sprintf("%s %d %s %d %s", topic, m.Sequence, id, m.Time.UnixMilli(), m.Data))
		})
	}
	r.readStream("dlq", func(m *natsjs.RawStreamMsg) {
		r.rec.add(0, kindLetter, fmt.Sprintf("%d %s", m.Sequence, m.Data))
	})
}

func (r *rig) readStream(name string, f func(*natsjs.RawStreamMsg)) {
	r.Helper()
	var s natsjs.Stream
	missing := false
	r.until("stream "+name+" is found", func(ctx context.Context) bool {
		var err error
		s, err = r.js.Stream(ctx, name)
		missing = err != nil && isMissing(err)
		return err == nil || missing
	})
	if missing {
		return
	}
	state := s.CachedInfo().State
	for seq := state.FirstSeq; seq <= state.LastSeq; seq++ {
		r.until("an event is read", func(ctx context.Context) bool {
			m, err := s.GetMsg(ctx, seq)
			if err == nil {
				f(m)
			}
			return err == nil || errors.Is(err, natsjs.ErrMsgNotFound)
		})
	}
}
