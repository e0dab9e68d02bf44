package facade

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"eventhub/jetstream"
)

// payload256 is a payload of 256 bytes of the kind that heartbeats are.
const payload256 = `{"host":"web-17.eu-central.example","pid":48121,"name":"eventhub","cpu":12.75,"rss":184549376,` +
	`"started":1731936000123,"state":"running","tags":["prod","blue"],"parent":null,"alive":true,` +
	`"limits":{"open_files":65536,"threads":512},"note":"steady, nothing t"}`

// read takes a message through both stages.
func read(f *frame, msg string) *fault {
	if fail := f.cut([]byte(msg)); fail != nil {
		return fail
	}
	return f.decode()
}

func TestFrames(t *testing.T) {
	var f frame // one for all cases: nothing may be left over from the case before
	for _, c := range []struct {
		msg  string
		want frame
	}{
		{`{"op":"AUTH"}`, frame{op: opAuth}},
		{`{"op":"AUTH","token":null,"corr":""}`, frame{op: opAuth, corr: []byte(`""`)}},
		{`{"op":"AUTH","token":"a\"b"}`, frame{op: opAuth, token: []byte(`a"b`)}},
		{`{"op":"AUTH","token":""}`, frame{op: opAuth, token: []byte{}}},
		{`{"op":"DANCE","topic":7,"corr":7}`, frame{op: opUnknown, corr: []byte("7")}},
		{`{"op":"auth"}`, frame{op: opUnknown}},
		{`{"op":"PUBLISH","topic":"t"}`, frame{op: opPublish, topic: []byte("t")}},
		{`{"op":"PUBLISH","topic":"t","payload":null,"opts":null}`, frame{op: opPublish, topic: []byte("t"), payload: []byte("null")}},
		{
			" { \"op\" : \"PUBLISH\" , \"payload\" : {\"b\": 1,\"a\":[12345678901234567890, \"\\u00e9\"]} , \"topic\" : \"a.b\" , \"corr\" : [1, 2] } \n",
			frame{op: opPublish, topic: []byte("a.b"), corr: []byte("[1, 2]"), payload: []byte(`{"b": 1,"a":[12345678901234567890, "\u00e9"]}`)},
		},
		{
			`{"OP":"AUTH","Topic":"x","\u006fp":"\u0050UBLISH","topic":7,"topic":"t","payload":1,"payload":2,"x":[{}]}`,
			frame{op: opPublish, topic: []byte("t"), payload: []byte("2")},
		},
		{
			`{"op":"PUBLISH","topic":"t","opts":{"id":"i","ts":1.7e12,"key":"h:n:1","headers":{"a":1,"B":"2","\u0061":"\n"},` +
				`"tags":["x","\ud83d\ude00"],"caused_by":[],"sid":"s","filter":{},"group":3}}`,
			frame{op: opPublish, topic: []byte("t"), publish: jetstream.PublishOptions{
				ID: "i", TS: 1_700_000_000_000, HasTS: true, Key: "h:n:1", SID: "s",
				Headers: map[string]string{"a": "\n", "B": "2"}, Tags: []string{"x", "😀"},
			}},
		},
		{
			`{"op":"PUBLISH","topic":"t","opts":{"id":null,"ts":null,"key":null,"headers":null,"tags":null,"caused_by":null,"sid":null,"tombstone":null,"delay_ms":null,"at":null}}`,
			frame{op: opPublish, topic: []byte("t")},
		},
		{`{"op":"PUBLISH","topic":"t","opts":{"key":"k","tombstone":true}}`, frame{op: opPublish, topic: []byte("t"), publish: jetstream.PublishOptions{Key: "k", Tombstone: true}}},
		{`{"op":"PUBLISH","topic":"t","opts":{"tombstone":true,"tombstone":false}}`, frame{op: opPublish, topic: []byte("t")}},
		{`{"op":"PUBLISH","topic":"t","opts":{"delay_ms":31536000000,"at":null}}`, frame{op: opPublish, topic: []byte("t"), publish: jetstream.PublishOptions{Delay: 365 * 24 * time.Hour}}},
		{`{"op":"PUBLISH","topic":"t","opts":{"at":1.7e12}}`, frame{op: opPublish, topic: []byte("t"), publish: jetstream.PublishOptions{At: time.UnixMilli(1_700_000_000_000)}}},
		{`{"op":"PUBLISH","topic":"t","opts":{"ts":-0}}`, frame{op: opPublish, topic: []byte("t"), publish: jetstream.PublishOptions{HasTS: true}}},
		{`{"op":"SUBSCRIBE","topic":"t","group":"g","opts":{}}`, frame{op: opSubscribe, topic: []byte("t"), group: []byte("g")}},
		{
			`{"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"from":"afterId","afterId":"x","ts":9007199254740991,"batchSize":1,` +
				`"maxInFlight":10000,"ackTimeoutMs":43200000,"maxAttempts":0,"topics":["u","v"],"groupTtlMs":2592000000,"manualAck":true}}`,
			frame{op: opSubscribe, topic: []byte("t"), group: []byte("g"), subscribe: jetstream.SubscribeOptions{
				From: jetstream.FromAfterID("x"), BatchSize: 1, MaxInFlight: 10_000,
				AckTimeout: 12 * time.Hour, MaxAttempts: jetstream.NeverGiveUp, Topics: []string{"u", "v"}, GroupTTL: 720 * time.Hour,
			}},
		},
		{
			`{"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"from":"ts","ts":0,"maxAttempts":3}}`,
			frame{op: opSubscribe, topic: []byte("t"), group: []byte("g"), subscribe: jetstream.SubscribeOptions{From: jetstream.FromTime(time.UnixMilli(0)), MaxAttempts: 3}},
		},
		{`{"op":"AUTH","token":"x","caps":null}`, frame{op: opAuth, token: []byte("x")}},
		{`{"op":"AUTH","token":"x","caps":["y","events_lost"]}`, frame{op: opAuth, token: []byte("x"), losses: true}},
		{`{"op":"AUTH","token":"x","caps":["y"` + strings.Repeat(`,"z"`, 14) + `,"group_reset"]}`, frame{op: opAuth, token: []byte("x"), resets: true}},
		{`{"op":"UNSUBSCRIBE","topic":"t","group":"g"}`, frame{op: opUnsubscribe, topic: []byte("t"), group: []byte("g")}},
		{`{"op":"PAUSE","topic":"t","group":"g"}`, frame{op: opPause, topic: []byte("t"), group: []byte("g")}},
		{`{"op":"RESUME","topic":"t","group":"g"}`, frame{op: opResume, topic: []byte("t"), group: []byte("g")}},
		{`{"op":"ACK","topic":"t","group":"g","id":"i","ids":null}`, frame{op: opAck, topic: []byte("t"), group: []byte("g"), id: []byte("i")}},
		{
			`{"op":"ACK","topic":"t","group":"g","ids":["i","\u006a"]}`,
			frame{op: opAck, topic: []byte("t"), group: []byte("g"), ids: [][]byte{[]byte("i"), []byte("j")}},
		},
		{
			`{"op":"NACK","topic":"t","group":"g","id":"i","reason":"no\tway"}`,
			frame{op: opNack, topic: []byte("t"), group: []byte("g"), id: []byte("i"), reason: []byte("no\tway"), delay: -1},
		},
		{
			`{"op":"NACK","topic":"t","group":"g","id":"i","reason":{"a":1},"delay_ms":250}`,
			frame{op: opNack, topic: []byte("t"), group: []byte("g"), id: []byte("i"), delay: 250 * time.Millisecond},
		},
		{
			`{"op":"MODACK","topic":"t","group":"g","id":"i","extend_ms":"5000"}`,
			frame{op: opModack, topic: []byte("t"), group: []byte("g"), id: []byte("i"), extend: 5 * time.Second},
		},
	} {
		if fail := read(&f, c.msg); fail != nil {
			t.Errorf("%s: %+v", c.msg, *fail)
			continue
		}
		if got := meaning(&f); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s\ngot  %+v\nwant %+v", c.msg, got, c.want)
		}
	}
}

