package bench

import (
	"encoding/csv"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const sizingDir = "../../../docs/sizing/"

// modelTolerance is by how much of the measured value the model may be wrong.
const modelTolerance = 0.15

// measuredRows are the rows of scale.csv by column.
func measuredRows(t *testing.T) (rows []map[string]float64, stages []string) {
	t.Helper()
	f, err := os.Open(sizingDir + "scale.csv")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	lines, err := csv.NewReader(f).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(lines[0], scaleHeader) {
		t.Fatalf("columns %q, want those that scale writes", lines[0])
	}
	for _, line := range lines[1:] {
		row := make(map[string]float64)
		for i, text := range line[1:] {
			if row[lines[0][i+1]], err = strconv.ParseFloat(text, 64); err != nil {
				t.Fatal(err)
			}
		}
		rows, stages = append(rows, row), append(stages, line[0])
	}
	return rows, stages
}

func TestModelPredictsWhatWasMeasured(t *testing.T) {
	rows, stages := measuredRows(t)
	sizes := make(map[float64]bool)
	for i, row := range rows {
		held := holding{connections: row["connections"], topics: row["topics"], groups: row["groups"], subscriptions: row["subscriptions"]}
		if stages[i] == "members" {
			sizes[held.connections] = true
		}
		for column, predicted := range map[string]float64{
			"hub_rss_kib": measuredCosts.hubKiB(held), "nats_rss_kib": measuredCosts.natsKiB(held), "hub_goroutines": measuredCosts.goroutines(held),
		} {
			off := predicted/row[column] - 1
			t.Logf("%s with %.0f connections: %s: predicted %.0f, measured %.0f (%+.1f %%)", stages[i], held.connections, column, predicted, row[column], 100*off)
			if math.Abs(off) > modelTolerance || math.IsNaN(off) {
				t.Errorf("%s with %.0f connections: %s: predicted %.0f, measured %.0f", stages[i], held.connections, column, predicted, row[column])
			}
		}
	}
	for _, n := range []float64{1000, 5000, 10_000} {
		if !sizes[n] {
			t.Errorf("no row with all of %.0f connections", n)
		}
	}
}

// plans are the rows of the table of the page.
func plans() []Plan {
	base := Plan{Connections: 1_000_000, Topics: 100_000, Families: 200, Groups: 1800, Published: 5000, Delivered: 20_000, HubMemory: 8, HubCores: 4, HubLimit: 20_000, ReturnRate: 1000}
	with := func(change func(*Plan)) Plan {
		p := base
		change(&p)
		return p
	}
	return []Plan{
		with(func(p *Plan) { p.Connections, p.Topics, p.Families, p.Groups = 10_000, 500, 0, 500 }),
		with(func(p *Plan) { p.Connections, p.Topics, p.Families, p.Groups = 100_000, 10_000, 100, 1000 }),
		base,
		with(func(p *Plan) { p.HubLimit = 60_000 }),
		with(func(p *Plan) { p.Groups = 20_000 }),
		with(func(p *Plan) { p.Families = 0 }),
	}
}

// count formats a whole number as the documentation does.
func count(n float64) string {
	text := strconv.FormatFloat(n, 'f', 0, 64)
	for at := len(text) - 3; at > 0; at -= 3 {
		text = text[:at] + "," + text[at:]
	}
	return text
}

func TestPageShowsThePlans(t *testing.T) {
	page, err := os.ReadFile(sizingDir + "scale.md")
	if err != nil {
		t.Fatal(err)
	}
	decimal := func(v float64) string { return strconv.FormatFloat(v, 'f', 1, 64) }
	all := plans()
	for i := range all {
		cmd := &all[i]
		p, err := cmd.plan(&measuredCosts)
		if err != nil {
			t.Fatal(err)
		}
		row := "| " + strings.Join([]string{
			count(cmd.Connections), count(cmd.Topics), count(p.Streams), count(cmd.Groups), count(cmd.HubLimit),
			count(p.Hubs), decimal(p.HubGiB) + " GiB", count(p.Clusters), decimal(p.ServerGiB) + " GiB", decimal(p.ServerIdleCores),
		}, " | ") + " |\n"
		if !strings.Contains(string(page), row) {
			t.Errorf("the page lacks the row\n%s", row)
		}
	}
}

func TestPlanKeepsOneHubToSpare(t *testing.T) {
	costs := unitCosts{hubKiBEmpty: 1 << 20, hubKiBConnection: 10, hubKiBMember: 10, hubKiBTopic: 1, hubMicrosPublished: 100, replicatedCPUAsset: 0.1}
	cmd := Plan{Connections: 300_000, Topics: 1000, Groups: 1500, Families: 600, Published: 40_000, HubMemory: 4, HubCores: 2, HubLimit: 100_000, ReturnRate: 1000}
	p, err := cmd.plan(&costs)
	if err != nil {
		t.Fatal(err)
	}
	// 2.8 GiB of a hub may be used: 1 GiB and 20 KiB for each of some 94,000 connections. Events
	// take 4 cores, of which a hub may use one.
	if p.HubsByLimit != 3 || p.HubsByMemory != 4 || p.HubsByCPU != 4 || p.HubsByReturn != 5 || p.Hubs != 6 || p.ConnectionsPerHub != 60_000 || p.Clusters != 2 {
		t.Errorf("got %+v", *p)
	}
	if idle := 1050 * 0.1 / 100; math.Abs(p.ServerIdleCores-idle) > 1e-9 {
		t.Errorf("a cluster takes %v cores when idle, want %v", p.ServerIdleCores, idle)
	}
	cmd.Topics = 2_000_000
	if _, err := cmd.plan(&costs); err == nil || !strings.Contains(err.Error(), "2000000 topics alone take") {
		t.Errorf("got %v", err)
	}
}
