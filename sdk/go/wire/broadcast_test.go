package wire

import (
	"encoding/json"
	"os"
	"reflect"
	"strings"
	"testing"
)

// The frames of a broadcast in the fixtures are sent in the same way, and read.
func TestFramesOfBroadcasts(t *testing.T) {
	sent := 0
	conversations(t, func(name string, frame []byte) {
		if name != "broadcast.json" || !strings.Contains(string(frame), `"mode"`) || strings.Contains(string(frame), `"group"`) {
			return
		}
		var f struct {
			Op, Topic string
			Opts      struct {
				Mode string `json:"mode"`
				BroadcastOptions
			}
		}
		frame = instance(frame)
		if err := strictlyButCorr(frame, &f); err != nil {
			t.Fatalf("%s: %v", frame, err)
		}
		got := unfollowFrame(nil, f.Topic)
		if f.Op == "SUBSCRIBE" {
			options, err := f.Opts.BroadcastOptions.encode()
			if err != nil {
				t.Fatal(err)
			}
			got = followFrame(nil, f.Topic, options)
		}
		if got = append(got, '}'); !reflect.DeepEqual(meaning(t, got), meaning(t, frame)) {
			t.Errorf("sends %s\n want %s", got, frame)
		}
		sent++
	}, func(string, []byte) {})
	if sent < 7 {
		t.Errorf("%d frames", sent)
	}
}

func strictlyButCorr(frame []byte, into any) error {
	var m map[string]json.RawMessage
	if err := json.Unmarshal(frame, &m); err != nil {
		return err
	}
	delete(m, "corr")
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return strictly(text, into)
}

// What asyncapi.yaml shows of a broadcast arrives.
func TestFramesOfBroadcastsAreRead(t *testing.T) {
	var got []any
	b := &Broadcast{topic: "t", open: true, handlers: BroadcastHandlers{
		Event:    func(e BroadcastEvent) { got = append(got, e.ID, e.Key, e.Pos, e.Tombstone, e.More, string(e.Payload)) },
		Gap:      func(g Gap) { got = append(got, g) },
		Snapshot: func(pos string) { got = append(got, pos) },
		Presence: func(p Presence) { got = append(got, p) },
	}}
	c := &Conn{casts: map[string]*Broadcast{"t": b}}
	for _, frame := range []string{
		`{"op":"EVENT","topic":"t","event":{"id":"i","ts":5,"topic":"t","payload":[1]},"ctx":{"pos":"a-1"}}`,
		`{"op":"EVENT","topic":"t","event":{"id":"j","ts":5,"topic":"t","payload":null,"key":"ü\n","tags":[]},"ctx":{"tombstone":true,"pos":"a-2"}}`,
		`{"op":"EVENT","topic":"another","event":{"id":"i","ts":5,"topic":"t","payload":[1]},"ctx":{"pos":"a-1"}}`,
		`{"op":"GAP","topic":"t","from":"a-2","to":"a-9","missed":7}`,
		`{"op":"SNAPSHOT","topic":"t","pos":"a-9"}`,
		`{"op":"PRESENCE","topic":"t","count":2,"joined":["a"],"left":[]}`,
	} {
		if err := c.dispatch([]byte(frame)); err != nil {
			t.Errorf("%s: %v", frame, err)
		}
	}
	want := []any{
		"i", "", "a-1", false, false, "[1]", "j", "ü\n", "a-2", true, true, "null",
		Gap{"a-2", "a-9", 7},
		"a-9",
		Presence{2, []string{"a"}, []string{}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v\nwant %v", got, want)
	}
	for _, frame := range []string{
		`{"op":"EVENT","topic":"t","event":{"id":"i","ts":5,"topic":"t","payload":[1]},"ctx":{}}`,
		`{"op":"EVENT","topic":"t","event":{"id":"i","ts":"x","topic":"t","payload":[1]},"ctx":{"pos":"p"}}`,
		`{"op":"GAP","topic":"t","missed":"x"}`,
		`{"op":"SNAPSHOT","topic":"t"}`,
	} {
		if c.dispatch([]byte(frame)) == nil {
			t.Errorf("accepts %s", frame)
		}
	}
}

// docs/asyncapi.yaml has each frame that this package reads.
func TestTheFramesAreTheHubs(t *testing.T) {
	text, err := os.ReadFile("../../../docs/asyncapi.yaml")
	if err != nil {
		t.Fatal(err)
	}
	_, messages, _ := strings.Cut(string(text), "\n  messages:\n")
	messages, _, _ = strings.Cut(messages, "\n  schemas:\n")
	for _, op := range []string{"OK", "ERR", "EVENT", "ASSIGN", "GAP", "SNAPSHOT", "PRESENCE"} {
		if !strings.Contains(messages, "    "+op+":\n") {
			t.Errorf("docs/asyncapi.yaml does not have %s", op)
		}
	}
}
