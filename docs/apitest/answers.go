package apitest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"eventhub/docs"
)

// Port is one of the ports that docs/openapi.yaml describes.
type Port int

// The ports, as the servers of the document have them.
const (
	WebSocket Port = 8090 // which has the demo
	Clients   Port = 8081
	Operators Port = 8082
)

// keepBody is how many bytes of a body are kept. The body of a longer answer is not checked.
const keepBody = 8 << 20

// noRoute is the message of a 404 for a path that is no route.
const noRoute = "There is nothing at this path."

// api is docs/openapi.yaml.
type api struct {
	spec    *openapi3.T
	schemas *schemas
	common  map[string]bool // headers of any answer
}

// load reads and validates the document once.
var load = sync.OnceValues(func() (*api, error) {
	spec, err := openapi3.NewLoader().LoadFromData(docs.OpenAPI)
	if err == nil {
		err = spec.Validate(context.Background())
	}
	if err != nil {
		return nil, fmt.Errorf("docs/openapi.yaml: %w", err)
	}
	a := &api{spec: spec, common: make(map[string]bool)}
	for _, name := range texts(spec.Extensions["x-common-headers"]) {
		a.common[name] = true
	}
	a.schemas, err = newSchemas("openapi.yaml", docs.OpenAPI, true)
	return a, err
})

// texts returns the strings of an extension that is a list.
func texts(extension any) (list []string) {
	items, _ := extension.([]any)
	for _, item := range items {
		if text, ok := item.(string); ok {
			list = append(list, text)
		}
	}
	return list
}

// Transport returns a transport whose answers are held against docs/openapi.yaml. It checks a body
// when the test has read all of it.
func Transport(tb testing.TB, port Port, next http.RoundTripper) http.RoundTripper {
	tb.Helper()
	a, err := load()
	if err != nil {
		tb.Fatal(err)
	}
	return transport{a, tb, port, next}
}

type transport struct {
	api  *api
	tb   testing.TB
	port Port
	next http.RoundTripper
}

func (t transport) RoundTrip(r *http.Request) (*http.Response, error) {
	res, err := t.next.RoundTrip(r)
	if err != nil || res.StatusCode == http.StatusSwitchingProtocols {
		return res, err
	}
	e := t.api.exchange(t.port, r, res.StatusCode, res.Header)
	e.head()
	e.report(t.tb)
	res.Body = &body{ReadCloser: res.Body, whole: func(text []byte) {
		e.body(text)
		e.trailers(res.Trailer)
		e.report(t.tb)
	}}
	return res, nil
}

// CloseIdleConnections is what http.Client.CloseIdleConnections calls.
func (t transport) CloseIdleConnections() {
	if next, ok := t.next.(interface{ CloseIdleConnections() }); ok {
		next.CloseIdleConnections()
	}
}

// body passes a body on, and calls whole with its bytes when it has ended well.
type body struct {
	io.ReadCloser
	whole func([]byte)
	kept  []byte
	over  bool // it is longer than keepBody, or has ended
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.over {
		return n, err
	}
	b.kept = append(b.kept, p[:n]...)
	switch {
	case errors.Is(err, io.EOF):
		b.whole(b.kept)
		b.over = true
	case err != nil || len(b.kept) > keepBody:
		b.kept, b.over = nil, true
	}
	return n, err
}

// Handler returns a handler whose answers are held against docs/openapi.yaml, for tests without a
// connection.
func Handler(tb testing.TB, port Port, next http.Handler) http.Handler {
	tb.Helper()
	a, err := load()
	if err != nil {
		tb.Fatal(err)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rec := &recorder{ResponseWriter: w}
		next.ServeHTTP(rec, r)
		if rec.status == 0 {
			rec.WriteHeader(http.StatusOK)
		}
		e := a.exchange(port, r, rec.status, rec.header)
		e.head()
		e.body(rec.body)
		e.report(tb)
	})
}

type recorder struct {
	http.ResponseWriter
	status int
	header http.Header
	body   []byte
}

