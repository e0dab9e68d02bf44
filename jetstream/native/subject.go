package native

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Bounds of names, in bytes.
const (
	MaxTopic = 251 // so that dlq.<topic> stays within 255
	MaxKey   = 512
	MaxGroup = 128
	MaxID    = 128
)

// MaxObjectName is the longest name of a stream or a consumer, which is also the name of a
// directory of the server.
const MaxObjectName = 200

const maxBucketName = 150 // its stream's name has a prefix

// DeadLetterPrefix begins the topics of dead letters: those of orders.placed are on
// dlq.orders.placed.
const DeadLetterPrefix = "dlq."

// CheckTopic returns an error unless topic is dot-separated segments of [A-Za-z0-9_-], 1..251 bytes
// in all; 255 for the dead letters of a topic.
func CheckTopic(topic string) error {
	limit := MaxTopic
	if strings.HasPrefix(topic, DeadLetterPrefix) {
		limit += len(DeadLetterPrefix)
	}
	if topic == "" {
		return errors.New("topic is empty: it is segments of letters, digits, _ and - joined by dots")
	}
	if len(topic) > limit {
		return fmt.Errorf("topic has %d bytes, at most %d are allowed", len(topic), limit)
	}
	segment := 0
	for i := range len(topic) {
		switch c := topic[i]; {
		case c == '.':
			if segment == 0 {
				return fmt.Errorf("topic has an empty segment at byte %d", i)
			}
			segment = 0
		case plain(c) || 'A' <= c && c <= 'Z':
			segment++
		default:
			return fmt.Errorf("topic has a character at byte %d that is none of letters, digits, _ - and the dot", i)
		}
	}
	if segment == 0 {
		return errors.New("topic ends with a dot")
	}
	return nil
}

// CheckGroup returns an error unless group is 1..128 bytes of UTF-8 without control characters.
func CheckGroup(group string) error {
	if err := CheckText(group, MaxGroup); err != nil {
		return fmt.Errorf("group %w", err)
	}
	return nil
}

// CheckText says what keeps s from being 1..limit bytes of UTF-8 without control characters.
func CheckText(s string, limit int) error {
	switch {
	case s == "":
		return fmt.Errorf("is empty: 1 to %d bytes are needed", limit)
	case len(s) > limit:
		return fmt.Errorf("has %d bytes, at most %d are allowed", len(s), limit)
	case !utf8.ValidString(s):
		return errors.New("is not valid UTF-8")
	}
	for i, r := range s {
		if unicode.IsControl(r) {
			return fmt.Errorf("has a control character at byte %d", i)
		}
	}
	return nil
}

const hexDigits = "0123456789ABCDEF"

// plain are the bytes that stand for themselves in every name.
func plain(c byte) bool {
	return 'a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '_' || c == '-'
}

// Subject returns the subject on which the events of the topic with the key are stored: event.T
// without a key, and keyed.K.T with one, where K is KeyToken(key). It does not check its arguments:
// see CheckTopic.
func Subject(topic, key string) string {
	if key == "" {
		return "event." + topic
	}
	return "keyed." + KeyToken(key) + "." + topic
}

// KeyedPattern returns the pattern of the subjects of the topic's events with a key.
func KeyedPattern(topic string) string { return "keyed.*." + topic }

// Filters returns the subjects that select all events of the topic: those without a key, and those
// with one.
func Filters(topic string) []string { return []string{Subject(topic, ""), KeyedPattern(topic)} }

// ParseSubject returns the topic and the key of the events on a subject; the key is "" for events
// without one. ok is false for a subject that no event has.
func ParseSubject(subject string) (topic, key string, ok bool) {
	if topic, ok := strings.CutPrefix(subject, "event."); ok {
		return topic, "", true
	}
	if rest, ok := strings.CutPrefix(subject, "keyed."); ok {
		token, topic, _ := strings.Cut(rest, ".")
		return topic, ParseKeyToken(token), topic != ""
	}
	return "", "", false
}

// KeyToken writes a key as one token of a subject. The token is also the key in the bucket of a
// compacted topic (see BucketName). Bytes outside [A-Za-z0-9_-] become =XX, where XX is the byte in
// upper-case hexadecimal.
func KeyToken(key string) string { return escape(key, true) }

// ParseKeyToken reads a KeyToken back. An = that begins no escape stands for itself, so that every
// token has a key.
func ParseKeyToken(token string) string {
	if strings.IndexByte(token, '=') < 0 {
		return token
	}
	var b strings.Builder
	b.Grow(len(token))
	for i := 0; i < len(token); i++ {
		if token[i] == '=' && i+2 < len(token) {
			hi, lo := strings.IndexByte(hexDigits, token[i+1]), strings.IndexByte(hexDigits, token[i+2])
			if hi >= 0 && lo >= 0 {
				b.WriteByte(byte(hi<<4 | lo)) //nolint:gosec // two hex digits make one byte
				i += 2
				continue
			}
		}
		b.WriteByte(token[i])
	}
	return b.String()
}

func escape(s string, upper bool) string {
	keep := func(c byte) bool { return plain(c) || upper && 'A' <= c && c <= 'Z' }
	n := 0
	for i := range len(s) {
		if !keep(s[i]) {
			n++
		}
	}
	if n == 0 {
		return s
	}
	var b strings.Builder
	b.Grow(len(s) + 2*n)
	for i := range len(s) {
		if c := s[i]; keep(c) {
			b.WriteByte(c)
		} else {
			b.WriteByte('=')
			b.WriteByte(hexDigits[c>>4])
			b.WriteByte(hexDigits[c&15])
		}
	}
	return b.String()
}

// ObjectName returns the name of the stream of a topic that has a stream of its own, or of the
// consumer of a group there. It is the =XX form with capitals escaped too, because the server uses
// names as directories, and file systems may fold case. A long name becomes a readable prefix and a
// hash; the marker =_ is no escape, so the two forms never meet.
func ObjectName(s string) string {
	name := escape(s, false)
	if len(name) <= MaxObjectName {
		return name
	}
	sum := sha256.Sum256([]byte(s))
	return name[:120] + "=_" + hex.EncodeToString(sum[:16])
}

// ConsumerName returns the name of a group's first consumer. In a family, other topics of the
// stream may have a group of the same name, so there the topic is part of the name; topics have no
// @. A group that was moved since has another consumer: see Client.Group.
func ConsumerName(topic, group string, family bool) string {
	if family {
		return ObjectName(group + "@" + topic)
	}
	return ObjectName(group)
}

// BucketName returns the name of the KV bucket of a compacted topic, whose keys are KeyTokens. KV
// knows no dots in names and some file systems fold case, so a dot becomes _, and what is no
// lower-case letter, digit or hyphen is escaped by a capital X. A long name becomes a readable
// prefix and a hash; XX is no escape, so the two forms never meet.
func BucketName(topic string) string {
	var b strings.Builder
	b.WriteString("latest_")
	for i := range len(topic) {
		switch c := topic[i]; {
		case c == '.':
			b.WriteByte('_')
		case 'a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '-':
			b.WriteByte(c)
		default:
			b.WriteByte('X')
			b.WriteByte(hexDigits[c>>4])
			b.WriteByte(hexDigits[c&15])
		}
	}
	name := b.String()
	if len(name) <= maxBucketName {
		return name
	}
	sum := sha256.Sum256([]byte(topic))
	return name[:100] + "XX" + hex.EncodeToString(sum[:16])
}
