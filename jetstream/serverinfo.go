package jetstream

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
	"eventhub/jetstream/topics"
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
	// FileLeft and MemoryLeft are how much may still be stored: up to the bound of the account,
	// and for Config.Server up to the end of the disk. -1 means that no bound is known.
	FileLeft, MemoryLeft int64
	// FileLow and MemoryLow are set while clients store nothing for want of room (StorageLow).
	FileLow, MemoryLow bool
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
	info, err := n.bus.conn.FindStream(ctx, "KV_"+native.GroupsBucket)
	if err != nil {
		return time.Time{}, n.bus.conn.Unavailable(err)
	}
	return info.TimeStamp, nil
}

// Info asks NATS about itself.
func (n NATS) Info(ctx context.Context) (ServerInfo, error) {
	fileLow, memoryLow := n.StorageLow()
	info, err := n.bus.askNATS(ctx)
	info.FileLow, info.MemoryLow = fileLow, memoryLow
	return info, err
}

// StorageLow reports whether clients store nothing now, because the files or the memory of NATS
// have no room left beyond Limits.StorageReserve.
func (n NATS) StorageLow() (file, memory bool) {
	return n.bus.streams.Headrooms.File.Low.Load(), n.bus.streams.Headrooms.Memory.Low.Load()
}

// stored asks NATS how much it stores, and may still store.
func (c *core) stored(ctx context.Context) (file, memory streams.Storage, err error) {
	info, err := c.askNATS(ctx)
	return streams.Storage{Used: info.FileBytes, Left: info.FileLeft}, streams.Storage{Used: info.MemoryBytes, Left: info.MemoryLeft}, err
}

// askNATS asks NATS about itself. FileLow and MemoryLow are left false.
func (c *core) askNATS(ctx context.Context) (ServerInfo, error) {
	var info ServerInfo
	for _, l := range c.conn.Links {
		info.Connections++
		if l.NC.IsConnected() {
			info.Connected++
		}
	}
	nc := c.conn.Links[0].NC
	info.Server, info.Version, info.Cluster = nc.ConnectedServerName(), nc.ConnectedServerVersion(), nc.ConnectedClusterName()
	began := time.Now()
	account, err := c.conn.JS.AccountInfo(ctx)
	if err != nil {
		return info, c.conn.Unavailable(err)
	}
	info.RoundTrip = time.Since(began)
	info.Streams, info.Consumers = account.Streams, account.Consumers
	info.FileBytes, info.MemoryBytes = account.Store, account.Memory
	info.Errors = account.API.Errors
	tier := tierOf(account, c.cfg.Replicas)
	info.FileLimit, info.MemoryLimit = tier.Limits.MaxStore, tier.Limits.MaxMemory
	info.FileLeft, info.MemoryLeft = left(info.FileLimit, tier.Store), left(info.MemoryLimit, tier.Memory)
	if server := c.cfg.Server; server != nil && !server.InMemory() {
		free, err := server.DiskFree(ctx)
		if err != nil {
			return info, fmt.Errorf("disk of the embedded nats server: %w", err)
		}
		if room := int64(min(free, math.MaxInt64)); info.FileLeft < 0 || room < info.FileLeft { //nolint:gosec // bounded
			info.FileLeft = room
		}
	}
	return info, nil
}

// tierOf returns the usage and the limits for streams with so many replicas: an account has them
// for all streams together, or for each number of replicas.
func tierOf(account *natsjs.AccountInfo, replicas int) natsjs.Tier {
	tier, ok := account.Tiers["R"+strconv.Itoa(replicas)]
	if !ok {
		tier = account.Tier
		if len(account.Tiers) > 0 { // nothing is known of these replicas
			tier.Limits.MaxStore, tier.Limits.MaxMemory = -1, -1
		}
	}
	return tier
}

// left is what remains of a bound; -1 without one.
func left(limit int64, used uint64) int64 {
	if limit < 0 || limit == math.MaxInt64 {
		return -1
	}
	return max(limit-int64(min(used, math.MaxInt64)), 0) //nolint:gosec // bounded
}

// StreamStorage is what a stream of the bus stores.
type StreamStorage struct {
	Stream string
	// Topic is empty for the stream of a family.
	Topic string
	Bytes uint64
	// MaxBytes bounds the stream; 0 means no bound. OnFull is what happens there.
	MaxBytes int64
	OnFull   topics.OnFull
}

// Streams lists what the streams of topics and families store, in order of their names. Streams
// without a leader are left out.
func (n NATS) Streams(ctx context.Context) ([]StreamStorage, error) {
	inv, err := listStreams(ctx, n.bus.core)
	if err != nil {
		return nil, err
	}
	var all []StreamStorage
	for _, name := range inv.names() {
		info := inv.byName[name]
		s := inv.recognise(info)
		if s.rule == nil {
			continue
		}
		stores := StreamStorage{Stream: name, Topic: s.topic, Bytes: info.State.Bytes, MaxBytes: max(info.Config.MaxBytes, 0), OnFull: topics.OnFullDrop}
		if info.Config.Discard == natsjs.DiscardNew || n.bus.streams.NewKeeping(s.rule, &info.Config) != nil {
			stores.OnFull = topics.OnFullReject
		}
		all = append(all, stores)
	}
	return all, nil
}

// Gone returns those of topics that do not exist. A topic of a family exists as long as the stream
// of the family, and a topic of dead letters no longer than its topic.
func (n NATS) Gone(ctx context.Context, topics []string) ([]string, error) {
	streams, err := streamNames(ctx, n.bus.core)
	if err != nil {
		return nil, err
	}
	gone := func(topic string) bool {
		_, there := slices.BinarySearch(streams, n.bus.rules.Of(topic).StreamName(topic))
		return !there
	}
	return slices.DeleteFunc(slices.Clone(topics), func(topic string) bool {
		of, letters := strings.CutPrefix(topic, native.DeadLetterPrefix)
		return !gone(topic) && (!letters || !gone(of))
	}), nil
}
