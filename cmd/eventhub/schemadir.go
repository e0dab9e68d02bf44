package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"eventhub/jetstream/jsonequal"
	"eventhub/jetstream/schemas"
)

// schemaApplyCmd is `eventhub schema apply`.
type schemaApplyCmd struct {
	httpFlags

	Dir    string `arg:"" type:"existingdir" help:"Directory with TOPIC.v1.json and so on, and TOPIC.v2.up.json and TOPIC.v2.down.json for casts."`
	DryRun bool   `help:"Compare the first new version of each topic with the versions before, and store nothing."`
}

// schemaFile is a version in a directory.
type schemaFile struct {
	topic   string
	version int
	paths   map[string]string // by "", ".up" and ".down"
}

// schemaName is the name of a file with a version of a topic.
var schemaName = regexp.MustCompile(`^(.+)\.v([1-9][0-9]*)(\.up|\.down)?\.json$`)

// readSchemaDir returns the versions in a directory, in the order of topics and versions. Files
// with other names are an error, for a misspelt one would be left out.
func readSchemaDir(dir string) ([]*schemaFile, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	type key struct {
		topic   string
		version int
	}
	files := make(map[key]*schemaFile)
	var all []*schemaFile
	for _, e := range entries {
		if e.IsDir() || e.Name()[0] == '.' {
			continue
		}
		parts := schemaName.FindStringSubmatch(e.Name())
		if parts == nil {
			return nil, fmt.Errorf("file %s is no schema; name it TOPIC.v1.json, or move it away", e.Name())
		}
		version, err := strconv.Atoi(parts[2])
		if err != nil {
			return nil, fmt.Errorf("file %s: version: %w", e.Name(), err)
		}
		k := key{parts[1], version}
		if files[k] == nil {
			files[k] = &schemaFile{topic: parts[1], version: version, paths: make(map[string]string)}
			all = append(all, files[k])
		}
		files[k].paths[parts[3]] = filepath.Join(dir, e.Name())
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s has no schemas; name them TOPIC.v1.json", dir)
	}
	slices.SortFunc(all, func(a, b *schemaFile) int { return cmp.Or(cmp.Compare(a.topic, b.topic), a.version-b.version) })
	for _, f := range all {
		if f.paths[""] == "" {
			return nil, fmt.Errorf("%s.v%d.json is missing beside its casts", f.topic, f.version)
		}
	}
	return all, nil
}

// Run compares the directory with the registry, and registers what is new. It stops at the first
// version that is refused; what was registered before stays.
func (cmd *schemaApplyCmd) Run(ctx context.Context, std streams) error {
	files, err := readSchemaDir(cmd.Dir)
	if err != nil {
		return err
	}
	topic, latest, skip := "", 0, false
	var bad error
	for _, f := range files {
		of := schemaFlags{cmd.httpFlags, f.topic}
		if f.topic != topic {
			var list struct{ Latest int }
			if err := of.call(ctx, http.MethodGet, "", nil, &list); err != nil {
				return err
			}
			topic, latest, skip = f.topic, list.Latest, false
		}
		switch {
		case skip: // of a dry run
			continue
		case f.version <= latest:
			if err := f.same(ctx, of); err != nil {
				return err
			}
			continue
		case f.version > latest+1:
			return fmt.Errorf("%s: version %d is the next one, and the directory has %d", f.topic, latest+1, f.version)
		}
		draft := draftFlags{schemaFlags: of, File: f.paths[""], Up: f.paths[".up"], Down: f.paths[".down"]}
		if cmd.DryRun {
			skip = true
			if _, err := fmt.Fprintf(std.out, "%s: version %d is new\n", f.topic, f.version); err != nil {
				return err
			}
			check := schemaCheckCmd{draft}
			if err := check.Run(ctx, std); errors.Is(err, errIncompatible) {
				bad = err
			} else if err != nil {
				return err
			}
			continue
		}
		if err := f.put(ctx, std, draft); err != nil {
			return err
		}
		latest++
	}
	return bad
}

// put registers the version, and begins each line of what is printed by the topic.
func (f *schemaFile) put(ctx context.Context, std streams, draft draftFlags) error {
	var out bytes.Buffer
	whole := std
	whole.out = &out
	put := schemaPutCmd{draftFlags: draft}
	failed := put.Run(ctx, whole)
	for line := range strings.Lines(out.String()) {
		if _, err := fmt.Fprintf(std.out, "%s: %s", f.topic, line); err != nil {
			return errors.Join(err, failed)
		}
	}
	if failed != nil {
		return fmt.Errorf("version %d: %w", f.version, failed)
	}
	return nil
}

// same wants a registered version to say what its file says: versions never change.
func (f *schemaFile) same(ctx context.Context, of schemaFlags) error {
	var v schemas.Version
	if err := of.call(ctx, http.MethodGet, "/"+strconv.Itoa(f.version), nil, &v); err != nil {
		return err
	}
	for kind, registered := range map[string]json.RawMessage{"": v.Schema, ".up": v.Up, ".down": v.Down} {
		path := f.paths[kind]
		if path == "" && (kind == ".up" || kind == ".down" && f.paths[".up"] == "") {
			continue // the registry may have made it
		}
		var text []byte
		if path != "" {
			var err error
			if text, err = os.ReadFile(path); err != nil { //nolint:gosec // the user names the directory
				return err
			}
		}
		if len(text)+len(registered) > 0 && !jsonequal.Equal(text, registered) {
			return fmt.Errorf("%s.v%d%s.json differs from version %d in the registry, and versions never change: add version %d instead", f.topic, f.version, kind, f.version, f.version+1)
		}
	}
	return nil
}
