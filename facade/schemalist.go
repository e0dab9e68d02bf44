package facade

import (
	"net/http"
	"net/url"
	"sort"

	"eventhub/jetstream"
)

// namedSchema is a name in the answer of GET /schemas.
type namedSchema struct {
	Topic  string `json:"topic"`
	Latest int    `json:"latest"`
	TS     int64  `json:"ts"` // of the latest version
}

// schemaNames is the answer of GET /schemas.
type schemaNames struct {
	Topics []namedSchema `json:"topics"`
	Next   string        `json:"next,omitempty"`
}

// parseSchemaNames reads the query of GET /schemas.
func parseSchemaNames(query string) (next string, limit int, fail *fault) {
	values, err := url.ParseQuery(query)
	if err != nil {
		return "", 0, &fault{code: codeBadOptions, msg: "The query is not URL-encoded correctly."}
	}
	if limit, fail = queryInt(values, "limit", defaultPage, 1, maxPage); fail != nil {
		return "", 0, fail
	}
	next = values.Get("next")
	if len(values["next"]) > 1 || next != "" && jetstream.ValidTopic(next) != nil {
		return "", 0, &fault{code: codeBadOptions, msg: "next must be the next of an answer, given once."}
	}
	return next, limit, nil
}

// serveSchemaNames serves GET /schemas: the names whose schemas the client may see.
func (s *Server) serveSchemaNames(w http.ResponseWriter, r *http.Request) {
	next, limit, fail := parseSchemaNames(r.URL.RawQuery)
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	answer, err := s.schemaNames(r, next, limit)
	if err != nil {
		s.logFailed(r, "", err)
		s.refuse(w, busFault(err, codeInternal, "The schemas could not be read: try again later."))
		return
	}
	s.answerJSON(w, http.StatusOK, answer)
}

// schemaNames reads a page of names.
func (s *Server) schemaNames(r *http.Request, next string, limit int) (page schemaNames, err error) {
	registry := s.cfg.Bus.Schemas()
	names, err := registry.Topics(r.Context())
	if err != nil {
		return page, err
	}
	page.Topics = []namedSchema{}
	p := principalOf(r)
	for _, name := range names[sort.Search(len(names), func(i int) bool { return names[i] > next }):] {
		// GET /schemas/{topic} answers with the schemas of another name if the rule says so.
		if of := s.cfg.Bus.Rule(name).Schema.Of; of != "" && of != name || !p.Allows(ActionSchema, name, "") {
			continue
		}
		if len(page.Topics) == limit {
			page.Next = page.Topics[limit-1].Topic
			break
		}
		all, err := registry.List(r.Context(), name)
		if err != nil {
			return page, err
		}
		if n := len(all); n > 0 {
			page.Topics = append(page.Topics, namedSchema{Topic: name, Latest: n, TS: all[n-1].TS})
		}
	}
	return page, nil
}
