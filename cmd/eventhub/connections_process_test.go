//go:build unix

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"eventhub/acl"
	"eventhub/docs/apitest"
	"eventhub/facade/client"
	"eventhub/ops"
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
	join := func(subject string) *client.Client {
		t.Helper()
		c, err := hub.connect(grant(subject, "*:**"))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	alice, bob := join("alice"), join("bob")
	held := make(chan client.Event, 10)
	jobs, err := alice.Subscribe(t.Context(), "jobs", "workers", client.SubscribeOptions{MaxInFlight: 2}, func(e client.Event) { held <- e })
	if err != nil {
		t.Fatal(err)
	}
	idle, err := alice.Subscribe(t.Context(), "idle", "workers", client.SubscribeOptions{}, func(client.Event) {})
	if err != nil {
		t.Fatal(err)
	}
	if err := idle.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := bob.Publish(t.Context(), "jobs", []byte(`1`), client.PublishOptions{}); err != nil {
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
		`ID +PRINCIPAL +ADDRESS +AGE +QUEUED +SUBSCRIPTIONS`,
		`[0-9a-f]{8}-[0-9]+ +jwt:alice +127\.0\.0\.1:[0-9]+ +[0-9]+s +0 +2`,
		` +idle +workers +0 of 100 in flight, paused *`,
		` +jobs +workers +2 of 2 in flight *`,
		`[0-9a-f]{8}-[0-9]+ +jwt:bob +127\.0\.0\.1:[0-9]+ +[0-9]+s +0 +0`,
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
	if closed, ok := errors.AsType[*client.CloseError](alice.Err()); !ok || closed.Code != 4005 {
		t.Errorf("the connection ended with %v", alice.Err())
	}
	if err := jobs.Unsubscribe(t.Context()); err == nil {
		t.Error("the subscription lives on")
	}
	again := make(chan client.Event, 10)
	if _, err := bob.Subscribe(t.Context(), "jobs", "workers", client.SubscribeOptions{}, func(e client.Event) { again <- e }); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		select {
		case <-again:
		case <-time.After(patience):
			t.Fatal("the events of the closed connection do not come again")
		}
	}
	if left := list(""); left.Count != 1 || left.Connections[0].Principal != "jwt:bob" {
		t.Errorf("left are %+v", left)
	}
}
