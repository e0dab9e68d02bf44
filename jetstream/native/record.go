package native

import (
	"encoding/base64"
	"slices"
	"strconv"
	"unicode/utf8"

	"eventhub/jetstream/jsonscan"
)

// HeaderEncoding is the header of a record whose payload is not the JSON that was published,
// because none was: its value is EncodingText when the payload is the body as a JSON string,
// EncodingBase64 when it is the body in standard base64. No stored message has it.
const (
	HeaderEncoding = "Event-Encoding"
	EncodingText   = "text"
	EncodingBase64 = "base64"
)

// PayloadLevels is the number of JSON levels that may surround a payload on its way to a client:
// the record, the EVENT frame or the page of records, and some to spare. A payload must leave room
// for these levels below the nesting limit of encoding/json.
const PayloadLevels = 8

// ValidPayload reports whether a record can carry b unchanged: b must be JSON in valid UTF-8, and
// no deeper than jsonscan.MaxDepth with PayloadLevels around it.
func ValidPayload(b []byte) bool { return jsonscan.ValidWithin(b, PayloadLevels) }

// AppendRecord appends the event record to dst as one JSON object. The payload is spliced in byte
// for byte, line breaks between its tokens included.
//
// A payload that is not JSON, as native clients may publish, becomes a JSON string: of the text
// itself if it is valid UTF-8, else of its base64 form. The record's headers then get
// Event-Encoding "text" or "base64". An empty payload becomes null, and so does that of a
// tombstone.
func (e *Event) AppendRecord(dst []byte) []byte {
	encoding := e.encoding()

	dst = append(dst, `{"id":`...)
	dst = jsonscan.AppendString(dst, e.ID)
	dst = append(dst, `,"ts":`...)
	dst = strconv.AppendInt(dst, e.TS, 10)
	dst = append(dst, `,"topic":`...)
	dst = jsonscan.AppendString(dst, e.Topic)
	if e.Key != "" {
		dst = append(dst, `,"key":`...)
		dst = jsonscan.AppendString(dst, e.Key)
	}
	if e.SID != "" {
		dst = append(dst, `,"sid":`...)
		dst = jsonscan.AppendString(dst, e.SID)
	}
	if len(e.Headers) > 0 || encoding != "" {
		dst = appendHeaders(dst, e.Headers, encoding)
	}
	if len(e.CausedBy) > 0 {
		dst = append(dst, `,"caused_by":`...)
		dst = appendStrings(dst, e.CausedBy)
	}
	if len(e.Tags) > 0 {
		dst = append(dst, `,"tags":`...)
		dst = appendStrings(dst, e.Tags)
	}

	if e.HasPartition {
		dst = strconv.AppendInt(append(dst, `,"partition":`...), int64(e.Partition), 10)
	}

	dst = e.appendPayload(append(dst, `,"payload":`...), encoding)
	return append(dst, '}')
}

// encoding is what Event-Encoding says of the payload; "" when it is JSON.
func (e *Event) encoding() string {
	switch {
	case len(e.Payload) == 0 || e.Tombstone || ValidPayload(e.Payload):
		return ""
	case utf8.Valid(e.Payload):
		return EncodingText
	default:
		return EncodingBase64
	}
}

// AppendPayload appends the payload to dst as AppendRecord does.
func (e *Event) AppendPayload(dst []byte) []byte { return e.appendPayload(dst, e.encoding()) }

func (e *Event) appendPayload(dst []byte, encoding string) []byte {
	switch {
	case len(e.Payload) == 0, e.Tombstone:
		dst = append(dst, "null"...)
	case encoding == "":
		dst = append(dst, e.Payload...)
	case encoding == EncodingText:
		dst = jsonscan.AppendString(dst, string(e.Payload))
	default:
		dst = append(dst, '"')
		dst = base64.StdEncoding.AppendEncode(dst, e.Payload)
		dst = append(dst, '"')
	}
	return dst
}

// appendHeaders appends the headers field, its names sorted, with encoding as Event-Encoding unless
// that is empty.
func appendHeaders(dst []byte, headers map[string]string, encoding string) []byte {
	var few [16]string // so that few headers cost no allocation
	names := few[:0]
	for name := range headers {
		if name != HeaderEncoding {
			names = append(names, name)
		}
	}
	if encoding != "" {
		names = append(names, HeaderEncoding)
	}
	if len(names) == 0 {
		return dst
	}
	slices.Sort(names)

	sep := `,"headers":{`
	for _, name := range names {
		dst = append(dst, sep...)
		sep = ","
		dst = jsonscan.AppendString(dst, name)
		dst = append(dst, ':')
		value := headers[name]
		if name == HeaderEncoding {
			value = encoding
		}
		dst = jsonscan.AppendString(dst, value)
	}
	return append(dst, '}')
}

// appendStrings appends list as an array; list is not empty.
func appendStrings(dst []byte, list []string) []byte {
	sep := byte('[')
	for _, s := range list {
		dst = append(dst, sep)
		sep = ','
		dst = jsonscan.AppendString(dst, s)
	}
	return append(dst, ']')
}
