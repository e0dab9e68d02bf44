package projections

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"eventhub/jetstream"
)

// Position is where an event lies: its sequence in its stream.
type Position struct {
	Stream   string
	Sequence uint64
}

// String is <stream>@<sequence>, which is also the id of an event that was published without one.
func (p Position) String() string { return p.Stream + "@" + strconv.FormatUint(p.Sequence, 10) }

func positionOf(e *jetstream.Event) Position { return Position{e.Stream, e.Sequence} }

// parsePosition reads what String wrote; anything else is the zero Position.
func parsePosition(text string) Position {
	i := strings.LastIndexByte(text, '@')
	if i < 0 {
		return Position{}
	}
	n, err := strconv.ParseUint(text[i+1:], 10, 64)
	if err != nil {
		return Position{}
	}
	return Position{text[:i], n}
}

// State is what a projection knows of a key.
type State struct {
	// Value is nil when the key has none.
	Value []byte
	// From is where the last event lies that is in it.
	From Position
	// Revision names this state in its store, 0 when the store has none. The next state replaces just this one.
	Revision uint64
	// StoredAt is when it was stored, in epoch nanoseconds.
	StoredAt int64
}

// remadeAfter is how much later than a state an event must be stored for it to count as newer although its sequence is
// lower. That happens when an operator deletes a stream, and its sequences start again. The margin is for the clocks of
// the servers that lead the two streams.
const remadeAfter = time.Minute

// Covers reports whether an event is in the state already.
func (s *State) Covers(e *jetstream.Event) bool {
	return s.From.Stream == e.Stream && s.From.Sequence >= e.Sequence && e.StoredAt <= s.StoredAt+int64(remadeAfter)
}

// after is the sequence behind which the events lie, as seen from e, that are not in the state.
func (s *State) after(e *jetstream.Event) uint64 {
	if s.From.Stream != e.Stream || s.From.Sequence >= e.Sequence {
		return 0 // of another stream, or of one that was made anew
	}
	return s.From.Sequence
}

// ErrConflict is returned by a Store when the state to be replaced is not there any more: another instance was first.
// Nothing was stored.
var ErrConflict = errors.New("projections: the state was replaced by another instance")

// Store keeps the states of a projection. Its methods may be called concurrently, for one key one at a time. Errors are tried
// again until they pass. A panic is a failure of the event, as a panic of Apply is: after Projection.Attempts tries the event
// goes to the dead letters.
type Store interface {
	// Load reads the newest state of a key; the zero State when there is none. It must see every confirmed Save.
	Load(ctx context.Context, key string) (State, error)
	// Save replaces old by next and returns it with its Revision and StoredAt set, or ErrConflict. cause is the event that
	// led to it; nil when none did. After another error the outcome is unknown, but for an *Error of the bus that
	// refuses the state for good.
	Save(ctx context.Context, key string, old, next State, cause *jetstream.Event) (State, error)
	// Each calls f with every key that has a value, and stops at its first error, which it returns.
	Each(ctx context.Context, f func(key string, s State) error) error
}

// headerSource names, as <stream>@<sequence>, the event that a state was made from. It is what tells an event that was
// applied before from one that was not, for however long ago.
const headerSource = "projection-source"
