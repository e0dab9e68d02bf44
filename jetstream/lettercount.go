package jetstream

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"eventhub/jetstream/internal/conn"
)

// Bounds of counting dead letters.
const (
	// letterGroups is the most pairs of topic and group that are told apart, and the most topics
	// whose further groups are counted together.
	letterGroups = 10_000
	// countedLong is how long counts grow by the letters that come. Then all are counted anew.
	countedLong = 10 * time.Minute
	// When more than countedMany letters were counted, they are not counted anew for countedKept:
	// counts may then be that old while letters are removed.
	countedMany = 50_000
	countedKept = 30 * time.Second
)

// LetterCount is how many dead letters a group of a topic has.
type LetterCount struct {
	Topic, Group string
	Count        int
	// First and Last are the times at which the oldest and the newest letter were stored, in epoch
	// milliseconds.
	First, Last int64
}

// LetterCounts are the numbers of dead letters.
type LetterCounts struct {
	// Total is the number of all selected letters.
	Total int
	// Groups has a count for each topic and group, in this order; beyond 10,000 of them, the others
	// count in Total only.
	Groups []LetterCount
}

// Count counts the selected letters that were there when it began. visible is that of List. client
// is the client that asks, "" for the program itself (Limits.Redrives).
//
// With a filter of no more than a topic, visible is called with the Topic and the Group of letters
// only, and the letters are read once for all who ask: NATS says whether some came or went since.
// While letters are removed of which there are more than 50,000, these counts may be 30 s old. Any
// other filter makes Count read all letters.
func (d DeadLetters) Count(ctx context.Context, filter LetterFilter, client string, visible func(*Letter) bool) (LetterCounts, error) {
	l := d.letters
	if err := filter.validate(); err != nil {
		return LetterCounts{}, err
	}
	if filter == (LetterFilter{Topic: filter.Topic}) {
		sum, err := l.book.counts(ctx, l, client)
		if err != nil {
			return LetterCounts{}, err
		}
		return sum.selected(filter.Topic, visible), nil
	}
	leave, err := l.enterRedrives(ctx, client)
	if err != nil {
		return LetterCounts{}, err
	}
	defer leave()
	streams, err := l.letterStreams(ctx, &filter)
	if err != nil {
		return LetterCounts{}, err
	}
	sum := newLetterSum()
	for i := range streams {
		err := l.eachLetter(ctx, &streams[i], 1, &filter, func(l *Letter, _ *conn.StoredMsg) error {
			if filter.selects(l) && (visible == nil || visible(l)) {
				sum.add(l)
			}
			return nil
		})
		if err != nil {
			return LetterCounts{}, err
		}
	}
	return sum.selected("", nil), nil
}

// letterSum counts letters.
type letterSum struct {
	groups map[[2]string]LetterCount
	// others are the letters of further groups, by topic, and beyond those of further topics.
	others map[string]int
	beyond int
}

func newLetterSum() *letterSum {
	return &letterSum{groups: make(map[[2]string]LetterCount), others: make(map[string]int)}
}

func (s *letterSum) add(l *Letter) {
	at := l.StoredAt / 1e6
	s.merge(LetterCount{Topic: l.Topic, Group: l.Group, Count: 1, First: at, Last: at})
}

func (s *letterSum) merge(c LetterCount) {
	pair := [2]string{c.Topic, c.Group}
	known, ok := s.groups[pair]
	switch {
	case ok:
		c.Count += known.Count
		c.First, c.Last = min(c.First, known.First), max(c.Last, known.Last)
		s.groups[pair] = c
	case len(s.groups) < letterGroups:
		s.groups[pair] = c
	default:
		s.addOthers(c.Topic, c.Count)
	}
}

func (s *letterSum) addOthers(topic string, n int) {
	if _, ok := s.others[topic]; ok || len(s.others) < letterGroups {
		s.others[topic] += n
		return
	}
	s.beyond += n
}

