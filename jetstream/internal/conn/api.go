package conn

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/event"
)

// Subjects returns the subjects of one of the hub's buckets that match a filter, at its leader.
func (p *Pool) Subjects(ctx context.Context, bucket, filter string) (map[string]uint64, error) {
	var info struct {
		Error *APIError `json:"error"`
		State struct {
			Subjects map[string]uint64 `json:"subjects"`
		} `json:"state"`
	}
	if err := p.AskAPI(ctx, "STREAM.INFO.KV_"+bucket, map[string]any{"subjects_filter": filter}, &info); err != nil {
		return nil, err
	}
	if info.Error != nil {
		return nil, info.Error
	}
	return info.State.Subjects, nil
}

// AskAPI asks JetStream something that may be asked twice.
func (p *Pool) AskAPI(ctx context.Context, what string, query, into any) error {
	req, err := json.Marshal(query)
	if err != nil {
		return err
	}
	reply, err := Again(ctx, func(ctx context.Context) (*nats.Msg, error) { return p.Link().Request(ctx, p.API+what, req) })
	if err != nil {
		return fmt.Errorf("jetstream: %s: %w", what, err)
	}
	if NoResponders(reply) {
		return fmt.Errorf("jetstream: %s: %w", what, nats.ErrNoResponders)
	}
	return json.Unmarshal(reply.Data, into)
}

// Purge removes the messages of a subject from one of the hub's buckets, up to a sequence if that
// is not 0. Unlike the deletion of a key, it leaves nothing behind.
func (p *Pool) Purge(ctx context.Context, bucket, subject string, upTo uint64) error {
	before := uint64(0)
	if upTo > 0 {
		before = upTo + 1
	}
	_, err := p.PurgeStream(ctx, "KV_"+bucket, subject, before)
	return err
}

// PurgeStream removes the messages of a stream, those of a subject if it is not "", and those
// before a sequence if that is not 0. It returns how many.
func (p *Pool) PurgeStream(ctx context.Context, stream, subject string, before uint64) (uint64, error) {
	query := make(map[string]any)
	if subject != "" {
		query["filter"] = subject
	}
	if before > 0 {
		query["seq"] = before
	}
	var got struct {
		Error  *APIError `json:"error"`
		Purged uint64    `json:"purged"`
	}
	if err := p.AskAPI(ctx, "STREAM.PURGE."+stream, query, &got); err != nil {
		return 0, err
	}
	if got.Error != nil {
		return 0, got.Error
	}
	return got.Purged, nil
}

// RemoveMsg removes a message at the leader of its stream; one that is gone is no error. The
// server marks it as removed on the disk, which a kill survives; to overwrite it as well, the
// server would write the whole block anew for each.
func (p *Pool) RemoveMsg(ctx context.Context, stream string, seq uint64) error {
	var got struct {
		Error *APIError `json:"error"`
	}
	if err := p.AskAPI(ctx, "STREAM.MSG.DELETE."+stream, map[string]any{"seq": seq, "no_erase": true}, &got); err != nil {
		return err
	}
	if got.Error == nil {
		return nil
	}
	// The server has no code of its own for what is gone: the next read tells.
	if _, err := p.GetMsg(ctx, stream, map[string]any{"seq": seq}); errors.Is(err, event.ErrNotFound) {
		return nil
	}
	return got.Error
}