func (r *recorder) WriteHeader(status int) {
	if r.status == 0 {
		r.status, r.header = status, r.Header().Clone()
	}
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Write(b []byte) (int, error) {
	if r.status == 0 {
		r.WriteHeader(http.StatusOK)
	}
	r.body = append(r.body, b...)
	return r.ResponseWriter.Write(b)
}

func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

// exchange is a request with its answer.
type exchange struct {
	api      *api
	request  *http.Request
	status   int
	header   http.Header
	route    *Route             // nil: the document has no such path
	response *openapi3.Response // nil: nothing is known of the answer
	// unrouted says that the answer must be that of a path that is no route.
	unrouted bool
	faults   []string
}

func (a *api) exchange(port Port, r *http.Request, status int, header http.Header) *exchange {
	e := &exchange{api: a, request: r, status: status, header: header}
	method := r.Method
	if method == http.MethodHead {
		method = http.MethodGet
	}
	if r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != "" {
		return e // a preflight is no operation
	}
	var paths []Route
	for _, at := range a.routes(port) {
		values, ok := at.match(r.URL.EscapedPath())
		if !ok {
			continue
		}
		at.values = values
		paths = append(paths, at)
	}
	// A literal segment goes before one that may be anything.
	slices.SortStableFunc(paths, func(a, b Route) int { return len(a.values) - len(b.values) })
	for i := range paths {
		if paths[i].Method == method && len(paths[i].values) == len(paths[0].values) {
			e.route = &paths[i]
			break
		}
	}
	shared := a.spec.Components.Responses
	switch {
	case e.route != nil && e.route.operation.Responses.Status(status) != nil:
		e.response = e.route.operation.Responses.Status(status).Value
	case status == http.StatusNotFound:
		e.response, e.unrouted = shared["NotFound"].Value, true
	case status == http.StatusMethodNotAllowed:
		e.response = shared["NotFound"].Value
		e.allow(paths)
	case e.route == nil && status == http.StatusServiceUnavailable:
		e.response = shared["Unavailable"].Value // a limit is reached before the path is looked at
	case e.route == nil:
		e.fault("the route is not in docs/openapi.yaml: add it under paths, with servers for port %d and x-permission", port)
	default:
		e.fault("the status is not in docs/openapi.yaml: add it under %s.responses (it has %s)", e.place(), names(e.route.operation.Responses.Map()))
	}
	return e
}

func (e *exchange) fault(format string, args ...any) {
	e.faults = append(e.faults, fmt.Sprintf(format, args...))
}

// place is where the document has the operation.
func (e *exchange) place() string {
	if e.route == nil {
		return "paths"
	}
	return "paths['" + e.route.Path + "']." + strings.ToLower(e.route.Method)
}

// report fails the test with the faults since the last call. A fault that comes after the test has
// nobody to tell.
func (e *exchange) report(tb testing.TB) {
	tb.Helper()
	if tb.Context().Err() == nil {
		for _, f := range e.faults {
			tb.Errorf("%s %s was answered with %d: %s", e.request.Method, brief(e.request.URL.RequestURI()), e.status, f)
		}
	}
	e.faults = nil
}

// allow compares the header Allow with the methods that the document has for the path.
func (e *exchange) allow(paths []Route) {
	given := e.header.Values("Allow")
	if len(given) == 0 {
		e.fault("it has no header Allow")
	}
	for _, method := range given {
		known := slices.ContainsFunc(paths, func(at Route) bool {
			return at.Method == method || method == http.MethodHead && at.Method == http.MethodGet
		})
		if !known {
			e.fault("Allow names %s, and docs/openapi.yaml has no such operation: add it", method)
		}
	}
}

// head checks the headers, and the parameters of a request that succeeded.
func (e *exchange) head() {
	if e.response == nil {
		return
	}
	documented := make(map[string]*openapi3.Header)
	for name, h := range e.response.Headers {
		documented[http.CanonicalHeaderKey(name)] = h.Value
	}
	for name, values := range e.header {
		switch {
		case e.api.common[name], name == "Allow" && e.status == http.StatusMethodNotAllowed:
		case documented[name] == nil:
			e.fault("the header %s is not in docs/openapi.yaml: add it under %s.responses.%d.headers", name, e.place(), e.status)
		default:
			if err := checkText(documented[name].Schema.Value, values); err != nil {
				e.fault("the header %s: %v", name, err)
			}
		}
	}
	for name, h := range documented {
		if h.Required && len(e.header[name]) == 0 {
			e.fault("the header %s is missing, which docs/openapi.yaml requires", name)
		}
	}
	if e.route != nil && e.status < 300 {
		e.parameters()
	}
}

// checkText checks the values of a header or of a parameter.
func checkText(schema *openapi3.Schema, values []string) error {
	if schema.Type.Is(openapi3.TypeArray) {
		items := make([]any, len(values))
		for i, text := range values {
			items[i] = text
		}
		return schema.VisitJSON(items, openapi3.EnableJSONSchema2020())
	}
	if len(values) != 1 {
		return fmt.Errorf("it is there %d times", len(values))
	}
	var value any = values[0]
	switch {
	case schema.Type.Is(openapi3.TypeInteger):
		n, err := strconv.ParseInt(values[0], 10, 64)
		if err != nil {
			return err
		}
		value = json.Number(strconv.FormatInt(n, 10))
	case schema.Type.Is(openapi3.TypeBoolean):
		b, err := strconv.ParseBool(values[0])
		if err != nil {
			return err
		}
		value = b
	}
	return schema.VisitJSON(value, openapi3.EnableJSONSchema2020())
}

// parameters checks that the document permits the parameters of a request that the hub has taken.
func (e *exchange) parameters() {
	query := e.request.URL.Query()
	for _, ref := range slices.Concat(e.route.item.Parameters, e.route.operation.Parameters) {
		p := ref.Value
		var given []string
		switch p.In {
		case openapi3.ParameterInQuery:
			given = query[p.Name]
		case openapi3.ParameterInHeader:
			given = e.request.Header.Values(p.Name)
		case openapi3.ParameterInPath:
			given = []string{e.route.values[p.Name]}
		}
		if len(given) == 0 {
			if p.Required {
				e.fault("the hub takes the request without %s, which docs/openapi.yaml requires", p.Name)
			}
			continue
		}
		if len(given) > 1 && p.In == openapi3.ParameterInHeader {
			given = []string{strings.Join(given, ", ")}
		}
		if err := checkText(p.Schema.Value, given); err != nil {
			e.fault("the hub takes the request, and docs/openapi.yaml does not: change %s under %s.parameters: %v", p.Name, e.place(), err)
		}
	}
}

// body checks a complete body.
func (e *exchange) body(text []byte) {
	if e.response == nil || e.request.Method == http.MethodHead {
		return
	}
	text, err := unpack(e.header.Get("Content-Encoding"), text)
	if err != nil {
		e.fault("the body is not in its encoding: %v", err)
		return
	}
	if len(e.response.Content) == 0 {
		if len(text) > 0 {
			e.fault("docs/openapi.yaml has no body for it, and it has %s", brief(string(text)))
		}
		return
	}
	kind, _, err := mime.ParseMediaType(e.header.Get("Content-Type"))
	content := e.response.Content[kind]
	if err != nil || content == nil {
		e.fault("the body has the type %q; docs/openapi.yaml has %s: add it under %s.responses.%d.content", kind, names(e.response.Content), e.place(), e.status)
		return
	}
	switch kind {
	case "application/json":
		e.value(content.Schema.Ref, text)
	case "text/event-stream":
		for line := range bytes.Lines(text) {
			if data, ok := bytes.CutPrefix(line, []byte("data: ")); ok {
				e.value(content.Schema.Ref, data)
			}
		}
	case "application/x-ndjson":
		for line := range bytes.Lines(text) {
			e.value(content.Schema.Ref, line)
		}
	}
	if e.unrouted && !bytes.Contains(text, []byte(noRoute)) {
		e.fault("the status is not in docs/openapi.yaml: add it under %s.responses", e.place())
	}
}

// value checks JSON against a schema of the document.
func (e *exchange) value(schema string, text []byte) {
	v, err := decode(text)
	if err != nil {
		e.fault("%v: %s", err, brief(string(text)))
		return
	}
	if err := e.api.schemas.check(schema, v); err != nil {
		e.fault("%s does not fit %s of docs/openapi.yaml: %v", brief(string(text)), schema, err)
	}
}

// trailers checks what came after the body.
func (e *exchange) trailers(trailer http.Header) {
	if e.route == nil {
		return
	}
	for name := range trailer {
		if !slices.Contains(texts(e.route.operation.Extensions["x-trailers"]), name) {
			e.fault("the trailer %s is not in docs/openapi.yaml: add it under %s.x-trailers", name, e.place())
		}
	}
}

// unpack decompresses a body.
func unpack(coding string, text []byte) ([]byte, error) {
	switch {
	case len(text) == 0:
	case coding == "gzip":
		r, err := gzip.NewReader(bytes.NewReader(text))
		if err != nil {
			return nil, err
		}
		return io.ReadAll(r)
	case coding == "zstd":
		r, err := zstd.NewReader(bytes.NewReader(text))
		if err != nil {
			return nil, err
		}
		defer r.Close()
		return io.ReadAll(r)
	}
	return text, nil
}

// Route is an operation of docs/openapi.yaml.
type Route struct {
	Method, Path string
	// Permission is x-permission, and Topic x-permission-topic.
	Permission, Topic string
	// Open says that the operation needs no token.
	Open bool

	item      *openapi3.PathItem
	operation *openapi3.Operation
	values    map[string]string // of the parameters in a path
}

// Routes returns the operations of a port.
func Routes(tb testing.TB, port Port) []Route {
	tb.Helper()
	a, err := load()
	if err != nil {
		tb.Fatal(err)
	}
	return a.routes(port)
}

func (a *api) routes(port Port) (routes []Route) {
	for path, item := range a.spec.Paths.Map() {
		servers := item.Servers
		if len(servers) == 0 {
			servers = a.spec.Servers
		}
		here := slices.ContainsFunc(servers, func(s *openapi3.Server) bool {
			return strings.HasSuffix(s.URL, ":"+strconv.Itoa(int(port)))
		})
		if !here {
			continue
		}
		for method, operation := range item.Operations() {
			permission, _ := operation.Extensions["x-permission"].(string)
			topic, _ := operation.Extensions["x-permission-topic"].(string)
			routes = append(routes, Route{
				Method: method, Path: path, Permission: permission, Topic: topic,
				Open: operation.Security != nil && len(*operation.Security) == 0, item: item, operation: operation,
			})
		}
	}
	return routes
}

// match compares an escaped path with that of the operation, and returns the values of its
// parameters.
func (at Route) match(path string) (values map[string]string, ok bool) {
	want, got := strings.Split(at.Path, "/"), strings.Split(path, "/")
	if at.slashes() && len(got) > len(want) {
		got = append(got[:len(want)-1], strings.Join(got[len(want)-1:], "/"))
	}
	if len(got) != len(want) {
		return nil, false
	}
	values = make(map[string]string)
	for i, segment := range want {
		if !strings.HasPrefix(segment, "{") {
			if segment != got[i] {
				return nil, false
			}
			continue
		}
		value, err := url.PathUnescape(got[i])
		if err != nil {
			value = got[i]
		}
		values[strings.Trim(segment, "{}")] = value
	}
	return values, true
}

// slashes reports whether the last parameter of the path may have slashes.
func (at Route) slashes() bool {
	return slices.ContainsFunc(at.item.Parameters, func(p *openapi3.ParameterRef) bool {
		yes, _ := p.Value.Extensions["x-slashes"].(bool)
		return yes
	})
}
