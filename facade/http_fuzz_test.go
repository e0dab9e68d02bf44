package facade_test

import (
	"bufio"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"eventhub/jetstream"
)

// FuzzHTTPTarget sends request targets as they are: path, escapes and query. Whatever comes, the
// hub answers in order, and it publishes to well-formed topics only.
func FuzzHTTPTarget(f *testing.F) {
	for _, target := range []string{
		"/publish/a", "/publish/a%2Eb", "/publish/%61", "/publish/a/b", "/publish/", "/publish/%", "/publish/%zz", "/publish/a?x=1&x=2",
		"/publish/a%2fb", "/publish/..", "/publish/%2e%2e", "/publish/a;b", "/publish/*", "/publish/a%00", "//publish/a", "/PUBLISH/a", "*", "/publish/%c3%a9",
	} {
		f.Add(target, "k", "v")
	}
	hub := startHub(f, openBus(f, func(c *jetstream.Config) { c.MemoryStorage = true }))
	address := strings.TrimPrefix(hub.http, "http://")
	f.Fuzz(func(t *testing.T, target, name, value string) {
		if target == "" || strings.ContainsAny(target+name+value, " \t\r\n") || name == "" {
			return // it would be another request
		}
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
		if _, err := io.WriteString(conn, "POST "+target+" HTTP/1.1\r\nHost: hub\r\nConnection: close\r\nAuthorization: Bearer "+testToken+
			"\r\nX-"+name+": "+value+"\r\nContent-Length: 1\r\n\r\n1"); err != nil {
			return // net/http has refused what it read so far
		}
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			return // the same
		}
		defer func() { _ = resp.Body.Close() }()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		switch resp.StatusCode {
		case http.StatusOK:
			u, err := url.ParseRequestURI(target)
			if err != nil {
				t.Fatalf("%q was published to: %v", target, err)
			}
			i := strings.LastIndexByte(u.Path, '/')
			if err := jetstream.ValidTopic(u.Path[i+1:]); err != nil {
				t.Fatalf("%q was published to: %v", target, err)
			}
			if !json.Valid(body) {
				t.Fatalf("%q was answered %q", target, body)
			}
		case http.StatusInternalServerError:
			t.Fatalf("%q was answered %q", target, body)
		}
	})
}

// FuzzSnapTarget sends request targets below /snap as they are, and reads them a second time by
// net/url: the hub answers with the record of just the key that is in the path, with a page within
// its bounds, or with an error of its own.
func FuzzSnapTarget(f *testing.F) {
	for _, target := range []string{
		"kept.f/a", "kept.f/a%2Fb", "kept.f/a/b", "kept.f/%2e%2e", "kept.f/..", "kept.f//", "kept.f/", "kept.f/%25", "kept.f/%252F", "kept.f/%", "kept.f/%ff",
		"kept%2ef/a", "kept.f%2Fa", "kept.f/a?x", "kept.f/a%3Fx", "kept.f/%00", "kept.f/a;b", "kept.f/ä", "kept.f/*", "kept.f", "kept.f?limit=1", "kept.f?limit=1001",
		"kept.f?offset=-1", "kept.f?offset=2&limit=3", "kept.f?keys=a&keys=a%2Fb", "kept.f?keys=&x", "kept.f?limit=+1", "kept.f?consistent=true", "plain.f", "", "/", "%2F/a",
	} {
		f.Add(target)
	}
	bus := openBus(f, func(c *jetstream.Config) { c.MemoryStorage, c.Topics = true, keptRules })
	hub := startHub(f, bus)
	known := map[string]bool{}
	for _, key := range []string{"a", "a/b", "..", "/", "%", "%2F", "?x", "a?x", "\x00", "a;b", "ä", "*", "a b", "a+b"} {
		known[key] = true
		if _, err := bus.Publish(f.Context(), "kept.f", []byte("1"), jetstream.PublishOptions{Key: key}); err != nil {
			f.Fatal(err)
		}
	}
	address := strings.TrimPrefix(hub.http, "http://")
	f.Fuzz(func(t *testing.T, target string) {
		if strings.ContainsAny(target, " \t\r\n") {
			return // it would be another request
		}
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
		target = "/snap/" + target
		if _, err := io.WriteString(conn, "GET "+target+" HTTP/1.1\r\nHost: hub\r\nConnection: close\r\nAuthorization: Bearer "+testToken+"\r\n\r\n"); err != nil {
			return // net/http has refused what it read so far
		}
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			return // the same
		}
		defer func() { _ = resp.Body.Close() }()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		u, err := url.ParseRequestURI(target)
		if err != nil {
			if resp.StatusCode < 400 {
				t.Fatalf("%q was answered %q", target, body)
			}
			return
		}
		topic, key, single := strings.Cut(strings.TrimPrefix(u.EscapedPath(), "/snap/"), "/")
		topic, _ = url.PathUnescape(topic)
		key, _ = url.PathUnescape(key)
		switch resp.StatusCode {
		case http.StatusOK:
			var got struct {
				Key    *string
				Limit  int
				Count  *int
				Offset int
				Items  []struct{ Key string }
			}
			if err := json.Unmarshal(body, &got); err != nil {
				t.Fatalf("%q was answered %q", target, body)
			}
			if single && (topic != "kept.f" || !known[key] || got.Key == nil || *got.Key != key) {
				t.Fatalf("%q, which is the key %q of %q, was answered %q", target, key, topic, body)
			}
			if !single && (got.Count == nil || *got.Count != len(got.Items) || got.Limit > 1000 || got.Offset < 0 || jetstream.ValidTopic(topic) != nil) {
				t.Fatalf("%q was answered %q", target, body)
			}
		case http.StatusNotFound:
			if single && topic == "kept.f" && known[key] {
				t.Fatalf("%q was answered %q", target, body)
			}
		case http.StatusBadRequest:
			if single && topic == "kept.f" && known[key] || !json.Valid(body) && resp.Header.Get("Content-Type") == "application/json" {
				t.Fatalf("%q was answered %q", target, body)
			}
		default:
			t.Fatalf("%q was answered %d %q", target, resp.StatusCode, body)
		}
	})
}
