package native_test

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"testing/quick"

	natsserver "github.com/nats-io/nats-server/v2/server"

	"eventhub/jetstream/native"
)

// mapping is testdata/subjects.json, against which programs in other languages test too.
type mapping struct {
	Subjects  []struct{ Topic, Key, Subject string }
	Tokens    []struct{ Token, Key string }
	Foreign   []struct{ Subject string }
	Streams   []struct{ Topic, Stream string }
	Consumers []struct {
		Topic, Group, Consumer string
		Family                 bool
	}
	Buckets []struct{ Topic, Bucket string }
	Topics  struct{ Valid, Invalid []string }
}

func TestMapping(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../testdata/subjects.json")
	if err != nil {
		t.Fatal(err)
	}
	var m mapping
	if err := json.Unmarshal(text, &m); err != nil {
		t.Fatal(err)
	}
	for name, n := range map[string]int{
		"subjects": len(m.Subjects), "tokens": len(m.Tokens), "foreign": len(m.Foreign), "streams": len(m.Streams), "consumers": len(m.Consumers),
		"buckets": len(m.Buckets), "topics.valid": len(m.Topics.Valid), "topics.invalid": len(m.Topics.Invalid),
	} {
		if n == 0 {
			t.Errorf("the file has no %s", name)
		}
	}
	for _, c := range m.Subjects {
		if got := native.Subject(c.Topic, c.Key); got != c.Subject {
			t.Errorf("Subject(%q, %q) = %q, want %q", c.Topic, c.Key, got, c.Subject)
		}
		if topic, key, ok := native.ParseSubject(c.Subject); !ok || topic != c.Topic || key != c.Key {
			t.Errorf("ParseSubject(%q) = %q, %q, %v", c.Subject, topic, key, ok)
		}
	}
	for _, c := range m.Tokens {
		if got := native.ParseKeyToken(c.Token); got != c.Key {
			t.Errorf("ParseKeyToken(%q) = %q, want %q", c.Token, got, c.Key)
		}
	}
	for _, c := range m.Foreign {
		if topic, key, ok := native.ParseSubject(c.Subject); ok {
			t.Errorf("ParseSubject(%q) = %q, %q", c.Subject, topic, key)
		}
	}
	for _, c := range m.Streams {
		if got := native.ObjectName(c.Topic); got != c.Stream {
			t.Errorf("ObjectName(%q) = %q, want %q", c.Topic, got, c.Stream)
		}
	}
	for _, c := range m.Consumers {
		if got := native.ConsumerName(c.Topic, c.Group, c.Family); got != c.Consumer {
			t.Errorf("ConsumerName(%q, %q, %v) = %q, want %q", c.Topic, c.Group, c.Family, got, c.Consumer)
		}
	}
	for _, c := range m.Buckets {
		if got := native.BucketName(c.Topic); got != c.Bucket {
			t.Errorf("BucketName(%q) = %q, want %q", c.Topic, got, c.Bucket)
		}
	}
	for _, topic := range m.Topics.Valid {
		if err := native.CheckTopic(topic); err != nil {
			t.Errorf("CheckTopic(%q): %v", topic, err)
		}
	}
	for _, topic := range m.Topics.Invalid {
		if native.CheckTopic(topic) == nil {
			t.Errorf("CheckTopic(%q) takes it", topic)
		}
	}
}

func TestKeyTokensComeBack(t *testing.T) {
	t.Parallel()
	check := func(key string) bool {
		token := native.KeyToken(key)
		if key != "" && !natsserver.IsValidLiteralSubject(token) || strings.ContainsAny(token, ".*> ") {
			t.Logf("key %q gives token %q", key, token)
			return false
		}
		return native.ParseKeyToken(token) == key
	}
	if err := quick.Check(check, nil); err != nil {
		t.Error(err)
	}
}

func TestFieldsAreChecked(t *testing.T) {
	t.Parallel()
	for want, f := range map[string]native.Fields{
		"id is not valid UTF-8":           {ID: "\xff"},
		"id has the form":                 {ID: "a@1"},
		"id begins or ends":               {ID: " a"},
		"id has 129 bytes":                {ID: strings.Repeat("a", 129)},
		"ts is -1":                        {TS: -1, HasTS: true},
		"key has 513 bytes":               {Key: strings.Repeat("a", 513)},
		"key is not valid UTF-8":          {Key: "\xff"},
		"sid has a control character":     {SID: "a\nb"},
		"headers has a name":              {Headers: map[string]string{"a b": ""}},
		"headers.KV-Operation is":         {Headers: map[string]string{"KV-Operation": "DEL"}},
		"headers.nats-rollup is":          {Headers: map[string]string{"nats-rollup": "sub"}},
		"headers.a begins":                {Headers: map[string]string{"a": " "}},
		"tags has an entry of 1025 bytes": {Tags: []string{strings.Repeat("a", 1025)}},
		"tombstone removes a key":         {Tombstone: true},
		"have 16386 bytes together":       {SID: strings.Repeat("a", 16_386)},
	} {
		if err := f.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+.60v: %v, want %q", f, err, want)
		}
	}
}
