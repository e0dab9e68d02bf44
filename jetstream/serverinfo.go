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
	// Errors is how many requests to JetStream have failed, of all programs of the account.
	Errors uint64
}

// Server asks NATS about itself.
func (a Admin) Server(ctx context.Context) (ServerInfo, error) {
	var info ServerInfo
	for _, l := range a.bus.links {
		info.Connections++
		if l.nc.IsConnected() {
			info.Connected++
		}
	}
	nc := a.bus.links[0].nc
	info.Server, info.Version, info.Cluster = nc.ConnectedServerName(), nc.ConnectedServerVersion(), nc.ConnectedClusterName()
	began := time.Now()
	account, err := a.bus.js.AccountInfo(ctx)
	if err != nil {
		return info, a.bus.unavailable(err)
	}
	info.RoundTrip = time.Since(began)
	info.Streams, info.Consumers = account.Streams, account.Consumers
	info.FileBytes, info.MemoryBytes = account.Store, account.Memory
	info.FileLimit, info.MemoryLimit = account.Limits.MaxStore, account.Limits.MaxMemory
	info.Errors = account.API.Errors
	return info, nil
}