// meaning is the frame without what it keeps for itself.
func meaning(f *frame) frame {
	m := *f
	m.raw, m.text, m.idsRoom = rawFields{}, nil, nil
	return m
}

func TestFrameFaults(t *testing.T) {
	const capsRule = "caps must be an array of at most 16 strings of at most 64 bytes"
	const pub, sub = `{"corr":"c","op":"PUBLISH","topic":"t","opts":`, `{"corr":"c","op":"SUBSCRIBE","topic":"t","group":"g","opts":`
	var f frame
	for _, c := range []struct {
		msg  string
		code code
		text string
		corr string
	}{
		{``, codeBadJSON, "Invalid JSON", ""},
		{`{"corr":"c","op":"AUTH"`, codeBadJSON, "Invalid JSON", ""},
		{`{"corr":"c","op":"AUTH"}}`, codeBadJSON, "Invalid JSON", ""},
		{`{"corr":"c","op":"AUTH","x":"` + "\xff" + `"}`, codeBadJSON, "Invalid JSON", ""},
		{`{"op":"PUBLISH","payload":` + strings.Repeat("[", 9_993) + strings.Repeat("]", 9_993) + `}`, codeBadJSON, "Invalid JSON", ""},
		{` 17 `, codeBadFrame, "a frame must be an object", ""},
		{`[{"op":"AUTH"}]`, codeBadFrame, "a frame must be an object", ""},
		{`null`, codeBadFrame, "a frame must be an object", ""},
		{`{"corr":"` + strings.Repeat("c", 1023) + `","op":"AUTH"}`, codeBadFrame, "corr is longer than 1024 bytes", ""},
		{`{"corr":"c"}`, codeBadFrame, "op is missing", `"c"`},
		{`{"corr":"c","op":"AUTH","op":null}`, codeBadFrame, "op is missing", `"c"`},
		{`{"corr":null,"op":7}`, codeBadFrame, "op must be a string, not a number", "null"},
		{`{"op":"AUTH","token":7}`, codeBadFrame, "token must be a string, not a number", ""},
		{`{"op":"PUBLISH","payload":1}`, codeBadFrame, "topic is missing", ""},
		{`{"op":"PUBLISH","topic":["t"]}`, codeBadFrame, "topic must be a string, not an array", ""},
		{`{"op":"UNSUBSCRIBE","topic":"t"}`, codeBadFrame, "group is missing", ""},
		{`{"op":"SUBSCRIBE","topic":"t","group":{}}`, codeBadFrame, "group must be a string, not an object", ""},
		{`{"op":"ACK","topic":"t","group":"g"}`, codeBadFrame, "id is missing", ""},
		{`{"op":"NACK","topic":"t","group":"g","id":true}`, codeBadFrame, "id must be a string, not a boolean", ""},
		{`{"op":"MODACK","topic":"t","group":"g","extend_ms":1}`, codeBadFrame, "id is missing", ""},
		{`{"op":"ACK","topic":"t","group":"g","ids":"x"}`, codeBadFrame, "ids must be an array, not a string", ""},
		{`{"op":"ACK","topic":"t","group":"g","ids":[]}`, codeBadFrame, "ids is empty", ""},
		{`{"op":"ACK","topic":"t","group":"g","ids":["a",null]}`, codeBadFrame, "ids must be an array of strings, not null", ""},
		{`{"op":"ACK","topic":"t","group":"g","id":"a","ids":["a"]}`, codeBadFrame, "an ACK has id or ids, not both", ""},
		{`{"op":"ACK","topic":"t","group":"g","ids":["a"` + strings.Repeat(`,"a"`, 1000) + `]}`, codeBadFrame, "ids has more than 1000 items", ""},
		{pub + `[]}`, codeBadFrame, "opts must be an object, not an array", `"c"`},
		{sub + `"x"}`, codeBadFrame, "opts must be an object, not a string", `"c"`},
		{pub + `{"id":7}}`, codeBadOptions, "opts.id must be a string, not 7", `"c"`},
		{pub + `{"id":""}}`, codeBadOptions, "opts.id must not be empty", `"c"`},
		{pub + `{"key":""}}`, codeBadOptions, "opts.key must not be empty", `"c"`},
		{pub + `{"sid":[]}}`, codeBadOptions, "opts.sid must be a string, not an array", `"c"`},
		{pub + `{"ts":-1}}`, codeBadOptions, "opts.ts must be an integer from 0 to 9007199254740991, not -1", `"c"`},
		{pub + `{"ts":1.5}}`, codeBadOptions, "opts.ts must be an integer from 0 to 9007199254740991, not 1.5", `"c"`},
		{pub + `{"ts":9007199254740992}}`, codeBadOptions, "opts.ts must be an integer from 0 to 9007199254740991, not 9007199254740992", `"c"`},
		{pub + `{"ts":1e999}}`, codeBadOptions, "opts.ts must be an integer from 0 to 9007199254740991, not 1e999", `"c"`},
		{pub + `{"ts":0.1234567890123456789}}`, codeBadOptions, "opts.ts must be an integer from 0 to 9007199254740991, not a number", `"c"`},
		{pub + `{"ts":"5"}}`, codeBadOptions, "opts.ts must be an integer from 0 to 9007199254740991, not a string", `"c"`},
		{pub + `{"headers":[]}}`, codeBadOptions, "opts.headers must be an object of strings, not an array", `"c"`},
		{pub + `{"headers":{"a":"x","a":null}}}`, codeBadOptions, "opts.headers must be an object of strings, but holds null", `"c"`},
		{pub + `{"tags":"x"}}`, codeBadOptions, "opts.tags must be an array of strings, not a string", `"c"`},
		{pub + `{"tombstone":"true"}}`, codeBadOptions, "opts.tombstone must be a boolean, not a string", `"c"`},
		{pub + `{"tombstone":1}}`, codeBadOptions, "opts.tombstone must be a boolean, not 1", `"c"`},
		{pub + `{"delay_ms":-1}}`, codeBadOptions, "opts.delay_ms must be an integer from 0 to 31536000000, not -1", `"c"`},
		{pub + `{"delay_ms":31536000001}}`, codeBadOptions, "opts.delay_ms must be an integer from 0 to 31536000000, not 31536000001", `"c"`},
		{pub + `{"at":"tomorrow"}}`, codeBadOptions, "opts.at must be an integer from 0 to 9007199254740991, not a string", `"c"`},
		{pub + `{"at":0,"delay_ms":0}}`, codeBadOptions, "opts.delay_ms and opts.at are two ways to say when: give one", `"c"`},
		{pub + `{"caused_by":["x",{}]}}`, codeBadOptions, "opts.caused_by must be an array of strings, but holds an object", `"c"`},
		{sub + `{"from":"now"}}`, codeBadOptions, "opts.from must be latest, earliest, ts or afterId", `"c"`},
		{sub + `{"from":5}}`, codeBadOptions, "opts.from must be a string, not 5", `"c"`},
		{sub + `{"from":"ts"}}`, codeBadOptions, "opts.ts is needed with from ts", `"c"`},
		{sub + `{"from":"ts","ts":"x"}}`, codeBadOptions, "opts.ts must be an integer from 0 to 9007199254740991, not a string", `"c"`},
		{sub + `{"from":"afterId","afterId":""}}`, codeBadOptions, "opts.afterId is needed with from afterId", `"c"`},
		{sub + `{"batchSize":0}}`, codeBadOptions, "opts.batchSize must be an integer from 1 to 10000, not 0", `"c"`},
		{sub + `{"maxInFlight":10001}}`, codeBadOptions, "opts.maxInFlight must be an integer from 1 to 10000, not 10001", `"c"`},
		{sub + `{"ackTimeoutMs":999}}`, codeBadOptions, "opts.ackTimeoutMs must be an integer from 1000 to 43200000, not 999", `"c"`},
		{sub + `{"maxAttempts":1000001}}`, codeBadOptions, "opts.maxAttempts must be an integer from 0 to 1000000, not 1000001", `"c"`},
		{sub + `{"topics":["a"` + strings.Repeat(`,"a"`, 32) + `]}}`, codeBadOptions, "opts.topics must have at most 32 items, not 33", `"c"`},
		{`{"corr":"c","op":"AUTH","caps":["a"` + strings.Repeat(`,"a"`, 16) + `]}`, codeBadOptions, capsRule, `"c"`},
		{`{"corr":"c","op":"AUTH","caps":["` + strings.Repeat("a", 65) + `"]}`, codeBadOptions, capsRule, `"c"`},
		{`{"corr":"c","op":"AUTH","caps":["group_reset",null]}`, codeBadOptions, capsRule, `"c"`},
		{`{"corr":"c","op":"AUTH","caps":"group_reset"}`, codeBadOptions, capsRule, `"c"`},
		{sub + `{"groupTtlMs":2592000001}}`, codeBadOptions, "opts.groupTtlMs must be an integer from 1000 to 2592000000, not 2592000001", `"c"`},
	} {
		fail := read(&f, c.msg)
		if fail == nil {
			t.Errorf("%.200s is taken", c.msg)
			continue
		}
		if fail.code != c.code || fail.msg != c.text || string(f.corr) != c.corr {
			t.Errorf("%.200s\ngot  %s %q, corr %q\nwant %s %q, corr %q", c.msg, fail.code, fail.msg, f.corr, c.code, c.text, c.corr)
		}
	}
}

