package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// httpPublisher publishes over one HTTP connection, one request at a time, with one event or a
// batch of lines per request.
type httpPublisher struct {
	client *http.Client
	url    string
	token  string
	batch  int
	times  *hdrhistogram.Histogram // nil if not timed

	lines []byte
	due   []int64 // due times of the lines
}

func (s *system) newHTTPPublisher(p publishing, times *hdrhistogram.Histogram) *httpPublisher {
	h := &httpPublisher{
		client: &http.Client{Timeout: stallAfter, Transport: &http.Transport{MaxConnsPerHost: 1, DisableCompression: true}},
		url:    s.httpURL + "/publish/" + p.topic, token: s.bearer, batch: p.batch,
	}
	if p.timed {
		h.times = times
	}
	return h
}

func (h *httpPublisher) send(payload []byte, id string, due int64) error {
	if h.batch == 1 {
		header := http.Header{"Content-Type": {"application/json"}}
		if id != "" {
			header["Event-Id"] = []string{id}
		}
		h.due = append(h.due[:0], due)
		return h.post(context.Background(), payload, header)
	}
	h.lines = append(append(h.lines, `{"payload":`...), payload...)
	if id != "" {
		h.lines = append(append(append(h.lines, `,"opts":{"id":"`...), id...), `"}`...)
	}
	h.lines = append(h.lines, "}\n"...)
	if h.due = append(h.due, due); len(h.due) < h.batch {
		return nil
	}
	return h.drain(context.Background())
}

// drain posts the lines of an incomplete batch.
func (h *httpPublisher) drain(ctx context.Context) error {
	if len(h.lines) == 0 {
		return nil
	}
	err := h.post(ctx, h.lines, http.Header{"Content-Type": {"application/x-ndjson"}})
	h.lines, h.due = h.lines[:0], h.due[:0]
	return err
}

// post sends a request and checks that the response answers each event.
func (h *httpPublisher) post(ctx context.Context, body []byte, header http.Header) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, h.url, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("hub at %s: %w", h.url, err)
	}
	req.Header = header
	header["Authorization"] = []string{"Bearer " + h.token}
	resp, err := h.client.Do(req)
	if err != nil {
		return fmt.Errorf("hub at %s: %w", h.url, err)
	}
	err = h.answers(resp)
	return errors.Join(err, resp.Body.Close())
}

func (h *httpPublisher) answers(resp *http.Response) error {
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1000))
		return fmt.Errorf("hub at %s: %s: %s", h.url, resp.Status, strings.TrimSpace(string(text)))
	}
	n := 0
	lines := bufio.NewScanner(resp.Body)
	for ; lines.Scan(); n++ {
		if !bytes.HasPrefix(lines.Bytes(), []byte(`{"id":`)) || n >= len(h.due) || !json.Valid(lines.Bytes()) {
			return fmt.Errorf("hub at %s: unexpected answer %.200s", h.url, lines.Bytes())
		}
		if h.times != nil {
			record(h.times, now()-h.due[n])
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("hub at %s: %w", h.url, err)
	}
	if n != len(h.due) {
		return fmt.Errorf("hub at %s: %d answers to %d events", h.url, n, len(h.due))
	}
	return nil
}

func (h *httpPublisher) close() error {
	h.client.CloseIdleConnections()
	return nil
}
