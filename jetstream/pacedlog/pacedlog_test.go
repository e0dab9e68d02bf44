package pacedlog_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"eventhub/jetstream/pacedlog"
)

// journal keeps lines, without their time.
type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, strings.TrimSpace(string(p)))
	return len(p), nil
}

// take returns the lines since the last take, sorted.
func (j *journal) take() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	lines := j.lines
	j.lines = nil
	slices.Sort(lines)
	return lines
}

func (j *journal) want(t *testing.T, lines ...string) {
	t.Helper()
	if got := j.take(); !slices.Equal(got, lines) {
		t.Errorf("at %v the log got\n%s\nwant\n%s", time.Now(), strings.Join(got, "\n"), strings.Join(lines, "\n"))
	}
}

func newLog() (*pacedlog.Log, *journal) {
	j := new(journal)
	return pacedlog.New(slog.New(slog.NewTextHandler(j, &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		},
	}))), j
}

func failed(l *pacedlog.Log, client, why string) {
	l.Log(context.Background(), slog.LevelWarn, "request failed", client, slog.String("client", client), slog.Any("error", errors.New(why)))
}

// TestOneLineAMinute repeats a line for minutes.
func TestOneLineAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, j := newLog()
		failed(l, "a", "first")
		j.want(t, `level=WARN msg="request failed" client=a error=first`)
		for range 59 {
			time.Sleep(time.Second)
			failed(l, "a", "second")
			l.Sweep()
		}
		j.want(t)
		time.Sleep(time.Second)
		failed(l, "a", "third") // before the sweep
		j.want(t, `level=WARN msg="request failed" client=a error=third not_logged=59`)
		failed(l, "a", "fourth")
		failed(l, "a", "fifth")
		time.Sleep(time.Minute - time.Nanosecond)
		l.Sweep()
		j.want(t)
		time.Sleep(time.Nanosecond)
		l.Sweep()
		j.want(t, `level=WARN msg="request failed" client=a error=fifth not_logged=2`)
		failed(l, "a", "sixth") // in the minute of the count
		j.want(t)
		time.Sleep(time.Minute)
		l.Sweep()
		j.want(t, `level=WARN msg="request failed" client=a error=sixth not_logged=1`)
		time.Sleep(time.Minute)
		l.Sweep()
		j.want(t)
		failed(l, "a", "seventh") // after a minute without any
		j.want(t, `level=WARN msg="request failed" client=a error=seventh`)
	})
}

// TestKindsAndSources has a line of each level, message and source.
func TestKindsAndSources(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, j := newLog()
		for range 3 {
			failed(l, "a", "x")
			failed(l, "b", "x")
			l.Log(t.Context(), slog.LevelInfo, "request failed", "a")
			l.Log(t.Context(), slog.LevelWarn, "another", "a")
			l.Log(t.Context(), slog.LevelDebug, "not enabled", "a")
		}
		j.want(t, `level=INFO msg="request failed"`, `level=WARN msg="request failed" client=a error=x`,
			`level=WARN msg="request failed" client=b error=x`, `level=WARN msg=another`)
		l.End()
		j.want(t, `level=INFO msg="request failed" not_logged=2`, `level=WARN msg="request failed" client=a error=x not_logged=2`,
			`level=WARN msg="request failed" client=b error=x not_logged=2`, `level=WARN msg=another not_logged=2`)
		l.End()
		j.want(t)
	})
}

// TestManySources has more sources than are followed.
func TestManySources(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, j := newLog()
		const more = 500
		for i := range pacedlog.MaxKeys + more {
			failed(l, fmt.Sprint("client-", i), "x")
		}
		if n := len(j.take()); n != pacedlog.MaxKeys+1 {
			t.Errorf("%d lines, want one of each of %d clients, and one of all others", n, pacedlog.MaxKeys)
		}
		failed(l, "client-7", "x")
		l.Log(t.Context(), slog.LevelWarn, "another", "late")
		j.want(t, `level=WARN msg=another`)
		time.Sleep(time.Minute)
		l.Sweep()
		j.want(t, `level=WARN msg="request failed" client=client-1499 error=x not_logged=499`,
			`level=WARN msg="request failed" client=client-7 error=x not_logged=1`)
		time.Sleep(time.Minute)
		l.Sweep()
		failed(l, "late", "x") // there is room again
		failed(l, "later", "x")
		j.want(t, `level=WARN msg="request failed" client=late error=x`, `level=WARN msg="request failed" client=later error=x`)
	})
}

