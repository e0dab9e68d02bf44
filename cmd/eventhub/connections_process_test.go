//go:build unix

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"eventhub/acl"
	"eventhub/docs/apitest"
	"eventhub/ops"
	"eventhub/sdk/go/wire"
)

// Operators see who is connected and what each connection does, and can close a connection.
func TestConnectionsOfAHub(t *testing.T) {
	t.Parallel()
	hub := startNode(t, "--jwt-secret-file="+secretFile(t))
	web := &http.Client{Transport: apitest.Transport(t, apitest.Operators, http.DefaultTransport)}
	grant := func(subject string, scopes ...string) string {
		token, err := acl.Sign([]byte(revokeSecret), acl.Grant{Subject: subject, Scopes: scopes, TTL: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		return token
	}
	join := func(subject string) *wire.Conn {
		t.Helper()
		c, err := hub.connect(grant(subject, "*:**"))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	alice, bob := join("alice"), join("bob")
	held := make(chan wire.Event, 10)
	jobs, err := alice.Subscribe(t.Context(), "jobs", "workers", wire.SubscribeOptions{MaxInFlight: 2}, func(e wire.Event) { held <- e })
	if err != nil {
		t.Fatal(err)
	}
	idle, err := alice.Subscribe(t.Context(), "idle", "workers", wire.SubscribeOptions{}, func(wire.Event) {})
	if err != nil {
		t.Fatal(err)
	}
	if err := idle.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := bob.Publish(t.Context(), "jobs", []byte(`1`), wire.PublishOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	<-held
	<-held

	type page struct {
		Count       int
		Connections []ops.Connection
		Next        string
	}
	list := func(query string) (p page) {
		t.Helper()
		status, text := askThrough(t.Context(), web, grant("operator", "inspect:eventhub.connections"), http.MethodGet, hub.ops+"/connections"+query, nil)
		if err := json.Unmarshal([]byte(text), &p); status != http.StatusOK || err != nil {
			t.Fatalf("%s: %d %s, %v", query, status, text, err)
		}
		return p
	}
	var all page
	// A client may have read an answer before the hub counts its bytes as sent.
	eventually(t, "all answers are sent", func() bool {
		all = list("")
		return !slices.ContainsFunc(all.Connections, func(c ops.Connection) bool { return c.QueuedBytes > 0 })
	})
	if all.Count != 2 || len(all.Connections) != 2 || all.Next != "" {
		t.Fatalf("got %+v, want two connections", all)
	}
	first := all.Connections[0]
	if got := fmt.Sprint(first.Subscriptions); first.Principal != "jwt:alice" || got != "[{idle workers 100 0 true} {jobs workers 2 2 false}]" {
		t.Errorf("the first connection is %+v", first)
	}
	if age := time.Since(time.UnixMilli(first.SinceMS)); !strings.HasPrefix(first.Remote, "127.0.0.1:") || age < 0 || age > time.Minute {
		t.Errorf("the first connection is from %s, %v ago", first.Remote, age)
	}
	one := list("?limit=1")
	two := list("?limit=1&next=" + one.Next)
	if one.Count != 1 || one.Next != first.ID || two.Count != 1 || two.Next != "" || two.Connections[0].Principal != "jwt:bob" {
		t.Errorf("pages of one are %+v and %+v", one, two)
	}

	admin := grant("operator", "admin:eventhub.connections")
	flags := opsFlags{OpsURL: hub.ops, credentialFlags: credentialFlags{Token: admin}}
	var out strings.Builder
	if err := (&connectionsListCmd{flags}).Run(t.Context(), streams{out: &out}); err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		`ID +KIND +PRINCIPAL +ADDRESS +AGE +QUEUED +SUBSCRIPTIONS`,
		`[0-9a-f]{8}-[0-9]+ +websocket +jwt:alice +127\.0\.0\.1:[0-9]+ +[0-9]+s +0 +2`,
		` +idle +workers +0 of 100 in flight, paused *`,
		` +jobs +workers +2 of 2 in flight *`,
		`[0-9a-f]{8}-[0-9]+ +websocket +jwt:bob +127\.0\.0\.1:[0-9]+ +[0-9]+s +0 +0`,
	} {
		if !regexp.MustCompile("(?m)^" + line + "$").MatchString(out.String()) {
			t.Errorf("the command printed no line %s:\n%s", line, out.String())
		}
	}

	for _, test := range []struct {
		token, method, path string
		status              int
		answer              string
	}{
		{grant("s", "subscribe:jobs"), http.MethodGet, "/connections", 403, `"code":"forbidden"`},
		{grant("s", "inspect:eventhub.connections"), http.MethodDelete, "/connections/" + first.ID, 403, `"code":"forbidden"`},
		{admin, http.MethodGet, "/connections?limit=1001", 400, "limit must be a number from 1 to 1000."},
		{admin, http.MethodGet, "/connections?limit=x", 400, "limit must be a number from 1 to 1000."},
		{admin, http.MethodDelete, "/connections/" + first.ID + "0", 404, "no such connection"},
		{admin, http.MethodDelete, "/connections/other-1", 404, "no such connection"},
		{admin, http.MethodDelete, "/connections/" + first.ID, 204, ""},
	} {
		if status, text := askThrough(t.Context(), web, test.token, test.method, hub.ops+test.path, nil); status != test.status || !strings.Contains(text, test.answer) {
			t.Errorf("%s %s: %d %s", test.method, test.path, status, text)
		}
	}
	select {
	case <-alice.Done():
	case <-time.After(patience):
		t.Fatal("the connection lives on")
	}
	if closed, ok := errors.AsType[*wire.CloseError](alice.Err()); !ok || closed.Code != 4005 {
		t.Errorf("the connection ended with %v", alice.Err())
	}
	if err := jobs.Unsubscribe(t.Context()); err == nil {
		t.Error("the subscription lives on")
	}
	again := make(chan wire.Event, 10)
	if _, err := bob.Subscribe(t.Context(), "jobs", "workers", wire.SubscribeOptions{}, func(e wire.Event) { again <- e }); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		select {
		case <-again:
		case <-time.After(patience):
			t.Fatal("the events of the closed connection do not come again")
		}
	}
	// A client may have read that its connection ends before the hub forgets it.
	var left page
	eventually(t, "the closed connection is forgotten", func() bool {
		left = list("")
		return left.Count < 2
	})
	if left.Count != 1 || left.Connections[0].Principal != "jwt:bob" {
		t.Errorf("left are %+v", left)
	}
}

// Operators see members over HTTP, and can end them: streams, pulls that wait, and pulls whose
// events are not settled.
func TestMembersOverHTTPAreConnections(t *testing.T) {
	t.Parallel()
	hub := startNode(t, "--jwt-secret-file="+secretFile(t))
	clients := &http.Client{Transport: apitest.Transport(t, apitest.Clients, http.DefaultTransport)}
	web := &http.Client{Transport: apitest.Transport(t, apitest.Operators, http.DefaultTransport)}
	grant := func(subject string, scopes ...string) string {
		token, err := acl.Sign([]byte(revokeSecret), acl.Grant{Subject: subject, Scopes: scopes, TTL: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		return token
	}
	type answer struct {
		status int
		text   string
	}
	pull := func(subject, body string) (a answer) {
		a.status, a.text = askThrough(t.Context(), clients, grant(subject, "*:**"), http.MethodPost, hub.http+"/groups/chores/workers/pull", strings.NewReader(body))
		return a
	}
	list := func(query string) (all []ops.Connection) {
		t.Helper()
		status, text := askThrough(t.Context(), web, grant("operator", "inspect:eventhub.connections"), http.MethodGet, hub.ops+"/connections"+query, nil)
		var page struct{ Connections []ops.Connection }
		if err := json.Unmarshal([]byte(text), &page); status != http.StatusOK || err != nil {
			t.Fatalf("%s: %d %s, %v", query, status, text, err)
		}
		return page.Connections
	}
	admin := grant("operator", "admin:eventhub.connections")
	end := func(id string) {
		t.Helper()
		if status, text := askThrough(t.Context(), web, admin, http.MethodDelete, hub.ops+"/connections/"+id, nil); status != http.StatusNoContent {
			t.Errorf("DELETE %s: %d %s", id, status, text)
		}
	}

	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, hub.http+"/subscribe?topic=jobs&group=workers&maxInFlight=7", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+grant("carol", "*:**"))
	stream, err := clients.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stream.Body.Close() }()
	waits := make(chan answer, 1)
	go func() { waits <- pull("dave", `{"max":3,"wait_ms":30000}`) }()
	var all []ops.Connection
	eventually(t, "the pull waits", func() bool {
		all = list("")
		return len(all) == 2 && len(all[1].Subscriptions) == 1
	})
	for i, want := range []struct{ kind, principal, subscriptions string }{
		{"stream", "jwt:carol", "[{jobs workers 7 0 false}]"}, {"pull", "jwt:dave", "[{chores workers 3 0 false}]"},
	} {
		c := all[i]
		age := time.Since(time.UnixMilli(c.SinceMS))
		if c.Kind != want.kind || c.Principal != want.principal || fmt.Sprint(c.Subscriptions) != want.subscriptions || c.QueuedBytes != 0 ||
			!strings.HasPrefix(c.Remote, "127.0.0.1:") || age < 0 || age > time.Minute {
			t.Errorf("got %+v, %v old, want %+v", c, age, want)
		}
	}
	if got := list("?topic=jobs&group=workers"); len(got) != 1 || got[0].ID != all[0].ID {
		t.Errorf("the members of one group are %+v", got)
	}
	if got := list("?next=" + all[0].ID); len(got) != 1 || got[0].ID != all[1].ID {
		t.Errorf("the second page is %+v", got)
	}
	var out strings.Builder
	flags := opsFlags{OpsURL: hub.ops, credentialFlags: credentialFlags{Token: admin}}
	if err := (&connectionsListCmd{flags}).Run(t.Context(), streams{out: &out}); err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		`[0-9a-f]{8}-[0-9]+ +stream +jwt:carol +127\.0\.0\.1:[0-9]+ +[0-9]+s +0 +1`,
		` +jobs +workers +0 of 7 in flight *`,
		`[0-9a-f]{8}-[0-9]+ +pull +jwt:dave +127\.0\.0\.1:[0-9]+ +[0-9]+s +0 +1`,
	} {
		if !regexp.MustCompile("(?m)^" + line + "$").MatchString(out.String()) {
			t.Errorf("the command printed no line %s:\n%s", line, out.String())
		}
	}

	end(all[1].ID)
	if a := <-waits; a.status != http.StatusServiceUnavailable || !strings.Contains(a.text, "An operator ended the pull.") {
		t.Errorf("the pull that waited got %d %s", a.status, a.text)
	}
	end(all[0].ID)
	text, err := io.ReadAll(stream.Body)
	if err != nil || !strings.HasSuffix(string(text), "event: close\ndata: {\"code\":4005,\"reason\":\"closed_by_operator\"}\n\n") {
		t.Errorf("the stream ended with %q, %v", text, err)
	}
	eventually(t, "nobody is connected", func() bool { return len(list("")) == 0 })

	// What a pull holds comes again, after a failed attempt.
	if status, text := askThrough(t.Context(), clients, grant("carol", "*:**"), http.MethodPost, hub.http+"/publish/chores", strings.NewReader("1")); status != http.StatusOK {
		t.Fatalf("%d %s", status, text)
	}
	got := pull("dave", `{"max":3,"wait_ms":30000}`)
	if !strings.Contains(got.text, `"ctx":{"attempt":1,`) {
		t.Fatalf("the pull got %d %s", got.status, got.text)
	}
	// A client may read the answer before the hub's write returns.
	eventually(t, "the answer has left the hub", func() bool {
		all = list("")
		return len(all) == 1 && all[0].QueuedBytes == 0
	})
	if all[0].Kind != "pull" || fmt.Sprint(all[0].Subscriptions) != "[{chores workers 3 1 false}]" {
		t.Errorf("the pull with an event is %+v", all)
	}
	end(all[0].ID)
	again := pull("carol", `{"wait_ms":30000}`)
	if !strings.Contains(again.text, `"ctx":{"attempt":2,`) {
		t.Errorf("after the end of the pull, another got %d %s", again.status, again.text)
	}
	handle := regexp.MustCompile(`"ack":"([^"]+)"`).FindStringSubmatch(got.text)[1]
	if status, text := askThrough(t.Context(), clients, grant("dave", "*:**"), http.MethodPost, hub.http+"/ack", strings.NewReader(`{"ack":["`+handle+`"]}`)); status != http.StatusGone {
		t.Errorf("its handle: %d %s", status, text)
	}
}
