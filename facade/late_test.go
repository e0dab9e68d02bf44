package facade_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/facade"
	"eventhub/jetstream"
)

// answerWithin is how long clients wait for the answer to a frame.
const answerWithin = 15 * time.Second

// stallingRig starts a hub whose NATS server can be made to stand still.
func stallingRig(t *testing.T, change func(*facade.Config)) (*rig, *tcpProxy) {
	t.Helper()
	proxy := newTCPProxy(t, startNATS(t))
	r := newRigOn(t, jetstream.Config{URL: proxy.url(), MemoryStorage: true}, change)
	t.Cleanup(proxy.heal) // the bus closes in good order
	return r, proxy
}

// timedReply is a reply and the time from the sending of its frame.
type timedReply struct {
	reply
	took time.Duration
}

// timed sends frames, each in a TCP write of its own unless together is set, and waits for as many
// replies. Each must come in time. On a machine that is so busy that the first one is late, the
// others may be late by half as much again: frames that wait for one another are late by far more.
func (c *rawConn) timed(together bool, frames ...string) []timedReply {
	c.t.Helper()
	begun := time.Now()
	if together {
		c.send(frames...)
	} else {
		for _, f := range frames {
			c.send(f)
		}
	}
	var list []timedReply
	for len(list) < len(frames) {
		text := c.next()
		if strings.HasPrefix(text, `{"op":"EVENT"`) {
			continue
		}
		got := timedReply{took: time.Since(begun)}
		if err := json.Unmarshal([]byte(text), &got.reply); err != nil {
			c.t.Fatalf("%s: %v", text, err)
		}
		c.t.Logf("after %v: %s", got.took.Round(time.Millisecond), text)
		list = append(list, got)
		limit := answerWithin
		if len(list) > 1 {
			limit = max(limit, list[0].took*3/2)
		}
		if got.took > limit {
			c.t.Errorf("answered after %v, want within %v: %s", got.took, limit, text)
		}
	}
	return list
}

// outcome is OK or an error's code.
func (r *reply) outcome() string {
	if r.Op == "ERR" {
		return r.Code
	}
	return r.Op
}

// TestStalledStoreAnswersInTime pipelines every op while NATS stands still.
func TestStalledStoreAnswersInTime(t *testing.T) {
	t.Parallel()
	for _, together := range []bool{true, false} {
		for _, corr := range []bool{true, false} {
			t.Run(fmt.Sprintf("together %v, corr %v", together, corr), func(t *testing.T) {
				t.Parallel()
				r, proxy := stallingRig(t, nil)
				c := dialRaw(t, r.ws.URL)
				auth := `{"op":"AUTH","token":"` + rigToken + `"`
				for _, f := range []string{
					auth + `}`, `{"op":"SUBSCRIBE","topic":"live","group":"g"}`, `{"op":"SUBSCRIBE","topic":"live","group":"h"}`,
					`{"op":"PUBLISH","topic":"live"}`,
				} {
					if got := c.timed(true, f)[0]; got.Op != "OK" {
						t.Fatal(got)
					}
				}
				frames := []string{auth}
				want := []string{"OK"}
				add := func(outcome, frame string) {
					frames, want = append(frames, frame), append(want, outcome)
				}
				for i := range 5 {
					add("ERR", `{"op":"SUBSCRIBE","topic":"new`+strconv.Itoa(i)+`","group":"g"`)
				}
				add("ERR", `{"op":"PUBLISH","topic":"unmade"`)
				add("ERR", `{"op":"PUBLISH","topic":"unmade"`)
				add("ERR", `{"op":"PUBLISH","topic":"live"`)
				add("OK", `{"op":"ACK","topic":"live","group":"g","id":"none"`)
				add("ERR", `{"op":"PAUSE","topic":"live","group":"g"`)
				add("OK", `{"op":"ACK","topic":"live","group":"g","id":"none"`)
				add("OK", `{"op":"RESUME","topic":"live","group":"h"`)
				add("OK", `{"op":"UNSUBSCRIBE","topic":"live","group":"h"`)
				add("not_subscribed", `{"op":"UNSUBSCRIBE","topic":"live","group":"h"`)
				add("OK", auth)
				for i := range frames {
					if corr {
						frames[i] += `,"corr":` + strconv.Itoa(i)
					}
					frames[i] += `}`
				}
				proxy.freeze()
				got := c.timed(together, frames...)
				if corr {
					slices.SortFunc(got, func(a, b timedReply) int {
						x, _ := a.Corr.(float64)
						y, _ := b.Corr.(float64)
						return int(x - y)
					})
				}
				for i, g := range got {
					if is := g.outcome(); is != want[i] && g.Op != want[i] {
						t.Errorf("answer %d is %s %q, want %s", i, is, g.Msg, want[i])
					}
					if code := g.Code; code == "bad_frame" || code == "unauthorized" {
						t.Errorf("answer %d: %+v", i, g)
					}
				}
				if corr && got[9].took > 5*time.Second {
					t.Errorf("an ACK waited for other groups' frames: %v", got[9].took)
				}
				proxy.heal()
				eventually(t, "the hub works again", func() bool {
					answers := c.timed(true, `{"op":"PUBLISH","topic":"live"}`)
					return answers[0].Op == "OK"
				})
			})
		}
	}
}

