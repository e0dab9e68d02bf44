package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"eventhub/acl"
)

// hubFiles are the entries of the data directory that the hub uses, each with its kind.
var hubFiles = []struct {
	name string
	dir  bool
}{
	{tokenName, false},
	{"hub.lock", false},
	{"nats", true},
	{ownOutboxName, false},
	{ownOutboxName + "-wal", false},
	{ownOutboxName + "-shm", false},
	{ownOutboxName + "-journal", false},
}

// checkDataDir returns an error if another user owns the data directory or one of the hub's files
// in it, or may write to one of them: such a user could have planted the hub's token, or could make
// the hub write elsewhere. A directory that does not exist is no error. The hub creates it for
// itself alone.
func checkDataDir(dir string) error {
	link, err := os.Lstat(dir)
	if err != nil {
		return nil //nolint:nilerr // the use of the directory fails with a better error
	}
	if link.Mode().Type() == fs.ModeSymlink {
		if err := checkOwner(link); err != nil {
			return fmt.Errorf("data directory %s is a link that %w; choose another (--data, EVENTHUB_DATA)", dir, err)
		}
	}
	info, err := os.Stat(dir)
	if err != nil || !info.IsDir() {
		return nil //nolint:nilerr // as above
	}
	err = checkOurs(info)
	if err == nil {
		err = withdraw(dir, info)
	}
	if err != nil {
		return fmt.Errorf("data directory %s %w; the directory must belong to the hub's user alone: run chown and chmod go-w, or choose another (--data, EVENTHUB_DATA)", dir, err)
	}
	for _, f := range hubFiles {
		path := filepath.Join(dir, f.name)
		info, err := os.Lstat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil:
			return dataDirError(dir, err)
		case f.dir && info.Mode().Type() == fs.ModeSymlink:
			return fmt.Errorf("%s is not a directory but a link, which the hub does not follow; if you put the link there, keep its target, and mount the target at this place instead (mount --bind); if you did not, find out who did", path)
		case f.dir && !info.IsDir():
			err = errors.New("is not a directory")
		case !f.dir && !info.Mode().IsRegular():
			err = errors.New("is not a regular file")
		default:
			if err = checkOurs(info); err == nil {
				err = withdraw(path, info)
			}
		}
		if err != nil {
			return fmt.Errorf("%s %w; if the hub's user did not put it there, do not use this directory (--data, EVENTHUB_DATA)", path, err)
		}
	}
	return nil
}

// checkOurs returns an error if a file belongs to another user, or if others may write to it.
func checkOurs(info fs.FileInfo) error {
	if err := checkOwner(info); err != nil {
		return err
	}
	return checkUnshared(info)
}

// checkSecretFile returns an error if other users can access an open file that holds a secret.
func checkSecretFile(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("file %s: %w", f.Name(), cause(err))
	}
	if err := acl.CheckPrivate(info); err != nil {
		return fmt.Errorf("file %s is %w; run chmod 600 %s", f.Name(), err, f.Name())
	}
	return nil
}

// openRegular opens a regular file. It does not wait for the writer of a FIFO.
func openRegular(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|noWait, 0) //nolint:gosec // the file is the operator's choice
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("not a regular file")
	}
	if err != nil {
		_ = f.Close() // read-only
		return nil, err
	}
	return f, nil
}
