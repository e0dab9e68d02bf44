package ops

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
)

// scrape asks for the metrics, with headers in pairs.
func scrape(h http.Handler, query string, headers ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodGet, "/metrics"+query, nil)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// counted returns a registry whose metric collections counts the collections.
func counted(during func()) (*prometheus.Registry, *atomic.Int64) {
	var collections atomic.Int64
	registry := prometheus.NewRegistry()
	registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "collections_total"}, func() float64 {
		during()
		return float64(collections.Add(1))
	}))
	return registry, &collections
}

// Scrapes within a second share a collection, however many there are and whatever form they want.
// What they get is never older than that second.
func TestScrapesShareOneCollection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry, collections := counted(func() {})
		h := described(t, Config{Bus: busState{}, Registry: registry})
		const seconds, rate = 10, 50
		for i := range seconds * rate {
			w := scrape(h, "", "Accept", []string{"text/plain", "application/openmetrics-text"}[i%2])
			if want := fmt.Sprintf("\ncollections_total %d", i/rate+1); w.Code != http.StatusOK || !strings.Contains(w.Body.String(), want) {
				t.Fatalf("scrape %d: %d %s, want %s", i, w.Code, w.Body, want)
			}
			<-time.After(time.Second / rate)
			if i%rate == rate-1 {
				<-time.After(time.Millisecond) // the second is over
			}
		}
		if n := collections.Load(); n != seconds {
			t.Errorf("%d scrapes in %d s made %d collections", seconds*rate, seconds, n)
		}
	})
}

// Scrapes of a hub with groups ask NATS once a second.
func TestScrapesShareWhatTheyAskOfNATS(t *testing.T) {
	h, _, asked := costHub(t)
	began := time.Now()
	for range 50 {
		if w := scrape(h, ""); w.Code != http.StatusOK || !strings.Contains(w.Body.String(), `eventhub_group_pending{group="g",topic="orders.placed"}`) {
			t.Fatalf("%d %s", w.Code, w.Body)
		}
	}
	most := int(time.Since(began)/scrapeShared) + 1
	if lists := asked.take(t, "CONSUMER.LIST.orders"); len(lists) == 0 || len(lists) > most {
		t.Errorf("50 scrapes listed the groups %d times, want 1 to %d times", len(lists), most)
	}
}

// Scrapes that come while a collection is slow wait for it, up to the limit of their number and of
// their time. Others are told when to come again.
func TestScrapesOfASlowCollection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := make(chan struct{})
		registry, collections := counted(func() { <-slow })
		h := described(t, Config{Bus: busState{}, Registry: registry})
		answers := make(chan *httptest.ResponseRecorder, maxScrapes)
		scrapes := func() {
			for range maxScrapes {
				go func() { answers <- scrape(h, "") }()
			}
			synctest.Wait()
		}
		want := func(what string, w *httptest.ResponseRecorder, status int) {
			t.Helper()
			if w.Code != status || (status == http.StatusServiceUnavailable) != (w.Header().Get("Retry-After") == "1") {
				t.Errorf("%s: %d %v %s, want %d", what, w.Code, w.Header(), w.Body, status)
			}
		}
		scrapes()
		want("a scrape too many", scrape(h, ""), http.StatusServiceUnavailable)
		began := time.Now()
		for range maxScrapes {
			want("a scrape that waits too long", <-answers, http.StatusServiceUnavailable)
		}
		if took := time.Since(began); took != scrapeTimeout {
			t.Errorf("scrapes waited %v", took)
		}
		scrapes()
		close(slow)
		for range maxScrapes {
			want("a scrape that waits", <-answers, http.StatusOK)
		}
		if n := collections.Load(); n != 1 {
			t.Errorf("there were %d collections", n)
		}
	})
}

// A collection that fails or panics is a failure for all that share it, and is logged once. The
// next second begins anew.
func TestScrapesOfACollectionThatFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		var collections atomic.Int64
		h := newScraper(prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
			switch collections.Add(1) {
			case 1:
				return nil, errors.New("broken")
			case 2:
				panic("wrong")
			}
			return []*dto.MetricFamily{}, nil
		}), slog.New(slog.NewTextHandler(&log, nil)))
		for range 20 {
			if w := scrape(h, ""); w.Code != http.StatusInternalServerError || !strings.Contains(w.Body.String(), "broken") {
				t.Errorf("%d %s", w.Code, w.Body)
			}
		}
		if n := collections.Load(); n != 1 || strings.Count(log.String(), "broken") != 1 {
			t.Errorf("%d collections, and the log is:\n%s", n, &log)
		}
		<-time.After(scrapeShared + 1)
		if w := scrape(h, ""); w.Code != http.StatusInternalServerError || strings.Contains(w.Body.String(), "wrong") || !strings.Contains(log.String(), "wrong") {
			t.Errorf("%d %s after a panic, and the log is:\n%s", w.Code, w.Body, &log)
		}
		<-time.After(scrapeShared + 1)
		if w := scrape(h, ""); w.Code != http.StatusOK {
			t.Errorf("%d %s after the failure", w.Code, w.Body)
		}
	})
}

