package records

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// BookmarksBucket holds the bookmarks of groups.
const BookmarksBucket = "eventhub_bookmarks"

// Bookmark is a stored position of a group, as the Bookmark of the bus.
type Bookmark struct {
	Name      string `json:"name"`
	Floor     uint64 `json:"floor"`
	Newest    uint64 `json:"newest"`
	Unsettled uint64 `json:"unsettled"`
	Exact     bool   `json:"exact"`
	MadeMS    int64  `json:"made_ms"`
}

// StoredBookmark is a Bookmark as it is stored.
type StoredBookmark struct {
	Bookmark

	Stream  time.Time     `json:"stream"`  // when it was created
	Settled []native.Span `json:"settled"` // what was settled behind the floor
}

func bookmarkSubject(t *streams.Topic, group, token string) string {
	return "$KV." + BookmarksBucket + "." + GroupKey(t, group) + "." + token
}

// BookmarkNames returns the names of the bookmarks of a group.
func (r *Records) BookmarkNames(ctx context.Context, t *streams.Topic, group string) ([]string, error) {
	known, err := r.Conn.Subjects(ctx, BookmarksBucket, bookmarkSubject(t, group, ">"))
	if err != nil {
		return nil, r.Conn.Unavailable(err)
	}
	names := make([]string, 0, len(known))
	for subject := range known {
		names = append(names, native.ParseKeyToken(strings.TrimPrefix(subject, bookmarkSubject(t, group, ""))))
	}
	slices.Sort(names)
	return names, nil
}

// Bookmark reads a bookmark. One of a stream that was deleted and created again is none.
func (r *Records) Bookmark(ctx context.Context, t *streams.Topic, group, name string) (*StoredBookmark, error) {
	m, err := r.Conn.LastBySubject(ctx, "KV_"+BookmarksBucket, bookmarkSubject(t, group, native.KeyToken(name)))
	if errors.Is(err, event.ErrNotFound) {
		return nil, event.ErrNotFound
	}
	if err != nil {
		return nil, r.Conn.Unavailable(err)
	}
	var found StoredBookmark
	if err := json.Unmarshal(m.Data, &found); err != nil || !found.Stream.Equal(t.Stream.Created) {
		return nil, event.ErrNotFound // an unreadable bookmark says nothing
	}
	return &found, nil
}

// PutBookmark stores a bookmark under its name, and replaces the one that has the name.
func (r *Records) PutBookmark(ctx context.Context, t *streams.Topic, group string, b *StoredBookmark) error {
	b.Stream = t.Stream.Created
	value, err := json.Marshal(b)
	if err != nil {
		return err
	}
	msg := &nats.Msg{Subject: bookmarkSubject(t, group, native.KeyToken(b.Name)), Data: value}
	if _, err := r.Conn.Write(ctx, "KV_"+BookmarksBucket, msg); err != nil {
		return r.Conn.Unavailable(fmt.Errorf("jetstream: store a bookmark: %w", err))
	}
	return nil
}

// DeleteBookmark removes a bookmark.
func (r *Records) DeleteBookmark(ctx context.Context, t *streams.Topic, group, name string) error {
	return r.Conn.Purge(ctx, BookmarksBucket, bookmarkSubject(t, group, native.KeyToken(name)), 0)
}

// DeleteBookmarks removes all bookmarks of a group.
func (r *Records) DeleteBookmarks(ctx context.Context, t *streams.Topic, group string) error {
	return r.Conn.Purge(ctx, BookmarksBucket, bookmarkSubject(t, group, ">"), 0)
}
