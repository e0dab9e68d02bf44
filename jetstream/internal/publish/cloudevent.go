package publish

import (
	"cmp"
	"maps"
	"strconv"
	"strings"

	"eventhub/jetstream/cloudevents"
	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/schemas"
)

// cloudSource returns the source of the attributes that are added as headers to events of a topic,
// or "" if none are. t is nil if this hub has not met the topic.
func (p *Publishers) cloudSource(topic string, t *streams.Topic) string {
	if t != nil {
		return t.Source
	}
	if rule := p.Rules.Of(topic).CloudEvents; rule.Headers {
		return rule.Source
	}
	return ""
}

// checkCloudEvent reports an event that exceeds the limits of headers with the attributes that are
// added to it. Such an event could be stored, but not published again, as a redrive does.
func (o *outgoing) checkCloudEvent(topic, source string) error {
	if source == "" || cloudevents.HasAttributes(o.Headers) {
		return nil
	}
	f := o.fields()
	f.Headers = o.cloudHeaders(topic, source, cmp.Or(o.ID, madeID))
	maps.Copy(f.Headers, o.Headers)
	among := "the attributes of a CloudEvent"
	if o.version > 0 {
		f.Headers[schemas.VersionHeader] = strconv.Itoa(o.version)
		among += " and " + schemas.VersionHeader
	}
	if err := f.Check(); err != nil {
		return event.BadOptions("opts.%v; %s, which the topic adds, are among them", err, among)
	}
	return nil
}

// madeID is as long as an id that a hub makes.
const madeID = "00000000-0000-0000-0000-000000000000"

// cloudHeaders are the headers that are added to an event without attributes of its own.
func (o *outgoing) cloudHeaders(topic, source, id string) map[string]string {
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
