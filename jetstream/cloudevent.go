package jetstream

import (
	"cmp"
	"maps"
	"net/url"
	"strconv"
	"strings"

	"eventhub/jetstream/cloudevents"
	"eventhub/jetstream/event"
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
func (r *TopicRule) checkCloudEvents(check func(ok bool, fields []string, format string, args ...any)) {
	c := r.CloudEvents
	check(len(c.Source) <= maxSource, []string{fieldCloudSource}, "source has %d bytes; at most %d are allowed", len(c.Source), maxSource)
	_, err := url.Parse(c.Source)
	legal := err == nil && !strings.ContainsFunc(c.Source, func(c rune) bool { return c <= ' ' || c >= 0x7f })
	check(legal, []string{fieldCloudSource}, "source %q is not a URI reference such as /orders or https://example.com/orders", c.Source)
	check(!c.Headers || c.Source != "", []string{fieldCloudHeaders, fieldCloudSource}, "headers need a source; add source: /orders, or the URI of what publishes these events")
}

// cloudSource returns the source of the attributes that are added as headers to events of a topic,
// or "" if none are. t is nil if this hub has not met the topic.
func (p *publishing) cloudSource(topic string, t *topicInfo) string {
	if t != nil {
		return t.source
	}
	if rule := p.rules.of(topic).CloudEvents; rule.Headers {
		return rule.Source
	}
	return ""
}

// checkCloudEvent reports an event that exceeds the limits of headers with the attributes that are
// added to it. Such an event could be stored, but not published again, as a redrive does.
func (o *PublishOptions) checkCloudEvent(topic, source string) error {
	if source == "" || cloudevents.HasAttributes(o.Headers) {
		return nil
	}
	f := o.fields()
	f.Headers = o.cloudHeaders(topic, source, cmp.Or(o.ID, madeID))
	maps.Copy(f.Headers, o.Headers)
	among := "the attributes of a CloudEvent"
	if o.schemaVersion > 0 {
		f.Headers[headerSchemaVersion] = strconv.Itoa(o.schemaVersion)
		among += " and " + headerSchemaVersion
	}
	if err := f.Check(); err != nil {
		return event.BadOptions("opts.%v; %s, which the topic adds, are among them", err, among)
	}
	return nil
}

// madeID is as long as an id that a hub makes.
const madeID = "00000000-0000-0000-0000-000000000000"

// cloudHeaders are the headers that are added to an event without attributes of its own.
func (o *PublishOptions) cloudHeaders(topic, source, id string) map[string]string {
	kind := "application/json"
	for name, value := range o.Headers {
		if strings.EqualFold(name, "content-type") {
			kind = value
		}
	}
	attributes := map[string]string{
		cloudevents.Version: cloudevents.SpecVersion, cloudevents.ID: id,
		cloudevents.Source: source, cloudevents.Type: topic, cloudevents.ContentType: kind,
	}
	if o.HasTS {
		attributes[cloudevents.Time] = cloudevents.FormatTime(o.TS)
	}
	if o.Key != "" {
		attributes[cloudevents.PartitionKey] = o.Key
	}
	headers := make(map[string]string, len(attributes)+len(o.Headers))
	for name, value := range attributes {
		headers[cloudevents.Prefix+name] = cloudevents.Encode(value)
	}
	for name := range o.Headers { // the event's own count, in any case
		delete(headers, strings.ToLower(name))
	}
	return headers
}
