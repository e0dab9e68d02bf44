package acl

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/MicahParks/jwkset"
	"github.com/MicahParks/keyfunc/v3"
	"github.com/golang-jwt/jwt/v5"
	"golang.org/x/time/rate"
)

// maxKeyWaiters is the maximum number of requests that wait for a fetch, so that a hanging JWKS
// server does not block all requests. Further requests fail at once with errKeysUnavailable.
const maxKeyWaiters = 32

// errKeysUnavailable is returned for an unknown key when the key set could not be fetched.
var errKeysUnavailable = errors.New("keys could not be fetched")

// keySet caches the keys of a JWKS URL. It fetches them every refresh interval. It also fetches
// them when a token names an unknown key, but at most once per fetch interval, however many such
// tokens arrive. After a failed fetch, the known keys stay in use.
//
// A single goroutine fetches; close waits for it.
type keySet struct {
	// MemoryJWKSet holds the keys and has its own lock.
	*jwkset.MemoryJWKSet

	url      *url.URL
	client   *http.Client
	log      *slog.Logger
	refresh  time.Duration
	interval time.Duration
	named    keyfunc.Keyfunc // finds the key that a token names

	waiters int // number of requests waiting for a fetch; guarded by mu

	wake  chan struct{} // requests a fetch; buffer of one
	stop  context.CancelFunc
	ended chan struct{} // closed when the goroutine has ended

	mu      sync.Mutex
	unknown *rate.Limiter // limits fetches for unknown keys
	pending bool          // a fetch is requested or in progress
	done    chan struct{} // closed at the end of the next fetch
	failed  bool          // the last fetch failed
	fetched time.Time     // when the keys were last fetched; until then, when the set was made
}

var _ jwkset.Storage = (*keySet)(nil)

func parseJWKSURL(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Hostname() == "" || !validPort(u.Port()) {
		// omits the URL, which may contain a credential
		return nil, errors.New("invalid JWKS URL; use https://HOST/PATH")
	}
	return u, nil
}

// validPort reports whether a URL can have this port; "" is the default of its scheme.
func validPort(port string) bool {
	n, err := strconv.ParseUint(port, 10, 16)
	return port == "" || err == nil && n > 0
}

// newKeySet fetches the keys once, within ctx, and starts the goroutine. An unreachable server is
// not an error, because the goroutine keeps trying.
func newKeySet(ctx context.Context, cfg Config) (*keySet, error) {
	u, err := parseJWKSURL(cfg.JWKSURL)
	if err != nil {
		return nil, err
	}
	k := &keySet{
		MemoryJWKSet: jwkset.NewMemoryStorage(),
		url:          u,
		client:       cfg.HTTPClient,
		log:          cfg.Logger.With(slog.String("jwks", u.Scheme+"://"+u.Host+u.Path)),
		refresh:      cfg.RefreshInterval,
		interval:     cfg.FetchInterval,
		wake:         make(chan struct{}, 1),
		ended:        make(chan struct{}),
		unknown:      rate.NewLimiter(rate.Every(cfg.FetchInterval), 1),
		done:         make(chan struct{}),
		fetched:      time.Now(),
	}
	if k.client == nil {
		k.client = newClient(cfg)
	}
	if k.named, err = keyfunc.New(keyfunc.Options{Storage: k}); err != nil {
		return nil, fmt.Errorf("jwks: %w", err)
	}
	if u.Scheme == "http" {
		k.log.LogAttrs(ctx, slog.LevelWarn, "fetching keys without TLS; an attacker on the network can replace them")
	}
	k.update(ctx)
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	k.stop = stop
	go k.run(run) // owned by k: close waits for it
	return k, nil
}

// close ends the goroutine and waits for it. It may be called more than once. Known keys can still
// be found afterwards.
func (k *keySet) close() {
	k.stop()
	<-k.ended
	k.client.CloseIdleConnections()
}

// run fetches keys until ctx ends.
func (k *keySet) run(ctx context.Context) {
	defer close(k.ended)
	for ctx.Err() == nil {
		timer := time.NewTimer(k.pause())
		select {
		case <-ctx.Done():
		case <-k.wake:
		case <-timer.C:
		}
		timer.Stop()
		if ctx.Err() == nil {
			k.update(ctx)
		}
	}
}