// A connection that has not authenticated must not learn about its fields: cut finds no fault with
// them.
func TestCutLeavesFieldsAlone(t *testing.T) {
	var f frame
	for _, msg := range []string{
		`{"op":"PUBLISH","corr":1}`, `{"op":"ACK","topic":7,"corr":1}`, `{"op":"SUBSCRIBE","opts":7,"corr":1}`, `{"op":"NO SUCH","corr":1}`,
	} {
		if fail := f.cut([]byte(msg)); fail != nil || string(f.corr) != "1" {
			t.Errorf("%s: %+v, corr %q", msg, fail, f.corr)
		}
	}
}

func TestTimes(t *testing.T) {
	const refused = -2
	for _, c := range []struct {
		raw           string
		extend, delay time.Duration
	}{
		{``, 0, -1},
		{`null`, 0, refused},
		{`true`, 0, refused},
		{`{}`, 0, refused},
		{`"soon"`, 0, refused},
		{`""`, 0, refused},
		{`"1s"`, 0, refused},
		{`"null"`, 0, refused},
		{`0`, 0, 0},
		{`-0.0`, 0, 0},
		{`"0"`, 0, refused},
		{`-5`, time.Second, refused},
		{`-1`, time.Second, refused},
		{`0.5`, time.Second, refused},
		{`1`, time.Second, time.Millisecond},
		{`999.9`, time.Second, refused},
		{`1000`, time.Second, time.Second},
		{`1e3`, time.Second, time.Second},
		{`"5000"`, 5 * time.Second, refused},
		{`1500.7`, 1500 * time.Millisecond, refused},
		{`43200000`, 12 * time.Hour, 12 * time.Hour},
		{`43200001`, 12 * time.Hour, refused},
		{`1e999`, 12 * time.Hour, refused},
		{`-1e999`, time.Second, refused},
	} {
		if got := extension([]byte(c.raw)); got != c.extend {
			t.Errorf("extension(%s) = %v, want %v", c.raw, got, c.extend)
		}
		got, fail := delay([]byte(c.raw))
		if fail != nil {
			got = refused
			if fail.code != codeBadOptions || !strings.HasPrefix(fail.msg, "delay_ms must be an integer from 0 to 43200000, not ") {
				t.Errorf("delay(%s): %+v", c.raw, fail)
			}
		}
		if got != c.delay {
			t.Errorf("delay(%s) = %v, want %v", c.raw, got, c.delay)
		}
	}
}

