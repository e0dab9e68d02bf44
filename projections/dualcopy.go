package projections

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/schemas"
	"eventhub/jetstream/topics"
)

const (
	// windowEvery is how often the duplicate window of a copy's topic is read, and windowAgain how
	// often while the topic does not exist.
	windowEvery = time.Minute
	windowAgain = time.Second
	// copySkew is how far the clocks of the leaders of two streams may be apart.
	copySkew = time.Minute
	// copySearches is how many ids of events without a key are searched for at a time, for each
	// version.
	copySearches = 16
	// searchingClient is the client for which these searches count.
	searchingClient = "\x00mirrors"
)

// versionCopy is the copy of a topic in one version. Its methods may be called concurrently, but
// not for events of the same key.
type versionCopy struct {
	bus     Bus
	log     *slog.Logger
	version int
	topic   string // of the copy
	view    SchemaView

	searches chan struct{} // holds one for each search
	window   atomic.Int64  // of the copy's topic, a time.Duration; 0 while it does not exist
	looked   atomic.Int64  // when the window was last asked for, in epoch nanoseconds
	said     atomic.Int64  // when the log last told of a failure, in epoch nanoseconds
}

func newVersionCopy(cfg *DualWriteConfig, version int) *versionCopy {
	return &versionCopy{
		bus: cfg.Bus, log: cfg.Logger, version: version, topic: topics.Mirror(cfg.Topic, version), searches: make(chan struct{}, copySearches),
	}
}

// write makes the copy of an event. again says that an earlier delivery may have made it.
//
// A copy is made once, by two means. Its id is known to the duplicate window of its stream, so a
// repetition within that time stores nothing. A copy that may have been made before that time is
// looked for first. It is then stored only if its key has not changed since (ExpectKeySequence), so
// an instance that stood still in between stores nothing either.
func (c *versionCopy) write(ctx context.Context, e *jetstream.Event, again bool) (Outcome, error) {
	cast, err := c.cast(ctx, e)
	if err != nil {
		return "", err
	}
	opts := jetstream.PublishOptions{
		Key: e.Key, TS: e.TS, HasTS: true, SID: e.SID, Tags: e.Tags, CausedBy: e.CausedBy,
		Headers: inVersion(cast.Headers, c.version), Tombstone: e.Tombstone,
	}
	for wait := retryFirst; ; wait = min(2*wait, retryMax) {
		there, err := c.look(ctx, e, &opts, again)
		if there {
			return Known, nil
		}
		if err == nil {
			var r jetstream.Receipt
			if r, err = c.bus.Publish(ctx, c.topic, cast.Payload, opts); err == nil {
				if r.Duplicate {
					return Known, nil
				}
				return Applied, nil
			}
		}
		if hopeless(err) || errors.Is(err, jetstream.ErrClosed) || ctx.Err() != nil {
			return "", err
		}
		again = true // the outcome may be unknown
		if !errors.Is(err, jetstream.ErrKeyChanged) {
			c.say(ctx, e, err)
		}
		if err := pause(ctx, wait); err != nil {
			return "", err
		}
	}
}

// cast returns an event in the version of the copy. It waits for a registry that cannot be read.
func (c *versionCopy) cast(ctx context.Context, e *jetstream.Event) (*jetstream.Event, error) {
	for wait := retryFirst; ; wait = min(2*wait, retryMax) {
		cast := *e
		err := c.view.Cast(ctx, &cast)
		if err == nil || hopeless(err) || errors.Is(err, jetstream.ErrClosed) || ctx.Err() != nil {
			return &cast, err
		}
		c.say(ctx, e, err)
		if err := pause(ctx, wait); err != nil {
			return nil, err
		}
	}
}

// say logs a failure, at most once in sayEvery.
func (c *versionCopy) say(ctx context.Context, e *jetstream.Event, err error) {
	last, now := c.said.Load(), time.Now().UnixNano()
	if now-last >= int64(sayEvery) && c.said.CompareAndSwap(last, now) {
		c.log.LogAttrs(ctx, slog.LevelWarn, "cannot store copies in another version; retrying", slog.String("topic", c.topic), slog.String("id", e.ID), slog.Any("error", err))
	}
}

