package facade_test

import (
	"cmp"
	"context"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/topics"
)

// TestConformance plays the scenarios of testdata/frames against a hub over real sockets.
func TestConformance(t *testing.T) {
	t.Parallel()
	bus := openBus(t, func(cfg *jetstream.Config) {
		cfg.MemoryStorage, cfg.Limits.GroupsPerClient = true, 1000
		cfg.Topics = []topics.Rule{{Pattern: "compacted.**", Compaction: true}, {Pattern: "room.**", Presence: true}, {Pattern: "short.**", Family: "short", MaxMsgs: 2}}
	})
	for _, s := range loadScenarios(t, testToken) {
		t.Run(s.Name, func(t *testing.T) {
			// Scenarios that make hundreds of topics or groups come first, and alone: meanwhile,
			// quotas fill up again.
			if len(s.Steps) < 200 {
				t.Parallel()
			}
			hub := startHub(t, bus, func(cfg *facade.Config) {
				cfg.Auth = namedClients{cfg.Auth, s.Name}
				cfg.Limits.AuthTimeout = time.Duration(s.Config.AuthTimeoutMS) * time.Millisecond
			})
			p := &player{t: t, url: hub.url, names: newNames(), conns: map[string]*rawConn{}}
			for i := range s.Steps {
				p.number = i + 1
				p.play(&s.Steps[i])
			}
			p.finish()
		})
	}
}

// namedClients makes all clients one principal of this name, so that scenarios do not share the
// limit of new topics.
type namedClients struct {
	facade.Authenticator
	name string
}

func (n namedClients) Authenticate(ctx context.Context, token string) (facade.Principal, error) {
	p, err := n.Authenticator.Authenticate(ctx, token)
	if err != nil {
		return nil, err
	}
	return named{p, n.name}, nil
}

type named struct {
	facade.Principal
	key string
}

func (n named) Key() string { return n.key }

// player plays one scenario.
type player struct {
	t      *testing.T
	url    string
	names  *names
	conns  map[string]*rawConn
	number int
}

func (p *player) conn(name string) *rawConn {
	if p.conns[name] == nil {
		p.conns[name] = dialRaw(p.t, p.url)
	}
	return p.conns[name]
}

func (p *player) play(s *step) {
	p.t.Helper()
	c := p.conn(s.Conn)
	switch {
	case s.Send != nil:
		c.send(p.text(s.Send))
	case s.SendAll != nil:
		var texts []string
		for _, frame := range s.SendAll {
			texts = append(texts, p.text(frame))
		}
		c.send(texts...)
	case s.SendBinary != nil:
		if err := c.ws.Write(p.t.Context(), websocket.MessageBinary, []byte(*s.SendBinary)); err != nil {
			p.t.Fatalf("step %d: %v", p.number, err)
		}
	case s.Expect != nil:
		got := p.message(c)
		if err := equal(p.names, "frame", s.Expect, json.RawMessage(got)); err != nil {
			p.t.Fatalf("step %d: %v\n got  %s\n want %s", p.number, err, brief([]byte(got)), brief(s.Expect))
		}
	case s.ExpectAll != nil:
		p.expectAll(c, s.ExpectAll)
	case s.ExpectClose != nil:
		if got := c.closed(); got != *s.ExpectClose {
			p.t.Fatalf("step %d: closed with %v, not %v", p.number, got, *s.ExpectClose)
		}
		delete(p.conns, s.Conn)
	case s.Disconnect:
		_ = c.ws.CloseNow()
		delete(p.conns, s.Conn)
	}
}

// message is the next message of c, which must be JSON.
func (p *player) message(c *rawConn) string {
	p.t.Helper()
	got := c.next()
	if !json.Valid([]byte(got)) {
		p.t.Fatalf("step %d: the hub sent what is no JSON: %s", p.number, brief([]byte(got)))
	}
	return got
}

func (p *player) text(frame json.RawMessage) string {
	p.t.Helper()
	text, err := p.names.text(frame)
	if err != nil {
		p.t.Fatalf("step %d: %v", p.number, err)
	}
	return text
}

// expectAll takes as many messages as frames are expected, and gives each message the first frame
// it equals.
func (p *player) expectAll(c *rawConn, want []json.RawMessage) {
	p.t.Helper()
	left := slices.Clone(want)
	for len(left) > 0 {
		got := p.message(c)
		var why []string
		found := slices.IndexFunc(left, func(frame json.RawMessage) bool {
			trial := p.names.clone()
			if err := equal(trial, "frame", frame, json.RawMessage(got)); err != nil {
				why = append(why, err.Error())
				return false
			}
			p.names = trial
			return true
		})
		if found < 0 {
			p.t.Fatalf("step %d: no frame like this is expected: %s\n%s", p.number, brief([]byte(got)), strings.Join(why, "\n"))
		}
		left = slices.Delete(left, found, found+1)
	}
}

// finish fails on messages that no step took: whatever comes before the answer to one more frame.
func (p *player) finish() {
	p.t.Helper()
	for _, name := range slices.Sorted(maps.Keys(p.conns)) {
		c := p.conns[name]
		c.send(`{"op":"UNSUBSCRIBE","topic":"the-end","group":"g","corr":"the end"}`)
		got := c.next()
		var f struct {
			Op, Corr string
		}
		if err := json.Unmarshal([]byte(got), &f); err != nil || f.Corr != "the end" {
			p.t.Errorf("a frame that no step expects, on connection %s: %s", cmp.Or(name, "main"), brief([]byte(got)))
		}
	}
}
