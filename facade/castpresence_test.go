package facade_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/topics"
)

// roomRules gives the topics below room presence.
var roomRules = []topics.Rule{{Pattern: "room.*", Presence: true}}

// presenceFrame is a PRESENCE frame.
type presenceFrame struct {
	Op, Topic    string
	Count        int
	Joined, Left []string
}

// presence reads PRESENCE frames until one has this count, and returns all of them.
func (p *peer) presence(count int) (frames []presenceFrame) {
	p.t.Helper()
	for {
		var f presenceFrame
		text := p.read()
		if err := json.Unmarshal([]byte(text), &f); err != nil || f.Op != "PRESENCE" {
			p.t.Fatalf("got %.300s, want PRESENCE", text)
		}
		if frames = append(frames, f); f.Count == count {
			return frames
		}
	}
}

// members asks who is present.
func (r *rig) members(t *testing.T, topic, token string) (names []string) {
	t.Helper()
	a := r.ask(t, http.MethodGet, "/presence/"+topic, "", "Authorization", "Bearer "+token)
	var got struct {
		Topic   string
		Count   int
		Members []string
	}
	if err := json.Unmarshal([]byte(a.text), &got); err != nil || a.status != http.StatusOK || got.Topic != topic || got.Count != len(got.Members) {
		t.Fatalf("got %d %s", a.status, a.text)
	}
	return got.Members
}

// Clients see who comes and goes on all hubs, and all hubs answer the same.
func TestPresence(t *testing.T) {
	t.Parallel()
	url := startNATS(t)
	auth := func(cfg *facade.Config) { cfg.Auth = facade.Tokens(newVerifier(t)) }
	var hubs []*rig
	for range 2 {
		hubs = append(hubs, newRigOn(t, jetstream.Config{URL: url, Topics: roomRules}, auth))
	}
	enter := func(r *rig, name, opts string) *peer {
		p := r.dial(t)
		p.auth(grant(t, name, "subscribe:room.1", "presence:room.1"))
		p.follow("room.1", opts)
		return p
	}
	alice := enter(hubs[0], "alice", `"presence":true`)
	if got := alice.presence(1); !slices.Equal(got[0].Joined, []string{"alice"}) || len(got[0].Left) > 0 || got[0].Topic != "room.1" {
		t.Errorf("got %+v", got)
	}
	bob := enter(hubs[1], "bob", "")
	if got := alice.presence(2); !slices.Equal(got[0].Joined, []string{"bob"}) {
		t.Errorf("got %+v", got)
	}
	viewer := grant(t, "viewer", "presence:**")
	for i, r := range hubs {
		eventually(t, fmt.Sprintf("hub %d knows both", i), func() bool {
			return slices.Equal(r.members(t, "room.1", viewer), []string{"alice", "bob"})
		})
		if names := r.members(t, "room.2", viewer); len(names) > 0 {
			t.Errorf("%q are in a room that nobody entered", names)
		}
	}
	// A new token names another client.
	bob.send(`{"op":"AUTH","token":"` + grant(t, "bert", "subscribe:room.1") + `","corr":7}`)
	bob.want(`{"op":"OK","corr":7}`)
	eventually(t, "the new name is known", func() bool {
		return slices.Equal(hubs[0].members(t, "room.1", viewer), []string{"alice", "bert"})
	})
	_ = bob.conn.CloseNow()
	alice.presence(1)
	// The token that replaces the one with the right ends the broadcast.
	alice.send(`{"op":"AUTH","token":"` + grant(t, "alice", "subscribe:room.1") + `","corr":8}`)
	for _, code := range []string{"forbidden", ""} {
		if got := alice.any(); got.Code != code {
			t.Errorf("got %+v", got)
		}
	}
	for _, r := range hubs {
		eventually(t, "nobody is present", func() bool { return len(r.members(t, "room.1", viewer)) == 0 })
	}
}

// Presence needs its own right, and a topic that has it.
func TestPresenceRefusals(t *testing.T) {
	t.Parallel()
	v := newVerifier(t)
	r := newRigOn(t, jetstream.Config{Topics: roomRules}, func(cfg *facade.Config) { cfg.Auth = facade.Tokens(v) })
	p := r.dial(t)
	p.auth(grant(t, "eve", "subscribe:**", "presence:other.*"))
	for topic, code := range map[string]string{"room.1": "forbidden", "other.1": "bad_options"} {
		p.send(`{"op":"SUBSCRIBE","topic":"` + topic + `","opts":{"mode":"broadcast","presence":true},"corr":1}`)
		p.next("ERR", code)
	}
	for _, test := range []struct {
		path, scope string
		status      int
	}{
		{"/presence/room.1", "subscribe:**", http.StatusForbidden},
		{"/presence/room.1", "presence:room.2", http.StatusForbidden},
		{"/presence/other.1", "presence:**", http.StatusNotFound},
		{"/presence/a..b", "presence:**", http.StatusBadRequest},
		{"/presence/room.1", "*:**", http.StatusOK},
	} {
		a := r.ask(t, http.MethodGet, test.path, "", "Authorization", "Bearer "+grant(t, "eve", test.scope))
		if a.status != test.status {
			t.Errorf("%s with %s: %d %s, want %d", test.path, test.scope, a.status, a.text, test.status)
		}
	}
}

// Clients that come within a second are told at most twice, and a list has at most 100 names.
func TestPresenceOfManySockets(t *testing.T) {
	t.Parallel()
	const clients = 120
	v := newVerifier(t)
	r := newRigOn(t, jetstream.Config{Topics: roomRules}, func(cfg *facade.Config) { cfg.Auth = facade.Tokens(v) })
	peers := make([]*peer, clients)
	for i := range peers {
		peers[i] = r.dial(t)
		peers[i].auth(grant(t, fmt.Sprintf("client %03d", i), "subscribe:room.1", "presence:room.1"))
	}
	begun := time.Now()
	for _, p := range peers {
		p.send(`{"op":"SUBSCRIBE","topic":"room.1","opts":{"mode":"broadcast","presence":true}}`)
	}
	for _, p := range peers {
		p.castNext("OK")
	}
	most := 2 + int(time.Since(begun)/time.Second)
	for i, p := range peers {
		frames := p.presence(clients)
		if len(frames) > most {
			t.Fatalf("socket %d got %d frames, want at most %d", i, len(frames), most)
		}
		for _, f := range frames {
			if len(f.Joined) > 100 || strings.Join(f.Joined, "") == "" {
				t.Fatalf("%d names in a frame", len(f.Joined))
			}
		}
	}
}
