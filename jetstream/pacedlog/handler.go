package pacedlog

import (
	"context"
	"log/slog"
	"slices"
	"strings"
)

// By returns a logger for code that takes one. Its lines are those of l. The source of a line is
// made of its attributes with these keys. Groups are not kept.
func (l *Log) By(keys ...string) *slog.Logger { return slog.New(handler{l, keys, nil}) }

// handler is a slog.Handler.
type handler struct {
	log   *Log
	keys  []string
	attrs []slog.Attr
}

func (h handler) Enabled(ctx context.Context, level slog.Level) bool {
	return h.log.log.Enabled(ctx, level)
}

func (h handler) Handle(ctx context.Context, r slog.Record) error {
	attrs := slices.Clip(h.attrs)
	r.Attrs(func(a slog.Attr) bool {
		attrs = append(attrs, a)
		return true
	})
	var source strings.Builder
	for _, a := range attrs {
		if slices.Contains(h.keys, a.Key) {
			source.WriteString(a.Value.String())
			source.WriteByte(' ')
		}
	}
	h.log.Log(ctx, r.Level, r.Message, source.String(), attrs...)
	return nil
}

func (h handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	h.attrs = slices.Concat(h.attrs, attrs)
	return h
}

func (h handler) WithGroup(string) slog.Handler { return h }
