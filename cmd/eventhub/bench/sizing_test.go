package bench

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A study that is run again replaces its rows and leaves those of the others.
func TestSizingKeepsOtherStudies(t *testing.T) {
	file := filepath.Join(t.TempDir(), "sizing.csv")
	for _, z := range []*sizer{
		{study: "payload", rows: []row{{series: "pub", x: 64, events: 1.23456}, {series: "pub", x: 256, events: 2}}},
		{study: "topics", rows: []row{{series: "at rest, all", x: 10, idleCPU: 0.5}}},
		{study: "payload", rows: []row{{series: "pub", x: 1024, events: 3}}},
	} {
		if err := z.save(file); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Join(header, ",") + `
topics,"at rest, all",10,,,,,,,,,,,0.5
payload,pub,1024,3,,,,,,,,,,
`
	if string(got) != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// No more bytes are in flight than a slow disk allows.
func TestLoadOf(t *testing.T) {
	for _, size := range full.sizes {
		for _, connections := range full.connections {
			l := loadOf(size, connections)
			l.N = 1
			if err := l.validate(); err != nil {
				t.Error(err)
			}
			if l.InFlight > 1 && l.InFlight*connections*size > sizingWindow {
				t.Errorf("%d bytes over %d connections: %d in flight each", size, connections, l.InFlight)
			}
		}
	}
}
