package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"eventhub/facade/hubtest"
	"eventhub/jetstream"
	"eventhub/jetstream/topics"
)

// TestSchemaCommands registers, shows and compares versions as a user does.
func TestSchemaCommands(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t, hubtest.Token("token"), hubtest.Bus(func(cfg *jetstream.Config) {
		cfg.Topics = []topics.Rule{{Pattern: "hosts", MaxAge: time.Hour, Schema: topics.SchemaRule{Mode: topics.SchemaEnforce}}}
	}))
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	one := file("1.json", `{"type":"object","required":["host"],"properties":{"host":{"type":"string"}},"additionalProperties":false}`)
	two := file("2.json", `{"type":"object","required":["host","port"],"properties":{"host":{"type":"string"},"port":{"type":"integer","default":80}},"additionalProperties":false}`)
	three := file("3.json", `{"type":"object","required":["name"],"properties":{"name":{"type":"string"},"port":{"type":"integer"}},"additionalProperties":false}`)
	up := file("up.json", `[{"rename":{"at":"/host","to":"name"}}]`)
	command := func(args ...string) (string, int) {
		var out bytes.Buffer
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		code := run(ctx, append([]string{"schema", args[0], "--http-url=" + hub.HTTP, "--token=token"}, args[1:]...), streams{out: &out, err: &out})
		return out.String(), code
	}
	wantCode := func(code int, part string, args ...string) {
		t.Helper()
		if out, got := command(args...); got != code || !strings.Contains(out, part) {
			t.Errorf("schema %s: exit code %d, %s, want %d and %s", args[0], got, out, code, part)
		}
	}
	want := func(part string, args ...string) { t.Helper(); wantCode(0, part, args...) }
	want("compatible (backward; 0 documents tried)", "check", "hosts", one)
	want("registered version 1", "put", "hosts", one, "--description=first")
	want("version 1 says the same", "put", "hosts", one)
	want("cast for defaults: [{\"default\":{\"at\":\"/port\",\"value\":80}}]", "check", "hosts", two)
	want("cast back: [{\"remove\":{\"at\":\"/port\"}}]", "check", "hosts", two)
	want("registered version 2", "put", "hosts", two)
	wantCode(1, "backward: property_removed_from_closed_content_model of version 2 at \"/host\"", "check", "hosts", three)
	wantCode(1, "schema_conflict", "put", "hosts", three)
	// The error has one finding, and there are more.
	wantCode(1, "backward: property_removed_from_closed_content_model of version 2 at \"/host\"\n", "put", "hosts", three)
	wantCode(1, "backward: required_added of version 2 at \"/name\"\n", "put", "hosts", three)
	want("registered version 3", "put", "hosts", three, "--up="+up)
	want("mode enforce, compatibility backward", "list", "hosts")
	want("first", "list", "hosts")
	want(`"required"`, "show", "hosts", "1")
	want(`"up": [`, "show", "hosts", "--whole")
	want("forward: /port: property_removed_from_closed_content_model (the reader takes no member of a name that the writer declares)", "diff", "hosts", "1", "2")
	want("export type Hosts = {\n  name: string;\n  port?: number;\n};", "types", "hosts")
	document, _ := command("asyncapi")
	for _, part := range []string{
		`"asyncapi": "3.0.0"`, `"address": "hosts"`, `"name": "hosts.v1"`, `"name": "hosts.v3"`, `"const": "3"`, `"$ref": "#/channels/hosts/messages/v3"`, `"description": "first"`,
	} {
		if !strings.Contains(document, part) {
			t.Errorf("%s\nwant %s", document, part)
		}
	}
	if same, _ := command("asyncapi", "hosts", "hosts"); document != same {
		t.Errorf("all topics: %s, want %s", document, same)
	}
	wantCode(1, "topic other has no schema; register one with eventhub schema put", "asyncapi", "hosts", "other")
	folder := t.TempDir()
	add := func(name, path string) {
		text, err := os.ReadFile(path)
		if err == nil {
			err = os.WriteFile(filepath.Join(folder, name), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	add("hosts.v1.json", one)
	add("hosts.v2.json", two)
	add("other.v1.json", two)
	add("other.v2.json", three)
	want("other: version 1 is new", "apply", folder, "--dry-run")
	want("", "list")
	before, code := command("apply", folder)
	if lines := strings.Split(strings.TrimSpace(before), "\n"); code != 1 || len(lines) < 4 || !strings.HasPrefix(before, "other: compatible (backward; 0 documents tried)\nother: registered version 1\nother: backward: ") ||
		!strings.HasPrefix(lines[len(lines)-1], "eventhub: version 2: schemas of other: schema_conflict: ") {
		t.Errorf("exit code %d, %s", code, before)
	}
	if out, _ := command("list"); !regexp.MustCompile(`^TOPIC +LATEST +REGISTERED\nhosts +3 +20\S+\nother +1 +20\S+\n$`).MatchString(out) {
		t.Errorf("all topics: %s", out)
	}
	add("other.v2.up.json", up)
	want("registered version 2", "apply", folder)
	want("", "apply", folder)
	add("hosts.v2.json", three)
	wantCode(1, "hosts.v2.json differs from version 2 in the registry, and versions never change: add version 3 instead", "apply", folder)
	add("hosts.json", three)
	wantCode(1, "file hosts.json is no schema; name it TOPIC.v1.json", "apply", folder)
	wantCode(1, "not_found", "show", "hosts", "9")
	wantCode(1, "is not JSON", "put", "hosts", file("bad.json", "{"))
}
