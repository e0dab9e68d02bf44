package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"eventhub/sdk/go/wire"
)

// Schema is `eventhub bench schema`.
type Schema struct {
	load

	Rounds int `default:"9" help:"Rounds, after a warm-up round. All ways run in each round."`
	WarmUp int `name:"warm-up" default:"20000" help:"Maximum number of events of the warm-up round."`
}

// Help returns the detailed help text.
func (*Schema) Help() string {
	return `Compares publishing to topics with schemas, and delivery in another version of the schema, with the same for topics without. In turn:

  none      publish to a topic whose rule does not mention schemas
  off       the same with schema: off
  subset    the same with schema: enforce, and a schema that the quick program knows whole
  pattern   the same with a pattern for one member
  fallback  the same with a condition at the root (if and then), which the quick program does not know
  deliver   deliver and acknowledge events of version 1, which a native client stored, as they are
  cast      the same in version 2: one member gets another name, one is added, and one is wrapped

  eventhub bench schema
  eventhub bench schema --size 268 --n 200000`
}

// schemaWay is one way that is compared.
type schemaWay struct {
	name    string
	rule    string                               // of the topics file; "" for none
	also    func(schema, members map[string]any) // changes the schema; nil: nothing
	deliver bool
	version wire.SchemaVersion // of delivered events
}

// topic is the prefix of the topics of the rounds.
func (w *schemaWay) topic() string { return "bench." + w.name }

var schemaWays = []schemaWay{
	{name: "none"},
	{name: "off", rule: "off"},
	{name: "subset", rule: "enforce"},
	{name: "pattern", rule: "enforce", also: func(_, members map[string]any) {
		members["host"] = map[string]any{"type": "string", "pattern": "^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"}
	}},
	{name: "fallback", rule: "enforce", also: func(schema, _ map[string]any) {
		schema["if"] = map[string]any{"required": []string{"pid"}}
		schema["then"] = map[string]any{"required": []string{"name"}}
	}},
	{name: "deliver", rule: "enforce", deliver: true},
	{name: "cast", rule: "enforce", deliver: true, version: 2},
}

// schemaPairs are the ways whose rates are compared, with the least ratio that is aimed at.
var schemaPairs = []struct {
	way, other string
	least      float64
}{
	{"off", "none", 0.99}, {"subset", "off", 0.8}, {"pattern", "off", 0.5}, {"fallback", "off", 0.5}, {"cast", "deliver", 0},
}

// schemaTopics are the rules for the topics of the ways. The topics of a way share a schema.
func schemaTopics() string {
	var b strings.Builder
	b.WriteString("topics:\n")
	for _, w := range schemaWays {
		fmt.Fprintf(&b, "  - pattern: %s.**\n    retention: {age: 1h}\n", w.topic())
		switch w.rule {
		case "":
		case "off":
			b.WriteString("    schema: off\n")
		default:
			fmt.Fprintf(&b, "    schema: {mode: %s, of: %s}\n", w.rule, w.topic())
		}
	}
	return b.String()
}

// payloadSchema is the schema of newPayload, changed by also.
func payloadSchema(also func(schema, members map[string]any)) map[string]any {
	text := func(most int) map[string]any { return map[string]any{"type": "string", "maxLength": most} }
	members := map[string]any{
		"seq": map[string]any{"type": "string", "minLength": seqDigits, "maxLength": seqDigits}, "at": text(timeDigits),
		"pid": map[string]any{"type": "integer", "minimum": 1}, "name": text(64), "host": text(253),
		"cpu_pct": map[string]any{"type": "number", "minimum": 0, "maximum": 100}, "mem_mb": map[string]any{"type": "integer", "minimum": 0},
		"pad": text(4 << 20),
	}
	schema := map[string]any{"type": "object", "required": []string{"seq", "at"}, "additionalProperties": false, "properties": members}
	if also != nil {
		also(schema, members)
	}
	return schema
}

// secondVersion is the version 2 of payloadSchema, with its cast.
func secondVersion() map[string]any {
	schema := payloadSchema(func(_, members map[string]any) {
		members["hostname"] = members["host"]
		members["cpu"] = map[string]any{"type": "object", "required": []string{"total"}, "properties": map[string]any{"total": members["cpu_pct"]}}
		members["status"] = map[string]any{"type": "string"}
		delete(members, "host")
		delete(members, "cpu_pct")
	})
	return map[string]any{"schema": schema, "up": json.RawMessage(`[{"rename":{"at":"/host","to":"hostname"}},
		{"wrap":{"at":"/cpu_pct","in":"total"}},{"rename":{"at":"/cpu_pct","to":"cpu"}},{"default":{"at":"/status","value":"alive"}}]`)}
}

