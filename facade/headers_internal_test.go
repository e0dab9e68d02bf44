package facade

import (
	"math/big"
	"testing"
	"time"
	"unicode/utf8"

	"eventhub/jetstream"
)

// FuzzTimeHeaders compares the request headers that are times with arithmetic that does not
// overflow.
func FuzzTimeHeaders(f *testing.F) {
	for _, value := range []string{"0", "1", "-1", "+1", "31536000000", "31536000001", "9007199254740991", "9007199254740992", "99999999999999999999", "1e3", " 1", "", "\xff"} {
		f.Add(value)
	}
	f.Fuzz(func(t *testing.T, value string) {
		n, isNumber := new(big.Int).SetString(value, 10)
		within := func(most int64) bool {
			return isNumber && n.Sign() >= 0 && n.Cmp(big.NewInt(most)) <= 0
		}
		for _, c := range []struct {
			header string
			most   int64
			read   func(o *jetstream.PublishOptions) time.Duration
		}{
			{"event-delay-ms", maxDelay, func(o *jetstream.PublishOptions) time.Duration { return o.Delay }},
			{"event-at", maxTimestamp, func(o *jetstream.PublishOptions) time.Duration {
				return time.Duration(o.At.UnixMilli()) * time.Millisecond
			}},
			{"event-ts", maxTimestamp, func(o *jetstream.PublishOptions) time.Duration { return time.Duration(o.TS) * time.Millisecond }},
		} {
			var opts jetstream.PublishOptions
			fail := eventField(&opts, c.header, c.header, []string{value})
			if (fail == nil) != within(c.most) {
				t.Fatalf("%s: %q: %v", c.header, value, fail)
			}
			if fail != nil {
				if !utf8.ValidString(fail.msg) || fail.code != codeBadOptions {
					t.Fatalf("%s: %q: %v", c.header, value, fail)
				}
				continue
			}
			if got := c.read(&opts); got != time.Duration(n.Int64())*time.Millisecond {
				t.Fatalf("%s: %q: read as %v", c.header, value, got)
			}
		}
	})
}
