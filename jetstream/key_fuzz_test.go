package jetstream

import (
	"strings"
	"testing"
)

// FuzzKey looks at keys as tokens of subjects: each is one token of plain characters, and comes
// back as it was.
func FuzzKey(f *testing.F) {
	for _, key := range []string{"a", "local:7", "A", "=", "=3A", "a.b", "*", ">", "\x00", "ž", "~", strings.Repeat("=", 128)} {
		f.Add(key, "orders.placed")
	}
	f.Fuzz(func(t *testing.T, key, topic string) {
		if key == "" || ValidTopic(topic) != nil {
			return
		}
		token := keyToken(key)
		if token == "" || strings.ContainsAny(token, ".*> \t\r\n\x00") {
			t.Fatalf("key %q is the token %q", key, token)
		}
		subject := keyedSubject(topic, key)
		if got := subjectKey(subject); got != key {
			t.Fatalf("key %q came back as %q", key, got)
		}
		if got := subjectTopic(subject); got != topic {
			t.Fatalf("topic %q came back as %q", topic, got)
		}
		if got := subjectKey(plainSubject(topic)); got != "" {
			t.Fatalf("a subject without a key has the key %q", got)
		}
	})
}
