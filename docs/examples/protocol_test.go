package examples

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/acl"
	"eventhub/docs/apitest"
	"eventhub/facade/hubtest"
)

const protocolPage = "../protocol.md"

// TestProtocolPage plays every conversation of docs/protocol.md against a hub, in the order of the
// page. What the hub sends must be what the page says, but for ids and times that the hub makes.
func TestProtocolPage(t *testing.T) {
	t.Parallel()
	topics := filepath.Join(t.TempDir(), "topics.yaml")
	if err := os.WriteFile(topics, []byte("topics:\n  - pattern: room.*\n    presence: true\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	hub := start(t, t.TempDir(), []string{"WS_TOKEN=TOKEN", "EVENTHUB_TOPICS=" + topics}, filepath.Join(bin, "eventhub"),
		"serve", "--ws-port=0", "--http-port=0", "--ops-port=0")
	ws := strings.Fields(hub.line("websocket"))[1]
	web := strings.Fields(hub.line("http"))[1]
	hub.line("token") // the last line

	known := newStandIns()
	talks := 0
	for _, b := range codeBlocks(t, protocolPage) {
		if b.language != "text" {
			continue
		}
		talks++
		t.Run(fmt.Sprintf("line %d", b.line), func(t *testing.T) {
			turns, err := parseTalk(b.text)
			if err != nil {
				t.Fatal(err)
			}
			p := &player{t: t, web: web, known: known}
			p.dial(ws, !strings.Contains(b.text, `"op":"AUTH"`))
			for _, turn := range turns {
				p.play(turn)
			}
			p.finish()
		})
	}
	if talks < 15 {
		t.Errorf("the page has %d conversations; are they not found any more?", talks)
	}
}

// TestProtocolPageDefaults checks the defaults of the page that clients notice, by what a hub does.
// That of ackTimeoutMs is in all conversations.
func TestProtocolPageDefaults(t *testing.T) {
	t.Parallel()
	byDefault := func(option string) int {
		t.Helper()
		n, err := strconv.Atoi(pageDefault(t, option))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	hub := start(t, t.TempDir(), []string{"WS_TOKEN=TOKEN"}, filepath.Join(bin, "eventhub"),
		"serve", "--ws-port=0", "--http-port=0", "--ops-port=0")
	ws := strings.Fields(hub.line("websocket"))[1]
	hub.line("token") // the last line
	p := &player{t: t, known: newStandIns()}
	p.dial(ws, true)
	type frame struct {
		Op, Topic, Group string
		Event            struct{ ID string }
		Ctx              struct{ Attempt int }
	}
	next := func() (f frame) {
		t.Helper()
		text := p.read()
		if err := json.Unmarshal([]byte(text), &f); err != nil || f.Op == "ERR" {
			t.Fatalf("the hub sent %s: %v", text, err)
		}
		return f
	}
	// settle sends a frame, and returns the event that comes beside its OK, in either order.
	settle := func(text, topic, group string) frame {
		t.Helper()
		p.send(text)
		f, other := next(), next()
		if f.Op == "OK" {
			f, other = other, f
		}
		if other.Op != "OK" || f.Op != "EVENT" || f.Topic != topic || f.Group != group {
			t.Fatalf("the hub sent %+v and %+v, want OK and an event of %s::%s", f, other, topic, group)
		}
		return f
	}

	most := byDefault("maxInFlight")
	for i := range most + 1 {
		id := strconv.Itoa(i)
		p.send(`{"op":"PUBLISH","topic":"many","opts":{"id":"` + id + `"},"corr":1}`)
		p.expect([]string{`{"op":"OK","id":"` + id + `","corr":1}`})
	}
	p.send(`{"op":"SUBSCRIBE","topic":"many","group":"new"}`)
	p.expect([]string{`{"op":"OK"}`})
	p.finish() // nothing comes: the default of from is latest
	p.send(`{"op":"SUBSCRIBE","topic":"many","group":"all","opts":{"from":"earliest"}}`)
	p.expect([]string{`{"op":"OK"}`})
	for range most {
		if f := next(); f.Op != "EVENT" || f.Group != "all" {
			t.Fatalf("the hub sent %+v, want an event", f)
		}
	}
	p.finish() // no more come
	settle(`{"op":"ACK","topic":"many","group":"all","id":"0"}`, "many", "all")

	p.send(`{"op":"SUBSCRIBE","topic":"dlq.poison","group":"g"}`, `{"op":"SUBSCRIBE","topic":"poison","group":"g"}`)
	p.expect([]string{`{"op":"OK"}`, `{"op":"OK"}`})
	p.send(`{"op":"PUBLISH","topic":"poison","opts":{"id":"x"},"corr":1}`)
	p.expect([]string{
		`{"op":"OK","id":"x","corr":1}`,
		`{"op":"EVENT","topic":"poison","group":"g","event":{"id":"x","ts":1795199112245,"topic":"poison","payload":null},"ctx":{"attempt":1,"ack_deadline_ms":30000}}`,
	})
	const refusal = `{"op":"NACK","topic":"poison","group":"g","id":"x","delay_ms":0}`
	for attempt := 2; attempt <= byDefault("maxAttempts"); attempt++ {
		if f := settle(refusal, "poison", "g"); f.Ctx.Attempt != attempt {
			t.Fatalf("attempt %d came, want %d", f.Ctx.Attempt, attempt)
		}
	}
	if f := settle(refusal, "dlq.poison", "g"); !strings.HasPrefix(f.Event.ID, "dlq:") {
		t.Errorf("the dead letter has the id %s", f.Event.ID)
	}
}

// pageDefault returns the default that the page gives for an option of SUBSCRIBE.
func pageDefault(t *testing.T, option string) string {
	t.Helper()
	text, err := os.ReadFile(protocolPage)
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile("(?m)^\\| `" + option + "` \\| integer \\| (\\w+) \\|").FindSubmatch(text)
	if row == nil {
		t.Fatalf("the page has no default for %s", option)
	}
	return string(row[1])
}

// TestProtocolPageDefaultsInNATS checks the defaults of the page that only NATS notices.
func TestProtocolPageDefaultsInNATS(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t, hubtest.Token("TOKEN"))
	nc, err := nats.Connect(hub.NATS, nats.Token(hub.Token))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	requests, err := nc.SubscribeSync("$JS.API.CONSUMER.MSG.NEXT.wide.*")
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	p := &player{t: t, known: newStandIns()}
	p.dial(hub.WebSocket, true)

	for _, c := range []struct {
		group, opts string
		batch, ttl  string // as the page says
	}{
		{"plain", `{"maxInFlight":10000}`, pageDefault(t, "batchSize"), pageDefault(t, "groupTtlMs")},
		{"chosen", `{"maxInFlight":10000,"batchSize":7,"groupTtlMs":90000}`, "7", "90000"},
	} {
		p.send(`{"op":"SUBSCRIBE","topic":"wide","group":"` + c.group + `","opts":` + c.opts + `}`)
		p.expect([]string{`{"op":"OK"}`})

		m, err := requests.NextMsg(patience)
		if err != nil {
			t.Fatal(err)
		}
		var request struct{ Batch int }
		if err := json.Unmarshal(m.Data, &request); err != nil || strconv.Itoa(request.Batch) != c.batch || !strings.HasSuffix(m.Subject, "."+c.group) {
			t.Errorf("%s: the hub asks NATS for events with %s on %s (%v), want a batch of %s", c.group, m.Data, m.Subject, err, c.batch)
		}
		consumer, err := js.Consumer(t.Context(), "wide", c.group)
		if err != nil {
			t.Fatal(err)
		}
		ttl := "never"
		if after := consumer.CachedInfo().Config.InactiveThreshold; after > 0 {
			ttl = strconv.FormatInt(after.Milliseconds(), 10)
		}
		if ttl != c.ttl {
			t.Errorf("%s: NATS deletes the group after %s, want %s", c.group, ttl, c.ttl)
		}
	}
}

// TestProtocolPageClaims checks that the claims on the page are well formed.
func TestProtocolPageClaims(t *testing.T) {
	found := 0
	for _, b := range codeBlocks(t, protocolPage) {
		if b.language != "json" {
			continue
		}
		var claims struct {
			Scopes []string
			Policy json.RawMessage
		}
		if err := json.Unmarshal([]byte(b.text), &claims); err != nil {
			t.Errorf("line %d: %v", b.line, err)
			continue
		}
		var err error
		if claims.Policy != nil {
			_, err = acl.ParsePolicy(claims.Policy)
		} else {
			_, err = acl.ParseScopes(claims.Scopes)
		}
		if err != nil {
			t.Errorf("line %d: %v", b.line, err)
		}
		found++
	}
	if found != 3 {
		t.Errorf("the page has %d samples of claims, not 3", found)
	}
}

// codeBlock is a fenced block of a Markdown file.
type codeBlock struct {
	language string
	line     int // of its first line
	text     string
}

func codeBlocks(t *testing.T, file string) (blocks []codeBlock) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var open *codeBlock
	number := 0
	for line := range strings.Lines(string(text)) {
		number++
		language, fence := strings.CutPrefix(strings.TrimSpace(line), "```")
		switch {
		case fence && open == nil:
			open = &codeBlock{language: language, line: number + 1}
		case fence:
			blocks = append(blocks, *open)
			open = nil
		case open != nil:
			open.text += line
		}
	}
	return blocks
}