// FuzzFrame compares the frames with those of a slow reader on encoding/json.
func FuzzFrame(f *testing.F) {
	for _, s := range []string{
		`{"op":"AUTH","token":"x","corr":""}`, `{"op":"AUTH","caps":["group_reset","events_lost"]}`, `{"op":"AUTH","caps":{}}`,
		`{"op":"PUBLISH","topic":"t","payload":` + payload256 + `,"opts":{"id":"i","ts":1e3,"key":"k","headers":{"a":"b","a":"c"},"tags":["x"],"caused_by":["y"],"sid":"s","tombstone":true}}`,
		`{"op":"PUBLISH","topic":"t","opts":{"delay_ms":5}}`, `{"op":"PUBLISH","topic":"t","opts":{"at":5}}`, `{"op":"PUBLISH","topic":"t","opts":{"at":5,"delay_ms":1}}`,
		`{"op":"PUBLISH","topic":"t","opts":{"headers":{"a":1}}}`, `{"op":"PUBLISH","topic":"t","opts":{"headers":{"a":null}}}`, `[1,2`, `["op",{}]`,
		`{"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"from":"ts","ts":5,"afterId":"x","batchSize":10,"maxInFlight":10,"ackTimeoutMs":1000,"maxAttempts":0,"topics":["u"],"groupTtlMs":1000}}`,
		`{"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"from":"afterId","afterId":"\ud800"}}`,
		`{"op":"SUBSCRIBE","topic":"t","group":"g","opts":{"from":"earliest","maxAttempts":2.0}}`,
		`{"op":"ACK","topic":"t","group":"g","id":"x","id":7}`,
		`{"op":"ACK","topic":"t","group":"g","ids":["a","b\n"]}`,
		`{"op":"NACK","topic":"t","group":"g","id":"x","reason":"r","delay_ms":-5}`,
		`{"op":"NACK","topic":"t","group":"g","id":"x","delay_ms":null}`,
		`{"op":"MODACK","topic":"t","group":"g","id":"x","extend_ms":"5e3"}`,
		`{"\u006fp":"PAUSE","\u0074opic":"\ud83d\ude00","group":"g","corr":{"a" : [1, "\u0000"]}}`,
		`{"op":"RESUME","op":"UNSUBSCRIBE","topic":"t","group":"g","opts":[]}`,
		`{}`, `[]`, `null`, `{"op":null}`, `{"op":1,"corr":1}`, ` {"op" : "X" } `,
	} {
		f.Add([]byte(s))
	}
	var reused frame
	f.Fuzz(func(t *testing.T, msg []byte) {
		if len(msg) <= 9_000 { // nesting beyond the limit has its own test
			agree(t, &reused, msg)
		}
	})
}

