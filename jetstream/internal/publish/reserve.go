package publish

import (
	"context"
	"log/slog"

	"eventhub/jetstream/event"
)

// Reserve counts a topic that does not exist, or a new key of one that this hub has used, for a
// client that is to publish later.
func (p *Publisher) Reserve(ctx context.Context, topic, key, client string) error {
	shared := p.shared
	if t := shared.Streams.Known(topic); t != nil {
		keys := gatesOf(t).keys
		if keys == nil || key == "" {
			return nil
		}
		return keys.admit(ctx, key, client, false)
	}
	if err := event.ValidTopic(topic); err != nil {
		return err
	}
	name := shared.Rules.Of(topic).StreamName(topic)
	if shared.Streams.Reserved.Has(name) {
		return nil
	}
	exists, err := shared.Streams.SeemsToExist(ctx, topic)
	if exists || err != nil {
		return err
	}
	if err := shared.Streams.TooManyStreams(name); err != nil {
		return err
	}
	if err := shared.Streams.ReserveTopic(name, client); err != nil {
		return err
	}
	refused, err := shared.Streams.Hooks.Refusal(ctx, client, 1)
	if refused != nil {
		shared.Streams.Reserved.Drop(name)
		shared.Obs.LimitReached("client_topics")
		return refused
	}
	if err != nil {
		shared.Log.DebugContext(ctx, "failed to count the topics of a client; they count when the topic is made", slog.Any("error", err))
	}
	return nil
}

// Knows reports whether this hub has used the topic's stream. If not, a publish may make it.
func (p *Publisher) Knows(topic string) bool { return p.shared.Streams.Known(topic) != nil }
