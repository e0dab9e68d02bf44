package jetstream

import (
	"log/slog"
	"time"

	"eventhub/jetstream/internal/records"
)

// sweepGroups removes consumers that seeks have left behind.
func (b *Bus) sweepGroups() {
	tick := time.NewTicker(records.SweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-b.conn.Ctx.Done():
			return
		case <-tick.C:
			if err := b.records.Makers.Sweep(b.conn.Ctx, "", records.SweepAge); err != nil && b.conn.Ctx.Err() == nil {
				b.log.Warn("failed to look for notes of groups that are gone; retrying", slog.Any("error", err))
			}
			if err := b.records.SweepGenerations(b.conn.Ctx, records.DeletedAge); err != nil && b.conn.Ctx.Err() == nil {
				b.log.Warn("failed to look for marks of deleted groups; retrying", slog.Any("error", err))
			}
			if err := b.queues.sweepPutBack(b.conn.Ctx, records.SweepAge); err != nil && b.conn.Ctx.Err() == nil {
				b.log.Warn("failed to look for events that were put back to groups that are gone; retrying", slog.Any("error", err))
			}
			for _, s := range b.streams.All() {
				if err := b.records.SweepStream(b.conn.Ctx, s, records.SweepAge); err != nil && b.conn.Ctx.Err() == nil {
					b.log.Warn("left consumers could not be looked for", slog.String("stream", s.Name), slog.Any("error", err))
				}
			}
		}
	}
}
