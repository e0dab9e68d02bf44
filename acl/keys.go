package acl

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/MicahParks/jwkset"
	"github.com/MicahParks/keyfunc/v3"
	"github.com/golang-jwt/jwt/v5"
	"golang.org/x/time/rate"
)

// maxKeyWaiters bounds who waits for keys to be fetched, so that a server that hangs does not hold
// up all requests: others are told at once that the keys are not available.
const maxKeyWaiters = 32

// errKeysUnavailable is returned for a key that is not known while the key set could not be
// fetched.
var errKeysUnavailable = errors.New("the keys could not be fetched")

// keySet is the keys at a JWKS URL. It fetches them every refresh interval, and when a token names
// a key that it does not know, but for this not more often than the fetch interval allows, however
// many such tokens come. A fetch that fails changes nothing: the keys it has go on being used.
//
// One goroutine fetches; close waits for it.
type keySet struct {
	// MemoryJWKSet holds the keys, and guards them with a lock of its own.
	*jwkset.MemoryJWKSet

	url      *url.URL
	client   *http.Client
	log      *slog.Logger
	refresh  time.Duration
	interval time.Duration
	named    keyfunc.Keyfunc // finds the key that a token names

	waiters int // guarded by mu

	wake  chan struct{} // asks for a fetch; it has room for one
	stop  context.CancelFunc
	ended chan struct{} // closed when the goroutine has ended

	mu      sync.Mutex
	unknown *rate.Limiter // of fetches for the sake of unknown keys
	pending bool          // a fetch has been asked for, or is under way
	done    chan struct{} // closed when the next fetch is over
	failed  bool          // the last fetch has failed
}

var _ jwkset.Storage = (*keySet)(nil)

func parseJWKSURL(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" {
		// The error does not show the text, which may hold a credential.
		return nil, errors.New("the JWKS URL is not one: give https://HOST/PATH")
	}
	return u, nil
}

// newKeySet fetches the keys once, within ctx, and starts the goroutine. A server that cannot be
// reached is no error: the keys come when it is back.
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
	}
	if k.client == nil {
		k.client = newClient(cfg)
	}
	if k.named, err = keyfunc.New(keyfunc.Options{Storage: k}); err != nil {
		return nil, fmt.Errorf("jwks: %w", err)
	}
	if u.Scheme == "http" {
		k.log.LogAttrs(ctx, slog.LevelWarn, "the keys are fetched without TLS: whoever is between can put in their own")
	}
	k.update(ctx)
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	k.stop = stop
	go k.run(run) // owned by k: close waits for it
	return k, nil
}

// close ends the goroutine and waits for it. It may be called twice. Keys that are known go on
// being found.
func (k *keySet) close() {
	k.stop()
	<-k.ended
	k.client.CloseIdleConnections()
}

// run fetches until ctx ends.
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

// pause is how long the goroutine waits when nobody asks.
func (k *keySet) pause() time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.failed {
		return k.interval
	}
	return k.refresh
}

// update fetches the keys and tells whoever waits that it did.
func (k *keySet) update(ctx context.Context) {
	k.mu.Lock()
	k.pending = true
	select {
	case <-k.wake: // this fetch is what was asked for
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
	k.pending = false
	close(k.done)
	k.done = make(chan struct{})
	k.mu.Unlock()
	switch {
	case err != nil && ctx.Err() == nil:
		k.log.LogAttrs(ctx, slog.LevelWarn, "the keys were not fetched: those that are known stay in use", slog.String("cause", err.Error()))
	case recovered:
		k.log.LogAttrs(ctx, slog.LevelInfo, "the keys are fetched again", slog.Int("keys", len(keys)))
	}
}

// KeyRead returns the key of that name. When it is not known, it waits for a fetch, if one is under
// way or allowed now.
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

// await waits for the fetch that is under way, or for a new one. It returns at once when it is too
// early for one.
func (k *keySet) await(ctx context.Context) error {
	k.mu.Lock()
	if !k.pending {
		if !k.unknown.Allow() {
			k.mu.Unlock()
			return nil
		}
		k.pending = true
		k.wake <- struct{}{} // there is room: nothing is pending
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

// find returns the key for a token whose algorithm has been checked.
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

// onlyKey is the key of a token that names none: there must be no choice.
func (k *keySet) onlyKey(ctx context.Context, alg string) (any, error) {
	keys, _ := k.KeyReadAll(ctx) // it never fails
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
		return nil, errors.New("the token names no key, and there are several")
	}
	if want := keys[0].Marshal().ALG; want != "" && want.String() != alg {
		return nil, errors.New("the key is for another algorithm")
	}
	return fitting(keys[0].Key(), alg)
}
