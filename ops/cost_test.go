package ops

import (
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// requests are what is asked of JetStream.
type requests struct {
	nc   *nats.Conn
	came chan *nats.Msg
}

func watchRequests(t *testing.T, url string) *requests {
	t.Helper()
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	r := &requests{nc, make(chan *nats.Msg, 1<<16)}
	if _, err := nc.ChanSubscribe("$JS.API.>", r.came); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	return r
}

// take returns the requests with one of these beginnings since the last take.
func (r *requests) take(t *testing.T, beginnings ...string) (found []string) {
	t.Helper()
	if err := r.nc.Flush(); err != nil { // what was asked before has arrived
		t.Fatal(err)
	}
	for {
		select {
		case m := <-r.came:
			subject := strings.TrimPrefix(m.Subject, "$JS.API.")
			if slices.ContainsFunc(beginnings, func(b string) bool { return strings.HasPrefix(subject, b) }) {
				found = append(found, subject)
			}
		default:
			return found
		}
	}
}

// costHub is a hub with a dead letter, and what it asks of NATS.
func costHub(t *testing.T) (http.Handler, *jetstream.Bus, *requests) {
	t.Helper()
	url := natstest.Run(t).ClientURL()
	bus, err := jetstream.Open(t.Context(), jetstream.Config{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bus.Close() })
	h := described(t, Config{
		Bus: bus, Registry: prometheus.NewRegistry(), Guard: Guard{Tokens: newVerifier(t)}, Status: facade.StatusOf,
		Groups: bus, Topics: TopicsOf(bus), DeadLetters: bus.Admin().DeadLetters(),
	})
	letter(t, bus, "orders.placed")
	return h, bus, watchRequests(t, url)
}

// letter stores a dead letter of the group g.
func letter(t *testing.T, bus *jetstream.Bus, topic string) {
	t.Helper()
	if _, err := bus.Publish(t.Context(), topic, []byte(`{"card":"secret"}`), jetstream.PublishOptions{}); err != nil {
		t.Fatal(err)
	}
	newest, err := bus.History(topic).Newest(t.Context(), 1)
	if err != nil || len(newest) != 1 {
		t.Fatal(newest, err)
	}
	sub, err := bus.Subscribe(t.Context(), topic, "g", jetstream.SubscribeOptions{}, func(*jetstream.Held) {})
	if err != nil {
		t.Fatal(err)
	}
	if err := sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := bus.Group(topic, "g").DeadLetter(t.Context(), newest[0], "broken", 1); err != nil {
		t.Fatal(err)
	}
}

// A token that may see nothing makes the hub ask NATS for nothing.
func TestListsAskForRightsFirst(t *testing.T) {
	h, bus, asked := costHub(t)
	reads := []string{"CONSUMER.CREATE.dlq", "CONSUMER.INFO.orders", "STREAM.NAMES", "STREAM.LIST", "CONSUMER.NAMES", "STREAM.INFO"}
	for path, empty := range map[string]string{
		"/dlq": `"letters":[]`, "/dlq/counts": `"groups":[]`, "/groups": `"groups":[]`, "/topics": `"topics":[]`,
		"/dlq?reason=broken": `"letters":[]`,
	} {
		get := func(scope string) {
			t.Helper()
			w := ask(h, http.MethodGet, path, "Bearer "+tokenFor(t, scope))
			if w.Code != http.StatusOK || !strings.Contains(w.Body.String(), empty) {
				t.Errorf("%s with %s: %d %s", path, scope, w.Code, w.Body)
			}
		}
		// The hub's own duties look at streams every few seconds: a request beside one is repeated,
		// after a letter that makes the counts of the last request old.
		for try, found := 1, []string{""}; len(found) > 0; try++ {
			if try > 5 {
				t.Errorf("%s with publish:** asked NATS for %v, as it did 4 times before", path, found)
				break
			}
			letter(t, bus, "orders.placed")
			asked.take(t)
			get("publish:**")
			found = asked.take(t, reads...)
		}
		get("subscribe:none::g") // might see something: the topic may come
		asked.take(t)
		w := ask(h, http.MethodGet, path, "Bearer own")
		if w.Code != http.StatusOK || strings.Contains(w.Body.String(), empty) {
			t.Errorf("%s with all rights: %d %s", path, w.Code, w.Body)
		}
		if len(asked.take(t, reads...)) == 0 {
			t.Errorf("%s with all rights asked NATS for nothing, so this test shows nothing", path)
		}
	}
}

// Many dashboards that ask for the counts again and again cost one reading of the letters; letters
// that come cost no second one of those before.
func TestManyPollersCostOneRead(t *testing.T) {
	h, bus, asked := costHub(t)
	tokens := []string{"own", tokenFor(t, "inspect:**"), tokenFor(t, "subscribe:orders.*::g"), tokenFor(t, "admin:orders.placed")}
	poll := func(want string) {
		t.Helper()
		var polling sync.WaitGroup
		var wrong atomic.Int64
		for i := range 4 * len(tokens) { // so many of each wait for their turn
			polling.Go(func() {
				for range 5 {
					if w := ask(h, http.MethodGet, "/dlq/counts", "Bearer "+tokens[i%len(tokens)]); w.Code != http.StatusOK || !strings.Contains(w.Body.String(), want) {
						if wrong.Add(1) == 1 {
							t.Errorf("poller %d: %d %s, want %s", i, w.Code, w.Body, want)
						}
					}
				}
			})
		}
		polling.Wait()
	}
	poll(`"total":1,`)
	if found := asked.take(t, "CONSUMER.CREATE.dlq"); len(found) != 1 {
		t.Errorf("80 requests read the letters %d times: %v", len(found), found)
	}
	poll(`"total":1,`)
	if found := asked.take(t, "CONSUMER.CREATE.dlq"); len(found) != 0 {
		t.Errorf("80 further requests read the letters %d times: %v", len(found), found)
	}
	letter(t, bus, "orders.placed")
	poll(`"total":2,`)
	if found := asked.take(t, "CONSUMER.CREATE.dlq"); len(found) != 1 {
		t.Errorf("after a further letter, 80 requests read the letters %d times: %v", len(found), found)
	}
	if _, err := bus.Admin().DeadLetters().Discard(t.Context(), jetstream.LetterFilter{Topic: "orders.placed"}, jetstream.RedriveOptions{}); err != nil {
		t.Fatal(err)
	}
	asked.take(t)
	poll(`"total":0,`)
	if w := ask(h, http.MethodGet, "/dlq/counts", "Bearer "+tokenFor(t, "inspect:other")); !strings.Contains(w.Body.String(), `"total":0,"groups":[]`) {
		t.Errorf("another token: %s", w.Body)
	}
	if found := asked.take(t, "CONSUMER.CREATE.dlq"); len(found) > 1 {
		t.Errorf("after a discard, the letters were read %d times: %v", len(found), found)
	}
}
