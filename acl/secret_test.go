package acl_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"eventhub/acl"
)

func TestReadSecret(t *testing.T) {
	for text, want := range map[string]string{
		"secret":     "secret",
		"secret\n":   "secret",
		"secret\r\n": "secret",
		" s \n\n":    " s \n",
		"":           "",
		"\n":         "",
		strings.Repeat("s", acl.MaxSecretBytes) + "\r\n": strings.Repeat("s", acl.MaxSecretBytes),
		strings.Repeat("s", acl.MaxSecretBytes+1):        "",
		strings.Repeat("s", 1<<20):                       "",
	} {
		path := filepath.Join(t.TempDir(), "secret")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := acl.ReadSecret(path)
		if string(got) != want || (err == nil) != (want != "") {
			t.Errorf("%.20q: %.20q, %v", text, got, err)
		}
		if err != nil && !strings.Contains(err.Error(), path) {
			t.Errorf("the error does not name the file: %v", err)
		}
	}
	// Of root's own files, one that root's group may read, and nobody may write, is accepted.
	path := filepath.Join(t.TempDir(), "mounted")
	if err := os.WriteFile(path, []byte("secret"), 0o440); err != nil {
		t.Fatal(err)
	}
	if _, err := acl.ReadSecret(path); (err == nil) != (os.Geteuid() == 0) {
		t.Errorf("mode 0440, by user %d: %v", os.Geteuid(), err)
	}
	if _, err := acl.ReadSecret(filepath.Join(t.TempDir(), "none")); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Error(err)
	}
}
