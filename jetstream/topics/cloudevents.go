package topics

import (
	"cmp"
	"net/url"
	"strings"
)

// maxSource is the most bytes of CloudEventsRule.Source.
const maxSource = 512

// CloudEventsRule says how the events of a topic look as CloudEvents.
type CloudEventsRule struct {
	// Source is the attribute source of events that have none of their own: a URI reference of at
	// most 512 bytes. CloudEvents that come from this source keep their id as that of the event.
	// Ids of all others are unique only together with their source, and the event's id is made of
	// both. Defaults to /topics/ and the topic, which is no source of a CloudEvent that comes in.
	Source string
	// Headers adds the attributes as headers (ce-id, ce-source and so on) to events that are
	// published without, for consumers that read the NATS binding. It requires Source.
	Headers bool
}

// SourceOf returns the attribute source of those events of a topic that have none of their own.
func (c CloudEventsRule) SourceOf(topic string) string { return cmp.Or(c.Source, "/topics/"+topic) }

// checkCloudEvents reports the faults of CloudEvents in a rule.
func (r *Rule) checkCloudEvents(check func(ok bool, fields []string, format string, args ...any)) {
	c := r.CloudEvents
	check(len(c.Source) <= maxSource, []string{fieldCloudSource}, "source has %d bytes; at most %d are allowed", len(c.Source), maxSource)
	_, err := url.Parse(c.Source)
	legal := err == nil && !strings.ContainsFunc(c.Source, func(c rune) bool { return c <= ' ' || c >= 0x7f })
	check(legal, []string{fieldCloudSource}, "source %q is not a URI reference such as /orders or https://example.com/orders", c.Source)
	check(!c.Headers || c.Source != "", []string{fieldCloudHeaders, fieldCloudSource}, "headers need a source; add source: /orders, or the URI of what publishes these events")
}
