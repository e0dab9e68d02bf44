package ops

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"eventhub/jetstream"
)

// Operators list and cancel what waits for a topic. Clients that may publish to it need no more for
// that than DELETE /delayed of the HTTP port.
func TestDelayedOfATopic(t *testing.T) {
	bus, h := topicsHub(t)
	at := time.Now().Add(time.Hour)
	for _, id := range []string{"a/b", "two", "three"} {
		if _, err := bus.Publish(t.Context(), "orders.paid", []byte(`"1234567"`), jetstream.PublishOptions{ID: id, At: at}); err != nil {
			t.Fatal(err)
		}
	}
	see, change := "Bearer "+tokenFor(t, "inspect:orders.paid"), "Bearer "+tokenFor(t, "admin:orders.paid")
	list := func(path string) (got DelayedAnswer) {
		t.Helper()
		w := ask(h, http.MethodGet, path, see)
		if err := json.Unmarshal(w.Body.Bytes(), &got); w.Code != 200 || err != nil {
			t.Fatalf("%d %s", w.Code, w.Body)
		}
		return got
	}
	first := list("/topics/orders.paid/delayed?limit=2")
	if first.Topic != "orders.paid" || first.Count != 2 || first.Next == "" {
		t.Fatalf("%+v", first)
	}
	if e := first.Delayed[0]; e.ID != "a/b" || e.Bytes != 9 || e.AtMS < at.UnixMilli() || e.AtMS > at.UnixMilli()+1 || e.PublishedMS == 0 {
		t.Errorf("%+v", e)
	}
	if rest := list("/topics/orders.paid/delayed?next=" + first.Next); rest.Count != 1 || rest.Next != "" || rest.Delayed[0].ID != "three" {
		t.Errorf("%+v", rest)
	}
	for _, tt := range []struct {
		method, path, token string
		status              int
		text                string
	}{
		{http.MethodDelete, "/topics/orders.paid/delayed/a%2Fb", see, 403, "forbidden"},
		{http.MethodDelete, "/topics/orders.paid/delayed/a%2Fb", change, 204, ""},
		{http.MethodDelete, "/topics/orders.paid/delayed/a%2Fb", change, 404, "There is no such delayed event."},
		{http.MethodDelete, "/topics/orders.paid/delayed/two?x=1", change, 400, "unknown parameter"},
		{http.MethodGet, "/topics/orders.paid/delayed?limit=0", see, 400, "limit must be a number from 1 to 1000."},
		{http.MethodGet, "/topics/orders.paid/delayed?next=x", see, 400, "next is not from the answer before"},
		{http.MethodGet, "/topics/orders.paid/delayed", "Bearer " + tokenFor(t, "publish:**"), 403, "forbidden"},
		{http.MethodGet, "/topics/orders.paid/delayed", see, 200, `"count":2`},
	} {
		w := ask(h, tt.method, tt.path, tt.token)
		if w.Code != tt.status || !strings.Contains(w.Body.String(), tt.text) {
			t.Errorf("%s %s: %d %s", tt.method, tt.path, w.Code, w.Body)
		}
	}
}
