package facade

import (
	"cmp"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"eventhub/jetstream"
)

const (
	defaultReplay = 1000
	maxReplay     = 1_000_000_000
	// maxRangeHeaders is how many headers a range may be filtered by.
	maxRangeHeaders = 16
	// maxRangeTime is the latest time in epoch milliseconds, the largest exact integer of
	// JavaScript.
	maxRangeTime = 1<<53 - 1
)

// Messages that existing clients know.
const (
	msgTopicRequired = "topic required"
	msgBadRange      = "invalid replay range parameters"
	msgBadLimit      = "limit must be a positive number"
	msgBadBounds     = "range bounds must be numeric"
	msgBoundsOrder   = "fromTs must be less than or equal to toTs"
)

// rangeQuery is the query of GET /replay or GET /export.
type rangeQuery struct {
	topic      string
	opts       jetstream.ReadOptions
	ndjson     bool
	tombstones bool // tombstones are marked
	version    int  // in which events are sent, as Server.casterOf takes it
}

// rangeParams are the parameters of both requests and of each.
var (
	replayParams = []string{"topic", "limit", "key", "header", "afterId", "tombstones", optSchemaVersion, "from", "ts"}
	exportParams = []string{"topic", "limit", "key", "header", "afterId", "tombstones", optSchemaVersion, "fromTs", "toTs", "ndjson"}
)

// parseReplay reads the query of GET /replay.
func parseReplay(raw string) (q rangeQuery, fail *fault) {
	values, fail := parseRange(raw, &q, replayParams, defaultReplay)
	if fail != nil {
		return q, fail
	}
	ts, hasTS, bad := rangeTime(values, "ts")
	hasID := values.Has("afterId")
	from := values.Get("from")
	switch {
	case bad != "":
		return q, badRange(msgBadRange)
	case (from == "" || from == "earliest") && !hasTS && !hasID:
		q.opts.From = jetstream.FromEarliest
	case from == "ts" && hasTS && !hasID:
		q.opts.From = jetstream.FromTime(ts)
	case from == "afterId" && hasID && !hasTS && values.Get("afterId") != "":
		q.opts.From = jetstream.FromAfterID(values.Get("afterId"))
	default:
		return q, badRange(msgBadRange)
	}
	return q, nil
}

// parseExport reads the query of GET /export.
func parseExport(raw string) (q rangeQuery, fail *fault) {
	values, fail := parseRange(raw, &q, exportParams, 0)
	if fail != nil {
		return q, fail
	}
	from, _, bad := rangeTime(values, "fromTs")
	to, hasTo, badTo := rangeTime(values, "toTs")
	switch {
	case bad != "" || badTo != "":
		return q, badRange(cmp.Or(bad, badTo))
	case hasTo && from.After(to):
		return q, badRange(msgBoundsOrder)
	}
	if from.IsZero() {
		from = time.UnixMilli(0)
	}
	q.opts.From, q.opts.Until = jetstream.FromTime(from), to
	if values.Has("afterId") {
		if values.Get("afterId") == "" {
			return q, badRange(msgBadRange)
		}
		q.opts.From, q.opts.Since = jetstream.FromAfterID(values.Get("afterId")), from
	}
	q.ndjson, fail = rangeFlag(values, "ndjson")
	return q, fail
}

// parseRange reads what both requests have in common.
func parseRange(raw string, q *rangeQuery, known []string, limit int) (url.Values, *fault) {
	values, err := url.ParseQuery(raw)
	if err != nil {
		return nil, badRange(msgBadRange)
	}
	if q.topic = values.Get("topic"); q.topic == "" {
		return nil, &fault{code: codeBadTopic, msg: msgTopicRequired}
	}
	if fail := checkParams(values, known); fail != nil {
		return nil, fail
	}
	q.opts.Limit = limit
	if values.Has("limit") {
		n, err := strconv.Atoi(values.Get("limit"))
		if err != nil || n < 1 || n > maxReplay {
			return nil, badRange(msgBadLimit)
		}
		q.opts.Limit = n
	}
	if values.Has("key") {
		q.opts.Key = values.Get("key")
		if fail := checkKey("The parameter key", q.opts.Key); fail != nil {
			return nil, fail
		}
	}
	fail := rangeHeaders(values["header"], q)
	if fail == nil {
		q.tombstones, fail = rangeFlag(values, "tombstones")
	}
	if fail == nil {
		q.version, fail = versionParam(values)
	}
	return values, fail
}

// checkParams refuses parameters that a request does not have, because the answer to a mistyped
// filter would be all events, and parameters that are given twice.
func checkParams(values url.Values, known []string) *fault {
	for name, given := range values {
		found := false
		for _, k := range known {
			found = found || k == name
		}
		switch {
		case !found:
			return badRange("There is no parameter " + brief(name) + "; there are " + strings.Join(known, ", ") + ".")
		case len(given) > 1 && name != "header" && name != "topics":
			return badRange(name + " must be given once.")
		}
	}
	return nil
}

// rangeHeaders reads the filters NAME:VALUE.
func rangeHeaders(given []string, q *rangeQuery) *fault {
	if len(given) == 0 {
		return nil
	}
	if len(given) > maxRangeHeaders {
		return badRange("header is given " + strconv.Itoa(len(given)) + " times: at most " + strconv.Itoa(maxRangeHeaders) + " are allowed.")
	}
	q.opts.Headers = make(map[string]string, len(given))
	for _, h := range given {
		name, value, ok := strings.Cut(h, ":")
		name, value = strings.ToLower(name), strings.Trim(value, " ")
		_, twice := q.opts.Headers[name]
		switch {
		case !ok || name == "" || !utf8.ValidString(h):
			return badRange("header must be NAME:VALUE, the header of an event and its value.")
		case twice:
			return badRange("header names " + brief(name) + " twice.")
		}
		q.opts.Headers[name] = value
	}
	return nil
}

// rangeTime reads a time in epoch milliseconds. bad is the message if it is none.
func rangeTime(values url.Values, name string) (at time.Time, given bool, bad string) {
	if !values.Has(name) {
		return time.Time{}, false, ""
	}
	ms, err := strconv.ParseInt(values.Get(name), 10, 64)
	switch {
	case err != nil:
		return time.Time{}, true, msgBadBounds
	case ms < 0 || ms > maxRangeTime:
		return time.Time{}, true, msgBadRange
	}
	return time.UnixMilli(ms), true, ""
}

// rangeFlag reads a parameter that is 1, 0, true or false.
func rangeFlag(values url.Values, name string) (bool, *fault) {
	switch values.Get(name) {
	case "1", "true":
		return true, nil
	case "0", "false":
		return false, nil
	case "":
		if !values.Has(name) {
			return false, nil
		}
	}
	return false, badRange(name + " must be 1 or 0.")
}

func badRange(msg string) *fault { return &fault{code: codeBadOptions, msg: msg} }

// brief shortens what a client sent for a message.
func brief(s string) string {
	const limit = 64
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + "…"
}
