package jetstream

import (
	"context"
	"errors"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/publish"
)

// toTopics publishes the events of a batch on their topics.
func (r *redrive) toTopics(ctx context.Context, batch []*Letter) error {
	d := r.letters
	known, err := r.published(ctx, batch)
	if err != nil {
		return err
	}
	for _, l := range batch {
		now, err := r.current(ctx, l)
		if err != nil {
			return err
		}
		if now == nil {
			r.result.skip("another redrive or discard was first, or the letter was removed by retention")
			continue
		}
		ready, why, err := r.prepare(ctx, now)
		if err != nil {
			return err
		}
		if why != "" {
			r.result.skip(why)
			continue
		}
		if !known[topicID(ready.ref)] {
			why, err := r.publish(ctx, ready)
			if err != nil {
				return err
			}
			if why != "" {
				r.result.skip(why)
				continue
			}
		}
		if err := d.conn.RemoveMsg(ctx, l.Stream, l.Sequence); err != nil {
			return d.conn.Unavailable(err)
		}
		r.result.Done++
	}
	return nil
}

// topicID is the id of the event that a letter becomes on its topic. A redrive that is repeated
// makes the same.
func topicID(ref letterRef) string { return "redrive:" + ref.token() }

// publish publishes the event of a letter, or says why it cannot be.
func (r *redrive) publish(ctx context.Context, l *letter) (why string, err error) {
	e := &l.event
	payload := e.Payload
	if e.Tombstone {
		payload = nil
	}
	opts := PublishOptions{
		ID: topicID(l.ref), TS: e.TS, HasTS: true, Key: e.Key, SID: e.SID, Headers: e.Headers, Tags: e.Tags,
		CausedBy: append(append([]string{}, e.CausedBy...), e.ID), Tombstone: e.Tombstone, Wrapper: true,
	}
	for try := 1; ; try++ {
		_, err = r.letters.publishers.Own().Publish(ctx, l.topic, payload, (*publish.Options)(&opts))
		refused, known := errors.AsType[*event.Error](err)
		switch {
		case err == nil:
			return "", nil
		case known && (refused.Code == event.CodeBadOptions || errors.Is(err, event.ErrTooLarge) || conn.TooLarge(err)):
			return refused.Msg, nil
		case !known || refused.Code != event.CodePublishFailed && refused.Code != event.CodeInternal || ctx.Err() != nil || Refused(err) || try == redriveTries:
			return "", err
		}
		// the id makes it safe to repeat
		if err := r.letters.conn.Pause(ctx, min(50*time.Millisecond<<try, time.Second)); err != nil {
			return "", err
		}
	}
}

// published returns which events of the first batch an earlier redrive has published before it
// could remove their letters, by their ids.
func (r *redrive) published(ctx context.Context, batch []*Letter) (map[string]bool, error) {
	if r.looked {
		return nil, nil
	}
	r.looked = true
	ids := make(map[string][]string)
	since := make(map[string]int64)
	for _, l := range batch {
		ids[l.Topic] = append(ids[l.Topic], topicID(l.ref()))
		if at, ok := since[l.Topic]; !ok || l.StoredAt < at {
			since[l.Topic] = l.StoredAt
		}
	}
	known := make(map[string]bool)
	for topic, of := range ids {
		found, _, err := History{r.letters.reads, topic}.FindIDs(ctx, IDSearch{IDs: of, Since: time.Unix(0, since[topic])})
		if err != nil {
			return nil, err
		}
		for id := range found {
			known[id] = true
		}
	}
	return known, nil
}
