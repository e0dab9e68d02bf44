package publish

import (
	"maps"
	"strconv"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/cloudevents"
	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
	"eventhub/jetstream/schemas"
)

// Header names on stored messages. Nats-* are the server's, Event-* the hub's.
const (
	headerMsgID        = native.HeaderMsgID
	headerExpectSubSeq = "Nats-Expected-Last-Subject-Sequence"
	headerID           = native.HeaderID
	headerTS           = native.HeaderTS
)

func validateID(id string) error {
	if err := native.CheckID(id); err != nil {
		return event.BadOptions("opts.%v", err)
	}
	return nil
}

// onlyID reports that the event's id is all that its message header has to say.
func (o *outgoing) onlyID() bool {
	return !o.HasTS && o.SID == "" && len(o.Tags) == 0 && len(o.CausedBy) == 0 && len(o.Headers) == 0 && o.ExpectKeySequence == nil && !o.Tombstone && o.original == "" && o.version == 0
}

// header builds the message header of an event. given says that the publisher chose its id.
func (o *outgoing) header(t *streams.Topic, id string, given bool) nats.Header {
	f := o.fields()
	var h nats.Header
	if given {
		f.ID = id
		h = f.Header(t.Name, t.Stream.Family)
	} else {
		f.ID = ""
		h = f.Header("", false)
		h[headerID] = []string{id}
	}
	if o.ExpectKeySequence != nil {
		h[headerExpectSubSeq] = []string{strconv.FormatUint(*o.ExpectKeySequence, 10)}
	}
	if o.version > 0 {
		h[schemas.VersionHeader] = []string{strconv.Itoa(o.version)}
	}
	if o.original != "" {
		h[native.HeaderOriginal] = []string{o.original}
	}
	if t.Source != "" && !cloudevents.HasAttributes(o.Headers) {
		for name, value := range o.cloudHeaders(t.Name, t.Source, id) {
			h[name] = []string{value}
		}
		for name, value := range o.Headers { // the event's own count
			h[name] = []string{value}
		}
	}
	return h
}

// checkStamp reports an event whose headers have no room for the version that it is stamped with.
// Such an event could be stored, but not published again, as a redrive and a mirror do.
func (o *outgoing) checkStamp(topic string) error {
	if o.version == 0 {
		return nil
	}
	if n := len(o.Headers); n >= native.MaxHeaders {
		return event.BadOptions("opts.headers has %d headers, and topic %s adds %s; at most %d are allowed: leave one out", n, topic, schemas.VersionHeader, native.MaxHeaders)
	}
	f := o.fields()
	size, added := f.HeaderBytes(), len(schemas.VersionHeader)+len(strconv.Itoa(o.version))
	if size+added > native.MaxHeaderBytes {
		return event.BadOptions("opts.headers, sid, tags and caused_by have %d bytes together, and topic %s adds %s with %d; at most %d are allowed: make them shorter",
			size, topic, schemas.VersionHeader, added, native.MaxHeaderBytes)
	}
	return nil
}

// stamp moves the version to the headers, where it is as a client gives it. checkStamp has found
// room for it.
func (o *outgoing) stamp() {
	if o.version == 0 {
		return
	}
	stamped := make(map[string]string, len(o.Headers)+1)
	maps.Copy(stamped, o.Headers)
	stamped[schemas.VersionHeader] = strconv.Itoa(o.version)
	o.Headers, o.version = stamped, 0
}