// What can be collected is shown, although something else cannot.
func TestScrapesOfAnIncompleteCollection(t *testing.T) {
	registry, _ := counted(func() {})
	broken := prometheus.NewDesc("broken", "Fails.", nil, nil)
	registry.MustRegister(prometheus.CollectorFunc(func(metrics chan<- prometheus.Metric) {
		metrics <- prometheus.NewInvalidMetric(broken, errors.New("broken"))
	}))
	w := scrape(described(t, Config{Bus: busState{}, Registry: registry}), "")
	if w.Code != http.StatusOK || !strings.Contains(w.Body.String(), "collections_total 1") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// Each scrape gets the form that it asks for, from one collection.
func TestFormsOfScrapes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry, collections := counted(func() {})
		registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "other"}, func() float64 { return 7 }))
		h := described(t, Config{Bus: busState{}, Registry: registry})
		const prom2 = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
		var scrapes sync.WaitGroup
		for accept, format := range map[string]struct{ contentType, ends string }{
			"":           {"text/plain; version=0.0.4; charset=utf-8", "\nother 7\n"},
			"*/*":        {"text/plain; version=0.0.4; charset=utf-8", "\nother 7\n"},
			"image/png":  {"text/plain; version=0.0.4; charset=utf-8", "\nother 7\n"},
			"text/plain": {"text/plain; version=0.0.4; charset=utf-8", "\nother 7\n"},
			prom2:        {"application/openmetrics-text; version=1.0.0; charset=utf-8", "\nother 7.0\n# EOF\n"},
			"application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited": {"application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited", ""},
		} {
			for coding, packed := range map[string]bool{"": false, "identity": false, "br": false, "gzip": true, "br, GZip;q=0.5": true, "gzip;q=0": false, "gzip;q=none": false} {
				scrapes.Go(func() {
					w := scrape(h, "", "Accept", accept, "Accept-Encoding", coding)
					said := w.Header()
					body := io.Reader(w.Body)
					if got := said.Get("Content-Encoding") == "gzip"; got != packed {
						t.Errorf("%q, %q: packed is %v", accept, coding, got)
					} else if got {
						unpacked, err := gzip.NewReader(w.Body)
						if err != nil {
							t.Error(err)
							return
						}
						body = unpacked
					}
					text, err := io.ReadAll(body)
					if w.Code != http.StatusOK || err != nil || !strings.HasPrefix(said.Get("Content-Type"), format.contentType) || strings.Join(said["Vary"], ", ") != "Accept, Accept-Encoding" {
						t.Errorf("%q, %q: %d, %v, %v", accept, coding, w.Code, said, err)
					}
					if format.ends != "" && !strings.HasSuffix(string(text), format.ends) {
						t.Errorf("%q, %q: ends with %q", accept, coding, text[max(len(text)-100, 0):])
					}
					if format.ends == "" {
						read := expfmt.NewDecoder(bytes.NewReader(text), expfmt.ResponseFormat(said))
						var names []string
						for f := new(dto.MetricFamily); read.Decode(f) == nil; f = new(dto.MetricFamily) {
							names = append(names, f.GetName())
						}
						if got := fmt.Sprint(names); got != "[collections_total eventhub_ready other]" {
							t.Errorf("%q, %q: has %s", accept, coding, got)
						}
					}
				})
			}
		}
		scrapes.Wait()
		text := scrape(h, "?name[]=other&name[]=collections_total").Body.String()
		if strings.Contains(text, "eventhub_ready") || !strings.Contains(text, "\nother 7\n") || !strings.Contains(text, "\ncollections_total 1\n") {
			t.Errorf("two names get %s", text)
		}
		if n := collections.Load(); n != 1 {
			t.Errorf("there were %d collections", n)
		}
	})
}
