package jetstream

import (
	"sync"
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