// TestParkedRepliesDoNotMakeFramesLate has so many replies wait for that to a PUBLISH that the
// reader stops. What is sent behind them is answered in time all the same.
func TestParkedRepliesDoNotMakeFramesLate(t *testing.T) {
	t.Parallel()
	r, proxy := stallingRig(t, func(cfg *facade.Config) { cfg.Limits.OutboundBytes = 2_500 })
	c := dialRaw(t, r.ws.URL)
	c.timed(true, `{"op":"AUTH","token":"`+rigToken+`"}`, `{"op":"PUBLISH","topic":"live"}`)
	proxy.freeze()
	frames := []string{`{"op":"PUBLISH","topic":"live"}`}
	const acks = 100 // whose replies are twice as long together
	for range acks {
		frames = append(frames, `{"op":"ACK","topic":"t","group":"g","id":"`+strings.Repeat("x", 100)+`"}`)
	}
	for i := range 3 {
		frames = append(frames, `{"op":"SUBSCRIBE","topic":"t","group":"g`+strconv.Itoa(i)+`"}`)
	}
	for i, got := range c.timed(false, frames...) {
		if is := got.outcome(); got.Op != "ERR" || (is == "not_subscribed") != (0 < i && i <= acks) {
			t.Fatal(i, got)
		}
	}
	if r.seen.count("limit outbound_bytes") == 0 {
		t.Error("the reader did not have to wait")
	}
}

// TestRepliesWithoutCorrKeepTheOrder has the answer to a PUBLISH come before that to the ACK behind
// it, which needs nothing from NATS.
func TestRepliesWithoutCorrKeepTheOrder(t *testing.T) {
	t.Parallel()
	r := newRig(t, unthrottled)
	c := dialRaw(t, r.ws.URL)
	setup := []string{
		`{"op":"AUTH","token":"` + rigToken + `"}`, `{"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"maxInFlight":1}}`,
		`{"op":"PUBLISH","topic":"a"}`, `{"op":"PUBLISH","topic":"b"}`,
	}
	for i, got := range c.timed(true, setup...) {
		if got.Op != "OK" {
			t.Fatal(i, got)
		}
	}
	const rounds, together = 200, 20 // each frame waits for all before it that were sent together
	for first := 0; first < rounds; first += together {
		var frames []string
		for i := range together {
			n := strconv.Itoa(first + i)
			frames = append(frames, `{"op":"PUBLISH","topic":"a","opts":{"id":"a`+n+`"}}`,
				`{"op":"ACK","topic":"t","group":"g","id":"x"}`, `nonsense`,
				`{"op":"PUBLISH","topic":"b","opts":{"id":"b`+n+`"}}`,
				`{"op":"MODACK","topic":"t","group":"g","id":"x"}`)
		}
		got := c.timed(true, frames...)
		for i := range together {
			n := strconv.Itoa(first + i)
			for k, want := range []string{"OK a" + n, "OK ", "bad_json ", "OK b" + n, "unknown_id "} {
				if is := got[5*i+k].outcome() + " " + got[5*i+k].ID; is != want {
					t.Fatalf("reply %d of round %s is %q, want %q", k, n, is, want)
				}
			}
		}
	}
}
