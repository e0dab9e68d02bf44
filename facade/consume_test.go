package facade_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/facade"
	"eventhub/jetstream"
)

// consumed is an event as HTTP gives it.
type consumed struct {
	Topic, Group string // of a stream
	Event        struct {
		ID        string
		Topic     string
		Partition *int
		Payload   json.RawMessage
	}
	Ctx struct {
		Attempt     int
		AckDeadline int64 `json:"ack_deadline_ms"`
	}
	Ack string
}

// pull pulls from a group, as the hub's own token.
func (r *rig) pull(t *testing.T, topic, group, body string) []consumed {
	t.Helper()
	return r.pullAs(t, rigToken, topic, group, body)
}

func (r *rig) pullAs(t *testing.T, token, topic, group, body string) []consumed {
	t.Helper()
	a := r.post(t, "/groups/"+url.PathEscape(topic)+"/"+url.PathEscape(group)+"/pull", body, "Authorization", "Bearer "+token)
	if a.status != http.StatusOK {
		t.Fatalf("pull: %d %s", a.status, a.text)
	}
	var got struct{ Events []consumed }
	if err := json.Unmarshal([]byte(a.text), &got); err != nil {
		t.Fatalf("%s: %v", a.text, err)
	}
	return got.Events
}

// pullOne pulls until there is an event.
func (r *rig) pullOne(t *testing.T, topic, group, opts string) consumed {
	t.Helper()
	for end := time.Now().Add(rigPatience); time.Now().Before(end); {
		if got := r.pull(t, topic, group, `{"max":1,"wait_ms":5000,"opts":{`+opts+`}}`); len(got) == 1 {
			return got[0]
		}
	}
	t.Fatalf("no event of %s came", topic)
	return consumed{}
}

// settle sends a settlement of handles, again and again until it is known what became of them: on a
// busy machine, another hub may not answer in time.
func (r *rig) settle(t *testing.T, op, more string, handles ...string) (a answer) {
	t.Helper()
	list, err := json.Marshal(handles)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is known what became of the events", func() bool {
		a = r.post(t, "/"+op, `{"ack":`+string(list)+more+`}`)
		return a.Code != "ack_failed"
	})
	return a
}

func (r *rig) wantSettled(t *testing.T, op, more string, handles ...string) {
	t.Helper()
	want := fmt.Sprintf(`{"settled":%d}`+"\n", len(handles))
	if a := r.settle(t, op, more, handles...); a.status != http.StatusOK || a.text != want {
		t.Errorf("%s: %d %s, want %s", op, a.status, a.text, want)
	}
}

// wantOver wants a settlement to find no lease.
func (r *rig) wantOver(t *testing.T, op string, handles ...string) {
	t.Helper()
	if a := r.settle(t, op, "", handles...); a.status != http.StatusGone || a.Code != "lease_over" {
		t.Errorf("%s of a lease that is over: %d %s", op, a.status, a.text)
	}
}

// put publishes a payload.
func (r *rig) put(t *testing.T, topic, payload string, headers ...string) (id string) {
	t.Helper()
	a := r.post(t, "/publish/"+topic, payload, headers...)
	if a.status != http.StatusOK {
		t.Fatalf("publish: %d %s", a.status, a.text)
	}
	return a.ID
}

// sse is an open stream.
type sse struct {
	t     *testing.T
	body  io.Closer
	lines *bufio.Reader
	res   *http.Response
	retry string // the last field of that name
	beats int    // comments that are beats
}

// message is one message of a stream.
type message struct {
	name, id, data string
}

// subscribe opens a stream that ends with the test.
func (r *rig) subscribe(t *testing.T, query string, headers ...string) *sse {
	t.Helper()
	s, a := r.trySubscribe(t, query, headers...)
	if s == nil {
		t.Fatalf("subscribe: %d %s", a.status, a.text)
	}
	return s
}

