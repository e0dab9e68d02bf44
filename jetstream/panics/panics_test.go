package panics

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

func TestCall(t *testing.T) {
	var text bytes.Buffer
	log := slog.New(slog.NewTextHandler(&text, nil))
	own := errors.New("own")
	if err := Call(log, "Apply", func() error { return own }); err != own { //nolint:errorlint // it is returned as it is
		t.Errorf("an error became %v", err)
	}
	if text.Len() > 0 {
		t.Errorf("without a panic it logs %s", text.String())
	}
	before := Count()
	for _, cause := range []any{"secret", errors.New("secret"), 7, nil} {
		text.Reset()
		err := Call(log, "Apply", func() error { panic(cause) })
		if !Is(fmt.Errorf("wrapped: %w", err)) || err.Error() != "Apply panicked: the log has the stack" {
			t.Errorf("panic(%v) became %v", cause, err)
		}
		if got := text.String(); !strings.Contains(got, "TestCall") || !strings.Contains(got, "level=ERROR") || !strings.Contains(got, "func=Apply") {
			t.Errorf("the log is %s", got)
		}
	}
	if got := Count() - before; got != 4 {
		t.Errorf("%d panics count", got)
	}
	if Is(own) || Is(nil) {
		t.Error("an error that is no panic counts as one")
	}
}