// TestFramesAgree does as FuzzFrame with frames made of likely keys and values, in all combinations
// that chance gives.
func TestFramesAgree(t *testing.T) {
	ops := []string{`"AUTH"`, `"PUBLISH"`, `"SUBSCRIBE"`, `"UNSUBSCRIBE"`, `"ACK"`, `"NACK"`, `"MODACK"`, `"PAUSE"`, `"RESUME"`, `"\u0041CK"`, `"X"`}
	fields := []string{"token", "caps", "corr", "payload", "reason", "extend_ms", "delay_ms", "id", "ids", "opts", "op", "topic", "group", "Topic", "x"}
	options := []string{
		"id", "ts", "key", "headers", "tags", "caused_by", "sid", "tombstone", "delay_ms", "at", "from", "afterId", "batchSize", "maxInFlight", "ackTimeoutMs",
		"maxAttempts", "topics", "groupTtlMs", "\\u0069d", "x",
	}
	values := []string{
		`null`, `true`, `false`, `""`, `"a"`, `"\ud83d\ude00\ud800"`, `"earliest"`, `"ts"`, `"afterId"`, `"5000"`, `0`, `-0`, `1`, `-1`, `2.0`, `1.5`, `5000`,
		`10000`, `10001`, `1e3`, `43200001`, `2592000000`, `9007199254740991`, `9007199254740992`, `1e999`, `[]`, `["a","b\n"]`, `["a",1]`,
		`["group_reset"]`, `["x","events_lost","group\u005freset"]`, `["` + strings.Repeat("é", 32) + `"]`, `["` + strings.Repeat("é", 32) + `x"]`,
		`[null]`, `{}`, `{"a":"b","a":"c"}`, `{"a":1,"a":"c"}`, `{"a":"c","a":1}`, `{"a":null}`, `[` + strings.Repeat(`"a",`, 32) + `"a"]`,
	}
	r := rand.New(rand.NewPCG(1, 2))
	pick := func(list []string) string { return list[r.IntN(len(list))] }
	var reused frame
	taken := 0
	for range 20_000 {
		msg := []byte(`{"op":` + pick(ops))
		for _, name := range []string{"topic", "group", "id"} {
			if r.IntN(20) > 0 {
				msg = append(msg, `,"`+name+`":"v"`...)
			}
		}
		if r.IntN(2) == 0 {
			msg = append(msg, `,"opts":{"":0`...)
			for range r.IntN(4) {
				msg = append(msg, `,"`+pick(options)+`":`+pick(values)...)
			}
			msg = append(msg, '}')
		}
		for range r.IntN(3) {
			msg = append(msg, `, "`+pick(fields)+`" : `+pick(values)...)
		}
		if agree(t, &reused, append(msg, '}')) {
			taken++
		}
	}
	if taken < 4_000 {
		t.Errorf("only %d frames were taken: the test has lost its sense", taken)
	}
}

