package jetstream

import (
	"context"
	"io"
	"strings"
	"time"

	"eventhub/jetstream/native"
)

// MoveTo copies all streams with their consumers to another NATS, which has nothing of a hub. No
// hub and no client may use s meanwhile. The streams of s stay as they are. A move that fails
// removes what it has made, and says if something is left.
func (s *Store) MoveTo(ctx context.Context, to *Store, opts RestoreOptions) error {
	sources, err := s.backups.sources(ctx, opts.Replicas)
	if err != nil {
		return err
	}
	all, done := uint64(0), uint64(0)
	names := make([]string, len(sources))
	for i, from := range sources {
		all += from.info.State.Msgs
		names[i] = from.name
	}
	return to.restore(ctx, opts, names, func(put func(*backedUp, func(io.Writer) error) error) error {
		for _, from := range sources {
			consumers, err := s.backups.readConsumers(ctx, from)
			if err != nil {
				return err
			}
			// the server wants the configuration first
			snapshot, err := s.backups.takeSnapshot(ctx, from.name, false)
			if err != nil {
				return err
			}
			snapshot.close()
			config, err := restoredConfig(snapshot.config, from)
			if err != nil {
				return err
			}
			at := &backedUp{Name: from.name, Created: native.StreamMade(from.info), Config: config, State: restoreState{
				from.info.State.Msgs, from.info.State.Bytes, from.info.State.FirstSeq, from.info.State.LastSeq,
			}}
			at.Consumers = lasting(consumers)
			err = put(at, func(w io.Writer) error {
				written, err := s.backups.copyStream(ctx, from, consumers, time.Time{}, w, func(messages, _ int) {
					done += uint64(messages) //nolint:gosec // 1
					if done%1000 == 0 {
						opts.progress(done, all)
					}
				})
				at.Messages = written.messages
				return err
			})
			if err != nil {
				return err
			}
			opts.progress(done, all)
		}
		return nil
	})
}

// Streams returns how many streams of topics a Store has, and how many messages they hold.
func (s *Store) Streams(ctx context.Context) (streams int, messages uint64, err error) {
	inv, err := listStreams(ctx, s.backups.core)
	if err != nil {
		return 0, 0, err
	}
	for name, info := range inv.byName {
		if !strings.HasPrefix(name, "KV_") {
			streams++
			messages += info.State.Msgs
		}
	}
	return streams, messages, nil
}