func (r *rig) trySubscribe(t *testing.T, query string, headers ...string) (*sse, answer) {
	t.Helper()
	return r.tryStream(t, "/subscribe?"+query, headers...)
}

// tryStream opens the stream of a path.
func (r *rig) tryStream(t *testing.T, path string, headers ...string) (*sse, answer) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.http.URL+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	if req.Header["Authorization"] == nil {
		req.Header.Set("Authorization", "Bearer "+rigToken)
	}
	res, err := r.http.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = res.Body.Close() })
	if res.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(res.Body)
		a := parseAnswer(t, string(b))
		a.status, a.text = res.StatusCode, string(b)
		return nil, a
	}
	return &sse{t: t, body: res.Body, lines: bufio.NewReader(res.Body), res: res}, answer{}
}

// next returns the next message by the rules of the HTML standard. Comments and retry are no
// message. It returns false at the end of the stream.
func (s *sse) next() (m message, ok bool) {
	s.t.Helper()
	late := time.AfterFunc(rigPatience, func() { _ = s.body.Close() })
	defer late.Stop()
	for {
		line, err := s.lines.ReadString('\n')
		if err != nil {
			if !late.Stop() {
				s.t.Fatal("no message came")
			}
			return m, false
		}
		line = strings.TrimSuffix(line, "\n")
		if strings.Contains(line, "\r") {
			s.t.Errorf("a carriage return, which ends a line: %q", line)
		}
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		switch {
		case line == ": beat":
			s.beats++
		case line == "" && m.data == "":
			m = message{}
		case line == "":
			return m, true
		case name == "event":
			m.name = value
		case name == "id":
			m.id = value
		case name == "retry":
			s.retry = value
		case name == "data" && m.data != "":
			s.t.Errorf("data on two lines")
		case name == "data":
			m.data = value
		}
	}
}

// event is the next message, which must be an event.
func (s *sse) event() consumed {
	s.t.Helper()
	m, ok := s.next()
	if !ok || m.name != "event" {
		s.t.Fatalf("got %+v, want an event", m)
	}
	var e consumed
	if err := json.Unmarshal([]byte(m.data), &e); err != nil {
		s.t.Fatalf("%s: %v", m.data, err)
	}
	if e.Event.ID != m.id {
		s.t.Errorf("the id is %q, the event's %q", m.id, e.Event.ID)
	}
	return e
}

// wantEnd wants the stream to end with these messages.
func (s *sse) wantEnd(want ...message) {
	s.t.Helper()
	for _, w := range want {
		if m, ok := s.next(); !ok || m != w {
			s.t.Errorf("got %+v, want %+v", m, w)
		}
	}
	if m, ok := s.next(); ok {
		s.t.Errorf("got %+v, want the end", m)
	}
}

// One group has members over WebSocket, as a stream and by pulls, and each event goes to one of
// them. What a member does not settle comes to another, with the next attempt.
func TestConsumeMembers(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	first := r.subscribe(t, "topic=t&group=g&ackTimeoutMs=60000")
	if kind, buffering := first.res.Header.Get("Content-Type"), first.res.Header.Get("X-Accel-Buffering"); kind != "text/event-stream" || buffering != "no" {
		t.Errorf("Content-Type %q, X-Accel-Buffering %q", kind, buffering)
	}
	// line breaks between tokens, and all characters that the format knows
	id := r.put(t, "t", "{\"a\":\n\r\n 1, \"b\":\"data: \\n\\u2028:\"}", "Event-Id", "my id: 1")
	e := first.event()
	if id != "my id: 1" || e.Event.ID != id || e.Topic != "t" || e.Group != "g" || e.Ctx.Attempt != 1 || e.Ctx.AckDeadline != 60_000 {
		t.Errorf("got %+v", e)
	}
	if got := string(e.Event.Payload); strings.Map(func(c rune) rune {
		if c == ' ' {
			return -1
		}
		return c
	}, got) != `{"a":1,"b":"data:\n\u2028:"}` {
		t.Errorf("the payload is %s", got)
	}
	_ = first.body.Close() // the event has failed once

	again := r.pullOne(t, "t", "g", `"ackTimeoutMs":1000`)
	if again.Event.ID != id || again.Ctx.Attempt != 2 || again.Ctx.AckDeadline != 1000 || again.Ack == e.Ack {
		t.Errorf("got %+v", again)
	}
	r.wantOver(t, "ack", e.Ack)
	// its lease ends after a second: a WebSocket gets it
	ws := r.login(t)
	ws.send(`{"op":"SUBSCRIBE","topic":"t","group":"g"}`)
	ws.want(`{"op":"OK"}`)
	if got := ws.read(); !strings.Contains(got, `"ctx":{"attempt":3,`) {
		t.Errorf("got %s", got)
	}
	r.wantOver(t, "ack", again.Ack)
	r.wantOver(t, "modack", again.Ack)
	ws.send(`{"op":"ACK","topic":"t","group":"g","id":"my id: 1"}`)
	ws.want(`{"op":"OK"}`)
	if got := r.pull(t, "t", "g", `{"wait_ms":0}`); len(got) != 0 {
		t.Errorf("got %+v", got)
	}
}

