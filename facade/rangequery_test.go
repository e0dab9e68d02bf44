package facade

import (
	"net/url"
	"slices"
	"testing"
	"time"

	"eventhub/jetstream"
)

// FuzzRangeQuery parses queries of both requests. What is taken is within bounds, and what is
// refused has a message and the status 400.
func FuzzRangeQuery(f *testing.F) {
	for _, raw := range []string{
		"", "topic=t", "topic=t&from=ts&ts=1", "topic=t&from=afterId&afterId=x", "topic=t&limit=0", "topic=t&fromTs=2&toTs=1", "topic=t&fromTs=1&toTs=2&ndjson=1",
		"topic=t&header=a:b&header=c:d", "topic=t&key=k&tombstones=true", "topic=t&header=:", "topic=%zz", "topic=t;x=y", "topic=t&limit=99999999999999999999", "topic=t&toTs=-0",
	} {
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		for name, parse := range map[string]func(string) (rangeQuery, *fault){"replay": parseReplay, "export": parseExport} {
			q, fail := parse(raw)
			if fail != nil {
				if fail.msg == "" || fail.rule().status != 400 {
					t.Fatalf("%s %q: %+v", name, raw, fail)
				}
				continue
			}
			values, err := url.ParseQuery(raw)
			if err != nil || q.topic == "" || q.topic != values.Get("topic") || q.opts.Limit < 0 || q.opts.Limit > maxReplay || len(q.opts.Headers) > maxRangeHeaders {
				t.Fatalf("%s %q: %+v, %v", name, raw, q, err)
			}
			if name == "replay" && q.opts.Limit == 0 || values.Has("limit") && q.opts.Limit == 0 {
				t.Fatalf("%s %q has no limit", name, raw)
			}
			if until := q.opts.Until; !until.IsZero() && (until.Before(q.opts.Since) || until.Before(time.UnixMilli(0))) {
				t.Fatalf("%s %q: until %v, since %v", name, raw, until, q.opts.Since)
			}
			for given := range values {
				if !slices.Contains(replayParams, given) && !slices.Contains(exportParams, given) {
					t.Fatalf("%s %q was taken", name, raw)
				}
			}
		}
	})
}

func TestExportBegins(t *testing.T) {
	q, fail := parseExport("topic=t&afterId=x&fromTs=5")
	if fail != nil || q.opts.From != jetstream.FromAfterID("x") || !q.opts.Since.Equal(time.UnixMilli(5)) || !q.opts.Until.IsZero() {
		t.Errorf("%+v, %+v", q, fail)
	}
	if q, fail = parseExport("topic=t"); fail != nil || q.opts.From != jetstream.FromTime(time.UnixMilli(0)) || q.opts.Limit != 0 {
		t.Errorf("%+v, %+v", q, fail)
	}
}
