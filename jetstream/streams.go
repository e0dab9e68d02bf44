package jetstream

import (
	"context"

	"eventhub/jetstream/topics"
)

// streams has the topics of a bus and the streams and buckets behind them, which it makes when they
// are first used.
type streams struct {
	*core
	streamHooks streamHooks

	topics    topicTable
	reserved  reservations // topics that were counted before they are made
	newTopics *ration
	makers    *makers
	headrooms *headrooms
	keepNow   chan struct{} // wakes keepTopics
}

// streamHooks are called by streams, for what stands above them. They are set before there are
// topics.
type streamHooks struct {
	// equip completes a topic to which events are published.
	equip func(t *topicInfo, rule *topics.Rule)
	// keys returns the keys of a compacted topic whose bucket has so many entries.
	keys func(ctx context.Context, t *topicInfo, rule *topics.Rule, entries uint64) *keySet
	// dropped forgets a stream that is gone, or was made anew. The lock of the topics is held.
	dropped func(s *stream)
	// finishDeletion ends the deletion of a topic with this stream that another hub has begun.
	finishDeletion func(ctx context.Context, stream string) (bool, error)
}

func newStreams(c *core) *streams {
	return &streams{
		core: c,
		topics: topicTable{
			byName: make(map[string]*topicInfo), streams: make(map[string]*stream), making: make(map[string]chan struct{}),
			gone: make(map[string]int64), read: make(map[string]readTopic),
		},
		newTopics: newRation(c, "topics_per_client", "topics", c.limits.TopicsPerClient),
		makers:    newMakers(c),
		headrooms: newHeadrooms(c),
		keepNow:   make(chan struct{}, 1),
	}
}