// A settlement may be repeated; another one after it finds no lease.
func TestSettleTwice(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	r.pull(t, "t", "g", `{"wait_ms":0}`)
	for range 3 {
		r.put(t, "t", "1")
	}
	a := r.pullOne(t, "t", "g", "")
	r.wantSettled(t, "ack", "", a.Ack)
	r.wantSettled(t, "ack", "", a.Ack)
	r.wantOver(t, "nack", a.Ack)
	r.wantOver(t, "modack", a.Ack)

	b := r.pullOne(t, "t", "g", "")
	r.wantSettled(t, "modack", `,"extend_ms":60000`, b.Ack)
	r.wantSettled(t, "modack", "", b.Ack)
	r.wantSettled(t, "nack", `,"delay_ms":0,"reason":"why not"`, b.Ack)
	r.wantSettled(t, "nack", "", b.Ack)
	r.wantOver(t, "ack", b.Ack)

	// both in one request, beside one that is over
	rest := r.pull(t, "t", "g", `{"max":2,"wait_ms":20000}`)
	for len(rest) < 2 {
		rest = append(rest, r.pullOne(t, "t", "g", ""))
	}
	got := r.settle(t, "ack", "", rest[0].Ack, b.Ack, rest[1].Ack)
	if want := `{"settled":2,"failed":[{"ack":"` + b.Ack + `","code":"lease_over"}]}` + "\n"; got.status != http.StatusOK || got.text != want {
		t.Errorf("got %d %s, want %s", got.status, got.text, want)
	}
	if n := r.seen.count("settled ack settled"); n != 4 {
		t.Errorf("%d settlements were counted", n)
	}
}

