package topicfile

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"eventhub/jetstream/topics"
)

// defaultEvery is the interval of snapshots that is not given.
const defaultEvery = 30 * time.Second

// rule is a rule as it is read.
type rule struct {
	topics.Rule

	node   *yaml.Node
	at     map[string]*yaml.Node // the values, by the names that a RuleError gives the fields
	broken map[string]bool       // the fields that could not be read
}

func (r *rule) brokenIn(fields []string) bool {
	return slices.ContainsFunc(fields, func(f string) bool { return r.broken[f] })
}

// field is a field that a mapping may have.
type field struct {
	name string
	// read reads the value and returns what is wrong with it, or "".
	read func(*yaml.Node) string
	// as is the name that a RuleError gives it, if that is another.
	as string
}

// belongs has the place of fields that exist, but not in a rule itself.
var belongs = map[string]string{
	"age": "retention: {age: 7d}", "bytes": "retention: {bytes: 10GiB}", "messages": "retention: {messages: 1000000}",
	"every":      "snapshot: {topic: process.state.snapshot, every: 30s}",
	"batch_keys": "snapshot: {topic: process.state.snapshot, batch_keys: [a, b]}",
	"key_source": "snapshot: {topic: process.state.snapshot, key_source: /id}",
	"max_age":    "retention: {age: 7d}",
	"max_bytes":  "retention: {bytes: 10GiB}",
	"max_msgs":   "retention: {messages: 1000000}",
	"duplicates": "duplicate_window: 2m",
}

// root reads the value of the whole file.
func (p *parser) root(n *yaml.Node) (rules []*rule) {
	if n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" {
		p.fault(n, "file is empty; add a list of rules under topics:")
		return nil
	}
	given := false
	p.mapping(nil, n, "file", "topics: and a list of rules", []field{{name: "topics", read: func(n *yaml.Node) string {
		given = true
		if n.Kind != yaml.SequenceNode {
			return "topics is " + kind(n) + "; write a list of rules, each beginning with - topic: or - pattern:"
		}
		if len(n.Content) > maxRules {
			p.fault(n, "file has %d rules; at most %d are allowed; use patterns", len(n.Content), maxRules)
			return ""
		}
		for _, item := range n.Content {
			if p.full() {
				break
			}
			rules = append(rules, p.rule(resolve(item)))
		}
		return ""
	}}})
	if !given && len(p.faults) == 0 {
		p.fault(n, "topics is missing; add a list of rules under topics:")
	}
	return rules
}

