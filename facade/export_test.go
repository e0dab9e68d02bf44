package facade_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/topics"
)

// fill publishes events id-1 to id-n, of three keys and five correlation ids.
func (r *rig) fill(t *testing.T, topic string, n int, payload func(i int) string) {
	t.Helper()
	pub := r.bus.NewPublisher()
	for i := 1; i <= n; i++ {
		opts := jetstream.PublishOptions{ID: fmt.Sprintf("id-%d", i), Key: fmt.Sprintf("k%d", i%3), Headers: map[string]string{"correlationId": strconv.Itoa(i % 5)}}
		if err := pub.PublishAsync(t.Context(), topic, []byte(payload(i)), opts, func(_ jetstream.Receipt, err error) {
			if err != nil {
				t.Error(err)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	if err := pub.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func number(i int) string { return strconv.Itoa(i) }

// records are those of an NDJSON answer.
func records(tb testing.TB, text string) (ids []string) {
	tb.Helper()
	for line := range strings.Lines(text) {
		var got struct{ ID string }
		if err := json.Unmarshal([]byte(line), &got); err != nil {
			tb.Fatalf("%q: %v", line, err)
		}
		ids = append(ids, got.ID)
	}
	return ids
}

// idsFrom are id-from, id-from+step and so on, up to id-to.
func idsFrom(from, to, step int) (ids []string) {
	for i := from; i <= to; i += step {
		ids = append(ids, fmt.Sprintf("id-%d", i))
	}
	return ids
}

type replayed struct {
	Topic     string
	Truncated *bool
	First     *string
	Count     int
	Events    []struct {
		ID, Topic, Key string
		TS             int64
		Payload        json.RawMessage
	}
}

func (r *rig) replay(t *testing.T, query string) (got replayed) {
	t.Helper()
	a := r.ask(t, http.MethodGet, "/replay?"+query, "")
	if a.status != http.StatusOK {
		t.Fatalf("%s: %d %s", query, a.status, a.text)
	}
	if err := json.Unmarshal([]byte(a.text), &got); err != nil {
		t.Fatalf("%s: %s: %v", query, a.text, err)
	}
	if got.Count != len(got.Events) {
		t.Errorf("%s: the count is %d, there are %d events", query, got.Count, len(got.Events))
	}
	return got
}

func TestReplay(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	const n = 2_500
	r.fill(t, "replayed", n, number)
	all := r.replay(t, "topic=replayed&limit=5000")
	if len(all.Events) != n || all.Topic != "replayed" || all.Truncated != nil || all.First != nil {
		t.Fatalf("%d events of %s, truncated %v", len(all.Events), all.Topic, all.Truncated)
	}
	if got := r.replay(t, "topic=replayed"); len(got.Events) != 1000 || got.Events[999].ID != "id-1000" {
		t.Errorf("without a limit there are %d events", len(got.Events))
	}
	if got := r.replay(t, "topic=none"); got.Topic != "none" || len(got.Events) != 0 || got.Events == nil {
		t.Errorf("a topic that does not exist: %+v", got)
	}
	// pages that tear milliseconds apart
	var ids []string
	for query := "from=earliest"; ; {
		page := r.replay(t, "topic=replayed&limit=99&"+query)
		for _, e := range page.Events {
			ids = append(ids, e.ID)
		}
		if page.Count < 99 {
			break
		}
		query = "from=afterId&afterId=" + ids[len(ids)-1]
	}
	if !slices.Equal(ids, idsFrom(1, n, 1)) {
		t.Errorf("the pages have %d events", len(ids))
	}
	ts := all.Events[n/2].TS
	got := r.replay(t, fmt.Sprintf("topic=replayed&limit=5000&from=ts&ts=%d", ts))
	i := slices.IndexFunc(all.Events, func(e struct {
		ID, Topic, Key string
		TS             int64
		Payload        json.RawMessage
	},
	) bool {
		return e.TS >= ts
	})
	if len(got.Events) != n-i || got.Events[0].ID != all.Events[i].ID {
		t.Errorf("from ts there are %d events, want %d", len(got.Events), n-i)
	}
	a := r.ask(t, http.MethodGet, "/replay?topic=replayed&limit=1", "")
	if a.header.Get("Event-Newest-Id") != "id-2500" || a.header.Get("Cache-Control") != "no-cache" {
		t.Errorf("headers %v", a.header)
	}
}

func TestExport(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	const n = 2_500
	r.fill(t, "exported", n, func(i int) string { return fmt.Sprintf("{\"n\":\n%d}", i) })
	a := r.ask(t, http.MethodGet, "/export?topic=exported&ndjson=1", "")
	if ids := records(t, a.text); a.status != http.StatusOK || a.header.Get("Content-Type") != "application/x-ndjson" || !slices.Equal(ids, idsFrom(1, n, 1)) {
		t.Errorf("%d with %d events", a.status, len(ids))
	}
	if _, there := a.header["Event-Truncated"]; there {
		t.Error("nothing is gone, but the answer says so")
	}
	a = r.ask(t, http.MethodGet, "/export?topic=exported", "")
	var list []struct{ ID string }
	if err := json.Unmarshal([]byte(a.text), &list); err != nil || len(list) != n || a.header.Get("Content-Type") != "application/json" {
		t.Errorf("an array of %d events: %v", len(list), err)
	}
	for _, c := range []struct {
		query string
		want  []string
	}{
		{"&afterId=id-2498", idsFrom(2499, n, 1)},
		{"&key=k1&limit=3", idsFrom(1, 7, 3)},
		{"&header=correlationid:4&limit=2", []string{"id-4", "id-9"}},
		{"&header=correlationId:4&key=k1&limit=2", []string{"id-4", "id-19"}},
		{"&header=correlationId:4&header=other:1", nil},
		{"&fromTs=0&toTs=1", nil},
		{"&fromTs=9007199254740991", nil},
		{"&toTs=9007199254740991", idsFrom(1, n, 1)},
	} {
		if got := records(t, r.ask(t, http.MethodGet, "/export?topic=exported&ndjson=1"+c.query, "").text); !slices.Equal(got, c.want) {
			t.Errorf("%s: %d events, want %d", c.query, len(got), len(c.want))
		}
	}
	if a := r.ask(t, http.MethodGet, "/export?topic=none&ndjson=1", ""); a.status != http.StatusOK || a.text != "" {
		t.Errorf("a topic that does not exist: %d %q", a.status, a.text)
	}
	if a := r.ask(t, http.MethodGet, "/export?topic=none", ""); a.text != "[]\n" {
		t.Errorf("a topic that does not exist: %q", a.text)
	}
	if a := r.ask(t, http.MethodHead, "/export?topic=exported&ndjson=1", ""); a.status != http.StatusOK || a.header.Get("Event-Newest-Id") != "id-2500" || a.text != "" {
		t.Errorf("HEAD: %d %v", a.status, a.header)
	}
}

// TestExportTrailer looks at what follows a complete answer.
func TestExportTrailer(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	r.fill(t, "trailed", 3, number)
	for _, path := range []string{"/export?topic=trailed&ndjson=1", "/replay?topic=trailed"} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, r.http.URL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+rigToken)
		res, err := r.http.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.Copy(io.Discard, res.Body)
		_ = res.Body.Close()
		if got := res.Trailer.Get("Event-Last-Id"); err != nil || got != "id-3" || res.Trailer.Get("Event-Last-Position") != "trailed@3" {
			t.Errorf("%s: the last id is %q, %v", path, got, err)
		}
	}
}

// TestExportCompressed decodes what the hub encodes, and compares it with the plain answer.
func TestExportCompressed(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	r.fill(t, "packed", 2_000, func(i int) string { return `"` + strings.Repeat("x", 200) + number(i) + `"` })
	plain := r.ask(t, http.MethodGet, "/export?topic=packed&ndjson=1", "", "Accept-Encoding", "identity")
	for _, c := range []struct{ accept, coding string }{
		{"identity", ""},
		{"br, *", ""},
		{"gzip", "gzip"},
		{"zstd", "zstd"},
		{"gzip, deflate, br, zstd", "zstd"},
		{"GZIP;q=0.9, zstd;q=0.5", "gzip"},
		{"gzip;q=0, zstd;q=0", ""},
		{"gzip;q=x", ""},
	} {
		a := r.ask(t, http.MethodGet, "/export?topic=packed&ndjson=1", "", "Accept-Encoding", c.accept)
		text := []byte(a.text)
		switch c.coding {
		case "gzip":
			z, err := gzip.NewReader(strings.NewReader(a.text))
			if err != nil {
				t.Fatal(err)
			}
			if text, err = io.ReadAll(z); err != nil {
				t.Fatal(err)
			}
		case "zstd":
			z, err := zstd.NewReader(strings.NewReader(a.text))
			if err != nil {
				t.Fatal(err)
			}
			defer z.Close()
			if text, err = io.ReadAll(z); err != nil {
				t.Fatal(err)
			}
		}
		if a.header.Get("Content-Encoding") != c.coding || !bytes.Equal(text, []byte(plain.text)) || !slices.Contains(a.header.Values("Vary"), "Accept-Encoding") {
			t.Errorf("%s: coding %q, %d bytes, want %q, %d bytes", c.accept, a.header.Get("Content-Encoding"), len(text), c.coding, len(plain.text))
		}
		if c.coding != "" && len(a.text) > len(plain.text)/2 {
			t.Errorf("%s: %d bytes of %d", c.accept, len(a.text), len(plain.text))
		}
	}
}

// TestBadRanges sends queries that are wrong. Each gets its message and its status.
func TestBadRanges(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	r.fill(t, "t", 1, number)
	for _, c := range []struct {
		path    string
		status  int
		message string
	}{
		{"/replay", 400, "topic required"},
		{"/replay?topic=", 400, "topic required"},
		{"/export?topic=", 400, "topic required"},
		{"/export", 400, "topic required"},
		{"/replay?topic=t&from=latest", 400, "invalid replay range parameters"},
		{"/replay?topic=t&from=ts", 400, "invalid replay range parameters"},
		{"/replay?topic=t&from=ts&ts=x", 400, "invalid replay range parameters"},
		{"/replay?topic=t&from=ts&ts=-1", 400, "invalid replay range parameters"},
		{"/replay?topic=t&from=ts&ts=1&afterId=x", 400, "invalid replay range parameters"},
		{"/replay?topic=t&from=afterId", 400, "invalid replay range parameters"},
		{"/replay?topic=t&from=afterId&afterId=", 400, "invalid replay range parameters"},
		{"/replay?topic=t&ts=1", 400, "invalid replay range parameters"},
		{"/replay?topic=t&afterId=x", 400, "invalid replay range parameters"},
		{"/replay?topic=t&from=%zz", 400, "invalid replay range parameters"},
		{"/replay?topic=t&from=a;b", 400, "invalid replay range parameters"},
		{"/export?topic=t&afterId=", 400, "invalid replay range parameters"},
		{"/export?topic=t&fromTs=-1", 400, "invalid replay range parameters"},
		{"/replay?topic=t&limit=0", 400, "limit must be a positive number"},
		{"/replay?topic=t&limit=-1", 400, "limit must be a positive number"},
		{"/replay?topic=t&limit=many", 400, "limit must be a positive number"},
		{"/replay?topic=t&limit=", 400, "limit must be a positive number"},
		{"/export?topic=t&limit=1.5", 400, "limit must be a positive number"},
		{"/export?topic=t&fromTs=yesterday", 400, "range bounds must be numeric"},
		{"/export?topic=t&toTs=", 400, "range bounds must be numeric"},
		{"/export?topic=t&fromTs=1&toTs=NaN", 400, "range bounds must be numeric"},
		{"/export?topic=t&toTs=99999999999999999999", 400, "range bounds must be numeric"},
		{"/export?topic=t&fromTs=2&toTs=1", 400, "fromTs must be less than or equal to toTs"},
		{"/export?topic=t&ndjson=yes", 400, "ndjson must be 1 or 0."},
		{"/export?topic=t&ndjson=1&ndjson=0", 400, "ndjson must be given once."},
		{"/export?topic=t&tombstones=", 400, "tombstones must be 1 or 0."},
		{"/export?topic=t&fromts=1", 400, "There is no parameter fromts; there are topic, limit, key, header, afterId, tombstones, schemaVersion, fromTs, toTs, ndjson."},
		{"/replay?topic=t&ndjson=1", 400, "There is no parameter ndjson; there are topic, limit, key, header, afterId, tombstones, schemaVersion, from, ts."},
		{"/export?topic=t&key=", 400, "The parameter key is empty: 1 to 512 bytes are needed."},
		{"/export?topic=t&header=x", 400, "header must be NAME:VALUE, the header of an event and its value."},
		{"/export?topic=t&header=x:1&header=X:2", 400, "header names x twice."},
		{"/export?topic=t" + strings.Repeat("&header=x:1", 17), 400, "header is given 17 times: at most 16 are allowed."},
		{"/export?topic=t&afterId=nobody", 404, "no event of this topic has the id of afterId: it was not found among the last 100000 events"},
		{"/export?topic=a..b", 400, ""},
		{"/export?topic=a.*", 400, ""},
	} {
		a := r.ask(t, http.MethodGet, c.path, "")
		if a.status != c.status || c.message != "" && a.Error != c.message || a.Code == "" {
			t.Errorf("%s: %d %s, want %d %s", c.path, a.status, a.text, c.status, c.message)
		}
	}
	for _, path := range []string{"/replay?topic=t", "/export?topic=t"} {
		if a := r.post(t, path, "1"); a.status != http.StatusMethodNotAllowed {
			t.Errorf("POST %s: %d", path, a.status)
		}
	}
}

// TestExportAfterRetention says that the beginning is gone.
func TestExportAfterRetention(t *testing.T) {
	t.Parallel()
	r := newRigOn(t, jetstream.Config{Topics: []topics.Rule{{Pattern: "short", MaxMsgs: 10}}}, nil)
	r.fill(t, "short", 100, number)
	a := r.ask(t, http.MethodGet, "/export?topic=short&ndjson=1", "")
	if a.header.Get("Event-Truncated") != "true" || a.header.Get("Event-First-Id") != "id-91" || !slices.Equal(records(t, a.text), idsFrom(91, 100, 1)) {
		t.Errorf("%v: %s", a.header, a.text)
	}
	got := r.replay(t, "topic=short&from=ts&ts=0")
	if got.Truncated == nil || !*got.Truncated || got.First == nil || *got.First != "id-91" || got.Count != 10 {
		t.Errorf("%+v", got)
	}
	if got := r.replay(t, "topic=short&from=earliest"); got.Truncated != nil || got.Count != 10 {
		t.Errorf("what is left is what was asked for: %+v", got)
	}
	if got := r.replay(t, "topic=short&from=afterId&afterId=id-95"); got.Truncated != nil || got.Count != 5 {
		t.Errorf("the event is there: %+v", got)
	}
}

// TestExportTombstones marks them for those who ask.
func TestExportTombstones(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	for _, opts := range []jetstream.PublishOptions{{ID: "a", Key: "k"}, {ID: "b", Key: "k", Tombstone: true}} {
		if _, err := r.bus.Publish(t.Context(), "removed", []byte("null"), opts); err != nil {
			t.Fatal(err)
		}
	}
	plain := r.ask(t, http.MethodGet, "/export?topic=removed&ndjson=1", "").text
	marked := r.ask(t, http.MethodGet, "/export?topic=removed&ndjson=1&tombstones=1", "").text
	if strings.Contains(plain, "tombstone") || strings.Count(marked, `"payload":null,"tombstone":true}`) != 1 || len(records(t, marked)) != 2 {
		t.Errorf("plain:\n%smarked:\n%s", plain, marked)
	}

	// A CloudEvent that has an attribute of that name has the member once.
	headers := map[string]string{"ce-specversion": "1.0", "ce-id": "c", "ce-source": "/s", "ce-type": "removed", "ce-tombstone": "mine"}
	if _, err := r.bus.Publish(t.Context(), "removed", []byte("null"), jetstream.PublishOptions{ID: "c", Key: "k", Tombstone: true, Headers: headers}); err != nil {
		t.Fatal(err)
	}
	for query, want := range map[string]string{"": `"tombstone":"mine"`, "&tombstones=1": `"tombstone":true`} {
		text := r.ask(t, http.MethodGet, "/export?topic=removed&ndjson=1&afterId=b"+query, "", "Accept", "application/cloudevents+json").text
		if strings.Count(text, `"tombstone"`) != 1 || !strings.Contains(text, want) {
			t.Errorf("with %q: %s", query, text)
		}
	}
}

// begin starts an export and returns its body, of which nothing is read yet. The client's socket
// holds little.
func (r *rig) begin(ctx context.Context, t *testing.T, path, token string) io.ReadCloser {
	t.Helper()
	body, status := r.tryBegin(ctx, t, path, token)
	if status != http.StatusOK {
		t.Fatalf("%s: %d", path, status)
	}
	return body
}

func (r *rig) tryBegin(ctx context.Context, t *testing.T, path, token string) (body io.ReadCloser, status int) {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.http.URL+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	transport := &http.Transport{DisableCompression: true, DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, address)
		if tcp, ok := conn.(*net.TCPConn); ok {
			err = tcp.SetReadBuffer(64 << 10)
		}
		return conn, err
	}}
	t.Cleanup(transport.CloseIdleConnections)
	res, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = res.Body.Close() })
	return res.Body, res.StatusCode
}

