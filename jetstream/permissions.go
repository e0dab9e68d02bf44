package jetstream

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
	"eventhub/jetstream/topics"
)

// NativeRights is what a policy says about a client, in the terms of topics and groups. All fields
// are required. The functions are called by one goroutine at a time.
type NativeRights struct {
	// Publish and Read report whether the client may publish to a topic, and read it without naming
	// a group.
	Publish, Read func(topic string) bool
	// Join reports whether the client may join a group, and Inspect whether it may see its figures.
	Join, Inspect func(topic, group string) bool
	// MayJoin reports whether there may be a group of the topic for which Join or Inspect holds.
	MayJoin func(topic string) bool
	// PublishReach and ReadReach are patterns that match every topic for which Publish and Read
	// hold.
	PublishReach, ReadReach []NativeReach
	// Topics and Groups are names that the policy names. The client has its rights for them also
	// before they exist.
	Topics, Groups []string
	// Administers reports that the policy allows to administer topics, which nobody may natively.
	Administers bool
}

// NativeReach is a pattern of topics, in which * is one segment and ** any number of segments.
type NativeReach struct {
	Pattern string
	// Rule is the number of the rule, for reports.
	Rule int
	// Whole reports that the right holds for all topics that the pattern matches.
	Whole bool
}

// NativePermissions is what a native client may publish and subscribe to: every other subject is
// refused. It never allows what the rights of the client do not.
type NativePermissions struct {
	Publish   []string
	Subscribe []string
	// Narrowed says, a line each, what the rights allow and the permissions do not.
	Narrowed []string
}

// maxPermissionBytes bounds the subjects of NativePermissions ("native_permissions"). They travel
// in one message of NATS, whose default bound is 1 MiB, and encoding it twice adds four fifths.
const maxPermissionBytes = 384 << 10

// fewSubjects is how many subjects of patterns are compared with each topic, so that subjects which
// they cover are not written as well.
const fewSubjects = 8

// depths are how many segments of a topic are written out, at most, for patterns with ** before the
// end. All topics have fewer than the first one.
var depths = []int{maxSegments, 32, 16, 8}

// Permissions returns the permissions of a native client for the topics and groups that exist
// now. inbox is the prefix of the subjects at which the client gets answers. With watch, the client
// may make consumers on the buckets that it may read, which lets it have the server send what it
// reads to any subject: leave that out unless the client shares an account with the hub anyway.
func (n NATS) Permissions(ctx context.Context, rights *NativeRights, inbox string, watch bool) (*NativePermissions, error) {
	known, err := n.bus.access.native.get(ctx)
	if err != nil {
		return nil, n.bus.conn.Unavailable(err)
	}
	return n.bus.access.permissions(known, rights, inbox, watch), nil
}

// permissions is NATS.Permissions with a map that was read.
func (a *access) permissions(known *nativeMap, rights *NativeRights, inbox string, watch bool) *NativePermissions {
	w := &permissionWriter{access: a, rights: rights, known: known, watch: watch}
	p, fits := w.write(inbox, maxSegments)
	for _, depth := range depths[1:] {
		if fits || !w.deep {
			break
		}
		p, fits = w.write(inbox, depth)
	}
	if !fits {
		a.obs.LimitReached("native_permissions")
		p.Narrowed = append(p.Narrowed, fmt.Sprintf("more than %d bytes of subjects: the last ones are left out; name fewer topics, or use patterns", maxPermissionBytes))
	}
	return p
}

// permissionWriter writes permissions down.
type permissionWriter struct {
	access *access
	rights *NativeRights
	known  *nativeMap
	watch  bool

	p     *NativePermissions
	seen  map[string]struct{}
	said  map[string]struct{} // lines of p.Narrowed
	bytes int                 // of p.Publish, with what encoding adds
	full  bool                // there is no room for another subject
	left  bool                // subjects were left out
	deep  bool                // fewer segments make fewer subjects
}

