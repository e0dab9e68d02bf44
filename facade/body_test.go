package facade_test

import (
	"bufio"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"eventhub/facade"
)

// A body that outlives its token is not published, and a stream of blank lines does not keep the
// request alive.
func TestABodyDoesNotOutliveItsToken(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *facade.Config) { cfg.Auth = policies{} })
	request := func(kind string, body io.Reader) (*http.Response, error) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.http.URL+"/publish/a", body)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer a|300ms")
		req.Header.Set("Content-Type", kind)
		return http.DefaultClient.Do(req)
	}
	late, feed := io.Pipe()
	go func() {
		_, _ = io.WriteString(feed, `{"n":`)
		<-time.After(500 * time.Millisecond) // longer than the token lives
		_, _ = io.WriteString(feed, `1}`)
		_ = feed.Close()
	}()
	resp, err := request("application/json", late)
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusUnauthorized || !strings.Contains(string(body), "token_expired") {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}

	blanks, drip := io.Pipe()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			if _, err := io.WriteString(drip, "\n"); err != nil {
				return
			}
			select {
			case <-time.After(20 * time.Millisecond):
			case <-t.Context().Done():
				return
			}
		}
	}()
	resp, err = request("application/x-ndjson", blanks)
	if err == nil {
		_, err = io.ReadAll(bufio.NewReader(resp.Body))
		_ = resp.Body.Close()
	}
	if err == nil {
		t.Error("the request ended as if it were whole")
	}
	_ = blanks.Close()
	<-ended
}
