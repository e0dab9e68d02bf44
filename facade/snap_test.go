package facade_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/acl"
	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
	"eventhub/sdk/go/wire"
)

// keptRules compact all topics below kept.
var keptRules = []topics.Rule{{Pattern: "kept.**", Compaction: true}}

// newSnapRig is a rig with topics that are compacted, and with a door for native clients. change
// may be nil.
func newSnapRig(t *testing.T, change func(*facade.Config)) *rig {
	t.Helper()
	return newRigOn(t, jetstream.Config{
		Server: natstest.Embed(t, t.TempDir(), natstest.Listening(rigToken)), Topics: keptRules,
	}, change)
}

// native is a NATS client of the rig's server.
func (r *rig) native(t *testing.T) (*nats.Conn, natsjs.JetStream) {
	t.Helper()
	nc, err := nats.Connect(r.bus.Admin().NATS().URL(), nats.Token(rigToken))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return nc, js
}

func (r *rig) get(t *testing.T, path string, headers ...string) answer {
	t.Helper()
	return r.ask(t, http.MethodGet, path, "", headers...)
}

// keep stores an event of a key.
func (r *rig) keep(t *testing.T, topic, key, payload string) *jetstream.Event {
	t.Helper()
	if _, err := r.bus.Publish(t.Context(), topic, []byte(payload), jetstream.PublishOptions{Key: key}); err != nil {
		t.Fatal(err)
	}
	e, err := r.bus.Keys(topic).Get(t.Context(), key)
	if err != nil || string(e.Payload) != payload {
		t.Fatal(e, err)
	}
	return e
}

// snapPath is the path of a key, with all escaped that is no letter.
func snapPath(topic, key string) string {
	var b strings.Builder
	for i := range len(key) {
		fmt.Fprintf(&b, "%%%02x", key[i])
	}
	return "/snap/" + topic + "/" + b.String()
}

const noSnapBody = `{"error":"not_found"}`

func (a *answer) isNoSnap() bool { return a.status == http.StatusNotFound && a.text == noSnapBody }

func TestSnap(t *testing.T) {
	t.Parallel()
	r := newSnapRig(t, nil)
	path := "/snap/kept.a/local:stt:1"
	if got := r.get(t, path); !got.isNoSnap() {
		t.Fatal("before the topic is there:", got)
	}
	r.keep(t, "kept.a", "other", "1")
	if got := r.get(t, path); !got.isNoSnap() || !slices.Contains(got.header.Values("Vary"), "Authorization") {
		t.Fatal("before the key is there:", got)
	}
	r.keep(t, "kept.a", "local:stt:1", `{"n":1}`)
	e := r.keep(t, "kept.a", "local:stt:1", `{"n":12345678901234567890, "b":"\u00e9"}`)
	got := r.get(t, path)
	tag := got.header.Get("ETag")
	if want := string(e.AppendRecord(nil)) + "\n"; got.status != http.StatusOK || got.text != want {
		t.Fatalf("got %d %s, want %s", got.status, got.text, want)
	}
	if !strings.HasPrefix(tag, `"`) || got.header.Get("Cache-Control") != "no-cache" || !slices.Contains(got.header.Values("Vary"), "Authorization") {
		t.Fatal(got.header)
	}
	head := r.ask(t, http.MethodHead, path, "")
	if head.status != http.StatusOK || head.text != "" || head.header.Get("ETag") != tag || head.header.Get("Content-Length") != strconv.Itoa(len(got.text)) {
		t.Fatal(head)
	}
	for _, match := range []string{tag, "W/" + tag, `"a,b", ` + tag, `W/"x" , W/` + tag + ` ,"y"`, "*", " * ", `"",` + tag} {
		for _, method := range []string{http.MethodGet, http.MethodHead} {
			got := r.ask(t, method, path, "", "If-None-Match", match)
			if got.status != http.StatusNotModified || got.text != "" || got.header.Get("ETag") != tag {
				t.Errorf("%s of %s: %+v", method, match, got)
			}
		}
	}
	if got := r.get(t, path, "If-None-Match", `"x"`, "If-None-Match", tag); got.status != http.StatusNotModified {
		t.Error("in a second header:", got)
	}
	for _, match := range []string{`"x"`, strings.Trim(tag, `"`), `"` + tag, `"x" y, ` + tag, `"x`, `W/*`, `,`, `w/` + tag} {
		if got := r.get(t, path, "If-None-Match", match); got.status != http.StatusOK {
			t.Errorf("%s: %d", match, got.status)
		}
	}
	r.keep(t, "kept.a", "local:stt:1", `{"n":2}`)
	if got := r.get(t, path, "If-None-Match", tag); got.status != http.StatusOK || got.header.Get("ETag") == tag || !strings.Contains(got.text, `{"n":2}`) {
		t.Fatal("after a change:", got)
	}

	// What removes a key is an event for subscribers.
	p := r.login(t)
	p.send(`{"op":"SUBSCRIBE","topic":"kept.a","group":"g"}`)
	p.want(`{"op":"OK"}`)
	gone := r.ask(t, http.MethodDelete, path, "", "Event-Id", "mine", "Event-Ts", "5", "X-Why", "test")
	if gone.status != http.StatusOK || gone.text != `{"id":"mine"}`+"\n" {
		t.Fatal(gone)
	}
	if got := p.next("EVENT", ""); got.Event.ID != "mine" || string(got.Event.Payload) != "null" {
		t.Fatal(got)
	}
	for _, match := range []string{"", "*"} {
		if got := r.get(t, path, "If-None-Match", match); !got.isNoSnap() {
			t.Fatal("after its removal:", got)
		}
	}
	if got := r.ask(t, http.MethodHead, path, ""); got.status != http.StatusNotFound || got.text != "" {
		t.Fatal(got)
	}
	r.keep(t, "kept.a", "local:stt:1", `{"n":3}`)
	if got := r.get(t, path); got.status != http.StatusOK {
		t.Fatal("after it came back:", got)
	}
}