// rule reads one rule.
func (p *parser) rule(n *yaml.Node) *rule {
	r := &rule{node: n, at: make(map[string]*yaml.Node), broken: make(map[string]bool)}
	var topic, pattern *yaml.Node
	ok := p.mapping(r, n, "rule", "topic: or pattern:, and settings for it", []field{
		{name: "topic", as: "pattern", read: func(n *yaml.Node) string {
			topic = n
			if msg := text(n, &r.Pattern); msg != "" {
				return msg
			}
			if strings.Contains(r.Pattern, "*") {
				return "topic must not contain *; for a pattern, write pattern: " + r.Pattern
			}
			return ""
		}},
		{name: "pattern", read: func(n *yaml.Node) string { pattern = n; return text(n, &r.Pattern) }},
		{name: "family", read: func(n *yaml.Node) string { return text(n, &r.Family) }},
		{name: "retention", read: func(n *yaml.Node) string {
			p.mapping(r, n, "retention", "bounds such as {age: 7d, bytes: 10GiB, messages: 1000000}", []field{
				{name: "age", as: "retention.age", read: func(n *yaml.Node) string { return duration(n, &r.MaxAge) }},
				{name: "bytes", as: "retention.bytes", read: func(n *yaml.Node) string { return size(n, &r.MaxBytes) }},
				{name: "messages", as: "retention.messages", read: func(n *yaml.Node) string { return number(n, &r.MaxMsgs) }},
			})
			return ""
		}},
		{name: "on_full", read: func(n *yaml.Node) string { return text(n, (*string)(&r.OnFull)) }},
		{name: "group_age", read: func(n *yaml.Node) string {
			if msg := duration(n, &r.GroupAge); msg != "" || r.GroupAge != 0 {
				return msg
			}
			return "group_age 0: at least 1s is allowed; the default is 7d"
		}},
		{name: "compaction", read: func(n *yaml.Node) string { return boolean(n, &r.Compaction) }},
		{name: "max_keys", read: func(n *yaml.Node) string {
			var v int64
			if msg := number(n, &v); msg != "" {
				return msg
			}
			if v < 1 {
				return "max_keys " + n.Value + ": at least 1 is allowed; without it, it is 1000000"
			}
			r.MaxKeys = int(v)
			return ""
		}},
		{name: "snapshot", read: func(n *yaml.Node) string {
			r.Snapshot = &topics.SnapshotRule{Every: defaultEvery}
			if !p.mapping(r, n, "snapshot", "a topic and an interval such as {topic: process.state.snapshot, every: 30s}", []field{
				{name: "topic", as: "snapshot.topic", read: func(n *yaml.Node) string { return text(n, &r.Snapshot.Topic) }},
				{name: "every", as: "snapshot.every", read: func(n *yaml.Node) string {
					if msg := duration(n, &r.Snapshot.Every); msg != "" || r.Snapshot.Every != 0 {
						return msg
					}
					return "every 0: at least 1s is allowed"
				}},
				{name: "key_source", as: "snapshot.key_source", read: func(n *yaml.Node) string { return text(n, &r.Snapshot.KeySource) }},
				{name: "batch_keys", as: "snapshot.batch_keys", read: func(n *yaml.Node) string { return p.keys(n, &r.Snapshot.BatchKeys) }},
			}) {
				r.broken["snapshot.topic"] = true
			} else if r.at["snapshot.topic"] == nil {
				p.fault(n, "snapshot has no target; add topic: process.state.snapshot")
				r.broken["snapshot.topic"] = true
			}
			return ""
		}},
		{name: "cloudevents", read: func(n *yaml.Node) string {
			p.mapping(r, n, "cloudevents", "a source such as {source: /orders, headers: true}", []field{
				{name: "source", as: "cloudevents.source", read: func(n *yaml.Node) string { return text(n, &r.CloudEvents.Source) }},
				{name: "headers", as: "cloudevents.headers", read: func(n *yaml.Node) string { return boolean(n, &r.CloudEvents.Headers) }},
			})
			return ""
		}},
		{name: "presence", read: func(n *yaml.Node) string { return boolean(n, &r.Presence) }},
		{name: "schema", as: "schema.mode", read: func(n *yaml.Node) string {
			if n.Kind != yaml.MappingNode {
				return text(n, (*string)(&r.Schema.Mode))
			}
			p.mapping(r, n, "schema", "a mode such as enforce, or {mode: enforce, compatibility: full}", []field{
				{name: "mode", as: "schema.mode", read: func(n *yaml.Node) string { return text(n, (*string)(&r.Schema.Mode)) }},
				{name: "of", as: "schema.of", read: func(n *yaml.Node) string { return text(n, &r.Schema.Of) }},
				{name: "compatibility", as: "schema.compatibility", read: func(n *yaml.Node) string { return text(n, (*string)(&r.Schema.Compatibility)) }},
				{name: "lenient", as: "schema.lenient", read: func(n *yaml.Node) string { return boolean(n, &r.Schema.Lenient) }},
				{name: "unversioned", as: "schema.unversioned", read: func(n *yaml.Node) string {
					var v int64
					if msg := number(n, &v); msg != "" {
						return msg
					}
					if v < 1 || v > topics.MaxSchemaVersions {
						return "unversioned " + n.Value + ": 1 to 500 are allowed"
					}
					r.Schema.Unversioned = int(v)
					return ""
				}},
				{name: "mirrors", as: "schema.mirrors", read: func(n *yaml.Node) string { return p.versions(n, &r.Schema.Mirrors) }},
			})
			return ""
		}},
		{name: "replicas", read: func(n *yaml.Node) string {
			var v int64
			if msg := number(n, &v); msg != "" {
				return msg
			}
			if v < 1 || v > 5 {
				return "replicas " + n.Value + ": 1 to 5 are allowed"
			}
			r.Replicas = int(v)
			return ""
		}},
		{name: "storage", read: func(n *yaml.Node) string { return text(n, (*string)(&r.Storage)) }},
		{name: "duplicate_window", read: func(n *yaml.Node) string {
			if msg := duration(n, &r.DuplicateWindow); msg != "" || r.DuplicateWindow != 0 {
				return msg
			}
			return "duplicate_window 0: at least 1s is allowed; the default is 2m"
		}},
		{name: "max_payload", read: func(n *yaml.Node) string {
			var v int64
			if msg := size(n, &v); msg != "" {
				return msg
			}
			r.MaxPayload = int(v)
			return ""
		}},
	})
	switch {
	case !ok:
		r.broken["pattern"] = true
	case topic != nil && pattern != nil:
		p.fault(pattern, "rule has both topic and pattern; remove one of them")
		r.broken["pattern"] = true
	case r.at["pattern"] == nil:
		p.fault(n, "rule has neither topic nor pattern; add one of them")
		r.broken["pattern"] = true
	}
	if r.broken["pattern"] {
		r.Pattern = "" // it takes part in no comparison
	}
	return r
}

