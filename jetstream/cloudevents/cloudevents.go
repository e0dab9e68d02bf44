// Package cloudevents reads and writes CloudEvents 1.0 in the JSON format and as headers.
//
// The rules are those of the specification (https://github.com/cloudevents/spec): its JSON event
// format, and the headers of its HTTP and NATS bindings, which differ in one name only. The package
// knows nothing of topics. All functions may be called concurrently.
package cloudevents

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"mime"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"eventhub/jetstream/jsonscan"
)

// Media types of the JSON format.
const (
	MediaType      = "application/cloudevents+json"
	BatchMediaType = "application/cloudevents-batch+json"

	// mediaPrefix begins the media types of all formats.
	mediaPrefix = "application/cloudevents"
	jsonType    = "application/json"
)

// SpecVersion is the version of the specification that the package follows.
const SpecVersion = "1.0"

// Names of attributes that the specification defines, and of an extension that it documents.
const (
	ID              = "id"
	Source          = "source"
	Version         = "specversion"
	Type            = "type"
	ContentType     = "datacontenttype"
	Schema          = "dataschema"
	Subject         = "subject"
	Time            = "time"
	PartitionKey    = "partitionkey"
	data            = "data"
	dataBase64      = "data_base64"
	maxName         = 64 // bytes of an attribute's name; the specification recommends 20
	maxIntegerBytes = len("-2147483648")
)

// required are the attributes that every event has, in the order in which they are written.
var required = []string{Version, ID, Source, Type}

// Event is a CloudEvent.
type Event struct {
	// Attributes are the context attributes, extensions and datacontenttype included, as strings.
	Attributes map[string]string
	// Data is the data, byte for byte; nil when there is none. It may share memory with the text
	// that Parse was given.
	Data []byte
}

// Parse reads an event in the JSON format. An error says which member is wrong, and quotes no
// value.
func Parse(text []byte) (*Event, error) {
	e := &Event{Attributes: make(map[string]string, 8)}
	var given, encoded []byte // data and data_base64
	if first := bytes.TrimLeft(text, " \t\r\n"); len(first) == 0 || first[0] != '{' {
		if jsonscan.Valid(text) {
			return nil, errors.New("a CloudEvent must be a JSON object")
		}
		return nil, fmt.Errorf("the CloudEvent is not a JSON object: %w", &jsonscan.SyntaxError{Offset: len(text) - len(first)})
	}
	w := jsonscan.Walk(text, 0)
	seen := make(map[string]struct{}, 8)
	for w.Next() {
		name, _ := jsonscan.Unquote(w.Key, nil)
		if _, twice := seen[string(name)]; twice { // readers of JSON differ on which one counts
			return nil, fmt.Errorf("%.64q is given twice", name)
		}
		seen[string(name)] = struct{}{}
		switch string(name) {
		case data:
			given = w.Value
			continue
		case dataBase64:
			encoded = w.Value
			if string(encoded) == "null" {
				encoded = nil
			}
			continue
		}
		if err := e.member(string(name), w.Value); err != nil {
			return nil, err
		}
	}
	if w.Err() != nil {
		return nil, fmt.Errorf("the CloudEvent is not a JSON object: %w", w.Err())
	}
	if given != nil && encoded != nil {
		return nil, errors.New("data and data_base64 exclude each other")
	}
	if err := Validate(e.Attributes); err != nil {
		return nil, err
	}
	return e, e.decode(given, encoded)
}

// member keeps an attribute of the JSON format.
func (e *Event) member(name string, value []byte) error {
	if err := validName(name); err != nil {
		return err
	}
	switch c := value[0]; {
	case c == '"':
		text, _ := jsonscan.Unquote(value, nil)
		e.Attributes[name] = string(text)
	case string(value) == "null":
		delete(e.Attributes, name)
	case slices.Contains(required, name), name == ContentType, name == Schema, name == Subject, name == Time:
		return fmt.Errorf("%s must be a string", name)
	case c == 't', c == 'f', integer(value):
		e.Attributes[name] = string(value)
	default:
		return fmt.Errorf("%s must be a string, a boolean, or an integer of 32 bits", name)
	}
	return nil
}

// integer reports whether a JSON value is an Integer of the specification.
func integer(value []byte) bool {
	if len(value) > maxIntegerBytes {
		return false
	}
	n, negative := int64(0), false
	for i, c := range value {
		switch {
		case i == 0 && c == '-':
			negative = true
		case c < '0' || c > '9':
			return false
		default:
			n = 10*n + int64(c-'0')
		}
	}
	return n < 1<<31 || negative && n == 1<<31
}

// decode takes the data from its member.
func (e *Event) decode(given, encoded []byte) error {
	switch kind := e.Attributes[ContentType]; {
	case encoded != nil:
		if encoded[0] != '"' {
			return errors.New("data_base64 must be a string")
		}
		text, _ := jsonscan.Unquote(encoded, nil)
		raw, err := base64.StdEncoding.Strict().DecodeString(string(text))
		if err != nil {
			return errors.New("data_base64 is not standard base64")
		}
		e.Data = slices.Grow(raw, 1) // not nil
	case given == nil:
	case kind == "":
		// The specification implies this type here, and not where data comes in another form.
		e.Attributes[ContentType] = jsonType
		e.Data = given
	case IsJSON(kind):
		e.Data = given
	case given[0] != '"':
		return errors.New("data must be a string, because datacontenttype is not a JSON type; other data goes into data_base64")
	default:
		e.Data, _ = jsonscan.Unquote(given, nil)
	}
	return nil
}