// turn is one side's part of a conversation: the lines of the client, or those of the hub, up to
// the other side's next.
type turn struct {
	client bool
	lines  []string
}

// parseTalk takes a conversation apart. Indented lines continue the line above.
func parseTalk(text string) (turns []turn, err error) {
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		sent, client := strings.CutPrefix(line, "→")
		got, hub := strings.CutPrefix(line, "←")
		switch {
		case client || hub:
			if len(turns) == 0 || turns[len(turns)-1].client != client {
				turns = append(turns, turn{client: client})
			}
			last := &turns[len(turns)-1]
			if client {
				got = sent
			}
			last.lines = append(last.lines, strings.TrimPrefix(got, " "))
		case strings.HasPrefix(line, "  ") && len(turns) > 0:
			last := turns[len(turns)-1]
			last.lines[len(last.lines)-1] += strings.TrimLeft(line, " ")
		default:
			return nil, fmt.Errorf("the line %q is of neither side", line)
		}
	}
	return turns, nil
}

// standIns are the values of the page that the hub makes anew in each run.
type standIns struct {
	values map[string]string // from what the page has to what the hub made
	sent   string            // everything that the page has clients send
}

func newStandIns() *standIns { return &standIns{values: make(map[string]string)} }

// made are the forms of what the hub makes: on the page, and from the hub.
var made = []struct{ page, hub *regexp.Regexp }{
	{uuidV7, uuidV7},
	{letterID, letterID},
	{pos, pos},
	{regexp.MustCompile(`^HANDLE-[A-Z]$`), regexp.MustCompile(`^[A-Za-z0-9_-]{60,768}$`)},
}

