package facade

import "eventhub/facade/textmsg"

const (
	// turnCost is the size in bytes of a reply that waits for its turn, without its text.
	turnCost = 64
	// maxKeptTurns is the longest list of turns that is reused.
	maxKeptTurns = 64
)

// replyTo is the destination of a reply. A reply with a corr goes out at once. Replies without a
// corr keep the order of their frames: a frame that is answered later takes a turn when it arrives.
// The zero replyTo is for a reply without a corr that is ready now.
type replyTo struct {
	corr []byte // as sent; nil for none
	turn uint64 // 0: no turn was taken
}

// turns are the replies without a corr that wait for an earlier reply. Guarded by a writer's mu.
type turns struct {
	list  []turn
	first int    // index in list of the oldest turn that is not answered
	taken uint64 // how many turns were taken; the last one is the last in list
}

// turn is a reply without a corr.
type turn struct {
	reply []byte        // framed; nil until it is answered
	sent  chan struct{} // closed when the reply is queued or dropped; nil while nobody waits
}

// waiting reports whether a reply without a corr must wait for an earlier one.
func (t *turns) waiting() bool { return t.first < len(t.list) }

// take adds a turn behind all others and returns its number.
func (t *turns) take() uint64 {
	t.list = append(t.list, turn{})
	t.taken++
	return t.taken
}

// get returns the turn with a number that take returned, or nil if its reply has been queued.
func (t *turns) get(number uint64) *turn {
	behind := t.taken - number                 // how many turns were taken later
	if behind >= uint64(len(t.list)-t.first) { //nolint:gosec // not negative
		return nil
	}
	return &t.list[len(t.list)-1-int(behind)] //nolint:gosec // below len
}

// pop removes the oldest turn if it is answered.
func (t *turns) pop() (turn, bool) {
	if !t.waiting() || t.list[t.first].reply == nil {
		return turn{}, false
	}
	next := t.list[t.first]
	t.list[t.first] = turn{}
	t.first++
	switch {
	case t.first == len(t.list) && cap(t.list) > maxKeptTurns:
		t.list, t.first = nil, 0
	case t.first == len(t.list):
		t.list, t.first = t.list[:0], 0
	case t.first > maxKeptTurns && t.first > len(t.list)/2:
		n := copy(t.list, t.list[t.first:])
		clear(t.list[n:])
		t.list, t.first = t.list[:n], 0
	}
	return next, true
}

// replyTo returns the destination of a reply that is not ready yet. Without a corr, the caller must
// answer exactly once: later replies wait.
func (o *writer) replyTo(corr []byte) replyTo {
	if corr != nil {
		return replyTo{corr: corr}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closing {
		return replyTo{}
	}
	return replyTo{turn: o.turns.take()}
}

// sent returns a channel that is closed when the reply has been queued for the socket, or when the
// connection has ended. It returns nil if either has already happened.
func (o *writer) sent(to replyTo) <-chan struct{} {
	if to.turn == 0 {
		return nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	t := o.turns.get(to.turn)
	if t == nil {
		return nil
	}
	if t.sent == nil {
		t.sent = make(chan struct{})
	}
	return t.sent
}

// parkLocked keeps a framed reply without a corr until its turn, and queues the replies whose turn
// has come.
func (o *writer) parkLocked(to replyTo, framed []byte) {
	number := to.turn
	if number == 0 {
		number = o.turns.take()
	}
	t := o.turns.get(number)
	if t == nil || t.reply != nil {
		return // already answered
	}
	t.reply = framed
	o.replies += len(framed) + turnCost
	for next, ok := o.turns.pop(); ok; next, ok = o.turns.pop() {
		o.unparkLocked(next)
	}
}

// unparkLocked queues the reply of a turn.
func (o *writer) unparkLocked(t turn) {
	o.replies -= len(t.reply) + turnCost
	b := o.batchLocked()
	n := len(b.arena)
	b.arena = append(b.arena, t.reply...)
	o.replyLocked(b, n)
	if t.sent != nil {
		close(t.sent)
	}
}

// dropTurnsLocked drops the waiting replies when the connection ends. The frame of the oldest turn
// was never answered, and a client takes a reply without a corr for the answer to its oldest open
// frame.
func (o *writer) dropTurnsLocked() {
	for _, t := range o.turns.list[o.turns.first:] {
		if t.reply != nil {
			o.replies -= len(t.reply) + turnCost
		}
		if t.sent != nil {
			close(t.sent)
		}
	}
	o.turns = turns{}
}

// framedOK returns an OK frame without a corr as a message.
func framedOK(id string) []byte { return textmsg.End(appendOK(textmsg.Begin(nil), nil, id), 0) }

// framedErr returns an ERR frame without a corr as a message.
func framedErr(c code, msg string, final bool) []byte {
	return textmsg.End(appendErr(textmsg.Begin(nil), nil, c, msg, final), 0)
}
