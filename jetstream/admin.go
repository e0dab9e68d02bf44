package jetstream

import "cmp"

// Admin has the operations of operators on the streams of a bus. An Admin is a small value that
// costs nothing to create. Its methods may be called concurrently. Their errors are for operators:
// they name the server and the cause.
type Admin struct{ bus *Bus }

// Admin gives access to the streams behind the topics.
func (b *Bus) Admin() Admin { return Admin{b} }

// Snapshots returns the rules that are in force and request snapshots, the built-in rules included.
// Each is for one topic, and its Every is filled in.
func (a Admin) Snapshots() []TopicRule {
	b := a.bus
	var found []TopicRule
	for i := range b.rules {
		r := b.rules[i]
		if r.Snapshot == nil || b.rule(r.Pattern) != &b.rules[i] {
			continue
		}
		snapshot := *r.Snapshot
		snapshot.Every = cmp.Or(snapshot.Every, defaultSnapshotEvery)
		r.Snapshot = &snapshot
		found = append(found, r)
	}
	return found
}