// look reports whether the copy is there, if it may be there although its stream has forgotten its
// id. Otherwise it sets the id in opts, and has opts expect the key as it is.
//
// The copies of a key are in the order of the topic, but for those that opts marks as late: copies
// of events that were put back to the group, or that a version lacked when the group was moved. So
// the newest copy of the key, if it is not late, tells whether an event behind it has a copy.
func (c *versionCopy) look(ctx context.Context, e *jetstream.Event, opts *jetstream.PublishOptions, again bool) (bool, error) {
	id := copyID(e, c.version)
	opts.ID = id
	old := c.old(ctx, e)
	switch {
	case e.Key == "" && old:
		return c.lookKeyless(ctx, id)
	case e.Key == "" || !old && !again:
		return false, nil
	}
	newest, err := c.bus.Keys(c.topic).Get(ctx, e.Key)
	var sequence uint64
	opts.ExpectKeySequence = &sequence
	switch {
	case errors.Is(err, jetstream.ErrNotFound):
		return false, nil
	case err != nil:
		return false, err
	case newest.ID == id:
		return true, nil
	case !newest.Gone:
		sequence = newest.Sequence
	}
	since := time.Unix(0, e.StoredAt).Add(-copySkew)
	if source, ours := copiedSequence(newest.ID); ours && source < e.Sequence || newest.StoredAt < since.UnixNano() {
		return false, nil
	}
	opts.ID = id + lateCopy
	found, _, err := c.bus.History(c.topic).FindIDs(ctx, jetstream.IDSearch{Key: e.Key, IDs: []string{id, opts.ID}, Since: since})
	return len(found) > 0, err
}

// lookKeyless reports whether the copy of an event without a key is among the last 100,000 events.
func (c *versionCopy) lookKeyless(ctx context.Context, id string) (bool, error) {
	select {
	case c.searches <- struct{}{}:
	case <-ctx.Done():
		return false, ctx.Err()
	}
	defer func() { <-c.searches }()
	_, err := c.bus.History(c.topic).ByID(ctx, id, searchingClient)
	if errors.Is(err, jetstream.ErrNotFound) {
		return false, nil
	}
	return err == nil, err
}

// old reports whether a copy of the event may have been made so long ago that its stream has
// forgotten the id. Half of the duplicate window is for clocks that differ.
func (c *versionCopy) old(ctx context.Context, e *jetstream.Event) bool {
	now := time.Now()
	window := time.Duration(c.window.Load())
	every := windowEvery
	if window == 0 {
		every = windowAgain
	}
	if last := c.looked.Load(); now.UnixNano()-last >= int64(every) && c.looked.CompareAndSwap(last, now.UnixNano()) {
		found, err := c.bus.History(c.topic).DuplicateWindow(ctx)
		if err == nil || errors.Is(err, jetstream.ErrNotFound) { // or it is asked again later
			c.window.Store(int64(found))
			window = found
		}
	}
	return now.Sub(time.Unix(0, e.StoredAt)) > window/2
}

// inVersion returns headers that name a version.
func inVersion(headers map[string]string, version int) map[string]string {
	named := make(map[string]string, len(headers)+1)
	maps.Copy(named, headers)
	maps.DeleteFunc(named, func(name, _ string) bool { return strings.EqualFold(name, schemas.VersionHeader) })
	named[schemas.VersionHeader] = strconv.Itoa(version)
	return named
}

// copyPrefix begins the ids of copies. lateCopy ends those of copies behind copies of later events
// of their key.
const (
	copyPrefix = "copy-"
	lateCopy   = "-late"
)

// copyID returns the id of the copy of an event in a version: copy-<hash>-<sequence>. The hash is
// the first 128 bits of the SHA-256 of the stream, the sequence, the time of storage in epoch
// nanoseconds, and the version. The time tells the event from one at the same place of a stream
// that was deleted and made again.
func copyID(e *jetstream.Event, version int) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %d %d %d", e.Stream, e.Sequence, e.StoredAt, version))
	return copyPrefix + hex.EncodeToString(sum[:16]) + "-" + strconv.FormatUint(e.Sequence, 10)
}

// copiedSequence returns the sequence of the event of which a copy was made that is not late.
func copiedSequence(id string) (uint64, bool) {
	rest, ours := strings.CutPrefix(id, copyPrefix)
	_, sequence, found := strings.Cut(rest, "-")
	n, err := strconv.ParseUint(sequence, 10, 64)
	return n, ours && found && err == nil
}
