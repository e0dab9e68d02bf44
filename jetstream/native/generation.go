package native

import (
	"cmp"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Buckets in which hubs keep what all members of a group must know.
const (
	// GroupsBucket names the consumer of each group that was moved; see Generation.
	GroupsBucket = "eventhub_groups"
	// AttemptsBucket counts the deliveries that reached no client; see AttemptNote.
	AttemptsBucket = "eventhub_attempts"
)

// Generation is an entry of GroupsBucket, as JSON: it says which consumer a group is. Each seek
// makes the next generation. A group that was never moved has no entry: it is generation 1, of the
// name ConsumerName.
type Generation struct {
	Number   int    `json:"generation"`
	Consumer string `json:"consumer"`
	// Stream is when the stream was created: a generation on a stream that was deleted and made
	// anew counts no more.
	Stream time.Time `json:"stream"`
	// Durable says that the group had a TTL and has none any more.
	Durable bool `json:"durable,omitempty"`
	// Deleted says that somebody deleted the group; Consumer was its last.
	Deleted bool `json:"deleted,omitempty"`
	// Paused says that the group gets no events until somebody resumes it.
	Paused bool `json:"paused,omitempty"`
	// Settled is what members acknowledge unseen: it was settled when a bookmark was made to which
	// the group went back.
	Settled []Span `json:"settled,omitempty"`
	// Tried are events with the attempts that they had before a repair of the group.
	Tried []Tries `json:"tried,omitempty"`
	// After is the revision of the last deletion. Members of earlier revisions are of a group that
	// was deleted.
	After uint64 `json:"after,omitempty"`
	// Unfinished is for the mark of a topic that was deleted: its name, while something of it may
	// be left.
	Unfinished string `json:"unfinished,omitempty"`
	// PutBack names the queue of events that were put back to the group; "" when none ever was.
	PutBack string `json:"put_back,omitempty"`
}

// GroupKey returns the key of a group's Generation in GroupsBucket. consumer is ConsumerName.
func GroupKey(stream, consumer string) string { return stream + "." + consumer }

// Span is a run of sequences, both ends included.
type Span [2]uint64

// Covered reports whether one of the spans, which are in order, has the sequence.
func Covered(spans []Span, seq uint64) bool {
	_, found := slices.BinarySearchFunc(spans, seq, func(s Span, seq uint64) int {
		switch {
		case s[1] < seq:
			return -1
		case s[0] > seq:
			return 1
		}
		return 0
	})
	return found
}

// Tries is the sequence of an event, and its attempts.
type Tries [2]uint64

// AttemptsBefore returns how many attempts an event had before the group was repaired. tried is in
// order.
func AttemptsBefore(tried []Tries, seq uint64) int {
	i, found := slices.BinarySearchFunc(tried, seq, func(t Tries, seq uint64) int { return cmp.Compare(t[0], seq) })
	if !found {
		return 0
	}
	return int(tried[i][1]) //nolint:gosec // a count of deliveries
}

// LastFailure is how the last attempt of an event failed whose dead letter waits.
type LastFailure struct {
	Attempt int    `json:"attempt"`
	At      int64  `json:"at"` // epoch milliseconds
	Reason  string `json:"reason"`
	Client  string `json:"client,omitempty"` // for which the dead letter counts
}

// AttemptNote is an entry of AttemptsBucket.
type AttemptNote struct {
	// Spared is how many of the server's deliveries of the event reached no client. It is negative
	// when the server has forgotten deliveries.
	Spared int `json:"spared"`
	// Failed is not nil when the last attempt is over: the event is to be dead-lettered instead of
	// handled.
	Failed *LastFailure `json:"failed"`
	// Until is when an event of an ordered group may be handled again that was refused with a
	// delay, in epoch milliseconds, or 0.
	Until int64 `json:"until,omitempty"`
}

// ParseNote reads an entry: Spared alone as a number, or an AttemptNote as JSON. ok is false for
// anything else.
func ParseNote(value []byte) (note AttemptNote, ok bool) {
	if spared, err := strconv.Atoi(string(value)); err == nil {
		return AttemptNote{Spared: spared}, true
	}
	if json.Unmarshal(value, &note) != nil || note.Failed == nil && note.Until == 0 {
		return AttemptNote{}, false
	}
	return note, true
}

// SparedRuns is the entry of AttemptsBucket about many events of one consumer, as JSON: of each run
// of consecutive sequences the first, the last, and the deliveries of each event that count for no
// attempt. Where an event has an entry of its own, too, the higher number counts; an entry of its
// own with a number below 0 counts alone. The runs are in order, and do not overlap.
type SparedRuns [][3]uint64

// Of returns how many deliveries of the event of a sequence count for no attempt.
func (r SparedRuns) Of(seq uint64) int {
	i, _ := slices.BinarySearchFunc(r, seq, func(run [3]uint64, seq uint64) int { return cmp.Compare(run[1], seq) })
	if i == len(r) || seq < r[i][0] {
		return 0
	}
	return int(r[i][2]) //nolint:gosec // a count of deliveries
}

// NoteKey returns the key in AttemptsBucket of an event of one consumer, as it was made at that
// time. Sequence 0, which no event has, is for the SparedRuns of the consumer.
func NoteKey(stream, consumer string, created time.Time, seq uint64) string {
	// a generation's number holds a character that keys must not
	group, _, _ := strings.Cut(consumer, "~")
	return stream + "." + group + "." + strconv.FormatInt(created.UnixNano(), 36) + "." + strconv.FormatUint(seq, 10)
}
