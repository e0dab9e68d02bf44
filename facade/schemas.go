package facade

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"

	"eventhub/jetstream/jsonscan"
	"eventhub/jetstream/schemas"
	"eventhub/jetstream/topics"
)

// schemaBytes is the most bytes of the body of a registration: a schema, and the casts.
const schemaBytes = 512 << 10

// schemaEntry is a version in the list of a topic.
type schemaEntry struct {
	Version     int    `json:"version"`
	Description string `json:"description,omitempty"`
	Forced      bool   `json:"forced,omitempty"`
	Casts       bool   `json:"casts,omitempty"`
	TS          int64  `json:"ts"`
}

// schemaList is the answer of GET /schemas/{topic}.
type schemaList struct {
	Topic         string        `json:"topic"`
	Mode          string        `json:"mode"`
	Compatibility string        `json:"compatibility"`
	Latest        int           `json:"latest"`
	Versions      []schemaEntry `json:"versions"`
}

// schemaAnswer is the answer of GET /schemas/{topic}/{version}. It does not tell who registered the
// version.
type schemaAnswer struct {
	Topic       string          `json:"topic"`
	Version     int             `json:"version"`
	Schema      json.RawMessage `json:"schema"`
	Up          json.RawMessage `json:"up,omitempty"`
	Down        json.RawMessage `json:"down,omitempty"`
	Description string          `json:"description,omitempty"`
	Forced      bool            `json:"forced,omitempty"`
	TS          int64           `json:"ts"`
}

// registration is the answer of POST /schemas/{topic}.
type registration struct {
	Topic   string `json:"topic"`
	Version int    `json:"version"`
	*schemas.Report
}

// schemaTopic returns the topic of the path, if the client may see and change its schemas.
func (s *Server) schemaTopic(r *http.Request) (string, *fault) {
	topic, fail := topicParam(r)
	if fail == nil {
		fail = s.may(principalOf(r), ActionSchema, topic, "see or change the schemas of")
	}
	if fail == nil {
		if of := s.cfg.Bus.Rule(topic).Schema.Of; of != "" { // other topics share them
			fail = s.may(principalOf(r), ActionSchema, of, "see or change the schemas of")
		}
	}
	return topic, fail
}

// serveSchemas serves GET /schemas/{topic}.
func (s *Server) serveSchemas(w http.ResponseWriter, r *http.Request) {
	topic, fail := s.schemaTopic(r)
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	all, err := s.cfg.Bus.Schemas().List(r.Context(), topic)
	if err != nil {
		s.logFailed(r, topic, err)
		s.refuse(w, busFault(err, codeInternal, "The schemas could not be read: try again later."))
		return
	}
	rule := s.cfg.Bus.Rule(topic).Schema
	list := schemaList{Topic: topic, Mode: string(rule.Mode), Compatibility: string(rule.Compatibility), Versions: []schemaEntry{}}
	if list.Mode == "" {
		list.Mode = string(topics.SchemaOff)
	}
	if list.Compatibility == "" {
		list.Compatibility = "backward"
	}
	for _, v := range all {
		list.Latest = v.Version
		list.Versions = append(list.Versions, schemaEntry{Version: v.Version, Description: v.Description, Forced: v.Forced, Casts: len(v.Up) > 0 || len(v.Down) > 0, TS: v.TS})
	}
	s.answerJSON(w, http.StatusOK, list)
}

// serveSchema serves GET /schemas/{topic}/{version}.
func (s *Server) serveSchema(w http.ResponseWriter, r *http.Request) {
	topic, fail := s.schemaTopic(r)
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	all, err := s.cfg.Bus.Schemas().List(r.Context(), topic)
	if err != nil {
		s.logFailed(r, topic, err)
		s.refuse(w, busFault(err, codeInternal, "The schemas could not be read: try again later."))
		return
	}
	text, err := pathParam(r, "version")
	n := len(all)
	if err == nil && text != "latest" {
		n, err = strconv.Atoi(text)
	}
	if err != nil || n < 0 || text != "latest" && strconv.Itoa(n) != text {
		s.refuse(w, &fault{code: codeBadOptions, msg: "The version in the path must be a number from 1 on, or latest."})
		return
	}
	if n == 0 || n > len(all) {
		s.refuse(w, &fault{code: codeNotFound, msg: noVersion(n, len(all))})
		return
	}
	v := all[n-1]
	s.answerJSON(w, http.StatusOK, schemaAnswer{v.Topic, v.Version, v.Schema, v.Up, v.Down, v.Description, v.Forced, v.TS})
}