// watched is a rig on a NATS server of its own, whose consumers can be counted.
type watched struct {
	*rig
	js natsjs.JetStream
}

func newWatched(t *testing.T, change func(*facade.Config)) watched {
	t.Helper()
	url := startNATS(t)
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return watched{newRigOn(t, jetstream.Config{URL: url}, change), js}
}

// consumers is how many there are on a topic's stream.
func (r watched) consumers(t *testing.T, topic string) int {
	t.Helper()
	s, err := r.js.Stream(t.Context(), topic)
	if err != nil {
		t.Fatal(err)
	}
	return s.CachedInfo().State.Consumers
}

// bigTopic is a topic that no socket buffers hold.
func (r *rig) bigTopic(t *testing.T, topic string) (size int) {
	t.Helper()
	payload := `"` + strings.Repeat("x", 100_000) + `"`
	r.fill(t, topic, 300, func(int) string { return payload })
	return 300 * len(payload)
}

// TestExportIsCancelled leaves nothing behind when the client goes.
func TestExportIsCancelled(t *testing.T) {
	t.Parallel()
	r := newWatched(t, func(cfg *facade.Config) { cfg.Limits.PrincipalExports = 1 })
	r.bigTopic(t, "left")
	ctx, cancel := context.WithCancel(t.Context())
	body := r.begin(ctx, t, "/export?topic=left&ndjson=1", rigToken)
	if _, err := io.ReadFull(body, make([]byte, 10_000)); err != nil {
		t.Fatal(err)
	}
	if n := r.consumers(t, "left"); n != 1 {
		t.Errorf("while it is read there are %d consumers, want 1", n)
	}
	cancel()
	eventually(t, "the consumer is removed", func() bool { return r.consumers(t, "left") == 0 })
	if a := r.ask(t, http.MethodGet, "/export?topic=left&ndjson=1&limit=1", ""); a.status != http.StatusOK {
		t.Errorf("the place is not free: %d %s", a.status, a.text)
	}
}

