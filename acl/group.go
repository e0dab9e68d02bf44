package acl

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// reservedGroups are the groups that the hub itself runs. They are reserved on every topic: to
// join, move or read as one of them, a client needs the right to administer the topic besides the
// right to subscribe to it. A member of such a group would take events from the hub.
var reservedGroups = []string{
	"process-projector", // projections/process: heartbeat.received to process.state
	"eventhub-delayed",  // jetstream.DelayedGroup: dead letters of delayed events name it
	"eventhub-mirrors",  // projections.DualWriteGroup: topics with mirrors, in other versions
}

// Reserved reports whether the hub itself runs the group.
func Reserved(group string) bool { return slices.Contains(reservedGroups, group) }

// groupMark separates the pattern of topics from that of groups in a scope.
const groupMark = "::"

// groupPattern is a compiled pattern of groups, in which * matches any characters, none included.
// It consists of the literal parts between the *.
type groupPattern struct {
	text  string
	parts []string
}

// parseGroupPattern compiles the part of a scope behind ::. Its errors contain no part of the text.
func parseGroupPattern(text string) (*groupPattern, error) {
	switch {
	case text == "":
		return nil, errors.New("it is empty; write the name of a group, or leave :: out for all groups")
	case len(text) > maxGroupBytes:
		return nil, fmt.Errorf("it has %d bytes; at most %d are allowed", len(text), maxGroupBytes)
	case text[0] == ':':
		return nil, errors.New("it begins with a colon; write two colons between the topics and the group")
	case !utf8.ValidString(text) || hasControl(text):
		return nil, errors.New("it has a control character or is not UTF-8")
	}
	return &groupPattern{text: text, parts: strings.Split(text, anyGroup)}, nil
}

// match reports whether the pattern matches a group. It does not allocate. Each part is taken at
// its first place, which leaves most to the parts behind it.
func (p *groupPattern) match(group string) bool {
	first, last := p.parts[0], p.parts[len(p.parts)-1]
	if len(p.parts) == 1 {
		return group == first
	}
	if len(group) < len(first)+len(last) || !strings.HasPrefix(group, first) || !strings.HasSuffix(group, last) {
		return false
	}
	rest := group[len(first) : len(group)-len(last)]
	for _, part := range p.parts[1 : len(p.parts)-1] {
		at := strings.Index(rest, part)
		if at < 0 {
			return false
		}
		rest = rest[at+len(part):]
	}
	return true
}
