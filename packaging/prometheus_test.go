package packaging

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// alertRule is an alert of prometheus/alerts.yaml.
type alertRule struct {
	Alert       string
	Expr        string
	Labels      map[string]string
	Annotations map[string]string
}

// read decodes a file of YAML.
func read(t *testing.T, name string, into any) {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(text, into); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

func alertRules(t *testing.T) (rules []alertRule) {
	t.Helper()
	var file struct{ Groups []struct{ Rules []alertRule } }
	read(t, "prometheus/alerts.yaml", &file)
	for _, g := range file.Groups {
		rules = append(rules, g.Rules...)
	}
	if len(rules) < 20 {
		t.Fatalf("there are %d alerts", len(rules))
	}
	return rules
}

// TestAlertRules runs the cases of the alerts. Each alert has a case in which it fires, and one in
// which it rests after that.
func TestAlertRules(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"check", "rules", "--lint-fatal", "alerts.yaml"}, {"test", "rules", "alerts_test.yaml"}} {
		cmd := exec.CommandContext(t.Context(), "promtool", args...)
		cmd.Dir = "prometheus"
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	var cases struct {
		Tests []struct {
			Checks []struct {
				Alert string `yaml:"alertname"`
				Want  []any  `yaml:"exp_alerts"`
			} `yaml:"alert_rule_test"`
		}
	}
	read(t, "prometheus/alerts_test.yaml", &cases)
	seen := make(map[string]string) // what is wanted of an alert in turn: rests, FIRES
	for _, c := range cases.Tests {
		for _, check := range c.Checks {
			word := "rests "
			if len(check.Want) > 0 {
				word = "FIRES "
			}
			seen[check.Alert] += word
		}
	}
	for _, a := range alertRules(t) {
		if seen[a.Alert] == "" || strings.ReplaceAll(seen[a.Alert], "rests FIRES rests ", "") != "" {
			t.Errorf("the cases of %s want: %q", a.Alert, seen[a.Alert])
		}
		delete(seen, a.Alert)
	}
	if len(seen) > 0 {
		t.Errorf("cases of alerts that do not exist: %v", seen)
	}
}

// TestAlertsAreExplained wants each alert to have a severity, a summary and a section of its own in
// docs/operations.md.
func TestAlertsAreExplained(t *testing.T) {
	page, err := os.ReadFile("../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	section := regexp.MustCompile(`(?m)^##### (Eventhub\w+)$`)
	var have, want []string
	for _, m := range section.FindAllSubmatch(page, -1) {
		have = append(have, string(m[1]))
	}
	for _, a := range alertRules(t) {
		want = append(want, a.Alert)
		if a.Labels["severity"] != "critical" && a.Labels["severity"] != "warning" {
			t.Errorf("%s has the severity %q", a.Alert, a.Labels["severity"])
		}
		if a.Annotations["summary"] == "" || a.Annotations["runbook"] != "docs/operations.md#"+strings.ToLower(a.Alert) {
			t.Errorf("%s has the annotations %v", a.Alert, a.Annotations)
		}
	}
	slices.Sort(have)
	slices.Sort(want)
	if !slices.Equal(have, want) {
		t.Errorf("docs/operations.md explains %v, and there are %v", have, want)
	}
}

// Parts of an expression of PromQL that hold no names of metrics.
var (
	quoted    = regexp.MustCompile(`"[^"]*"`)
	selectors = regexp.MustCompile(`\{[^}]*\}`)
	ranges    = regexp.MustCompile(`\[[^\]]*\]|\boffset \w+`)
	grouping  = regexp.MustCompile(`\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)`)
	name      = regexp.MustCompile(`[a-zA-Z_:][a-zA-Z0-9_:]*\s*\(?`)
)

// metricNames returns the names of the metrics in an expression. Functions are followed by a
// parenthesis.
func metricNames(expr string) (names []string) {
	for _, part := range []*regexp.Regexp{quoted, selectors, ranges, grouping} {
		expr = part.ReplaceAllString(expr, "")
	}
	for _, n := range name.FindAllString(expr, -1) {
		switch n = strings.TrimSpace(n); {
		case strings.HasSuffix(n, "("), slices.Contains([]string{"and", "or", "unless", "bool", "Inf"}, n):
		default:
			names = append(names, n)
		}
	}
	return names
}

func TestMetricNames(t *testing.T) {
	const expr = `max by (topic, group) (a_total{group!="(x)"} > bool 1) / sum without (b) (rate(c_bucket{d=~"e|f"}[$__rate_interval])) < +Inf or vector(0) and g unless g offset 10m`
	if got := fmt.Sprint(metricNames(expr)); got != "[a_total c_bucket g g]" {
		t.Error(got)
	}
}

// Every metric that an alert or the dashboard asks for exists.
func TestMetricsOfAlertsAndDashboard(t *testing.T) {
	page, err := os.ReadFile("../ops/METRICS.md")
	if err != nil {
		t.Fatal(err)
	}
	known := make(map[string]bool)
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| (\\w+) ").FindAllStringSubmatch(string(page), -1) {
		known[m[1]] = true
	}
	base := func(name string) string {
		for _, suffix := range []string{"_bucket", "_sum", "_count"} {
			if cut := strings.TrimSuffix(name, suffix); cut != name {
				if known[cut] {
					return cut
				}
			}
		}
		return name
	}
	for _, a := range alertRules(t) {
		names := metricNames(a.Expr)
		if len(names) == 0 {
			t.Errorf("%s asks for nothing: %s", a.Alert, a.Expr)
		}
		for _, n := range names {
			if !known[base(n)] && n != "up" {
				t.Errorf("%s asks for %s, which ops/METRICS.md does not have", a.Alert, n)
			}
		}
	}
	text, err := os.ReadFile("prometheus/dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			ID          int
			Type, Title string
			Description string
			Targets     []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &board); err != nil {
		t.Fatal(err)
	}
	ids := make(map[int]bool)
	for _, p := range board.Panels {
		if ids[p.ID] || p.Type != "row" && (p.Description == "" || len(p.Targets) == 0) {
			t.Errorf("the panel %q has the id of another, no description, or no query", p.Title)
		}
		ids[p.ID] = true
		for _, target := range p.Targets {
			for _, n := range metricNames(target.Expr) {
				if !known[base(n)] && !strings.HasPrefix(n, "go_") && !strings.HasPrefix(n, "process_") {
					t.Errorf("the panel %q asks for %s, which ops/METRICS.md does not have", p.Title, n)
				}
			}
		}
	}
}