// agree fails the test unless f reads msg as slowRead does. It reports whether the frame was taken.
func agree(t *testing.T, f *frame, msg []byte) bool {
	t.Helper()
	before := bytes.Clone(msg)
	fail := f.cut(msg)
	if fail == nil {
		fail = f.decode()
	}
	if !bytes.Equal(msg, before) {
		t.Fatalf("%q was changed to %q", before, msg)
	}
	want, wantCode := slowRead(msg)
	var got code
	if fail != nil {
		got = fail.code
		if !utf8.ValidString(fail.msg) || len(fail.msg) > 120 {
			t.Fatalf("%q: message %q", msg, fail.msg)
		}
	}
	if got != wantCode {
		t.Fatalf("%q\ngot  %q %+v\nwant %q", msg, got, fail, wantCode)
	}
	if !bytes.Equal(f.corr, want.corr) || (f.corr == nil) != (want.corr == nil) {
		t.Fatalf("%q: corr %q, want %q", msg, f.corr, want.corr)
	}
	if fail != nil {
		return false
	}
	if m := meaning(f); !reflect.DeepEqual(m, want) {
		t.Fatalf("%q\ngot  %+v\nwant %+v", msg, m, want)
	}
	return true
}

// slowRead is the reference for cut and decode. Its code is empty when there is no fault.
func slowRead(msg []byte) (f frame, c code) {
	if !json.Valid(msg) || !utf8.Valid(msg) {
		return f, codeBadJSON
	}
	var m map[string]json.RawMessage
	if json.Unmarshal(msg, &m) != nil || m == nil {
		return f, codeBadFrame
	}
	if corr, ok := m["corr"]; ok {
		if len(corr) > maxCorr {
			return f, codeBadFrame
		}
		f.corr = corr
	}
	r := slowReader{m: m}
	op, ok := map[string]op{
		"AUTH": opAuth, "PUBLISH": opPublish, "SUBSCRIBE": opSubscribe, "UNSUBSCRIBE": opUnsubscribe, "ACK": opAck,
		"NACK": opNack, "MODACK": opModack, "PAUSE": opPause, "RESUME": opResume,
	}[string(r.need("op"))]
	if f.op = op; r.code != "" || !ok {
		return f, r.code
	}

	if f.op == opAuth {
		f.token = r.maybe("token")
		o := &slowReader{m: m, options: true}
		caps := o.list("caps")
		f.resets, f.losses = slices.Contains(caps, "group_reset"), slices.Contains(caps, "events_lost")
		if len(caps) > 16 || slices.ContainsFunc(caps, func(name string) bool { return len(name) > 64 }) {
			o.refuse()
		}
		r.take(o)
		return f, r.code
	}
	f.topic = r.need("topic")
	if f.op != opPublish {
		f.group = r.need("group")
	}
	switch f.op {
	case opPublish:
		if p, ok := m["payload"]; ok {
			f.payload = p
		}
		o := r.opts()
		f.publish.ID, f.publish.Key, f.publish.SID = string(o.maybe("id")), string(o.maybe("key")), string(o.maybe("sid"))
		if o.given("id") && f.publish.ID == "" || o.given("key") && f.publish.Key == "" {
			o.refuse()
		}
		f.publish.TS, f.publish.HasTS = o.integer("ts", 0, 1<<53-1), o.given("ts")
		f.publish.Headers = o.texts("headers")
		f.publish.Tags, f.publish.CausedBy = o.list("tags"), o.list("caused_by")
		o.into("tombstone", &f.publish.Tombstone)
		f.publish.Delay = time.Duration(o.integer("delay_ms", 0, 31_536_000_000)) * time.Millisecond
		if at := o.integer("at", 0, 1<<53-1); o.given("at") {
			f.publish.At = time.UnixMilli(at)
		}
		if o.given("delay_ms") && o.given("at") {
			o.refuse()
		}
		r.take(o)
	case opSubscribe:
		o := r.opts()
		from := "latest"
		if o.given("from") {
			from = string(o.maybe("from"))
		}
		ts, afterID := o.integer("ts", 0, 1<<53-1), string(o.maybe("afterId"))
		f.subscribe.From, ok = map[string]jetstream.Position{
			"latest": jetstream.FromLatest, "earliest": jetstream.FromEarliest, "ts": jetstream.FromTime(time.UnixMilli(ts)), "afterId": jetstream.FromAfterID(afterID),
		}[from]
		if !ok || from == "ts" && !o.given("ts") || from == "afterId" && afterID == "" {
			o.refuse()
		}
		f.subscribe.BatchSize = int(o.integer("batchSize", 1, 10_000))
		f.subscribe.MaxInFlight = int(o.integer("maxInFlight", 1, 10_000))
		f.subscribe.AckTimeout = time.Duration(o.integer("ackTimeoutMs", 1000, 43_200_000)) * time.Millisecond
		f.subscribe.GroupTTL = time.Duration(o.integer("groupTtlMs", 1000, 2_592_000_000)) * time.Millisecond
		f.subscribe.MaxAttempts = int(o.integer("maxAttempts", 0, 1_000_000))
		if o.given("maxAttempts") && f.subscribe.MaxAttempts == 0 {
			f.subscribe.MaxAttempts = jetstream.NeverGiveUp
		}
		if f.subscribe.Topics = o.list("topics"); len(f.subscribe.Topics) > 32 {
			o.refuse()
		}
		r.take(o)
	case opAck:
		if !r.given("ids") {
			f.id = r.need("id")
			break
		}
		list := r.list("ids")
		if r.given("id") || len(list) == 0 || len(list) > maxAckIDs {
			r.refuse()
		}
		for _, id := range list {
			f.ids = append(f.ids, []byte(id))
		}
	case opNack:
		f.id = r.need("id")
		reason := slowReader{m: m}
		f.reason = reason.maybe("reason")
		f.delay = -1
		if m["delay_ms"] != nil {
			o := &slowReader{m: m, options: true}
			if f.delay = time.Duration(o.integer("delay_ms", 0, 43_200_000)) * time.Millisecond; !o.given("delay_ms") {
				o.refuse()
			}
			r.take(o)
		}
	case opModack:
		f.id = r.need("id")
		if ms, ok := r.number("extend_ms"); ok && ms != 0 {
			f.extend = time.Duration(min(max(ms, 1000), 43_200_000)) * time.Millisecond
		}
	default:
	}
	return f, r.code
}

