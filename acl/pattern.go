package acl

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// MaxPatternBytes bounds the length of a pattern. A topic has at most 251 bytes.
const MaxPatternBytes = 256

// maxTopicBytes bounds a topic: 251 bytes, and 4 more for the dead letters of one.
const maxTopicBytes = 255

const (
	oneSegment  = "*"
	anySegments = "**"
)

// Pattern is a compiled topic pattern. Its segments are separated by dots: * stands for exactly one
// segment, ** for any number of them, none included, and everything else for itself. So a.**
// matches a, and a.**.c matches a.c. The zero Pattern matches nothing.
type Pattern struct {
	text string
	// prefix begins every topic that matches. It is all there is to compare when the pattern has no
	// wildcard.
	prefix string
	// segments is nil in a pattern without a wildcard. No two ** follow each other.
	segments []string
	// head holds the first bytes of prefix, and mask has ones where they are: most patterns are
	// ruled out by these alone.
	head, mask uint64
	// known is how many segments at the beginning match in any topic that is long enough and has
	// the prefix: those of the prefix, or else each * before something else.
	known int
	// least is how many segments a topic needs to match: those of the pattern, but for **.
	least int
}

// ParsePattern compiles a pattern. The error says which segment is wrong and why.
func ParsePattern(text string) (Pattern, error) {
	p, err := parsePattern(text)
	if err != nil {
		return Pattern{}, fmt.Errorf("pattern %.*q: %w", MaxPatternBytes, text, err)
	}
	return p, nil
}

// parsePattern is ParsePattern with errors that hold nothing of the text.
func parsePattern(text string) (Pattern, error) {
	switch {
	case text == "":
		return Pattern{}, errors.New("it is empty: give a topic, or ** for all topics")
	case len(text) > MaxPatternBytes:
		return Pattern{}, fmt.Errorf("it has %d bytes: %d are allowed", len(text), MaxPatternBytes)
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
		return errors.New("is empty: dots stand between segments, one at a time")
	case isWildcard(s):
		return nil
	}
	for _, c := range []byte(s) {
		switch {
		case c == '*':
			return errors.New("mixes a wildcard with other characters: a wildcard is a segment of its own, as in a.*.c or a.**")
		case !topicBytes[c]:
			return errors.New("has a character that no topic has: letters, digits, _ and - are allowed")
		}
	}
	return nil
}

// topicBytes are the bytes of a topic's segments.
var topicBytes = func() (set [256]bool) {
	for _, c := range []byte("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-") {
		set[c] = true
	}
	return set
}()

// String returns the pattern as it was written.
func (p Pattern) String() string { return p.text }

// Match reports whether the pattern matches a topic. Nothing matches what is no well-formed topic.
// It does not allocate. Its time grows with the length of the topic, and in the worst case, several
// ** with near misses between them, with the product of both lengths, which are bounded.
func (p *Pattern) Match(topic string) bool {
	var t segmented
	return t.parse(topic) && p.match(&t)
}

// match is Match for a topic that has been parsed: a policy asks many patterns about one.
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
		return false // the topic's segment goes on where the prefix ends
	}
	return p.matchSegments(t)
}

// matchSegments goes through pattern and topic side by side. Where they part, the last ** takes one
// more segment; the ones before it need not be tried again, since whatever they could take the last
// one can take as well.
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

// segmented is a topic and where its segments end. It is small enough for the stack.
type segmented struct {
	text string
	head uint64
	n    int
	ends [(maxTopicBytes + 1) / 2]uint8
}

// parse reads a topic, and reports whether it is well formed.
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

// headOf packs the first bytes of text, up to eight, into a number. mask has ones where they are.
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
