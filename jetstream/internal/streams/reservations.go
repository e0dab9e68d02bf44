package streams

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"eventhub/jetstream/event"
)

// TooManyStreams returns an error when the bus knows as many streams as it may.
func (s *Streams) TooManyStreams(name string) error {
	s.topics.mu.RLock()
	_, met := s.topics.streams[name]
	full := !met && len(s.topics.streams) >= s.Limits.Topics
	s.topics.mu.RUnlock()
	if !full {
		return nil
	}
	s.Obs.LimitReached("topics")
	return &event.Error{Code: event.CodeOverloaded, Msg: fmt.Sprintf("this hub knows %d streams of topics, which is its limit", s.Limits.Topics), Err: event.ErrNoStream}
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

func (r *reservations) Has(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.names[name]
	return ok
}

func (r *reservations) Drop(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.names, name)
}

// ReserveTopic takes a stream from the ration of a client, once.
func (s *Streams) ReserveTopic(name, client string) error {
	s.Reserved.mu.Lock()
	defer s.Reserved.mu.Unlock()
	if _, ok := s.Reserved.names[name]; ok {
		return nil
	}
	if err := s.newTopics.Take(client); err != nil {
		return err
	}
	if s.Reserved.names == nil {
		s.Reserved.names = make(map[string]struct{})
	}
	for other := range s.Reserved.names {
		if len(s.Reserved.names) < s.Limits.Topics {
			break
		}
		delete(s.Reserved.names, other) // it counts again when it is made
	}
	s.Reserved.names[name] = struct{}{}
	return nil
}

// SeemsToExist reports whether the topic has a stream, or false if the server does not say. It
// returns an error for a stream that is not the bus's.
func (s *Streams) SeemsToExist(ctx context.Context, topic string) (bool, error) {
	s.Reserved.mu.Lock()
	mute := s.Clock.Now() < s.Reserved.mute
	s.Reserved.mu.Unlock()
	if mute {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, reserveWait)
	defer cancel()
	_, err := s.Readable(ctx, topic)
	if e, ok := errors.AsType[*event.Error](err); ok && e.Code == event.CodeBadTopic {
		return false, err
	}
	if err != nil && !errors.Is(err, event.ErrNotFound) {
		s.Reserved.mu.Lock()
		s.Reserved.mute = s.Clock.Now() + int64(reserveMute)
		s.Reserved.mu.Unlock()
	}
	return err == nil, nil
}
