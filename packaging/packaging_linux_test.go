// Package packaging has no code: it tests the files that run a hub in production.
package packaging

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// systemdAnalyze runs a verb of systemd-analyze.
func systemdAnalyze(t *testing.T, args ...string) (out string, ok bool) {
	t.Helper()
	text, err := exec.CommandContext(t.Context(), "systemd-analyze", args...).CombinedOutput()
	if err != nil && len(text) == 0 {
		t.Fatal(err)
	}
	return string(text), err == nil
}

// installed returns the unit with a program that is on this host.
func installed(t *testing.T, change ...string) string {
	t.Helper()
	text, err := os.ReadFile("systemd/eventhub.service")
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	unit := strings.NewReplacer(append(change, "/usr/bin/eventhub", program)...).Replace(string(text))
	if !strings.Contains(unit, program) {
		t.Fatal("the unit does not run /usr/bin/eventhub")
	}
	name := filepath.Join(t.TempDir(), "eventhub.service")
	if err := os.WriteFile(name, []byte(unit), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// The unit is valid, reloads by SIGHUP, and keeps the hub from nearly everything that it does not
// need. systemd rates what is left on a scale from 0 (nothing) to 10.
func TestSystemdUnit(t *testing.T) {
	unit := installed(t)
	if out, ok := systemdAnalyze(t, "verify", "--man=no", unit); !ok || out != "" {
		t.Errorf("systemd-analyze verify says:\n%s", out)
	}
	if out, ok := systemdAnalyze(t, "security", "--offline=yes", "--no-pager", "--threshold=15", unit); !ok {
		t.Errorf("the unit leaves more than it should:\n%s", out)
	}
	wrong := installed(t, "Restart=always", "Restart=sometimes", "ProtectSystem=strict\n", "")
	if out, _ := systemdAnalyze(t, "verify", "--man=no", wrong); !strings.Contains(out, "restart specifier") {
		t.Errorf("systemd-analyze verify finds nothing wrong with a broken unit: %q", out)
	}
	if text, err := os.ReadFile(unit); err != nil || !strings.Contains(string(text), "\nExecReload=kill -HUP $MAINPID\n") {
		t.Errorf("the unit reloads in another way, %v", err)
	}
}

// Each setting in the file of settings is one that a hub reads.
func TestSettingsOfTheUnit(t *testing.T) {
	page, err := os.ReadFile("../docs/settings.md")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("systemd/eventhub.env")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(string(text)) {
		name, _, found := strings.Cut(strings.TrimPrefix(line, "#"), "=")
		if !found || strings.HasPrefix(line, "# ") {
			continue
		}
		n++
		if !strings.Contains(string(page), "| `"+name+"` |") {
			t.Errorf("docs/settings.md has no %s", name)
		}
	}
	if n < 5 {
		t.Errorf("the file has %d settings", n)
	}
}
