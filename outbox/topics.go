package outbox

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"time"
)

// A topic that does not answer, such as one whose stream has no leader, must not take all
// goroutines and all room for records until its publishes time out. Three rules ensure this:
//
//   - A topic uses at most three quarters of the goroutines that other topics leave.
//   - While a publish of a topic waits for longer than stallAfter, the topic stalls: the drainer
//     gives back all its records that are not being published, and claims no more.
//   - After a publish failed without an answer, the topic is paused. After the pause, a single
//     record probes it.

const (
	stallAfter = 300 * time.Millisecond
	stallCheck = 100 * time.Millisecond // how often the drainer looks for stalls
)

// topics is what the loop knows of the topics that it publishes to.
type topics struct {
	running map[string]map[*job]struct{} // jobs that goroutines have begun, by topic
	busy    int                          // number of these jobs
	stalled map[string]bool
	checkAt time.Duration // time of the next search for stalls
	paused  map[string]*topicPause
}

// topicPause suspends claims of a topic that rejected events while NATS accepted events of other
// topics.
type topicPause struct {
	until, gap time.Duration
}

// maxPaused is the maximum number of paused topics. Further failing topics keep being tried.
const maxPaused = 1_000

// exceptTopics returns the topics to claim nothing of, and forgets old pauses.
func (l *loop) exceptTopics(now time.Duration) []string {
	list, probed := slices.Collect(maps.Keys(l.stalled)), l.probed()
	full := len(probed) >= l.maxProbes()
	for topic, p := range l.paused {
		switch {
		case l.stalled[topic]:
		case now < p.until, full, probed[topic]:
			list = append(list, topic)
		case now > p.until+2*againMax:
			delete(l.paused, topic) // tried since without a failure, or nothing left to publish
		}
	}
	return list[:min(len(list), maxPaused)]
}

// maxProbes is the maximum number of paused topics that are probed at a time.
func (l *loop) maxProbes() int { return max(1, l.cfg.InFlight/4) }

// probed returns the paused topics of which a record is published, or is about to be.
func (l *loop) probed() map[string]bool {
	set := make(map[string]bool)
	for topic := range l.running {
		if l.paused[topic] != nil {
			set[topic] = true
		}
	}
	for _, j := range l.ready {
		if l.paused[j.topic] != nil {
			set[j.topic] = true
		}
	}
	return set
}

// mayStart reports whether a goroutine may begin another job of a topic.
func (l *loop) mayStart(topic string) bool {
	own := len(l.running[topic])
	free := l.cfg.InFlight - (l.busy - own)
	return !l.stalled[topic] && own < max(1, (3*free+3)/4)
}

// pick returns the index in ready of the next job to begin, or -1.
func (l *loop) pick() int {
	refused := ""
	return slices.IndexFunc(l.ready, func(j *job) bool {
		if j.topic == refused {
			return false
		}
		ok := l.mayStart(j.topic)
		if !ok {
			refused = j.topic
		}
		return ok
	})
}

// begin notes that a goroutine has begun the job with this index in ready.
func (l *loop) begin(i int) {
	j := l.ready[i]
	l.ready = slices.Delete(l.ready, i, i+1)
	if len(l.running) == 0 {
		l.checkAt = l.now() + stallCheck
	}
	if l.running[j.topic] == nil {
		l.running[j.topic] = make(map[*job]struct{})
	}
	l.running[j.topic][j] = struct{}{}
	l.busy++
}

// ran notes that a goroutine has finished a job.
func (l *loop) ran(j *job) {
	l.busy--
	jobs := l.running[j.topic]
	if delete(jobs, j); len(jobs) == 0 {
		delete(l.running, j.topic)
	}
	if l.stalled[j.topic] && !l.stalls(j.topic) {
		l.goOn(j.topic)
	}
}

// goOn ends the stall of a topic. Its records may be claimed again.
func (l *loop) goOn(topic string) {
	delete(l.stalled, topic)
	if l.idle {
		l.idle, l.claimAt = false, l.now()
	}
}

func (l *loop) stalls(topic string) bool {
	now := l.now()
	for j := range l.running[topic] {
		if j.stalls(now, l.stallAfter) {
			return true
		}
	}
	return false
}