// allow adds subjects that the client may publish to.
func (w *permissionWriter) allow(subjects ...string) {
	if w.full {
		return
	}
	for _, s := range subjects {
		if _, twice := w.seen[s]; twice {
			continue
		}
		if w.bytes+len(s)+3 > maxPermissionBytes {
			w.full, w.left = true, true
			return
		}
		w.bytes += len(s) + 3
		w.seen[s] = struct{}{}
		w.p.Publish = append(w.p.Publish, s)
	}
}

func (w *permissionWriter) narrowed(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	if _, twice := w.said[line]; !twice {
		w.said[line] = struct{}{}
		w.p.Narrowed = append(w.p.Narrowed, line)
	}
}

// write returns the permissions, and whether they have room for everything.
func (w *permissionWriter) write(inbox string, depth int) (p *NativePermissions, fits bool) {
	w.p = &NativePermissions{Subscribe: []string{inbox + ".>"}}
	w.seen, w.said, w.bytes, w.full, w.left, w.deep = make(map[string]struct{}), make(map[string]struct{}), 0, false, false, false
	topics := slices.Clip(w.known.topics)
	planned := make(map[string]struct{})
	for _, name := range w.rights.Topics {
		_, known := w.known.named[name]
		if _, twice := planned[name]; known || twice || ValidTopic(name) != nil {
			continue
		}
		planned[name] = struct{}{}
		if t, free := w.access.planNatively(name, w.known); free {
			topics = append(topics, t)
		} else {
			w.narrowed("topic %s: the stream %s, which would store it, stores something else", name, t.stream)
		}
	}
	w.publishes(topics, depth)
	w.groups(topics)
	w.reads(topics, depth)
	if w.rights.Administers {
		w.narrowed("admin: native clients administer nothing; use the operations port")
	}
	return w.p, !w.left
}

// publishes allows to publish.
func (w *permissionWriter) publishes(topics []nativeTopic, depth int) {
	var written []string
	for _, r := range w.rights.PublishReach {
		if r.Whole {
			subjects, whole := w.subjects(r.Pattern, depth)
			w.allow(subjects...)
			written = append(written, subjects...)
			if !whole {
				w.narrowed("rule %d: publish %s: only topics of up to %d segments", r.Rule, r.Pattern, depth)
			}
		} else {
			w.narrowed("rule %d: publish %s: a rule before it denies some of these topics; the client may publish to the others that exist when it connects", r.Rule, r.Pattern)
		}
	}
	for i := range topics {
		t := &topics[i]
		if w.full || t.name == "" || !w.rights.Publish(t.name) {
			continue
		}
		// A pattern that is written has both forms of each subject.
		plain := plainSubject(t.name)
		if len(written) > fewSubjects || !slices.ContainsFunc(written, func(s string) bool { return overlap(s, plain) }) {
			w.allow(plain, keyedPattern(t.name))
		}
	}
}

// subjects is subjectsOf, as long as there is room.
func (w *permissionWriter) subjects(pattern string, depth int) (subjects []string, whole bool) {
	w.deep = w.deep || strings.Contains(pattern, "**.")
	if !w.full {
		subjects, whole = subjectsOf(pattern, depth)
	}
	w.left = w.left || subjects == nil
	return subjects, whole
}

// groups allows to pull and settle events, and to see the figures of groups.
func (w *permissionWriter) groups(topics []nativeTopic) {
	for i := range topics {
		t := &topics[i]
		if t.name == "" || w.full {
			continue
		}
		for _, group := range w.rights.Groups {
			if ValidGroup(group) == nil && !w.ordered(t.name, group) && w.rights.Join(t.name, group) {
				w.pull(t.stream, t.consumerNatively(group))
			}
		}
	}
	for _, g := range w.known.groups {
		if w.full || !w.rights.MayJoin(g.topic) {
			continue
		}
		join := w.rights.Join(g.topic, g.group)
		if join && g.ordered {
			w.narrowed("group %s of %s is ordered by key: its members get their events from a hub", g.group, g.topic)
		}
		if join && !g.ordered {
			w.pull(g.stream, g.consumer)
			_, alone := w.known.alone[g.stream]
			at := &streams.Topic{Name: g.topic, Stream: &streams.Stream{Name: g.stream, Family: !alone}}
			w.allow(w.access.conn.API + "DIRECT.GET.KV_" + native.GroupsBucket + ".$KV." + native.GroupsBucket + "." + records.GroupKey(at, g.group))
		} else if join || w.rights.Inspect(g.topic, g.group) {
			w.allow(w.access.conn.API + "CONSUMER.INFO." + g.stream + "." + g.consumer)
		}
	}
}

