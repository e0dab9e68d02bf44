package bench

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// given answers a gate with ratios in place of measuring, and keeps how many rounds were asked for.
type given struct {
	first, second map[string]float64
	rounds        []int
}

func (g *given) try(of gatedBench, count int) ([]Ratio, error) {
	g.rounds = append(g.rounds, count)
	var out []Ratio
	for _, held := range of.ratios {
		v := g.first[held.name]
		if count > 9 {
			v = g.second[held.name]
		}
		out = append(out, Ratio{Name: held.name, OfPairs: v, Other: usualRate / 2})
	}
	return out, nil
}

func TestGate(t *testing.T) {
	expected := map[string]float64{"pub rate": 1, "sub rate": 0.8, "latency p50": 1.2, "latency CPU": 1.1, "keyed 1,000": 0.5, "keyed one": 1, "keyed watch": 1.2}
	with := func(name string, v float64) map[string]float64 {
		out := map[string]float64{name: v}
		for other, ratio := range expected {
			if other != name {
				out[other] = ratio
			}
		}
		return out
	}
	for _, c := range []struct {
		name          string
		first, second map[string]float64
		fails         string // a part of the error; "": it passes
		again         bool
	}{
		{name: "as expected", first: expected},
		{name: "a quarter slower is allowed", first: with("pub rate", 0.75)},
		{name: "slower publishing", first: with("pub rate", 0.74), second: with("pub rate", 0.74), fails: "pub rate is 0.740 of nats.go, at least 0.750 allowed", again: true},
		{name: "slower delivery", first: with("sub rate", 0.5), second: with("sub rate", 0.5), fails: "-bench DeliverAndAck", again: true},
		{name: "dearer events", first: with("latency CPU", 1.4), second: with("latency CPU", 1.4), fails: "latency CPU", again: true},
		{name: "noise", first: with("latency p50", 4), second: with("latency p50", 1.3), again: true},
		{name: "faster", first: with("sub rate", 3)},
		{name: "cheaper", first: with("latency CPU", 0.1)},
		{name: "nothing was measured", first: with("pub rate", math.NaN()), second: with("pub rate", math.NaN()), fails: "pub rate", again: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := &given{first: c.first, second: c.second}
			var out strings.Builder
			err := (&Gate{Rounds: 9, Tolerance: 0.25}).judge(&out, expected, gatedBenches(), g.try)
			if c.fails == "" && err != nil || c.fails != "" && (err == nil || !strings.Contains(err.Error(), c.fails)) {
				t.Errorf("got %v, want %q", err, c.fails)
			}
			if again := len(g.rounds) > len(gatedBenches()); again != c.again {
				t.Errorf("measured with %v rounds", g.rounds)
			}
			if c.fails != "" && !strings.Contains(out.String(), "WORSE") {
				t.Errorf("printed %s", out.String())
			}
		})
	}
}

// What is recorded is what is expected afterwards, and every ratio must be there.
func TestGateRecords(t *testing.T) {
	cmd := &Gate{File: filepath.Join(t.TempDir(), "ratios.json"), Rounds: 9, Tolerance: 0.25}
	g := &given{first: map[string]float64{"pub rate": 1.2344, "sub rate": 0.8, "latency p50": 1.2, "latency CPU": 1.1, "keyed 1,000": 0.5, "keyed one": 1, "keyed watch": 1.2}}
	var out strings.Builder
	if err := cmd.record(&out, gatedBenches(), g.try); err != nil {
		t.Fatal(err)
	}
	expected, err := readRatios(cmd.File)
	if err != nil || expected["pub rate"] != 1.234 {
		t.Fatalf("got %v, %v", expected, err)
	}
	if err := cmd.judge(&out, expected, gatedBenches(), g.try); err != nil {
		t.Error(err)
	}
	delete(expected, "sub rate")
	if err := cmd.judge(&out, expected, gatedBenches(), g.try); err == nil || !strings.Contains(err.Error(), `no ratio "sub rate"`) {
		t.Errorf("got %v", err)
	}
	if err := os.WriteFile(cmd.File, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readRatios(cmd.File); err == nil {
		t.Error("a broken file was read")
	}
}

// The ratios in the repository are those that the gate holds.
func TestGateFile(t *testing.T) {
	expected, err := readRatios("testdata/ratios.json")
	if err != nil {
		t.Fatal(err)
	}
	held := 0
	for _, g := range gatedBenches() {
		for _, r := range g.ratios {
			if held++; !(expected[r.name] > 0) {
				t.Errorf("%s: %v", r.name, expected[r.name])
			}
		}
	}
	if len(expected) != held {
		t.Errorf("%d ratios are recorded, and %d held", len(expected), held)
	}
}
