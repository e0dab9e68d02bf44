package publish

import (
	"fmt"
	"hash/maphash"
	"strings"
	"sync"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/panics"
)

// derivedRecent is how many keys a topic with DerivedKeys remembers that were counted and may not
// be stored yet, twice. A key that was forgotten counts again.
const derivedRecent = 500_000

// DerivedKeys are jetstream.DerivedKeys: events of the topic From make keys of the topic Of. Key is
// called concurrently.
type DerivedKeys struct {
	From, Of string
	Key      func(payload []byte) string
}

// derivedKeys counts the new keys of one DerivedKeys.
type derivedKeys struct {
	DerivedKeys
	shared *Publishers

	mu             sync.Mutex
	recent, before map[uint64]struct{} // hashes of keys that were counted, the later ones in recent
}

// derivedKeysOf returns the count for a topic, or nil.
func (p *Publishers) derivedKeysOf(topic string) *derivedKeys {
	for _, d := range p.Derived {
		if d.From == topic {
			return &derivedKeys{DerivedKeys: d, shared: p}
		}
	}
	return nil
}

// admit returns an *Error if the event makes a new key, and client may make no more.
func (k *derivedKeys) admit(payload []byte, client string) error {
	if client == "" || strings.HasPrefix(client, conn.OwnClient) {
		return nil
	}
	key := ""
	panics.Run(k.shared.Often.By("func"), "DerivedKeys.Key", func() { key = k.Key(payload) })
	if key == "" {
		return nil
	}
	h := maphash.String(keySeed, key)
	if k.counted(h) || k.exists(h) {
		return nil
	}
	if p := k.shared; p.newDerived.Take(client) > 0 {
		p.Obs.LimitReached("derived_keys_per_client")
		return &event.Error{Code: event.CodeRateLimited, Msg: fmt.Sprintf("this client has made %d new keys of topic %s by its events on %s, which is its limit: %d more are allowed a second, and events of keys that exist are not limited",
			p.Limits.DerivedKeysPerClient, k.Of, k.From, p.Limits.DerivedKeyRate)}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.recent) >= derivedRecent || k.recent == nil {
		k.before, k.recent = k.recent, make(map[uint64]struct{})
	}
	k.recent[h] = struct{}{}
	return nil
}

func (k *derivedKeys) counted(h uint64) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	_, ok := k.recent[h]
	if !ok {
		_, ok = k.before[h]
	}
	return ok
}

// exists reports whether the topic has a key, as far as this hub knows. While the hub reads the
// keys of the topic, any may be one.
func (k *derivedKeys) exists(h uint64) bool {
	t := k.shared.Streams.Known(k.Of)
	if t == nil {
		return false
	}
	keys := gatesOf(t).keys
	if keys == nil {
		return false
	}
	keys.mu.Lock()
	defer keys.mu.Unlock()
	removed, known := keys.hashes[h]
	return known && !removed || !keys.complete
}