// selected returns what is counted of a topic, "" for all topics, and visible.
func (s *letterSum) selected(topic string, visible func(*Letter) bool) LetterCounts {
	shows := func(of, group string) bool {
		return (topic == "" || of == topic) && (visible == nil || visible(&Letter{Topic: of, Group: group}))
	}
	var counts LetterCounts
	for _, c := range s.groups {
		if shows(c.Topic, c.Group) {
			counts.Total += c.Count
			counts.Groups = append(counts.Groups, c)
		}
	}
	for of, n := range s.others {
		if shows(of, "") {
			counts.Total += n
		}
	}
	if topic == "" && visible == nil {
		counts.Total += s.beyond
	}
	slices.SortFunc(counts.Groups, func(a, b LetterCount) int {
		if n := strings.Compare(a.Topic, b.Topic); n != 0 {
			return n
		}
		return strings.Compare(a.Group, b.Group)
	})
	return counts
}

// letterBook has the counts of all dead letters for all who ask. One of them reads at a time, and
// only what came since the last time.
type letterBook struct {
	turn chan struct{} // guards the rest
	// looked is when the last look at NATS began that succeeded.
	looked  time.Time
	streams map[string]*countedStream
	sum     *letterSum // of all streams; it does not change
	stale   bool       // streams were counted since sum
}

// countedStream is what is counted of a stream.
type countedStream struct {
	stream  letterStream // when it was last looked at
	next    uint64       // the sequence to go on with
	letters int
	began   time.Time
	sum     *letterSum
}

func newLetterBook() *letterBook {
	return &letterBook{turn: make(chan struct{}, 1), streams: make(map[string]*countedStream)}
}

// counts returns the counts of a moment since it was called.
func (k *letterBook) counts(ctx context.Context, d *letters, client string) (*letterSum, error) {
	came := time.Now()
	select {
	case k.turn <- struct{}{}:
		defer func() { <-k.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if k.looked.After(came) {
		return k.sum, nil // another caller has looked meanwhile
	}
	began := time.Now()
	changed, err := k.look(ctx, d, client)
	k.stale = k.stale || changed
	if err != nil {
		return nil, err
	}
	if k.stale || k.sum == nil {
		k.add()
		k.stale = false
	}
	k.looked = began
	return k.sum, nil
}

// look asks NATS what came and went, and counts that. What it has counted before an error stays
// counted.
func (k *letterBook) look(ctx context.Context, d *letters, client string) (changed bool, err error) {
	streams, err := d.letterStreams(ctx, &LetterFilter{})
	if err != nil {
		return false, err
	}
	left := maps.Clone(k.streams)
	var leave func()
	for i := range streams {
		s := &streams[i]
		c := k.streams[s.name]
		delete(left, s.name)
		switch {
		case c == nil, !c.goesOn(s) && !c.stays():
			c = &countedStream{next: 1, began: time.Now(), sum: newLetterSum()}
			k.streams[s.name] = c
			changed = true
		case !c.goesOn(s):
			continue // later
		}
		if c.stream = *s; c.next > s.last {
			continue
		}
		changed = true
		if leave == nil {
			if leave, err = d.enterRedrives(ctx, client); err != nil {
				return changed, err
			}
			defer leave()
		}
		err := d.eachLetter(ctx, s, c.next, &LetterFilter{}, func(l *Letter, _ *conn.StoredMsg) error {
			c.sum.add(l)
			c.letters++
			c.next = l.Sequence + 1
			return nil
		})
		if err != nil {
			return changed, err
		}
		c.next = s.last + 1
	}
	for name := range left {
		delete(k.streams, name)
		changed = true
	}
	return changed, nil
}

// goesOn reports whether messages were added to the stream only since it was last looked at.
func (c *countedStream) goesOn(s *letterStream) bool {
	was := &c.stream
	return was.created.Equal(s.created) && was.first == s.first && was.last <= s.last && s.last-was.last == s.messages-was.messages &&
		time.Since(c.began) < countedLong
}

// stays reports whether the counts are kept although messages were removed.
func (c *countedStream) stays() bool {
	return c.letters > countedMany && c.next > c.stream.last && time.Since(c.began) < countedKept
}

// add makes the sum of all streams.
func (k *letterBook) add() {
	sum := newLetterSum()
	for _, c := range k.streams {
		for _, of := range c.sum.groups {
			sum.merge(of)
		}
		for topic, n := range c.sum.others {
			sum.addOthers(topic, n)
		}
		sum.beyond += c.sum.beyond
	}
	k.sum = sum
}
