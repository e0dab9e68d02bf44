package eventhub

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

const (
	// DefaultPage is how many events one request asks for.
	DefaultPage = 1_000
	// maxErrorBody is how much of an answer that is no success is read.
	maxErrorBody = 64 << 10
)

// Reader reads stored events over HTTP, without a group. Its methods may be called concurrently.
type Reader struct {
	// URL is where the hub's HTTP is, such as http://127.0.0.1:8081.
	URL string
	// Token is the credential, or TokenProvider is asked for one for each request.
	Token         string
	TokenProvider func(ctx context.Context) (string, error)
	// Client defaults to http.DefaultClient.
	Client *http.Client
	// Page is how many events one request asks for. Defaults to 1,000.
	Page int
}

// Latest returns the latest event of a key of a compacted topic, and false if there is none. It
// sees every publish that was answered.
func (r *Reader) Latest(ctx context.Context, topic, key string) (Event, bool, error) {
	segments := strings.Split(key, "/")
	for i, s := range segments {
		segments[i] = url.PathEscape(s)
	}
	body, err := r.get(ctx, "/snap/"+url.PathEscape(topic)+"/"+strings.Join(segments, "/"), nil)
	if err != nil {
		if failure, ok := errors.AsType[*Error](err); ok && failure.Code == "not_found" {
			return Event{}, false, nil
		}
		return Event{}, false, err
	}
	defer func() { _ = body.Close() }()
	var e Event
	if err := json.NewDecoder(body).Decode(&e); err != nil {
		return Event{}, false, readFailed(ctx, err)
	}
	return e, true, nil
}

// Snapshot gives the latest events of all keys of a compacted topic. Each key that exists
// throughout comes once. An error is the last of the sequence.
func (r *Reader) Snapshot(ctx context.Context, topic string) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		for next, more := "", true; more; {
			p := page{list: "items"}
			if !r.read(ctx, "/snap/"+url.PathEscape(topic), url.Values{"next": {next}, "limit": {strconv.Itoa(r.page())}}, &p, yield) {
				return
			}
			next, more = p.Next, p.Next != ""
		}
	}
}

// ReplayOptions say which events Replay gives. The zero value gives all.
type ReplayOptions struct {
	// From is where to begin: FromEarliest, FromTS or FromAfterID. Defaults to FromEarliest.
	From string
	// TS is in epoch milliseconds, for FromTS. AfterID is an event's id, for FromAfterID.
	TS      *int64
	AfterID string
	// Key gives only events with that key. Headers gives only events with these headers.
	Key     string
	Headers map[string]string
	// Limit is the most events. Defaults to all.
	Limit int
	// OnTruncated is told when retention may have removed events from the beginning of the range,
	// with the id of the first event that is left; "" for none.
	OnTruncated func(first string)
}

// Replay gives the stored events of a topic, in their order. An error is the last of the sequence.
func (r *Reader) Replay(ctx context.Context, topic string, opts ReplayOptions) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		q := url.Values{"topic": {topic}, "from": {FromEarliest}}
		if opts.From != "" {
			q.Set("from", opts.From)
		}
		if opts.TS != nil {
			q.Set("ts", strconv.FormatInt(*opts.TS, 10))
		}
		if opts.AfterID != "" {
			q.Set("afterId", opts.AfterID)
		}
		if opts.Key != "" {
			q.Set("key", opts.Key)
		}
		for name, value := range opts.Headers {
			q.Add("header", name+":"+value)
		}
		for left := opts.Limit; ; {
			wanted := r.page()
			if opts.Limit > 0 {
				wanted = min(wanted, left)
			}
			q.Set("limit", strconv.Itoa(wanted))
			p := page{list: "events"}
			if !r.read(ctx, "/replay", q, &p, yield) {
				return
			}
			if p.Truncated && opts.OnTruncated != nil {
				opts.OnTruncated(p.First)
			}
			left -= p.count
			if p.count < wanted || opts.Limit > 0 && left == 0 {
				return
			}
			q.Del("ts")
			q.Set("from", FromAfterID)
			q.Set("afterId", p.last)
		}
	}
}

func (r *Reader) page() int {
	if r.Page <= 0 {
		return DefaultPage
	}
	return r.Page
}

