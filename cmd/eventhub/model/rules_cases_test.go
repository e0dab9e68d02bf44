//go:build unix

package model

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Histories that the cases below begin with: two members of a group on hub h0, with leases of 3 s,
// and one event.
const (
	twoMembers = `
0 - set {"seed":1,"ackWaitMs":6000,"toleranceMs":2000,"drained":true}
1 c1 open h0
1 c2 open h1
10 c1 > {"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"from":"earliest","ackTimeoutMs":3000,"maxAttempts":2},"corr":"s1"}
12/11 c1 < {"op":"OK","corr":"s1"}
10 c2 > {"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"from":"earliest","ackTimeoutMs":3000,"maxAttempts":2},"corr":"s2"}
12/11 c2 < {"op":"OK","corr":"s2"}
`
	published = `
100 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":1},"corr":"p1"}
110/109 c1 < {"op":"OK","id":"e1","corr":"p1"}
`
	isStored   = "\n20000 - stored t 1 e1 0 {\"n\":1}\n"
	anEvent    = twoMembers + published + isStored
	undrained  = "\n0 - set {\"drained\":false}\n"
	toFirst    = `{"op":"EVENT","topic":"t","group":"g","event":{"id":"e1","topic":"t","payload":{"n":1}},"ctx":{"attempt":1,"ack_deadline_ms":3000}}`
	ackE1      = `{"op":"ACK","topic":"t","group":"g","id":"e1","corr":"a1"}`
	ackE1Again = `{"op":"ACK","topic":"t","group":"g","id":"e1","corr":"a2"}`
	okA1       = `{"op":"OK","corr":"a1"}`
	okA2       = `{"op":"OK","corr":"a2"}`
)

// attempt is toFirst with another number.
func attempt(n string) string { return strings.Replace(toFirst, `"attempt":1`, `"attempt":`+n, 1) }

const firstAcked = "\n200/190 c1 < " + toFirst + "\n300 c1 > " + ackE1 + "\n301/300 c1 < " + okA1 + "\n"

func letterOf(attempts, reason string) string {
	return "\n20001 - letter 1 {\"topic\":\"t\",\"group\":\"g\",\"original\":{\"id\":\"e1\",\"topic\":\"t\",\"payload\":{\"n\":1}},\"err\":\"" + reason + "\",\"attempts\":" + attempts + "}\n"
}

// second is the second attempt, to the other member, at a time in milliseconds, and its
// acknowledgement.
func second(n string, at int) string {
	return fmt.Sprintf("\n%d/%d c2 < %s\n%d c2 > %s\n%d/%d c2 < %s\n", at, at-10, attempt(n), at+50, ackE1Again, at+52, at+51, okA2)
}

// ruleCase is a history, and the rules that must find something in it.
type ruleCase struct {
	name, history string
	want          []string
}

