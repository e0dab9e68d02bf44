package jetstream

import (
	"cmp"
	"context"
	"time"
)

// Admin is what operators ask of a bus, and do to its streams. It is a small value that costs
// nothing to make. Its methods may be called concurrently. Their errors are for operators: they
// name the server and the cause.
type Admin struct{ bus *Bus }

// Admin gives access to the streams behind the topics.
func (b *Bus) Admin() Admin { return Admin{b} }

// NATSURL is where native clients reach Config.Server, or "" without one, and when it does not
// listen.
func (a Admin) NATSURL() string {
	if a.bus.cfg.Server == nil {
		return ""
	}
	return a.bus.cfg.Server.ClientURL()
}

// Now is the time by the clock of NATS, with which the moments of storage are told. In a cluster
// each server has its own: it is that of the server which leads the bucket of the groups.
func (a Admin) Now(ctx context.Context) (time.Time, error) {
	info, err := a.bus.findStream(ctx, "KV_"+groupsBucket)
	if err != nil {
		return time.Time{}, a.bus.unavailable(err)
	}
	return info.TimeStamp, nil
}

// Snapshots are the rules in force that ask for snapshots, each of one topic, the built-in ones
// included. Every is filled in.
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
