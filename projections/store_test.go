package projections

import (
	"testing"
	"time"

	"eventhub/jetstream"
)

func TestCovers(t *testing.T) {
	stored := time.Now()
	r := State{From: Position{"s", 10}, StoredAt: stored.UnixNano()}
	tests := []struct {
		name     string
		stream   string
		sequence uint64
		storedAt time.Time
		want     bool
	}{
		{"its own heartbeat", "s", 10, stored, true},
		{"an earlier one", "s", 9, stored.Add(-time.Hour), true},
		{"a later one", "s", 11, stored.Add(time.Second), false},
		{"one of another stream", "other", 9, stored, false},
		{"one stored a moment after by another server's clock", "s", 10, stored.Add(remadeAfter / 2), true},
		{"one of a stream that was made again", "s", 1, stored.Add(2 * remadeAfter), false},
	}
	for _, tt := range tests {
		e := &jetstream.Event{Stream: tt.stream, Sequence: tt.sequence, StoredAt: tt.storedAt.UnixNano()}
		if got := r.Covers(e); got != tt.want {
			t.Errorf("%s: covered is %t, want %t", tt.name, got, tt.want)
		}
	}
}

func TestParseSource(t *testing.T) {
	for text, want := range map[string]Position{
		"stream@7":      {"stream", 7},
		"a@b@8":         {"a@b", 8},
		"":              {},
		"stream":        {},
		"stream@":       {},
		"stream@x":      {},
		"stream@-1":     {},
		"heartbeat=2E@": {},
	} {
		if got := parsePosition(text); got != want {
			t.Errorf("%q is read as %+v, want %+v", text, got, want)
		}
	}
}
