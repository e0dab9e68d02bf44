package topics

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"eventhub/jetstream/native"
	"eventhub/jetstream/schema/compat"
)

// MaxSchemaVersions is the maximum number of versions of one topic.
const MaxSchemaVersions = 500

// SchemaMode is what the hub does with events that break the schema of their topic.
type SchemaMode string

const (
	// SchemaOff asks for no schema.
	SchemaOff SchemaMode = "off"
	// SchemaWarn stores such events and counts them (event.TopicObserver.SchemaBroken).
	SchemaWarn SchemaMode = "warn"
	// SchemaEnforce refuses such events with schema_invalid.
	SchemaEnforce SchemaMode = "enforce"
)

// SchemaRule says what the schemas of a topic are for. The zero value is SchemaOff.
type SchemaRule struct {
	// Mode is SchemaOff, the default, SchemaWarn or SchemaEnforce.
	Mode SchemaMode
	// Of is the name under which the schemas are registered, of the form of a topic, so that the
	// topics of a pattern can share them. Default: the topic itself.
	Of string
	// Compatibility is what a new version has to be compatible with. Default compat.Backward.
	Compatibility compat.Mode
	// Lenient compares open content models leniently (compat.Includes).
	Lenient bool
	// Unversioned is the version of stored events that have no header x-schema-version. Default 1.
	Unversioned int
	// Mirrors are versions in which the events of the topic are copied to topics of their own
	// (Mirror), at most MaxMirrors. They need a rule for one topic, with SchemaWarn or
	// SchemaEnforce. projections.DualWrite makes the copies.
	Mirrors []int
}

// MaxMirrors is the most versions of SchemaRule.Mirrors.
const MaxMirrors = 4

// Mirror returns the topic that has the events of a topic in a version of their schema, which
// is <topic>.v<version>.
func Mirror(topic string, version int) string { return topic + ".v" + strconv.Itoa(version) }

// Asked reports whether events are compared with schemas.
func (r *SchemaRule) Asked() bool { return r.Mode != "" && r.Mode != SchemaOff }

// Name returns the name under which the schemas of a topic are registered.
func (r *SchemaRule) Name(topic string) string { return cmp.Or(r.Of, topic) }

// check says what is wrong with the rule.
func (r *SchemaRule) check(check func(ok bool, fields []string, format string, args ...any)) {
	check(r.Mode == "" || slices.Contains([]SchemaMode{SchemaOff, SchemaWarn, SchemaEnforce}, r.Mode), []string{fieldSchemaMode},
		"schema %q: off, warn or enforce is allowed", string(r.Mode))
	check(r.Of == "" || native.CheckTopic(r.Of) == nil, []string{fieldSchemaOf},
		"schema of %q is not a topic; use segments of letters, digits, _ and -, separated by dots", r.Of)
	names := make([]string, len(compat.Modes))
	for i, m := range compat.Modes {
		names[i] = string(m)
	}
	check(r.Compatibility == "" || r.Compatibility.Valid(), []string{fieldSchemaCompatibility},
		"compatibility %q: %s are allowed", string(r.Compatibility), strings.Join(names, ", "))
	check(r.Unversioned >= 0 && r.Unversioned <= MaxSchemaVersions, []string{fieldSchemaUnversioned},
		"unversioned %d: 1 to %d are allowed", r.Unversioned, MaxSchemaVersions)
}

// checkMirrors says what is wrong with the copies of a topic in other versions.
func (r *Rule) checkMirrors(check func(ok bool, fields []string, format string, args ...any)) {
	mirrors := r.Schema.Mirrors
	if len(mirrors) == 0 {
		return
	}
	fields := []string{fieldSchemaMirrors}
	check(r.Schema.Asked(), []string{fieldSchemaMirrors, fieldSchemaMode}, "mirrors need schemas; add mode: enforce, or mode: warn")
	check(len(mirrors) <= MaxMirrors, fields, "mirrors has %d versions; at most %d are allowed", len(mirrors), MaxMirrors)
	for i, version := range mirrors[:min(len(mirrors), MaxMirrors)] {
		check(version >= 1 && version <= MaxSchemaVersions, fields, "mirrors: version %d: 1 to %d are allowed", version, MaxSchemaVersions)
		check(!slices.Contains(mirrors[:i], version), fields, "mirrors has version %d twice; remove one of them", version)
	}
	if r.isPattern() {
		check(false, []string{fieldSchemaMirrors, fieldPattern}, "mirrors need a single topic, and this is a pattern, which could match its own mirrors; add a rule for that topic")
		return
	}
	check(!meet(r.Pattern, native.DeadLetterPrefix+"**"), []string{fieldSchemaMirrors, fieldPattern}, "dead letters have no schema of their own, so they have no mirrors; remove mirrors")
	for _, version := range mirrors {
		if topic := Mirror(r.Pattern, version); native.CheckTopic(r.Pattern) == nil && native.CheckTopic(topic) != nil {
			check(false, []string{fieldSchemaMirrors, fieldPattern}, "mirror %s is not a topic, because it has %d bytes and at most %d are allowed; choose a shorter topic", topic, len(topic), native.MaxTopic)
			return // one reason is enough
		}
	}
}
