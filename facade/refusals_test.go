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
	p := r.dial(t)
	began := time.Now()
	p.send(`{"op":"AUTH","token":"guessed-secret"}`)
	p.want(`{"op":"ERR","code":"bad_token","msg":"The token is not valid."}`)
	log.await(t, `level=WARN msg="refused a token" remote=127\.0\.0\.1:\d+ over=websocket code=bad_token reason="The token is not valid\." not_logged=0`)
	ask := func() {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, r.http.URL+"/snap/process.state", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhIn0.c2ln")
		resp, err := r.http.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusUnauthorized {
			t.Fatal(resp.Status)
		}
	}
	ask()
	log.await(t, `msg="refused a token" remote=127\.0\.0\.1:\d+ over=http code=jwt_invalid`)
	for range 100 {
		ask()
	}
	n := strings.Count(log.String(), "refused a token")
	if most := 12 + int(time.Since(began)/time.Second); n < 10 || n > most {
		t.Errorf("%d of 102 refusals are in the log, want 10 to %d", n, most)
	}
	skipped := regexp.MustCompile(`not_logged=[1-9]`)
	eventually(t, "the log says how many it has not", func() bool {
		ask()
		return skipped.MatchString(log.String())
	})
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
