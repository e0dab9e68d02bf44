package facade

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"eventhub/jetstream"
	"eventhub/jetstream/cloudevents"
	"eventhub/jetstream/jsonscan"
	"eventhub/jetstream/schemas"
	"eventhub/jetstream/topics"
)

// cloudEnvelope is how many bytes a CloudEvent in the JSON format may have beyond its data.
const cloudEnvelope = 64 << 10

// A bodyForm is what the body of a publish is.
type bodyForm int

const (
	formPayload    bodyForm = iota
	formLines               // one event a line
	formBinary              // the data of a CloudEvent; its attributes are headers
	formStructured          // a CloudEvent in the JSON format
	formBatch               // an array of those
)

// many reports whether the body has several events, each of which is taken from the quotas.
func (f bodyForm) many() bool { return f == formLines || f == formBatch }

// bodyFormOf returns the form of a request's body.
func bodyFormOf(r *http.Request) (bodyForm, *fault) {
	kind := r.Header.Get("Content-Type")
	switch cloudevents.ModeOf(kind) {
	case cloudevents.Structured:
		return formStructured, nil
	case cloudevents.Batch:
		return formBatch, nil
	case cloudevents.Unsupported:
		return 0, &fault{code: codeBadOptions, msg: "CloudEvents are taken as " + cloudevents.MediaType + ", as " + cloudevents.BatchMediaType + ", or with their attributes as headers."}
	case cloudevents.Binary:
	}
	mediaType, _, _ := strings.Cut(kind, ";")
	switch {
	case strings.EqualFold(strings.TrimSpace(mediaType), ndjsonType):
		return formLines, nil
	case r.Header.Get(cloudevents.Prefix+cloudevents.Version) != "":
		return formBinary, nil
	}
	return formPayload, nil
}

// badCloudEvent is the fault of a CloudEvent that the specification does not allow.
func badCloudEvent(err error) *fault {
	msg := err.Error()
	return &fault{code: codeBadOptions, msg: "The CloudEvent cannot be taken: " + msg + "."}
}

// binaryCloudEvent reads the attributes of a CloudEvent whose data is the body of a request.
func binaryCloudEvent(h http.Header) (*cloudevents.Event, *fault) {
	headers := make(map[string]string)
	for name, values := range h {
		lower := strings.ToLower(name)
		switch {
		case lower == "content-type", strings.HasPrefix(lower, cloudevents.Prefix):
		default:
			continue
		}
		if len(values) != 1 {
			return nil, &fault{code: codeBadOptions, msg: "The header " + name + " is given more than once."}
		}
		headers[lower] = values[0]
	}
	if _, given := headers[cloudevents.Prefix+cloudevents.ContentType]; given {
		return nil, &fault{code: codeBadOptions, msg: "The header ce-datacontenttype has no place in HTTP: the type of the data is the Content-Type."}
	}
	attributes, err := cloudevents.FromHeaders(headers)
	if err == nil {
		err = cloudevents.Validate(attributes)
	}
	if err != nil {
		return nil, badCloudEvent(err)
	}
	return &cloudevents.Event{Attributes: attributes}, nil
}

// addCloudEvent completes the options of a publish by the attributes of a CloudEvent. What the
// request's own Event-* headers say wins.
func (s *Server) addCloudEvent(e *cloudevents.Event, topic string, opts *jetstream.PublishOptions) *fault {
	a := e.Attributes
	rule := s.cfg.Bus.Rule(topic)
	if opts.ID == "" {
		own := rule.CloudEvents.Source
		opts.ID = cloudEventID(a[cloudevents.Source], a[cloudevents.ID], own != "" && own == a[cloudevents.Source])
	}
	if at, err := cloudevents.ParseTime(a[cloudevents.Time]); err == nil && !opts.HasTS {
		if ts := at.UnixMilli(); ts >= 0 && ts <= maxTimestamp {
			opts.TS, opts.HasTS = ts, true
		}
	}
	if opts.Key == "" {
		opts.Key = a[cloudevents.PartitionKey]
	}
	given := make(map[string]string, len(a)+len(opts.Headers)+1)
	e.SetHeaders(given)
	maps.Copy(given, opts.Headers) // binary mode: as they came
	opts.Headers = given
	if _, version, _, ok := schemaURIsOf(topic, &rule.Schema).cut(a[cloudevents.Schema]); ok {
		switch own, given := opts.Headers[schemas.VersionHeader]; {
		case !given:
			opts.Headers[schemas.VersionHeader] = version
		case own != version:
			return badCloudEvent(fmt.Errorf("dataschema names version %.10s of the schema, and the header %s has %.10q", version, schemas.VersionHeader, own))
		}
	}
	return nil
}

