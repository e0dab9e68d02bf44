package jetstream

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"

	"eventhub/jetstream/event"
	"eventhub/jetstream/ordered"
)

// lending is an event on its way from the owner of its group to a member.
type lending struct {
	loan      *loan
	event     event.Event
	attempt   int
	delivered int // how often the server has given the event to a hub
	seq       uint64
	size      int // of the message
	group     *group
}

// errLending says that another hub sent something that cannot be read.
var errLending = errors.New("jetstream: not an event of an ordered group")

// appendTo appends the event for another hub: for its place with that number. Of the event, it has
// what does not follow from the group.
func (l *lending) appendTo(b []byte, place uint64) []byte {
	e := &l.event
	flags := uint64(0)
	if e.Tombstone {
		flags |= 1
	}
	if e.Gone {
		flags |= 2
	}
	slot := ordered.NoSlot
	if e.HasPartition {
		slot = e.Partition
	}
	for _, v := range [...]uint64{l.loan.number, place, uint64(slot + 1), uint64(l.attempt), uint64(l.delivered), l.seq, uint64(l.size), flags, e.Sequence, uint64(e.StoredAt), uint64(e.TS)} { //nolint:gosec // read by take as what they were
		b = binary.AppendUvarint(b, v)
	}
	stream := e.Stream
	if stream == l.group.topic.Stream.Name {
		stream = ""
	}
	for _, s := range [...]string{stream, e.ID, e.Key, e.SID} {
		b = appendText(b, s)
	}
	for _, list := range [...][]string{e.CausedBy, e.Tags} {
		b = binary.AppendUvarint(b, uint64(len(list)))
		for _, s := range list {
			b = appendText(b, s)
		}
	}
	b = binary.AppendUvarint(b, uint64(len(e.Headers)))
	for name, value := range e.Headers {
		b = appendText(appendText(b, name), value)
	}
	return append(binary.AppendUvarint(b, uint64(len(e.Payload))), e.Payload...)
}

func appendText(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// lendings reads events that another hub has lent.
type lendings struct {
	left []byte
	bad  bool
}

func (r *lendings) number() uint64 {
	v, n := binary.Uvarint(r.left)
	if n <= 0 {
		r.bad = true
		return 0
	}
	r.left = r.left[n:]
	return v
}

func (r *lendings) bytes() []byte {
	n := r.number()
	if n > uint64(len(r.left)) {
		r.bad = true
		return nil
	}
	b := r.left[:n:n]
	r.left = r.left[n:]
	return b
}

// count reads how many of something follow, each of which has one byte at least.
func (r *lendings) count() int {
	n := r.number()
	if n > uint64(len(r.left)) {
		r.bad = true
		return 0
	}
	return int(n) //nolint:gosec // it is no more than a length
}

func (r *lendings) list() []string {
	n := r.count()
	if n == 0 {
		return nil
	}
	list := make([]string, n)
	for i := range list {
		list[i] = string(r.bytes())
	}
	return list
}

// next reads one event, and the number of the place that it is for.
func (r *lendings) next(g *group) (l lending, number, place uint64, err error) {
	l.group = g
	e := &l.event
	number, place = r.number(), r.number()
	slot := int(min(r.number(), math.MaxInt32)) - 1   //nolint:gosec // it is bounded
	l.attempt = int(min(r.number(), math.MaxInt32))   //nolint:gosec // it is bounded
	l.delivered = int(min(r.number(), math.MaxInt32)) //nolint:gosec // it is bounded
	l.seq = r.number()
	l.size = int(min(r.number(), math.MaxInt32)) //nolint:gosec // it is bounded
	flags := r.number()
	e.Topic, e.Tombstone, e.Gone = g.topic.Name, flags&1 != 0, flags&2 != 0
	e.Sequence, e.StoredAt, e.TS = r.number(), int64(r.number()), int64(r.number()) //nolint:gosec // as they were written
	if slot != ordered.NoSlot {
		e.Partition, e.HasPartition = slot, true
	}
	if e.Stream = string(r.bytes()); e.Stream == "" {
		e.Stream = g.topic.Stream.Name
	}
	e.ID, e.Key, e.SID = string(r.bytes()), string(r.bytes()), string(r.bytes())
	e.CausedBy, e.Tags = r.list(), r.list()
	if n := r.count(); n > 0 {
		e.Headers = make(map[string]string, n)
		for range n {
			name := string(r.bytes())
			e.Headers[name] = string(r.bytes())
		}
	}
	all := len(r.left)
	if e.Payload = r.bytes(); len(e.Payload) < all/2 {
		e.Payload = bytes.Clone(e.Payload) // or it would keep what else is in the message
	}
	if r.bad {
		return lending{}, 0, 0, errLending
	}
	return l, number, place, nil
}
