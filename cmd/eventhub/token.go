package main

import (
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"eventhub/acl"
)

// tokenName is the file in the data directory that holds the hub's own token.
const tokenName = "token"

// tokenBytes is the number of random bytes in a token.
const tokenBytes = 32

// ensureToken returns the token in the data directory and creates it if it is missing; made reports
// the latter. Several hubs may call it at the same time; all get the same token.
func ensureToken(dir string) (token string, made bool, err error) {
	token, err = readToken(dir)
	if !errors.Is(err, fs.ErrNotExist) {
		return token, false, err
	}
	if token, err = makeToken(dir); errors.Is(err, fs.ErrExist) {
		// Another hub has just created the token.
		token, err = readToken(dir)
		return token, false, err
	}
	return token, err == nil, err
}

// readToken returns the token in the data directory. The error wraps fs.ErrNotExist if there is
// none.
func readToken(dir string) (string, error) {
	path := filepath.Join(dir, tokenName)
	info, err := os.Stat(path)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
		return "", dataDirError(dir, err)
	}
	if err := acl.CheckPrivate(info); err != nil {
		return "", fmt.Errorf("token file %s is %w; run chmod 600 %s", path, err, path)
	}
	text, err := os.ReadFile(path) //nolint:gosec // the directory is the operator's choice
	if err != nil {
		return "", fmt.Errorf("token file %s: %w; run as the user that runs the hub", path, cause(err))
	}
	token := strings.TrimSpace(string(text))
	if token == "" {
		return "", fmt.Errorf("token file %s is empty; remove the file and the hub will create a new token", path)
	}
	return token, nil
}

// makeToken writes a new token. It returns fs.ErrExist if there already is one.
func makeToken(dir string) (string, error) {
	chance := make([]byte, tokenBytes)
	_, _ = rand.Read(chance) // never fails
	token := base64.RawURLEncoding.EncodeToString(chance)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", dataDirError(dir, err)
	}
	// Linking a finished file prevents readers from seeing a partly written token.
	draft, err := os.CreateTemp(dir, tokenName+".*") // mode 0600
	if err != nil {
		return "", dataDirError(dir, err)
	}
	defer func() { _ = os.Remove(draft.Name()) }()
	_, err = draft.WriteString(token + "\n")
	if err = errors.Join(err, draft.Sync(), draft.Close()); err != nil {
		return "", dataDirError(dir, err)
	}
	if err := os.Link(draft.Name(), filepath.Join(dir, tokenName)); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return "", fs.ErrExist
		}
		return "", dataDirError(dir, err)
	}
	return token, nil
}

func dataDirError(dir string, err error) error {
	return fmt.Errorf("data directory %s: %w; choose a directory that this user may write (--data, EVENTHUB_DATA)", dir, cause(err))
}

// cause returns the underlying error without operation and path, which the caller's message names.
func cause(err error) error {
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		return e.Err
	}
	if e, ok := errors.AsType[*os.LinkError](err); ok {
		return e.Err
	}
	return err
}
