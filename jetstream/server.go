package jetstream

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/publish"
	"eventhub/jetstream/native"
)

// Server is a NATS server that runs in this process, for Config.Server. Package embedded implements
// it. This package does not import embedded, so a program that connects to a NATS elsewhere links
// no server.
type Server interface {
	// Connection returns the URL, which may be empty, and the options with which the bus connects.
	Connection() (url string, options []nats.Option)
	// ClientURL returns the address at which native clients reach the server, or "" if the server
	// does not listen.
	ClientURL() string
	// InMemory reports whether the server keeps nothing on disk. All streams of the bus are then in
	// memory, whatever Config.MemoryStorage and the rules say.
	InMemory() bool
	// DiskFree returns how many bytes the server can still write to its disk.
	DiskFree(ctx context.Context) (uint64, error)
	// Tend looks after the server until ctx ends. After a restart of the server, Tend calls
	// restarted with a connection to the new server, before the bus can reach it. When the state of
	// the streams changes, Tend calls failing with the number of streams that cannot be written (0
	// for all of them) and the cause. An empty cause means that all streams can be written.
	Tend(ctx context.Context, restarted func(context.Context, *nats.Conn), failing func(streams int, cause string))
	// Close ends the server. It may be called twice.
	Close() error
}

// StorageError is returned by Bus.Ready while the server in this process cannot store events. Its
// text names no topic and no path.
type StorageError struct {
	// Streams is the number of streams that cannot be written, or 0 for all streams.
	Streams int
	// Cause is the cause, in the words of the operating system.
	Cause string
}

// Error implements error.
func (e *StorageError) Error() string {
	switch e.Streams {
	case 0:
		return "the streams cannot be written: " + e.Cause
	case 1:
		return "a stream cannot be written: " + e.Cause
	default:
		return fmt.Sprintf("%d streams cannot be written: %s", e.Streams, e.Cause)
	}
}

// serverFailing notes whether the server can write its streams.
func (c *core) serverFailing(streams int, cause string) {
	if cause == "" {
		c.unstored.Store(nil)
		c.obs.Gauge(event.GaugeStreamsFailed, 0)
		return
	}
	c.unstored.Store(&StorageError{Streams: streams, Cause: cause})
	c.obs.Gauge(event.GaugeStreamsFailed, float64(max(1, streams)))
}

// serverRestarted makes a server ready that has just been restarted. For the bus it is as if a NATS
// of its own had been: what was leased is given up and comes again, and what was confirmed is on
// the disk.
func (b *Bus) serverRestarted(ctx context.Context, nc *nats.Conn) {
	b.obs.ServerRestarted()
	js, err := natsjs.New(nc)
	if err == nil {
		err = endOldLeases(ctx, js)
	}
	if err != nil {
		b.log.WarnContext(ctx, "failed to end all leases from before the restart; the rest ends after AckWait", slog.Any("error", err))
	}
}

// oldLeasesWait bounds what a start spends on old leases. Those that it does not come to end after
// AckWait.
const oldLeasesWait = 5 * time.Second

// endOldLeases gives back what hubs had leased when the server last stopped. The server remembers
// what was delivered but not what was refused, so without this even leases that a hub had handed
// back in order would wait for AckWait. It is right here only: the server was just started, so no
// hub holds a lease of it. Consumers that native clients made are left alone, for those clients
// keep what they hold. So are events that were refused with a delay: those the server remembers.
func endOldLeases(ctx context.Context, js natsjs.JetStream) error {
	ctx, cancel := context.WithTimeout(ctx, oldLeasesWait)
	defer cancel()
	nc := js.Conn()
	delayed, err := readDelays(ctx, js)
	if err != nil {
		return err
	}
	streams := js.ListStreams(ctx)
	for s := range streams.Info() {
		if s.State.Consumers == 0 {
			continue
		}
		handle, err := js.Stream(ctx, s.Config.Name)
		if err != nil {
			return err
		}
		consumers := handle.ListConsumers(ctx)
		for c := range consumers.Info() {
			_, ours := c.Config.Metadata[native.MetaGroup]
			_, due := c.Config.Metadata[publish.MetaDue]
			if !ours && !due || c.NumAckPending == 0 {
				continue
			}
			// The server looks naks up by stream sequence; those of events that are settled have no
			// effect.
			for seq := c.AckFloor.Stream + 1; seq <= c.Delivered.Stream && ctx.Err() == nil; seq++ {
				if delayed[native.NoteKey(s.Config.Name, c.Name, native.ConsumerMade(c), seq)] {
					continue
				}
				subject := fmt.Sprintf("$JS.ACK.%s.%s.1.%d.%d.0.0", s.Config.Name, c.Name, seq, c.Delivered.Consumer)
				if err := nc.Publish(subject, conn.NakNow); err != nil {
					return err
				}
			}
		}
		if err := consumers.Err(); err != nil {
			return err
		}
	}
	if err := streams.Err(); err != nil {
		return err
	}
	return nc.FlushWithContext(ctx)
}
