package jetstream

import (
	"time"

	"eventhub/jetstream/internal/reading"
)

// Position is a starting point in a topic: FromLatest (the zero value), FromEarliest, FromTime or
// FromAfterID; for Group.Move also Back, AtBookmark or InPlace.
type Position struct {
	kind positionKind
	at   time.Time
	id   string // or the name of a bookmark
	back int
}

type positionKind int

const (
	atLatest positionKind = iota
	atEarliest
	atTime
	atID
	atBack
	atBookmark
	atPlace
)

var (
	// FromLatest is the end of the topic: only events that are stored from now on.
	FromLatest = Position{kind: atLatest}
	// FromEarliest is the oldest event that the topic still holds.
	FromEarliest = Position{kind: atEarliest}
	// InPlace is where the group is. A Move there repairs a group to which the server gives no
	// events any more: see Group.Move. It is for Group.Move only.
	InPlace = Position{kind: atPlace}
)

// FromTime begins with the first event that was stored at or after a time, which must not be before
// 1970. A time in the future is the end of the topic. PublishOptions.TS has no influence.
func FromTime(at time.Time) Position { return Position{kind: atTime, at: at} }

// FromAfterID begins right after the event with the given id. If the id is a UUIDv7 that is older
// than the oldest stored event, it begins at that event. For any other id that is not found, the
// call that uses the position returns an unknown_id *Error. Ids that are not UUIDv7s are searched
// among the last 100,000 events.
func FromAfterID(id string) Position { return Position{kind: atID, id: id} }

// Back is n events before the position of a group: before the oldest event that the group has not
// settled. It is for Group.Move only.
func Back(n int) Position { return Position{kind: atBack, back: n} }

// AtBookmark is a position that was stored by Bookmarks.Put. It is for Group.Move only.
func AtBookmark(name string) Position { return Position{kind: atBookmark, id: name} }

// start is the position for who reads; for a group, it says where the topic begins.
func (p Position) start() reading.Position {
	switch p.kind {
	case atEarliest:
		return reading.Position{Kind: reading.AtEarliest}
	case atTime:
		return reading.Position{Kind: reading.AtTime, At: p.at}
	case atID:
		return reading.Position{Kind: reading.AtID, ID: p.id}
	case atLatest:
		return reading.Position{}
	default:
		return reading.Position{Kind: reading.AtGroup}
	}
}

// validate returns a bad_options *Error for what no topic has.
func (p Position) validate() error {
	start := p.start()
	return start.Validate()
}
