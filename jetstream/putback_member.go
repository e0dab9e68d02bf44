package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
)

// A member of a group to which something was put back is a second source for its subscription: a
// member of the queue's consumer. Both share the subscription's limits, leases, settlements and
// dead letters.

// takeQueue has the member pull from a queue, once it is known which. s.mu is held.
func (m *member) takeQueue(queue string) {
	s := m.sub
	if m.main != nil || m.queue == queue || s.stopped {
		return
	}
	m.queue = queue
	s.leaveQueue(m)
	if queue == "" {
		return
	}
	topic := m.group.topic.Name
	s.wg.Go(func() {
		for wait := 20 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
			s.mu.Lock()
			ttl := m.group.timeToLive() > 0
			s.mu.Unlock()
			g, err := s.joinQueue(topic, queue, ttl)
			s.mu.Lock()
			if s.stopped || m.queue != queue || err == nil {
				joined := err == nil && !s.stopped && m.queue == queue
				if joined {
					s.addQueue(m, g)
				}
				s.mu.Unlock()
				if err == nil && !joined {
					s.bus.groups.unshare(g, s)
				}
				return
			}
			s.mu.Unlock()
			if errors.Is(err, event.ErrNotFound) {
				return // the group was deleted, or moved on: its member hears of that
			}
			s.bus.often.Log(s.bus.conn.Ctx, slog.LevelWarn, "failed to join the events that were put back to a group; retrying", topic+"::"+s.group, slog.String("topic", topic), slog.String("group", s.group), slog.Any("error", err))
			select {
			case <-time.After(wait):
			case <-s.ctx.Done():
				return
			}
		}
	})
}

// joinQueue is the group that a queue is for its members. It returns ErrNotFound when the queue is
// not the group's. ttl says whether the group had a TTL when its member last heard of it.
func (s *Subscription) joinQueue(topic, queue string, ttl bool) (*group, error) {
	b := s.bus
	ctx, cancel := context.WithTimeout(s.ctx, conn.PublishWait)
	defer cancel()
	t, _, err := b.streams.FreshExisting(ctx, topic)
	if err != nil {
		return nil, err
	}
	ptr, err := b.records.Generation(ctx, t, s.group)
	if err != nil {
		return nil, err
	}
	if ptr.Deleted || ptr.PutBack != queue {
		return nil, event.ErrNotFound
	}
	pt, info, err := b.queues.openQueue(ctx, topic, s.group, queue, ttl && !ptr.Durable, ptr.Paused)
	if err != nil {
		return nil, err
	}
	return b.newGroup(pt, s.group, info, ptr.Revision, past{}), nil
}

// addQueue makes the second source. s.mu is held.
func (s *Subscription) addQueue(main *member, g *group) {
	q := &member{sub: s, group: g, main: main, obs: event.NopObserver{}}
	if s.keeper == nil {
		q.obs = s.bus.obs.Group(g.topic.Name, s.group, s.opts.GroupTTL > 0)
	}
	s.members = append(slices.Clone(s.members), q)
	s.bus.groups.addMember(g, s)
	if s.running() {
		q.open()
		s.refill()
	}
}

// leaveQueue ends the second source of a member. What was leased from it is dropped silently: its
// acks would find no consumer. s.mu is held.
func (s *Subscription) leaveQueue(main *member) {
	i := slices.IndexFunc(s.members, func(q *member) bool { return q.main == main })
	if i < 0 {
		return
	}
	q := s.members[i]
	q.close(false)
	s.drop(func(d *Delivery) bool { return d.m == q })
	s.members = slices.Delete(slices.Clone(s.members), i, i+1)
	q.obs.Close()
	s.bus.groups.unshare(q.group, s)
}

// requeue looks for the queue anew whose consumer is gone. s.mu is held.
func (m *member) requeue() {
	s, main := m.sub, m.main
	queue := main.queue
	main.queue = ""
	s.leaveQueue(main)
	s.wg.Go(func() {
		// The server says that a consumer was deleted before it is done.
		select {
		case <-time.After(streams.SettleGone):
		case <-s.ctx.Done():
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if main.queue == "" {
			main.takeQueue(queue)
		}
	})
}

// idleQueue reports whether the member is of a queue from which nothing came lately. Such a queue
// gets one place of its subscription's credit and no share. s.mu is held.
func (m *member) idleQueue() bool { return m.main != nil && !m.lively }

// sharers is how many members have a share of the credit. s.mu is held.
func (s *Subscription) sharers() int {
	n := 0
	for _, m := range s.members {
		if !m.idleQueue() {
			n++
		}
	}
	return max(n, 1)
}

// removeLetter has the dead letter of an event removed before the event is handed out, and calls
// then. A redrive removes the letter after it has put the event back; when the hub was lost between
// the two, this does. So for as long as the letter is there, its copy is there too, and no redrive
// puts it back twice. It does not block.
//
// While the letter cannot be removed, the hub keeps the event for notePatience, and then gives it
// back.
func (d *Delivery) removeLetter(began int64, then func()) {
	s, b := d.m.sub, d.group.bus
	s.mu.Lock()
	ended := d.index < 0
	s.mu.Unlock()
	if ended || d.letter.stream == "" {
		then()
		return
	}
	failed := func(err error) {
		if d.patient(began) && d.inTime() {
			b.soon.add(func() { d.removeLetter(began, then) })
			return
		}
		b.often.Log(b.conn.Ctx, slog.LevelWarn, "failed to remove a dead letter whose event was put back; the event is given back", d.Event.Topic+"::"+s.group, slog.String("topic", d.Event.Topic), slog.String("group", s.group), slog.Any("error", err))
		s.mu.Lock()
		if d.index >= 0 {
			d.unseen, d.unseenNak, d.bounced = true, true, true
			s.remove(d, event.Returned)
			s.dropParked()
		}
		s.mu.Unlock()
		then()
	}
	ask := func(what string, body []byte, answered func(*nats.Msg)) {
		msg := &nats.Msg{Subject: b.conn.API + what + d.letter.stream, Data: body}
		err := s.link.AskUntil(msg, b.clock.Now()+int64(records.NoteWait), conn.AskerFunc(func(reply *nats.Msg, err error) {
			if err == nil && conn.NoResponders(reply) {
				err = nats.ErrNoResponders
			}
			if err != nil {
				failed(err)
				return
			}
			answered(reply)
		}))
		if err != nil {
			failed(err)
		}
	}
	find, err := json.Marshal(map[string]any{"seq": d.letter.seq})
	if err != nil {
		panic(err) // numbers can be encoded
	}
	remove, err := json.Marshal(map[string]any{"seq": d.letter.seq, "no_erase": true})
	if err != nil {
		panic(err)
	}
	ask("STREAM.MSG.GET.", find, func(reply *nats.Msg) {
		stored, err := conn.ParseStored(reply)
		switch {
		case errors.Is(err, event.ErrNotFound), err == nil && stored.Time.UnixNano() != d.letter.at:
			then() // it is gone, and what is there now is another
			return
		case err != nil:
			failed(err)
			return
		}
		ask("STREAM.MSG.DELETE.", remove, func(reply *nats.Msg) {
			var got struct {
				Error *conn.APIError `json:"error"`
			}
			if err := json.Unmarshal(reply.Data, &got); err != nil {
				failed(err)
				return
			}
			if got.Error != nil { // perhaps another hub was first: the next look tells
				failed(got.Error)
				return
			}
			then()
		})
	})
}