// A request with one handle that is not allowed settles nothing.
func TestHandlesAreChecked(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, nil)
	all := grant(t, "all", "subscribe:**", "publish:**")
	r.pullAs(t, all, "t", "g", "")
	r.pullAs(t, all, "other", "g", "")
	for _, topic := range []string{"t", "other"} {
		r.put(t, topic, "1", "Authorization", "Bearer "+all)
	}
	mine := r.pullAs(t, all, "t", "g", `{"wait_ms":20000}`)
	theirs := r.pullAs(t, all, "other", "g", `{"wait_ms":20000}`)
	if len(mine) != 1 || len(theirs) != 1 {
		t.Fatalf("got %+v and %+v", mine, theirs)
	}
	ack := func(token, body string) answer { return r.post(t, "/ack", body, "Authorization", "Bearer "+token) }
	both := `{"ack":["` + mine[0].Ack + `","` + theirs[0].Ack + `"]}`
	forged := []byte(mine[0].Ack)
	// in the signature; all bits of this character count
	if at := len(forged) - 2; forged[at] == 'A' {
		forged[at] = 'B'
	} else {
		forged[at] = 'A'
	}
	group := grant(t, "member", "subscribe:t::g")
	for _, c := range []struct {
		token, body  string
		status       int
		code, substr string
	}{
		{group, both, 403, "forbidden", "other::g"},
		{grant(t, "reader", "subscribe:t::h"), `{"ack":["` + mine[0].Ack + `"]}`, 403, "forbidden", "t::g"},
		{group, `{"ack":["` + mine[0].Ack + `","` + string(forged) + `"]}`, 400, "bad_handle", "ack[1]"},
		{group, `{"ack":["` + mine[0].Ack[1:] + `"]}`, 400, "bad_handle", "ack[0]"},
		{group, `{"ack":[""]}`, 400, "bad_handle", "ack[0]"},
		{group, `{"ack":["` + strings.Repeat("A", 5000) + `"]}`, 400, "bad_handle", "ack[0]"},
		{group, `{"ack":[]}`, 400, "bad_options", "empty"},
		{group, `{"ack":"x"}`, 400, "bad_options", "array of handles, not a string"},
		{group, `{"ack":[1]}`, 400, "bad_options", "holds a number"},
		{group, `[]`, 400, "bad_options", "object, not an array"},
		{group, ``, 400, "bad_json", "empty"},
		{group, `{"ack":[` + strings.Repeat(`"a",`, 1000) + `"a"]}`, 400, "bad_options", "more than 1000"},
	} {
		if a := ack(c.token, c.body); a.status != c.status || a.Code != c.code || !strings.Contains(a.Error, c.substr) {
			t.Errorf("%.60s: got %d %s, want %d %s with %q", c.body, a.status, a.text, c.status, c.code, c.substr)
		}
	}
	if a := r.post(t, "/nack", `{"ack":["`+mine[0].Ack+`"],"delay_ms":-1}`, "Authorization", "Bearer "+group); a.status != 400 || a.Code != "bad_options" {
		t.Errorf("a delay below 0: %d %s", a.status, a.text)
	}
	// whoever may be a member of the group may settle for it
	if a := ack(group, `{"ack":["`+mine[0].Ack+`"]}`); a.text != `{"settled":1}`+"\n" {
		t.Errorf("got %d %s", a.status, a.text)
	}
	if a := ack(all, both); a.text != `{"settled":2}`+"\n" {
		t.Errorf("got %d %s: what was refused above settled something", a.status, a.text)
	}
}

// The query and the body are checked as the options of a SUBSCRIBE are.
func TestConsumeRefusals(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	for _, c := range []struct{ query, code, substr string }{
		{"group=g", "bad_topic", ""},
		{"topic=t", "bad_group", ""},
		{"topic=t.*&group=g", "bad_topic", ""},
		{"topic=t&group=g&max=1", "bad_options", "no parameter max"},
		{"topic=t&topic=u&group=g", "bad_options", "topic must be given once"},
		{"topic=t&group=g&maxInFlight=0", "bad_options", "opts.maxInFlight must be an integer from 1 to 10000, not 0"},
		{"topic=t&group=g&maxInFlight=x", "bad_options", "opts.maxInFlight must be an integer from 1 to 10000"},
		{"topic=t&group=g&from=ts", "bad_options", "opts.ts is needed"},
		{"topic=t&group=g&from=afterId&afterId=nobody", "unknown_id", ""},
		{"topic=t&group=g&%zz", "bad_options", "URL-encoded"},
	} {
		s, a := r.trySubscribe(t, c.query)
		if s != nil || a.Code != c.code || !strings.Contains(a.Error, c.substr) {
			t.Errorf("%s: got %d %s, want %s with %q", c.query, a.status, a.text, c.code, c.substr)
		}
	}
	for _, c := range []struct{ path, body, code, substr string }{
		{"/groups/t/g/pull", `{"max":0}`, "bad_options", "max must be an integer from 1 to 1000, not 0"},
		{"/groups/t/g/pull", `{"max":1001}`, "bad_options", "max must"},
		{"/groups/t/g/pull", `{"wait_ms":30001}`, "bad_options", "wait_ms must be an integer from 0 to 30000"},
		{"/groups/t/g/pull", `{"wait_ms":"1"}`, "bad_options", "wait_ms must"},
		{"/groups/t/g/pull", `{"opts":{"maxInFlight":3}}`, "bad_options", "max is both"},
		{"/groups/t/g/pull", `{"opts":{"ackTimeoutMs":1}}`, "bad_options", "opts.ackTimeoutMs"},
		{"/groups/t/g/pull", `{"opts":7}`, "bad_frame", "opts must be an object"},
		{"/groups/t/g/pull", `7`, "bad_options", "object, not a number"},
		{"/groups/t/g/pull", `{`, "bad_json", ""},
		{"/groups/t%2B/g/pull", ``, "bad_topic", ""},
		{"/groups/t/g%0A/pull", ``, "bad_group", ""},
	} {
		if a := r.post(t, c.path, c.body); a.status != http.StatusBadRequest || a.Code != c.code || !strings.Contains(a.Error, c.substr) {
			t.Errorf("%s %s: got %d %s, want %s with %q", c.path, c.body, a.status, a.text, c.code, c.substr)
		}
	}
}