// TestExportIsNotRead is given up, without having filled the hub.
func TestExportIsNotRead(t *testing.T) {
	t.Parallel()
	r := newWatched(t, func(cfg *facade.Config) { cfg.Limits.AnswerStall = 300 * time.Millisecond })
	size := r.bigTopic(t, "unread")
	body := r.begin(t.Context(), t, "/export?topic=unread&ndjson=1", rigToken)
	if _, err := io.ReadFull(body, make([]byte, 10_000)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the answer is given up", func() bool { return r.consumers(t, "unread") == 0 })
	n, err := io.Copy(io.Discard, body)
	if err == nil || n >= int64(size) {
		t.Errorf("%d bytes of %d came, and then %v", n, size, err)
	}
}

// TestExportTokenExpires ends a long answer, not as a whole one.
func TestExportTokenExpires(t *testing.T) {
	t.Parallel()
	r := newWatched(t, func(cfg *facade.Config) { cfg.Auth = facade.Tokens(newVerifier(t)) })
	r.bigTopic(t, "expiring")
	var in *bufio.Reader
	shortLived(t, func(token string) bool {
		body, status := r.tryBegin(t.Context(), t, "/export?topic=expiring&ndjson=1", token)
		in = bufio.NewReader(body)
		_, err := in.ReadString('\n')
		return status == http.StatusOK && err == nil
	}, "subscribe:expiring")
	eventually(t, "the answer ends", func() bool { return r.consumers(t, "expiring") == 0 })
	if _, err := io.Copy(io.Discard, in); err == nil {
		t.Error("the answer ended as if it were whole")
	}
}

// revocable wraps an Authenticator, and withdraws all its tokens at once.
type revocable struct {
	facade.Authenticator
	withdrawn atomic.Bool
}

type revocablePrincipal struct {
	facade.Principal
	by *revocable
}

func (a *revocable) Authenticate(ctx context.Context, token string) (facade.Principal, error) {
	p, err := a.Authenticator.Authenticate(ctx, token)
	if err != nil {
		return nil, err
	}
	return revocablePrincipal{p, a}, nil
}

func (p revocablePrincipal) Revoked() bool { return p.by.withdrawn.Load() }

// TestExportTokenIsRevoked ends a long answer, not as a whole one.
func TestExportTokenIsRevoked(t *testing.T) {
	t.Parallel()
	var tokens *revocable
	r := newWatched(t, func(cfg *facade.Config) {
		tokens = &revocable{Authenticator: cfg.Auth}
		cfg.Auth = tokens
	})
	r.bigTopic(t, "revoked")
	body := r.begin(t.Context(), t, "/export?topic=revoked&ndjson=1", rigToken)
	if _, err := io.ReadFull(body, make([]byte, 10_000)); err != nil {
		t.Fatal(err)
	}
	tokens.withdrawn.Store(true)
	if _, err := io.Copy(io.Discard, body); err == nil {
		t.Error("the answer ended as if it were whole")
	}
	eventually(t, "the consumer is removed", func() bool { return r.consumers(t, "revoked") == 0 })
}

// TestExportIsDrained ends when the hub shuts down, so that the client goes on elsewhere.
func TestExportIsDrained(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	r.bigTopic(t, "drained")
	body := r.begin(t.Context(), t, "/export?topic=drained&ndjson=1", rigToken)
	if _, err := io.ReadFull(body, make([]byte, 10_000)); err != nil {
		t.Fatal(err)
	}
	if err := r.srv.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, body); err == nil {
		t.Error("the answer ended as if it were whole")
	}
}