func testCases(t *testing.T, cases []ruleCase) {
	t.Helper()
	for _, c := range cases {
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

// TestRules tries each rule with small histories. want are the rules that must find something, and
// no other may.
func TestRules(t *testing.T) {
	testCases(t, []ruleCase{
		{"all is well", anEvent + firstAcked, nil},

		{"stored: an OK is lost", twoMembers + published, []string{"stored"}},
		{"stored: twice", anEvent + firstAcked + "20000 - stored t 2 e1 0 {\"n\":1}", []string{"stored"}},
		{"stored: nobody published it", anEvent + firstAcked + "20000 - stored t 2 e2 0 {\"n\":2}", []string{"stored"}},
		{"stored: other bytes", twoMembers + published + firstAcked + `20000 - stored t 1 e1 0 {"n":1.0}`, []string{"stored"}},
		{"stored: another id", twoMembers + published + firstAcked + `20000 - stored t 1 e9 0 {"n":1}`, []string{"hoarded", "lost", "stored"}},
		{"stored: without an answer once or not at all", anEvent + firstAcked + `15000 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":2},"corr":"p2"}`, nil},
		{"stored: refused, and there", anEvent + firstAcked + `400 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":2},"corr":"p2"}
410/409 c1 < {"op":"ERR","code":"rate_limited","corr":"p2"}
500/499 c1 < {"op":"EVENT","topic":"t","group":"g","event":{"id":"e2","topic":"t","payload":{"n":2}},"ctx":{"attempt":1,"ack_deadline_ms":3000}}
501 c1 > {"op":"ACK","topic":"t","group":"g","ids":["e2"],"corr":"a7"}
502/501 c1 < {"op":"OK","corr":"a7"}
20000 - stored t 2 e2 0 {"n":2}`, []string{"stored"}},
		{"stored: an id twice, answered OK twice, stored once", anEvent + firstAcked + `400 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":2},"opts":{"id":"x"},"corr":"p2"}
401 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":3},"opts":{"id":"x"},"corr":"p3"}
410/409 c1 < {"op":"OK","id":"x","corr":"p2"}
410/409 c1 < {"op":"OK","id":"x","corr":"p3"}
420/419 c2 < {"op":"EVENT","topic":"t","group":"g","event":{"id":"x","topic":"t","payload":{"n":2}},"ctx":{"attempt":1,"ack_deadline_ms":3000}}
430 c2 > {"op":"ACK","topic":"t","group":"g","id":"x","corr":"a3"}
431/430 c2 < {"op":"OK","corr":"a3"}
20000 - stored t 2 x 0 {"n":2}`, nil},

		{"order: swapped", twoMembers + undrained + published + `
101 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":2},"corr":"p2"}
111/109 c1 < {"op":"OK","id":"e2","corr":"p2"}
200 - stored t 2 e1 0 {"n":1}
200 - stored t 1 e2 0 {"n":2}`, []string{"order"}},
		{"order: an error in between ends the run", twoMembers + undrained + published + `
101 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":2},"corr":"p2"}
102 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":3},"corr":"p3"}
111/109 c1 < {"op":"ERR","code":"publish_failed","corr":"p2"}
111/109 c1 < {"op":"OK","id":"e3","corr":"p3"}
200 - stored t 2 e1 0 {"n":1}
200 - stored t 1 e3 0 {"n":3}`, nil},

		{"order: first deliveries to a lone member", `
0 - set {"seed":1,"ackWaitMs":6000,"toleranceMs":2000}
1 c1 open h0
10 c1 > {"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"from":"earliest","ackTimeoutMs":3000},"corr":"s1"}
12/11 c1 < {"op":"OK","corr":"s1"}
20 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":2},"corr":"p2"}` + published + `
115/114 c1 < {"op":"OK","id":"e2","corr":"p2"}
200/190 c1 < {"op":"EVENT","topic":"t","group":"g","event":{"id":"e2","topic":"t","payload":{"n":2}},"ctx":{"attempt":1,"ack_deadline_ms":3000}}
200/190 c1 < ` + toFirst + `
300 - stored t 1 e1 0 {"n":1}
300 - stored t 2 e2 0 {"n":2}`, []string{"order"}},
		{"lost: never came", anEvent, []string{"hoarded", "lost"}},
		{"lost: came, and was settled by nobody", anEvent + "\n200/190 c1 < " + toFirst + "\n250 c1 close half\n260/255 c1 end EOF\n260 c2 close half\n270/265 c2 end EOF", []string{"lost"}},
		{"lost: acknowledged too late only", anEvent + "\n200/190 c1 < " + toFirst + "\n3900 c1 > " + ackE1 + "\n3901/3900 c1 < " + okA1 + "\n4000 c1 close half\n4010/4000 c1 end EOF\n4000 c2 close half\n4010/4000 c2 end EOF", []string{"lost"}},
		{"lost: some is left", anEvent + firstAcked + "20000 - left g t 3", []string{"lost"}},
		{"lost: from latest wants nothing from before", strings.ReplaceAll(anEvent, `"from":"earliest"`, `"from":"latest"`) + firstAcked, nil},
		{"range: from latest got what was there", strings.ReplaceAll(twoMembers, `"from":"earliest"`, `"from":"latest"`) + isStored + `
2 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":1},"corr":"p1"}
3/2 c1 < {"op":"OK","id":"e1","corr":"p1"}` + firstAcked, []string{"range"}},

		{"holder: redelivered while leased", anEvent + "\n200/190 c1 < " + toFirst + "" + second("2", 1200), []string{"holder"}},
		{"holder: what was said before the link was held came late", anEvent + "\n200/190 c1 < " + toFirst + "\n3000 - fault 1 hold-link h0\n9300/9290 c2 < " + attempt("2") + "\n10000 - over 1\n10005/10004 c2 < " + attempt("3") + "\n10100 c2 > " + ackE1Again + "\n10102/10101 c2 < " + okA2, nil},
		{"holder: the link of another hub was held", anEvent + "\n200/190 c1 < " + toFirst + "\n3000 - fault 1 hold-link h7\n9300/9290 c2 < " + attempt("2") + "\n10000 - over 1\n10005/10004 c2 < " + attempt("3") + "\n10100 c2 > " + ackE1Again + "\n10102/10101 c2 < " + okA2, []string{"holder"}},
		{"holder: after the lease's end", anEvent + "\n200/190 c1 < " + toFirst + "\n3200/3190 c2 < " + attempt("2") + "\n3300 c2 > " + ackE1Again + "\n3301/3300 c2 < " + okA2, nil},
		{"holder: it was written long before it was read", anEvent + "\n3150/150 c1 < " + toFirst + "\n3160/3155 c2 < " + attempt("2") + "\n3300 c2 > " + ackE1Again + "\n3301/3300 c2 < " + okA2, nil},
		{"holder: a MODACK prolongs", anEvent + "\n200/190 c1 < " + toFirst + `
300 c1 > {"op":"MODACK","topic":"t","group":"g","id":"e1","extend_ms":9000,"corr":"m1"}
301/300 c1 < {"op":"OK","corr":"m1"}
3200/3190 c2 < ` + attempt("2") + "\n3300 c2 > " + ackE1Again + "\n3301/3300 c2 < " + okA2, []string{"holder"}},
		{"holder: a MODACK shortens", anEvent + "\n200/190 c1 < " + toFirst + `
300 c1 > {"op":"MODACK","topic":"t","group":"g","id":"e1","extend_ms":1000,"corr":"m1"}
301/300 c1 < {"op":"OK","corr":"m1"}
1305/1300 c2 < ` + attempt("2") + "\n1400 c2 > " + ackE1Again + "\n1401/1400 c2 < " + okA2, nil},
		{"holder: refused", anEvent + "\n200/190 c1 < " + toFirst + `
300 c1 > {"op":"NACK","topic":"t","group":"g","id":"e1","corr":"n1"}
360/350 c2 < ` + attempt("2") + `
361/360 c1 < {"op":"OK","corr":"n1"}
400 c2 > ` + ackE1Again + "\n401/400 c2 < " + okA2, nil},
		{"holder: its hub was killed", anEvent + "\n200/190 c1 < " + toFirst + `
1000 - fault 1 kill-hub h0
1000/999 c1 end EOF
1500 - over 1` + second("2", 6200), nil},
		{"holder: another hub was killed", anEvent + "\n200/190 c1 < " + toFirst + `
1000 - fault 1 kill-hub h7
1500 - over 1` + second("2", 2200), []string{"holder"}},
		{"holder: a short freeze excuses nothing", anEvent + "\n200/190 c1 < " + toFirst + `
1000 - fault 1 freeze-hub h0
1400 - over 1` + second("2", 2200), []string{"holder"}},
		{"holder: a long freeze does", anEvent + "\n200/190 c1 < " + toFirst + `
1000 - fault 1 freeze-hub h0
9000 - over 1` + second("2", 7200), nil},
		{"holder: a leader stepped down", anEvent + "\n200/190 c1 < " + toFirst + `
1000 - fault 1 stepdown -
1100 - over 1` + second("2", 1200), []string{"holder"}},

		{"acked: it comes again", anEvent + firstAcked + second("2", 5000), []string{"acked"}},
		{"acked: a node was killed just then", anEvent + firstAcked + "400 - fault 1 kill-node n0\n900 - over 1" + second("2", 5000), nil},
		{"acked: the group disappeared for want of members", withoutMembers(8_000), nil},
		{"acked: it comes again before the group can have disappeared", withoutMembers(2_500), []string{"acked", "attempts"}},
		{"acked: too late, so it comes again", anEvent + "\n200/190 c1 < " + toFirst + "\n3400 c1 > " + ackE1 + "\n3450/3420 c2 < " + attempt("2") + "\n3460/3455 c1 < " + okA1 + "\n3500 c2 > " + ackE1Again + "\n3501/3500 c2 < " + okA2, nil},

		{"backoff: too early", anEvent + "\n200/190 c1 < " + toFirst + `
300 c1 > {"op":"NACK","topic":"t","group":"g","id":"e1","delay_ms":1000,"corr":"n1"}
301/300 c1 < {"op":"OK","corr":"n1"}` + second("2", 1200), []string{"backoff"}},
		{"backoff: in time", anEvent + "\n200/190 c1 < " + toFirst + `
300 c1 > {"op":"NACK","topic":"t","group":"g","id":"e1","delay_ms":1000,"corr":"n1"}
301/300 c1 < {"op":"OK","corr":"n1"}` + second("2", 1302), nil},

		{"inflight: one more than allowed", strings.ReplaceAll(anEvent, `"ackTimeoutMs"`, `"maxInFlight":1,"ackTimeoutMs"`) + "\n200/190 c1 < " + toFirst + `
150 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":2},"corr":"p2"}
160/159 c1 < {"op":"OK","id":"e2","corr":"p2"}
220/210 c1 < {"op":"EVENT","topic":"t","group":"g","event":{"id":"e2","topic":"t","payload":{"n":2}},"ctx":{"attempt":1,"ack_deadline_ms":3000}}
300 c1 > {"op":"ACK","topic":"t","group":"g","ids":["e1","e2"],"corr":"a1"}
301/300 c1 < {"op":"OK","corr":"a1"}
20000 - stored t 2 e2 0 {"n":2}`, []string{"inflight"}},

		{"attempts: begins with 2", anEvent + "\n200/190 c1 < " + attempt("2") + "\n300 c1 > " + ackE1 + "\n301/300 c1 < " + okA1, []string{"attempts"}},
		{"attempts: the same twice", anEvent + "\n200/190 c1 < " + toFirst + "\n3200/3190 c2 < " + toFirst + "\n3300 c2 > " + ackE1Again + "\n3301/3300 c2 < " + okA2, []string{"attempts"}},
		{"attempts: a skip, and a dead hub", anEvent + "\n200/190 c1 < " + toFirst + "\n1000 - fault 1 kill-hub h1\n1500 - over 1\n3200/3190 c2 < " + attempt("3") + "\n3300 c2 > " + ackE1Again + "\n3301/3300 c2 < " + okA2, nil},
		{"attempts: a skip, and a drained hub of a cluster", "\n0 - set {\"drained\":true,\"cluster\":true}\n" + anEvent + "\n200/190 c1 < " + toFirst + "\n1000 - fault 1 stop-hub h1\n1500 - over 1\n3200/3190 c2 < " + attempt("3") + "\n3300 c2 > " + ackE1Again + "\n3301/3300 c2 < " + okA2, nil},
		{"attempts: a skip, and a drained hub", anEvent + "\n200/190 c1 < " + toFirst + "\n1000 - fault 1 stop-hub h1\n1500 - over 1\n3200/3190 c2 < " + attempt("3") + "\n3300 c2 > " + ackE1Again + "\n3301/3300 c2 < " + okA2, []string{"attempts"}},

		{"attempts: the first was in the socket of a hub that was killed", strings.Replace(anEvent, "c1 open h0", "c1 open h0 small", 1) + "\n3200/3190 c2 < " + attempt("2") + "\n3300 c2 > " + ackE1Again + "\n3301/3300 c2 < " + okA2 + "\n5000 - fault 1 kill-hub h0\n5001/4000 c1 end connection reset by peer\n5500 - over 1", nil},

		{"letters: the last attempt was refused", anEvent + "\n200/190 c1 < " + attempt("2") + `
300 c1 > {"op":"NACK","topic":"t","group":"g","id":"e1","reason":"no","corr":"n1"}
301/300 c1 < {"op":"OK","corr":"n1"}` + letterOf("2", "no"), []string{"attempts"}},
		{"letters: there is none", anEvent + "\n200/190 c1 < " + attempt("2") + `
300 c1 > {"op":"NACK","topic":"t","group":"g","id":"e1","reason":"no","corr":"n1"}
301/300 c1 < {"op":"OK","corr":"n1"}` + second("3", 400), []string{"attempts", "letters"}},
		{"letters: too early", anEvent + "\n200/190 c1 < " + toFirst + `
300 c1 > {"op":"NACK","topic":"t","group":"g","id":"e1","corr":"n1"}
301/300 c1 < {"op":"OK","corr":"n1"}` + letterOf("1", "refused"), []string{"letters"}},
		{"letters: of what was acknowledged", anEvent + strings.Replace(firstAcked, toFirst, attempt("2"), 1) + letterOf("2", "lease expired"), []string{"attempts", "letters"}},
		{"letters: another reason", anEvent + "\n200/190 c1 < " + attempt("2") + `
300 c1 > {"op":"NACK","topic":"t","group":"g","id":"e1","reason":"no","corr":"n1"}
301/300 c1 < {"op":"OK","corr":"n1"}` + letterOf("2", "yes"), []string{"attempts", "letters"}},
		{"letters: twice", anEvent + "\n200/190 c1 < " + attempt("2") + `
300 c1 > {"op":"NACK","topic":"t","group":"g","id":"e1","reason":"no","corr":"n1"}
301/300 c1 < {"op":"OK","corr":"n1"}` + letterOf("2", "no") + letterOf("2", "no"), []string{"attempts", "letters"}},
		{"letters: expired", anEvent + "\n200/190 c1 < " + attempt("2") + letterOf("2", "lease expired"), []string{"attempts"}},
		{"letters: expired, and none", anEvent + "\n200/190 c1 < " + attempt("2") + "\n20000 c1 close half\n20001/20000 c1 end EOF\n20001 c2 close half\n20002/20001 c2 end EOF", []string{"attempts", "letters", "lost"}},
		{"letters: none for UNSUBSCRIBE behind a SUBSCRIBE that waits for the refusal of another", `
1 c1 open h0
2 c1 > {"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"from":"earliest","maxAttempts":0},"corr":"s0"}
3 c1 > {"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"from":"earliest","ackTimeoutMs":3000,"maxAttempts":1},"corr":"s1"}
4 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":1},"corr":"p1"}
5 c1 > {"op":"UNSUBSCRIBE","topic":"t","group":"g","corr":"u1"}
100/99 c1 < {"op":"ERR","code":"internal","msg":"no","corr":"s0"}
110/109 c1 < {"op":"OK","corr":"s1"}
120/119 c1 < {"op":"OK","id":"e1","corr":"p1"}
130/129 c1 < ` + toFirst + `
140/139 c1 < {"op":"OK","corr":"u1"}
150 c1 > {"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"from":"earliest","ackTimeoutMs":3000},"corr":"s2"}
160/159 c1 < {"op":"OK","corr":"s2"}
170/169 c1 < ` + attempt("2") + `
180 c1 > ` + ackE1 + "\n181/180 c1 < " + okA1 + isStored, nil},
		{"letters: none for UNSUBSCRIBE", anEvent + "\n200/190 c1 < " + attempt("2") + `
300 c1 > {"op":"UNSUBSCRIBE","topic":"t","group":"g","corr":"u1"}
301/300 c1 < {"op":"OK","corr":"u1"}
400/350 c2 < ` + attempt("3") + "\n500 c2 > " + ackE1Again + "\n501/500 c2 < " + okA2 + letterOf("2", "connection lost"), []string{"attempts", "letters"}},

		{"answers: none for 15 s", anEvent + firstAcked + `1000 c1 > {"op":"PAUSE","topic":"t","group":"g","corr":"x"}`, []string{"answers"}},
		{"answers: late", anEvent + firstAcked + `1000 c1 > {"op":"PAUSE","topic":"t","group":"g","corr":"x"}
16500/16400 c1 < {"op":"OK","corr":"x"}`, []string{"answers"}},
		{"answers: the client did not read", anEvent + firstAcked + `1000 c1 deaf
1000 c1 > {"op":"PAUSE","topic":"t","group":"g","corr":"x"}
16500 c1 hears
16500/900 c1 < {"op":"OK","corr":"x"}`, nil},
		{"answers: the hub was frozen", anEvent + firstAcked + `1000 c1 > {"op":"PAUSE","topic":"t","group":"g","corr":"x"}
1001 - fault 1 freeze-hub h0
5000 - over 1
16500/16400 c1 < {"op":"OK","corr":"x"}`, nil},

		{"hoarded: what a server took with it waits for AckWait", hoardedAfter(9_900), nil},
		{"hoarded: longer than that", hoardedAfter(10_200), []string{"hoarded"}},
		{"hoarded: an idle member waits", anEvent + "\n5200/5190 c1 < " + toFirst + "\n5300 c1 > " + ackE1 + "\n5301/5300 c1 < " + okA1, []string{"hoarded"}},
		{"hoarded: nobody has room", strings.ReplaceAll(anEvent, `"ackTimeoutMs"`, `"maxInFlight":1,"ackTimeoutMs"`) + `
50 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":2},"corr":"p2"}
60/59 c1 < {"op":"OK","id":"e2","corr":"p2"}
50 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":3},"corr":"p3"}
60/59 c1 < {"op":"OK","id":"e3","corr":"p3"}
70/60 c1 < {"op":"EVENT","topic":"t","group":"g","event":{"id":"e2","topic":"t","payload":{"n":2}},"ctx":{"attempt":1,"ack_deadline_ms":3000}}
70/60 c2 < {"op":"EVENT","topic":"t","group":"g","event":{"id":"e3","topic":"t","payload":{"n":3}},"ctx":{"attempt":1,"ack_deadline_ms":3000}}
2900 c1 > {"op":"ACK","topic":"t","group":"g","id":"e2","corr":"a2"}
2901/2900 c1 < {"op":"OK","corr":"a2"}
2900 c2 > {"op":"ACK","topic":"t","group":"g","id":"e3","corr":"a3"}
2901/2900 c2 < {"op":"OK","corr":"a3"}
2950/2940 c1 < ` + toFirst + "\n3300 c1 > " + ackE1 + "\n3301/3300 c1 < " + okA1 + `
20000 - stored t 2 e2 0 {"n":2}
20000 - stored t 3 e3 0 {"n":3}`, nil},
		{"hoarded: a refused event is in back-off", anEvent + "\n200/190 c1 < " + toFirst + `
300 c1 > {"op":"NACK","topic":"t","group":"g","id":"e1","delay_ms":5000,"corr":"n1"}
301/300 c1 < {"op":"OK","corr":"n1"}` + second("2", 5310), nil},
		{"hoarded: a refused event, after its back-off", anEvent + "\n200/190 c1 < " + toFirst + `
300 c1 > {"op":"NACK","topic":"t","group":"g","id":"e1","delay_ms":1000,"corr":"n1"}
301/300 c1 < {"op":"OK","corr":"n1"}` + second("2", 5310), []string{"hoarded"}},
		{"hoarded: a fault excuses", anEvent + "\n1000 - fault 1 kill-node n0\n1500 - over 1\n5200/5190 c1 < " + toFirst + "\n5300 c1 > " + ackE1 + "\n5301/5300 c1 < " + okA1, nil},

		{"frames: an EVENT before the OK", `
1 c1 open h0
2 c1 > {"op":"PUBLISH","topic":"t","payload":{"n":1},"corr":"p1"}
10 c1 > {"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"from":"earliest","ackTimeoutMs":3000},"corr":"s1"}
11/10 c1 < ` + toFirst + `
12/11 c1 < {"op":"OK","corr":"s1"}`, []string{"frames"}},
		{"frames: an EVENT after the OK of UNSUBSCRIBE", twoMembers + undrained + published + `
150 c1 > {"op":"UNSUBSCRIBE","topic":"t","group":"g","corr":"u1"}
151/150 c1 < {"op":"OK","corr":"u1"}
200/190 c1 < ` + toFirst, []string{"frames"}},
		{"frames: an EVENT while paused", twoMembers + undrained + published + `
150 c1 > {"op":"PAUSE","topic":"t","group":"g","corr":"u1"}
151/150 c1 < {"op":"OK","corr":"u1"}
200/190 c1 < ` + toFirst, []string{"frames"}},
		{"frames: another payload", anEvent + strings.Replace(firstAcked, `{"n":1}`, `{"n": 1}`, 1), []string{"frames"}},
		{"frames: answers without corr, in order", anEvent + firstAcked + `
1000 c1 > {"op":"PUBLISH","topic":"u","payload":{"n":2}}
1000 c1 > {"op":"PAUSE","topic":"t","group":"g"}
1010/1009 c1 < {"op":"OK","id":"e2"}
1010/1009 c1 < {"op":"OK"}
20000 - stored u 1 e2 0 {"n":2}`, nil},
		{"frames: answers without corr, swapped", anEvent + firstAcked + `
1000 c1 > {"op":"PUBLISH","topic":"u","payload":{"n":2}}
1000 c1 > {"op":"PAUSE","topic":"t","group":"g"}
1010/1009 c1 < {"op":"OK"}
1010/1009 c1 < {"op":"OK","id":"e2"}
20000 - stored u 1 e2 0 {"n":2}`, []string{"frames"}},
		{"frames: an error without corr, to a PUBLISH with an id", anEvent + firstAcked + `
1000 c1 > {"op":"PUBLISH","topic":"u","payload":{"n":2},"opts":{"id":"x"}}
1000 c1 > {"op":"PUBLISH","topic":"u","payload":{"n":3}}
1000 c1 > {"op":"PUBLISH","topic":"u","payload":{"n":4},"opts":{"id":"y"}}
1010/1009 c1 < {"op":"ERR","code":"overloaded"}
1010/1009 c1 < {"op":"OK","id":"e3"}
1010/1009 c1 < {"op":"ERR","code":"publish_failed"}
20000 - stored u 1 e3 0 {"n":3}`, nil},
		{"frames: answers without corr, past an error", anEvent + firstAcked + `
1000 c1 > {"op":"PUBLISH","topic":"u","payload":{"n":2}}
1000 c1 > {"op":"PUBLISH","topic":"u","payload":{"n":3},"opts":{"id":"x"}}
1010/1009 c1 < {"op":"OK","id":"x"}
1010/1009 c1 < {"op":"ERR","code":"overloaded"}
20000 - stored u 1 x 0 {"n":3}`, []string{"frames"}},
		{"frames: an answer without corr at the end, past one that does not come", anEvent + firstAcked + `
1000 c1 > {"op":"PUBLISH","topic":"u","payload":{"n":2}}
1000 c1 > {"op":"ACK","topic":"t","group":"g","ids":[]}
1100 c1 close half
1110/1109 c1 < {"op":"ERR","code":"bad_frame"}
1110/1109 c1 end EOF
20000 - stored u 1 e2 0 {"n":2}`, []string{"frames"}},
		{"frames: answered twice", anEvent + firstAcked + "302/301 c1 < " + okA1, []string{"frames"}},
		{"frames: the hub hangs up", anEvent + firstAcked + "9000/8999 c1 end EOF", []string{"frames"}},
		{"frames: the hub hangs up, as it is stopped", anEvent + firstAcked + "8990 - fault 1 stop-hub h0\n9000/8999 c1 end EOF\n9500 - over 1", nil},
	})
}

// TestAllowances tries what faults excuse, and next to it what they just do not.
func TestAllowances(t *testing.T) {
	fault := func(kind string, from, to int) string {
		return fmt.Sprintf("\n%d - fault 1 %s\n%d - over 1\n", from, kind, to)
	}
	// The lease of c1 lasts until 3190 ms at least; c2 has the event at 2200 ms.
	leased := func(fault string) string { return anEvent + "\n200/190 c1 < " + toFirst + fault + second("2", 2_200) }
	// c1 acknowledges the event between 300 and 301 ms, and c2 has it at 8 s.
	settled := func(fault string) string { return anEvent + firstAcked + fault + second("2", 8_000) }
	// The event comes with the same attempt at 200 ms and at 3200 ms.
	same := func(fault string) string {
		return anEvent + "\n200/190 c1 < " + toFirst + fault + second("1", 3_200)
	}
	ended := func(fault string) string { return anEvent + firstAcked + fault + "\n9000/8999 c1 end EOF" }
	testCases(t, []ruleCase{
		{"a hub stands still for half of the stall limit", leased(fault("freeze-hub h0", 1_000, 1_600)), nil},
		{"a hub stands still for less", leased(fault("freeze-hub h0", 1_000, 1_590)), []string{"holder"}},
		{"another hub stands still", leased(fault("freeze-hub h7", 1_000, 2_000)), []string{"holder"}},
		{"a busy machine holds a hub for half of the stall limit", leased(fault("stall-hub h0 600ms", 1_600, 1_600)), nil},
		{"a busy machine holds a hub for less", leased(fault("stall-hub h0 590ms", 1_590, 1_590)), []string{"holder"}},
		{"the connection to NATS breaks", leased(fault("cut h0 0s", 1_000, 1_000)), nil},
		{"the connection of another hub breaks", leased(fault("cut h7 0s", 1_000, 1_000)), []string{"holder"}},
		{"the connection to NATS breaks too late", leased(fault("cut h0 0s", 2_300, 2_300)), []string{"holder"}},
		{"a link is held for most of the margin", leased(fault("hold-link h0", 500, 2_000)), nil},
		{"a link is held for less", leased(fault("hold-link h0", 500, 1_990)), []string{"holder"}},
		{"one link is held for less", leased(fault("hold-one-link h0", 500, 1_990)), []string{"holder"}},
		{"one link of another hub is held", leased(fault("hold-one-link h7", 500, 2_000)), []string{"holder"}},
		{"a link is held in one direction for less", leased(fault("hold-link-oneway h0", 500, 1_990)), []string{"holder"}},
		{"a node stands still for most of the margin", leased(fault("freeze-node n0", 500, 2_000)), nil},
		{"a node stands still for less", leased(fault("freeze-node n0", 500, 1_990)), []string{"holder"}},
		{"a node is apart for most of the margin", leased(fault("part-node n0", 500, 2_000)), nil},
		{"a node is apart for less", leased(fault("part-node n0", 500, 1_990)), []string{"holder"}},
		{"a node is apart in one direction for less", leased(fault("part-node-oneway n0", 500, 1_990)), []string{"holder"}},
		{"the clock of another hub jumps", leased(fault("jump-hub h7", 1_000, 2_000)), []string{"holder"}},
		{"a node is killed", leased(fault("kill-node n0", 500, 9_000)), []string{"holder"}},
		{"a node is stopped", leased(fault("stop-node n0", 500, 9_000)), []string{"holder"}},
		{"a disk is full", leased(fault("fill-disk n0", 500, 9_000)), []string{"holder"}},
		{"a disk is lost", leased(fault("lose-disk n0", 500, 9_000)), []string{"holder"}},
		{"a node is slow", leased(fault("pulse-node n0", 500, 9_000)), []string{"holder"}},
		{"a route is slow", leased(fault("delay-route n0", 500, 9_000)), []string{"holder"}},
		{"a link is slow", leased(fault("delay-link h0", 500, 9_000)), []string{"holder"}},
		{"the leader of the cluster steps down", leased(fault("stepdown-meta -", 500, 9_000)), []string{"holder"}},
		{"the harness stands still", leased(fault("stall-harness - 5s", 6_000, 6_000)), []string{"holder"}},
		{"a killed node led nobody for a moment", "\n0 - set {\"drained\":true,\"cluster\":true}\n" + leased(fault("kill-node n0", 1_000, 9_000)), nil},
		{"a killed node's consumers had no leader for less", "\n0 - set {\"drained\":true,\"cluster\":true}\n" + leased(fault("kill-node n0", 1_500, 9_000)), []string{"holder"}},

		{"an ack in the last moments of a hub", settled(fault("kill-hub h0", 900, 1_000) + "\n901/900 c1 end EOF"), nil},
		{"an ack before the last moments of a hub", settled(fault("kill-hub h0", 902, 1_000) + "\n903/902 c1 end EOF"), []string{"acked"}},
		{"an ack at a hub, as another is killed", settled(fault("kill-hub h7", 300, 1_000)), []string{"acked"}},
		{"an ack at a hub that is stopped", settled(fault("stop-hub h0", 302, 1_000) + "\n903/902 c1 end EOF"), []string{"acked"}},
		{"an ack in the last moments of a node", settled(fault("kill-node n0", 900, 5_000)), nil},
		{"an ack before the last moments of a node", settled(fault("kill-node n0", 902, 5_000)), []string{"acked"}},
		{"an ack as a node is stopped", settled(fault("stop-node n0", 301, 5_000)), nil},
		{"an ack long after a node was killed", strings.ReplaceAll(settled(fault("kill-node n0", 50, 7_000)), "\n300 c1 >", "\n2060 c1 >") + "\n2061/2060 c1 < " + okA1, []string{"acked", "frames"}},
		{"an ack as a leader steps down", settled(fault("stepdown -", 301, 5_000)), []string{"acked"}},
		{"an ack as the leader of the cluster steps down", settled(fault("stepdown-meta -", 301, 5_000)), []string{"acked"}},
		{"an ack as a node is slow", settled(fault("pulse-node n0", 200, 5_000)), []string{"acked"}},
		{"an ack as a route is slow", settled(fault("delay-route n0", 200, 5_000)), []string{"acked"}},
		{"an ack over a slow link", settled(fault("delay-link h0", 200, 5_000)), []string{"acked"}},

		{"attempts begin again, as a node was killed", same(fault("kill-node n0", 500, 5_000)), nil},
		{"attempts begin again, as a node was stopped", same(fault("stop-node n0", 500, 5_000)), nil},
		{"attempts begin again, as a disk was lost", same(fault("lose-disk n0", 500, 5_000)), nil},
		{"attempts begin again long after a node was stopped", anEvent + fault("stop-node n0", 120, 9_000) + "\n2960/2950 c1 < " + toFirst + second("1", 6_200), []string{"attempts"}},
		{"attempts begin again, as a node stood still", same(fault("freeze-node n0", 500, 3_000)), []string{"attempts"}},
		{"attempts begin again, as a node was apart", same(fault("part-node n0", 500, 3_000)), []string{"attempts"}},
		{"attempts begin again, as a node was apart in one direction", same(fault("part-node-oneway n0", 500, 3_000)), []string{"attempts"}},
		{"attempts begin again, as a node of three was apart", same(fault("part-node n0", 900, 3_000)) + "\n0 - set {\"drained\":true,\"cluster\":true}\n", []string{"attempts"}},
		{"what a leader delivered that was apart is forgotten", same(fault("part-node n0", 150, 3_000)) + "\n0 - set {\"drained\":true,\"cluster\":true}\n", nil},
		{"attempts begin again, as a leader stepped down", same(fault("stepdown -", 500, 3_000)), []string{"attempts"}},

		{"a hub that is killed ends its connections", ended(fault("kill-hub h0", 8_990, 9_900)), nil},
		{"a hub that stands still does not", ended(fault("freeze-hub h0", 8_000, 8_990)), []string{"frames"}},
		{"a hub that is cut off does not", ended(fault("hold-link h0", 5_000, 8_990)), []string{"frames"}},
		{"a hub whose clock jumps does not", ended(fault("jump-hub h0", 8_000, 8_990)), []string{"frames"}},
		{"another hub that is killed does not", ended(fault("kill-hub h7", 8_990, 9_900)), []string{"frames"}},
	})
}

// aged is a history of a cluster in which an event is delivered at a time in milliseconds, and once
// more a second later. It was stored at 100 ms. AckWait is 6 s.
func aged(fault string, at int) string {
	return "\n0 - set {\"drained\":true,\"cluster\":true,\"disturbed\":true}\n" + strings.ReplaceAll(anEvent, `"from":"earliest"`, `"from":"earliest","maxInFlight":1`) +
		fmt.Sprintf("\n%s\n%d/%d c1 < %s", fault, at, at-5, toFirst) + second("2", at+1_000)
}

// TestHolderOfAnOldEvent tries the rule "holder" with events that a new leader takes for expired.
func TestHolderOfAnOldEvent(t *testing.T) {
	wrong := []string{"holder"}
	const paused = `
20 c1 > {"op":"PAUSE","topic":"t","group":"g","corr":"p8"}
21/20 c1 < {"op":"OK","corr":"p8"}
20 c2 > {"op":"PAUSE","topic":"t","group":"g","corr":"p9"}
21/20 c2 < {"op":"OK","corr":"p9"}
`
	resumed := func(at int) string {
		return paused + fmt.Sprintf(`
%[1]d c1 > {"op":"RESUME","topic":"t","group":"g","corr":"r8"}
%[2]d/%[1]d c1 < {"op":"OK","corr":"r8"}
%[1]d c2 > {"op":"RESUME","topic":"t","group":"g","corr":"r9"}
%[2]d/%[1]d c2 < {"op":"OK","corr":"r9"}
`, at-20, at-10)
	}
	testCases(t, []ruleCase{
		{"the leader stopped just then", aged("7000 - fault 1 stop-node n0\n9000 - over 1", 7_010) + resumed(7_010), nil},
		{"the leader stepped down just then", aged("7000 - fault 1 stepdown -\n9000 - over 1", 7_010) + resumed(7_010), nil},
		{"another node's cluster has its leader", aged("7000 - fault 1 stepdown-meta -\n9000 - over 1", 7_010) + resumed(7_010), wrong},
		{"the event was young", aged("5000 - fault 1 stop-node n0\n9000 - over 1", 5_010) + resumed(5_010), wrong},
		{"the delivery was told the followers before", aged("7700 - fault 1 stop-node n0\n9000 - over 1", 7_010) + resumed(7_010), wrong},
		{"the leader was new for long", aged("7000 - fault 1 stop-node n0\n19000 - over 1", 9_100) + resumed(9_100), wrong},
		{"there is one server", strings.Replace(aged("7000 - fault 1 stop-node n0\n9000 - over 1", 7_010)+resumed(7_010), `"cluster":true`, `"cluster":false`, 1), wrong},
	})
}

// unseen is a history in which hub h1 is lost to a fault before an event comes, and has it unseen
// until AckWait is over. The hub h0 has the event with an attempt then, and both lose it to h1 with
// another attempt, which is acknowledged.
func unseen(fault string, over int, first, then string) string {
	return strings.ReplaceAll(anEvent, `"maxAttempts":2`, `"maxAttempts":5`) + fmt.Sprintf("\n50 - fault 1 %s\n%d - over 1\n6200/6190 c1 < %s", fault, over, attempt(first)) + second(then, 9500)
}

// hoardedAfter is a history of a cluster in which a server dies at 50 ms, and is back at 150 ms.
// The event is first delivered at the given time.
func hoardedAfter(at int) string {
	return strings.Replace(anEvent, `"drained":true`, `"drained":true,"cluster":true`, 1) +
		"\n50 - fault 1 kill-node n1\n150 - over 1\n" + second("1", at)
}

// withoutMembers is a history of a group with a TTL of 4 s. Its only member settles the event and
// leaves at 400 ms, and another comes at the given time and gets the event.
func withoutMembers(until int) string {
	return strings.ReplaceAll(`
0 - set {"seed":1,"ackWaitMs":6000,"toleranceMs":2000,"drained":true}
1 c1 open h0
1 c2 open h1
10 c1 > {"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"from":"earliest","ackTimeoutMs":3000,"groupTtlMs":4000},"corr":"s1"}
12/11 c1 < {"op":"OK","corr":"s1"}`+published+firstAcked+`400 c1 > {"op":"UNSUBSCRIBE","topic":"t","group":"g","corr":"u1"}
402/401 c1 < {"op":"OK","corr":"u1"}
UNTIL c2 > {"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"from":"earliest","ackTimeoutMs":3000,"groupTtlMs":4000},"corr":"s2"}
UNTIL c2 < {"op":"OK","corr":"s2"}
`, "UNTIL", strconv.Itoa(until)) + second("1", until+50) + isStored
}

// begunAgain is a history in which attempt 3 follows attempt 1, and a killed node begins again.
var begunAgain = strings.ReplaceAll(anEvent, `"maxAttempts":2`, `"maxAttempts":5`) + "\n200/190 c1 < " + toFirst + "\n3300/3290 c1 < " + attempt("3") +
	"\n6400 - fault 1 kill-node n0\n6600 - over 1\n" + second("1", 6_700)

// cluster makes a history that of a cluster, in which c2 pauses in the moment of a first delivery.
const cluster = `
0 - set {"drained":true,"cluster":true}
120 c2 > {"op":"PAUSE","topic":"t","group":"g","corr":"p8"}
121/120 c2 < {"op":"OK","corr":"p8"}
121 c2 > {"op":"RESUME","topic":"t","group":"g","corr":"r8"}
122/121 c2 < {"op":"OK","corr":"r8"}
`

// TestAttemptsOfWhatIsUnseen tries the rule "attempts" with deliveries that a hub had and no client
// saw.
func TestAttemptsOfWhatIsUnseen(t *testing.T) {
	wrong := []string{"attempts"}
	testCases(t, []ruleCase{
		{"the link was held, and the note came late", unseen("hold-link h1", 9_000, "2", "2"), nil},
		{"the link was held, and the note was not late", unseen("hold-link h1", 9_000, "2", "3"), nil},
		{"the link was held, and nothing was unseen", unseen("hold-link h1", 9_000, "1", "2"), nil},
		{"the link was held, and what a client saw does not count", unseen("hold-link h1", 9_000, "1", "1"), wrong},
		{"the link was held, and two were unseen in one AckWait", unseen("hold-link h1", 5_000, "3", "4"), wrong},
		{"the link of a hub without members was held", unseen("hold-link h7", 9_000, "2", "2"), wrong},
		{"the hub stood still, and the note came late", unseen("freeze-hub h1", 9_000, "2", "2"), nil},
		{"the hub stood still, and what a client saw does not count", unseen("freeze-hub h1", 9_000, "1", "1"), wrong},
		{"the hub stood still, and two were unseen in one AckWait", unseen("freeze-hub h1", 5_000, "3", "4"), wrong},
		{"a hub without members stood still", unseen("freeze-hub h7", 9_000, "2", "2"), wrong},
		{"the hub stood still, for less than the margin", unseen("freeze-hub h1", 1_400, "2", "2"), wrong},
		{"the hub was killed, and notes nothing", unseen("kill-hub h1", 9_000, "2", "2"), wrong},
		{"the notes had no leader", unseen("lose-disk n1", 9_000, "2", "2") + cluster, nil},
		{"the notes had no leader until just now", unseen("lose-disk n1", 4_200, "2", "2") + cluster, nil},
		{"the notes lost their leader later", strings.Replace(unseen("lose-disk n1", 19_000, "2", "2"), "\n50 - fault", "\n9600 - fault", 1) + cluster, []string{"attempts", "hoarded"}},
		{"the notes had no leader, and what a client saw does not count", unseen("lose-disk n1", 4_200, "1", "1") + cluster, wrong},
		{"the notes had no leader, for less than the margin", strings.Replace(unseen("fill-disk n1", 6_000, "2", "2"), "\n50 - fault", "\n4600 - fault", 1) + cluster, []string{"attempts", "hoarded"}},
		{"a node stood still, and led the notes", unseen("freeze-node n1", 9_000, "2", "2") + cluster, nil},
		{"a node was apart, and led the notes", unseen("part-node n1", 9_000, "2", "2") + cluster, nil},
		{"a delivery waited between servers", unseen("part-node n1", 8_000, "2", "1") + cluster, nil},
		{"a delivery waited between servers for less than the margin", strings.Replace(unseen("part-node n1", 8_000, "2", "1"), "\n50 - fault", "\n6600 - fault", 1) + cluster, []string{"attempts", "hoarded"}},
		{"a leader that was apart delivered once more", unseen("part-node n1", 7_400, "2", "1") + cluster, nil},
		{"the servers had each other again before", unseen("part-node n1", 6_100, "2", "1") + cluster, wrong},
		{"a delivery waited beside a node that stood still", unseen("freeze-node n1", 8_000, "2", "1") + cluster, nil},
		{"a single server stood still", unseen("freeze-node n1", 9_000, "2", "2"), wrong},
		{"attempts began again after one was unseen", begunAgain + "300 c2 > {\"op\":\"PAUSE\",\"topic\":\"t\",\"group\":\"g\",\"corr\":\"p8\"}\n301/300 c2 < {\"op\":\"OK\",\"corr\":\"p8\"}\n302 c2 > {\"op\":\"RESUME\",\"topic\":\"t\",\"group\":\"g\",\"corr\":\"r8\"}\n303/302 c2 < {\"op\":\"OK\",\"corr\":\"r8\"}\n", nil},
		{"attempts began again after one was left out", begunAgain, wrong},
	})
}

// TestHistoryText writes a history and reads it back.
func TestHistoryText(t *testing.T) {
	h, err := readHistory(strings.NewReader(anEvent + firstAcked))
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := h.write(&b); err != nil {
		t.Fatal(err)
	}
	again, err := readHistory(strings.NewReader(b.String()))
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(h, again) {
		t.Errorf("%v, not %v", again, h)
	}
}
