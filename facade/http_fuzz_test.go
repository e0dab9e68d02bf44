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

// FuzzHTTPTarget sends request targets as they are: path, escapes and query. Whatever comes, the hub answers in order, and it
// publishes to well-formed topics only.
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
