//go:build unix

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"eventhub/sdk/go/wire"
)

// scraper is Debian's Prometheus, which scrapes a hub and evaluates the alert rules that ship.
type scraper struct{ url string }

// startPrometheus starts it on a free port. It ends with the test.
func startPrometheus(t *testing.T, hub *node) scraper {
	t.Helper()
	rules, err := filepath.Abs("../../packaging/prometheus/alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	config := fmt.Sprintf(`
global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}
rule_files: [%q]
scrape_configs:
  - job_name: eventhub
    static_configs: [{targets: [%q]}]
`, rules, strings.TrimPrefix(hub.ops, "http://"))
	file := filepath.Join(dir, "prometheus.yml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	var log lockedBuffer
	cmd := exec.Command("prometheus", "--config.file="+file, "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address=127.0.0.1:0", "--log.level=info")
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGKILL)
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("the log of Prometheus:\n%s", log.String())
		}
	})
	listens := regexp.MustCompile(`msg="Listening on".* address=(127\.0\.0\.1:\d+)`)
	var p scraper
	eventually(t, "Prometheus listens", func() bool {
		if m := listens.FindStringSubmatch(log.String()); m != nil {
			p.url = "http://" + m[1]
		}
		return p.url != ""
	})
	return p
}

// sample is one element of the answer to a query.
type sample struct {
	Metric map[string]string `json:"metric"`
	Value  [2]any            `json:"value"`
}

// ask gets a path of the API.
func (p scraper) ask(t *testing.T, path string, into any) error {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.url+"/api/v1"+path, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", resp.Status, text)
	}
	return json.Unmarshal(text, &struct {
		Data any `json:"data"`
	}{into})
}

// query evaluates an expression now.
func (p scraper) query(t *testing.T, expr string) ([]sample, error) {
	t.Helper()
	var got struct {
		Result []sample `json:"result"`
	}
	err := p.ask(t, "/query?query="+url.QueryEscape(expr), &got)
	return got.Result, err
}

// value returns the value of an expression with one result, or "".
func (p scraper) value(t *testing.T, expr string) string {
	t.Helper()
	got, err := p.query(t, expr)
	if err != nil || len(got) != 1 {
		return ""
	}
	text, _ := got[0].Value[1].(string)
	return text
}

// ownNames are the metrics whose names promtool would have otherwise: dashboards of clients know
// them so.
var ownNames = []string{"delivery_handler_duration_ms", "delivery_latency_ms", "subscribe_poll_duration_ms"}

// rests lists the queries of the dashboard that have no result for a healthy hub.
var rests []string

// Prometheus scrapes a busy hub. Its figures are those of the hub, no alert fires, and every query
// of the dashboard has a result.
func TestPrometheus(t *testing.T) {
	t.Parallel()
	topics := filepath.Join(t.TempDir(), "topics.yaml")
	if err := os.WriteFile(topics, []byte("topics:\n  - topic: orders\n    retention: {bytes: 64MiB}\n    on_full: reject\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	hub := startNode(t, "--demo", "--topics="+topics)
	c := hub.dial()
	const events = 20 // as the expressions below have it
	busy := func() {
		for range events {
			if _, err := c.Publish(t.Context(), "orders", []byte("1"), wire.PublishOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := c.Subscribe(t.Context(), "orders", "billing", wire.SubscribeOptions{From: "earliest"}, func(e wire.Event) {
		if e.Attempt == 1 {
			_ = e.Nack("once", 0)
			return
		}
		_ = e.Ack()
	}); err != nil {
		t.Fatal(err)
	}
	p := startPrometheus(t, hub)
	busy()
	// A machine that stands still for a while makes the hub deliver again what it had delivered.
	for expr, want := range map[string]string{
		`up{job="eventhub"}`: "1", "eventhub_ready": "1", "eventhub_nats_connected": "1",
		`events_published_total{topic="orders"}`:                                       strconv.Itoa(events),
		`eventhub_publish_duration_seconds_count{topic="orders"}`:                      strconv.Itoa(events),
		`events_acked_total{topic="orders",group="billing"} >= bool 20`:                "1",
		`events_nacked_total{topic="orders",group="billing"} >= bool 1`:                "1",
		`events_delivered_total{topic="orders",group="billing"} >= bool 40`:            "1",
		`eventhub_redeliveries_total{topic="orders",group="billing"} >= bool 20`:       "1",
		`delivery_latency_ms_count{topic="orders",group="billing"} >= bool 20`:         "1",
		`events_inflight{topic="orders",group="billing"}`:                              "0",
		`eventhub_group_pending{topic="orders",group="billing"}`:                       "0",
		`eventhub_errors_total{code="internal"}`:                                       "0",
		`eventhub_stream_left_bytes{stream="orders"} > bool 0`:                         "1",
		`eventhub_stream_bytes{stream="orders",on_full="reject"} > bool 0`:             "1",
		`eventhub_storage_left_bytes{storage="file"} > bool 1`:                         "1",
		`count({__name__=~".+",group="billing",topic="orders"}) <= bool 35`:            "1",
		`sum by (job) (count_over_time(eventhub_ready{job="eventhub"}[1m])) >= bool 2`: "1",
	} {
		eventually(t, expr, func() bool { return p.value(t, expr) == want })
	}
	series := `events_delivered_total{group="billing",topic="orders"}`
	eventually(t, "Prometheus and the hub agree", func() bool {
		return p.value(t, series) == fmt.Sprint(metricsOf(t, hub)[series])
	})

	t.Run("promtool", func(t *testing.T) {
		_, text := get(t, hub.ops+"/metrics")
		check := exec.CommandContext(t.Context(), "promtool", "check", "metrics")
		check.Stdin = strings.NewReader(text)
		said, err := check.CombinedOutput()
		if err != nil && len(said) == 0 {
			t.Fatal(err)
		}
		var want []string
		for _, name := range ownNames {
			want = append(want, name+" metric names should not contain abbreviated units")
		}
		if got := strings.Split(strings.TrimSpace(string(said)), "\n"); !slices.Equal(got, want) {
			t.Errorf("promtool check metrics says:\n%s\nwant:\n%s", said, strings.Join(want, "\n"))
		}
	})
	t.Run("alerts", func(t *testing.T) {
		type alert struct{ Name, Health, State, LastError string }
		eventually(t, "every alert was evaluated and rests", func() bool {
			var got struct {
				Groups []struct{ Rules []alert }
			}
			if err := p.ask(t, "/rules?type=alert", &got); err != nil {
				t.Fatal(err)
			}
			n := 0
			for _, group := range got.Groups {
				for _, a := range group.Rules {
					n++
					if a.Health == "err" || a.State == "firing" {
						t.Fatalf("alert of a healthy hub: %+v", a)
					}
					if a.Health != "ok" {
						return false
					}
				}
			}
			return n > 20
		})
	})
	t.Run("dashboard", func(t *testing.T) {
		for _, expr := range dashboardQueries(t) {
			var err error
			var got []sample
			tries := time.After(patience)
			for len(got) == 0 && err == nil {
				if got, err = p.query(t, expr); err != nil || len(got) > 0 || slices.Contains(rests, expr) {
					break
				}
				select {
				case <-tries:
					err = errors.New("no result")
				case <-time.After(50 * time.Millisecond):
					busy()
				}
			}
			if err != nil {
				t.Errorf("%s: %v", expr, err)
			}
		}
	})
}

// dashboardQueries returns the queries of the dashboard that ships, for all topics and groups.
func dashboardQueries(t *testing.T) (queries []string) {
	t.Helper()
	text, err := os.ReadFile("../../packaging/prometheus/dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Templating struct {
			List []struct{ Definition string }
		}
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	if err := decoder.Decode(&board); err != nil {
		t.Fatal(err)
	}
	fill := strings.NewReplacer("$__rate_interval", "1m", "$job", ".*", "$instance", ".*", "$topic", ".*", "$group", ".*")
	values := regexp.MustCompile(`^label_values\((.*), \w+\)$`)
	for _, v := range board.Templating.List {
		if m := values.FindStringSubmatch(v.Definition); m != nil {
			queries = append(queries, fill.Replace(m[1]))
		}
	}
	for _, panel := range board.Panels {
		for _, target := range panel.Targets {
			queries = append(queries, fill.Replace(target.Expr))
		}
	}
	if len(queries) < 50 || strings.Contains(strings.Join(queries, ""), "$") {
		t.Fatalf("the dashboard has %d queries, or an unknown variable: %q", len(queries), queries)
	}
	return queries
}