// TestRun sweeps in a goroutine, which ends with the counts.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, j := newLog()
		ctx, end := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			l.Run(ctx)
		}()
		failed(l, "a", "first")
		failed(l, "a", "second")
		time.Sleep(time.Minute + 5*time.Second)
		j.want(t, `level=WARN msg="request failed" client=a error=first`, `level=WARN msg="request failed" client=a error=second not_logged=1`)
		failed(l, "a", "third")
		end()
		<-ended
		j.want(t, `level=WARN msg="request failed" client=a error=third not_logged=1`)
	})
}

// TestNobodySweeps has an owner that never calls Sweep.
func TestNobodySweeps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, j := newLog()
		for i := range pacedlog.MaxKeys {
			failed(l, fmt.Sprint("client-", i), "x")
		}
		failed(l, "client-7", "x")
		j.take()
		time.Sleep(time.Minute)
		failed(l, "late", "x") // has no room of its own yet
		j.want(t, `level=WARN msg="request failed" client=client-7 error=x not_logged=1`, `level=WARN msg="request failed" client=late error=x`)
		failed(l, "a", "x")
		failed(l, "b", "x")
		j.want(t, `level=WARN msg="request failed" client=a error=x`, `level=WARN msg="request failed" client=b error=x`)
	})
}

// TestBy logs with a logger of slog.
func TestBy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, j := newLog()
		log := l.By("topic", "func").With(slog.String("topic", "t"))
		for i := range 3 {
			log.Error("survived a panic", slog.String("func", "f"), slog.Int("n", i))
			log.Error("survived a panic", slog.String("func", "g"), slog.Int("n", i))
			log.Debug("not enabled")
		}
		j.want(t, `level=ERROR msg="survived a panic" topic=t func=f n=0`, `level=ERROR msg="survived a panic" topic=t func=g n=0`)
		l.End()
		j.want(t, `level=ERROR msg="survived a panic" topic=t func=f n=2 not_logged=2`, `level=ERROR msg="survived a panic" topic=t func=g n=2 not_logged=2`)
	})
}

// TestAttributesAreNotChanged logs a slice of attributes that has room for more.
func TestAttributesAreNotChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, j := newLog()
		attrs := append(make([]slog.Attr, 0, 2), slog.Int("n", 1))
		for range 2 {
			l.Log(t.Context(), slog.LevelWarn, "m", "", attrs...)
		}
		l.End()
		j.want(t, "level=WARN msg=m n=1", "level=WARN msg=m n=1 not_logged=1")
		if after := attrs[:2][1]; after.Key != "" {
			t.Errorf("the array of the caller has %v", after)
		}
	})
}

// counter adds up lines and what they say was not logged.
type counter struct {
	slog.Handler
	lines, all atomic.Int64
}

func (c *counter) Enabled(context.Context, slog.Level) bool { return true }

func (c *counter) Handle(_ context.Context, r slog.Record) error {
	c.lines.Add(1)
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == pacedlog.NotLogged {
			c.all.Add(a.Value.Int64())
		}
		return true
	})
	return nil
}

// TestNoneIsLost logs, sweeps and ends concurrently.
func TestNoneIsLost(t *testing.T) {
	t.Parallel()
	const writers, each = 8, 2000
	c := new(counter)
	l := pacedlog.New(slog.New(c))
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			for i := range each {
				l.Log(context.Background(), slog.LevelWarn, "m", strconv.Itoa(i%3))
				if i%100 == 0 {
					l.Sweep()
				}
			}
		})
	}
	wg.Wait()
	l.End()
	// each of the three sources has one line that was logged itself
	if got := c.all.Load() + 3; got != writers*each || c.lines.Load() != 6 {
		t.Errorf("%d lines are in the log or counted there in %d lines, want %d in 6", got, c.lines.Load(), writers*each)
	}
}

func BenchmarkLog(b *testing.B) {
	l := pacedlog.New(slog.New(slog.NewTextHandler(new(journal), nil)))
	err := errors.New("down")
	b.ReportAllocs()
	for b.Loop() {
		l.Log(b.Context(), slog.LevelWarn, "request failed", "client", slog.String("client", "client"), slog.Any("error", err))
	}
}