// noVersion says that a version is not registered.
func noVersion(n, latest int) string {
	if latest == 0 {
		return "The topic has no schema."
	}
	return "Version " + strconv.Itoa(n) + " of the schema is not registered; the latest is " + strconv.Itoa(latest) + "."
}

// serveRegistration serves POST /schemas/{topic}.
func (s *Server) serveRegistration(w http.ResponseWriter, r *http.Request) {
	topic, draft, fail := s.readDraft(w, r)
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	v, report, err := s.cfg.Bus.Schemas().Register(r.Context(), topic, draft)
	if err != nil {
		s.logFailed(r, topic, err)
		s.refuse(w, busFault(err, codeInternal, "The version could not be registered: try again later."))
		return
	}
	status := http.StatusCreated
	if report == nil { // it was there
		status = http.StatusOK
	}
	s.answerJSON(w, status, registration{topic, v.Version, report})
}

// serveSchemaCheck serves POST /schemas/{topic}/check.
func (s *Server) serveSchemaCheck(w http.ResponseWriter, r *http.Request) {
	topic, draft, fail := s.readDraft(w, r)
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	report, err := s.cfg.Bus.Schemas().Check(r.Context(), topic, draft)
	if err != nil {
		s.logFailed(r, topic, err)
		s.refuse(w, busFault(err, codeInternal, "The version could not be checked: try again later."))
		return
	}
	s.answerJSON(w, http.StatusOK, report)
}

// readDraft reads path and body. No byte of the body is read before the client has permission.
func (s *Server) readDraft(w http.ResponseWriter, r *http.Request) (topic string, d schemas.Draft, fail *fault) {
	topic, fail = s.schemaTopic(r)
	if fail != nil {
		return topic, d, fail
	}
	p := principalOf(r)
	b, _ := buffers.Get().(*[]byte)
	defer putBuffer(b)
	switch fail = s.readBody(w, r, p, b, schemaBytes, false); {
	case fail != nil && fail.tooLarge:
		return topic, d, &fault{code: codeBadOptions, msg: "The body is larger than " + strconv.Itoa(schemaBytes) + " bytes."}
	case fail != nil:
		return topic, d, fail
	case !isObject(*b):
		return topic, d, &fault{code: codeBadOptions, msg: "The body must be a JSON object, not " + kind(*b) + "."}
	}
	d.By = p.Key()
	for walk := jsonscan.Walk(*b, 0); walk.Next(); {
		switch name := string(unquoteName(walk.Key, nil)); name {
		case "schema":
			d.Schema = append(json.RawMessage(nil), walk.Value...)
		case "up":
			d.Up = append(json.RawMessage(nil), walk.Value...)
		case "down":
			d.Down = append(json.RawMessage(nil), walk.Value...)
		case "description":
			if json.Unmarshal(walk.Value, &d.Description) != nil {
				return topic, d, &fault{code: codeBadOptions, msg: "description must be a string, not " + short(walk.Value)}
			}
		case "force":
			if json.Unmarshal(walk.Value, &d.Force) != nil {
				return topic, d, &fault{code: codeBadOptions, msg: "force must be true or false, not " + short(walk.Value)}
			}
		default:
			return topic, d, &fault{code: codeBadOptions, msg: "The body has " + strings.ToValidUTF8(name[:min(len(name), 40)], "") + ", which is none of schema, up, down, description and force."}
		}
	}
	return topic, d, nil
}

// answerJSON writes an answer.
func (s *Server) answerJSON(w http.ResponseWriter, status int, v any) {
	text, err := json.Marshal(v)
	if err != nil {
		s.refuse(w, &fault{code: codeInternal, msg: "The answer could not be written."})
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	out := s.newAnswer(w)
	w.WriteHeader(status)
	out.write(append(text, '\n'))
	out.end()
}
