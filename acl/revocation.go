package acl

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"
)

// Revocation ends tokens before they expire. It names one token by its jti, or all tokens of a
// subject that were issued before a moment. Exactly one of ID and Subject is set.
type Revocation struct {
	// ID is the jti claim of the token.
	ID string `json:"jti,omitempty"`
	// Subject is the sub claim of the tokens.
	Subject string `json:"sub,omitempty"`
	// IssuedBefore is the moment in epoch milliseconds from which on new tokens of the subject are
	// accepted. A token without an iat claim counts as older.
	IssuedBefore int64 `json:"issued_before,omitempty"`
	// Until is when the revocation may be forgotten, in epoch milliseconds: no such token can be
	// valid then. 0 means never.
	Until int64 `json:"until,omitempty"`
}

// Validate returns an error for a revocation that would match no token.
func (r Revocation) Validate() error {
	switch {
	case (r.ID == "") == (r.Subject == ""):
		return errors.New("a revocation has either a jti or a sub")
	case len(r.ID) > maxNameBytes || len(r.Subject) > maxNameBytes:
		return fmt.Errorf("a jti or a sub has at most %d bytes", maxNameBytes)
	case r.ID != "" && r.IssuedBefore != 0:
		return errors.New("issued_before goes with sub only")
	case r.Subject != "" && r.IssuedBefore <= 0:
		return errors.New("sub requires issued_before, in epoch milliseconds")
	case r.Until < 0:
		return errors.New("until is negative")
	}
	return nil
}

// ParseRevocation parses a revocation in the form of JSON. An unknown field is an error. The result
// is not validated.
func ParseRevocation(text []byte) (Revocation, error) {
	var r Revocation
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&r); err != nil {
		return r, errors.New("it is not a JSON object of jti, or of sub and issued_before, and until")
	}
	if dec.More() {
		return r, errors.New("something follows the JSON object")
	}
	return r, nil
}

// Key names what the revocation is about. A later revocation of the same key replaces it.
func (r Revocation) Key() string {
	kind, name := "jti.", r.ID
	if r.Subject != "" {
		kind, name = "sub.", r.Subject
	}
	hash := sha256.Sum256([]byte(name))
	return kind + hex.EncodeToString(hash[:16])
}

// Revocations is the set of revocations that a Verifier observes. Its methods may be called
// concurrently.
type Revocations struct {
	max  int
	size atomic.Int64 // of byKey, so that an empty set costs no lock

	mu       sync.RWMutex
	byKey    map[string]Revocation
	ids      map[string]Revocation
	subjects map[string]Revocation
}

// NewRevocations returns an empty set for at most limit revocations.
func NewRevocations(limit int) *Revocations {
	return &Revocations{max: limit, byKey: make(map[string]Revocation), ids: make(map[string]Revocation), subjects: make(map[string]Revocation)}
}

// ErrRevocationsFull is returned by Set for a revocation beyond the limit. The set is unchanged.
var ErrRevocationsFull = errors.New("the set of revocations is full")

// Set stores the revocation of a key in the form of JSON. No text removes the revocation. After an
// error, an earlier revocation of the key stays.
func (s *Revocations) Set(key string, text []byte) error {
	var r Revocation
	if text != nil {
		if err := json.Unmarshal(text, &r); err != nil {
			return errors.New("the revocation is not valid JSON, or has a field of the wrong type")
		}
		if err := r.Validate(); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	old, there := s.byKey[key]
	if text != nil && !there && len(s.byKey) >= s.max {
		return ErrRevocationsFull
	}
	if there {
		s.remove(key, old)
	}
	if text != nil {
		s.byKey[key] = r
		if r.ID != "" {
			s.ids[r.ID] = r
		} else {
			s.subjects[r.Subject] = r
		}
	}
	s.size.Store(int64(len(s.byKey)))
	return nil
}

// remove removes a revocation. s.mu is held.
func (s *Revocations) remove(key string, r Revocation) {
	delete(s.byKey, key)
	if s.ids[r.ID] == r {
		delete(s.ids, r.ID)
	}
	if s.subjects[r.Subject] == r {
		delete(s.subjects, r.Subject)
	}
}

// Len returns the number of revocations.
func (s *Revocations) Len() int { return int(s.size.Load()) }

// Prune forgets the revocations that have reached their Until.
func (s *Revocations) Prune(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, r := range maps.Clone(s.byKey) {
		if r.over(now) {
			s.remove(key, r)
		}
	}
	s.size.Store(int64(len(s.byKey)))
}

func (r Revocation) over(now time.Time) bool { return r.Until != 0 && now.UnixMilli() >= r.Until }

// revoked reports whether a token is revoked. issued is the zero time if the token has no iat.
func (s *Revocations) revoked(id, subject string, issued, now time.Time) bool {
	if s == nil || s.size.Load() == 0 || id == "" && subject == "" {
		return false
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	if r, ok := s.ids[id]; ok && !r.over(now) {
		return true
	}
	r, ok := s.subjects[subject]
	return ok && !r.over(now) && (issued.IsZero() || issued.UnixMilli() < r.IssuedBefore)
}

// Names returns what a revocation of a JWT can name: its claims jti and sub, "" for a missing one,
// and its end. Names does not verify the token.
func Names(token string) (id, subject string, ends time.Time, err error) {
	c := &claims{}
	if _, _, err := unverified.ParseUnverified(token, c); err != nil {
		return "", "", time.Time{}, errors.New("it is not a JWT")
	}
	if c.expires != nil {
		ends = c.expires.Add(Leeway)
	}
	return c.id, c.subject, ends, nil
}
