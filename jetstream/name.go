package jetstream

import (
	"eventhub/jetstream/event"
	"eventhub/jetstream/native"
)

// MaxKey is the longest key of an event in bytes.
const MaxKey = native.MaxKey

// Bounds of names, from the protocol.
const (
	maxTopicLen = native.MaxTopic
	maxIDLen    = native.MaxID
)

// ValidTopic returns a bad_topic *Error unless topic is dot-separated segments of [A-Za-z0-9_-],
// 1..251 bytes in all; 255 for the dead letters of a topic.
func ValidTopic(topic string) error { return event.ValidTopic(topic) }

// ValidGroup returns a bad_group *Error unless group is 1..128 bytes of UTF-8 without control
// characters.
func ValidGroup(group string) error { return event.ValidGroup(group) }

// The names that package native gives to what is stored, in short.

func keyToken(key string) string   { return native.KeyToken(key) }
func tokenKey(token string) string { return native.ParseKeyToken(token) }
func objectName(s string) string   { return native.ObjectName(s) }
func bucketName(t string) string   { return native.BucketName(t) }

// Subjects of a topic.
func plainSubject(topic string) string      { return native.Subject(topic, "") }
func keyedSubject(topic, key string) string { return native.Subject(topic, key) }
func keyedPattern(topic string) string      { return native.KeyedPattern(topic) }

// subjectKey returns the key in the subject of a stored event, or "" when it has none.
func subjectKey(subject string) string {
	_, key, _ := native.ParseSubject(subject)
	return key
}

// subjectTopic returns the topic in the subject of a stored event, or "" for a foreign subject.
func subjectTopic(subject string) string {
	topic, _, _ := native.ParseSubject(subject)
	return topic
}
