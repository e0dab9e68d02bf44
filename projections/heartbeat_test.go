package projections

import (
	"strings"
	"testing"
	"time"

	"eventhub/jetstream"
)

func TestParseHeartbeat(t *testing.T) {
	long := strings.Repeat("x", maxKey)
	tests := []struct {
		payload string
		id      string // "" when it is refused
		err     string
	}{
		{`{"pid":1,"name":"n","host":"h"}`, "h:n:1", ""},
		{`{"pid":0,"name":"n","host":"h"}`, "h:n:0", ""},
		{`{"pid":42.0,"name":"n","host":"h"}`, "h:n:42", ""},
		{`{"pid":1e3,"name":"n","host":"h"}`, "h:n:1000", ""},
		{`{"pid":9007199254740992,"name":"a b.c","host":"h:é"}`, "h:é:a b.c:9007199254740992", ""},
		{`{"pid":1.5,"name":"n","host":"h"}`, "", "whole number"},
		{`{"pid":-1,"name":"n","host":"h"}`, "", "whole number"},
		{`{"pid":1e300,"name":"n","host":"h"}`, "", "whole number"},
		{`{"pid":"1","name":"n","host":"h"}`, "", "pid"},
		{`{"pid":null,"name":"n","host":"h"}`, "", "pid is missing"},
		{`{"name":"n","host":"h"}`, "", "pid is missing"},
		{`{"pid":1,"name":"","host":"h"}`, "", "name is missing"},
		{`{"pid":1,"name":"n"}`, "", "host is missing"},
		{`{"pid":1,"name":"n","host":"h","cpu_pct":"much"}`, "", "cpu_pct"},
		{`{"pid":1,"name":"` + long + `","host":"h"}`, "", "bytes"},
		{`{"pid":1,"name":"n","host":"h","sid":"` + long + `"}`, "h:n:1", ""},
		{`{"pid":1,"name":"n","host":"h","sid":"` + long + long + `x"}`, "", "sid"},
		{`null`, "", "host is missing"},
		{`[]`, "", "invalid heartbeat"},
		{`not json`, "", "invalid heartbeat"},
		{``, "", "invalid heartbeat"},
	}
	for _, tt := range tests {
		h, err := parseHeartbeat([]byte(tt.payload))
		switch {
		case tt.id == "" && (err == nil || !strings.Contains(err.Error(), tt.err)):
			t.Errorf("%.60s: got %v, want an error about %q", tt.payload, err, tt.err)
		case tt.id != "" && (err != nil || h.processID() != tt.id):
			t.Errorf("%.60s: got %q and %v, want %q", tt.payload, h.processID(), err, tt.id)
		}
	}
}

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
