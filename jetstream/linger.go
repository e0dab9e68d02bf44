package jetstream

import "sync"

// lingering are closed inboxes whose pulls have not ended.
type lingering struct {
	mu      sync.Mutex
	inboxes map[*inbox]struct{}
}

// clustered reports whether the server that the link is connected to is one of several.
func (l *link) clustered() bool { return l.cluster.Load() }

// linger keeps a closed inbox until its pulls have ended, at the given time at the latest. It reports false when too many
// linger.
func (b *Bus) linger(in *inbox, until int64) bool {
	b.lingering.mu.Lock()
	defer b.lingering.mu.Unlock()
	if len(b.lingering.inboxes) >= b.limits.LingeringInboxes {
		b.obs.LimitReached("lingering_inboxes")
		return false
	}
	in.until = until
	b.lingering.inboxes[in] = struct{}{}
	return true
}

// endLingering ends one inbox.
func (b *Bus) endLingering(in *inbox) {
	b.lingering.mu.Lock()
	_, there := b.lingering.inboxes[in]
	delete(b.lingering.inboxes, in)
	b.lingering.mu.Unlock()
	if there {
		_ = in.sub.Drain() // fails only when the connection is closed
	}
}

// sweepLingering ends the inboxes whose pulls have surely ended.
func (b *Bus) sweepLingering(now int64) {
	var over []*inbox
	b.lingering.mu.Lock()
	for in := range b.lingering.inboxes {
		if in.until <= now {
			over = append(over, in)
		}
	}
	b.lingering.mu.Unlock()
	for _, in := range over {
		in.m.sub.mu.Lock()
		in.ended(in.pulls)
		in.m.sub.mu.Unlock()
		b.endLingering(in)
	}
}

// forgetLingering ends the inboxes of a link that was lost: what waits in buffers is not ours to touch.
func (b *Bus) forgetLingering(l *link) {
	var lost []*inbox
	b.lingering.mu.Lock()
	for in := range b.lingering.inboxes {
		if in.m.sub.link == l {
			lost = append(lost, in)
		}
	}
	b.lingering.mu.Unlock()
	for _, in := range lost {
		in.m.sub.mu.Lock()
		in.forgotten = true
		in.ended(in.pulls)
		in.m.sub.mu.Unlock()
		b.endLingering(in)
	}
}
