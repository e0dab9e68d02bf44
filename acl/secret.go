package acl

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
)

// MinSecretBytes is the least length of a secret that signs tokens. RFC 7518 asks HS256 for a key
// as long as its hash.
const MinSecretBytes = 32

// MaxSecretBytes bounds a secret and a static token.
const MaxSecretBytes = 4096

// ReadSecret reads a secret or a static token from a file. One line break at its end, which editors
// and shells leave there, is no part of it.
func ReadSecret(path string) ([]byte, error) {
	f, err := os.Open(path) //nolint:gosec // the file is the operator's choice
	if err != nil {
		if e, ok := errors.AsType[*fs.PathError](err); ok {
			err = e.Err
		}
		return nil, fmt.Errorf("secret file %s: %w", path, err)
	}
	defer func() { _ = f.Close() }() // it was only read
	secret, err := io.ReadAll(io.LimitReader(f, MaxSecretBytes+3))
	if err != nil {
		return nil, fmt.Errorf("secret file %s: %w", path, err)
	}
	secret = bytes.TrimSuffix(secret, []byte("\n"))
	secret = bytes.TrimSuffix(secret, []byte("\r"))
	switch {
	case len(secret) == 0:
		return nil, fmt.Errorf("secret file %s: it is empty", path)
	case len(secret) > MaxSecretBytes:
		return nil, fmt.Errorf("secret file %s: it has more than %d bytes", path, MaxSecretBytes)
	}
	return secret, nil
}

func checkSecret(secret []byte) error {
	switch n := len(secret); {
	case n < MinSecretBytes:
		return fmt.Errorf("the JWT secret has %d bytes, and whoever guesses it can sign tokens: at least %d are needed: make one with openssl rand -hex 32",
			n, MinSecretBytes)
	case n > MaxSecretBytes:
		return fmt.Errorf("the JWT secret has %d bytes: %d are allowed", n, MaxSecretBytes)
	}
	return nil
}
