//go:build unix

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
)

// TestNativeRequestsThatCostTooMuch has a client that may read a topic ask the server in all ways
// that the documents show, and in ways that read as much of the stream as the client likes. The
// server answers the second with an error that says what is refused.
func TestNativeRequestsThatCostTooMuch(t *testing.T) {
	t.Parallel()
	rules := filepath.Join(t.TempDir(), "topics.yaml")
	if err := os.WriteFile(rules, []byte("topics:\n  - {topic: state, compaction: true}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	hub := startNode(t, "--nats-listen=127.0.0.1:0", "--jwt-secret-file="+secretFile(t), "--topics="+rules)
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	nc, js := dialNative(t, hub.nats, scoped(t, "reader", "publish:state", "subscribe:state"))
	for _, subject := range []string{"event.state", "keyed.a.state", "keyed.b.state"} {
		if _, err := js.Publish(ctx, subject, []byte("1")); err != nil {
			t.Fatal(err)
		}
	}

	stream, err := js.Stream(ctx, "state")
	if err != nil {
		t.Fatal(err)
	}
	if info, err := stream.Info(ctx); err != nil || info.State.Msgs != 3 {
		t.Errorf("the state of the stream: %+v, %v", info, err)
	}
	if m, err := stream.GetMsg(ctx, 2, natsjs.WithGetMsgSubject(">")); err != nil || m.Subject != "keyed.a.state" {
		t.Errorf("the next event: %+v, %v", m, err)
	}
	if m, err := stream.GetLastMsgForSubject(ctx, "keyed.b.state"); err != nil || m.Sequence != 3 {
		t.Errorf("the newest event of a key: %+v, %v", m, err)
	}
	bucket, err := js.KeyValue(ctx, "latest_state")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the newest event of a key, in the bucket", func() bool {
		_, err := bucket.Get(ctx, "a")
		return err == nil
	})
	if _, err := bucket.Status(ctx); err != nil {
		t.Error(err)
	}
	legacy, err := nc.JetStream()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := legacy.StreamInfo("state"); err != nil {
		t.Error(err)
	}
	ask := func(subject, body string, header nats.Header) string {
		t.Helper()
		m, err := nc.RequestMsgWithContext(ctx, &nats.Msg{Subject: "$JS.API." + subject, Data: []byte(body), Header: header})
		if err != nil {
			t.Fatalf("%s %s: %v", subject, body, err)
		}
		return m.Header.Get("Status") + string(m.Data)
	}
	const get, direct, info = "STREAM.MSG.GET.state", "DIRECT.GET.state", "STREAM.INFO.state"
	for _, c := range [][2]string{
		{get, `{"seq":1}`},
		{direct, `{"seq":1,"batch":0}`},
		{direct, ` {"seq":1,"no_hdr":true} `},
		{direct + ".event.state", ""},
		{direct, `{"last_by_subj":"event.state"}`},
		{info, ""},
		{info, "{}"},
		{info, "null"},
		{info, `{"subjects_filter":"","offset":0,"deleted_details":false}`},
	} {
		if got := ask(c[0], c[1], nil); strings.Contains(got, "error") || strings.HasPrefix(got, "4") {
			t.Errorf("%s %s: %s", c[0], c[1], got)
		}
	}
	for _, c := range [][3]string{
		{info, `{"subjects_filter":">"}`, "subjects_filter"},
		{info, `{"Subjects_Filter":">"}`, "Subjects_Filter"},
		{info, `{"subjects_filter":">","subjects_filter":""}`, "subjects_filter"},
		{info, `{} {"subjects_filter":">"}`, "anything but one JSON object"},
		{info, `{"\u0073ubjects_filter":">"}`, "subjects_filter"},
		{info, `{"deleted_details":true}`, "deleted_details"},
		{get, `{"next_by_subj":"keyed.*.state"}`, "next_by_subj"},
		{get, `{"last_by_subj":"keyed.*.state"}`, "last_by_subj"},
		{get, `{"start_time":"2020-01-01T00:00:00Z"}`, "start_time"},
	} {
		want := "native clients may not ask for " + c[2]
		for _, header := range []nats.Header{nil, {"A": {"b"}}} {
			if got := ask(c[0], c[1], header); !strings.Contains(got, want) || !strings.Contains(got, "10025") {
				t.Errorf("%s %s: %s, want %q", c[0], c[1], got, want)
			}
		}
	}
	for _, c := range [][2]string{
		{direct, `{"seq":1,"batch":1000}`},
		{direct, `{"multi_last":[">"]}`},
		{direct, `{"next_by_subj":">","batch":2}`},
		{direct, `{"seq":1,"max_bytes":1}`},
		{direct + ".keyed.*.state", ""},
		{direct + ".>", ""},
		{direct, `{"seq":1,"BATCH":2}`},
	} {
		if got := ask(c[0], c[1], nats.Header{"A": {"b"}}); got != "408" {
			t.Errorf("%s %s: %s, want 408", c[0], c[1], got)
		}
	}

	// The hub's own token has full access.
	_, own := dialNative(t, hub.nats, nodeToken)
	if stream, err = own.Stream(ctx, "state"); err != nil {
		t.Fatal(err)
	}
	if all, err := stream.Info(ctx, natsjs.WithSubjectFilter(">")); err != nil || len(all.State.Subjects) != 3 {
		t.Errorf("all subjects: %+v, %v", all, err)
	}
}

// TestNativeRatesOfAPrincipal has two connections of a principal send more than its rate. The hub
// reads both more slowly and ends neither. Another principal, and the hub's own token, wait for
// nothing meanwhile.
func TestNativeRatesOfAPrincipal(t *testing.T) {
	t.Parallel()
	const rate, burst, each = 500, 10, 500
	hub := startNode(t, "--nats-listen=127.0.0.1:0", "--jwt-secret-file="+secretFile(t), fmt.Sprintf("--limit-native-messages=%d/%d", rate, burst))
	token := scoped(t, "one", "publish:load")
	var done sync.WaitGroup
	began := time.Now()
	for range 2 {
		nc, _ := dialNative(t, hub.nats, token)
		for range each {
			if err := nc.Publish("event.load", []byte("1")); err != nil {
				t.Fatal(err)
			}
		}
		done.Go(func() {
			if err := nc.FlushTimeout(2 * patience); err != nil || nc.Reconnects > 0 {
				t.Errorf("%v, %d reconnects", err, nc.Reconnects)
			}
		})
	}
	for name, token := range map[string]string{"another principal": scoped(t, "two", "publish:load"), "the hub's own token": nodeToken} {
		nc, _ := dialNative(t, hub.nats, token)
		came := time.Now()
		for range map[string]int{"another principal": burst / 2, "the hub's own token": 4 * each}[name] {
			if err := nc.Publish("event.load", []byte("1")); err != nil {
				t.Fatal(err)
			}
		}
		if err := nc.FlushTimeout(patience); err != nil || time.Since(came) > slowdown*time.Second {
			t.Errorf("%s waited for %v: %v", name, time.Since(came), err)
		}
	}
	done.Wait()
	if took, least := time.Since(began), time.Second*(2*each-burst)/rate; took < least {
		t.Errorf("two connections sent %d messages in %v, want at least %v", 2*each, took, least)
	}
}
