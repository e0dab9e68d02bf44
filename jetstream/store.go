package jetstream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// restoreMark is a stream that exists while a restore runs. A hub does not start beside it.
const restoreMark = "EVENTHUB_RESTORE"

// Store is a NATS to which a backup is restored, or from which a hub moves: Config.Server or
// Config.URL, without a bus. OpenStore returns one. Its methods must not be called concurrently.
type Store struct {
	backups *backups
	closed  sync.Once
}

// OpenStore connects to NATS, and changes nothing there. The caller closes the Store.
func OpenStore(ctx context.Context, cfg Config) (*Store, error) {
	cfg.Connections = 1
	c, err := openCore(ctx, cfg)
	if err != nil {
		return nil, err
	}
	s := &Store{backups: newBackups(c)}
	if err := c.openStore(ctx); err != nil {
		_ = s.Close() //nolint:contextcheck // what is half open is closed whatever ctx says; its error would hide the cause
		return nil, err
	}
	return s, nil
}

func (c *core) openStore(ctx context.Context) error {
	if err := c.conn.Connect(); err != nil { //nolint:contextcheck // it lives until Close, not until Open returns
		return err
	}
	if err := c.conn.CheckServer(ctx); err != nil {
		return err
	}
	var major, minor int
	version := c.conn.Links[0].NC.ConnectedServerVersion()
	if _, err := fmt.Sscanf(version, "%d.%d", &major, &minor); err != nil || major < 2 || major == 2 && minor < 15 {
		return fmt.Errorf("nats at %s: server version %q is too old to restore to; use nats-server 2.15 or newer", c.conn.Where(), version)
	}
	return nil
}

// Close ends the connection and Config.Server. It may be called twice.
func (s *Store) Close() error {
	s.closed.Do(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(s.backups.conn.Ctx), closeWait)
		defer cancel()
		s.backups.core.close(ctx)
	})
	return nil
}

// CheckEmpty returns an error unless nothing of a hub is there.
func (s *Store) CheckEmpty(ctx context.Context) error { return s.checkFree(ctx, nil) }

// checkFree is CheckEmpty, and returns an error for a stream of another program that has one of the
// names. A restore would refuse such a name, or remove the stream when it begins again.
func (s *Store) checkFree(ctx context.Context, names []string) error {
	k := s.backups
	inv, err := listStreams(ctx, k.core)
	if err != nil {
		return err
	}
	marked := inv.byName[restoreMark] != nil
	var found, taken []string
	for _, name := range inv.names() {
		info := inv.byName[name]
		if _, restored := info.Config.Metadata[native.MetaMade]; ofHub(name, info) || marked && restored {
			found = append(found, name)
		} else if slices.Contains(names, name) {
			taken = append(taken, name)
		}
	}
	if marked {
		return fmt.Errorf("nats at %s: a restore is running, or was killed; if none runs, remove what it left and repeat the command: nats stream rm %s", k.conn.Where(), strings.Join(found, "; nats stream rm "))
	}
	if len(found) > 0 {
		return fmt.Errorf("nats at %s is not empty: it has %d streams of a hub, such as %s; restore only where no hub has ever run, or remove these streams with everything in them", k.conn.Where(), len(found), found[0])
	}
	if len(taken) > 0 {
		return fmt.Errorf("nats at %s: stream %s of another program has the name of a stream that is restored (%d such streams); rename or remove it, or restore to another account", k.conn.Where(), taken[0], len(taken))
	}
	return nil
}

// ofHub reports whether a stream is one of a hub.
func ofHub(name string, info *natsjs.StreamInfo) bool {
	_, ruled := info.Config.Metadata[metaPattern]
	_, filled := info.Config.Metadata[streams.BucketTopic]
	return ruled || filled || name == restoreMark || name == putBackStream || strings.HasPrefix(name, "eventhub_") || strings.HasPrefix(name, "KV_eventhub_")
}

// checkRestored returns an error while a restore has not ended: no hub starts beside half of its
// streams.
func (k *backups) checkRestored(ctx context.Context) error {
	_, err := k.conn.FindStream(ctx, restoreMark)
	switch {
	case errors.Is(err, event.ErrNotFound):
		return nil
	case err != nil:
		return err
	}
	return fmt.Errorf("nats at %s: a restore is running, or was killed (stream %s): wait for it, or remove what it left, as eventhub restore says", k.conn.Where(), restoreMark)
}

// mark makes or removes the mark of a restore.
func (s *Store) mark(ctx context.Context, replicas int) (remove func(context.Context) error, err error) {
	cfg := natsjs.StreamConfig{Name: restoreMark, Subjects: []string{"$EVENTHUB.RESTORE"}, Description: "eventhub: a restore is running", MaxMsgs: 1, Replicas: max(replicas, 1)}
	create := func() (natsjs.Stream, error) { return s.backups.conn.JS.CreateStream(ctx, cfg) }
	if _, err := conn.WhenUp(ctx, s.backups.conn, create); err != nil {
		return nil, fmt.Errorf("nats at %s: make stream %s: %w", s.backups.conn.Where(), restoreMark, err)
	}
	return func(ctx context.Context) error { return s.backups.conn.JS.DeleteStream(ctx, restoreMark) }, nil
}

// cleanWait bounds what a failed restore spends on removing what it has made.
const cleanWait = time.Minute

// clean removes the streams that a failed restore has made, and names those that stay.
func (s *Store) clean(ctx context.Context, made []string, unmark func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanWait)
	defer cancel()
	var left []string
	for _, name := range made {
		_, err := conn.AskAgain(ctx, cleanWait, func(ctx context.Context) (bool, error) {
			err := s.backups.conn.JS.DeleteStream(ctx, name)
			if errors.Is(err, natsjs.ErrStreamNotFound) {
				err = nil
			}
			return true, err
		})
		if err != nil {
			left = append(left, name)
		}
	}
	if len(left) == 0 {
		if err := unmark(ctx); err == nil || errors.Is(err, natsjs.ErrStreamNotFound) {
			return nil
		}
	}
	left = append(left, restoreMark)
	return fmt.Errorf("some of what was restored is left: remove it with nats stream rm %s", strings.Join(left, "; nats stream rm "))
}