var (
	uuidV7   = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
	letterID = regexp.MustCompile(`^dlq:[0-9a-f]{32}$`)
	pos      = regexp.MustCompile(`^[0-9a-z]{11,13}-[0-9]+$`)
)

// put writes what the hub made in place of what the page has.
func (s *standIns) put(text string) string {
	for printed, value := range s.values {
		text = strings.ReplaceAll(text, printed, value)
	}
	return text
}

// compare says where the hub's JSON value differs from the page's.
func (s *standIns) compare(path string, want, got any) error {
	differs := fmt.Errorf("%s is %v, the page has %v", path, got, want)
	switch want := want.(type) {
	case map[string]any:
		fields, ok := got.(map[string]any)
		if !ok || !slices.Equal(slices.Sorted(maps.Keys(want)), slices.Sorted(maps.Keys(fields))) {
			return differs
		}
		for _, name := range slices.Sorted(maps.Keys(want)) {
			if err := s.compare(path+"."+name, want[name], fields[name]); err != nil {
				return err
			}
		}
	case []any:
		items, ok := got.([]any)
		if !ok || len(items) != len(want) {
			return differs
		}
		for i := range want {
			if err := s.compare(fmt.Sprintf("%s[%d]", path, i), want[i], items[i]); err != nil {
				return err
			}
		}
	case string:
		text, ok := got.(string)
		for _, form := range made {
			if !form.page.MatchString(want) {
				continue
			}
			if s.values[want] == "" && form.hub.MatchString(text) {
				s.values[want] = text
			}
			want = s.values[want]
		}
		if !ok || text != want {
			return differs
		}
	case json.Number:
		number, ok := got.(json.Number)
		if ok && strings.HasSuffix(path, ".ts") && !strings.Contains(s.sent, want.String()) {
			ms, err := number.Int64()
			if age := time.Since(time.UnixMilli(ms)); err != nil || age < -patience || age > patience {
				return fmt.Errorf("%s is %v, which is not now", path, got)
			}
			return nil
		}
		if !ok || number != want {
			return differs
		}
	default:
		if got != want {
			return differs
		}
	}
	return nil
}

