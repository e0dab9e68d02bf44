package main

import (
	"encoding/base64"
	"errors"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"eventhub/jetstream/natstest/lossyfs"
)

// cutAfter is how much of a backup is written before it is cut off.
const cutAfter = 256 << 10

// A backup whose disk is full, and one that is interrupted in the middle, leave no file.
func TestBackupThatIsCutOff(t *testing.T) {
	t.Parallel()
	hub := startNode(t, append(redriveLimits, "--data="+filepath.Join(t.TempDir(), "data"))...)
	c := hub.dial()
	random := rand.New(rand.NewPCG(1, 1))
	for range 40 {
		payload := make([]byte, 32<<10)
		for i := range payload {
			payload[i] = byte(random.Uint32())
		}
		publishTo(t, c, "orders", `"`+base64.StdEncoding.EncodeToString(payload)+`"`)
	}

	t.Run("a full disk", func(t *testing.T) {
		disk := lossyfs.Mount(t)
		file := filepath.Join(disk.Dir(), "hub.backup")
		disk.SetRoom(cutAfter)
		out, errs, code := tool(t.Context(), "backup", file, "--ops-url="+hub.ops, "--token="+nodeToken)
		if code != 1 || out != "" || !strings.Contains(errs, "no space left on device; no backup was written") {
			t.Errorf("exit code %d\n%s%s", code, out, errs)
		}
		isEmpty(t, disk.Dir())
		disk.SetRoom(-1)
		if out, errs, code := tool(t.Context(), "backup", file, "--ops-url="+hub.ops, "--token="+nodeToken); code != 0 {
			t.Errorf("with room: exit code %d\n%s%s", code, out, errs)
		}
	})

	t.Run("an interrupt", func(t *testing.T) {
		slow := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			req, err := http.NewRequestWithContext(r.Context(), r.Method, hub.ops+r.URL.Path, http.NoBody)
			if err != nil {
				t.Error(err)
				return
			}
			req.Header = r.Header
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = res.Body.Close() }()
			w.WriteHeader(res.StatusCode)
			_, _ = io.CopyN(w, res.Body, cutAfter)
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}))
		defer slow.Close()
		dir := t.TempDir()
		file := filepath.Join(dir, "hub.backup")
		path, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(path)
		cmd.Args = []string{"eventhub", "backup", file, "--ops-url=" + slow.URL, "--token=" + nodeToken}
		var errs lockedBuffer
		cmd.Stderr = &errs
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := false
		defer func() {
			if !ended {
				_ = cmd.Process.Kill()
				_ = cmd.Wait()
			}
		}()
		eventually(t, "a part of the backup is written", func() bool {
			info, err := os.Stat(file + partSuffix)
			return err == nil && info.Size() == cutAfter
		})
		if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		err, ended = cmd.Wait(), true
		if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.ExitCode() != 1 || !strings.Contains(errs.String(), "interrupted; no backup was written") {
			t.Errorf("%v\n%s", err, errs.String())
		}
		isEmpty(t, dir)
		if _, errs, code := tool(t.Context(), "backup", file, "--ops-url="+hub.ops, "--token="+nodeToken); code != 0 {
			t.Errorf("after the interrupt: exit code %d\n%s", code, errs)
		}
	})
}

// isEmpty wants a directory without files.
func isEmpty(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		t.Errorf("%s is left", e.Name())
	}
}
