package native_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"eventhub/jetstream/native"
)

func TestAppendRecord(t *testing.T) {
	t.Parallel()
	deep := strings.Repeat("[", 9_993) + strings.Repeat("]", 9_993)
	for _, c := range []struct {
		name  string
		event native.Event
		want  string
	}{
		{
			"bare",
			native.Event{ID: "S@7", TS: 5, Topic: "a.b", Stream: "S", Sequence: 7, StoredAt: 5_000_000},
			`{"id":"S@7","ts":5,"topic":"a.b","payload":null}`,
		},
		{
			"full",
			native.Event{
				ID: `i"`, TS: -1, Topic: "t", Key: "host:é:1", SID: "s", Headers: map[string]string{"B": "2", "a": "\t", "A": ""},
				CausedBy: []string{"x", "y"}, Tags: []string{"z"}, Payload: []byte(`{"b": 1,"a":[12345678901234567890,"\u00e9"]}`),
			},
			`{"id":"i\"","ts":-1,"topic":"t","key":"host:é:1","sid":"s","headers":{"A":"","B":"2","a":"\t"},` +
				`"caused_by":["x","y"],"tags":["z"],"payload":{"b": 1,"a":[12345678901234567890,"\u00e9"]}}`,
		},
		{
			"text",
			native.Event{ID: "i", Topic: "t", Payload: []byte("hello\n\"you\"")},
			`{"id":"i","ts":0,"topic":"t","headers":{"Event-Encoding":"text"},"payload":"hello\n\"you\""}`,
		},
		{
			"binary",
			native.Event{ID: "i", Topic: "t", Payload: []byte{0xff, 0, 1}},
			`{"id":"i","ts":0,"topic":"t","headers":{"Event-Encoding":"base64"},"payload":"/wAB"}`,
		},
		{
			"binary inside JSON",
			native.Event{ID: "i", Topic: "t", Headers: map[string]string{"A": "1", "Z": "2"}, Payload: []byte("\"\xff\"")},
			`{"id":"i","ts":0,"topic":"t","headers":{"A":"1","Event-Encoding":"base64","Z":"2"},"payload":"Iv8i"}`,
		},
		{
			"a reserved header that came in natively",
			native.Event{ID: "i", Topic: "t", Headers: map[string]string{"Event-Encoding": "base64"}, Payload: []byte(`"x"`)},
			`{"id":"i","ts":0,"topic":"t","payload":"x"}`,
		},
		{
			"invalid UTF-8 in names",
			native.Event{ID: "\xff", Topic: "t", Key: "k\xc3", Payload: []byte("1")},
			`{"id":"` + "\uFFFD" + `","ts":0,"topic":"t","key":"k` + "\uFFFD" + `","payload":1}`,
		},
		{
			"too deep for what stands around it",
			native.Event{ID: "i", Topic: "t", Payload: []byte(deep)},
			`{"id":"i","ts":0,"topic":"t","headers":{"Event-Encoding":"text"},"payload":"` + deep + `"}`,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := string(c.event.AppendRecord([]byte("x")))
			if got != "x"+c.want {
				t.Errorf("got  %.300s\nwant %.300s", got[1:], c.want)
			}
			if !json.Valid([]byte(c.want)) {
				t.Error("the record is not valid")
			}
		})
	}
}

func FuzzAppendRecord(f *testing.F) {
	f.Add("id", int64(5), "a.b", "key", "sid", "H", "v", "tag", []byte(`{"a":[1]}`))
	f.Add("", int64(-5), "", "", "", "", "", "", []byte(nil))
	f.Add("\xff", int64(0), "t", "\u2028", "\x00", "Event-Encoding", "x", "\"", []byte("no JSON"))
	f.Add("i", int64(0), "t", "", "", "", "", "", []byte{0xff})
	f.Fuzz(func(t *testing.T, id string, ts int64, topic, key, sid, header, value, tag string, payload []byte) {
		e := native.Event{ID: id, TS: ts, Topic: topic, Key: key, SID: sid, Payload: payload}
		if header != "" {
			e.Headers = map[string]string{header: value}
		}
		if tag != "" {
			e.Tags, e.CausedBy = []string{tag}, []string{id, tag}
		}
		raw := e.AppendRecord(nil)

		var got struct {
			ID, Topic, Key, SID string
			TS                  int64
			Headers             map[string]string
			CausedBy            []string `json:"caused_by"`
			Tags                []string
			Payload             json.RawMessage
		}
		if err := json.Unmarshal(raw, &got); err != nil || !utf8.Valid(raw) {
			t.Fatalf("%q: %v", raw, err)
		}
		text := func(s string) string { return string([]rune(s)) } // invalid bytes as U+FFFD
		if got.ID != text(id) || got.TS != ts || got.Topic != text(topic) || got.Key != text(key) || got.SID != text(sid) {
			t.Fatalf("%q", raw)
		}
		if tag != "" && !reflect.DeepEqual(got.Tags, []string{text(tag)}) || tag != "" && !reflect.DeepEqual(got.CausedBy, []string{text(id), text(tag)}) {
			t.Fatalf("%q", raw)
		}
		if header != "" && header != "Event-Encoding" && got.Headers[text(header)] != text(value) {
			t.Fatalf("%q", raw)
		}

		// The body comes back as it was, by the way that Event-Encoding names.
		switch encoding := got.Headers["Event-Encoding"]; encoding {
		case "":
			if want := bytes.Trim(payload, " \t\r\n"); len(payload) == 0 && string(got.Payload) != "null" || len(payload) > 0 && !bytes.Equal(got.Payload, want) {
				t.Fatalf("payload %q becomes %q", payload, raw)
			}
		case "text", "base64":
			var s string
			if err := json.Unmarshal(got.Payload, &s); err != nil {
				t.Fatal(err)
			}
			body := []byte(s)
			if encoding == "base64" {
				body, _ = base64.StdEncoding.DecodeString(s)
			}
			if !bytes.Equal(body, payload) {
				t.Fatalf("payload %q becomes %q", payload, raw)
			}
		default:
			t.Fatalf("%q", raw)
		}
	})
}

func TestAppendRecordDoesNotAllocate(t *testing.T) { //nolint:paralleltest // it counts what is allocated
	dst := make([]byte, 0, 1024)
	e := native.Event{
		ID: "019343c2-7f4e-7c1a-9d0b-5f2f6f1e8a11", TS: 1_731_936_000_123, Topic: "process.state", Key: "local:stt:1",
		Headers: map[string]string{"b": "2", "a": "1"}, Tags: []string{"x"}, Payload: []byte(`{"pid":1}`),
	}
	if n := testing.AllocsPerRun(100, func() { dst = e.AppendRecord(dst[:0]) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
