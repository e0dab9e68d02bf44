package apitest

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.yaml.in/yaml/v3"

	"eventhub/docs"
)

// A side sends frames.
type side string

// The sides, by what the hub does with their frames: the actions of the operations.
const (
	fromClient side = "receive"
	fromHub    side = "send"
)

// frameSet is docs/asyncapi.yaml.
type frameSet struct {
	messages map[side][]string // their names, which are those of the ops
	payloads map[string]string // the places of their schemas
	open     *schemas          // for clients, which may send fields that the hub ignores
	closed   *schemas          // for the hub
}

type reference struct {
	Ref string `yaml:"$ref"`
}

// name is the last part of a reference.
func (r reference) name() string { return r.Ref[strings.LastIndex(r.Ref, "/")+1:] }

// loadFrames reads the document once.
var loadFrames = sync.OnceValues(func() (*frameSet, error) {
	var doc struct {
		Operations map[string]struct {
			Action   side
			Messages []reference
			Reply    struct{ Messages []reference }
		}
		Components struct {
			Messages map[string]struct{ Payload reference }
		}
	}
	if err := yaml.Unmarshal(docs.AsyncAPI, &doc); err != nil {
		return nil, fmt.Errorf("docs/asyncapi.yaml: %w", err)
	}
	set := &frameSet{messages: make(map[side][]string), payloads: make(map[string]string)}
	add := func(from side, messages []reference) {
		for _, m := range messages {
			if name := m.name(); !slices.Contains(set.messages[from], name) {
				set.messages[from] = append(set.messages[from], name)
			}
		}
	}
	for _, op := range doc.Operations {
		add(op.Action, op.Messages)
		if op.Action == fromClient {
			add(fromHub, op.Reply.Messages)
		}
	}
	for name, m := range doc.Components.Messages {
		set.payloads[name] = m.Payload.Ref
	}
	var err error
	if set.open, err = newSchemas("asyncapi.yaml", docs.AsyncAPI, false); err == nil {
		set.closed, err = newSchemas("asyncapi.yaml", docs.AsyncAPI, true)
	}
	return set, err
})

// match returns the messages that a frame fits, and why it fits no others.
func (set *frameSet) match(from side, text string) (fits []string, why error) {
	v, err := decode([]byte(text))
	if err != nil {
		return nil, err
	}
	compiled := set.closed
	if from == fromClient {
		compiled = set.open
	}
	op := ""
	if fields, ok := v.(map[string]any); ok {
		op, _ = fields["op"].(string)
	}
	why = fmt.Errorf("there is no message for the op %q", op)
	for _, name := range set.messages[from] {
		err := compiled.check(set.payloads[name], v)
		if err == nil {
			fits = append(fits, name)
		} else if name == op {
			why = err
		}
	}
	return fits, why
}

// Frames holds the frames of one connection against docs/asyncapi.yaml. Its methods may be called
// concurrently.
type Frames struct {
	tb  testing.TB
	set *frameSet

	mu     sync.Mutex
	byCorr map[string]string // frames of the client that wait for an answer, by corr
	queue  []string          // those without a corr, in order
}

// NewFrames returns a Frames for a new connection.
func NewFrames(tb testing.TB) *Frames {
	tb.Helper()
	set, err := loadFrames()
	if err != nil {
		tb.Fatal(err)
	}
	return &Frames{tb: tb, set: set, byCorr: make(map[string]string)}
}

// Sent notes a frame of the client. It is checked when its answer comes.
func (f *Frames) Sent(text string) {
	corr := corrOf(text)
	f.mu.Lock()
	defer f.mu.Unlock()
	if corr == "" {
		f.queue = append(f.queue, text)
	} else {
		f.byCorr[corr] = text
	}
}

// corrOf returns the corr of a frame as sent, or "".
func corrOf(text string) string {
	var f struct{ Corr json.RawMessage }
	if json.Unmarshal([]byte(text), &f) != nil {
		return ""
	}
	return string(f.Corr)
}

// malformed are the codes for a frame that no message of the document fits.
var malformed = []string{"bad_json", "bad_frame", "unknown_op", "bad_options", "bad_topic", "bad_group"}

// Received checks a frame of the hub, which must fit exactly one message, and the frame that it
// answers: one that the hub takes fits one message, and one that the hub calls malformed fits none.
func (f *Frames) Received(text string) {
	f.tb.Helper()
	if f.tb.Context().Err() != nil {
		return
	}
	if fits, why := f.set.match(fromHub, text); len(fits) != 1 {
		f.tb.Errorf("the hub's frame %s fits the messages %q of docs/asyncapi.yaml, want one: change components.schemas there: %v", brief(text), fits, why)
		return
	}
	var answer struct{ Op, Code, Msg string }
	if err := json.Unmarshal([]byte(text), &answer); err != nil {
		f.tb.Errorf("the hub's frame %s: %v", brief(text), err)
		return
	}
	sent, ok := f.answered(text, answer.Op, answer.Code)
	if !ok || answer.Code == "unauthorized" {
		return // the hub did not read the fields
	}
	fits, why := f.set.match(fromClient, sent)
	switch {
	case !slices.Contains(malformed, answer.Code):
		if len(fits) != 1 {
			f.tb.Errorf("the hub takes the frame %s, and it fits the messages %q of docs/asyncapi.yaml, want one: change components.schemas there: %v", brief(sent), fits, why)
		}
	case len(fits) != 0 && !beyondSchemas(answer.Code, answer.Msg):
		f.tb.Errorf("the hub answers the frame %s with %s, and it fits the message %q of docs/asyncapi.yaml: restrict components.schemas there", brief(sent), brief(text), fits)
	}
}

// answered returns the client's frame that a frame of the hub answers.
func (f *Frames) answered(text, op, code string) (sent string, ok bool) {
	if op == "EVENT" || op == "GAP" || op == "SNAPSHOT" || op == "PRESENCE" || code == "group_reset" || code == "events_lost" || code == "token_expired" {
		return "", false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if corr := corrOf(text); corr != "" {
		sent, ok = f.byCorr[corr]
		delete(f.byCorr, corr)
		return sent, ok
	}
	if len(f.queue) == 0 || code == "bad_json" && json.Valid([]byte(f.queue[0])) {
		return "", false
	}
	sent = f.queue[0]
	f.queue = f.queue[1:]
	return sent, true
}

// beyondSchemas reports whether a schema cannot express why the hub refuses a frame: schemas count
// characters, and not the bytes of a text or of several fields together, and they do not know what
// the topics file and the registry of schemas say of a topic.
func beyondSchemas(code, msg string) bool {
	return strings.Contains(msg, " bytes") || (code == "bad_options" || code == "bad_topic") && (strings.HasPrefix(msg, "topic ") || strings.Contains(msg, "is not registered"))
}