// keys reads a list of keys.
func (p *parser) keys(n *yaml.Node, to *[]string) string {
	if n.Kind != yaml.SequenceNode {
		return "batch_keys is " + kind(n) + "; write a list of keys such as [a, b]"
	}
	if len(n.Content) == 0 {
		return "batch_keys is empty; add keys, or remove the field"
	}
	for _, item := range n.Content {
		var key string
		if msg := text(resolve(item), &key); msg != "" {
			p.fault(item, "%s", msg)
			continue
		}
		*to = append(*to, key)
	}
	return ""
}

// versions reads a list of versions of a schema.
func (p *parser) versions(n *yaml.Node, to *[]int) string {
	if n.Kind != yaml.SequenceNode {
		return "mirrors is " + kind(n) + "; write a list of versions such as [1, 3]"
	}
	if len(n.Content) == 0 {
		return "mirrors is empty; add versions, or remove the field"
	}
	if len(n.Content) > topics.MaxMirrors {
		return fmt.Sprintf("mirrors has %d versions; at most %d are allowed", len(n.Content), topics.MaxMirrors)
	}
	for _, item := range n.Content {
		var v int64
		if msg := number(resolve(item), &v); msg != "" {
			return "mirrors: " + msg
		}
		if v < 1 || v > topics.MaxSchemaVersions {
			return fmt.Sprintf("mirrors: version %d: 1 to %d are allowed", v, topics.MaxSchemaVersions)
		}
		*to = append(*to, int(v))
	}
	return ""
}

// mapping reads the fields of a mapping, with all that is wrong, and reports whether it was one. r
// is nil outside a rule.
func (p *parser) mapping(r *rule, n *yaml.Node, what, wants string, fields []field) bool {
	if n.Kind != yaml.MappingNode {
		p.fault(n, "%s is %s; write %s", what, kind(n), wants)
		return false
	}
	given := make(map[string]int, len(fields))
	for i := 0; i+1 < len(n.Content) && !p.full(); i += 2 {
		key, value := resolve(n.Content[i]), resolve(n.Content[i+1])
		at := n.Content[i]
		if key.Kind != yaml.ScalarNode {
			p.fault(at, "name of a field is %s; write a word", kind(key))
			continue
		}
		if key.ShortTag() == "!!merge" {
			p.fault(at, "<< is not supported; write the fields here, or an alias (*name) for a whole value")
			continue
		}
		if line, twice := given[key.Value]; twice {
			p.fault(at, "%s is already set in line %d; remove one of them", key.Value, line)
			continue
		}
		given[key.Value] = max(at.Line, 1)
		k := slices.IndexFunc(fields, func(f field) bool { return f.name == key.Value })
		if k < 0 {
			p.unknown(at, key.Value, what, fields)
			continue
		}
		name := fields[k].name
		if fields[k].as != "" {
			name = fields[k].as
		}
		if r != nil {
			r.at[name] = n.Content[i+1]
		}
		var msg string
		if value.Kind == yaml.ScalarNode && value.ShortTag() == "!!null" {
			msg = fields[k].name + " has no value; add one, or remove the field"
		} else {
			msg = fields[k].read(value)
		}
		if msg != "" {
			p.fault(n.Content[i+1], "%s", msg)
			if r != nil {
				r.broken[name] = true
			}
		}
	}
	return true
}

// unknown reports a field that does not exist.
func (p *parser) unknown(at *yaml.Node, name, what string, fields []field) {
	names := make([]string, len(fields))
	for i, f := range fields {
		names[i] = f.name
	}
	hint := "known fields are " + strings.Join(names, ", ")
	if len(names) == 1 {
		hint = "the only field is " + names[0]
	}
	if close := nearest(name, names); close != "" {
		hint = "did you mean " + close + "?"
	} else if place, known := belongs[name]; known && what == "rule" {
		hint = "write " + place
	}
	p.fault(at, "%s has no field %q; %s", what, shorten(name), hint)
}

// resolve is what an alias stands for. What it stands for is never an alias itself.
func resolve(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode && n.Alias != nil {
		return n.Alias
	}
	return n
}