func (s *standIns) compareText(want, got string) error {
	w, err := decode(want)
	if err != nil {
		return fmt.Errorf("the page has %s: %w", want, err)
	}
	g, err := decode(got)
	if err != nil {
		return fmt.Errorf("the hub sent %s: %w", got, err)
	}
	return s.compare("frame", w, g)
}

func decode(text string) (v any, err error) {
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		return nil, err
	}
	if d.More() {
		return nil, errors.New("more than one value")
	}
	return v, nil
}

// player plays one conversation.
type player struct {
	t      *testing.T
	conn   *websocket.Conn
	frames *apitest.Frames
	web    string
	known  *standIns
	asked  *http.Request // whose answer comes next
	body   string
}

func (p *player) dial(url string, auth bool) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	defer cancel()
	var err error
	if p.conn, _, err = websocket.Dial(ctx, url, nil); err != nil { //nolint:bodyclose // the library closes it
		p.t.Fatal(err)
	}
	p.frames = apitest.NewFrames(p.t)
	p.t.Cleanup(func() { _ = p.conn.CloseNow() })
	if auth {
		p.play(turn{client: true, lines: []string{`{"op":"AUTH","token":"TOKEN"}`}})
		p.play(turn{lines: []string{`{"op":"OK"}`}})
	}
}

var requestLine = regexp.MustCompile(`^(GET|POST|DELETE) (/\S*)$`)

func (p *player) play(now turn) {
	p.t.Helper()
	switch {
	case now.client && requestLine.MatchString(now.lines[0]):
		p.prepare(now.lines)
	case now.client:
		p.send(now.lines...)
	case p.asked != nil:
		p.exchange(now.lines)
	default:
		p.expect(now.lines)
	}
}

func (p *player) send(frames ...string) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	defer cancel()
	for _, frame := range frames {
		p.known.sent += frame
		p.frames.Sent(p.known.put(frame))
		if err := p.conn.Write(ctx, websocket.MessageText, []byte(p.known.put(frame))); err != nil {
			p.t.Fatalf("sending %s: %v", frame, err)
		}
	}
}

func (p *player) read() string {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	defer cancel()
	_, b, err := p.conn.Read(ctx)
	if err != nil {
		p.t.Fatalf("reading: %v", err)
	}
	p.frames.Received(string(b))
	return string(b)
}