// schemaURIs are the values of dataschema that name a version of the schema of a topic: URIs whose
// path ends like that of GET /schemas/{topic}/{version}. A nil schemaURIs has none.
type schemaURIs struct {
	topic, of string // the topic, and the name under which its schema is registered
}

// schemaURIsOf returns nil for a topic whose rule asks for no schemas.
func schemaURIsOf(topic string, rule *topics.SchemaRule) *schemaURIs {
	if rule.Mode == "" || rule.Mode == topics.SchemaOff {
		return nil
	}
	return &schemaURIs{topic: topic, of: cmp.Or(rule.Of, topic)}
}

// cut finds the version that a dataschema names, and what is before and after it.
func (u *schemaURIs) cut(dataschema string) (before, version, after string, ok bool) {
	if u == nil || dataschema == "" {
		return "", "", "", false
	}
	parsed, err := url.Parse(dataschema)
	if err != nil {
		return "", "", "", false
	}
	path := strings.Split(parsed.EscapedPath(), "/")
	n := len(path)
	if n < 4 || path[n-3] != "schemas" || !isVersion(path[n-1]) {
		return "", "", "", false
	}
	if name, err := url.PathUnescape(path[n-2]); err != nil || name != u.topic && name != u.of {
		return "", "", "", false
	}
	end := len(dataschema)
	if i := strings.IndexAny(dataschema, "?#"); i >= 0 {
		end = i
	}
	start := end - len(path[n-1])
	return dataschema[:start], dataschema[start:end], dataschema[end:], true
}

// isVersion reports whether text is the number of a version as the registry writes it.
func isVersion(text string) bool {
	n, err := strconv.Atoi(text)
	return err == nil && n >= 1 && n <= topics.MaxSchemaVersions && strconv.Itoa(n) == text
}

// show has the dataschema of a CloudEvent name the version that its event has. A dataschema that
// names none stays.
func (u *schemaURIs) show(ce *cloudevents.Event, e *jetstream.Event) {
	version := headerOf(e, schemas.VersionHeader)
	if u == nil || !isVersion(version) {
		return
	}
	own, given := ce.Attributes[cloudevents.Schema]
	if !given {
		ce.Attributes[cloudevents.Schema] = hubScheme + "/schemas/" + url.PathEscape(u.topic) + "/" + version
	} else if before, _, after, ok := u.cut(own); ok {
		ce.Attributes[cloudevents.Schema] = before + version + after
	}
}

// hubScheme makes a path of the hub an absolute URI, which the attribute dataschema has to be. The
// hub does not know the address under which clients reach it.
const hubScheme = "eventhub:"

