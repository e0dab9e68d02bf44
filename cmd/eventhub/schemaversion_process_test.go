//go:build unix

package main

import (
	"bytes"
	"context"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestCommandsAskForAVersion has sub, export and replay print events in a version of their schema.
func TestCommandsAskForAVersion(t *testing.T) {
	t.Parallel()
	topics := filepath.Join(t.TempDir(), "topics.yaml")
	if err := os.WriteFile(topics, []byte("topics:\n  - {topic: hosts, schema: enforce}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	hub := startNode(t, "--topics="+topics)
	command := func(args ...string) (string, int) {
		var out bytes.Buffer
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		code := run(ctx, args, streams{out: &out, err: &out})
		return out.String(), code
	}
	ask := httpFlags{HTTPURL: hub.http}
	ask.Token = nodeToken
	post := func(path, body string) {
		t.Helper()
		var answer struct{}
		if err := ask.ask(t.Context(), http.MethodPost, path, []byte(body), &answer); err != nil {
			t.Fatal(err)
		}
	}
	post("/schemas/hosts", `{"schema":{"type":"object","required":["host"],"properties":{"host":{"type":"string"}},"additionalProperties":false}}`)
	post("/publish/hosts", `{"host":"a"}`)
	post("/schemas/hosts", `{"schema":{"type":"object","required":["name"],"properties":{"name":{"type":"string"}},"additionalProperties":false},
		"up":[{"rename":{"at":"/host","to":"name"}}],"down":[{"rename":{"at":"/name","to":"host"}}]}`)
	post("/publish/hosts", `{"name":"b"}`)
	for version, want := range map[string][]string{
		"": {`{"host":"a"}`, `{"name":"b"}`}, "1": {`{"host":"a"}`, `{"host":"b"}`}, "2": {`{"name":"a"}`, `{"name":"b"}`}, "latest": {`{"name":"a"}`, `{"name":"b"}`},
	} {
		for name, args := range map[string][]string{
			"sub":    {"--url=" + hub.url, "hosts", "--group=g" + version, "--from=earliest", "--count=2"},
			"export": {"--http-url=" + hub.http, "hosts"},
			"replay": {"--http-url=" + hub.http, "hosts"},
		} {
			if version != "" {
				args = append(args, "--schema-version="+version)
			}
			out, code := command(append([]string{name, "--token=" + nodeToken}, args...)...)
			if got := regexp.MustCompile(`\{"(host|name)":"."\}`).FindAllString(out, -1); code != 0 || !slices.Equal(got, want) {
				t.Errorf("%s in version %q: exit code %d, %s, want %v", name, version, code, out, want)
			}
		}
	}
	for version, want := range map[string]string{"3": "version 3 of the schema of hosts is not registered; the latest is 2", "0": "a version is a number from 1 on, or latest", "newest": "a version is a number from 1 on, or latest"} {
		if out, code := command("export", "--token="+nodeToken, "--http-url="+hub.http, "hosts", "--schema-version="+version); code == 0 || !strings.Contains(out, want) {
			t.Errorf("version %s: exit code %d, %s, want %s", version, code, out, want)
		}
	}
}
