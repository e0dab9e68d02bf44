//go:build unix

package main

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/acl"
)

// operatorToken signs a token for a hub with secretFile.
func operatorToken(t *testing.T, subject string, scopes ...string) string {
	t.Helper()
	token, err := acl.Sign([]byte(revokeSecret), acl.Grant{Subject: subject, Scopes: scopes, TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// One quota of publishes holds for a principal on the port for clients and on that for operators.
func TestPublishQuotaOfBothPorts(t *testing.T) {
	t.Parallel()
	const rate, burst, tries = 1, 3, 30 // so many wait for their turn on the operations port
	hub := startNode(t, "--jwt-secret-file="+secretFile(t), fmt.Sprintf("--limit-principal-publishes=%d/%d", rate, burst))
	token := operatorToken(t, "both", "publish:**")
	bodies := map[string]string{hub.http: `1`, hub.ops: `{"payload":1}`}
	accepted, refused := make(map[string]int), make(map[string]int)
	var mu sync.Mutex
	var publishing sync.WaitGroup
	began := time.Now()
	for range tries {
		for base, body := range bodies {
			publishing.Go(func() {
				status, text := askThrough(t.Context(), http.DefaultClient, token, http.MethodPost, base+"/publish/a", strings.NewReader(body))
				mu.Lock()
				defer mu.Unlock()
				switch {
				case status == http.StatusOK:
					accepted[base]++
				case status == http.StatusTooManyRequests && strings.Contains(text, "This client may publish 1 events a second"):
					refused[base]++
				case status == http.StatusServiceUnavailable && strings.Contains(text, "overloaded"):
					// the machine stood still for 5 s
				default:
					t.Errorf("%s: %d %s", base, status, text)
				}
			})
		}
	}
	publishing.Wait()
	most := burst + int(rate*(time.Since(began).Seconds()+1))
	if n := accepted[hub.http] + accepted[hub.ops]; n > most {
		t.Errorf("%d publishes over HTTP and %d over the operations port, want at most %d of both", accepted[hub.http], accepted[hub.ops], most)
	}
	if refused[hub.ops] == 0 {
		t.Errorf("none of %d publishes at once was refused on the operations port", tries)
	}
}

// Bad tokens at the operations port are rationed as those of clients are, out of one ration.
func TestBadTokensAtTheOperationsPort(t *testing.T) {
	t.Parallel()
	hub := startNode(t, "--jwt-secret-file="+secretFile(t), "--limit-bad-tokens=1/2", "--limit-token-checks=1/20")
	known := operatorToken(t, "operator", "inspect:a")
	ask := func(base, token string) (int, string) {
		path := "/groups?topic=a"
		if base == hub.http {
			path = "/snap/a/k"
		}
		return askThrough(t.Context(), http.DefaultClient, token, http.MethodGet, base+path, nil)
	}
	if status, text := ask(hub.ops, known); status != http.StatusOK {
		t.Fatalf("a valid token: %d %s", status, text)
	}
	if status, text := ask(hub.ops, known+"x"); status != http.StatusUnauthorized || !strings.Contains(text, "jwt_invalid") {
		t.Errorf("the first bad token: %d %s", status, text)
	}
	var mu sync.Mutex
	limited := 0
	var guessing sync.WaitGroup
	for i := range 60 {
		guessing.Go(func() {
			status, text := ask(hub.ops, known+strconv.Itoa(i))
			mu.Lock()
			defer mu.Unlock()
			switch status {
			case http.StatusUnauthorized: // in its turn
			case http.StatusTooManyRequests:
				limited++
				if !strings.Contains(text, "rate_limited") {
					t.Errorf("beyond the ration: %s", text)
				}
			default:
				t.Errorf("bad token %d: %d %s", i, status, text)
			}
		})
	}
	guessing.Wait()
	if limited == 0 {
		t.Error("60 bad tokens at once were all answered, with 2 at once and 1 a second")
	}
	if status, text := ask(hub.ops, known); status != http.StatusOK {
		t.Errorf("a token that is known, meanwhile: %d %s", status, text)
	}
}
