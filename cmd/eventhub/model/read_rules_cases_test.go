//go:build unix

package model

import (
	"slices"
	"strings"
	"testing"
)

// acknowledged has the events e1, e2 and e3 of key k on topic t, number 3 of them after the answers
// to the others. The group g has acknowledged e1 at 301 and e3 at 501.
const acknowledged = `
0 - set {"seed":1,"ackWaitMs":6000,"toleranceMs":20000,"drained":false}
1 c1 open h0 by=go
10 c1 > {"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"from":"earliest","ackTimeoutMs":3000},"corr":"s1"}
12/11 c1 < {"op":"OK","corr":"s1"}
100 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":1},"opts":{"key":"k"},"corr":"p1"}
110/109 c1 < {"op":"OK","id":"e1","corr":"p1"}
120 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":2},"opts":{"key":"k"},"corr":"p2"}
130/129 c1 < {"op":"OK","id":"e2","corr":"p2"}
200/190 c1 < {"op":"EVENT","topic":"t","group":"g","event":{"id":"e1","topic":"t","key":"k","payload":{"n":1}},"ctx":{"attempt":1,"ack_deadline_ms":3000}}
210/200 c1 < {"op":"EVENT","topic":"t","group":"g","event":{"id":"e2","topic":"t","key":"k","payload":{"n":2}},"ctx":{"attempt":1,"ack_deadline_ms":3000}}
300 c1 > {"op":"ACK","topic":"t","group":"g","id":"e1","corr":"a1"}
301/300 c1 < {"op":"OK","corr":"a1"}
400 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":3},"opts":{"key":"k"},"corr":"p3"}
410/409 c1 < {"op":"OK","id":"e3","corr":"p3"}
450/440 c1 < {"op":"EVENT","topic":"t","group":"g","event":{"id":"e3","topic":"t","key":"k","payload":{"n":3}},"ctx":{"attempt":1,"ack_deadline_ms":3000}}
500 c1 > {"op":"ACK","topic":"t","group":"g","id":"e3","corr":"a3"}
501/500 c1 < {"op":"OK","corr":"a3"}
20000 - stored t 1 e1 1000 {"n":1}
20000 - stored t 2 e2 1020 {"n":2}
20000 - stored t 3 e3 1300 {"n":3}
`

// settledAll is acknowledged and drained: e2 was acknowledged at 701.
const settledAll = acknowledged + `
700 c1 > {"op":"ACK","topic":"t","group":"g","id":"e2","corr":"a2"}
701/700 c1 < {"op":"OK","corr":"a2"}
0 - set {"drained":true}
`

// rowAdded is a row of an outbox that was committed, and is not stored by itself.
const rowAdded = `
800 - row {"id":"r1","topic":"t","key":"k","payload":{"n":4}}
801 - done r1 commit
`

// publishedTombstone removes key k with gone-4.
const publishedTombstone = `
800 c1 > {"op":"PUBLISH","topic":"t","payload":null,"opts":{"id":"gone-4","key":"k","tombstone":true},"corr":"p4"}
810/809 c1 < {"op":"OK","id":"gone-4","corr":"p4"}
820/815 c1 < {"op":"EVENT","topic":"t","group":"g","event":{"id":"gone-4","topic":"t","key":"k","payload":null},"ctx":{"attempt":1,"ack_deadline_ms":3000}}
830 c1 > {"op":"ACK","topic":"t","group":"g","id":"gone-4","corr":"a4"}
831/830 c1 < {"op":"OK","corr":"a4"}
20000 - stored t 4 gone-4 1400 null
`

// storedRow is the row in the stream, and its acknowledgement.
func storedRow(seq, id, n string) string {
	return `
820/815 c1 < {"op":"EVENT","topic":"t","group":"g","event":{"id":"` + id + `","topic":"t","key":"k","payload":{"n":` + n + `}},"ctx":{"attempt":1,"ack_deadline_ms":3000}}
830 c1 > {"op":"ACK","topic":"t","group":"g","id":"` + id + `","corr":"` + id + `"}
831/830 c1 < {"op":"OK","corr":"` + id + `"}
20000 - stored t ` + seq + " " + id + ` 1400 {"n":` + n + "}\n"
}

