package facade

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"eventhub/jetstream"
	"eventhub/jetstream/jsonscan"
)

// eventHeaderPrefix begins the request headers that name a header of the event.
const eventHeaderPrefix = "event-header-"

// passedHeaders are the request headers that become headers of the event under their own names, in
// lower case. An asterisk at the end stands for any rest. Everything else about a request stays out
// of the event: browsers and proxies add cookies, addresses and API keys, which all subscribers
// would see.
var passedHeaders = []string{
	"content-type", "traceparent", "tracestate", "x-correlation-id", "x-request-id", "x-schema-version", "ce-*",
}

// secretHeaders carry credentials, and never become part of an event.
var secretHeaders = []string{"authorization", "proxy-authorization", "cookie", "set-cookie"}

// headerNames tells which request headers become part of the event.
type headerNames struct {
	exact    map[string]bool
	prefixes []string
}

// newHeaderNames adds the operator's names (Config.Headers) to passedHeaders.
func newHeaderNames(more []string) (*headerNames, error) {
	n := &headerNames{exact: make(map[string]bool)}
	for _, given := range slices.Concat(passedHeaders, more) {
		name, prefix := strings.CutSuffix(strings.ToLower(given), "*")
		if !isToken(name) {
			return nil, fmt.Errorf("%q is not a header name, nor the beginning of one followed by *", given)
		}
		for _, secret := range secretHeaders {
			if name == secret || prefix && strings.HasPrefix(secret, name) {
				return nil, fmt.Errorf("%q includes %s, which carries credentials that all subscribers would see", given, secret)
			}
		}
		for _, reserved := range []string{"event-", "nats-", "kv-"} {
			if strings.HasPrefix(name, reserved) || prefix && strings.HasPrefix(reserved, name) {
				return nil, fmt.Errorf("%q includes %s*, which is reserved", given, reserved)
			}
		}
		if prefix {
			n.prefixes = append(n.prefixes, name)
		} else {
			n.exact[name] = true
		}
	}
	return n, nil
}

// ValidHeader says what is wrong with an element of Config.Headers.
func ValidHeader(name string) error {
	_, err := newHeaderNames([]string{name})
	return err
}

// pass reports whether a header becomes part of the event. lower is its name in lower case.
func (n *headerNames) pass(lower string) bool {
	return n.exact[lower] || slices.ContainsFunc(n.prefixes, func(p string) bool { return strings.HasPrefix(lower, p) })
}

// isToken reports whether s is a token as RFC 9110 section 5.6.2 has it, in lower case.
func isToken(s string) bool {
	for _, c := range []byte(s) {
		letter, digit := 'a' <= c && c <= 'z', '0' <= c && c <= '9'
		if !letter && !digit && strings.IndexByte("!#$%&'*+-.^_`|~", c) < 0 {
			return false
		}
	}
	return s != ""
}

// headerOptions makes the event's fields and headers of those of the request.
func (s *Server) headerOptions(r *http.Request) (jetstream.PublishOptions, *fault) {
	opts := jetstream.PublishOptions{Headers: make(map[string]string)}
	for name, values := range r.Header {
		lower := strings.ToLower(name)
		switch {
		case strings.HasPrefix(lower, eventHeaderPrefix):
			if len(values) != 1 {
				return opts, &fault{code: codeBadOptions, msg: "The header " + name + " is given more than once."}
			}
			if !utf8.ValidString(values[0]) {
				return opts, &fault{code: codeBadOptions, msg: "The header " + name + " must be UTF-8 text."}
			}
			opts.Headers[lower[len(eventHeaderPrefix):]] = values[0]
		case strings.HasPrefix(lower, "event-"):
			if fail := eventField(&opts, lower, name, values); fail != nil {
				return opts, fail
			}
		case s.headers.pass(lower):
			if _, named := r.Header[http.CanonicalHeaderKey(eventHeaderPrefix+lower)]; !named {
				opts.Headers[lower] = strings.ToValidUTF8(strings.Join(values, ", "), "\uFFFD")
			}
		}
	}
	if len(r.Header["Event-Delay-Ms"]) > 0 && len(r.Header["Event-At"]) > 0 {
		return opts, &fault{code: codeBadOptions, msg: "The headers Event-Delay-Ms and Event-At" + errTwoDelays + "."}
	}
	return opts, nil
}

// eventField reads one of the Event-* request headers.
func eventField(opts *jetstream.PublishOptions, lower, name string, values []string) *fault {
	if len(values) != 1 && lower != "event-tags" && lower != "event-caused-by" {
		return &fault{code: codeBadOptions, msg: "The header " + name + " is given more than once."}
	}
	for _, v := range values {
		if v == "" || !utf8.ValidString(v) {
			return &fault{code: codeBadOptions, msg: "The header " + name + " must be UTF-8 text and not empty."}
		}
	}
	switch lower {
	case "event-id":
		opts.ID = values[0]
	case "event-key":
		opts.Key = values[0]
	case "event-sid":
		opts.SID = values[0]
	case "event-ts":
		ts, err := strconv.ParseInt(values[0], 10, 64)
		if err != nil || ts < 0 || ts > maxTimestamp {
			return &fault{code: codeBadOptions, msg: "The header " + name + " must be epoch milliseconds."}
		}
		opts.TS, opts.HasTS = ts, true
	case "event-delay-ms":
		delay, err := strconv.ParseInt(values[0], 10, 64)
		if err != nil || delay < 0 || delay > maxDelay {
			return &fault{code: codeBadOptions, msg: "The header " + name + " must be an integer from 0 to " + strconv.Itoa(maxDelay) + "."}
		}
		opts.Delay = time.Duration(delay) * time.Millisecond
	case "event-at":
		at, err := strconv.ParseInt(values[0], 10, 64)
		if err != nil || at < 0 || at > maxTimestamp {
			return &fault{code: codeBadOptions, msg: "The header " + name + " must be epoch milliseconds."}
		}
		opts.At = time.UnixMilli(at)
	case "event-tombstone":
		if values[0] != "true" && values[0] != "false" {
			return &fault{code: codeBadOptions, msg: "The header " + name + " must be true or false."}
		}
		opts.Tombstone = values[0] == "true"
	case "event-tags", "event-caused-by":
		list, ok := stringList(values)
		if !ok {
			return &fault{code: codeBadOptions, msg: "The header " + name + " must be a JSON array of strings, or strings separated by commas."}
		}
		if lower == "event-tags" {
			opts.Tags = list
		} else {
			opts.CausedBy = list
		}
	default:
		return &fault{code: codeBadOptions, msg: "The header " + name + " is not known; Event-* is reserved."}
	}
	return nil
}

// stringList reads a JSON array of strings, or strings separated by commas.
func stringList(values []string) ([]string, bool) {
	joined := strings.TrimSpace(strings.Join(values, ","))
	if !strings.HasPrefix(joined, "[") {
		var list []string
		for v := range strings.SplitSeq(joined, ",") {
			if v = strings.TrimSpace(v); v != "" {
				list = append(list, v)
			}
		}
		return list, true
	}
	var list []string
	w := jsonscan.Walk([]byte(joined), 0)
	for w.Next() {
		if !isString(w.Value) {
			return nil, false
		}
		item, _ := jsonscan.Unquote(w.Value, nil)
		list = append(list, string(item))
	}
	return list, w.Err() == nil
}
