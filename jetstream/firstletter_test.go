package jetstream

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"
)

// lockedLog takes a log.
type lockedLog struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lockedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lockedLog) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), text)
}

// TestFirstDeadLetterIsLogged has two groups fail for several events each.
func TestFirstDeadLetterIsLogged(t *testing.T) {
	t.Parallel()
	var log lockedLog
	b := open(t, Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	for _, group := range []string{"one", "two"} {
		k := take(t, b, "a", group, SubscribeOptions{MaxAttempts: 1})
		letters := take(t, b, "dlq.a", "reader-"+group, SubscribeOptions{})
		publishAll(t, b, "a", "1", "2", "3")
		for range 3 {
			_ = k.next().Nack("s3cret reason", -1)
		}
		letters.next()
		letters.next()
		letters.next()
		line := `level=WARN msg="first dead letter of a group" topic=a group=` + group + ` event=`
		// A letter may be delivered before the log has it.
		eventually(t, "the log has the first letter", func() bool { return log.count(line) > 0 })
		if n := log.count(line); n != 1 {
			t.Errorf("the first dead letter of %s was logged %d times", group, n)
		}
	}
	if log.count("first dead letter") != 2 || log.count("s3cret") != 0 {
		t.Error(log.text.String())
	}
}

func TestFirstLettersAreBounded(t *testing.T) {
	t.Parallel()
	var f firstLetters
	for i := range maxFirstLetters {
		if !f.first("a", string(rune(i+1))) {
			t.Fatal("a group was known before its first dead letter")
		}
	}
	if f.first("a", string(rune(1))) {
		t.Error("a group was forgotten too early")
	}
	f.first("b", "g")
	if n := len(f.known); n != 1 {
		t.Errorf("%d groups are known", n)
	}
}