// register registers the schemas of the ways.
func (cmd *Schema) register(ctx context.Context, s *system) error {
	for _, w := range schemaWays {
		if w.rule != "enforce" {
			continue
		}
		if err := s.registerSchema(ctx, w.topic()+".schema", map[string]any{"schema": payloadSchema(w.also)}); err != nil {
			return err
		}
	}
	return s.registerSchema(ctx, "bench.cast.schema", secondVersion())
}

// registerSchema registers a version over HTTP.
func (s *system) registerSchema(ctx context.Context, topic string, draft map[string]any) error {
	body, err := json.Marshal(draft)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.httpURL+"/schemas/"+topic, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+s.token)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("register a schema: %w", err)
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusCreated {
		why, _ := io.ReadAll(io.LimitReader(res.Body, 4096))
		return fmt.Errorf("register a schema of %s: %s: %s", topic, res.Status, bytes.TrimSpace(why))
	}
	return nil
}

// schemaReport is the JSON report of the benchmark.
type schemaReport struct {
	Hub    string             `json:"hub"`
	Ways   map[string]*Result `json:"ways"` // medians
	Ratios []Ratio            `json:"ratios"`
}

// Run runs the benchmark.
func (cmd *Schema) Run(ctx context.Context, env Env, target *Target) (err error) {
	cmd.Topic = "" // each way has its own
	err = errors.Join(target.validate(), cmd.validate())
	switch {
	case err != nil:
		return err
	case target.URL != "":
		return errors.New("the ways need rules of their own; leave out --url")
	case cmd.Rounds < 1 || cmd.Rounds > 1000:
		return fmt.Errorf("--rounds %d: must be 1 to 1000", cmd.Rounds)
	case cmd.WarmUp < 1:
		return fmt.Errorf("--warm-up %d: must be at least 1", cmd.WarmUp)
	}
	sys, err := openSystem(ctx, env, target, needs{hub: true, native: true, topics: schemaTopics()})
	if err != nil {
		return err
	}
	defer func() { err = ended(ctx, err, sys) }()
	if err := cmd.register(ctx, sys); err != nil {
		return err
	}
	b := newRun(env, target, sys)
	results := make(map[string][]*Result)
	for i := range cmd.Rounds + 1 {
		n := cmd.N
		if i == 0 {
			n = min(cmd.WarmUp, n)
		}
		for _, w := range schemaWays {
			result, err := b.round(ctx, cmd.once(b, &w), side{via: viaWS}, w.topic(), n)
			switch {
			case err != nil:
				return fmt.Errorf("round %d, %s: %w", i, w.name, err)
			case i > 0:
				results[w.name] = append(results[w.name], result)
			}
		}
	}
	return cmd.report(env, target, sys, results)
}

// once measures a round of a way.
func (cmd *Schema) once(b *run, w *schemaWay) roundFunc {
	return func(ctx context.Context, s side, topic string, n int) (*Result, error) {
		if !w.deliver {
			pub := Pub{load: cmd.load, Batch: 1}
			return pub.round(ctx, b, s.via, topic, n)
		}
		sub := Sub{load: cmd.load, Group: "bench", Fill: viaNative, version: w.version}
		if err := sub.fill(ctx, b, s.via, topic, n); err != nil {
			return nil, fmt.Errorf("fill the topic: %w", err)
		}
		return sub.round(ctx, b, s.via, topic, newTally(n))
	}
}

// report prints the medians and the ratios of neighbouring rounds.
func (cmd *Schema) report(env Env, target *Target, sys *system, results map[string][]*Result) error {
	report := schemaReport{Hub: sys.describe(side{via: viaWS}), Ways: make(map[string]*Result)}
	var b strings.Builder
	for _, w := range schemaWays {
		m := medians(results[w.name])
		report.Ways[w.name] = m
		fmt.Fprintf(&b, "%-8s  %s\n", w.name, m.line())
	}
	for _, p := range schemaPairs {
		rate := newRatio(p.way+" to "+p.other, rateMetric.unit, values(results[p.way], rateMetric), values(results[p.other], rateMetric))
		report.Ratios = append(report.Ratios, rate)
		fmt.Fprintf(&b, "%s", rate.line())
		if p.least > 0 {
			fmt.Fprintf(&b, "; aim %v", p.least)
		}
		b.WriteByte('\n')
	}
	if target.JSON {
		return printJSON(env.Out, report)
	}
	_, err := fmt.Fprintf(env.Out, "%smeasured: %s\n", b.String(), report.Hub)
	return err
}

// writeTopics writes a topics file into the directory of the system.
func (s *system) writeTopics(text string) (path string, err error) {
	path = filepath.Join(s.dir, "topics.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return "", fmt.Errorf("write the topics file: %w", err)
	}
	return path, nil
}
