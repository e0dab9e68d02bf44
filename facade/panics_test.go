package facade_test

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/panics"
)

// panicking is a bus some methods of which panic for the topic "bad".
type panicking struct{ facade.Bus }

func (b panicking) NewPublisher() facade.Publisher { return panickingPublisher{b.Bus.NewPublisher()} }

func (b panicking) Keys(topic string) facade.Keys { return panickingKeys{b.Bus.Keys(topic), topic} }

type panickingPublisher struct{ facade.Publisher }

func (p panickingPublisher) PublishAsync(ctx context.Context, topic string, payload []byte, o jetstream.PublishOptions, done func(jetstream.Receipt, error)) error {
	if topic == "bad" {
		panic("secret")
	}
	return p.Publisher.PublishAsync(ctx, topic, payload, o, done)
}

type panickingKeys struct {
	facade.Keys
	topic string
}

func (k panickingKeys) Get(ctx context.Context, key string) (*jetstream.Event, error) {
	if k.topic == "bad" {
		panic("secret")
	}
	return k.Keys.Get(ctx, key)
}

// cutShort is a Document that panics after the beginning of its answer.
func cutShort(w http.ResponseWriter, _ *http.Request) {
	_, _ = io.WriteString(w, "begun")
	_ = http.NewResponseController(w).Flush()
	panic("secret")
}

// TestPanicsEndAlone makes a request, a request whose answer has begun, and a frame panic. Each
// ends alone, the client learns nothing of the cause, and the log has its stack.
func TestPanicsEndAlone(t *testing.T) {
	t.Parallel()
	w := new(witness)
	r := newRig(t, func(cfg *facade.Config) {
		cfg.Bus = panicking{cfg.Bus}
		cfg.Logger = slog.New(slog.NewTextHandler(lockedWriter{&w.mu, &w.log}, nil))
		cfg.Documents["/endless"] = http.HandlerFunc(cutShort)
	})
	other := r.login(t)
	before := panics.Count()

	a := r.ask(t, http.MethodGet, "/snap/bad/k", "")
	if a.status != http.StatusServiceUnavailable || a.Code != "internal" || strings.Contains(a.text, "secret") {
		t.Errorf("a request whose handler panics: %d %s", a.status, a.text)
	}
	res, err := r.ws.Client().Get(r.http.URL + "/endless")
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(res.Body)
	_ = res.Body.Close()
	if err == nil || string(text) != "begun" {
		t.Errorf("an answer that has begun: %q, %v; want its end to be missing", text, err)
	}
	p := r.login(t)
	p.send(`{"op":"PUBLISH","topic":"bad","payload":1}`)
	p.wantClose(1011)

	other.send(`{"op":"PUBLISH","topic":"good","payload":1}`)
	other.next("OK", "")
	if a := r.ask(t, http.MethodGet, "/snap/good/k", ""); a.status != http.StatusNotFound {
		t.Errorf("a request after the panics: %d %s", a.status, a.text)
	}
	if got := panics.Count() - before; got != 3 {
		t.Errorf("%d panics count, want 3", got)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	log := w.log.String()
	for _, want := range []string{`func="GET /snap/{topic}/*"`, `func="GET /endless"`, `func=frame`} {
		if n := strings.Count(log, `level=ERROR msg="survived a panic" `+want); n != 1 {
			t.Errorf("the log has %s %d times, want once:\n%s", want, n, log)
		}
	}
	if strings.Count(log, "panics_test.go") < 3 {
		t.Errorf("the log lacks the stacks:\n%s", log)
	}
}