// A new group starts behind the Last-Event-ID of a browser that comes back, and one that exists
// goes on where it is.
func TestLastEventID(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	var ids []string
	for i := range 4 {
		ids = append(ids, r.put(t, "t", strconv.Itoa(i)))
	}
	fresh := r.subscribe(t, "topic=t&group=fresh&from=earliest", "Last-Event-ID", ids[1])
	if e := fresh.event(); e.Event.ID != ids[2] {
		t.Errorf("the new group begins with %s, want 2", e.Event.Payload)
	}
	old := r.subscribe(t, "topic=t&group=old&from=earliest")
	e := old.event()
	_ = old.body.Close()
	old = r.subscribe(t, "topic=t&group=old&maxInFlight=1", "Last-Event-ID", ids[3])
	if again := old.event(); again.Ctx.Attempt < 1 || string(again.Event.Payload) == "" {
		t.Errorf("got %+v after %+v", again, e)
	}
	if s, a := r.trySubscribe(t, "topic=t&group=other", "Last-Event-ID", "nobody"); s != nil || a.status != http.StatusNotFound || a.Code != "unknown_id" {
		t.Errorf("an unknown id: %d %s", a.status, a.text)
	}
}

// At most maxInFlight events are with the client of a stream; each settlement lets one more come.
func TestStreamBackPressure(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	s := r.subscribe(t, "topic=t&group=g&maxInFlight=2")
	for i := range 5 {
		r.put(t, "t", strconv.Itoa(i))
	}
	a, b := s.event(), s.event()
	// a member beside the stream gets the third: the stream holds back
	if c := r.pullOne(t, "t", "g", ""); c.Event.ID == a.Event.ID || c.Event.ID == b.Event.ID {
		t.Errorf("the pull got %s again", c.Event.Payload)
	}
	r.wantSettled(t, "ack", "", a.Ack)
	if d := s.event(); d.Event.ID == a.Event.ID || d.Event.ID == b.Event.ID {
		t.Errorf("the stream got %s again", d.Event.Payload)
	}
}

