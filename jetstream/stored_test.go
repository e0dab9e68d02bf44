package jetstream

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/publish"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/native"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/schemas"
	"eventhub/jetstream/topics"
)

// unstored are names in the source that look like those of stored things and are not in
// testdata/stored.txt, by the reason.
var unstored = map[string][]string{
	"a directory":                                {"eventhub-data", "eventhub-memory"},
	"a header of answers of the server":          {"Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Num-Pending", "Nats-Last-Sequence", "Nats-UpTo-Sequence"},
	"a header of heartbeats of the server":       {"Nats-Last-Consumer", "Nats-Consumer-Stalled"},
	"a header of pulls that end":                 {"Nats-Pending-Messages", "Nats-Pending-Bytes"},
	"a header of questions of the server":        {"Nats-Server-Xkey"},
	"a header of marks that only a server makes": {"Nats-Marker-Reason"},
	"a header of records for clients":            {"Event-Encoding"},
	"a subject of what hubs tell one another":    {"eventhub.presence"},
	"the value of a field of dead letters":       {"eventhub-delayed"},
}

// namesInSource returns the names in the source of this package, and of those below it, that are
// reserved for what hubs store.
func namesInSource(t *testing.T) map[string]bool {
	t.Helper()
	name := regexp.MustCompile(`"\$?(eventhub[_.-][\w.-]+|EVENTHUB[_.][\w.]+|(?:Nats|Event|KV)-[\w-]+|x-schema-\w+)"`)
	found := make(map[string]bool)
	err := filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.HasPrefix(path, "natstest") {
			return err
		}
		source, err := os.ReadFile(path)
		for _, m := range name.FindAllStringSubmatch(string(source), -1) {
			found[m[1]] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// varying are the parts of names and values that differ from run to run.
var varying = []struct {
	pattern *regexp.Regexp
	with    string
}{
	{regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}`), "<uuid>"},
	{regexp.MustCompile(`\d{4}-\d\d-\d\dT[\d:.]+Z`), "<time>"},
	{regexp.MustCompile(`\b(HELD\.|moving\.\w+\.|removing\.\w+\.)\w+`), "$1<nonce>"},
	{regexp.MustCompile(`\b(KV\.eventhub_listings)\.[\w-]+\.\w+`), "$1.<listing>.<record>"},
	{regexp.MustCompile(`\b(KV\.eventhub_attempts)\.[^.]+\.[^.]+\.\w+\.(0$|)`), "$1.<stream>.<group>.<time>.$2"},
	{regexp.MustCompile(`\b(KV\.eventhub_delays\..*)\.\w+\.`), "$1.<time>."},
	{regexp.MustCompile(`\b(KV\.eventhub_(?:attempts|delays)\..*)\.[1-9]\d*$`), "$1.<seq>"},
	{regexp.MustCompile(`~(\d+-)?[0-9a-f]{8}\b`), "~$1<nonce>"},
	{regexp.MustCompile(`\b[0-9a-f]{32}\b`), "<hash>"},
	{regexp.MustCompile(`\b[A-Z2-7]{26}\b`), "<nonce>"},
	// The stream of a source.
	{regexp.MustCompile(`(\{\{wildcard\(1\)\}\} \S+) \S+$`), "$1 <ident>"},
}

// A serverView collects what was ever seen on a server, in lines of which each stands for itself.
type serverView struct {
	t     *testing.T
	nc    *nats.Conn
	js    natsjs.JetStream
	hub   string // the name of the hub, which differs from run to run
	lines map[string]bool
	// came is what was published to the streams that were there at the last look, so that the view
	// has what is removed at once, too. There is no subscription before there is a stream, because
	// hubs rely on being told that nobody listens.
	came     chan *nats.Msg
	streams  map[string]bool
	restored bool // only the metadata counts
}

func viewOf(t *testing.T, url string, opts ...nats.Option) *serverView {
	t.Helper()
	nc, err := nats.Connect(url, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return &serverView{t: t, nc: nc, js: js, lines: make(map[string]bool), came: make(chan *nats.Msg, 10_000), streams: make(map[string]bool)}
}

func (v *serverView) normal(s string) string {
	if v.hub != "" {
		s = strings.ReplaceAll(s, v.hub, "<hub>")
	}
	for _, p := range varying {
		s = p.pattern.ReplaceAllString(s, p.with)
	}
	words := strings.Split(s, " ")
	for i, word := range words {
		if strings.Trim(word, "0123456789") == "" && word != "" {
			words[i] = "<n>"
		}
	}
	return strings.Join(words, " ")
}

func (v *serverView) add(format string, args ...any) { v.lines[fmt.Sprintf(format, args...)] = true }

// text returns each thing that is stored, and indented what it has.
func (v *serverView) text() string {
	var b strings.Builder
	thing := ""
	for _, line := range slices.Sorted(maps.Keys(v.lines)) {
		of, what, _ := strings.Cut(line, ": ")
		if of != thing {
			b.WriteString(of + "\n")
			thing = of
		}
		if what != "" {
			b.WriteString("\t" + what + "\n")
		}
	}
	return b.String()
}

// look adds what the server has now, and what was published since the last look.
func (v *serverView) look() {
	v.t.Helper()
	ctx := v.t.Context()
	streams := v.js.ListStreams(ctx)
	for info := range streams.Info() {
		name := info.Config.Name
		v.config("stream "+name, info.Config)
		stream, err := v.js.Stream(ctx, name)
		if err != nil {
			v.t.Fatal(err)
		}
		consumers := stream.ListConsumers(ctx)
		for c := range consumers.Info() {
			if c.Config.Durable != "" { // others end with who reads
				v.config("consumer "+name+" "+v.normal(c.Name), c.Config)
			}
		}
		if err := consumers.Err(); err != nil {
			v.t.Fatal(err)
		}
		for seq := uint64(1); ; {
			m, err := stream.GetMsg(ctx, seq, natsjs.WithGetMsgSubject(">"))
			if errors.Is(err, natsjs.ErrMsgNotFound) {
				break
			}
			if err != nil {
				v.t.Fatal(err)
			}
			// These are of the answer.
			for _, name := range []string{"Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp"} {
				m.Header.Del(name)
			}
			v.message(m.Subject, m.Header, m.Data)
			seq = m.Sequence + 1
		}
		if v.streams[name] {
			continue
		}
		v.streams[name] = true
		for _, subject := range info.Config.Subjects {
			if _, err := v.nc.ChanSubscribe(subject, v.came); err != nil {
				v.t.Fatal(err)
			}
		}
	}
	if err := streams.Err(); err != nil {
		v.t.Fatal(err)
	}
	if err := v.nc.Flush(); err != nil { // which also brings what was published before
		v.t.Fatal(err)
	}
	for len(v.came) > 0 {
		m := <-v.came
		v.message(m.Subject, m.Header, m.Data)
	}
}

// config adds the settings of a stream or a consumer that are not the server's zero values.
func (v *serverView) config(name string, cfg any) {
	v.t.Helper()
	text, err := json.Marshal(cfg)
	if err != nil {
		v.t.Fatal(err)
	}
	var settings any
	if err := json.Unmarshal(text, &settings); err != nil {
		v.t.Fatal(err)
	}
	leaves("", settings, func(path string, value any) {
		switch {
		case path == "metadata.eventhub.made":
			v.add("%s: %s", name, path)
		case v.restored || value == false || value == 0.0 || value == -1.0 || strings.HasPrefix(path, "metadata._nats."):
		case slices.Contains([]string{"name", "durable_name", "opt_start_seq"}, path):
		case strings.HasPrefix(path, "filter"): // of a queue, whose name differs
			v.add("%s: %s = %s", name, path, v.normal(fmt.Sprint(value)))
		default:
			v.add("%s: %s = %v", name, path, value)
		}
	})
}

// message adds the subject, the header and the JSON field names of a stored message.
func (v *serverView) message(subject string, header nats.Header, data []byte) {
	if v.restored {
		return
	}
	name := "message " + v.normal(subject)
	for key, values := range header {
		for _, value := range values {
			v.add("%s: header %s = %s", name, key, v.normal(value))
		}
	}
	var value any
	switch err := json.Unmarshal(data, &value); {
	case len(data) == 0:
		v.add("%s: empty", name)
	case err != nil:
		v.add("%s: bytes", name)
	default:
		v.add("%s", name)
		leaves("", value, func(path string, value any) {
			v.add("%s: %s", name, strings.TrimSpace(fmt.Sprintf("%s %T", path, value)))
		})
	}
}

// leaves calls f with the path and the value of each field of a JSON value that has no fields.
func leaves(path string, value any, f func(path string, value any)) {
	switch value := value.(type) {
	case map[string]any:
		for key, inner := range value {
			leaves(strings.TrimPrefix(path+"."+key, "."), inner, f)
		}
	case []any:
		for _, inner := range value {
			leaves(path+"[]", inner, f)
		}
	default:
		f(path, value)
	}
}

// storedRules are topics of every kind.
var storedRules = []topics.Rule{
	{Pattern: "memory", Storage: topics.StorageMemory, MaxPayload: 1000},
	{Pattern: "state.*", Compaction: true, MaxAge: 2 * time.Hour},
	{Pattern: "family.**", Family: "family", MaxBytes: 1 << 20},
	{Pattern: "rejects", MaxMsgs: 10, OnFull: topics.OnFullReject},
	{Pattern: "few", MaxMsgs: 3, DuplicateWindow: 10 * time.Second},
	{Pattern: "cloud", CloudEvents: topics.CloudEventsRule{Source: "/here", Headers: true}},
	{Pattern: "typed", MaxAge: time.Hour, Schema: topics.SchemaRule{Mode: topics.SchemaEnforce}},
}

// TestStoredNames has a hub store something of everything, and compares the names of all that it
// stores, and how streams and consumers are set, with testdata/stored.txt. Hubs of two versions
// share what is stored: a name that changes needs a way for both to find it.
func TestStoredNames(t *testing.T) {
	t.Parallel()
	server := natstest.Embed(t, t.TempDir(), natstest.Listening("t"))
	b := open(t, Config{Server: server, Topics: storedRules, AckWait: 10 * time.Minute, moveWait: briefly, dueRetry: briefly})
	v := viewOf(t, server.ClientURL(), nats.Token("t"))
	v.hub = b.handles.hub
	for _, topic := range []string{
		"Orders.placed", "memory", "state.a", "family.a", "rejects", "few", "cloud", "typed", "gone", "dlq.any",
	} {
		if err := b.Admin().Topic(topic).Create(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	v.look()
	s := &storing{t, b, v}
	s.events()
	s.delayed()
	s.groups()
	s.letters()
	s.moves()
	s.losses()
	s.buckets()
	v.look()
	s.restored()

	got := v.text()
	Golden(t, "stored.txt", got)
	names := namesInSource(t)
	for why, unstored := range unstored {
		for _, name := range unstored {
			if !names[name] || strings.Contains(got, name) {
				t.Errorf("%s is not in the source any more, or is stored now; it was %s", name, why)
			}
			delete(names, name)
		}
	}
	for name := range names {
		if !strings.Contains(got, name) {
			t.Errorf("%s is in the source, and not in the golden file: have the test store it, or add it to unstored", name)
		}
	}
}

// storing is what has the hub store things.
type storing struct {
	t    *testing.T
	b    *Bus
	view *serverView
}

func (s *storing) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *storing) publish(topic, payload string, opts PublishOptions) event.Receipt {
	s.t.Helper()
	r, err := s.b.Publish(s.t.Context(), topic, []byte(payload), opts)
	s.must(err)
	return r
}

// has waits until a stream has a message of a subject, for what is stored without being waited for.
func (s *storing) has(stream, subject string) {
	s.t.Helper()
	eventually(s.t, subject, func() bool {
		at, err := s.view.js.Stream(s.t.Context(), stream)
		if err != nil {
			return false
		}
		_, err = at.GetMsg(s.t.Context(), 1, natsjs.WithGetMsgSubject(subject))
		return err == nil
	})
}

var everything = PublishOptions{
	ID: "mine", TS: 7, HasTS: true, Key: "Local:7.ä", SID: "s", Headers: map[string]string{"traceparent": "own"},
	Tags: []string{"a"}, CausedBy: []string{"x"},
}

func (s *storing) events() {
	for _, topic := range []string{"Orders.placed", "family.a", "cloud", "memory"} {
		s.publish(topic, "1", everything)
		s.publish(topic, "2", PublishOptions{})
	}
	none := uint64(0)
	s.publish("state.a", "1", PublishOptions{Key: "k", ExpectKeySequence: &none})
	filled(s.t, s.b, "state.a", "k", s.publish("state.a", "null", PublishOptions{Key: "k", Tombstone: true}))
	for _, key := range strings.Split("abcdefgh"[:fewReturned], "") {
		filled(s.t, s.b, "state.a", key, s.publish("state.a", "1", PublishOptions{Key: key}))
	}
	p := s.b.NewPublisher()
	p.CountFor("Client 1")
	_, err := p.Publish(s.t.Context(), "made", []byte("1"), PublishOptions{})
	s.must(err)

	register(s.t, s.b, "typed", schemas.Draft{Schema: json.RawMessage(hostV1), Description: "a host", By: "Client 1"})
	register(s.t, s.b, "typed", schemas.Draft{
		Schema: json.RawMessage(`{"type":"object","required":["name"],"properties":{"name":{"type":"string"}},"additionalProperties":false}`),
		Up:     json.RawMessage(`[{"rename":{"at":"/host","to":"name","required":true}}]`),
		Down:   json.RawMessage(`[{"rename":{"at":"/name","to":"host","required":true}}]`),
	})
	register(s.t, s.b, "typed", schemas.Draft{Schema: json.RawMessage(`{"type":"string"}`), Force: true})
	s.publish("typed", `"a"`, PublishOptions{})
}

func (s *storing) delayed() {
	late := everything
	late.Delay = time.Hour
	s.publish("Orders.placed", "1", late)
	s.publish("Orders.placed", "2", PublishOptions{Delay: time.Hour})
	s.view.look()
	late.ID = "cancelled"
	s.publish("Orders.placed", "1", late)
	s.must(s.b.NewPublisher().Cancel(s.t.Context(), "Orders.placed", "cancelled"))
	// This is as when the event was just due.
	met := &nats.Msg{Subject: cancelledPrefix + "met", Header: nats.Header{"Nats-TTL": {"600"}, "Event-Dropped": {"1"}}}
	_, err := s.b.conn.Write(s.t.Context(), publish.DelayedStream, met)
	s.must(err)
	take(s.t, s.b, "rejects", "g", SubscribeOptions{From: FromEarliest, Paused: true})
	publishAll(s.t, s.b, "rejects", numbers(10)...)
	// There is no room for this one.
	s.publish("rejects", "1", PublishOptions{ID: "due", Delay: time.Millisecond})
	s.has(publish.DelayedStream, duePrefix+">")
	s.view.look()
}

func (s *storing) groups() {
	const topic = "Orders.placed"
	// an event that is refused with a delay, and one that is given back unread
	opts := SubscribeOptions{From: FromEarliest, MaxInFlight: 1, Handles: true}
	k := take(s.t, s.b, topic, "Group 1", opts)
	s.must(k.next().Nack("later", time.Hour))
	<-k.ch
	s.must(k.sub.Stop(s.t.Context()))
	s.has("KV_"+native.AttemptsBucket, "$KV."+native.AttemptsBucket+".>")
	s.must(s.b.Group(topic, "Group 1").Pause(s.t.Context()))

	for name, opts := range map[string]SubscribeOptions{
		"in memory": {GroupTTL: time.Minute, CountFor: "Client 1"},
		"ttl":       {GroupTTL: time.Hour},
		"ordered":   {OrderByKey: true, Slots: 8},
	} {
		opts.From = FromEarliest
		k := take(s.t, s.b, topic, name, opts)
		s.must(k.next().Nack("later", time.Hour))
		s.must(k.next().Ack())
		s.view.look()
		s.must(k.sub.Stop(s.t.Context()))
	}
	k = take(s.t, s.b, "state.a", "many", SubscribeOptions{From: FromEarliest})
	for range fewReturned { // which are given back with one note
		<-k.ch
	}
	s.must(k.sub.Stop(s.t.Context()))
	take(s.t, s.b, "family.a", "Group 1", SubscribeOptions{})
	take(s.t, s.b, "state.a", "deleted", SubscribeOptions{})
	s.must(s.b.Group("state.a", "deleted").Delete(s.t.Context()))
	take(s.t, s.b, "state.a", "deleted", SubscribeOptions{})
}

// letters makes dead letters, one of which waits for room in its stream.
func (s *storing) letters() {
	const topic = "family.a"
	fail(s.t, s.b, topic, "g", "no", 2)
	redriveAll(s.t, s.b, LetterFilter{Topic: topic}, RedriveOptions{})
	s.has(putBackStream, putBackSubject+">")
	s.view.look()
	take(s.t, s.b, topic, "g", SubscribeOptions{}).payloads(2)
	k := take(s.t, s.b, "memory", "g", SubscribeOptions{From: FromEarliest, GroupTTL: time.Hour, MaxAttempts: 1, CountFor: "Client 1"})
	s.must(k.next().Nack("no", 0))
	s.has("dlq", "event.dlq.memory")
	redriveAll(s.t, s.b, LetterFilter{Topic: "memory"}, RedriveOptions{})
	s.view.look()

	dlq := deadStream(s.t, s.b)
	s.publish("memory", "1", everything)
	fail(s.t, s.b, "memory", "h", "no", 2)
	redriveAll(s.t, s.b, LetterFilter{Topic: "memory"}, RedriveOptions{ToTopic: true})
	s.view.look()
	s.publish("few", "1", PublishOptions{})
	fail(s.t, s.b, "few", "g", "no", 1)
	dlq.change(func(cfg *natsjs.StreamConfig) { cfg.MaxMsgs = 1 })
	k = take(s.t, s.b, "Orders.placed", "failing", SubscribeOptions{From: FromEarliest, MaxAttempts: 1, CountFor: "Client 1"})
	s.must(k.next().Nack("no", 0))
	s.has("KV_"+native.AttemptsBucket, "$KV."+native.AttemptsBucket+".=4Frders=2Eplaced.failing.>")
	dlq.change(func(cfg *natsjs.StreamConfig) { cfg.MaxMsgs = -1 })
	s.has("dlq", "event.dlq.Orders.placed")
}

// moves makes generations of groups.
func (s *storing) moves() {
	const topic = "Orders.placed"
	for _, name := range []string{"ttl", "in memory"} {
		take(s.t, s.b, topic, name, SubscribeOptions{}) // has no TTL any more
	}
	publishAll(s.t, s.b, topic, numbers(3)...)
	k := take(s.t, s.b, topic, "moved", SubscribeOptions{From: FromEarliest})
	g := s.b.Group(topic, "moved")
	first := k.next()
	s.must(k.next().Ack())
	_, err := g.Bookmarks().Put(s.t.Context(), "here/1")
	s.must(err)
	s.must(first.Nack("no", 0))
	_, err = g.Move(s.t.Context(), InPlace)
	s.must(err)
	_, err = g.Move(s.t.Context(), AtBookmark("here/1"))
	s.must(err)
	s.must(k.sub.Stop(s.t.Context()))
	s.must(s.b.Admin().Topic("gone").Delete(s.t.Context(), DeleteOptions{}))
}

// losses has a group lose events, and removes some.
func (s *storing) losses() {
	k := take(s.t, s.b, "few", "lost", SubscribeOptions{MaxInFlight: 1})
	publishAll(s.t, s.b, "few", "1")
	d := k.next()
	publishAll(s.t, s.b, "few", numbers(8)...)
	s.must(d.Ack())
	k.payloads(1)
	s.has("KV_"+records.RetentionBucket, "$KV."+records.RetentionBucket+".lost.>")
	_, err := s.b.Admin().Topic("few").Purge(s.t.Context(), PurgeOptions{All: true})
	s.must(err)

	k = take(s.t, s.b, "rejects", "g", SubscribeOptions{From: FromEarliest})
	k.payloads(10)
	eventually(s.t, "settled events are removed", func() bool { return streamInfo(s.t, s.b, "rejects").State.FirstSeq > 1 })
	k.payloads(1) // which was due and had no room
	_, err = s.b.Group("rejects", "g").Move(s.t.Context(), FromEarliest)
	s.must(err)
}

// buckets fills those that are made with their first entry.
func (s *storing) buckets() {
	ctx := s.t.Context()
	_, err := s.b.Keys("state.a").List(ctx, ListOptions{Limit: 1})
	s.must(err)
	s.must(s.b.Admin().Revocations().Put(ctx, "token", []byte(`{"own":1}`), time.Hour))
	c, err := s.b.Collections().Open(ctx, "own_state")
	s.must(err)
	revision, err := c.Put(ctx, "Key 1", []byte("1"), map[string]string{"own": "1"}, 0)
	s.must(err)
	s.view.look()
	_, err = c.Delete(ctx, "Key 1", nil, revision)
	s.must(err)
	_, err = s.b.Collections().OpenWithTTL(ctx, "own_ttl", time.Hour)
	s.must(err)
}

// restored restores all that to another server.
func (s *storing) restored() {
	server := natstest.Run(s.t)
	v := viewOf(s.t, server.ClientURL())
	v.lines = s.view.lines
	err := openStore(s.t, Config{URL: server.ClientURL()}).Restore(s.t.Context(), backup(s.t, s.b), RestoreOptions{Progress: func(uint64, uint64) {
		if !v.restored { // there is only the mark
			v.look()
			v.restored = true
		}
	}})
	s.must(err)
	v.look()
}
