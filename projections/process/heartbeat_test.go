package process

import (
	"strings"
	"testing"

	"eventhub/jetstream"
)

func TestParseHeartbeat(t *testing.T) {
	long := strings.Repeat("x", jetstream.MaxKey)
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
