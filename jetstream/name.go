package jetstream

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxKey is the longest key of an event in bytes.
const MaxKey = 512

// Bounds of names, from the protocol.
const (
	maxTopicLen = 251 // so that dlq.<topic> stays within 255
	maxGroupLen = 128
	maxIDLen    = 128
	maxNameLen  = 200 // a stream's or consumer's name is also a directory name on the server
)

// ValidTopic returns a bad_topic *Error unless topic is dot-separated segments of [A-Za-z0-9_-],
// 1..251 bytes in all; 255 for the dead letters of a topic.
func ValidTopic(topic string) error {
	limit := maxTopicLen
	if strings.HasPrefix(topic, dlqPrefix) {
		limit += len(dlqPrefix)
	}
	bad := func(format string, args ...any) error {
		return &Error{Code: CodeBadTopic, Msg: "topic " + fmt.Sprintf(format, args...)}
	}
	if topic == "" {
		return bad("is empty: it is segments of letters, digits, _ and - joined by dots")
	}
	if len(topic) > limit {
		return bad("has %d bytes, at most %d are allowed", len(topic), limit)
	}
	segment := 0
	for i := range len(topic) {
		switch c := topic[i]; {
		case c == '.':
			if segment == 0 {
				return bad("has an empty segment at byte %d", i)
			}
			segment = 0
		case plain(c) || 'A' <= c && c <= 'Z':
			segment++
		default:
			return bad("has a character at byte %d that is none of letters, digits, _ - and the dot", i)
		}
	}
	if segment == 0 {
		return bad("ends with a dot")
	}
	return nil
}

// ValidGroup returns a bad_group *Error unless group is 1..128 bytes of UTF-8 without control
// characters.
func ValidGroup(group string) error {
	if err := text(group, maxGroupLen); err != nil {
		return &Error{Code: CodeBadGroup, Msg: "group " + err.Error()}
	}
	return nil
}

// text says what keeps s from being 1..limit bytes of UTF-8 without control characters.
func text(s string, limit int) error {
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

// keyToken writes a key as one subject token that is also a legal KV key: bytes outside
// [A-Za-z0-9_-] become =XX.
func keyToken(key string) string { return escape(key, true) }

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

// tokenKey reads a key token back. Native clients may write tokens that are not canonical; what is
// no escape stands for itself, so that every token has a key.
func tokenKey(token string) string {
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

// objectName is the name of the stream of a topic, or of the consumer of a group: the =XX form with
// capitals escaped too, because the server uses names as directories, and file systems may fold
// case. A long name becomes a readable prefix and a hash; the marker =_ is no escape, so the two
// forms never meet.
func objectName(s string) string {
	name := escape(s, false)
	if len(name) <= maxNameLen {
		return name
	}
	sum := sha256.Sum256([]byte(s))
	return name[:120] + "=_" + hex.EncodeToString(sum[:16])
}

// Subjects of a topic.
func plainSubject(topic string) string      { return "event." + topic }
func keyedSubject(topic, key string) string { return "keyed." + keyToken(key) + "." + topic }
func keyedPattern(topic string) string      { return "keyed.*." + topic }

// subjectKey returns the key in the subject of a stored event, or "" when it has none.
func subjectKey(subject string) string {
	rest, ok := strings.CutPrefix(subject, "keyed.")
	if !ok {
		return ""
	}
	token, _, _ := strings.Cut(rest, ".")
	return tokenKey(token)
}

// subjectTopic returns the topic in the subject of a stored event, or "" for a foreign subject.
func subjectTopic(subject string) string {
	if topic, ok := strings.CutPrefix(subject, "event."); ok {
		return topic
	}
	if rest, ok := strings.CutPrefix(subject, "keyed."); ok {
		_, topic, _ := strings.Cut(rest, ".")
		return topic
	}
	return ""
}