// ordered reports whether the group exists and is ordered.
func (w *permissionWriter) ordered(topic, group string) bool {
	_, ordered := w.known.ordered[groupName{topic, group}]
	return ordered
}

// pull allows to pull from a consumer and to settle its events. The subjects of acknowledgements
// have as many tokens as the server's own, in both forms: with fewer or more, an acknowledgement of
// one form might pass for one of another consumer in the other form.
func (w *permissionWriter) pull(stream, consumer string) {
	at := stream + "." + consumer
	w.allow(
		w.access.conn.API+"CONSUMER.INFO."+at,
		w.access.conn.API+"CONSUMER.MSG.NEXT."+at,
		"$JS.ACK."+at+".*.*.*.*.*",
		"$JS.ACK.*.*."+at+".*.*.*.*.>",
	)
}

// reads allows to read stored events.
func (w *permissionWriter) reads(topics []nativeTopic, depth int) {
	direct := w.access.conn.API + "DIRECT.GET."
	for i := range topics {
		t := &topics[i]
		switch {
		case w.full || t.name != "" && !w.rights.Read(t.name):
		case t.alone:
			w.readAll(t.stream)
			if t.bucket != "" {
				w.readAll(t.bucket)
				if w.watch {
					name := t.bucket[len("KV_"):]
					w.allow(w.access.conn.API+"CONSUMER.CREATE."+t.bucket+".*.$KV."+name+".>", "$JS.FC."+t.bucket+".>", "$JS.FC.*.*."+t.bucket+".>")
				}
			}
		case t.name != "":
			w.allow(direct+t.stream+"."+plainSubject(t.name), direct+t.stream+"."+keyedPattern(t.name))
			w.narrowed("read %s: its stream has other topics too, so only the newest event of a subject can be read natively", t.name)
		default:
			w.readFamily(t.stream, depth)
		}
	}
}

// readAll allows to read everything in a stream.
func (w *permissionWriter) readAll(stream string) {
	w.allow(
		w.access.conn.API+"STREAM.INFO."+stream,
		w.access.conn.API+"STREAM.MSG.GET."+stream,
		w.access.conn.API+"DIRECT.GET."+stream,
		w.access.conn.API+"DIRECT.GET."+stream+".>",
	)
}

// readFamily allows to read the newest events of subjects in the stream of a family.
func (w *permissionWriter) readFamily(stream string, depth int) {
	for _, r := range w.rights.ReadReach {
		family := w.access.familyOf(stream)
		if family == nil || !r.Whole {
			if !r.Whole {
				w.narrowed("rule %d: read %s: a rule before it denies some of these topics; of topics in the stream %s, the client can read those that the policy names", r.Rule, r.Pattern, stream)
			}
			continue
		}
		subjects, _ := w.subjects(r.Pattern, depth)
		said := false
		for _, s := range subjects {
			if !slices.ContainsFunc(family.Subjects(""), func(own string) bool { return overlap(own, s) }) {
				continue
			}
			// The server reads wildcards in the subject that a client asks for, and a * at the end
			// of a permission takes the > that selects longer topics too.
			if strings.HasSuffix(s, ".*") {
				w.narrowed("rule %d: read %s: of topics in the stream %s, the client can read those that have a group when it connects, and those that the policy names", r.Rule, r.Pattern, stream)
				continue
			}
			w.allow(w.access.conn.API + "DIRECT.GET." + stream + "." + s)
			if !said {
				w.narrowed("rule %d: read %s: the stream %s has other topics too, so only the newest event of a subject can be read natively", r.Rule, r.Pattern, stream)
				said = true
			}
		}
	}
}

// familyOf returns the rule of a family stream, or nil.
func (a *access) familyOf(stream string) *topics.Rule {
	for i := range a.rules {
		if r := &a.rules[i]; r.Family == stream {
			return r
		}
	}
	return nil
}
