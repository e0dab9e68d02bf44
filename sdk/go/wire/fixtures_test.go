package wire

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// conversation is a file of testdata/frames; the README there describes the format.
type conversation struct {
	Steps []struct {
		Send      json.RawMessage   `json:"send"`
		SendAll   []json.RawMessage `json:"send_all"`
		Expect    json.RawMessage   `json:"expect"`
		ExpectAll []json.RawMessage `json:"expect_all"`
	} `json:"steps"`
}

// conversations calls f with each frame that clients send and that hubs send.
func conversations(t *testing.T, client, hub func(name string, frame []byte)) {
	t.Helper()
	files, err := filepath.Glob("../../../testdata/frames/*.json")
	if err != nil || len(files) == 0 {
		t.Fatal(len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		text = []byte(strings.NewReplacer("${token}", "a token", "${topic}", "topic").Replace(string(text)))
		var c conversation
		if err := json.Unmarshal(text, &c); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		for _, step := range c.Steps {
			for _, frame := range append(step.SendAll, step.Send) {
				if frame != nil && frame[0] == '{' {
					client(filepath.Base(file), frame)
				}
			}
			for _, frame := range append(step.ExpectAll, step.Expect) {
				if frame != nil {
					hub(filepath.Base(file), instance(frame))
				}
			}
		}
	}
}

var placeholder = regexp.MustCompile(`\{\s*"\$(\w+)"\s*:\s*("(?:[^"\\]|\\.)*"|\[[^\]]*\]|\d+)\s*\}`)

// instance puts a value in each place of a frame that stands for many.
func instance(frame []byte) []byte {
	return placeholder.ReplaceAllFunc(frame, func(m []byte) []byte {
		parts := placeholder.FindSubmatch(m)
		arg := parts[2]
		switch string(parts[1]) {
		case "int":
			return bytes.TrimSpace(bytes.Split(arg[1:], []byte{','})[0])
		case "now":
			return strconv.AppendInt(nil, time.Now().UnixMilli(), 10)
		case "any":
			return map[string][]byte{`"string"`: []byte(`"s"`), `"number"`: []byte("1"), `"boolean"`: []byte("true"), `"null"`: []byte("null"), `"object"`: []byte("{}"), `"array"`: []byte("[]")}[string(arg)]
		case "raw":
			text, err := text(arg)
			if err != nil {
				panic(err)
			}
			return []byte(text)
		case "repeat":
			return []byte(`"xxx"`)
		}
		return arg // the name of a string, or a part of one
	})
}

// asSent is a frame that a client of the fixtures sends, if this package can send such a frame.
type asSent struct {
	Op      string          `json:"op"`
	Corr    any             `json:"corr"`
	Token   string          `json:"token"`
	Caps    []string        `json:"caps"`
	Topic   string          `json:"topic"`
	Group   string          `json:"group"`
	Payload json.RawMessage `json:"payload"`
	Opts    json.RawMessage `json:"opts"`
	ID      string          `json:"id"`
	IDs     []string        `json:"ids"`
	Reason  string          `json:"reason"`
	Delay   *int64          `json:"delay_ms"`
	Extend  *int64          `json:"extend_ms"`
}

func strictly(text []byte, into any) error {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	return dec.Decode(into)
}

// unset reports whether a frame has a field whose value is what this package leaves out: null,
// false, or nothing.
func unset(frame []byte) bool {
	var m map[string]any
	if json.Unmarshal(frame, &m) != nil {
		return true
	}
	delete(m, "payload")
	var zero func(v any) bool
	zero = func(v any) bool {
		switch v := v.(type) {
		case nil:
			return true
		case map[string]any:
			for _, e := range v {
				if zero(e) {
					return true
				}
			}
			return false
		case []any:
			return len(v) == 0 || slices.ContainsFunc(v, zero)
		}
		return v == "" || v == false
	}
	if m["reason"] == "" { // says nothing either, and is sent
		delete(m, "reason")
	}
	delete(m, "corr")
	return zero(m)
}

// rebuilt makes the frame again with the code that sends frames. It reports false for a frame that
// a program cannot send with this package, such as one with a field of the wrong type.
func rebuilt(frame []byte) ([]byte, bool) {
	var f asSent
	if strictly(frame, &f) != nil || unset(frame) || f.Op != "AUTH" && f.Topic == "" || f.Op != "AUTH" && f.Op != "PUBLISH" && f.Group == "" {
		return nil, false
	}
	if settles := f.Op == "ACK" || f.Op == "NACK" || f.Op == "MODACK"; settles && (f.ID == "") == (f.IDs == nil) {
		return nil, false
	}
	s := &Subscription{topic: f.Topic, group: f.Group}
	e := Event{ID: f.ID, sub: s}
	var b []byte
	switch f.Op {
	case "AUTH":
		b = authFrame(nil, f.Token, f.Caps)
	case "PUBLISH":
		var o PublishOptions
		if f.Opts != nil && strictly(f.Opts, &o) != nil {
			return nil, false
		}
		var options []byte
		if !o.idOnly() {
			options, _ = json.Marshal(o)
		}
		b = publishFrame(nil, f.Topic, f.Payload, o.ID, options)
	case "SUBSCRIBE":
		var o SubscribeOptions
		if f.Opts != nil && strictly(f.Opts, &o) != nil {
			return nil, false
		}
		s.options, _ = o.encode()
		b = s.subscribeFrame(nil)
	case "UNSUBSCRIBE", "PAUSE", "RESUME":
		b = s.frame(nil, f.Op)
	case "ACK":
		if b = e.settle("ACK")(nil); f.IDs != nil {
			b = s.ackMany(f.IDs)(nil)
		}
	case "NACK":
		if f.Delay != nil && *f.Delay < 0 {
			return nil, false
		}
		delay := DefaultBackoff
		if f.Delay != nil {
			delay = time.Duration(*f.Delay) * time.Millisecond
		}
		b = e.nack(f.Reason, delay)(nil)
	case "MODACK":
		if f.Extend == nil {
			return nil, false
		}
		b = e.modAck(time.Duration(*f.Extend) * time.Millisecond)(nil)
	default:
		return nil, false
	}
	return append(b, '}'), true
}

// meaning is a frame without what says nothing: an empty reason, and empty options.
func meaning(t *testing.T, frame []byte) map[string]any {
	t.Helper()
	dec := json.NewDecoder(bytes.NewReader(frame))
	dec.UseNumber()
	var m map[string]any
	if err := dec.Decode(&m); err != nil {
		t.Fatalf("%s: %v", frame, err)
	}
	delete(m, "corr")
	if m["reason"] == "" {
		delete(m, "reason")
	}
	if o, ok := m["opts"].(map[string]any); ok && len(o) == 0 {
		delete(m, "opts")
	}
	return m
}

// What clients of the fixtures send, this package sends in the same way.
func TestFramesOfTheFixturesAreSent(t *testing.T) {
	same := map[string]int{}
	conversations(t, func(name string, frame []byte) {
		got, ok := rebuilt(frame)
		if !ok {
			return
		}
		if !reflect.DeepEqual(meaning(t, got), meaning(t, frame)) {
			t.Errorf("%s:\nsends %s\n want %s", name, got, frame)
		}
		same[fmt.Sprint(meaning(t, frame)["op"])]++
	}, func(string, []byte) {})
	for op, least := range map[string]int{"AUTH": 60, "PUBLISH": 100, "SUBSCRIBE": 60, "UNSUBSCRIBE": 8, "ACK": 30, "NACK": 12, "MODACK": 4, "PAUSE": 2, "RESUME": 2} {
		if same[op] < least {
			t.Errorf("%d frames with %s, want %d at least", same[op], op, least)
		}
	}
}

// What the hub of the fixtures sends, this package reads as encoding/json does.
func TestFramesOfTheFixturesAreRead(t *testing.T) {
	read := map[string]int{}
	conversations(t, func(string, []byte) {}, func(name string, raw []byte) {
		var want struct {
			Op, Code, Msg, ID string
			Topic, Group      string
			Corr              json.RawMessage
			Event             struct {
				ID, Topic, Key string
				TS             int64
				Payload        json.RawMessage
			}
			Ctx struct {
				Pos      string
				Attempt  int
				Deadline int64 `json:"ack_deadline_ms"`
			}
		}
		if err := json.Unmarshal(raw, &want); err != nil {
			t.Fatalf("%s: %s: %v", name, raw, err)
		}
		read[want.Op]++
		var f frame
		if err := eachField(raw, f.set); err != nil {
			t.Fatalf("%s: %s: %v", name, raw, err)
		}
		if !bytes.Equal(f.corr, want.Corr) {
			t.Errorf("%s: corr %s, want %s", name, f.corr, want.Corr)
		}
		for what, pair := range map[string][2]string{
			"op": {string(f.op), want.Op}, "code": {string(f.code), want.Code}, "msg": {string(f.msg), want.Msg}, "id": {string(f.id), want.ID},
			"topic": {string(f.topic), want.Topic}, "group": {string(f.group), want.Group},
		} {
			if pair[0] == "" && pair[1] == "" {
				continue
			}
			if got, err := text([]byte(pair[0])); err != nil || got != pair[1] {
				t.Errorf("%s: %s is %q, %v, want %q", name, what, got, err, pair[1])
			}
		}
		if want.Op != "EVENT" {
			return
		}
		if f.group == nil { // of a broadcast
			e, err := newBroadcastEvent(&f)
			if err != nil || e.ID != want.Event.ID || e.TS != want.Event.TS || e.Topic != want.Event.Topic || e.Key != want.Event.Key || string(e.Payload) != string(want.Event.Payload) || e.Pos != want.Ctx.Pos {
				t.Errorf("%s: read %+v, %v\nwant %+v", name, e, err, want)
			}
			return
		}
		now := time.Now()
		e, err := newEvent(&f, &Subscription{topicJSON: []byte(`"another"`)}, now)
		if err != nil {
			t.Fatalf("%s: %s: %v", name, raw, err)
		}
		got := fmt.Sprint(e.ID, e.TS, e.Topic, e.Key, string(e.Payload), e.Attempt, e.Deadline.Sub(now).Milliseconds())
		if w := fmt.Sprint(want.Event.ID, want.Event.TS, want.Event.Topic, want.Event.Key, string(want.Event.Payload), want.Ctx.Attempt, want.Ctx.Deadline); got != w {
			t.Errorf("%s: read %s\nwant %s", name, got, w)
		}
	})
	for op, least := range map[string]int{"OK": 100, "ERR": 60, "EVENT": 60} {
		if read[op] < least {
			t.Errorf("%d frames with %s, want %d at least", read[op], op, least)
		}
	}
}