// Keys are any UTF-8: however a client escapes them, they are decoded once.
func TestSnapKeys(t *testing.T) {
	t.Parallel()
	r := newSnapRig(t, nil)
	keys := []string{
		"a", "local:stt:1", "a.b", ".", "..", "a/b", "/", "//", "a//b/", "100%", "%2F", "%252F", "ä€😀", "a b", "a+b", "?x=1&y#z", "*", ">", "~", `"\`,
		"=2F", ";", "\x00\x7f", "\u2028", "kept.a", strings.Repeat("k", 512),
	}
	for i, key := range keys {
		r.keep(t, "kept.keys", key, strconv.Itoa(i))
	}
	for i, key := range keys {
		paths := []string{snapPath("kept.keys", key), snapPath("k%65pt.keys", key), "/snap/kept.keys/" + url.PathEscape(key)}
		if !strings.ContainsAny(key, "%?#\x00\x7f") {
			paths = append(paths, (&url.URL{Path: "/snap/kept.keys/" + key}).EscapedPath())
		}
		for _, path := range paths {
			got := r.get(t, path)
			if got.status != http.StatusOK || !strings.HasSuffix(got.text, `"payload":`+strconv.Itoa(i)+"}\n") {
				t.Errorf("%q as %s: %d %s", key, path, got.status, got.text)
			}
		}
	}
	for _, key := range keys {
		if got := r.ask(t, http.MethodDelete, snapPath("kept.keys", key), ""); got.status != http.StatusOK {
			t.Errorf("%q: %d %s", key, got.status, got.text)
		}
		if got := r.get(t, snapPath("kept.keys", key)); !got.isNoSnap() {
			t.Errorf("%q: %d %s", key, got.status, got.text)
		}
	}
}

func TestSnapRefusals(t *testing.T) {
	t.Parallel()
	r := newSnapRig(t, nil)
	r.keep(t, "kept.a", "k", "1")
	r.keep(t, "plain", "k", "1")
	for _, c := range []struct {
		method, path string
		status       int
		code, names  string
	}{
		{"GET", "/snap/kept.a/", 400, "bad_options", "key"},
		{"GET", "/snap/kept.a/%ff", 400, "bad_options", "key"},
		{"GET", "/snap/kept.a/" + strings.Repeat("k", 513), 400, "bad_options", "512"},
		{"DELETE", "/snap/kept.a/", 400, "bad_options", "key"},
		{"DELETE", "/snap/kept.a/%ff", 400, "bad_options", "key"},
		{"GET", "/snap/kept..a/k", 400, "bad_topic", ""},
		{"GET", "/snap/kept%2Fa/k", 400, "bad_topic", ""},
		{"GET", "/snap/kept.*", 400, "bad_topic", ""},
		{"GET", "/snap/kept.>", 400, "bad_topic", ""},
		{"DELETE", "/snap/kept.*/k", 400, "bad_topic", ""},
		{"GET", "/snap", 404, "not_found", ""},
		{"GET", "/snap/", 404, "not_found", ""},
		{"GET", "/snap/plain", 400, "bad_topic", "not compacted"},
		{"GET", "/snap/kept.a?limit=0", 400, "bad_options", "limit must be an integer from 1 to 1000"},
		{"GET", "/snap/kept.a?limit=1001", 400, "bad_options", "limit must be an integer from 1 to 1000"},
		{"GET", "/snap/kept.a?limit=", 400, "bad_options", "limit"},
		{"GET", "/snap/kept.a?limit=1&limit=1", 400, "bad_options", "limit"},
		{"GET", "/snap/kept.a?limit=1e2", 400, "bad_options", "limit"},
		{"GET", "/snap/kept.a?offset=-1", 400, "bad_options", "offset must be an integer from 0 to"},
		{"GET", "/snap/kept.a?offset=99999999999999999999", 400, "bad_options", "offset must be an integer from 0 to"},
		{"GET", "/snap/kept.a?consistent=yes", 400, "bad_options", "consistent"},
		{"GET", "/snap/kept.a?consistent=true&consistent=true", 400, "bad_options", "consistent"},
		{"GET", "/snap/kept.a?limit=%zz", 400, "bad_options", "query"},
		{"GET", "/snap/kept.a?a;b", 400, "bad_options", "query"},
		{"GET", "/snap/kept.a?keys=", 400, "bad_options", "key"},
		{"GET", "/snap/kept.a?keys=%ff", 400, "bad_options", "key"},
		{"GET", "/snap/kept.a?keys=k&limit=5", 400, "bad_options", "keys"},
		{"GET", "/snap/kept.a?keys=k&offset=0", 400, "bad_options", "keys"},
		{"GET", "/snap/kept.a?" + strings.Repeat("keys=k&", 1001), 400, "bad_options", "1000"},
	} {
		got := r.ask(t, c.method, c.path, "")
		if got.status != c.status || got.Code != c.code || !strings.Contains(got.Error, c.names) {
			t.Errorf("%s %.60s: %d %s, want %d %s", c.method, c.path, got.status, got.text, c.status, c.code)
		}
	}
	if got := r.ask(t, http.MethodDelete, "/snap/kept.a/k", "", "Event-Key", "j"); got.Code != "bad_options" {
		t.Error(got)
	}
	for path, allow := range map[string][]string{"/snap/kept.a": {"GET", "HEAD"}, "/snap/kept.a/a%2Fb": {"GET", "HEAD", "DELETE"}} {
		if got := r.post(t, path, "1"); got.status != http.StatusMethodNotAllowed || !slices.Equal(got.header.Values("Allow"), allow) {
			t.Errorf("%s: %+v", path, got)
		}
	}
	if got := r.get(t, "/snap/kept.a/k"); got.status != http.StatusOK {
		t.Error("something was removed:", got)
	}
}

func TestSnapPolicy(t *testing.T) {
	t.Parallel()
	v := newVerifier(t)
	r := newSnapRig(t, func(cfg *facade.Config) { cfg.Auth = facade.Tokens(v) })
	r.keep(t, "kept.a", "k", "1")
	reader, writer, groups := grant(t, "reader", "subscribe:kept.*"), grant(t, "writer", "publish:kept.*"), sign(t, acl.Grant{Subject: "groups", Policy: []byte(
		`{"rules":[{"effect":"allow","action":"subscribe","topics":["kept.*"],"groups":["g"]}]}`)})
	for _, c := range []struct {
		token, method, path string
		status              int
		code                string
	}{
		{"", "GET", "/snap/kept.a/k", 401, "no_token"},
		{"x", "GET", "/snap/kept.a/k", 401, "bad_token"},
		{"x", "GET", "/snap/kept.a?limit=0", 401, "bad_token"},
		{"x", "DELETE", "/snap/kept.a/k", 401, "bad_token"},
		{reader, "GET", "/snap/kept.a/k", 200, ""},
		{reader, "GET", "/snap/kept.a", 200, ""},
		{reader, "GET", "/snap/kept.a?keys=k", 200, ""},
		{reader, "DELETE", "/snap/kept.a/k", 403, "forbidden"},
		{reader, "DELETE", "/snap/kept.a/", 403, "forbidden"},
		{reader, "GET", "/snap/other.a/k", 403, "forbidden"},
		{reader, "GET", "/snap/other.a?limit=0", 403, "forbidden"},
		{reader, "GET", "/snap/kept.a.b", 403, "forbidden"},
		{groups, "GET", "/snap/kept.a/k", 403, "forbidden"},
		{writer, "GET", "/snap/kept.a/k", 403, "forbidden"},
		{writer, "GET", "/snap/kept.a/none", 403, "forbidden"},
		{writer, "GET", "/snap/kept.none", 403, "forbidden"},
		{writer, "GET", "/snap/kept.a?keys=k", 403, "forbidden"},
		{writer, "DELETE", "/snap/kept.a/k", 200, ""},
	} {
		got := r.ask(t, c.method, c.path, "", "Authorization", "Bearer "+c.token)
		if got.status != c.status || got.Code != c.code || !slices.Contains(got.header.Values("Vary"), "Authorization") {
			t.Errorf("%s %s: %d %s, want %d %s", c.method, c.path, got.status, got.text, c.status, c.code)
		}
	}
	if got := r.get(t, "/snap/kept.a/k"); !got.isNoSnap() {
		t.Error(got)
	}
}

func TestRemovalsCountAsPublishes(t *testing.T) {
	t.Parallel()
	r := newSnapRig(t, func(cfg *facade.Config) { cfg.Limits.TopicRate, cfg.Limits.TopicBurst = 1, 2 })
	r.keep(t, "kept.a", "k", "1")
	codes := map[int]int{}
	for range 4 {
		codes[r.ask(t, http.MethodDelete, "/snap/kept.a/k", "").status]++
	}
	if codes[http.StatusOK] < 2 || codes[http.StatusTooManyRequests] < 1 {
		t.Error(codes)
	}
}

// The tag is that of the event, wherever it was read.
func TestSnapOfWhatTheStreamHasDropped(t *testing.T) {
	t.Parallel()
	r := newSnapRig(t, nil)
	r.keep(t, "kept.a", "k", `{"n":1}`)
	p := r.login(t)
	p.send(`{"op":"PUBLISH","topic":"kept.a","payload":{"n":2},"opts":{"key":"k","headers":{"a":"b"},"tags":["t"],"sid":"s"}}`)
	p.next("OK", "")
	before := r.get(t, "/snap/kept.a/k")
	_, js := r.native(t)
	r.awaitItems(t, "/snap/kept.a", 1, `{"n":2}`)
	stream, err := js.Stream(t.Context(), "kept=2Ea")
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	after := r.get(t, "/snap/kept.a/k")
	if before.status != http.StatusOK || after.status != http.StatusOK || before.ID != after.ID || before.header.Get("ETag") != after.header.Get("ETag") {
		t.Errorf("before %+v\nafter  %+v", before, after)
	}
	if n := len(r.stored(t, "kept.a")); n != 0 {
		t.Errorf("%d events are left: this tested nothing", n)
	}
}

func TestSnapOfNativeEvents(t *testing.T) {
	t.Parallel()
	r := newSnapRig(t, nil)
	r.keep(t, "kept.n", "first", "0")
	nc, js := r.native(t)
	for key, payload := range map[string]string{"local=3A7": `{"n":7}`, "text": "no JSON", "bytes": "\xff\x00"} {
		if _, err := js.Publish(t.Context(), "keyed."+key+".kept.n", []byte(payload)); err != nil {
			t.Fatal(err)
		}
	}
	for path, payload := range map[string]string{"local:7": `{"n":7}`, "text": `"no JSON"`, "bytes": `"/wA="`} {
		if got := r.get(t, "/snap/kept.n/"+path); got.status != http.StatusOK || !strings.HasSuffix(got.text, `"payload":`+payload+"}\n") {
			t.Errorf("%s: %d %s", path, got.status, got.text)
		}
	}
	r.awaitItems(t, "/snap/kept.n", 4, "")
	for _, operation := range []string{"DEL", "PURGE"} {
		key := map[string]string{"DEL": "text", "PURGE": "bytes"}[operation]
		if _, err := js.PublishMsg(t.Context(), &nats.Msg{Subject: "keyed." + key + ".kept.n", Header: nats.Header{"KV-Operation": {operation}}}); err != nil {
			t.Fatal(err)
		}
		if got := r.get(t, "/snap/kept.n/"+key); !got.isNoSnap() {
			t.Error(operation, got)
		}
	}
	r.awaitItems(t, "/snap/kept.n", 2, "")
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
}

// page is what GET /snap/{topic} answers.
type page struct {
	Offset, Limit *int
	Count         int
	Items         []struct {
		ID, Topic, Key string
		Payload        json.RawMessage
	}
}

func (r *rig) page(t *testing.T, path string) (p page) {
	t.Helper()
	got := r.get(t, path)
	if got.status != http.StatusOK || got.header.Get("Cache-Control") != "no-cache" {
		t.Fatalf("%s: %d %s", path, got.status, got.text)
	}
	if err := json.Unmarshal([]byte(got.text), &p); err != nil || p.Count != len(p.Items) || p.Items == nil {
		t.Fatalf("%s: %.300s: %v", path, got.text, err)
	}
	return p
}

// keys are those of a page, in order.
func (p page) keys() string {
	var list []string
	for _, item := range p.Items {
		list = append(list, item.Key)
	}
	return strings.Join(list, " ")
}

// withoutTS is a text in which all ts are the same.
func withoutTS(text string) string { return tsField.ReplaceAllString(text, `"ts":0`) }

var tsField = regexp.MustCompile(`"ts":\d+`)

// awaitItems waits until a page has so many items, of which the newest has this payload, if it is
// not "": pages may lag.
func (r *rig) awaitItems(t *testing.T, path string, count int, newest string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d items at %s", count, path), func() bool {
		p := r.page(t, path)
		return p.Count == count && (newest == "" || count > 0 && string(p.Items[0].Payload) == newest)
	})
}

func TestPages(t *testing.T) {
	t.Parallel()
	r := newSnapRig(t, nil)
	if got := r.get(t, "/snap/kept.p"); got.text != `{"offset":0,"limit":100,"count":0,"items":[]}`+"\n" {
		t.Fatal("of a topic that is not there:", got)
	}
	const keys = 250
	for i := range keys {
		r.keep(t, "kept.p", "k"+strconv.Itoa(i), strconv.Itoa(i))
	}
	for i := 0; i < keys; i += 5 {
		if got := r.ask(t, http.MethodDelete, "/snap/kept.p/k"+strconv.Itoa(i), ""); got.status != http.StatusOK {
			t.Fatal(got)
		}
	}
	r.keep(t, "kept.p", "k7", `"again"`)
	want := []string{"k7"}
	for i := keys - 1; i > 0; i-- {
		if i%5 != 0 && i != 7 {
			want = append(want, "k"+strconv.Itoa(i))
		}
	}
	r.awaitItems(t, "/snap/kept.p?limit=1000", len(want), `"again"`)
	for _, consistent := range []string{"", "&consistent=true", "&consistent=false"} {
		for _, c := range []struct {
			query         string
			offset, limit int
		}{
			{"", 0, 100},
			{"limit=1000", 0, 1000},
			{"offset=0&limit=1", 0, 1},
			{"offset=100", 100, 100},
			{"offset=150&limit=7", 150, 7},
			{"offset=195", 195, 100},
			{"offset=199", 199, 100},
			{"offset=200", 200, 100},
			{"offset=1000000000&limit=1000", 1_000_000_000, 1000},
		} {
			p := r.page(t, "/snap/kept.p?"+c.query+consistent)
			from, to := min(c.offset, len(want)), min(c.offset+c.limit, len(want))
			if *p.Offset != c.offset || *p.Limit != c.limit || p.keys() != strings.Join(want[from:to], " ") {
				t.Errorf("%s%s: offset %d, limit %d\ngot  %s\nwant %s", c.query, consistent, *p.Offset, *p.Limit, p.keys(), want[from:to])
			}
		}
	}
	// The records are whole and in the form that they have everywhere; ts is that of the bucket,
	// which may be a little off.
	text := r.get(t, "/snap/kept.p?limit=2").text
	var want2 []byte
	for _, key := range want[:2] {
		e, err := r.bus.Keys("kept.p").Get(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		if want2 = e.AppendRecord(want2); key == want[0] {
			want2 = append(want2, ',')
		}
	}
	if want := `{"offset":0,"limit":2,"count":2,"items":[` + string(want2) + "]}\n"; withoutTS(text) != withoutTS(want) {
		t.Errorf("got  %s\nwant %s", text, want)
	}
	if got := r.ask(t, http.MethodHead, "/snap/kept.p", ""); got.status != http.StatusOK || got.text != "" {
		t.Error(got)
	}
}

// A page that is read consistently holds no key whose removal was answered before, and of each
// other the newest value.
func TestConsistentPages(t *testing.T) {
	t.Parallel()
	r := newSnapRig(t, nil)
	const keys = 25
	last := "k" + strconv.Itoa(keys-1)
	for i := range keys {
		r.keep(t, "kept.c", "k"+strconv.Itoa(i), "0")
	}
	r.awaitItems(t, "/snap/kept.c", keys, "")
	for i := range keys {
		key := "k" + strconv.Itoa(i)
		r.keep(t, "kept.c", key, "1")
		for _, item := range r.page(t, "/snap/kept.c?consistent=true").Items {
			if item.Key == key && string(item.Payload) != "1" {
				t.Fatalf("%s is %s", key, item.Payload)
			}
		}
		eventually(t, key+" is removed", func() bool {
			got := r.ask(t, http.MethodDelete, "/snap/kept.c/"+key, "")
			if got.status != http.StatusOK && got.status != http.StatusServiceUnavailable {
				t.Fatal(got)
			}
			return got.status == http.StatusOK
		})
		if p := r.page(t, "/snap/kept.c?consistent=true"); slices.Contains(strings.Fields(p.keys()), key) {
			t.Fatalf("%s is there", key)
		}
		if p := r.page(t, "/snap/kept.c?consistent=true&keys="+last+"&keys="+key); (p.keys() == last) != (i < keys-1) {
			t.Fatalf("%s: %s", key, p.keys())
		}
	}
}

// A page that is read consistently is not empty while there are keys, although all that the bucket
// had for it was removed.
func TestConsistentPageAfterRemoval(t *testing.T) {
	t.Parallel()
	r := newSnapRig(t, nil)
	const keys = 60
	for i := range keys {
		r.keep(t, "kept.r", "k"+strconv.Itoa(i), "0")
	}
	r.awaitItems(t, "/snap/kept.r?limit=1000", keys, "")
	for i := keys - 1; i > 0; i-- {
		if got := r.ask(t, http.MethodDelete, "/snap/kept.r/k"+strconv.Itoa(i), ""); got.status != http.StatusOK {
			t.Fatal(got)
		}
		if p := r.page(t, "/snap/kept.r?consistent=true&limit=1"); p.keys() != "k"+strconv.Itoa(i-1) {
			t.Fatalf("after the removal of k%d: %q", i, p.keys())
		}
	}
}

func TestSnapOfSomeKeys(t *testing.T) {
	t.Parallel()
	r := newSnapRig(t, nil)
	const keys = 100
	for _, topic := range []string{"kept.k", "plain.k"} {
		var query strings.Builder
		for i := range keys {
			key := "k/" + strconv.Itoa(i)
			r.keep(t, topic, key, strconv.Itoa(i))
			query.WriteString("&keys=" + url.QueryEscape(key))
		}
		eventually(t, "all keys", func() bool { return r.page(t, "/snap/"+topic+"?x=1"+query.String()).Count == keys })
		p := r.page(t, "/snap/"+topic+"?"+query.String())
		for i, item := range p.Items {
			if item.Key != "k/"+strconv.Itoa(i) || string(item.Payload) != strconv.Itoa(i) {
				t.Fatalf("item %d is %s %s", i, item.Key, item.Payload)
			}
		}
		for _, consistent := range []string{"", "&consistent=true"} {
			p := r.page(t, "/snap/"+topic+"?keys=k/9&keys=none&keys=k/3&keys=k/9&keys=.."+consistent)
			if p.keys() != "k/9 k/3" || p.Offset != nil || p.Limit != nil {
				t.Errorf("%s: %+v", topic, p)
			}
		}
	}
	if got := r.get(t, "/snap/kept.none?keys=a&keys=b"); got.text != `{"count":0,"items":[]}`+"\n" {
		t.Error(got)
	}
}

func TestPageBytes(t *testing.T) {
	t.Parallel()
	const size = 10_000
	r := newSnapRig(t, func(cfg *facade.Config) { cfg.Limits.PageBytes = 4 * size })
	payload := `"` + strings.Repeat("x", size) + `"`
	const keys = 20
	for i := range keys {
		r.keep(t, "kept.b", "k"+strconv.Itoa(i), payload)
	}
	r.keep(t, "kept.b", "large", `"`+strings.Repeat("x", 6*size)+`"`)
	eventually(t, "the large one is first", func() bool { return r.page(t, "/snap/kept.b").keys() == "large" })
	for _, consistent := range []string{"", "&consistent=true"} {
		var got []string
		for offset := 0; ; {
			p := r.page(t, "/snap/kept.b?limit=10&offset="+strconv.Itoa(offset)+consistent)
			if p.Count == 0 {
				break
			}
			if p.Count > 3 {
				t.Fatalf("a page has %d", p.Count)
			}
			got = append(got, strings.Fields(p.keys())...)
			offset += p.Count
		}
		if len(got) != keys+1 || got[0] != "large" || got[1] != "k19" || got[keys] != "k0" {
			t.Errorf("got %v", got)
		}
	}
	if r.seen.count("limit page_bytes") == 0 {
		t.Error("the limit was not counted")
	}
	if p := r.page(t, "/snap/kept.b?keys=large"); p.Count != 1 {
		t.Error(p)
	}
	if p := r.page(t, "/snap/kept.b?keys=k1&keys=k2&keys=k3"); p.Count != 3 {
		t.Error(p)
	}
	if got := r.get(t, "/snap/kept.b?keys=k1&keys=large"); got.status != http.StatusBadRequest || got.Code != "bad_options" || !strings.Contains(got.Error, "40000 bytes") {
		t.Errorf("%d %.300s", got.status, got.text)
	}
}

// A client that does not take its page loses it, and what the page held is given back.
func TestPagesThatAreNotTaken(t *testing.T) {
	t.Parallel()
	r := newSnapRig(t, func(cfg *facade.Config) {
		cfg.Limits.AnswerStall = 2 * time.Second
		cfg.Limits.PageTotal, cfg.Limits.PageBytes = 16<<20, 16<<20
		cfg.Limits.PrincipalPageTotal = 16 << 20 // one page takes it all
	})
	payload := `"` + strings.Repeat("x", 1<<20-2) + `"`
	for i := range 15 {
		r.keep(t, "kept.s", strconv.Itoa(i), payload)
	}
	eventually(t, "all keys", func() bool {
		events, err := r.bus.Keys("kept.s").Page(t.Context(), 0, 15)
		return err == nil && len(events) == 15
	})
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", r.http.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := fmt.Fprintf(conn, "GET /snap/kept.s HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %s\r\n\r\n", rigToken); err != nil {
		t.Fatal(err)
	}
	// The answer has begun, so the page is held; not all of it fits into what lies between the two
	// ends.
	_ = conn.SetReadDeadline(time.Now().Add(rigPatience))
	begin := make([]byte, len("HTTP/1.1 200"))
	if _, err := io.ReadFull(conn, begin); err != nil || string(begin) != "HTTP/1.1 200" {
		t.Fatalf("%q, %v", begin, err)
	}
	if got := r.get(t, "/snap/kept.s?limit=1"); got.status != http.StatusServiceUnavailable || got.Code != "overloaded" || got.header.Get("Retry-After") == "" {
		t.Errorf("%d %.300s", got.status, got.text)
	}
	if r.seen.count("limit principal_page_total") == 0 {
		t.Error("the limit was not counted")
	}
	eventually(t, "the page is given up", func() bool { return r.get(t, "/snap/kept.s?limit=1").status == http.StatusOK })
	if b, err := io.ReadAll(conn); err == nil && bytes.HasSuffix(b, []byte("\r\n0\r\n\r\n")) {
		t.Errorf("%d bytes came as if they were the whole page", len(b))
	}
}

// A tombstone can be published in every way that an event can.
func TestTombstones(t *testing.T) {
	t.Parallel()
	r := newSnapRig(t, nil)
	p := r.login(t)
	c, err := wire.Dial(t.Context(), "ws"+strings.TrimPrefix(r.ws.URL, "http"), wire.Options{Token: rigToken})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	for name, remove := range map[string]func(){
		"frame": func() {
			p.send(`{"op":"PUBLISH","topic":"kept.t","opts":{"key":"k","tombstone":true}}`)
			p.next("OK", "")
		},
		"frame with null": func() {
			p.send(`{"op":"PUBLISH","topic":"kept.t","payload":null,"opts":{"tombstone":true,"key":"k"}}`)
			p.next("OK", "")
		},
		"line": func() {
			got := r.post(t, "/publish/kept.t", `{"opts":{"key":"k","tombstone":true}}`, "Content-Type", "application/x-ndjson")
			if parseAnswer(t, got.text).ID == "" {
				t.Error(got)
			}
		},
		"line with null": func() {
			got := r.post(t, "/publish/kept.t", `{"opts":{"key":"k","tombstone":true},"payload":null}`, "Content-Type", "application/x-ndjson")
			if parseAnswer(t, got.text).ID == "" {
				t.Error(got)
			}
		},
		"body": func() {
			if got := r.post(t, "/publish/kept.t", " null\n", "Event-Key", "k", "Event-Tombstone", "true"); got.status != http.StatusOK {
				t.Error(got)
			}
		},
		"no body": func() {
			if got := r.post(t, "/publish/kept.t", "", "Event-Key", "k", "Event-Tombstone", "true"); got.status != http.StatusOK {
				t.Error(got)
			}
		},
		"client": func() {
			if id, err := c.Tombstone(t.Context(), "kept.t", "k"); err != nil || id == "" {
				t.Error(id, err)
			}
		},
	} {
		r.keep(t, "kept.t", "k", "1")
		remove()
		if got := r.get(t, "/snap/kept.t/k"); !got.isNoSnap() {
			t.Errorf("%s: %d %s", name, got.status, got.text)
		}
	}
	r.keep(t, "kept.t", "k", "1")
	if got := r.post(t, "/publish/kept.t", "2", "Event-Key", "k", "Event-Tombstone", "false"); got.status != http.StatusOK {
		t.Error(got)
	}
	for _, frame := range []string{
		`{"op":"PUBLISH","topic":"kept.t","opts":{"tombstone":true}}`,
		`{"op":"PUBLISH","topic":"kept.t","payload":1,"opts":{"key":"k","tombstone":true}}`,
		`{"op":"PUBLISH","topic":"kept.t","payload":"null","opts":{"key":"k","tombstone":true}}`,
		`{"op":"PUBLISH","topic":"kept.t","payload":1}`,
	} {
		if got := p.outcome(frame); got != "bad_options" {
			t.Errorf("%s: %s", frame, got)
		}
	}
	for _, headers := range [][]string{
		{"Event-Tombstone", "true"},
		{"Event-Key", "k", "Event-Tombstone", "yes"},
		{"Event-Key", "k", "Event-Tombstone", "true", "Event-Tombstone", "true"},
	} {
		if got := r.post(t, "/publish/kept.t", "null", headers...); got.status != http.StatusBadRequest || got.Code != "bad_options" {
			t.Errorf("%v: %d %s", headers, got.status, got.text)
		}
	}
	if got := r.post(t, "/publish/kept.t", "3", "Event-Key", "k", "Event-Tombstone", "true"); got.Code != "bad_options" {
		t.Error(got)
	}
	if got := r.get(t, "/snap/kept.t/k"); !strings.HasSuffix(got.text, `"payload":2}`+"\n") {
		t.Error(got)
	}
}
