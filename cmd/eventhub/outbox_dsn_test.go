package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSQLitePaths(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	good := map[string]string{
		"sqlite:a.db":                "a.db",
		"sqlite:./sub/../b.db":       "b.db",
		"sqlite://c.db":              "c.db",
		"sqlite:" + dir + "/d.db":    dir + "/d.db",
		"sqlite://" + dir + "/e.db":  dir + "/e.db",
		"sqlite:///" + dir + "/f.db": dir + "/f.db", // four slashes, as SQLAlchemy writes it
		"sqlite:////" + dir + "/g":   dir + "/g",
		"sqlite:odd %23#name.db":     "odd %23#name.db",
	}
	for dsn, want := range good {
		o, err := parseOutbox(dsn)
		if err != nil || o.path != want {
			t.Errorf("%s: path %q, %v; want %q", dsn, o.path, err, want)
			continue
		}
		box, err := o.open(t.Context(), outboxOptions{make: true})
		if err != nil {
			t.Errorf("%s: %v", dsn, err)
			continue
		}
		if _, _, err := box.migrate(t.Context()); err != nil {
			t.Errorf("%s: %v", dsn, err)
		}
		if err := box.close(); err != nil {
			t.Errorf("%s: %v", dsn, err)
		}
		if info, err := os.Stat(want); err != nil || info.Size() == 0 {
			t.Errorf("%s: file %s: %v, %v", dsn, want, info, err)
		}
	}
	for _, dsn := range []string{"sqlite:", "sqlite://", "sqlite:///", "sqlite::memory:", "sqlite:///:memory:", "sqlite:a.db?mode=ro", "sqlite:new/"} {
		if o, err := parseOutbox(dsn); err == nil || !strings.Contains(err.Error(), "use sqlite:PATH") {
			t.Errorf("%s: path %q, %v", dsn, o.path, err)
		}
	}
	left, err := filepath.Glob("*")
	if err != nil || len(left) != len(good) {
		t.Errorf("there are %q, %v; want %d", left, err, len(good))
	}
}
