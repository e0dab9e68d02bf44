package eventhub

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"strings"
	"sync"
	"time"
)

// tokens asks the provider for tokens, one question at a time: a reconnect and a refresh that ask
// at the same time get the answer to one question.
type tokens struct {
	fixed    string
	provider func(context.Context) (string, error)
	timeout  time.Duration

	mu       sync.Mutex
	question *question // nil while none is open
	wg       sync.WaitGroup
}

type question struct {
	answered chan struct{}
	token    string
	err      error
}

// changes reports whether another question may bring another token.
func (t *tokens) changes() bool { return t.provider != nil }

// ask returns a token. ctx is that of the client, so that all who ask share it.
func (t *tokens) ask(ctx context.Context) (string, error) {
	if t.provider == nil {
		return t.fixed, nil
	}
	t.mu.Lock()
	q := t.question
	if q == nil {
		q = &question{answered: make(chan struct{})}
		t.question = q
		t.wg.Go(func() { t.fetch(ctx, q) })
	}
	t.mu.Unlock()
	<-q.answered
	return q.token, q.err
}

func (t *tokens) fetch(ctx context.Context, q *question) {
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	q.token, q.err = t.provider(ctx)
	if q.err == nil && q.token == "" {
		q.err = newError("no_token", "the token provider returned no token", nil)
	}
	t.mu.Lock()
	t.question = nil
	t.mu.Unlock()
	close(q.answered)
}

// expiry returns when a JWT expires, and false for other tokens.
func expiry(token string) (time.Time, bool) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return time.Time{}, false
	}
	text, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(parts[1], "="))
	if err != nil {
		return time.Time{}, false
	}
	var claims struct {
		Exp *float64 `json:"exp"`
	}
	if json.Unmarshal(text, &claims) != nil || claims.Exp == nil {
		return time.Time{}, false
	}
	return time.UnixMilli(int64(*claims.Exp * 1000)), true
}

// refreshDelay is how long a token is used before another is asked for: until a fifth of its time
// is left, or a minute.
func refreshDelay(left time.Duration) time.Duration {
	left = max(0, left)
	return left - min(left/5, time.Minute)
}