// pause returns the delay before the next fetch that no request triggers.
func (k *keySet) pause() time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.failed {
		return k.interval
	}
	return k.refresh
}

// update fetches the keys and wakes the waiting requests.
func (k *keySet) update(ctx context.Context) {
	k.mu.Lock()
	k.pending = true
	select {
	case <-k.wake: // this fetch serves the pending request too
	default:
	}
	k.mu.Unlock()

	fetchCtx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	keys, err := fetchKeys(fetchCtx, k.client, k.url.String())
	if err == nil {
		err = k.KeyReplaceAll(ctx, keys)
	}

	k.mu.Lock()
	recovered := k.failed && err == nil
	k.failed = err != nil
	if err == nil {
		k.fetched = time.Now()
	}
	k.pending = false
	close(k.done)
	k.done = make(chan struct{})
	k.mu.Unlock()
	switch {
	case err != nil && ctx.Err() == nil:
		k.log.LogAttrs(ctx, slog.LevelWarn, "failed to fetch keys; keeping the known keys", slog.Any("error", err))
	case recovered:
		k.log.LogAttrs(ctx, slog.LevelInfo, "fetching keys works again", slog.Int("keys", len(keys)))
	}
}

// KeyRead returns the key with the given id. For an unknown id, it waits for a fetch that is in
// progress or allowed now.
func (k *keySet) KeyRead(ctx context.Context, kid string) (jwkset.JWK, error) {
	key, err := k.MemoryJWKSet.KeyRead(ctx, kid)
	if err == nil {
		return key, nil
	}
	if err := k.await(ctx); err != nil {
		return jwkset.JWK{}, err
	}
	if key, err = k.MemoryJWKSet.KeyRead(ctx, kid); err == nil {
		return key, nil
	}
	if k.lastFailed() {
		return jwkset.JWK{}, errKeysUnavailable
	}
	return jwkset.JWK{}, err
}

// await waits for the current fetch or starts one. It returns at once when the fetch interval does
// not allow another fetch yet.
func (k *keySet) await(ctx context.Context) error {
	k.mu.Lock()
	if !k.pending {
		if !k.unknown.Allow() {
			k.mu.Unlock()
			return nil
		}
		k.pending = true
		k.wake <- struct{}{} // does not block: no other request is pending
	}
	if k.waiters >= maxKeyWaiters {
		k.mu.Unlock()
		return errKeysUnavailable
	}
	k.waiters++
	done := k.done
	k.mu.Unlock()
	defer func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.waiters--
	}()
	select {
	case <-done:
		return nil
	case <-k.ended:
		return errKeysUnavailable
	case <-ctx.Done():
		return errKeysUnavailable
	}
}

func (k *keySet) lastFailed() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.failed
}

// age returns the time since the keys were last fetched.
func (k *keySet) age() time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	return time.Since(k.fetched)
}

// find returns the key of a token whose algorithm was already checked.
func (k *keySet) find(ctx context.Context, t *jwt.Token) (any, error) {
	if _, named := t.Header[jwkset.HeaderKID]; !named {
		return k.onlyKey(ctx, t.Method.Alg())
	}
	key, err := k.named.KeyfuncCtx(ctx)(t)
	if err != nil {
		return nil, err
	}
	return fitting(key, t.Method.Alg())
}

// onlyKey returns the key for a token without a key id, which is valid only if the set contains a
// single key.
func (k *keySet) onlyKey(ctx context.Context, alg string) (any, error) {
	keys, _ := k.KeyReadAll(ctx) // never fails
	if len(keys) == 0 {
		if err := k.await(ctx); err != nil {
			return nil, err
		}
		keys, _ = k.KeyReadAll(ctx)
	}
	switch {
	case len(keys) == 0:
		return nil, errKeysUnavailable
	case len(keys) > 1:
		return nil, errors.New("token names no key and the key set has several")
	}
	if want := keys[0].Marshal().ALG; want != "" && want.String() != alg {
		return nil, errors.New("key is for another algorithm")
	}
	return fitting(keys[0].Key(), alg)
}
