package facade_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"eventhub/docs/apitest"
	"eventhub/facade"
	"eventhub/jetstream"
)

// fakeBus is a facade.Bus without a server. It holds one key, and does not take what is too large
// for it.
type fakeBus struct{ facade.Bus }

var errSecret = errors.New("nats: no servers at nats://user:password@10.0.0.7")

func (fakeBus) Hubs() facade.Hubs                { return fakeHubs{} }
func (fakeBus) MaxPayload() int                  { return 64 << 10 }
func (b fakeBus) NewPublisher() facade.Publisher { return fakePublisher{} }
func (b fakeBus) Keys(string) facade.Keys        { return fakeKeys{} }

type fakeHubs struct{}

func (fakeHubs) Tell([]byte) error                   { return nil }
func (fakeHubs) Listen(func([]byte)) (func(), error) { return func() {}, nil }

type fakePublisher struct{ facade.Publisher }

func (fakePublisher) CountFor(string) {}

func (fakePublisher) Publish(_ context.Context, topic string, _ []byte, opts jetstream.PublishOptions) (jetstream.Receipt, error) {
	switch topic {
	case "down":
		return jetstream.Receipt{}, &jetstream.Error{Code: jetstream.CodePublishFailed, Msg: "the event store cannot be reached", Err: errSecret}
	case "odd":
		return jetstream.Receipt{}, errSecret
	}
	return jetstream.Receipt{ID: "for-" + opts.Key}, nil
}

type fakeKeys struct{ facade.Keys }

func (fakeKeys) Get(_ context.Context, key string) (*jetstream.Event, error) {
	switch key {
	case "k":
		return &jetstream.Event{ID: "1", Topic: "state", Key: key, Payload: []byte(`{"a":1}`)}, nil
	case "down":
		return nil, errSecret
	}
	return nil, jetstream.ErrNotFound
}

// What a bus answers becomes the status and the words of HTTP, and nothing internal gets out.
func TestHTTPOnAFakeBus(t *testing.T) {
	srv, err := facade.New(facade.Config{Bus: fakeBus{}, Auth: facade.StaticToken("x")})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = srv.Close() }()
	for _, c := range []struct {
		method, path, body string
		status             int
		want               string
	}{
		{http.MethodPost, "/publish/up", `1`, http.StatusOK, `{"id":"for-k"}`},
		{http.MethodPost, "/publish/down", `1`, http.StatusServiceUnavailable, "the event store cannot be reached"},
		{http.MethodPost, "/publish/odd", `1`, http.StatusServiceUnavailable, "could not be published"},
		{http.MethodPost, "/publish/up", `"` + strings.Repeat("x", 64<<10) + `"`, http.StatusRequestEntityTooLarge, "65536"},
		{http.MethodGet, "/snap/state/k", "", http.StatusOK, `"payload":{"a":1}`},
		{http.MethodGet, "/snap/state/none", "", http.StatusNotFound, "not_found"},
		{http.MethodGet, "/snap/state/down", "", http.StatusServiceUnavailable, "event store"},
	} {
		r := httptest.NewRequest(c.method, c.path, strings.NewReader(c.body))
		r.Header.Set("Authorization", "Bearer x")
		r.Header.Set("Event-Key", "k")
		w := httptest.NewRecorder()
		apitest.Handler(t, apitest.Clients, srv.HTTP()).ServeHTTP(w, r)
		body, err := io.ReadAll(w.Result().Body)
		if err != nil {
			t.Fatal(err)
		}
		if w.Code != c.status || !strings.Contains(string(body), c.want) || strings.Contains(string(body), "password") {
			t.Errorf("%s %s: %d %s", c.method, c.path, w.Code, body)
		}
	}
}
