package jetstream

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"eventhub/jetstream/event"
)

// tooManyStreams returns an error when the bus knows as many streams as it may.
func (s *streams) tooManyStreams(name string) error {
	s.topics.mu.RLock()
	_, met := s.topics.streams[name]
	full := !met && len(s.topics.streams) >= s.limits.Topics
	s.topics.mu.RUnlock()
	if !full {
		return nil
	}
	s.obs.LimitReached("topics")
	return &event.Error{Code: event.CodeOverloaded, Msg: fmt.Sprintf("this hub knows %d streams of topics, which is its limit", s.limits.Topics), Err: event.ErrNoStream}
}

const (
	// reserveWait is how long Reserve waits for the server to say whether a topic exists. After a
	// request without an answer, Reserve asks no more for reserveMute.
	reserveWait = time.Second
	reserveMute = 5 * time.Second
)

// reservations are the streams that clients may still make, because the streams were counted when
// they were reserved.
type reservations struct {
	mu    sync.Mutex
	names map[string]struct{} // at most Limits.Topics
	mute  int64               // no question before this moment of the bus's clock
}

func (r *reservations) has(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.names[name]
	return ok
}

func (r *reservations) drop(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.names, name)
}

// reserveTopic takes a stream from the ration of a client, once.
func (s *streams) reserveTopic(name, client string) error {
	s.reserved.mu.Lock()
	defer s.reserved.mu.Unlock()
	if _, ok := s.reserved.names[name]; ok {
		return nil
	}
	if err := s.newTopics.Take(client); err != nil {
		return err
	}
	if s.reserved.names == nil {
		s.reserved.names = make(map[string]struct{})
	}
	for other := range s.reserved.names {
		if len(s.reserved.names) < s.limits.Topics {
			break
		}
		delete(s.reserved.names, other) // it counts again when it is made
	}
	s.reserved.names[name] = struct{}{}
	return nil
}

// seemsToExist reports whether the topic has a stream, or false if the server does not say. It
// returns an error for a stream that is not the bus's.
func (s *streams) seemsToExist(ctx context.Context, topic string) (bool, error) {
	s.reserved.mu.Lock()
	mute := s.clock.Now() < s.reserved.mute
	s.reserved.mu.Unlock()
	if mute {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, reserveWait)
	defer cancel()
	_, err := s.readable(ctx, topic)
	if e, ok := errors.AsType[*event.Error](err); ok && e.Code == event.CodeBadTopic {
		return false, err
	}
	if err != nil && !errors.Is(err, event.ErrNotFound) {
		s.reserved.mu.Lock()
		s.reserved.mute = s.clock.Now() + int64(reserveMute)
		s.reserved.mu.Unlock()
	}
	return err == nil, nil
}
