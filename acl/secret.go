package acl

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
)

// MinSecretBytes is the minimum length of a secret that signs tokens. RFC 7518 requires a key of at
// least the length of the hash for HS256.
const MinSecretBytes = 32

// MaxSecretBytes is the maximum length of a secret or a static token.
const MaxSecretBytes = 4096

// ReadSecret reads a secret or a static token from a file. It removes one trailing line break,
// which editors and shells add. It refuses a file that other users can read or write.
func ReadSecret(path string) ([]byte, error) {
	f, err := os.Open(path) //nolint:gosec // the file is the operator's choice
	if err != nil {
		if e, ok := errors.AsType[*fs.PathError](err); ok {
			err = e.Err
		}
		return nil, fmt.Errorf("secret file %s: %w", path, err)
	}
	defer func() { _ = f.Close() }() // read-only
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("secret file %s: %w", path, err)
	}
	if err := CheckPrivate(info); err != nil {
		return nil, fmt.Errorf("secret file %s is %w; run chmod 600 %s", path, err, path)
	}
	secret, err := io.ReadAll(io.LimitReader(f, MaxSecretBytes+3))
	if err != nil {
		return nil, fmt.Errorf("secret file %s: %w", path, err)
	}
	secret = bytes.TrimSuffix(secret, []byte("\n"))
	secret = bytes.TrimSuffix(secret, []byte("\r"))
	switch {
	case len(secret) == 0:
		return nil, fmt.Errorf("secret file %s is empty", path)
	case len(secret) > MaxSecretBytes:
		return nil, fmt.Errorf("secret file %s exceeds %d bytes", path, MaxSecretBytes)
	}
	return secret, nil
}

func checkSecret(secret []byte) error {
	switch n := len(secret); {
	case n < MinSecretBytes:
		return fmt.Errorf("JWT secret has %d bytes, which is too easy to guess; at least %d are required; create one with openssl rand -hex 32",
			n, MinSecretBytes)
	case n > MaxSecretBytes:
		return fmt.Errorf("JWT secret has %d bytes; at most %d are allowed", n, MaxSecretBytes)
	}
	return nil
}
