package jetstream

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
)

// revokedBucket is the KV bucket that holds the revoked tokens of all hubs.
const revokedBucket = "eventhub_revoked"

// MaxRevocations ("revocations") is the maximum number of entries in the bucket of revoked tokens.
// The server refuses further ones, because a hub that dropped an entry would accept a revoked token
// again.
const MaxRevocations = 100_000

// ErrRevocationsFull is among the causes of the error of Revocations.Put when the bucket holds
// MaxRevocations entries. Nothing was stored.
var ErrRevocationsFull = fmt.Errorf("jetstream: the list of revoked tokens is full (limit revocations: %d entries)", MaxRevocations)

// Revocations is the list of revoked tokens that all hubs of a NATS share, in the KV bucket
// eventhub_revoked. The bus does not look into the entries. A Revocations is a small value that
// costs nothing to create. Its methods may be called concurrently.
type Revocations struct{ core *core }

// Revocations gives access to the list of revoked tokens.
func (a Admin) Revocations() Revocations { return Revocations{a.bus.core} }

func (r Revocations) bucket() streams.SharedBucket {
	return r.core.sharedBucket(revokedBucket, "revoked tokens", MaxRevocations)
}

// Put stores an entry under a key of 1..200 letters, digits, -, _ and dots, or replaces the entry
// of that key. The server removes the entry after life, which is at least a second.
func (r Revocations) Put(ctx context.Context, key string, value []byte, life time.Duration) error {
	if _, err := r.bucket().Open(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, conn.PublishWait)
	defer cancel()
	msg := &nats.Msg{Subject: r.bucket().Subject(key), Data: value}
	_, err := r.core.conn.JS.PublishMsg(ctx, msg, natsjs.WithExpectStream(r.bucket().Stream()), natsjs.WithMsgTTL(max(life, time.Second).Round(time.Second)))
	if api, ok := errors.AsType[*natsjs.APIError](err); ok && strings.Contains(api.Description, "maximum messages exceeded") {
		return ErrRevocationsFull
	}
	if err != nil {
		return r.core.conn.Unavailable(fmt.Errorf("jetstream: write to bucket %s: %w", revokedBucket, err))
	}
	return nil
}

// Follow calls each with every entry, and then with each new one, until ctx ends. The value is nil
// if the key was deleted; each is not told when an entry has reached the end of its life. loaded is
// called whenever all entries that were there have been given. While NATS cannot be reached, Follow
// tries again, and afterwards gives all entries anew. The functions are called by one goroutine at
// a time.
func (r Revocations) Follow(ctx context.Context, loaded func(), each func(key string, value []byte)) {
	r.bucket().Follow(ctx, loaded, each)
}