// cloudEventID returns the id of the event that a CloudEvent becomes. A CloudEvent is unique by its
// source and its id together. If all events of a topic come from one source, the id says enough.
func cloudEventID(source, id string, only bool) string {
	if only && (&jetstream.PublishOptions{ID: id}).Validate() == nil {
		return id
	}
	sum := sha256.Sum256([]byte(source + "\x00" + id))
	// A UUID of version 8 (RFC 9562, section 5.8).
	sum[6], sum[8] = sum[6]&0x0f|0x80, sum[8]&0x3f|0x80
	h := hex.EncodeToString(sum[:16])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// parseCloudEvent reads a CloudEvent in the JSON format.
func parseCloudEvent(text []byte) (*cloudevents.Event, *fault) {
	e, err := cloudevents.Parse(text)
	if err != nil {
		if _, ok := errors.AsType[*jsonscan.SyntaxError](err); ok {
			return nil, badJSON()
		}
		return nil, badCloudEvent(err)
	}
	return e, nil
}

// checkData reports data of a JSON type that is no JSON, or nested too deeply.
func checkData(e *cloudevents.Event) *fault {
	if e.Data != nil && cloudevents.IsJSON(e.Attributes[cloudevents.ContentType]) && !jetstream.ValidPayload(e.Data) {
		return badJSON()
	}
	return nil
}

// cloudLimit is the most bytes of a CloudEvent in the JSON format, and of a batch of them: data may
// be base64.
func (s *Server) cloudLimit() int { return s.cfg.Bus.MaxPayload()/3*4 + cloudEnvelope }

// binaryBody reads the data of a CloudEvent, and completes opts by its attributes.
func (s *Server) binaryBody(w http.ResponseWriter, r *http.Request, p Principal, b *[]byte, topic string, opts *jetstream.PublishOptions) ([]byte, *fault) {
	e, fail := binaryCloudEvent(r.Header)
	if fail == nil {
		fail = s.readBytes(w, r, p, b, s.cfg.Bus.MaxPayload())
	}
	if fail != nil {
		return nil, fail
	}
	if len(*b) > 0 {
		e.Data = *b
	}
	if fail = s.addCloudEvent(e, topic, opts); fail != nil {
		return nil, fail
	}
	return e.Data, checkData(e)
}

// structuredBody reads a CloudEvent in the JSON format, completes opts by its attributes, and
// returns its topic: the given one, or the type of the event if that is "".
func (s *Server) structuredBody(w http.ResponseWriter, r *http.Request, p Principal, b *[]byte, given string, opts *jetstream.PublishOptions) (topic string, payload []byte, fail *fault) {
	if fail = s.readBytes(w, r, p, b, s.cloudLimit()); fail != nil {
		return "", nil, fail
	}
	e, fail := parseCloudEvent(*b)
	if fail != nil {
		return "", nil, fail
	}
	if topic = given; topic == "" {
		topic = e.Attributes[cloudevents.Type]
		if fail = s.mayPublishTo(p, topic); fail != nil {
			return "", nil, fail
		}
	}
	payload, *opts, fail = s.structured(e, topic, *opts)
	return topic, payload, fail
}

// structured are the options and the data of a CloudEvent in the JSON format. opts come from the
// request, and may be shared by all events of a batch.
func (s *Server) structured(e *cloudevents.Event, topic string, opts jetstream.PublishOptions) ([]byte, jetstream.PublishOptions, *fault) {
	own := opts.Headers
	opts.Headers = make(map[string]string, len(own))
	for name, value := range own {
		// The type is that of the request, and attributes count where the event has them.
		if name != "content-type" && !strings.HasPrefix(name, cloudevents.Prefix) {
			opts.Headers[name] = value
		}
	}
	if fail := s.addCloudEvent(e, topic, &opts); fail != nil {
		return nil, opts, fail
	}
	return e.Data, opts, checkData(e)
}

// serveCloudEvents serves POST /publish: CloudEvents whose type is their topic.
func (s *Server) serveCloudEvents(w http.ResponseWriter, r *http.Request) {
	p := principalOf(r)
	form, fail := bodyFormOf(r)
	if fail == nil && !form.many() {
		fail = s.throttlePrincipal(p) // also for what cannot be read, and before the body is
	}
	var topic string
	switch {
	case fail != nil:
	case form == formBinary:
		var e *cloudevents.Event
		if e, fail = binaryCloudEvent(r.Header); fail == nil {
			topic = e.Attributes[cloudevents.Type]
			fail = s.mayPublishTo(p, topic)
		}
	case form == formPayload || form == formLines:
		fail = &fault{code: codeBadTopic, msg: "The path has no topic: POST to /publish/TOPIC, or send a CloudEvent, whose type is its topic."}
	}
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	s.publishForm(w, r, p, topic, form)
}

// mayPublishTo asks for the permission to publish one event to the topic that the event names, and
// takes the event from the quota of that topic.
func (s *Server) mayPublishTo(p Principal, topic string) *fault {
	if fail := s.mayPublish(p, topic); fail != nil {
		return fail
	}
	return s.throttleTopic(topic)
}

// publishBatch publishes each CloudEvent of an array, and answers like publishLines. topic is "" if
// the type of each event is its topic.
func (s *Server) publishBatch(w http.ResponseWriter, r *http.Request, topic string, p Principal, pub Publisher) {
	opts, fail := s.headerOptions(r)
	if fail == nil && opts.ID != "" {
		fail = &fault{code: codeBadOptions, msg: "The header Event-Id does not go with a batch: each event has its own id."}
	}
	b, _ := buffers.Get().(*[]byte)
	defer putBuffer(b)
	if fail == nil {
		fail = s.readBytes(w, r, p, b, s.cloudLimit())
	}
	// Nothing is published of an array that ends early.
	if fail == nil && (!jsonscan.Valid(*b) || !isArray(bytes.TrimLeft(*b, " \t\r\n"))) {
		fail = &fault{code: codeBadJSON, msg: "The body must be a JSON array of CloudEvents."}
	}
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	l := s.newLines(w, topic, p, pub)
	l.parse = func(text []byte) (string, []byte, jetstream.PublishOptions, *fault) {
		e, fail := parseCloudEvent(text)
		if fail != nil {
			return "", nil, opts, fail
		}
		at := topic
		if at == "" {
			at = e.Attributes[cloudevents.Type]
			if fail = s.mayPublishTo(p, at); fail != nil {
				return "", nil, opts, fail
			}
		}
		payload, opts, fail := s.structured(e, at, opts)
		return at, payload, opts, fail
	}
	l.serve(r.Context(), w, func(ctx context.Context) error {
		for items := jsonscan.Walk(*b, 0); items.Next(); {
			if err := l.publish(ctx, items.Value, true); err != nil {
				return err
			}
		}
		return nil
	})
}

// wantsCloudEvents reports whether an Accept (RFC 9110, section 12.5.1) names a media type of
// CloudEvents, and gives no more weight to that of the records. Records are the default.
func wantsCloudEvents(r *http.Request) bool {
	cloud, records := 0.0, 0.0
	for part := range strings.SplitSeq(strings.Join(r.Header.Values("Accept"), ","), ",") {
		kind, params, _ := strings.Cut(part, ";")
		weight := 1.0
		for param := range strings.SplitSeq(params, ";") {
			if q, ok := strings.CutPrefix(strings.ToLower(strings.TrimSpace(param)), "q="); ok {
				var err error
				if weight, err = strconv.ParseFloat(q, 64); err != nil {
					weight = 0
				}
			}
		}
		switch strings.ToLower(strings.TrimSpace(kind)) {
		case cloudevents.MediaType, cloudevents.BatchMediaType:
			cloud = max(cloud, weight)
		case "application/json", ndjsonType:
			records = max(records, weight)
		}
	}
	return cloud > 0 && cloud >= records
}

// cloudForm writes the events of a topic as CloudEvents.
type cloudForm struct {
	source  string // of events that have none of their own
	schemas *schemaURIs
}

// cloudFormFor returns the form for a request that asks for CloudEvents, or nil.
func (s *Server) cloudFormFor(w http.ResponseWriter, r *http.Request, topic string) *cloudForm {
	w.Header().Add("Vary", "Accept")
	if !wantsCloudEvents(r) {
		return nil
	}
	rule := s.cfg.Bus.Rule(topic)
	return &cloudForm{source: rule.CloudEvents.SourceOf(topic), schemas: schemaURIsOf(topic, &rule.Schema)}
}

// append appends an event in the JSON format of CloudEvents.
func (c *cloudForm) append(dst []byte, e *jetstream.Event) []byte { return c.of(e).Append(dst) }

// of returns the CloudEvent of an event: the one that was published, if it was one, completed by
// what the hub knows. One that a native client stored in the JSON format stays as it is: the
// version of its event is about all of it, and its dataschema about its data alone.
func (c *cloudForm) of(e *jetstream.Event) *cloudevents.Event {
	kind := headerOf(e, "content-type")
	if cloudevents.ModeOf(kind) == cloudevents.Structured {
		if ce, err := cloudevents.Parse(e.Payload); err == nil {
			return ce
		}
	}
	ce := &cloudevents.Event{Data: e.Payload}
	if len(e.Payload) == 0 || e.Tombstone {
		ce.Data = nil
	}
	if cloudevents.HasAttributes(e.Headers) {
		if a, err := cloudevents.FromHeaders(e.Headers); err == nil && cloudevents.Validate(a) == nil {
			ce.Attributes = a
			c.schemas.show(ce, e)
			return ce
		}
	}
	ce.Attributes = map[string]string{
		cloudevents.Version: cloudevents.SpecVersion, cloudevents.ID: e.ID, cloudevents.Source: c.source, cloudevents.Type: e.Topic,
		cloudevents.Time: cloudevents.FormatTime(e.TS),
	}
	for name, value := range map[string]string{
		cloudevents.PartitionKey: e.Key, cloudevents.ContentType: kind, "sid": e.SID,
		"traceparent": headerOf(e, "traceparent"), "tracestate": headerOf(e, "tracestate"),
	} {
		ce.Attributes[name] = value
		if value == "" || cloudevents.Validate(ce.Attributes) != nil {
			delete(ce.Attributes, name)
		}
	}
	if ce.Data != nil && ce.Attributes[cloudevents.ContentType] == "" && jetstream.ValidPayload(ce.Data) {
		ce.Attributes[cloudevents.ContentType] = "application/json"
	}
	c.schemas.show(ce, e)
	return ce
}

// headerOf returns the value of a header, its name in any case.
func headerOf(e *jetstream.Event, lower string) string {
	if v, ok := e.Headers[lower]; ok {
		return v
	}
	for name, v := range e.Headers {
		if strings.EqualFold(name, lower) {
			return v
		}
	}
	return ""
}

// publishForm publishes the body of a request. topic is "" if the type of the CloudEvents in it is
// their topic.
func (s *Server) publishForm(w http.ResponseWriter, r *http.Request, p Principal, topic string, form bodyForm) {
	pub := s.cfg.Bus.NewPublisher()
	pub.CountFor(p.Key())
	switch form {
	case formLines:
		s.publishLines(w, r, topic, p, pub)
	case formBatch:
		s.publishBatch(w, r, topic, p, pub)
	default:
		s.publishBody(w, r, p, topic, form, inStream(pub))
	}
}