// expect takes as many frames as the page has, in any order.
func (p *player) expect(want []string) {
	p.t.Helper()
	for left := slices.Clone(want); len(left) > 0; {
		got := p.read()
		var why []string
		found := slices.IndexFunc(left, func(frame string) bool {
			trial := &standIns{values: maps.Clone(p.known.values), sent: p.known.sent}
			if err := trial.compareText(frame, got); err != nil {
				why = append(why, err.Error())
				return false
			}
			p.known.values = trial.values
			return true
		})
		if found < 0 {
			p.t.Fatalf("the hub sent what the page does not have here: %s\n%s", got, strings.Join(why, "\n"))
		}
		left = slices.Delete(left, found, found+1)
	}
}

// prepare reads a request: its line, headers, an empty line, and the body.
func (p *player) prepare(lines []string) {
	p.t.Helper()
	line := requestLine.FindStringSubmatch(lines[0])
	header, body := splitHead(lines[1:])
	p.body = p.known.put(strings.Join(body, "\n"))
	req, err := http.NewRequestWithContext(p.t.Context(), line[1], p.web+line[2], nil)
	if err != nil {
		p.t.Fatal(err)
	}
	req.Header = header
	if header.Get("Authorization") == "" {
		header.Set("Authorization", "Bearer TOKEN")
	}
	p.asked = req
}

// splitHead takes headers from what follows them.
func splitHead(lines []string) (header http.Header, body []string) {
	header = make(http.Header)
	for i, line := range lines {
		name, value, found := strings.Cut(line, ": ")
		switch {
		case line == "":
			return header, lines[i+1:]
		case !found || strings.ContainsAny(name, `{"`):
			return header, lines[i:]
		}
		header.Add(name, value)
	}
	return header, nil
}

// exchange sends the request, and compares the answer: the status, some headers, and the body line
// by line. A GET is repeated until the answer is right, because reads of many keys may lag behind
// by milliseconds.
func (p *player) exchange(want []string) {
	p.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := p.tryExchange(want)
		if err == nil {
			break
		}
		if p.asked.Method != http.MethodGet || time.Now().After(deadline) {
			p.t.Fatalf("%s %s: %v", p.asked.Method, p.asked.URL.Path, err)
		}
		<-time.After(10 * time.Millisecond)
	}
	p.asked = nil
}

func (p *player) tryExchange(want []string) error {
	req := p.asked.Clone(p.t.Context())
	req.Body = io.NopCloser(strings.NewReader(p.body))
	req.ContentLength = int64(len(p.body))
	web := &http.Client{Transport: apitest.Transport(p.t, apitest.Clients, http.DefaultTransport)}
	res, err := web.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	got, err := io.ReadAll(res.Body)
	if err != nil {
		return err
	}
	if strconv.Itoa(res.StatusCode) != want[0] {
		return fmt.Errorf("the status is %d, the page has %s: %s", res.StatusCode, want[0], got)
	}
	header, body := splitHead(want[1:])
	for name := range header {
		if res.Header.Get(name) != header.Get(name) {
			return fmt.Errorf("the header %s is %s, the page has %s", name, res.Header.Get(name), header.Get(name))
		}
	}
	var lines []string
	for line := range bytes.Lines(got) {
		lines = append(lines, string(line))
	}
	if len(lines) != len(body) {
		return fmt.Errorf("the answer has %d lines, the page has %d: %s", len(lines), len(body), got)
	}
	for i := range lines {
		if err := p.known.compareText(body[i], lines[i]); err != nil {
			return err
		}
	}
	return nil
}

// finish fails on frames that the page does not have: whatever comes before the answer to one more
// frame.
func (p *player) finish() {
	p.t.Helper()
	p.send(`{"op":"UNSUBSCRIBE","topic":"the-end","group":"g","corr":"the end"}`)
	p.expect([]string{`{"op":"ERR","code":"not_subscribed","msg":"the-end::g","corr":"the end"}`})
}