// Validate reports what the specification does not allow in the attributes of an event. The error
// names the attribute, and quotes no value other than that of specversion.
func Validate(attributes map[string]string) error {
	for _, name := range required {
		if attributes[name] == "" {
			return fmt.Errorf("%s is missing or empty", name)
		}
	}
	if v := attributes[Version]; v != SpecVersion {
		return fmt.Errorf("specversion is %.16q; this hub takes %s", v, SpecVersion)
	}
	for name, value := range attributes {
		if err := validName(name); err != nil {
			return err
		}
		if err := validValue(name, value); err != nil {
			return fmt.Errorf("%s %w", name, err)
		}
	}
	return nil
}

// validName reports whether name is that of an attribute.
func validName(name string) error {
	if name == "" || len(name) > maxName || name == data {
		return fmt.Errorf("%.64q is not a name of an attribute: 1 to %d lower-case letters and digits are", name, maxName)
	}
	for i := range len(name) {
		if c := name[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return fmt.Errorf("%.64q is not a name of an attribute: 1 to %d lower-case letters and digits are", name, maxName)
		}
	}
	return nil
}

func validValue(name, value string) error {
	for _, c := range value {
		if c < ' ' || c >= 0x7f && c <= 0x9f || c&0xfffe == 0xfffe || c >= 0xfdd0 && c <= 0xfdef {
			return fmt.Errorf("has a character that the specification does not allow: %U", c)
		}
	}
	if !utf8.ValidString(value) {
		return errors.New("is not valid UTF-8")
	}
	switch name {
	case Source:
		if _, err := url.Parse(value); err != nil {
			return errors.New("is not a URI reference")
		}
	case Schema:
		if u, err := url.Parse(value); err != nil || !u.IsAbs() {
			return errors.New("is not an absolute URI")
		}
	case Time:
		if _, err := ParseTime(value); err != nil {
			return err
		}
	case ContentType:
		if _, _, err := mime.ParseMediaType(value); err != nil {
			return errors.New("is not a media type")
		}
	case Subject:
		if value == "" {
			return errors.New("is empty; leave it out instead")
		}
	}
	return nil
}

// timestamp is the form of a Timestamp. time.Parse takes more: an hour of one digit, a comma before
// the fraction, and an offset of 24 hours.
var timestamp = regexp.MustCompile(`^\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)$`)

// ParseTime reads the value of a Timestamp, as RFC 3339 has it.
func ParseTime(value string) (time.Time, error) {
	t, err := time.Parse(time.RFC3339Nano, strings.ToUpper(value))
	if err != nil || !timestamp.MatchString(value) {
		return time.Time{}, errors.New("is not a time as in RFC 3339, such as 2026-01-31T12:00:00Z")
	}
	return t, nil
}

// FormatTime writes epoch milliseconds as a Timestamp.
func FormatTime(ms int64) string { return time.UnixMilli(ms).UTC().Format(time.RFC3339Nano) }

// IsJSON reports whether a datacontenttype declares JSON: */json or */*+json.
func IsJSON(contentType string) bool {
	kind, _, _ := strings.Cut(contentType, ";")
	_, sub, _ := strings.Cut(strings.ToLower(strings.TrimSpace(kind)), "/")
	return sub == "json" || strings.HasSuffix(sub, "+json")
}

// A Mode is how a message carries an event, by its Content-Type.
type Mode int

// The modes. In Binary mode, attributes are headers, if the message is a CloudEvent at all.
const (
	Binary Mode = iota
	Structured
	Batch
	Unsupported // a format other than JSON
)

// ModeOf returns the mode of a message by its Content-Type.
func ModeOf(contentType string) Mode {
	kind, _, _ := strings.Cut(contentType, ";")
	kind = strings.ToLower(strings.TrimSpace(kind))
	switch {
	case kind == MediaType:
		return Structured
	case kind == BatchMediaType:
		return Batch
	case strings.HasPrefix(kind, mediaPrefix):
		return Unsupported
	}
	return Binary
}

// Append appends the event in the JSON format to dst, as one line if its data is. Attributes must
// be valid.
func (e *Event) Append(dst []byte) []byte {
	sep := byte('{')
	write := func(name string) {
		dst = append(dst, sep)
		sep = ','
		dst = jsonscan.AppendString(dst, name)
		dst = append(dst, ':')
		dst = jsonscan.AppendString(dst, e.Attributes[name])
	}
	for _, name := range required {
		write(name)
	}
	var few [16]string
	names := few[:0]
	for name := range e.Attributes {
		if !slices.Contains(required, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		write(name)
	}
	return append(e.appendData(dst), '}')
}

func (e *Event) appendData(dst []byte) []byte {
	if e.Data == nil {
		return dst
	}
	switch kind := e.Attributes[ContentType]; {
	case kind != "" && IsJSON(kind) && jsonscan.ValidWithin(e.Data, 1):
		return append(append(dst, `,"data":`...), e.Data...)
	case kind != "" && !IsJSON(kind) && utf8.Valid(e.Data):
		return jsonscan.AppendString(append(dst, `,"data":`...), string(e.Data))
	}
	dst = append(dst, `,"data_base64":"`...)
	dst = base64.StdEncoding.AppendEncode(dst, e.Data)
	return append(dst, '"')
}
