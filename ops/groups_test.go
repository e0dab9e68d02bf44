package ops

import (
	"net/http"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// A group can be deleted by whoever administers its topic. Names are segments of the path,
// percent-encoded once.
func TestDeleteGroup(t *testing.T) {
	bus, err := jetstream.Open(t.Context(), jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bus.Close() })
	h := described(t, Config{Bus: bus, Registry: prometheus.NewRegistry(), Groups: GroupsOf(bus), Guard: Guard{Tokens: newVerifier(t)}, Status: facade.StatusOf})
	make := func(group string) {
		t.Helper()
		sub, err := bus.Subscribe(t.Context(), "orders.placed", group, jetstream.SubscribeOptions{}, func(*jetstream.Held) {})
		if err != nil {
			t.Fatal(err)
		}
		if err := sub.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for _, group := range []string{"billing", "a b/c%2Fd", "100%", "ü"} {
		make(group)
	}
	admin := "Bearer " + tokenFor(t, "admin:orders.*")
	for _, test := range []struct {
		name, method, path, authorization string
		status                            int
		code                              string
	}{
		{"no token", http.MethodDelete, "/groups/orders.placed/billing", "", 401, "no_token"},
		{"subscriber", http.MethodDelete, "/groups/orders.placed/billing", "Bearer " + tokenFor(t, "subscribe:**"), 403, "forbidden"},
		{"administers another", http.MethodDelete, "/groups/orders.placed/billing", "Bearer " + tokenFor(t, "admin:other"), 403, "forbidden"},
		{"unknown group", http.MethodDelete, "/groups/orders.placed/nobody", admin, 404, "not_found"},
		{"unknown topic", http.MethodDelete, "/groups/orders.none/billing", admin, 404, "not_found"},
		{"no topic", http.MethodDelete, "/groups/orders.*/billing", admin, 403, "forbidden"},
		{"no group", http.MethodDelete, "/groups/orders.placed/a%00b", admin, 400, "bad_group"},
		{"another method", http.MethodPost, "/groups/orders.placed/billing", admin, 405, ""},
		{"it", http.MethodDelete, "/groups/orders.placed/billing", admin, 204, ""},
		{"it again", http.MethodDelete, "/groups/orders.placed/billing", admin, 404, "not_found"},
		{"a slash and a percent", http.MethodDelete, "/groups/orders.placed/a%20b%2Fc%252Fd", admin, 204, ""},
		{"a percent alone", http.MethodDelete, "/groups/orders.placed/100%25", admin, 204, ""},
		{"the topic encoded", http.MethodDelete, "/groups/orders%2Eplaced/%C3%BC", "Bearer own", 204, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := ask(h, test.method, test.path, test.authorization)
			if got.Code != test.status || test.code != "" && !strings.Contains(got.Body.String(), `"code":"`+test.code+`"`) {
				t.Errorf("got %d %s", got.Code, got.Body)
			}
		})
	}
}
