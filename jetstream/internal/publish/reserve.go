package jetstream

import (
	"context"
	"log/slog"
)

// Reserve counts a topic that does not exist for a client (Limits.TopicsPerClient), although an
// event that will make the topic is published only later, by anybody through this bus. The client
// must have made fewer topics that exist than Limits.ClientTopics. Further calls for the same topic
// count nothing. While NATS does not answer, every topic that this hub does not know counts. Of a
// topic that this hub has used, Reserve counts a new key (Limits.KeysPerClient and
// topics.Rule.MaxKeys). It returns an *Error (rate_limited, overloaded, bad_topic) when the client
// may not make the topic or the key. It may be called concurrently.
func (p *Publisher) Reserve(ctx context.Context, topic, key, client string) error {
	publishing := p.publishing
	if t := publishing.streams.Known(topic); t != nil {
		keys := gatesOf(t).keys
		if keys == nil || key == "" {
			return nil
		}
		return keys.admit(ctx, key, client, false)
	}
	if err := ValidTopic(topic); err != nil {
		return err
	}
	name := publishing.rules.Of(topic).StreamName(topic)
	if publishing.streams.Reserved.Has(name) {
		return nil
	}
	exists, err := publishing.streams.SeemsToExist(ctx, topic)
	if exists || err != nil {
		return err
	}
	if err := publishing.streams.TooManyStreams(name); err != nil {
		return err
	}
	if err := publishing.streams.ReserveTopic(name, client); err != nil {
		return err
	}
	refused, err := publishing.streams.Hooks.Refusal(ctx, client, 1)
	if refused != nil {
		publishing.streams.Reserved.Drop(name)
		publishing.obs.LimitReached("client_topics")
		return refused
	}
	if err != nil {
		publishing.log.DebugContext(ctx, "failed to count the topics of a client; they count when the topic is made", slog.Any("error", err))
	}
	return nil
}

// Knows reports whether this hub has used the topic's stream. If not, a publish may make it.
func (p *Publisher) Knows(topic string) bool { return p.publishing.streams.Known(topic) != nil }
