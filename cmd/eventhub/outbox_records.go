package main

import (
	"context"
	"encoding/json"

	"eventhub/jetstream"
	"eventhub/ops"
	"eventhub/outbox"
)

// outboxesOf shows the outboxes of a hub to operators.
type outboxesOf struct{ hub *hub }

var _ ops.Outboxes = outboxesOf{}

// open returns an open outbox of the hub by its name in the metrics.
func (o outboxesOf) open(name string) (*openedOutbox, error) {
	var box *openedOutbox
	switch {
	case name == outboxOfHTTP && o.hub.own != nil:
		box = o.hub.own.opened()
	case name == outboxOfDSN && o.hub.database != nil:
		box = o.hub.database.opened.Load()
	}
	if box == nil {
		return nil, jetstream.ErrNotFound
	}
	return box, nil
}

// List implements ops.Outboxes.
func (o outboxesOf) List(ctx context.Context, name string, q ops.RecordQuery) ([]ops.OutboxRecord, error) {
	box, err := o.open(name)
	if err != nil {
		return nil, err
	}
	found, err := box.List(ctx, outbox.ListOptions{Status: outbox.Status(q.Status), After: q.After, Limit: q.Limit})
	if err != nil {
		return nil, box.explain(err)
	}
	list := make([]ops.OutboxRecord, len(found))
	for i, r := range found {
		if !json.Valid(r.Payload) { // possible in a row written without Add
			r.Payload, _ = json.Marshal(string(r.Payload)) //nolint:errchkjson // strings always marshal
		}
		list[i] = ops.OutboxRecord{
			ID: r.ID, Topic: r.Topic, Key: r.Key, Sequence: r.Sequence, Status: string(r.Status), Attempts: r.Attempts, Err: r.LastErr,
			AddedTS: r.AddedAt, NextTS: r.NextAt, SentTS: r.SentAt, Payload: r.Payload, Headers: r.Headers,
		}
	}
	return list, nil
}

// Retry implements ops.Outboxes.
func (o outboxesOf) Retry(ctx context.Context, name, id string) (int, error) {
	box, err := o.open(name)
	if err != nil {
		return 0, err
	}
	var ids []string
	if id != "" {
		ids = []string{id}
	}
	n, err := box.Retry(ctx, ids...)
	if err != nil {
		return 0, box.explain(err)
	}
	return n, nil
}

// Discard implements ops.Outboxes.
func (o outboxesOf) Discard(ctx context.Context, name, topic, id string) (int, error) {
	box, err := o.open(name)
	if err != nil {
		return 0, err
	}
	n, err := box.Purge(ctx, outbox.PurgeOptions{Status: outbox.Errored, Topic: topic, IDs: []string{id}})
	if err != nil {
		return 0, box.explain(err)
	}
	return n, nil
}
