package event

import "eventhub/jetstream/native"

// ValidTopic returns a bad_topic *Error unless topic is dot-separated segments of [A-Za-z0-9_-],
// 1..251 bytes in all; 255 for the dead letters of a topic.
func ValidTopic(topic string) error {
	if err := native.CheckTopic(topic); err != nil {
		return &Error{Code: CodeBadTopic, Msg: err.Error()}
	}
	return nil
}

// ValidGroup returns a bad_group *Error unless group is 1..128 bytes of UTF-8 without control
// characters.
func ValidGroup(group string) error {
	if err := native.CheckGroup(group); err != nil {
		return &Error{Code: CodeBadGroup, Msg: err.Error()}
	}
	return nil
}
