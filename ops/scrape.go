package ops

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"eventhub/jetstream/panics"
)

const (
	// maxScrapes is the maximum number of /metrics requests that are served at a time. Further
	// requests get status 503.
	maxScrapes = 100
	// maxRenders is how many answers to requests for some metrics are made and sent at a time.
	// Further ones wait.
	maxRenders = 2
	// scrapeTimeout is how long a /metrics request waits for the metrics.
	scrapeTimeout = 10 * time.Second
	// scrapeShared is for how long requests share a collection, from when it begins. Requests that
	// come while it runs share it, too.
	scrapeShared = time.Second
)

// scraper serves /metrics. Requests share a collection and its answers, so that what they cost does
// not grow with their number.
type scraper struct {
	metrics prometheus.Gatherer
	logger  *slog.Logger
	places  chan struct{} // one for each request that is being served
	renders chan struct{} // one for each answer that is made for one request

	mu     sync.Mutex
	shared *collection // nil if the next request begins one
}

func newScraper(metrics prometheus.Gatherer, logger *slog.Logger) *scraper {
	return &scraper{metrics: metrics, logger: logger, places: make(chan struct{}, maxScrapes), renders: make(chan struct{}, maxRenders)}
}

// collection is what one collection of all metrics found, and the answers made of that.
type collection struct {
	done chan struct{} // closed once families are there
	// families may be incomplete if err is not nil.
	families []*dto.MetricFamily
	err      error

	mu      sync.Mutex
	answers map[form]*scraped
}

// form is a form of an answer: of the formats that expfmt knows, as they are or compressed.
type form struct {
	format expfmt.Format
	gzip   bool
}

// scraped is an answer, made once.
type scraped struct {
	once sync.Once
	body []byte
	err  error
}

// ServeHTTP implements http.Handler.
func (s *scraper) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	select {
	case s.places <- struct{}{}:
		defer func() { <-s.places }()
	default:
		unscraped(w, "There are "+strconv.Itoa(maxScrapes)+" requests for the metrics already: try again later.")
		return
	}
	c := s.collection() //nolint:contextcheck // a collection outlives the request that begins it
	ctx, cancel := context.WithTimeout(r.Context(), scrapeTimeout)
	defer cancel()
	select {
	case <-c.done:
	case <-ctx.Done():
		unscraped(w, "The metrics were not there within "+scrapeTimeout.String()+".")
		return
	}
	as := formOf(r.Header)
	names := r.URL.Query()["name[]"]
	if len(names) > 0 {
		select {
		case s.renders <- struct{}{}:
			defer func() { <-s.renders }()
		case <-ctx.Done():
			unscraped(w, "The metrics were not there within "+scrapeTimeout.String()+".")
			return
		}
	}
	body, err := c.answer(as, names)
	if err != nil {
		http.Error(w, "The metrics cannot be collected: "+err.Error(), http.StatusInternalServerError)
		return
	}
	h := w.Header()
	h.Add("Vary", "Accept")
	h.Add("Vary", "Accept-Encoding")
	h.Set("Content-Type", string(as.format))
	h.Set("Content-Length", strconv.Itoa(len(body)))
	if as.gzip {
		h.Set("Content-Encoding", "gzip")
	}
	_, _ = w.Write(body) // a client that is gone needs no answer
}

// unscraped answers a request that gets no metrics now.
func unscraped(w http.ResponseWriter, text string) {
	w.Header().Set("Retry-After", strconv.Itoa(int(scrapeShared/time.Second)))
	http.Error(w, text, http.StatusServiceUnavailable)
}

// collection returns the collection that requests share now, and begins one if there is none. No
// request runs it, because it outlives a request whose client leaves. It ends by itself: whatever
// is asked for metrics has a timeout.
func (s *scraper) collection() *collection {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.shared == nil {
		s.shared = &collection{done: make(chan struct{}), answers: make(map[form]*scraped)}
		go s.collect(s.shared)
	}
	return s.shared
}

// collect runs a collection. One that failed is shared as well, so that a failure makes nothing
// more expensive.
func (s *scraper) collect(c *collection) {
	began := time.Now()
	c.err = panics.Call(s.logger, "collection of metrics", func() (err error) {
		c.families, err = s.metrics.Gather()
		return err
	})
	if c.err != nil {
		s.logger.LogAttrs(context.Background(), slog.LevelWarn, "failed to collect some metrics", slog.Any("error", c.err))
	}
	close(c.done)
	time.AfterFunc(scrapeShared-time.Since(began), func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.shared = nil
	})
}

// answer returns the metrics in a form: those with the given names, or all. If some metrics could
// not be collected, the answer has the others.
func (c *collection) answer(as form, names []string) ([]byte, error) {
	if len(c.families) == 0 && c.err != nil {
		return nil, c.err
	}
	if len(names) > 0 {
		wanted := make(map[string]bool, len(names))
		for _, name := range names {
			wanted[name] = true
		}
		return render(as, slices.DeleteFunc(slices.Clone(c.families), func(f *dto.MetricFamily) bool { return !wanted[f.GetName()] }))
	}
	c.mu.Lock()
	a := c.answers[as]
	if a == nil {
		a = new(scraped)
		c.answers[as] = a
	}
	c.mu.Unlock()
	a.once.Do(func() { a.body, a.err = render(as, c.families) })
	return a.body, a.err
}

// render encodes families.
func render(as form, families []*dto.MetricFamily) ([]byte, error) {
	var body bytes.Buffer
	w := io.Writer(&body)
	var packer *gzip.Writer
	if as.gzip {
		packer = gzip.NewWriter(&body)
		w = packer
	}
	encoder := expfmt.NewEncoder(w, as.format)
	for _, f := range families {
		if err := encoder.Encode(f); err != nil {
			return nil, err
		}
	}
	if end, ok := encoder.(expfmt.Closer); ok { // OpenMetrics ends with a line of its own
		if err := end.Close(); err != nil {
			return nil, err
		}
	}
	if packer != nil {
		if err := packer.Close(); err != nil {
			return nil, err
		}
	}
	return body.Bytes(), nil
}

// formats are those that /metrics has.
var formats = expfmt.DefaultOpenMetricsAcceptedFormats()

// formOf returns the form that a client asks for.
func formOf(h http.Header) form {
	return form{expfmt.NegotiateAccept(h, formats...), acceptsGzip(h.Values("Accept-Encoding"))}
}

// acceptsGzip reports whether an Accept-Encoding (RFC 9110, section 12.5.3) names gzip.
func acceptsGzip(lists []string) bool {
	for part := range strings.SplitSeq(strings.Join(lists, ","), ",") {
		coding, params, _ := strings.Cut(part, ";")
		if !strings.EqualFold(strings.TrimSpace(coding), "gzip") {
			continue
		}
		q, weighed := strings.CutPrefix(strings.ToLower(strings.TrimSpace(params)), "q=")
		weight, err := strconv.ParseFloat(q, 64)
		return !weighed || err == nil && weight > 0
	}
	return false
}