// findStalls gives back the records of topics that stall and are not being published.
func (l *loop) findStalls() {
	l.checkAt = l.now() + stallCheck
	for topic, jobs := range l.running {
		switch {
		case l.stalls(topic):
			l.stalled[topic] = true
			l.giveBack(func(j *job) bool { return j.topic == topic })
			for j := range jobs {
				l.giveBackRecords(j, j.cut())
			}
		case l.stalled[topic]:
			l.goOn(topic)
		}
	}
}

// room returns how many more records and bytes the drainer may hold, and whether that is enough for
// a claim. What stalls takes at most three quarters.
func (l *loop) room() (records, bytes int, enough bool) {
	var stuck, stuckBytes int
	for topic := range l.stalled {
		for j := range l.running[topic] {
			for _, r := range j.all() {
				stuck++
				stuckBytes += len(r.Payload)
			}
		}
	}
	space := l.cfg.BatchSize - min(stuck, l.cfg.BatchSize*3/4)
	spaceBytes := l.cfg.HeldBytes - min(stuckBytes, l.cfg.HeldBytes*3/4)
	records, bytes = space-(l.records-stuck), spaceBytes-(l.bytes-stuckBytes)
	return records, bytes, 2*records >= space && 2*bytes >= spaceBytes
}

// missed stops all claims when NATS is unavailable, or pauses a single topic when only that topic
// fails.
func (l *loop) missed(ctx context.Context, o *outcome) {
	if ctx.Err() != nil || l.away {
		return
	}
	err := l.busReady(ctx)
	if err != nil {
		l.away, l.idle = true, false
		l.claimAt = l.again(&l.awayGap)
		l.giveBack(func(*job) bool { return true })
		l.often.Log(ctx, slog.LevelWarn, "event bus is unavailable; pausing", "", slog.Any("error", o.away))
		return
	}
	p := l.paused[o.topic]
	switch {
	case p == nil && len(l.paused) >= maxPaused:
		return
	case p == nil:
		p = &topicPause{gap: againFirst}
		l.paused[o.topic] = p
	case o.began < p.until:
		return // the publish began before the pause, so it says nothing new
	}
	p.until = l.again(&p.gap)
	l.idle, l.claimAt = false, min(l.claimAt, p.until)
	l.giveBack(func(j *job) bool { return j.topic == o.topic })
	l.often.Log(ctx, slog.LevelWarn, "topic rejects events; pausing it", o.topic, slog.String("topic", o.topic), slog.Any("error", o.away))
}

// giveBack releases the jobs that match which and that no goroutine has begun.
func (l *loop) giveBack(which func(*job) bool) {
	l.ready = slices.DeleteFunc(l.ready, func(j *job) bool {
		if !which(j) {
			return false
		}
		l.giveUp(j)
		return true
	})
}

// giveUp releases a job that no goroutine has begun.
func (l *loop) giveUp(j *job) {
	for _, r := range j.records {
		if l.owner[r.ref()] == j {
			l.unsaved.Failed = append(l.unsaved.Failed, Failure{Record: r, Unsent: j.fresh(r)})
		}
	}
	l.end(j)
}

// giveBackRecords releases records that were cut from a job.
func (l *loop) giveBackRecords(from *job, records []*Record) {
	if len(records) == 0 {
		return
	}
	j := &job{topic: from.topic, noted: from.noted, records: records}
	for _, r := range records {
		if l.owner[r.ref()] == from {
			l.owner[r.ref()] = j
		}
	}
	l.held[j] = struct{}{}
	l.giveUp(j)
}

// enqueue adds the jobs of a claim to ready. Of a paused topic it takes only one record, to probe
// the topic, and gives back the others.
func (l *loop) enqueue(jobs []*job) {
	probed := l.probed()
	for _, j := range jobs {
		switch {
		case l.paused[j.topic] == nil:
			l.ready = append(l.ready, j)
		case probed[j.topic] || len(probed) >= l.maxProbes():
			l.giveUp(j)
		default:
			probed[j.topic] = true
			rest := j.records[1:]
			j.records = j.records[:1:1]
			l.giveBackRecords(j, rest)
			l.ready = append(l.ready, j)
		}
	}
}
