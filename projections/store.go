package projections

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"eventhub/jetstream"
)

// Position is the location of an event: a stream and a sequence in it.
type Position struct {
	Stream   string
	Sequence uint64
}

// String returns <stream>@<sequence>, which is also the id of an event that was published without
// an id.
func (p Position) String() string { return p.Stream + "@" + strconv.FormatUint(p.Sequence, 10) }

func positionOf(e *jetstream.Event) Position { return Position{e.Stream, e.Sequence} }

// parsePosition parses the result of String. Invalid text yields the zero Position.
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

// State is the state of a key.
type State struct {
	// Value is nil if the key has no state.
	Value []byte
	// From is the position of the last event that the state includes.
	From Position
	// Revision identifies this state in its store; 0 if the store has no state. The next state
	// replaces exactly this revision.
	Revision uint64
	// StoredAt is when the state was stored, in epoch nanoseconds.
	StoredAt int64
}

// remadeAfter decides whether an event with a lower sequence than a state is newer nevertheless: it
// is if it was stored this much later. That happens after an operator deletes a stream, because the
// sequences of the new stream start again. The margin allows for clock differences between the
// servers that lead the two streams.
const remadeAfter = time.Minute

// Covers reports whether the state already includes an event.
func (s *State) Covers(e *jetstream.Event) bool {
	return s.From.Stream == e.Stream && s.From.Sequence >= e.Sequence && e.StoredAt <= s.StoredAt+int64(remadeAfter)
}

// after returns the sequence after which the stream of e may hold events that the state does not
// include.
func (s *State) after(e *jetstream.Event) uint64 {
	if s.From.Stream != e.Stream || s.From.Sequence >= e.Sequence {
		return 0 // the state is from another stream, or e is from a recreated stream
	}
	return s.From.Sequence
}

// ErrConflict is returned by a Store if the state to replace has changed, because another instance
// wrote first. Nothing was stored.
var ErrConflict = errors.New("projections: the state was replaced by another instance")

// Store holds the states of a projection. Its methods may be called concurrently, but not for the
// same key. Errors are retried until they pass. A panic counts against the event, like a panic of
// Apply: after Projection.Attempts attempts, the event goes to the dead letters.
type Store interface {
	// Load returns the newest state of a key, or the zero State if there is none. It must see every
	// confirmed Save.
	Load(ctx context.Context, key string) (State, error)
	// Save replaces old by next and returns next with Revision and StoredAt set, or ErrConflict.
	// cause is the event that led to the new state, or nil. An *Error of the bus that rejects the
	// state is permanent, and nothing was stored. After any other error the outcome is unknown.
	Save(ctx context.Context, key string, old, next State, cause *jetstream.Event) (State, error)
	// Each calls f for every key that has a value. It stops at the first error of f and returns it.
	Each(ctx context.Context, f func(key string, s State) error) error
}

// manyStore is a Store that can load several states at once.
type manyStore interface {
	// loadMany returns the states of those keys that have one. Unlike Load, it may lag behind Save
	// by a moment.
	loadMany(ctx context.Context, keys []string) (map[string]State, error)
}

// headerSource is the header with the position of the last event in a state, as
// <stream>@<sequence>. It identifies events that were already applied, however long ago.
const headerSource = "projection-source"
