package jetstream

import (
	"context"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/natstest"
)

// done is called from a goroutine of the bus, also for the first event of a stream: whoever holds a
// lock while publishing may take that in done.
func TestDoneIsCalledElsewhere(t *testing.T) {
	t.Parallel()
	b, err := Open(t.Context(), Config{Server: natstest.Embed(t, t.TempDir())})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = b.Close() }()
	p := b.NewPublisher()
	for i := range 3 { // the first one makes the stream
		var mu sync.Mutex
		returned := make(chan struct{})
		done := make(chan error, 1)
		go func() {
			defer close(returned)
			mu.Lock()
			defer mu.Unlock()
			err := p.PublishAsync(context.Background(), "work", []byte("1"), PublishOptions{}, func(_ event.Receipt, err error) {
				mu.Lock()
				defer mu.Unlock()
				done <- err
			})
			if err != nil {
				done <- err
			}
		}()
		select {
		case <-returned:
		case <-time.After(wait):
			t.Fatalf("publish %d: PublishAsync waits for done, which waits for it", i)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}
