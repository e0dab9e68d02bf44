package ops

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"

	"eventhub/jetstream"
)

// BackupTopic is the topic that represents backups in policies. A backup has every event of every
// topic, so it requires admin on this topic. Nothing needs to be published there.
const BackupTopic = "eventhub.backup"

// BackupError is the trailer of an answer that says why a backup has failed; absent for one that is
// complete.
const BackupError = "Event-Backup-Error"

// Backups makes backups at POST /backup.
type Backups struct {
	// Write writes a backup. alive is called now and then, and its error ends the backup. Required.
	Write func(ctx context.Context, w io.Writer, alive func() error) error
}

// backup answers POST /backup.
func (s *Server) backup(w http.ResponseWriter, r *http.Request) {
	if fault := checkQuery(r.URL.Query()); fault != "" {
		badQuery(w, fault)
		return
	}
	id := identity(r)
	ctx, cancel := r.Context(), context.CancelFunc(func() {})
	if at := id.Expires(); !at.IsZero() {
		ctx, cancel = context.WithDeadline(ctx, at)
	}
	defer cancel()
	out := &backupWriter{w: w}
	err := s.cfg.Backups.Write(ctx, out, func() error {
		if id.Revoked() || s.cfg.Ready != nil && s.cfg.Ready() != nil {
			return errEnding
		}
		return nil
	})
	s.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "a backup has ended", slog.String("by", id.Key()), slog.Int64("bytes", out.bytes), slog.Any("error", err))
	if err == nil || r.Context().Err() != nil {
		return
	}
	if !out.began {
		s.fail(w, r, err, "topic", "make a backup")
		return
	}
	text := "The backup failed: see the log of the hub."
	if own, ok := errors.AsType[*jetstream.Error](err); ok {
		text = own.Msg
	} else if errors.Is(err, errEnding) {
		text = "The hub ends, or the token has expired."
	}
	w.Header().Set(BackupError, text)
}

// backupWriter writes the body of an answer. Each part may take lineTimeout.
type backupWriter struct {
	w     http.ResponseWriter
	began bool
	bytes int64
}

func (b *backupWriter) Write(p []byte) (int, error) {
	if !b.began {
		b.began = true
		b.w.Header().Set("Content-Type", "application/zip")
		b.w.Header().Set("Cache-Control", "no-store")
		b.w.Header().Set("Trailer", BackupError)
	}
	extend(b.w)
	n, err := b.w.Write(p)
	b.bytes += int64(n)
	return n, err
}