// A slowReader reads the members of an object and keeps the first fault.
type slowReader struct {
	m       map[string]json.RawMessage
	options bool
	code    code
}

func (r *slowReader) refuse() {
	if r.code == "" {
		r.code = codeBadFrame
		if r.options {
			r.code = codeBadOptions
		}
	}
}

func (r *slowReader) take(o *slowReader) {
	if r.code == "" {
		r.code = o.code
	}
}

func (r *slowReader) given(name string) bool { return r.m[name] != nil && string(r.m[name]) != "null" }

func (r *slowReader) into(name string, v any) {
	if r.given(name) && json.Unmarshal(r.m[name], v) != nil {
		r.refuse()
	}
}

func (r *slowReader) maybe(name string) []byte {
	var s *string
	if r.into(name, &s); s == nil || r.m[name][0] != '"' {
		return nil
	}
	return []byte(*s)
}

func (r *slowReader) need(name string) []byte {
	s := r.maybe(name)
	if s == nil {
		r.refuse()
	}
	return s
}

func (r *slowReader) list(name string) (list []string) {
	var items []*string
	r.into(name, &items)
	for _, s := range items {
		if s == nil {
			r.refuse()
			return nil
		}
		list = append(list, *s)
	}
	return list
}

func (r *slowReader) texts(name string) map[string]string {
	o := slowReader{}
	if r.into(name, &o.m); o.m == nil {
		return nil
	}
	texts := make(map[string]string)
	for key := range o.m {
		texts[key] = string(o.need(key))
	}
	if o.code != "" {
		r.refuse()
	}
	return texts
}

