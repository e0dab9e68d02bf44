package projections

import (
	"sync"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// cached is a cached state.
type cached struct {
	state State
	// span is the feed span in which the state was last known to be current; see feed.
	span uint64
}

// keyOverhead is the approximate memory cost of an entry in bytes, besides its key and value.
const keyOverhead = 200

func (c *cached) size(key string) int {
	return keyOverhead + len(key) + len(c.state.Value) + len(c.state.From.Stream)
}

// cache holds the most recently used states, up to a number of keys and of bytes. Its methods may
// be called concurrently.
type cache struct {
	mu    sync.Mutex
	lru   *simplelru.LRU[string, cached]
	max   int
	bytes int
	full  func() // called after an entry was evicted to make room
}

func newCache(keys, bytes int, full func()) *cache {
	c := &cache{max: bytes, full: full}
	// cannot fail: keys is positive
	c.lru, _ = simplelru.NewLRU(keys, func(key string, v cached) { c.bytes -= v.size(key) })
	return c
}

func (c *cache) get(key string) (cached, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lru.Get(key)
}

func (c *cache) put(key string, v cached) {
	c.mu.Lock()
	c.lru.Remove(key) // so that its size is not counted twice
	dropped := c.lru.Add(key, v)
	c.bytes += v.size(key)
	for c.bytes > c.max && c.lru.Len() > 1 {
		c.lru.RemoveOldest()
		dropped = true
	}
	c.mu.Unlock()
	if dropped {
		c.full()
	}
}

func (c *cache) drop(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lru.Remove(key)
}
