package jetstream

import (
	"context"
	"time"
)

// ServerInfo describes the NATS behind a bus.
type ServerInfo struct {
	// Server and Version are of the server that the bus is connected to, and Cluster is the name of
	// its cluster, or "".
	Server, Version, Cluster string
	// Connected is how many of the bus's connections are up, and Connections is how many there are.
	Connected, Connections int
	// RoundTrip is the time of a question to the server and its answer.
	RoundTrip time.Duration
	// Streams and Consumers are how many the account has, those of other programs included.
	Streams, Consumers int
	// FileBytes and MemoryBytes are the storage in use. FileLimit and MemoryLimit bound them; -1
	// means that the account has no bound of its own.
	FileBytes, MemoryBytes uint64
	FileLimit, MemoryLimit int64
	// DiskFree is how much room the disk of the server in this process has left; nil if the server
	// is elsewhere or keeps nothing on disk.
	DiskFree *uint64
	// Errors is how many requests to JetStream have failed, of all programs of the account.
	Errors uint64
}

// NATS has the requests about the NATS behind a bus. It is a small value that costs nothing to
// create. Its methods may be called concurrently. Their errors are for operators, as those of
// Admin.
type NATS struct{ bus *Bus }

// NATS gives access to the NATS behind the bus.
func (a Admin) NATS() NATS { return NATS(a) }

// URL returns the address at which native clients reach Config.Server, or "" if there is no
// such server or it does not listen.
func (n NATS) URL() string {
	if n.bus.cfg.Server == nil {
		return ""
	}
	return n.bus.cfg.Server.ClientURL()
}

// Now returns the time by the clock of NATS, which stamps stored events. In a cluster each server
// has a clock of its own; Now uses that of the server that leads the bucket of the groups.
func (n NATS) Now(ctx context.Context) (time.Time, error) {
	info, err := n.bus.findStream(ctx, "KV_"+groupsBucket)
	if err != nil {
		return time.Time{}, n.bus.unavailable(err)
	}
	return info.TimeStamp, nil
}

// Info asks NATS about itself.
func (n NATS) Info(ctx context.Context) (ServerInfo, error) {
	var info ServerInfo
	for _, l := range n.bus.links {
		info.Connections++
		if l.nc.IsConnected() {
			info.Connected++
		}
	}
	nc := n.bus.links[0].nc
	info.Server, info.Version, info.Cluster = nc.ConnectedServerName(), nc.ConnectedServerVersion(), nc.ConnectedClusterName()
	began := time.Now()
	account, err := n.bus.js.AccountInfo(ctx)
	if err != nil {
		return info, n.bus.unavailable(err)
	}
	info.RoundTrip = time.Since(began)
	info.Streams, info.Consumers = account.Streams, account.Consumers
	info.FileBytes, info.MemoryBytes = account.Store, account.Memory
	info.FileLimit, info.MemoryLimit = account.Limits.MaxStore, account.Limits.MaxMemory
	info.Errors = account.API.Errors
	if disk, ok := n.bus.cfg.Server.(interface{ DiskFree() (uint64, error) }); ok && !n.bus.cfg.Server.InMemory() {
		if free, err := disk.DiskFree(); err == nil {
			info.DiskFree = &free
		}
	}
	return info, nil
}
