package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream"
)

// Sizes of reads.
const (
	keysAtOnce    = 1_000
	getsAtOnce    = 16
	watchedKeys   = 100
	maxKeyGets    = 20_000 // of a walk by keys; the rest is extrapolated
	keyedPageSize = 1_000
	maxPages      = 100 // of a walk by pages; the rest is extrapolated
)

// keyedStudies are the parts of the benchmark.
var keyedStudies = []keyedStudy{
	{
		name: "keys", calls: 10, ours: contender{"Keys.GetMany of 1,000", latestByKey},
		theirs: []contender{{"KV Get of 1,000, 16 at a time", getKeys(getsAtOnce)}, {"KV Get of 1,000, one by one", getKeys(1)}},
	},
	{
		name: "key", calls: 2_000, each: true, ours: contender{"Keys.Get", latestOne},
		theirs: []contender{{"STREAM.MSG.GET at the leader", leaderGet}},
	},
	{
		name: "walk", ours: contender{"Keys.Each", eachLatest},
		theirs: []contender{{"KV WatchAll", watchAll}, {"KV ListKeys, Get 16 at a time", listAndGet}},
	},
	{name: "pages", ours: contender{"Keys.Page of 1,000", latestPages}, theirs: []contender{{"KV WatchAll", watchAll}}},
	{name: "list", ours: contender{"Keys.List of 1,000", listPages}, theirs: []contender{{"KV WatchAll", watchAll}}},
	{name: "watch", ours: contender{"Watch", busWatch(0)}, theirs: []contender{{"KV WatchAll", watchAll}}},
	{name: "watch-100", calls: 10, ours: contender{"Watch of 100 keys", busWatch(watchedKeys)}, theirs: []contender{{"KV WatchFiltered of 100 keys", watchFiltered}}},
}

// came returns the time since begin, or an error if the count is wrong.
func came(begin time.Time, got, want int) (time.Duration, error) {
	took := time.Since(begin)
	if got != want {
		return 0, fmt.Errorf("received %d keys, want %d", got, want)
	}
	return took, nil
}

func latestByKey(ctx context.Context, t *keyedTopic, n int) (time.Duration, error) {
	keys := t.draw(n, keysAtOnce)
	begin := time.Now()
	found, err := t.bus.Keys(t.name).GetMany(ctx, keys)
	if err != nil {
		return 0, err
	}
	return came(begin, len(found), len(keys))
}

// getKeys returns a call that gets keys from the bucket, atOnce at a time.
func getKeys(atOnce int) func(context.Context, *keyedTopic, int) (time.Duration, error) {
	return func(ctx context.Context, t *keyedTopic, n int) (time.Duration, error) {
		keys := t.draw(n, keysAtOnce)
		begin := time.Now()
		got, err := t.get(ctx, keys, atOnce)
		if err != nil {
			return 0, err
		}
		return came(begin, got, len(keys))
	}
}

// get gets keys from the bucket and returns their number.
func (t *keyedTopic) get(ctx context.Context, keys []string, atOnce int) (int, error) {
	found := make([]natsjs.KeyValueEntry, len(keys))
	errs := make([]error, atOnce)
	var next atomic.Int64
	var readers sync.WaitGroup
	for r := range atOnce {
		readers.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= len(keys) {
					return
				}
				if found[i], errs[r] = t.kv.Get(ctx, keys[i]); errs[r] != nil {
					return
				}
			}
		})
	}
	readers.Wait()
	return len(found), errors.Join(errs...)
}

func latestOne(ctx context.Context, t *keyedTopic, n int) (time.Duration, error) {
	key := t.draw(n, 1)[0]
	begin := time.Now()
	e, err := t.bus.Keys(t.name).Get(ctx, key)
	if err != nil {
		return 0, err
	}
	return time.Since(begin), sameKey(e.Key, key)
}

func leaderGet(ctx context.Context, t *keyedTopic, n int) (time.Duration, error) {
	subject := "keyed." + t.draw(n, 1)[0] + "." + t.name
	begin := time.Now()
	m, err := t.stream.GetLastMsgForSubject(ctx, subject)
	if err != nil {
		return 0, err
	}
	return time.Since(begin), sameKey(m.Subject, subject)
}

func sameKey(got, want string) error {
	if got != want {
		return fmt.Errorf("received %s, want %s", got, want)
	}
	return nil
}