// page is an answer with a list of events, which are handed on while they are read: a page of large
// events does not have to fit into memory.
type page struct {
	list string // the name of the list

	Next      string
	Truncated bool
	First     string
	count     int
	last      string // id
}

// read reads a page, and reports whether to go on.
func (r *Reader) read(ctx context.Context, path string, query url.Values, p *page, yield func(Event, error) bool) bool {
	body, err := r.get(ctx, path, query)
	if err != nil {
		yield(Event{}, err)
		return false
	}
	defer func() { _ = body.Close() }()
	goOn := true
	err = p.decode(json.NewDecoder(body), func(e Event) bool {
		goOn = yield(e, nil)
		return goOn
	})
	if err != nil {
		yield(Event{}, readFailed(ctx, err))
		return false
	}
	return goOn
}

// decode reads the fields of a page, until each returns false.
func (p *page) decode(dec *json.Decoder, each func(Event) bool) error {
	if err := delimiter(dec, '{'); err != nil {
		return err
	}
	for dec.More() {
		name, err := dec.Token()
		if err != nil {
			return err
		}
		var into any = new(json.RawMessage) // a field that does not matter here
		switch name {
		case p.list:
			goOn, err := p.events(dec, each)
			if err != nil || !goOn {
				return err
			}
			continue
		case "next":
			into = &p.Next
		case "truncated":
			into = &p.Truncated
		case "first":
			into = &p.First
		}
		if err := dec.Decode(into); err != nil {
			return err
		}
	}
	return delimiter(dec, '}')
}

func (p *page) events(dec *json.Decoder, each func(Event) bool) (goOn bool, err error) {
	if err := delimiter(dec, '['); err != nil {
		return false, err
	}
	for dec.More() {
		var e Event
		if err := dec.Decode(&e); err != nil {
			return false, err
		}
		p.count++
		p.last = e.ID
		if !each(e) {
			return false, nil
		}
	}
	return true, delimiter(dec, ']')
}

func delimiter(dec *json.Decoder, want json.Delim) error {
	got, err := dec.Token()
	if err != nil {
		return err
	}
	if got != want {
		return fmt.Errorf("%v where %v belongs", got, want)
	}
	return nil
}

func readFailed(ctx context.Context, err error) *Error {
	if ctx.Err() != nil {
		return aborted(ctx)
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return newError(CodeConnectionLost, fmt.Sprintf("read the hub's answer: %v", err), err)
}

// get sends a request. The caller closes the body.
func (r *Reader) get(ctx context.Context, path string, query url.Values) (io.ReadCloser, error) {
	address := strings.TrimSuffix(r.URL, "/") + path
	if len(query) > 0 {
		address += "?" + query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, http.NoBody)
	if err != nil {
		return nil, newError(CodeGaveUp, fmt.Sprintf("the address %q is not usable; use http://HOST:PORT or https://HOST:PORT", r.URL), err)
	}
	token := r.Token
	if r.TokenProvider != nil {
		if token, err = r.TokenProvider(ctx); err != nil {
			return nil, newError(CodeConnectionLost, fmt.Sprintf("the token provider failed: %v", err), err)
		}
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	client := r.Client
	if client == nil {
		client = http.DefaultClient
	}
	res, err := client.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return nil, aborted(ctx)
		}
		return nil, newError(CodeConnectionLost, fmt.Sprintf("no answer from the hub: %v", err), err)
	}
	if res.StatusCode == http.StatusOK {
		return res.Body, nil
	}
	defer func() { _ = res.Body.Close() }()
	return nil, refusal(res)
}

// refusal returns the error of an answer that is no success.
func refusal(res *http.Response) *Error {
	var body struct {
		Error string `json:"error"`
		Code  string `json:"code"`
	}
	if json.NewDecoder(io.LimitReader(res.Body, maxErrorBody)).Decode(&body) != nil || body.Error == "" {
		body.Error = fmt.Sprintf("the hub answered %d", res.StatusCode)
	}
	switch {
	case body.Code != "":
	case res.StatusCode == http.StatusNotFound:
		body.Code = "not_found"
	default:
		body.Code = "internal"
	}
	return newError(body.Code, body.Error, nil)
}
