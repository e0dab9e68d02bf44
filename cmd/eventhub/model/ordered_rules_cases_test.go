//go:build unix

package model

import (
	"fmt"
	"strings"
	"testing"
)

// Histories of an ordered group with four slots: a and e are keys of slot 2, b is one of slot 3,
// and c one of slot 0. Member c1 has the slots 0 and 2, and c2 the others.
const (
	twoOrdered = `
0 - set {"seed":1,"ackWaitMs":6000,"toleranceMs":2000}
1 c1 open h0
1 c2 open h1
10 c1 > {"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"from":"earliest","ackTimeoutMs":3000,"maxAttempts":2,"ordered":"key","slots":4},"corr":"s1"}
12/11 c1 < {"op":"OK","corr":"s1"}
20 c2 > {"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"from":"earliest","ackTimeoutMs":3000,"maxAttempts":2,"ordered":"key","slots":4},"corr":"s2"}
22/21 c2 < {"op":"OK","corr":"s2"}
`
	dealt = `
30/29 c1 < {"op":"ASSIGN","topic":"t","group":"g","slots":[0,2],"epoch":5}
30/29 c2 < {"op":"ASSIGN","topic":"t","group":"g","slots":[1,3],"epoch":5}
`
	inOrder = twoOrdered + dealt
)

// written are events that are published and stored in that order: e1 has the first key, and so on.
// "-" is none.
func written(keys ...string) string {
	var b strings.Builder
	for i, key := range keys {
		opts := ""
		if key != "-" {
			opts = fmt.Sprintf(`,"opts":{"key":%q}`, key)
		}
		fmt.Fprintf(&b, "\n%d c1 > {\"op\":\"PUBLISH\",\"topic\":\"t\",\"payload\":{\"n\":%d}%s,\"corr\":\"p%d\"}", 50+i, i+1, opts, i+1)
		fmt.Fprintf(&b, "\n%d/%d c1 < {\"op\":\"OK\",\"id\":\"e%d\",\"corr\":\"p%d\"}", 60+i, 59+i, i+1, i+1)
		fmt.Fprintf(&b, "\n4000 - stored t %d e%d 0 {\"n\":%d}", i+1, i+1, i+1)
	}
	return b.String() + "\n"
}

// gets is an EVENT to a member; slot is "-" for none.
func gets(at, member, n int, key, slot string, attempt int) string {
	of := ""
	if key != "-" {
		of = fmt.Sprintf(`"key":%q,`, key)
	}
	if slot != "-" {
		of += `"partition":` + slot + ","
	}
	return fmt.Sprintf("\n%d/%d c%d < {\"op\":\"EVENT\",\"topic\":\"t\",\"group\":\"g\",\"event\":{\"id\":\"e%d\",\"topic\":\"t\",%s\"payload\":{\"n\":%d}},\"ctx\":{\"attempt\":%d,\"ack_deadline_ms\":3000}}", at, at-1, member, n, of, n, attempt)
}

// says is a frame of a member about an event, which is answered OK 2 ms later.
func says(at, member int, op string, n int) string {
	return fmt.Sprintf("\n%d c%d > {\"op\":%q,\"topic\":\"t\",\"group\":\"g\",\"id\":\"e%d\",\"corr\":\"x%d\"}\n%d/%d c%d < {\"op\":\"OK\",\"corr\":\"x%d\"}", at, member, op, n, at, at+2, at+1, member, at)
}

