//go:build unix

package main

import (
	"context"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"eventhub/sdk/go/wire"
)

// tokenAttacks are the attacks by bad tokens.
var tokenAttacks = []attack{
	{name: "tokens", scopes: []string{"publish:attack.tokens"}, run: attackTokens, like: permittedTokens, beside: newcomers},
}

// attackTokens tries tokens that nobody signed: over more connections than refusals of an address
// may wait, over a new connection for each token, and over WebSocket.
func attackTokens(ctx context.Context, a *attacker) {
	tryTokens(ctx, a, func(round int) string { return a.token[:len(a.token)-4] + "AAAA" + strconv.Itoa(round) })
}

// permittedTokens does the same with its own token.
func permittedTokens(ctx context.Context, a *attacker) {
	tryTokens(ctx, a, func(int) string { return a.token })
}

func tryTokens(ctx context.Context, a *attacker, token func(round int) string) {
	const keeping, renewing, sockets = 300, 16, 32
	kept := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: keeping}}
	fresh := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	var accepted, inTurn, ended atomic.Int64
	a.crowd(ctx, keeping+renewing+sockets, func(worker, round int) {
		over := kept
		switch {
		case worker >= keeping+renewing:
			if c, err := wire.Dial(ctx, a.ws, wire.Options{Token: token(round)}); err == nil {
				c.Abort()
			}
			return
		case worker >= keeping:
			over = fresh
		}
		switch status, _ := askThrough(ctx, over, token(round), http.MethodGet, a.http+"/snap/neighbour.kept/1", nil); status {
		case http.StatusUnauthorized:
			inTurn.Add(1)
		case http.StatusTooManyRequests:
			ended.Add(1)
		case http.StatusForbidden:
			accepted.Add(1)
		}
	})
	a.report("over HTTP, %d tokens accepted, %d refused in turn, %d with their connection", accepted.Load(), inTurn.Load(), ended.Load())
}

// newcomers come from the attackers' address, each with a token that the hub has never seen. None
// is refused. The hub answers no more bad tokens than its default limit says.
func newcomers(t *testing.T, f *floodedHub, d time.Duration) latency {
	t.Helper()
	const rate, burst, waiting = 100, 200, 256   // BAD_TOKENS
	const checkRate, checkBurst = 10_000, 20_000 // TOKEN_CHECKS
	began, refusedBefore := time.Now(), f.errorsSent(t, "jwt_invalid")
	limitedBefore := f.errorsSent(t, "rate_limited")
	var took []time.Duration
	fresh := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for i := 0; i == 0 || time.Since(began) < d; i++ {
		token := f.sign(t, "newcomer-"+strconv.Itoa(i), "publish:newcomer")
		came := time.Now()
		if i%2 == 0 {
			if status, answer := askThrough(t.Context(), fresh, token, http.MethodPost, f.hub.http+"/publish/newcomer", strings.NewReader("1")); status != http.StatusOK {
				t.Errorf("newcomer %d over HTTP: %d %s", i, status, answer)
			}
		} else {
			c, err := wire.Dial(t.Context(), f.hub.url, wire.Options{Token: token})
			if err != nil {
				t.Errorf("newcomer %d over WebSocket: %v", i, err)
				continue
			}
			c.Abort()
		}
		took = append(took, time.Since(came))
		f.pass(neighbourEvery)
	}
	inTurn, limited := f.errorsSent(t, "jwt_invalid")-refusedBefore, f.errorsSent(t, "rate_limited")-limitedBefore
	elapsed := time.Since(began) + time.Second // until the last figures; the first may be so old
	got := latencyOf(took)
	t.Logf("newcomers %v; %.0f bad tokens a second refused in turn, %.0f out of turn", got, float64(inTurn)/elapsed.Seconds(), float64(limited)/elapsed.Seconds())
	if most := burst + waiting + int(rate*(elapsed.Seconds()+1)); inTurn > most {
		t.Errorf("%d bad tokens were refused in turn in %v, want at most %d", inTurn, elapsed, most)
	}
	if checked, most := inTurn+limited, checkBurst+int(checkRate*(elapsed.Seconds()+1)); checked > most {
		t.Errorf("%d bad tokens were checked in %v, want at most %d", checked, elapsed, most)
	}
	return got
}

// errorsSent is how often the hub has sent an error. Beside an attack on a slow machine, a scrape
// may take longer than the hub allows.
func (f *floodedHub) errorsSent(t *testing.T, code string) int {
	t.Helper()
	var text string
	eventually(t, "the metrics", func() bool {
		var status int
		status, text = get(t, f.hub.ops+"/metrics")
		return status == http.StatusOK
	})
	found := regexp.MustCompile(`(?m)^eventhub_errors_total\{code="` + code + `"\} (\S+)$`).FindStringSubmatch(text)
	if found == nil {
		return 0
	}
	n, err := strconv.ParseFloat(found[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	return int(n)
}
