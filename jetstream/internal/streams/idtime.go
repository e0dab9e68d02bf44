package streams

import (
	"math"
	"time"

	"github.com/google/uuid"
)

// MadeAt is the moment in a UUIDv7.
func MadeAt(id string) (time.Time, bool) {
	u, err := uuid.Parse(id)
	if err != nil || len(id) != 36 || u.Version() != 7 {
		return time.Time{}, false
	}
	ms := int64(u[0])<<40 | int64(u[1])<<32 | int64(u[2])<<24 | int64(u[3])<<16 | int64(u[4])<<8 | int64(u[5])
	return Farthest(time.UnixMilli(ms)), true
}

// Farthest keeps a time within what the server can count, in nanoseconds: one beyond would mean the
// past.
func Farthest(t time.Time) time.Time {
	if limit := time.Unix(0, math.MaxInt64); t.After(limit) {
		return limit
	}
	return t
}