func (r *slowReader) number(name string) (float64, bool) {
	text := string(r.m[name])
	var s string
	if json.Unmarshal(r.m[name], &s) == nil && text != "null" {
		if strings.Contains(text, `\`) {
			return 0, false
		}
		text = s
	}
	var n json.Number
	if strings.Trim(text, " \t\r\n\"") != text || json.Unmarshal([]byte(text), &n) != nil || n == "" {
		return 0, false
	}
	v, err := strconv.ParseFloat(n.String(), 64)
	return v, err == nil || errors.Is(err, strconv.ErrRange)
}

func (r *slowReader) integer(name string, least, limit float64) int64 {
	if !r.given(name) {
		return 0
	}
	n, ok := r.number(name)
	if !ok || r.m[name][0] == '"' || n != math.Trunc(n) || n < least || n > limit {
		r.refuse()
		return 0
	}
	return int64(n)
}

func (r *slowReader) opts() *slowReader {
	o := &slowReader{options: true}
	r.into("opts", &o.m)
	return o
}

const benchAck = `{"op":"ACK","topic":"heartbeat.received","group":"process-projector","id":"019343c2-7f4e-7c1a-9d0b-5f2f6f1e8a11"}`

const benchPublish = `{"op":"PUBLISH","topic":"heartbeat.received","payload":` + payload256 + `,"corr":"8f3a61c2b4d"}`

func TestFramesDoNotAllocate(t *testing.T) {
	var f frame
	for _, msg := range []string{
		benchAck, benchPublish, `{"op":"PUBLISH","topic":"t\u0065","payload":1,"opts":{}}`,
		`{"op":"ACK","topic":"t","group":"g","ids":["a","b"]}`, `{"op":"MODACK","topic":"t","group":"g","id":"i","extend_ms":5000}`,
		`{"op":"NACK","topic":"t","group":"g","id":"i","reason":"no\nreason"}`,
	} {
		b := []byte(msg)
		n := testing.AllocsPerRun(100, func() {
			if f.cut(b) != nil || f.decode() != nil {
				t.Fatal("refused")
			}
		})
		if n != 0 {
			t.Errorf("%s: %v allocations", msg, n)
		}
	}
}

func BenchmarkFrame(b *testing.B) {
	for name, msg := range map[string]string{
		"publish256": benchPublish,
		"ack":        benchAck,
		"keyed256":   strings.TrimSuffix(benchPublish, "}") + `,"opts":{"key":"local:stt:1234"}}`,
	} {
		b.Run(name, func(b *testing.B) {
			in := []byte(msg)
			var f frame
			b.ReportAllocs()
			b.SetBytes(int64(len(in)))
			for b.Loop() {
				if f.cut(in) != nil || f.decode() != nil {
					b.Fatal("refused")
				}
			}
		})
	}
}
