// Package sdktest prepares the TypeScript client for tests of Go that run it.
package sdktest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/gofrs/flock"
)

// patience bounds what npm does. Reaching it is a failure.
const patience = 5 * time.Minute

// Install installs the packages that package-lock.json of a directory names, unless they are there.
// Test binaries may call it at the same time.
func Install(ctx context.Context, dir string) error {
	return locked(ctx, dir, func(ctx context.Context) error { return install(ctx, dir) })
}

// Build installs what the client in a directory needs to be compiled and tested, and compiles it,
// unless that was done with the same sources. Test binaries may call it at the same time.
func Build(ctx context.Context, dir string) error {
	return locked(ctx, dir, func(ctx context.Context) error {
		if err := install(ctx, dir); err != nil {
			return err
		}
		// What is compiled counts as well: another build may have been made by hand since.
		inputs := []string{"src", "scripts/build.mjs", "package.json", "package-lock.json", "tsconfig.json", "tsconfig.cjs.json", "dist"}
		return once(dir, "built", inputs, func() error { return npm(ctx, dir, "run", "build") })
	})
}

func install(ctx context.Context, dir string) error {
	return once(dir, "installed", []string{"package.json", "package-lock.json"}, func() error {
		return npm(ctx, dir, "ci", "--no-audit", "--no-fund", "--prefer-offline")
	})
}

// locked runs do while no other process is in it for the same directory.
func locked(ctx context.Context, dir string, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	lock := flock.New(filepath.Join(dir, "package-lock.json"), flock.SetFlag(os.O_RDONLY))
	if _, err := lock.TryLockContext(ctx, 50*time.Millisecond); err != nil {
		return fmt.Errorf("lock %s: %w", lock.Path(), err)
	}
	return errors.Join(do(ctx), lock.Unlock())
}

// once does something unless a stamp says that it was done with these files. The stamp is among the
// installed packages, and goes with them.
func once(dir, name string, inputs []string, do func() error) error {
	files, stamp := os.DirFS(dir), "node_modules/.eventhub-"+name
	before, err := sum(files, inputs)
	if err != nil {
		return err
	}
	if done, err := fs.ReadFile(files, stamp); err == nil && string(done) == before {
		return nil
	}
	if err := do(); err != nil {
		return err
	}
	after, err := sum(files, inputs)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, filepath.FromSlash(stamp)), []byte(after), 0o600)
}

// sum is a hash of the names and contents of files, and of those in directories. What does not
// exist has none.
func sum(files fs.FS, inputs []string) (string, error) {
	h := sha256.New()
	for _, input := range inputs {
		err := fs.WalkDir(files, input, func(path string, d fs.DirEntry, err error) error {
			switch {
			case errors.Is(err, fs.ErrNotExist):
				return nil
			case err != nil, d.IsDir():
				return err
			}
			text, err := fs.ReadFile(files, path)
			_, _ = fmt.Fprintf(h, "%s %d\n%s", path, len(text), text) // a hash takes all
			return err
		})
		if err != nil {
			return "", err
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func npm(ctx context.Context, dir string, args ...string) error {
	cmd := exec.CommandContext(ctx, "npm", args...) //nolint:gosec // the arguments are those above
	cmd.Dir = dir
	cmd.WaitDelay = time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("npm %s in %s: %w\n%s", args[0], dir, err, bytes.TrimSpace(out))
	}
	return nil
}
