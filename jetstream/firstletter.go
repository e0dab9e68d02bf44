package jetstream

import (
	"log/slog"
	"sync"

	"eventhub/jetstream/native"
)

// maxFirstLetters is the maximum number of groups that are known to have a dead letter. Beyond it,
// all are forgotten, and their next dead letters are logged again.
const maxFirstLetters = 10_000

// firstLetters logs the first dead letter of each group since the hub started. Its methods may be
// called concurrently.
type firstLetters struct {
	mu    sync.Mutex
	known map[[2]string]struct{} // topic and group
}

// first reports whether the group has had no dead letter so far.
func (f *firstLetters) first(topic, group string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	pair := [2]string{topic, group}
	if _, ok := f.known[pair]; ok {
		return false
	}
	if f.known == nil || len(f.known) >= maxFirstLetters {
		f.known = make(map[[2]string]struct{})
	}
	f.known[pair] = struct{}{}
	return true
}

// noteLetter logs a dead letter that was stored, if it is the first of its group.
func (p *publishing) noteLetter(l deadEvent) {
	if p.firstLetters.first(l.original.Topic, l.group) {
		p.log.Warn("first dead letter of a group", slog.String("topic", l.original.Topic), slog.String("group", l.group),
			slog.String("event", l.original.ID), slog.Int("attempts", l.attempts), slog.String("letters", native.DeadLetterPrefix+l.original.Topic))
	}
}
