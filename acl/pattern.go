package acl

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// MaxPatternBytes is the maximum length of a pattern. A topic has at most 251 bytes.
const MaxPatternBytes = 256

// maxTopicBytes is the maximum length of a topic: 251 bytes, plus 4 for the prefix of a dead-letter
// topic.
const maxTopicBytes = 255

const (
	oneSegment  = "*"
	anySegments = "**"
)

// Pattern is a compiled topic pattern. Dots separate its segments. The segment * matches exactly
// one segment, ** matches any number of segments including none, and any other segment matches
// itself. So a.** matches a, and a.**.c matches a.c. The zero Pattern matches nothing.
type Pattern struct {
	text string
	// prefix is the literal beginning of every matching topic. A pattern without a wildcard
	// consists only of the prefix.
	prefix string
	// segments is nil in a pattern without a wildcard. It never contains two adjacent **.
	segments []string
	// head holds the first bytes of prefix, and mask has ones at those bytes. Comparing them rules
	// out most patterns.
	head, mask uint64
	// known is the number of leading segments that need no comparison in a topic that is long
	// enough and has the prefix: the segments of the prefix or, without a prefix, each leading *.
	known int
	// least is the minimum number of segments of a matching topic: the segments other than **.
	least int
}

// ParsePattern compiles a pattern. Its error names the faulty segment and the cause.
func ParsePattern(text string) (Pattern, error) {
	p, err := parsePattern(text)
	if err != nil {
		return Pattern{}, fmt.Errorf("pattern %.*q: %w", MaxPatternBytes, text, err)
	}
	return p, nil
}

// parsePattern is ParsePattern with errors that contain no part of the text.
func parsePattern(text string) (Pattern, error) {
	switch {
	case text == "":
		return Pattern{}, errors.New("it is empty; use a topic, or ** for all topics")
	case len(text) > MaxPatternBytes:
		return Pattern{}, fmt.Errorf("it has %d bytes; at most %d are allowed", len(text), MaxPatternBytes)
	}
	p := Pattern{text: text}
	segments := strings.Split(text, ".")
	wild := slices.IndexFunc(segments, isWildcard)
	for i, s := range segments {
		if err := checkSegment(s); err != nil {
			return Pattern{}, fmt.Errorf("segment %d %w", i+1, err)
		}
	}
	if wild < 0 {
		p.prefix = text
		p.head, p.mask = headOf(text)
		return p, nil
	}
	p.prefix = strings.Join(segments[:wild], ".")
	p.head, p.mask = headOf(p.prefix)
	p.known = wild
	if wild == 0 {
		p.known = max(0, slices.IndexFunc(segments, func(s string) bool { return s != oneSegment }))
	}
	p.segments = slices.CompactFunc(segments, func(a, b string) bool { return a == anySegments && b == anySegments })
	for _, s := range p.segments {
		if s != anySegments {
			p.least++
		}
	}
	return p, nil
}

func isWildcard(segment string) bool { return segment == oneSegment || segment == anySegments }

func checkSegment(s string) error {
	switch {
	case s == "":
		return errors.New("is empty; separate segments by a single dot")
	case isWildcard(s):
		return nil
	}
	for _, c := range []byte(s) {
		switch {
		case c == '*':
			return errors.New("mixes a wildcard with other characters; a wildcard must be a whole segment, as in a.*.c or a.**")
		case !topicBytes[c]:
			return errors.New("has an invalid character; letters, digits, _ and - are allowed")
		}
	}
	return nil
}

// topicBytes is the set of bytes allowed in a segment.
var topicBytes = func() (set [256]bool) {
	for _, c := range []byte("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-") {
		set[c] = true
	}
	return set
}()

// String returns the source text of the pattern.
func (p Pattern) String() string { return p.text }

// namesDeadLetters reports whether the first segment of every matching topic is written out, which
// for topics of dead letters is dlq.
func (p Pattern) namesDeadLetters() bool { return p.segments == nil || !isWildcard(p.segments[0]) }

// namesSnapshots reports whether the last segment of every matching topic is written out.
func (p Pattern) namesSnapshots() bool {
	return p.segments == nil || !isWildcard(p.segments[len(p.segments)-1])
}

// Match reports whether the pattern matches a topic. A malformed topic matches no pattern. Match
// does not allocate. Its time is linear in the length of the topic, except in patterns with several
// **, where the worst case is proportional to the product of both lengths.
func (p *Pattern) Match(topic string) bool {
	var t segmented
	return t.parse(topic) && p.match(&t)
}

// match is Match for a parsed topic, which a policy compares with many patterns.
func (p *Pattern) match(t *segmented) bool {
	if t.head&p.mask != p.head {
		return false
	}
	if p.segments == nil {
		return t.text == p.prefix
	}
	if t.n < p.least || !strings.HasPrefix(t.text, p.prefix) {
		return false
	}
	if p.prefix != "" && int(t.ends[p.known-1]) != len(p.prefix) {
		return false // the prefix ends inside a segment of the topic
	}
	return p.matchSegments(t)
}

// matchSegments compares the segments of the pattern and the topic. On a mismatch, the last **
// takes one more segment. Earlier ** need no retry, because the last one can absorb whatever they
// could.
func (p *Pattern) matchSegments(t *segmented) bool {
	at, seg := p.known, p.known // the next segments of the topic and of the pattern
	retryAt, retrySeg := 0, -1
	for at < t.n {
		if seg < len(p.segments) {
			switch want := p.segments[seg]; {
			case want[0] == '*' && len(want) == len(anySegments):
				if seg++; seg == len(p.segments) {
					return true
				}
				retryAt, retrySeg = at, seg
				continue
			case want[0] == '*' || want == t.segment(at):
				at++
				seg++
				continue
			}
		}
		if retrySeg < 0 {
			return false
		}
		retryAt++
		at, seg = retryAt, retrySeg
	}
	if seg < len(p.segments) && p.segments[seg] == anySegments {
		seg++
	}
	return seg == len(p.segments)
}

// segmented is a topic with the ends of its segments. It is small enough for the stack.
type segmented struct {
	text string
	head uint64
	n    int
	ends [(maxTopicBytes + 1) / 2]uint8
}

// parse splits a topic into segments and reports whether the topic is well formed.
func (t *segmented) parse(topic string) bool {
	if topic == "" || len(topic) > maxTopicBytes {
		return false
	}
	t.text = topic
	t.head, _ = headOf(topic)
	start := 0
	for i := range len(topic) {
		switch c := topic[i]; {
		case topicBytes[c]:
		case c == '.' && i > start:
			t.ends[t.n] = uint8(i)
			t.n++
			start = i + 1
		default:
			return false
		}
	}
	t.ends[t.n] = uint8(len(topic)) //nolint:gosec // maxTopicBytes is below 256
	t.n++
	return start < len(topic)
}

// headOf packs up to eight leading bytes of text into a number. mask has ones at those bytes.
func headOf(text string) (head, mask uint64) {
	for i := range min(len(text), 8) {
		head |= uint64(text[i]) << (8 * i)
		mask |= 0xff << (8 * i)
	}
	return head, mask
}

func (t *segmented) segment(i int) string {
	start := 0
	if i > 0 {
		start = int(t.ends[i-1]) + 1
	}
	return t.text[start:t.ends[i]]
}