func eachLatest(ctx context.Context, t *keyedTopic, _ int) (time.Duration, error) {
	got := 0
	begin := time.Now()
	err := t.bus.Keys(t.name).Each(ctx, func(*jetstream.Event) error { got++; return nil })
	if err != nil {
		return 0, err
	}
	return came(begin, got, t.keys)
}

// latestPages reads all pages. If there are more than maxPages, it reads a sample from the whole
// bucket and extrapolates the time, because each page is a separate request.
func latestPages(ctx context.Context, t *keyedTopic, _ int) (time.Duration, error) {
	all := (t.keys + keyedPageSize - 1) / keyedPageSize
	part := min(all, maxPages)
	begin := time.Now()
	for i := range part {
		offset := i * all / part * keyedPageSize
		page, err := t.bus.Keys(t.name).Page(ctx, offset, keyedPageSize)
		if err != nil {
			return 0, err
		}
		if want := min(keyedPageSize, t.keys-offset); len(page) != want {
			return 0, fmt.Errorf("page at offset %d has %d keys, want %d", offset, len(page), want)
		}
	}
	return time.Duration(float64(time.Since(begin)) * float64(all) / float64(part)), nil
}

// listPages lists all keys.
func listPages(ctx context.Context, t *keyedTopic, _ int) (time.Duration, error) {
	got := 0
	begin := time.Now()
	for next := ""; ; {
		page, err := t.bus.Keys(t.name).List(ctx, jetstream.ListOptions{Next: next, Limit: keyedPageSize})
		if err != nil {
			return 0, err
		}
		got += len(page.Events)
		if next = page.Next; next == "" {
			return came(begin, got, t.keys)
		}
	}
}

// watchAll watches the bucket until all current values have arrived.
func watchAll(ctx context.Context, t *keyedTopic, _ int) (time.Duration, error) {
	begin := time.Now()
	w, err := t.kv.WatchAll(ctx)
	if err != nil {
		return 0, err
	}
	return drainWatch(ctx, begin, w, t.keys)
}

func watchFiltered(ctx context.Context, t *keyedTopic, n int) (time.Duration, error) {
	keys := t.draw(n, watchedKeys)
	begin := time.Now()
	w, err := t.kv.WatchFiltered(ctx, keys)
	if err != nil {
		return 0, err
	}
	return drainWatch(ctx, begin, w, len(keys))
}

func drainWatch(ctx context.Context, begin time.Time, w natsjs.KeyWatcher, want int) (took time.Duration, err error) {
	defer func() { err = errors.Join(err, w.Stop()) }()
	for got := 0; ; got++ {
		select {
		case e, open := <-w.Updates():
			if !open {
				return 0, errors.New("watch ended early")
			}
			if e == nil {
				return came(begin, got, want)
			}
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// errEnough ends a watch of the bus.
var errEnough = errors.New("enough")

// busWatch returns a call that watches count keys with the bus, or all keys if count is 0, until
// all current values have arrived.
func busWatch(count int) func(context.Context, *keyedTopic, int) (time.Duration, error) {
	return func(ctx context.Context, t *keyedTopic, n int) (took time.Duration, err error) {
		var keys []string
		want := t.keys
		if count > 0 {
			keys, want = t.draw(n, count), count
		}
		got := 0
		begin := time.Now()
		var short error
		err = t.bus.Keys(t.name).Watch(ctx, keys, func(e *jetstream.Event) error {
			if e == nil {
				took, short = came(begin, got, want)
				return errEnough
			}
			got++
			return nil
		})
		if !errors.Is(err, errEnough) {
			return 0, err
		}
		return took, short
	}
}

// listAndGet lists the keys and gets each. If there are more than maxKeyGets, it gets a part and
// extrapolates the time.
func listAndGet(ctx context.Context, t *keyedTopic, _ int) (time.Duration, error) {
	begin := time.Now()
	lister, err := t.kv.ListKeys(ctx)
	if err != nil {
		return 0, err
	}
	keys := make([]string, 0, t.keys)
	for key := range lister.Keys() {
		keys = append(keys, key)
	}
	listed, err := came(begin, len(keys), t.keys)
	if err != nil {
		return 0, err
	}
	part := keys[:min(len(keys), maxKeyGets)]
	begin = time.Now()
	if _, err := t.get(ctx, part, getsAtOnce); err != nil {
		return 0, err
	}
	return listed + time.Duration(float64(time.Since(begin))*float64(len(keys))/float64(len(part))), nil
}
