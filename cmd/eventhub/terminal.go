package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"sync"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// terminal is an output stream that people see. Keys, headers, payloads and names come from other
// clients, whose characters may move the cursor, change the window, or show one text as another.
// Write escapes these characters, for all commands. It may be called concurrently.
type terminal struct {
	screen io.Writer // takes control sequences, so none of it may come from others

	mu   sync.Mutex
	tail []byte // the beginning of a character whose rest is not written yet, at most 3 bytes
}

// toTerminal returns the stream that writes to f: a *terminal if f is one, otherwise f itself, so
// that a pipe or a file gets each byte as it is.
func toTerminal(f *os.File) io.Writer {
	if info, err := f.Stat(); err != nil || info.Mode()&os.ModeCharDevice == 0 {
		return f
	}
	return &terminal{screen: f}
}

// screenOf reports whether w is a terminal. If so, screen takes control sequences, and text of the
// program alone. Otherwise screen is w.
func screenOf(w io.Writer) (screen io.Writer, is bool) {
	if t, ok := w.(*terminal); ok {
		return t.screen, true
	}
	return w, false
}

// Write shows p.
func (t *terminal) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	text := append(t.tail, p...)
	whole := len(text) - cutOff(text)
	t.tail = bytes.Clone(text[whole:])
	if _, err := t.screen.Write(visible(text[:whole])); err != nil {
		return 0, err
	}
	return len(p), nil
}

// flush shows the beginning of a character whose rest did not come, at the end of the output.
func flush(w io.Writer) {
	if t, ok := w.(*terminal); ok {
		t.mu.Lock()
		defer t.mu.Unlock()
		_, _ = t.screen.Write(visible(t.tail))
		t.tail = nil
	}
}

// cutOff returns how many bytes at the end of text begin a character without ending it.
func cutOff(text []byte) int {
	for n := min(utf8.UTFMax-1, len(text)); n > 0; n-- {
		if !utf8.FullRune(text[len(text)-n:]) {
			return n
		}
	}
	return 0
}

// visible escapes what does not show as itself: characters as JSON does, so that a record stays the
// same JSON, and bytes that are not UTF-8 as \xNN.
func visible(text []byte) []byte {
	shown := make([]byte, 0, len(text))
	for len(text) > 0 {
		r, size := utf8.DecodeRune(text)
		switch {
		case r == utf8.RuneError && size == 1:
			shown = fmt.Appendf(shown, `\x%02x`, text[0])
		case showsAsItself(r):
			shown = append(shown, text[:size]...)
		default:
			for _, unit := range utf16.AppendRune(nil, r) {
				shown = fmt.Appendf(shown, `\u%04x`, unit)
			}
		}
		text = text[size:]
	}
	return shown
}

// showsAsItself reports whether a terminal shows r, and nothing else happens. The exceptions are
// characters that change the text around them, or cannot be seen: control characters, marks of
// direction, joiners, tags, fillers, selectors of variants, and what Unicode does not define.
func showsAsItself(r rune) bool {
	return r == '\n' || r == '\t' ||
		unicode.IsGraphic(r) && !unicode.In(r, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector)
}
