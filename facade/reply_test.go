package facade

import (
	"testing"

	"eventhub/jetstream"
	"eventhub/jetstream/jsonscan"
)

func TestReplies(t *testing.T) {
	e := &jetstream.Event{ID: "i", TS: 5, Topic: "a.b", Payload: []byte(`{"n": 12345678901234567890}`)}
	for _, c := range []struct{ got, want string }{
		{string(appendOK(nil, nil, "")), `{"op":"OK"}`},
		{string(appendOK(nil, []byte(`""`), "")), `{"op":"OK","corr":""}`},
		{string(appendOK(nil, []byte(`{"a": [1e400,"\ud800"]}`), `x"y`)), `{"op":"OK","corr":{"a": [1e400,"\ud800"]},"id":"x\"y"}`},
		{
			string(appendErr(nil, nil, codeUnauthorized, "Call AUTH first.", false)),
			`{"op":"ERR","code":"unauthorized","msg":"Call AUTH first."}`,
		},
		{
			string(appendErr(nil, []byte("null"), codeNotSubscribed, "a::\"g\"\xff", false)),
			`{"op":"ERR","code":"not_subscribed","msg":"a::\"g\"` + "\uFFFD" + `","corr":null}`,
		},
		{
			string(appendEvent(nil, []byte(`"a.b"`), []byte(`"g\u00e9"`), e, 3, 29_999)),
			`{"op":"EVENT","topic":"a.b","group":"g\u00e9","event":{"id":"i","ts":5,"topic":"a.b","payload":{"n": 12345678901234567890}},` +
				`"ctx":{"attempt":3,"ack_deadline_ms":29999}}`,
		},
	} {
		if c.got != c.want {
			t.Errorf("got  %s\nwant %s", c.got, c.want)
		}
		if !jsonscan.Valid([]byte(c.got)) {
			t.Errorf("invalid: %s", c.got)
		}
	}
}

func benchEvent() *jetstream.Event {
	return &jetstream.Event{
		ID: "019343c2-7f4e-7c1a-9d0b-5f2f6f1e8a11", TS: 1_731_936_000_123, Topic: "heartbeat.received",
		Key: "local:stt:1234", Payload: []byte(payload256),
	}
}

func TestRepliesDoNotAllocate(t *testing.T) {
	dst := make([]byte, 0, 1024)
	e := benchEvent()
	for name, f := range map[string]func(){
		"OK":    func() { dst = appendOK(dst[:0], []byte(`"c1"`), "019343c2-7f4e-7c1a-9d0b-5f2f6f1e8a11") },
		"ERR":   func() { dst = appendErr(dst[:0], nil, codeForbidden, "not allowed", false) },
		"EVENT": func() { dst = appendEvent(dst[:0], []byte(`"t"`), []byte(`"g"`), e, 1, 30_000) },
	} {
		if n := testing.AllocsPerRun(100, f); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func BenchmarkAppendEvent(b *testing.B) {
	dst := make([]byte, 0, 1024)
	topic, group := []byte(`"heartbeat.received"`), []byte(`"process-projector"`)
	e := benchEvent()
	b.ReportAllocs()
	for b.Loop() {
		dst = appendEvent(dst[:0], topic, group, e, 1, 30_000)
	}
}

func BenchmarkValidPayload(b *testing.B) {
	p := []byte(payload256)
	for b.Loop() {
		jetstream.ValidPayload(p)
	}
}
