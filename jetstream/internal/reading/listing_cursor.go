package reading

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"hash/crc32"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/native"
)

// listingLife is how long a listing may take, so that what was given on its pages need not be known
// for ever.
const listingLife = time.Hour

// listingCursor says how far a listing is. A client carries it from page to page, so any hub can
// continue the listing. It holds nothing that is not the client's to know, and a client that
// changes it gets other pages of the same topic.
type listingCursor struct {
	topic   uint64   // hash of its name
	id      [12]byte // of the listing, at random
	began   int64    // in epoch seconds
	created int64    // when the bucket was made, in epoch nanoseconds
	present uint64   // end of the bucket when the listing began
	pos     uint64   // all entries up to this one were given, or need not be
	last    uint64   // names the record of what was given; 0 before the first page
}

// cursorForm is the first byte of a cursor.
const cursorForm = 1

// cursorLen is the length of a cursor in bytes, before base64.
const cursorLen = 1 + 8 + len(listingCursor{}.id) + 5*8 + crc32.Size

// newListingCursor begins a listing.
func newListingCursor(topic string, created time.Time, present uint64) listingCursor {
	c := listingCursor{topic: topicHash(topic), began: time.Now().Unix(), created: created.UnixNano(), present: present}
	_, _ = rand.Read(c.id[:]) // never fails
	return c
}

func topicHash(topic string) uint64 {
	sum := sha256.Sum256([]byte(topic))
	return binary.BigEndian.Uint64(sum[:])
}

// text is the form in which clients carry it: safe in a URL.
func (c *listingCursor) text() string {
	b := make([]byte, 0, cursorLen)
	b = append(b, cursorForm)
	b = binary.BigEndian.AppendUint64(b, c.topic)
	b = append(b, c.id[:]...)
	for _, n := range []uint64{uint64(c.began), uint64(c.created), c.present, c.pos, c.last} { //nolint:gosec // read back as they are
		b = binary.BigEndian.AppendUint64(b, n)
	}
	b = binary.BigEndian.AppendUint32(b, crc32.ChecksumIEEE(b))
	return base64.RawURLEncoding.EncodeToString(b)
}

// parseListingCursor reads what text wrote for this topic.
func parseListingCursor(text, topic string) (c listingCursor, err error) {
	const broken = "next is no cursor: take it as it is from the page before, or begin with an empty one"
	if len(text) != base64.RawURLEncoding.EncodedLen(cursorLen) {
		return c, event.BadOptions(broken)
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(text)
	if err != nil || len(b) != cursorLen || b[0] != cursorForm {
		return c, event.BadOptions(broken)
	}
	sum := len(b) - crc32.Size
	if crc32.ChecksumIEEE(b[:sum]) != binary.BigEndian.Uint32(b[sum:]) {
		return c, event.BadOptions(broken)
	}
	b = b[1:]
	number := func() (n uint64) {
		n, b = binary.BigEndian.Uint64(b), b[8:]
		return n
	}
	c.topic = number()
	b = b[copy(c.id[:], b):]
	c.began, c.created = int64(number()), int64(number()) //nolint:gosec // as they were written
	c.present, c.pos, c.last = number(), number(), number()
	switch {
	case c.topic != topicHash(topic):
		return c, event.BadOptions("next is the cursor of another topic: begin with an empty one")
	case time.Since(time.Unix(c.began, 0)) > listingLife:
		return c, errListingOver("it began more than an hour ago")
	}
	return c, nil
}

// errListingOver is returned where a listing cannot be continued.
func errListingOver(why string) error {
	return event.BadOptions("the listing cannot be continued (%s): begin again with an empty next", why)
}

// name is the id of the listing as a token of a subject.
func (c *listingCursor) name() string { return base64.RawURLEncoding.EncodeToString(c.id[:]) }

// keyHash stands for a key in the records of the listing.
func (c *listingCursor) keyHash(key string) uint64 {
	var buf [len(listingCursor{}.id) + native.MaxKey]byte
	sum := sha256.Sum256(append(append(buf[:0], c.id[:]...), key...))
	return binary.BigEndian.Uint64(sum[:])
}
