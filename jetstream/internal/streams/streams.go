package streams

import (
	"context"
	"log/slog"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/pacedlog"
	"eventhub/jetstream/topics"
)

// Streams has the topics of a bus and the streams and buckets behind them, which it makes when they
// are first used.
type Streams struct {
	Config
	Hooks Hooks

	topics    topicTable
	Reserved  reservations // topics that were counted before they are made
	newTopics *conn.Ration
	Headrooms *Headrooms
	Recent    *recentCount
	KeepNow   chan struct{} // wakes who removes settled events
}

// Hooks are called by streams, for what stands above them. They are set before there are
// topics.
type Hooks struct {
	// Gates returns what publishing keeps of a topic. The bucket of a compacted topic has so many
	// entries.
	Gates func(ctx context.Context, t *Topic, rule *topics.Rule, entries uint64) any
	// Note notes that a client is about to make a topic with this stream, and returns what takes
	// the note back, or the refusal.
	Note func(ctx context.Context, topic, stream, client string) (undo func(context.Context), err error)
	// Refusal returns why a client that is about to make more topics has too many, or nil.
	Refusal func(ctx context.Context, client string, more int) (*event.Error, error)
	// Drifted is told of a stream that exists, which may differ from its rule.
	Drifted func(topic string, rule *topics.Rule, info *natsjs.StreamInfo)
	// FinishDeletion ends the deletion of a topic with this stream that another hub has begun.
	FinishDeletion func(ctx context.Context, stream string) (bool, error)
}

// Config is what streams are given.
type Config struct {
	Conn  *conn.Pool
	Rules topics.Rules
	// Replicas and Memory are for streams whose rules do not say otherwise (topics.Rule.Replicas
	// and Storage).
	Replicas int
	Memory   bool
	// Unbounded says that the server bounds no stream that says nothing of the number of consumers.
	Unbounded bool
	Limits    Limits
	// Stored asks NATS how much it stores and may still store; every AskStorage, by default 5 s.
	Stored     func(ctx context.Context) (file, memory Storage, err error)
	AskStorage time.Duration

	Log   *slog.Logger
	Often *pacedlog.Log
	Obs   event.Observer
	Clock *conn.Clock
}

// Limits are those of Limits with the same names.
type Limits struct {
	Topics, TopicsPerClient, StreamGroups, PublishInFlight, IDsKnown int

	StorageReserve int64
}

// New returns the streams of a bus that is not connected yet.
func New(cfg Config) *Streams {
	return &Streams{
		Config: cfg,
		topics: topicTable{
			byName: make(map[string]*Topic), streams: make(map[string]*Stream), making: make(map[string]chan struct{}),
			gone: make(map[string]int64), read: make(map[string]readTopic),
		},
		newTopics: conn.NewRation(cfg.Obs, "topics_per_client", "topics", cfg.Limits.TopicsPerClient, cfg.Limits.Topics),
		Headrooms: newHeadrooms(&cfg),
		Recent:    newRecentCount(&cfg),
		KeepNow:   make(chan struct{}, 1),
	}
}