// TestExportsOfOnePrincipal leave places for others.
func TestExportsOfOnePrincipal(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, func(cfg *facade.Config) { cfg.Limits.Exports, cfg.Limits.PrincipalExports = 3, 2 })
	r.bigTopic(t, "shared")
	greedy, other := grant(t, "greedy", "subscribe:shared"), grant(t, "other", "subscribe:shared")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range 2 {
		r.begin(ctx, t, "/export?topic=shared&ndjson=1", greedy)
	}
	// a third one of its own waits, and the place that is left is free for others
	wait, stop := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer stop()
	req, err := http.NewRequestWithContext(wait, http.MethodGet, r.http.URL+"/replay?topic=shared&limit=1", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+greedy)
	if res, err := r.http.Client().Do(req); err == nil {
		_ = res.Body.Close()
		t.Errorf("a third export of one principal was answered: %d", res.StatusCode)
	}
	r.seen.await(t, "limit exports", 1)
	if a := r.ask(t, http.MethodGet, "/replay?topic=shared&limit=1", "", "Authorization", "Bearer "+other); a.status != http.StatusOK {
		t.Errorf("another principal: %d %s", a.status, a.text)
	}
}

// TestExportPolicy asks the policy what a SUBSCRIBE without a group asks.
func TestExportPolicy(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, nil)
	r.fill(t, "out.a", 1, number)
	r.fill(t, "in.a", 1, number)
	scoped := grant(t, "scoped", "publish:in.*", "subscribe:out.**")
	for _, c := range []struct {
		token, topic string
		status       int
	}{
		{scoped, "out.a", 200},
		{scoped, "in.a", 403},
		{scoped, "none", 403},
		{scoped, "dlq.out.a", 403},
		{"", "out.a", 401},
	} {
		for _, path := range []string{"/replay?topic=", "/export?topic=", "/export?ndjson=1&topic="} {
			a := r.ask(t, http.MethodGet, path+url.QueryEscape(c.topic), "", "Authorization", "Bearer "+c.token)
			if a.status != c.status {
				t.Errorf("%s%s: %d %s, want %d", path, c.topic, a.status, a.text, c.status)
			}
		}
	}
}