// What fails too often becomes a dead letter, whoever held it.
func TestConsumeDeadLetters(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	r.pull(t, "t", "g", `{"wait_ms":0}`)
	r.put(t, "t", `"nacked"`)
	e := r.pullOne(t, "t", "g", `"maxAttempts":1`)
	r.wantSettled(t, "nack", `,"reason":"broken"`, e.Ack)
	letter := r.pullOne(t, "dlq.t", "d", `"from":"earliest"`)
	if !strings.Contains(string(letter.Event.Payload), `"err":"broken"`) {
		t.Errorf("got %s", letter.Event.Payload)
	}
	r.wantSettled(t, "ack", "", letter.Ack)
	// a lease that runs out is a failure; what was given back before it ran is not
	r.put(t, "t", `"expired"`)
	e = r.pullOne(t, "t", "g", `"maxAttempts":1,"ackTimeoutMs":1000`)
	letter = r.pullOne(t, "dlq.t", "d", "")
	if !strings.Contains(string(letter.Event.Payload), `"err":"lease expired"`) || letter.Ctx.Attempt != 1 {
		t.Errorf("got %s", letter.Event.Payload)
	}
	r.wantOver(t, "ack", e.Ack)
}

// A pull whose client has gone while it waited takes no event.
func TestPullWithoutClient(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.http.URL+"/groups/t/g/pull", strings.NewReader(`{"wait_ms":30000}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+rigToken)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		if res, err := r.http.Client().Do(req); err == nil {
			_ = res.Body.Close()
			t.Error("the pull was answered")
		}
	}()
	r.seen.await(t, "consumer pull begins", 1)
	cancel()
	<-gone
	r.seen.await(t, "consumer pull ends", 1)
	r.put(t, "t", "1")
	if e := r.pullOne(t, "t", "g", `"from":"earliest"`); e.Ctx.Attempt != 1 {
		t.Errorf("attempt %d", e.Ctx.Attempt)
	}
}

// Each principal has so many streams and pulls, and the hub so many in all.
func TestConsumerLimits(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, func(cfg *facade.Config) {
		cfg.Limits.Streams, cfg.Limits.PrincipalStreams = 3, 2
		cfg.Limits.Pulls, cfg.Limits.PrincipalPulls = 3, 2
		// Streams do not count among these. A request may still count when it has been answered.
		cfg.Limits.Requests, cfg.Limits.PrincipalRequests = 4, 2
	})
	as := func(name string) string { return "Bearer " + grant(t, name, "subscribe:**", "publish:**") }
	one, two := as("one"), as("two")
	for range 2 {
		r.subscribe(t, "topic=t&group=g", "Authorization", one)
	}
	if s, a := r.trySubscribe(t, "topic=t&group=g", "Authorization", one); s != nil || a.status != http.StatusTooManyRequests || a.Code != "rate_limited" {
		t.Errorf("a third stream: %d %s", a.status, a.text)
	}
	last := r.subscribe(t, "topic=t&group=g", "Authorization", two)
	if s, a := r.trySubscribe(t, "topic=t&group=g", "Authorization", two); s != nil || a.status != http.StatusServiceUnavailable || a.Code != "overloaded" {
		t.Errorf("a fourth stream: %d %s", a.status, a.text)
	}
	_ = last.body.Close()
	r.seen.await(t, "consumer stream ends", 1)
	r.subscribe(t, "topic=t&group=g", "Authorization", two)
	for _, name := range []string{"streams", "principal_streams"} {
		if n := r.seen.count("limit " + name); n != 1 {
			t.Errorf("the limit %s was counted %d times", name, n)
		}
	}

	// pulls count until their events are settled
	post := func(token, path, body string) answer { return r.post(t, path, body, "Authorization", token) }
	post(one, "/groups/p/g/pull", `{"wait_ms":0}`)
	var handles []string
	for i, token := range []string{one, one, two} {
		post(two, "/publish/p", strconv.Itoa(i))
		a := post(token, "/groups/p/g/pull", `{"max":1,"wait_ms":20000}`)
		var got struct{ Events []consumed }
		if err := json.Unmarshal([]byte(a.text), &got); err != nil || len(got.Events) != 1 {
			t.Fatalf("%d %s", a.status, a.text)
		}
		handles = append(handles, got.Events[0].Ack)
	}
	if a := post(one, "/groups/p/g/pull", ""); a.status != http.StatusTooManyRequests {
		t.Errorf("a third pull: %d %s", a.status, a.text)
	}
	if a := post(two, "/groups/p/g/pull", ""); a.status != http.StatusServiceUnavailable {
		t.Errorf("a fourth pull: %d %s", a.status, a.text)
	}
	if a := post(two, "/ack", `{"ack":["`+handles[2]+`"]}`); a.status != http.StatusOK {
		t.Errorf("%d %s", a.status, a.text)
	}
	eventually(t, "the pull whose event was settled counts no more", func() bool {
		return post(two, "/groups/p/g/pull", `{"wait_ms":0}`).status == http.StatusOK
	})
}

// A stream ends with its token, and says so.
func TestStreamEndsWithToken(t *testing.T) {
	t.Parallel()
	r := jwtRig(t, nil)
	var s *sse
	shortLived(t, func(token string) bool {
		s, _ = r.trySubscribe(t, "topic=t&group=g", "Authorization", "Bearer "+token)
		return s != nil
	}, "subscribe:t")
	s.wantEnd(message{name: "error", data: `{"op":"ERR","code":"token_expired","msg":"The token has expired."}`},
		message{name: "close", data: `{"code":4003,"reason":"token_expired"}`})
	r.seen.await(t, "stream closed 4003", 1)
}

// A silent stream has comments, so that proxies keep it.
func TestStreamBeats(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) { cfg.Limits.StreamBeat = time.Millisecond })
	s := r.subscribe(t, "topic=t&group=g")
	var got []string
	for range 6 {
		line, err := s.lines.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, strings.TrimSpace(line))
	}
	if text := strings.Join(got, "|"); text != "retry: 1000|: subscribed||: beat||: beat" {
		t.Errorf("got %s", text)
	}
}

// A hub that shuts down lets clients settle what they hold, gives the rest back without a failed
// attempt, and tells streams to come back.
func TestConsumersDrain(t *testing.T) {
	t.Parallel()
	url := startNATS(t)
	old := newRigOn(t, jetstream.Config{URL: url}, func(cfg *facade.Config) {
		cfg.DrainGrace, cfg.Limits.ReturnRate = 20*time.Second, facade.NoLimit
	})
	next := newRigOn(t, jetstream.Config{URL: url}, nil)
	s := old.subscribe(t, "topic=t&group=g&maxAttempts=1&maxInFlight=1")
	old.put(t, "t", "1")
	held := s.event()
	old.put(t, "t", "2")
	pulled := old.pullOne(t, "t", "g", `"maxAttempts":1`)
	ended := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(t.Context(), rigPatience)
		defer cancel()
		ended <- old.srv.Drain(ctx)
	}()
	eventually(t, "the hub refuses requests", func() bool { return old.post(t, "/publish/probe", "1").status == http.StatusServiceUnavailable })
	old.wantSettled(t, "ack", "", held.Ack)
	next.wantSettled(t, "ack", "", pulled.Ack) // by way of the other hub
	s.wantEnd(message{name: "close", data: `{"code":4000,"reason":"draining","retry_after_ms":0}`})
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if got := next.pull(t, "t", "g", `{"wait_ms":0}`); len(got) != 0 {
		t.Errorf("got %+v", got)
	}
}

// Close gives back at once, and counts no attempt.
func TestConsumersClose(t *testing.T) {
	t.Parallel()
	url := startNATS(t)
	old := newRigOn(t, jetstream.Config{URL: url}, nil)
	next := newRigOn(t, jetstream.Config{URL: url}, nil)
	s := old.subscribe(t, "topic=t&group=g&maxAttempts=1&maxInFlight=1")
	old.put(t, "t", "1")
	a := s.event()
	old.put(t, "t", "2")
	b := old.pullOne(t, "t", "g", `"maxAttempts":1`)
	if err := old.srv.Close(); err != nil {
		t.Fatal(err)
	}
	next.wantOver(t, "ack", a.Ack, b.Ack)
	for range 2 {
		if e := next.pullOne(t, "t", "g", `"maxAttempts":1`); e.Ctx.Attempt < 1 || e.Event.Topic != "t" {
			t.Errorf("got %+v", e)
		}
	}
}

// A group that somebody deletes ends its stream.
func TestStreamOfDeletedGroup(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	s := r.subscribe(t, "topic=t&group=g")
	if err := r.bus.Group("t", "g").Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.wantEnd(message{name: "error", data: `{"op":"ERR","code":"not_subscribed","msg":"t::g"}`})
}

// Settlements reach the hub that holds the lease, whichever hub the client asks.
func TestSettleOverHubs(t *testing.T) {
	t.Parallel()
	url := startNATS(t)
	one, two := newRigOn(t, jetstream.Config{URL: url}, nil), newRigOn(t, jetstream.Config{URL: url}, nil)
	one.pull(t, "t", "g", `{"wait_ms":0}`)
	for i := range 3 {
		one.put(t, "t", strconv.Itoa(i))
	}
	a := one.pullOne(t, "t", "g", "")
	b := two.pullOne(t, "t", "g", "")
	c := one.pullOne(t, "t", "g", "")
	two.wantSettled(t, "modack", `,"extend_ms":60000`, a.Ack, b.Ack)
	two.wantSettled(t, "ack", "", a.Ack, b.Ack)
	one.wantSettled(t, "ack", "", a.Ack, b.Ack)
	two.wantSettled(t, "nack", `,"delay_ms":0,"reason":"x"`, c.Ack)
	again := two.pullOne(t, "t", "g", "")
	if again.Event.ID != c.Event.ID || again.Ctx.Attempt != 2 {
		t.Errorf("got %+v after %+v", again, c)
	}
	one.wantOver(t, "ack", c.Ack)
	one.wantSettled(t, "ack", "", again.Ack)
}

// A page may read a stream by fetch from the origins that the hub allows.
func TestStreamCORS(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) { cfg.Origins = []string{"https://app.example.com"} })
	s := r.subscribe(t, "topic=t&group=g", "Origin", "https://app.example.com")
	if got := s.res.Header.Get("Access-Control-Allow-Origin"); got != "https://app.example.com" {
		t.Errorf("Access-Control-Allow-Origin: %q", got)
	}
}

// large fills a topic with events of which no socket holds one, and returns how many.
func (r *rig) large(t *testing.T, topic string) int {
	t.Helper()
	const n = 4
	payload := `"` + strings.Repeat("x", 900<<10) + `"`
	for range n {
		r.put(t, topic, payload)
	}
	return n
}

// A stream that nobody reads ends as a slow consumer, and its events go to others.
func TestUnreadStream(t *testing.T) {
	t.Parallel()
	url := startNATS(t)
	impatient := newRigOn(t, jetstream.Config{URL: url}, func(cfg *facade.Config) { cfg.Limits.WriteStall = 200 * time.Millisecond })
	r := newRigOn(t, jetstream.Config{URL: url}, nil)
	n := r.large(t, "t")
	impatient.socket(t, "GET /subscribe?topic=t&group=g&from=earliest&ackTimeoutMs=3600000 HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer "+rigToken+"\r\n\r\n")
	impatient.seen.await(t, "stream closed 4001", 1)
	r.takeAll(t, "t", n)
}

// takeAll pulls until so many events have come and are settled, and wants most to be in their first
// attempt.
func (r *rig) takeAll(t *testing.T, topic string, n int) {
	t.Helper()
	got := make(map[string]int)
	eventually(t, "all events come to another member", func() bool {
		for _, e := range r.pull(t, topic, "g", `{"wait_ms":500}`) {
			got[e.Event.ID] = e.Ctx.Attempt
			r.wantSettled(t, "ack", "", e.Ack)
		}
		return len(got) == n
	})
	first := 0
	for _, attempt := range got {
		if attempt == 1 {
			first++
		}
	}
	if first < n/2 {
		t.Errorf("the attempts are %v: events that did not reach the client were counted", got)
	}
}
