package facade_test

import (
	"bytes"
	"log/slog"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/facade"
)

// journal takes a log.
type journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.String()
}

// await waits until the log matches a pattern.
func (j *journal) await(t *testing.T, pattern string) {
	t.Helper()
	re := regexp.MustCompile(pattern)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(rigPatience)
	for !re.MatchString(j.String()) {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("the log does not match %s:\n%s", pattern, j)
		}
	}
}

// TestLogOfRefusedTokens shows wrong tokens, more than are logged.
func TestLogOfRefusedTokens(t *testing.T) {
	t.Parallel()
	var log journal
	r := jwtRig(t, func(cfg *facade.Config) { cfg.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
	began := time.Now()
	p := r.dial(t)
	p.send(`{"op":"AUTH","token":"guessed-secret"}`)
	p.want(`{"op":"ERR","code":"bad_token","msg":"The token is not valid."}`)
	log.await(t, `level=WARN msg="refused a token" remote=127\.0\.0\.1:\d+ over=websocket code=bad_token reason="The token is not valid\."`)
	const more = 20
	for range more {
		w := r.from(t, "127.0.0.1:99", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhIn0.c2ln")
		if w.Code != http.StatusUnauthorized {
			t.Fatal(w.Code, w.Body)
		}
	}
	if n := strings.Count(log.String(), "refused a token"); n > 1+int(time.Since(began)/time.Minute) {
		t.Errorf("%d of %d refusals of an address are in the log, want one a minute", n, 1+more)
	}
	r.from(t, "192.0.2.1:99", "x") // another address
	log.await(t, `msg="refused a token" remote=192\.0\.2\.1:99 over=http code=bad_token`)
	if err := r.srv.Close(); err != nil {
		t.Fatal(err)
	}
	log.await(t, `msg="refused a token" remote=127\.0\.0\.1:99 over=http code=jwt_invalid reason=".*" not_logged=\d+`)
	if text := log.String(); strings.Contains(text, "eyJ") || strings.Contains(text, "guessed") {
		t.Errorf("the log has a token:\n%s", text)
	}
}

// TestLogOfClients follows a connection at debug, and has one more at info.
func TestLogOfClients(t *testing.T) {
	t.Parallel()
	var debug, info journal
	r := jwtRig(t, func(cfg *facade.Config) {
		cfg.Logger = slog.New(slog.NewTextHandler(&debug, &slog.HandlerOptions{Level: slog.LevelDebug}))
	})
	p := r.as(t, grant(t, "sensor-7"))
	debug.await(t, `level=DEBUG msg="client connected" principal=jwt:sensor-7 remote=127\.0\.0\.1:\d+`)
	p.auth(grant(t, "sensor-8"))
	debug.await(t, `msg="client changed its token" principal=jwt:sensor-8 `)
	_ = p.conn.CloseNow()
	debug.await(t, `level=DEBUG msg="client disconnected" principal=jwt:sensor-8 remote=127\.0\.0\.1:\d+ code=1006`)

	quiet := jwtRig(t, func(cfg *facade.Config) { cfg.Logger = slog.New(slog.NewTextHandler(&info, nil)) })
	quiet.as(t, grant(t, "sensor-9"))
	if text := info.String(); strings.Contains(text, "sensor-9") {
		t.Errorf("the log at info has a client:\n%s", text)
	}
}