// TestReadRules tries the rules about what is read, about outboxes and about client libraries.
func TestReadRules(t *testing.T) {
	read := func(times, text string) string { return settledAll + times + " - read " + text + "\n" }
	whole := fold(fold(fold(folded{}, "e1"), "e2"), "e3")
	state := func(s folded) string {
		return `{"what":"state","topic":"t","final":true,"states":{"k":` + asJSON(s) + `}}`
	}
	for _, c := range []struct {
		name, history string
		want          []string
	}{
		{"all is well", settledAll, nil},

		{"cursors: at the first", read("600/590", `{"what":"cursor","topic":"t","group":"g","id":"e1"}`), nil},
		{"cursors: none yet", read("600/590", `{"what":"cursor","topic":"t","group":"g"}`), nil},
		{"cursors: past one that is leased", read("600/590", `{"what":"cursor","topic":"t","group":"g","id":"e3"}`), []string{"cursors"}},
		{"cursors: past one that is being acknowledged", read("705/600", `{"what":"cursor","topic":"t","group":"g","id":"e3"}`), nil},
		{"cursors: at nothing", read("705/600", `{"what":"cursor","topic":"t","group":"g","id":"e9"}`), []string{"cursors"}},
		{"cursors: of another group", read("705/600", `{"what":"cursor","topic":"t","group":"h","id":"e3"}`), nil},

		{"latest: the newest", read("600/590", `{"what":"latest","topic":"t","key":"k","id":"e3"}`), nil},
		{"latest: the question was asked before the answer", read("600/405", `{"what":"latest","topic":"t","key":"k","id":"e2"}`), nil},
		{"latest: stale", read("600/590", `{"what":"latest","topic":"t","key":"k","id":"e2"}`), []string{"latest"}},
		{"latest: none", read("600/590", `{"what":"latest","topic":"t","key":"k"}`), []string{"latest"}},
		{"latest: none yet", read("104/90", `{"what":"latest","topic":"t","key":"k"}`), nil},
		{"latest: of another key", read("600/590", `{"what":"latest","topic":"t","key":"j"}`), nil},
		{"latest: of an unknown event", read("600/590", `{"what":"latest","topic":"t","key":"k","id":"e9"}`), []string{"latest"}},
		{"latest: removed", read("900/890", `{"what":"latest","topic":"t","key":"k"}`) + publishedTombstone, nil},
		{"latest: removed, and shown", read("900/890", `{"what":"latest","topic":"t","key":"k","id":"gone-4"}`) + publishedTombstone, []string{"latest"}},
		{"latest: removed, and what was there before is shown", read("900/890", `{"what":"latest","topic":"t","key":"k","id":"e3"}`) + publishedTombstone, []string{"latest"}},
		{"latest: at the end, without an answer to the publish", strings.Replace(read("900/890", `{"what":"latest","topic":"t","key":"k","id":"e3","final":true}`), "toleranceMs", "toleranceMs", 1) + rowAdded + storedRow("4", "r1", "4"), []string{"latest"}},

		{"replay: all", read("600/590", `{"what":"replay","topic":"t","from":"earliest","limit":10,"ids":["e1","e2","e3"]}`), nil},
		{"replay: some", read("600/590", `{"what":"replay","topic":"t","from":"earliest","limit":2,"ids":["e1","e2"]}`), nil},
		{"replay: too few", read("600/590", `{"what":"replay","topic":"t","from":"earliest","limit":10,"ids":["e1","e2"]}`), []string{"replay"}},
		{"replay: what came meanwhile may be left out", read("600/405", `{"what":"replay","topic":"t","from":"earliest","limit":10,"ids":["e1","e2"]}`), nil},
		{"replay: a hole", read("600/590", `{"what":"replay","topic":"t","from":"earliest","limit":10,"ids":["e1","e3"]}`), []string{"replay"}},
		{"replay: another order", read("600/590", `{"what":"replay","topic":"t","from":"earliest","limit":10,"ids":["e2","e1","e3"]}`), []string{"replay"}},
		{"replay: twice", read("600/590", `{"what":"replay","topic":"t","from":"earliest","limit":10,"ids":["e1","e2","e3","e3"]}`), []string{"replay"}},
		{"replay: by time", read("600/590", `{"what":"replay","topic":"t","from":"ts","ts":1020,"limit":10,"ids":["e2","e3"]}`), nil},
		{"replay: by time, one too late", read("600/590", `{"what":"replay","topic":"t","from":"ts","ts":1020,"limit":10,"ids":["e3"]}`), []string{"replay"}},
		{"replay: by a time behind all", read("600/590", `{"what":"replay","topic":"t","from":"ts","ts":2020,"limit":10}`), nil},
		{"replay: after an id", read("600/590", `{"what":"replay","topic":"t","from":"afterId","afterId":"e2","limit":10,"ids":["e3"]}`), nil},
		{"replay: after an id, with it", read("600/590", `{"what":"replay","topic":"t","from":"afterId","afterId":"e2","limit":10,"ids":["e2","e3"]}`), []string{"replay"}},
		{"replay: a replica lags", read("600/590", `{"what":"replay","topic":"t","from":"earliest","limit":10,"ids":["e1","e2"]}`) + `0 - set {"cluster":true}`, nil},
		{"replay: a replica lags at the end", read("600/590", `{"what":"replay","topic":"t","from":"earliest","limit":10,"ids":["e1","e2"],"final":true}`) + `0 - set {"cluster":true}`, []string{"replay"}},

		{"states: the fold", read("600/590", state(whole)), nil},
		{"states: one twice", read("600/590", state(fold(whole, "e3"))), []string{"states"}},
		{"states: another order", read("600/590", state(fold(fold(fold(folded{}, "e2"), "e1"), "e3"))), []string{"states"}},
		{"states: none", read("600/590", `{"what":"state","topic":"t","final":true}`), []string{"states"}},
		{"states: of a key without events", read("600/590", strings.Replace(state(whole), `{"k":`, `{"j":{"events":1,"last":"e1","hash":1},"k":`, 1)), []string{"states"}},

		{"outbox: committed and stored", settledAll + rowAdded + storedRow("4", "r1", "4"), nil},
		{"outbox: committed and lost", settledAll + rowAdded, []string{"outbox"}},
		{"outbox: rolled back", settledAll + strings.Replace(rowAdded, "commit", "rollback", 1), nil},
		{"outbox: rolled back and stored", settledAll + strings.Replace(rowAdded, "commit", "rollback", 1) + "20000 - stored t 4 r1 1400 {\"n\":4}", []string{"outbox", "stored"}},
		{"outbox: nobody knows, stored", settledAll + strings.Replace(rowAdded, "801", "801 - note", 1) + storedRow("4", "r1", "4"), nil},
		{"outbox: nobody knows, not stored", settledAll + strings.Replace(rowAdded, "801", "801 - note", 1), nil},
		{"outbox: twice", settledAll + rowAdded + storedRow("4", "r1", "4") + "20000 - stored t 5 r7 1400 {\"n\":4}", []string{"lost", "outbox", "stored"}},
		{"outbox: in the order of the key", settledAll + rowAdded + storedRow("4", "r1", "4") + strings.NewReplacer("r1", "r2", "4}", "5}").Replace(rowAdded) + storedRow("5", "r2", "5"), nil},
		{"outbox: in another order", settledAll + rowAdded + storedRow("5", "r1", "4") + strings.NewReplacer("r1", "r2", "4}", "5}").Replace(rowAdded) + storedRow("4", "r2", "5"), []string{"order", "outbox"}},

		{"handlers: what came", settledAll + `310 - saw {"client":"go","topic":"t","group":"g","id":"e1","attempt":1}`, nil},
		{"handlers: twice", settledAll + "310 - saw {\"client\":\"go\",\"topic\":\"t\",\"group\":\"g\",\"id\":\"e1\",\"attempt\":1}\n311 - saw {\"client\":\"go\",\"topic\":\"t\",\"group\":\"g\",\"id\":\"e1\",\"attempt\":1}", []string{"handlers"}},
		{"handlers: another attempt", settledAll + `310 - saw {"client":"go","topic":"t","group":"g","id":"e1","attempt":2}`, []string{"handlers"}},
		{"handlers: of another client", settledAll + `310 - saw {"client":"ts","topic":"t","group":"g","id":"e1","attempt":1}`, []string{"handlers"}},
		{"handlers: a publish", settledAll + `310 - saw {"client":"go","topic":"t","id":"e1","n":1}`, nil},
		{"handlers: a publish that is not stored", settledAll + `310 - saw {"client":"go","topic":"t","id":"e7","n":7}`, []string{"handlers"}},

		{"stored: a library sends an event again, under its id", settledAll + `800 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":4},"opts":{"id":"x","key":"k"},"corr":"p7"}
801/800 c1 < {"op":"ERR","code":"publish_failed","msg":"","corr":"p7"}
810 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":4},"opts":{"id":"x","key":"k"},"corr":"p8"}
812/811 c1 < {"op":"OK","id":"x","corr":"p8"}` + storedRow("4", "x", "4"), nil},
		{"order: a library sends an event again on another connection, behind a newer one", settledAll + `800 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":4},"opts":{"id":"x","key":"k"},"corr":"p7"}
801 c1 close half
802/801 c1 end EOF
803 c2 open h0 by=go
804 c2 > {"op":"PUBLISH","topic":"t","payload":{"n":5},"opts":{"id":"y","key":"k"},"corr":"p8"}
805 c2 > {"op":"PUBLISH","topic":"t","payload":{"n":4},"opts":{"id":"x","key":"k"},"corr":"p9"}
806/805 c2 < {"op":"OK","id":"y","corr":"p8"}
807/806 c2 < {"op":"OK","id":"x","corr":"p9"}
20000 - stored t 4 x 1400 {"n":4}
20000 - stored t 5 y 1400 {"n":5}
`, []string{"lost"}},
		{"answers and hoarded: nothing is asked of a guest", strings.Replace(settledAll, "by=go", "guest", 1) + "900 c1 > {\"op\":\"ACK\",\"topic\":\"t\",\"group\":\"g\",\"id\":\"e1\",\"corr\":\"a9\"}", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			h, err := readHistory(strings.NewReader(c.history))
			if err != nil {
				t.Fatal(err)
			}
			l, found, err := check(h)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, v := range found {
				if !slices.Contains(got, v.rule) {
					got = append(got, v.rule)
				}
			}
			slices.Sort(got)
			if !slices.Equal(got, c.want) {
				t.Errorf("found %v, want %v", got, c.want)
				for _, v := range found {
					t.Log(l.describe(v, 20))
				}
			}
		})
	}
}
