package facade_test

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// loggedRig is a hub on the NATS server at url, for JWTs, that logs all to log.
func loggedRig(t *testing.T, url string, log *journal) *rig {
	t.Helper()
	logger := slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	v := newVerifier(t)
	return newRigOn(t, jetstream.Config{URL: url, Logger: logger}, func(cfg *facade.Config) {
		cfg.Auth, cfg.Logger = facade.Tokens(v), logger
		cfg.Limits.FrameRate = facade.NoLimit
	})
}

// postAs publishes to a topic, and returns the status.
func (r *rig) postAs(ctx context.Context, token, topic string) (int, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.http.URL+"/publish/"+topic, strings.NewReader("1"))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := r.http.Client().Do(req)
	if err != nil {
		return 0, err
	}
	return resp.StatusCode, resp.Body.Close()
}

var notLoggedCount = regexp.MustCompile(`not_logged=(\d+)`)

// failures returns how many lines of a kind and client are in the log, and how many more they
// count.
func (j *journal) failures(kind, client string) (lines, notLogged int) {
	for line := range strings.Lines(j.String()) {
		if strings.Contains(line, kind) && strings.Contains(line, " client="+client+" ") {
			lines++
			if m := notLoggedCount.FindStringSubmatch(line); m != nil {
				n, _ := strconv.Atoi(m[1])
				notLogged += n
			}
		}
	}
	return lines, notLogged
}

// TestLogOfAnOutage has a client retry over WebSocket, and another over HTTP, while NATS is down.
func TestLogOfAnOutage(t *testing.T) {
	t.Parallel()
	const tries = 300
	nats := natstest.Run(t)
	var log journal
	r := loggedRig(t, nats.ClientURL(), &log)
	topic := freshTopic()
	ws, token := r.as(t, grant(t, "over-ws", "publish:"+topic)), grant(t, "over-http", "publish:"+topic)
	ws.send(`{"op":"PUBLISH","topic":"` + topic + `","payload":1}`)
	ws.next("OK", "")
	nats.Shutdown()
	log.await(t, "connection to NATS lost")

	began := time.Now()
	for range tries {
		ws.send(`{"op":"PUBLISH","topic":"` + topic + `","payload":1}`)
		ws.next("ERR", "publish_failed")
		if status, err := r.postAs(t.Context(), token, topic); status != http.StatusServiceUnavailable {
			t.Fatal(status, err)
		}
	}
	kind := `level=WARN msg="request failed" topic=` + topic + ` `
	clients := []string{"jwt:over-ws", "jwt:over-http"}
	for _, client := range clients {
		if n, _ := log.failures(kind, client); n < 1 || n > 1+int(time.Since(began)/time.Minute) {
			t.Errorf("%d lines about %s after %d failures in %v, want one a minute", n, client, tries, time.Since(began))
		}
	}
	if err := r.srv.Close(); err != nil {
		t.Fatal(err)
	}
	for _, client := range clients {
		lines, notLogged := log.failures(kind, client)
		if all := lines + notLogged; all < tries || all > tries+lines {
			t.Errorf("%d lines about %s count %d more, want %d failures", lines, client, notLogged, tries)
		}
	}
	if n := strings.Count(log.String(), "level=WARN"); n > 20+4*int(time.Since(began)/time.Minute) {
		t.Errorf("%d warnings in %v:\n%s", n, time.Since(began), log.String())
	}
}

// TestLogOfLeavingClients has clients leave before the answer to a publish, which NATS does not
// give.
func TestLogOfLeavingClients(t *testing.T) {
	t.Parallel()
	proxy := natstest.StartProxy(t, natstest.Run(t).ClientURL())
	var log journal
	r := loggedRig(t, proxy.URL(), &log)
	topic := freshTopic()
	token := grant(t, "hasty", "publish:*")
	if status, err := r.postAs(t.Context(), token, topic); status != http.StatusOK {
		t.Fatal(status, err)
	}
	swallowed := make(chan struct{}, 1)
	proxy.Swallow(func(subject string) bool {
		if !strings.Contains(subject, topic) {
			return false
		}
		select {
		case swallowed <- struct{}{}:
		default:
		}
		return true
	})
	left := `level=DEBUG msg="request failed" topic=`
	for range 3 {
		ctx, leave := context.WithCancel(t.Context())
		go func() {
			<-swallowed
			leave()
		}()
		if status, err := r.postAs(ctx, token, topic); !errors.Is(err, context.Canceled) {
			t.Fatal(status, err)
		}
	}
	log.await(t, left+topic+` client=jwt:hasty error=`)
	// the SUBSCRIBE waits for the answer to the publish
	p := r.as(t, grant(t, "hasty-ws", "publish:*", "subscribe:*"))
	p.send(`{"op":"PUBLISH","topic":"`+topic+`","payload":1}`, `{"op":"SUBSCRIBE","topic":"`+topic+`","group":"g"}`)
	<-swallowed
	_ = p.conn.CloseNow()
	log.await(t, left+topic+` client=jwt:hasty-ws error=`)
	if text := log.String(); strings.Contains(text, "level=WARN") || strings.Contains(text, "level=ERROR") {
		t.Errorf("a client that leaves makes warnings:\n%s", text)
	}
}
