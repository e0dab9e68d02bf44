package native

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
		if key == "" || CheckTopic(topic) != nil {
			return
		}
		token := KeyToken(key)
		if token == "" || strings.ContainsAny(token, ".*> \t\r\n\x00") {
			t.Fatalf("key %q is the token %q", key, token)
		}
		gotTopic, gotKey, ok := ParseSubject(Subject(topic, key))
		if !ok || gotTopic != topic || gotKey != key {
			t.Fatalf("topic %q and key %q came back as %q and %q", topic, key, gotTopic, gotKey)
		}
		if gotTopic, gotKey, ok = ParseSubject(Subject(topic, "")); !ok || gotTopic != topic || gotKey != "" {
			t.Fatalf("topic %q without a key came back as %q and %q", topic, gotTopic, gotKey)
		}
	})
}