// TestOrderedRules tries the rules of ordered groups.
func TestOrderedRules(t *testing.T) {
	keys, slots := []string{"keys"}, []string{"slots"}
	aa, moved := written("a", "a"), `
200/199 c1 < {"op":"ASSIGN","topic":"t","group":"g","slots":[0],"epoch":6}
200/199 c2 < {"op":"ASSIGN","topic":"t","group":"g","slots":[1,2,3],"epoch":6}
`
	left := "\n210 c1 > {\"op\":\"UNSUBSCRIBE\",\"topic\":\"t\",\"group\":\"g\",\"corr\":\"u1\"}\n212/211 c1 < {\"op\":\"OK\",\"corr\":\"u1\"}\n"
	alone := func(at int) string { // c1 leaves, and an event for c2 is published at that time
		return inOrder + left + strings.NewReplacer("50 c1", fmt.Sprint(at, " c2"), "60/59 c1", fmt.Sprintf("%d/%d c2", at+10, at+9), "4000 -", "15000 -").Replace(written("b"))
	}
	away := func(at int) string {
		return fmt.Sprintf("\n%d/%d c2 < {\"op\":\"ASSIGN\",\"topic\":\"t\",\"group\":\"g\",\"slots\":[0,1,2,3],\"epoch\":2097153}\n", at, at-1)
	}
	restarted := func(at int) string { // h0, which has the only member; that gets its event then
		return inOrder + strings.ReplaceAll(written("-"), "4000 -", "40000 -") + left + strings.ReplaceAll(left, "c1", "c2") +
			"\n300 - fault 1 kill-hub h0\n301/300 c1 end EOF\n5000 - over 1\n5001 c3 open h0" +
			"\n5100 c3 > {\"op\":\"SUBSCRIBE\",\"topic\":\"t\",\"group\":\"g\",\"opts\":{\"ackTimeoutMs\":3000,\"maxAttempts\":2,\"ordered\":\"key\",\"slots\":4},\"corr\":\"s3\"}" +
			"\n5102/5101 c3 < {\"op\":\"OK\",\"corr\":\"s3\"}" + gets(at, 3, 1, "-", "-", 1) + says(at+10, 3, "ACK", 1)
	}
	testCases(t, []ruleCase{
		{"one after the other", inOrder + aa + gets(100, 1, 1, "a", "2", 1) + says(150, 1, "ACK", 1) + gets(155, 1, 2, "a", "2", 1) + says(160, 1, "ACK", 2), nil},
		{"keys: the second one while the first is leased", inOrder + aa + gets(100, 1, 1, "a", "2", 1) + gets(120, 1, 2, "a", "2", 1) + says(150, 1, "ACK", 1) + says(160, 1, "ACK", 2), keys},
		{"keys: other keys go on", inOrder + written("a", "e", "c") + gets(100, 1, 1, "a", "2", 1) + gets(120, 1, 2, "e", "2", 1) + gets(121, 1, 3, "c", "0", 1) + says(150, 1, "ACK", 1) + says(160, 1, "ACK", 2) + says(170, 1, "ACK", 3), nil},
		{"keys: the second one first", inOrder + aa + gets(100, 1, 2, "a", "2", 1) + says(150, 1, "ACK", 2) + gets(155, 1, 1, "a", "2", 1) + says(160, 1, "ACK", 1), keys},
		{"keys: the second one while the first is refused", inOrder + aa + gets(100, 1, 1, "a", "2", 1) + says(110, 1, "NACK", 1) + gets(120, 1, 2, "a", "2", 1) + says(150, 1, "ACK", 2) + gets(170, 1, 1, "a", "2", 2) + says(180, 1, "ACK", 1), keys},
		{"keys: the refused one again, and then the second", inOrder + aa + gets(100, 1, 1, "a", "2", 1) + says(110, 1, "NACK", 1) + gets(170, 1, 1, "a", "2", 2) + says(180, 1, "ACK", 1) + gets(185, 1, 2, "a", "2", 1) + says(190, 1, "ACK", 2), nil},
		{"keys: the second one when the lease of the first has expired", inOrder + aa + gets(100, 1, 1, "a", "2", 1) + gets(3300, 1, 2, "a", "2", 1) + says(3310, 1, "ACK", 2) + gets(3400, 1, 1, "a", "2", 2) + says(3410, 1, "ACK", 1), keys},
		{"keys: the second one when the first is dead", inOrder + aa + gets(100, 1, 1, "a", "2", 1) + says(110, 1, "NACK", 1) + gets(170, 1, 1, "a", "2", 2) + says(180, 1, "NACK", 1) + gets(200, 1, 2, "a", "2", 1) + says(210, 1, "ACK", 2) + letterOf("2", "refused"), nil},
		{"keys: the second one before the first is dead", inOrder + aa + gets(100, 1, 1, "a", "2", 1) + says(110, 1, "NACK", 1) + gets(170, 1, 1, "a", "2", 2) + gets(175, 1, 2, "a", "2", 1) + says(180, 1, "NACK", 1) + says(210, 1, "ACK", 2) + letterOf("2", "refused"), keys},
		{"keys: an ACK that is sent too late settles nothing", inOrder + aa + gets(100, 1, 1, "a", "2", 1) + says(3600, 1, "ACK", 1) + gets(3650, 1, 2, "a", "2", 1) + says(3660, 1, "ACK", 2), keys},
		{"keys: an ACK that is not answered may have settled it", inOrder + aa + gets(100, 1, 1, "a", "2", 1) + "\n150 c1 > " + ackE1 + gets(155, 1, 2, "a", "2", 1) + says(160, 1, "ACK", 2), nil},
		{"keys: what an ACK was lost of comes again, beside the second one", inOrder + aa + gets(100, 1, 1, "a", "2", 1) + says(150, 1, "ACK", 1) + "\n200 - fault 1 kill-node n0\n400 - over 1" + gets(500, 1, 2, "a", "2", 1) + gets(600, 1, 1, "a", "2", 2) + says(610, 1, "ACK", 1) + says(620, 1, "ACK", 2), keys},
		{"keys: what an ACK was lost of comes again, behind the second one", inOrder + aa + gets(100, 1, 1, "a", "2", 1) + says(150, 1, "ACK", 1) + "\n200 - fault 1 kill-node n0\n400 - over 1" + gets(500, 1, 2, "a", "2", 1) + says(510, 1, "ACK", 2) + gets(600, 1, 1, "a", "2", 2) + says(610, 1, "ACK", 1), nil},
		{"keys: the first one never came", inOrder + aa + gets(100, 1, 2, "a", "2", 1) + says(110, 1, "ACK", 2), []string{"hoarded", "keys"}},
		{"keys: at another member, after the hub that gives out events was killed", inOrder + aa + gets(100, 1, 1, "a", "2", 1) + "\n150 - fault 1 kill-hub h0\n150/149 c1 end EOF\n500 - over 1" + away(16_200) + gets(16_210, 2, 1, "a", "2", 2) + says(16_220, 2, "ACK", 1) + gets(16_230, 2, 2, "a", "2", 1) + says(16_240, 2, "ACK", 2), nil},
		{"keys: at another member, after that hub was killed, in the wrong order", inOrder + aa + gets(100, 1, 1, "a", "2", 1) + "\n150 - fault 1 kill-hub h0\n150/149 c1 end EOF\n500 - over 1" + away(16_200) + gets(16_210, 2, 2, "a", "2", 1) + says(16_220, 2, "ACK", 2) + gets(16_230, 2, 1, "a", "2", 2) + says(16_240, 2, "ACK", 1), keys},
		{"keys: an ACK in the last moments of the hub that gives out events", inOrder + written("b") + gets(100, 2, 1, "b", "3", 1) + says(150, 2, "ACK", 1) + "\n160 - fault 1 kill-hub h0\n161/160 c1 end EOF\n500 - over 1" + gets(16_300, 2, 1, "b", "3", 2) + says(16_310, 2, "ACK", 1), nil},
		{"keys: an ACK before these moments", inOrder + written("b") + gets(100, 2, 1, "b", "3", 1) + says(150, 2, "ACK", 1) + "\n1160 - fault 1 kill-hub h0\n1161/1160 c1 end EOF\n1500 - over 1" + gets(17_300, 2, 1, "b", "3", 2) + says(17_310, 2, "ACK", 1), []string{"acked"}},
		{"keys: an ACK in the last moments of a hub that never had a member", inOrder + written("b") + gets(100, 2, 1, "b", "3", 1) + says(150, 2, "ACK", 1) + "\n160 - fault 1 kill-hub h7\n500 - over 1" + gets(16_300, 2, 1, "b", "3", 2) + says(16_310, 2, "ACK", 1), []string{"acked"}},
		{"keys: the lease of a member ends with the hub that gives out events", inOrder + written("b") + gets(100, 2, 1, "b", "3", 1) + "\n150 - fault 1 kill-hub h0\n150/149 c1 end EOF\n500 - over 1" + gets(2_000, 2, 1, "b", "3", 2) + says(2_010, 2, "ACK", 1), nil},
		{"keys: it does not with a hub that never had a member", inOrder + written("b") + gets(100, 2, 1, "b", "3", 1) + "\n150 - fault 1 kill-hub h7\n500 - over 1" + gets(2_000, 2, 1, "b", "3", 2) + says(2_010, 2, "ACK", 1), []string{"holder"}},
		{"keys: its lease ends when the hub that gives out events has had no member for 10 s", alone(9400) + gets(9_500, 2, 1, "b", "3", 1) + gets(10_300, 2, 1, "b", "3", 2) + says(10_310, 2, "ACK", 1), nil},
		{"keys: it does not long after that", alone(12900) + gets(13_000, 2, 1, "b", "3", 1) + gets(14_000, 2, 1, "b", "3", 2) + says(14_010, 2, "ACK", 1), []string{"holder"}},
		{"keys: it does not before", alone(7900) + gets(8_000, 2, 1, "b", "3", 1) + gets(9_500, 2, 1, "b", "3", 2) + says(9_510, 2, "ACK", 1), []string{"holder"}},
		{"keys: a slot moves while an event of it is leased", inOrder + written("a", "e") + gets(100, 1, 1, "a", "2", 1) + moved + gets(220, 2, 2, "e", "2", 1) + says(230, 2, "ACK", 2) + says(240, 1, "ACK", 1), keys},
		{"keys: a slot moves when nothing of it is leased", inOrder + written("a", "e") + gets(100, 1, 1, "a", "2", 1) + says(150, 1, "ACK", 1) + moved + gets(220, 2, 2, "e", "2", 1) + says(230, 2, "ACK", 2), nil},

		{"slots: no ASSIGN", twoOrdered + written("a") + gets(100, 1, 1, "a", "2", 1) + says(110, 1, "ACK", 1), slots},
		{"slots: the event comes before the ASSIGN", twoOrdered + written("a") + gets(100, 1, 1, "a", "2", 1) + says(110, 1, "ACK", 1) + strings.ReplaceAll(dealt, "30/29", "120/119"), slots},
		{"slots: that of another member", inOrder + written("b") + gets(100, 1, 1, "b", "3", 1) + says(110, 1, "ACK", 1), slots},
		{"slots: one that was lost", inOrder + written("a") + moved + gets(220, 1, 1, "a", "2", 1) + says(230, 1, "ACK", 1), slots},
		{"slots: not the slot of the key", inOrder + written("a") + gets(100, 1, 1, "a", "0", 1) + says(110, 1, "ACK", 1), slots},
		{"slots: a key without a slot", inOrder + written("a") + gets(100, 1, 1, "a", "-", 1) + says(110, 1, "ACK", 1), slots},
		{"slots: no key, and no slot", inOrder + written("-") + gets(100, 2, 1, "-", "-", 1) + says(110, 2, "ACK", 1), nil},
		{"slots: no key, and a slot", inOrder + written("-") + gets(100, 1, 1, "-", "2", 1) + says(110, 1, "ACK", 1), slots},
		{"slots: a group that is not ordered", strings.ReplaceAll(twoOrdered, `,"ordered":"key","slots":4`, "") + written("a") + gets(100, 1, 1, "a", "2", 1) + says(110, 1, "ACK", 1), slots},
		{"slots: the first member's number counts", strings.Replace(inOrder, `"slots":4},"corr":"s2"`, `"slots":64},"corr":"s2"`, 1) + written("a") + gets(100, 1, 1, "a", "31", 1) + says(110, 1, "ACK", 1), slots},
		{"slots: an epoch that does not rise", inOrder + strings.ReplaceAll(moved, `"epoch":6`, `"epoch":5`), slots},
		{"slots: one slot twice in an epoch", twoOrdered + strings.Replace(dealt, "[1,3]", "[1,2,3]", 1), slots},
		{"slots: two members have one for long", inOrder + "\n200/199 c2 < {\"op\":\"ASSIGN\",\"topic\":\"t\",\"group\":\"g\",\"slots\":[1,2,3],\"epoch\":6}\n" + "2300/2299 c1 < {\"op\":\"ASSIGN\",\"topic\":\"t\",\"group\":\"g\",\"slots\":[0],\"epoch\":7}\n4000 - note the end", slots},
		{"slots: the old member is told a little later", inOrder + "\n200/199 c2 < {\"op\":\"ASSIGN\",\"topic\":\"t\",\"group\":\"g\",\"slots\":[1,2,3],\"epoch\":6}\n" + "300/299 c1 < {\"op\":\"ASSIGN\",\"topic\":\"t\",\"group\":\"g\",\"slots\":[0],\"epoch\":7}\n4000 - note the end", nil},
		{"slots: the old member has left", inOrder + left + away(220) + "4000 - note the end", nil},
		{"frames: an ASSIGN to a member of a group that is not ordered", twoMembers + undrained + dealt, []string{"frames"}},

		{"hoarded: a key waits behind one that is leased", inOrder + aa + gets(100, 1, 1, "a", "2", 1) + says(3000, 1, "ACK", 1) + gets(3010, 1, 2, "a", "2", 1) + says(3020, 1, "ACK", 2), nil},
		{"hoarded: a key waits behind nothing", inOrder + aa + gets(100, 1, 1, "a", "2", 1) + says(110, 1, "ACK", 1) + gets(3010, 1, 2, "a", "2", 1) + says(3020, 1, "ACK", 2), []string{"hoarded"}},
		{"hoarded: at the only member, whose hub was killed and started again", restarted(22_500), nil},
		{"hoarded: at the only member, long after that", restarted(26_000), []string{"hoarded"}},
		{"hoarded: the member that has the slot is paused", inOrder + written("b") + "\n40 c2 > {\"op\":\"PAUSE\",\"topic\":\"t\",\"group\":\"g\",\"corr\":\"p8\"}\n41/40 c2 < {\"op\":\"OK\",\"corr\":\"p8\"}\n4000 - note the end", nil},
	})
}
