package jetstream

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

// streams has the topics of a bus and the streams and buckets behind them, which it makes when they
// are first used.
type streams struct {
	streamsConfig
	streamHooks streamHooks

	topics    topicTable
	reserved  reservations // topics that were counted before they are made
	newTopics *conn.Ration
	headrooms *headrooms
	recent    *recentCount
	keepNow   chan struct{} // wakes keepTopics
}

// streamHooks are called by streams, for what stands above them. They are set before there are
// topics.
type streamHooks struct {
	// gates returns what publishing keeps of a topic. The bucket of a compacted topic has so many
	// entries.
	gates func(ctx context.Context, t *topicInfo, rule *topics.Rule, entries uint64) any
	// note notes that a client is about to make a topic with this stream, and returns what takes
	// the note back, or the refusal.
	note func(ctx context.Context, topic, stream, client string) (undo func(context.Context), err error)
	// refusal returns why a client that is about to make more topics has too many, or nil.
	refusal func(ctx context.Context, client string, more int) (*event.Error, error)
	// met is told of a stream that exists with its rule, when a topic is met.
	met func(topic string, rule *topics.Rule, info *natsjs.StreamInfo)
	// finishDeletion ends the deletion of a topic with this stream that another hub has begun.
	finishDeletion func(ctx context.Context, stream string) (bool, error)
}

// streamsConfig is what streams are given.
type streamsConfig struct {
	conn  *conn.Pool
	rules topics.Rules
	// replicas and memory are for streams whose rules do not say otherwise (topics.Rule.Replicas
	// and Storage).
	replicas int
	memory   bool
	// unbounded says that the server bounds no stream that says nothing of the number of consumers.
	unbounded bool
	limits    streamLimits
	// stored asks NATS how much it stores and may still store; every askStorage, or headroomEvery.
	stored     func(ctx context.Context) (file, memory storage, err error)
	askStorage time.Duration

	log   *slog.Logger
	often *pacedlog.Log
	obs   event.Observer
	clock *conn.Clock
}

// streamLimits are those of Limits with the same names.
type streamLimits struct {
	Topics, TopicsPerClient, StreamGroups, PublishInFlight, IDsKnown int

	StorageReserve int64
}

func newStreams(cfg streamsConfig) *streams {
	return &streams{
		streamsConfig: cfg,
		topics: topicTable{
			byName: make(map[string]*topicInfo), streams: make(map[string]*stream), making: make(map[string]chan struct{}),
			gone: make(map[string]int64), read: make(map[string]readTopic),
		},
		newTopics: conn.NewRation(cfg.obs, "topics_per_client", "topics", cfg.limits.TopicsPerClient, cfg.limits.Topics),
		headrooms: newHeadrooms(&cfg),
		recent:    newRecentCount(&cfg),
		keepNow:   make(chan struct{}, 1),
	}
}
