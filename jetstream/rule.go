package jetstream

import (
	"eventhub/jetstream/topics"
)

// RuleOf returns the rule that a bus has for a topic, or for all topics if no other rule matches.
func RuleOf(b *Bus, topic string) topics.Rule { return *b.rules.Of(topic) }
