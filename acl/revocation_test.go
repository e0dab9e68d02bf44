package acl_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"eventhub/acl"
)

// TestRevokedTokensAreRefused revokes tokens by jti and by sub, before and after they are verified.
func TestRevokedTokensAreRefused(t *testing.T) {
	secret := []byte("0123456789abcdef0123456789abcdef")
	list := acl.NewRevocations(10)
	v, err := acl.NewVerifier(t.Context(), acl.Config{Secret: secret, Revocations: list})
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close()
	now := time.Now()
	sign := func(claims jwt.MapClaims) string {
		claims["exp"] = now.Add(time.Hour).Unix()
		token, err := jwt.NewWithClaims(jwt.SigningMethodHS256, claims).SignedString(secret)
		if err != nil {
			t.Fatal(err)
		}
		return token
	}
	tokens := map[string]string{
		"a, id 1":        sign(jwt.MapClaims{"sub": "a", "jti": "1", "iat": now.Add(-time.Minute).Unix()}),
		"a, id 2":        sign(jwt.MapClaims{"sub": "a", "jti": "2", "iat": now.Unix()}),
		"a, without iat": sign(jwt.MapClaims{"sub": "a"}),
		"b":              sign(jwt.MapClaims{"sub": "b", "iat": now.Add(-time.Minute).Unix()}),
		"without both":   sign(jwt.MapClaims{"iat": now.Add(-time.Minute).Unix()}),
	}
	verified := make(map[string]*acl.Identity)
	for name, token := range tokens {
		if verified[name], err = v.Verify(t.Context(), token); err != nil {
			t.Fatal(err)
		}
	}
	want := func(revoked ...string) {
		t.Helper()
		for name, token := range tokens {
			should := false
			for _, r := range revoked {
				should = should || r == name
			}
			_, err := v.Verify(t.Context(), token)
			if (err != nil) != should || verified[name].Revoked() != should {
				t.Errorf("%s: %v, revoked: %v, want %v", name, err, verified[name].Revoked(), should)
			}
			if refused, ok := errors.AsType[*acl.Error](err); err != nil && (!ok || refused.Reason != acl.InvalidJWT || refused.Msg != "The token has been revoked.") {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	set := func(r acl.Revocation) {
		t.Helper()
		text, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if err := list.Set(r.Key(), text); err != nil {
			t.Fatal(err)
		}
	}
	want()
	set(acl.Revocation{ID: "1"})
	want("a, id 1")
	set(acl.Revocation{Subject: "a", IssuedBefore: now.Add(-time.Second).UnixMilli()})
	want("a, id 1", "a, without iat")
	set(acl.Revocation{Subject: "a", IssuedBefore: now.Add(time.Second).UnixMilli()})
	want("a, id 1", "a, id 2", "a, without iat")
	if err := list.Set(acl.Revocation{ID: "1"}.Key(), nil); err != nil {
		t.Fatal(err)
	}
	set(acl.Revocation{Subject: "a", IssuedBefore: now.Add(-time.Hour).UnixMilli()})
	want("a, without iat")
	set(acl.Revocation{Subject: "a", IssuedBefore: now.UnixMilli(), Until: now.UnixMilli()})
	want()
	set(acl.Revocation{ID: "1", Until: now.Add(time.Hour).UnixMilli()})
	list.Prune(now.Add(time.Minute))
	if left := list.Len(); left != 1 {
		t.Errorf("%d revocations are left, want 1", left)
	}
	want("a, id 1")
}

func TestRevocationsThatAreRefused(t *testing.T) {
	list := acl.NewRevocations(1)
	for text, want := range map[string]string{
		`{}`:                            "either a jti or a sub",
		`{"jti":"a","sub":"b"}`:         "either a jti or a sub",
		`{"sub":"b"}`:                   "sub requires issued_before",
		`{"jti":"a","issued_before":1}`: "issued_before goes with sub only",
		`{"jti":1}`:                     "wrong type",
		`nothing`:                       "not valid JSON",
		`{"jti":"a","until":-1}`:        "until is negative",
		`{"jti":"` + strings.Repeat("a", 257) + `"}`: "at most 256 bytes",
	} {
		if err := list.Set("key", []byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", text, err)
		}
	}
	for i, want := range []error{nil, acl.ErrRevocationsFull} {
		if err := list.Set(strconv.Itoa(i), fmt.Appendf(nil, `{"jti":"%d"}`, i)); !errors.Is(err, want) {
			t.Errorf("%d: %v", i, err)
		}
	}
}

func TestTokensThatLiveForTooLong(t *testing.T) {
	secret := []byte("0123456789abcdef0123456789abcdef")
	v, err := acl.NewVerifier(t.Context(), acl.Config{Secret: secret, MaxLife: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close()
	for ttl, taken := range map[time.Duration]bool{time.Hour: true, time.Hour + time.Minute: false} {
		token, err := acl.Sign(secret, acl.Grant{TTL: ttl, ID: "1", Subject: "a"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := v.Verify(t.Context(), token); (err == nil) != taken {
			t.Errorf("%v: %v", ttl, err)
		}
		id, subject, ends, err := acl.Names(token)
		if err != nil || id != "1" || subject != "a" || time.Until(ends).Round(time.Minute) != ttl {
			t.Errorf("%q, %q, %v, %v", id, subject, ends, err)
		}
	}
	if _, _, _, err := acl.Names("a.b.c"); err == nil {
		t.Error("a.b.c has names")
	}
}

func BenchmarkRevoked(b *testing.B) {
	secret := []byte("0123456789abcdef0123456789abcdef")
	list := acl.NewRevocations(100_000)
	for i := range 100_000 {
		r := acl.Revocation{ID: fmt.Sprint("id-", i)}
		if err := list.Set(r.Key(), fmt.Appendf(nil, `{"jti":"%s"}`, r.ID)); err != nil {
			b.Fatal(err)
		}
	}
	v, err := acl.NewVerifier(b.Context(), acl.Config{Secret: secret, Revocations: list})
	if err != nil {
		b.Fatal(err)
	}
	defer v.Close()
	token, err := acl.Sign(secret, acl.Grant{TTL: time.Hour, ID: "another", Subject: "a"})
	if err != nil {
		b.Fatal(err)
	}
	id, err := v.Verify(b.Context(), token)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		id.Revoked()
	}
}
