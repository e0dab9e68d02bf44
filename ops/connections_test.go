package ops

import (
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// manyConnections has connections whose descriptions are as long as those of many subscriptions.
type manyConnections struct{ noConnections }

const connectionsOfMany = 20

func (manyConnections) List(after string, limit int, _ ConnectionFilter) (list []Connection, more bool) {
	first := 0
	if after != "" {
		first, _ = strconv.Atoi(after)
	}
	for i := first + 1; i <= connectionsOfMany; i++ {
		if len(list) == limit {
			return list, true
		}
		list = append(list, Connection{ID: strconv.Itoa(i), Kind: "websocket", Remote: strings.Repeat("a", 300<<10), Subscriptions: []Subscription{}})
	}
	return list, false
}

// An answer with connections has few MiB, however many subscriptions they have. Its next goes on
// behind the last one.
func TestConnectionsOfManySubscriptions(t *testing.T) {
	h := described(t, Config{Bus: busState{}, Registry: prometheus.NewRegistry(), Connections: manyConnections{}, Guard: Guard{Tokens: newVerifier(t)}})
	var ids []string
	for next, pages := "", 0; ; pages++ {
		w := ask(h, http.MethodGet, "/connections?limit=1000&next="+next, "Bearer own")
		var page struct {
			Count       int
			Connections []Connection
			Next        string
		}
		if err := json.Unmarshal(w.Body.Bytes(), &page); err != nil || page.Count != len(page.Connections) || page.Count == 0 {
			t.Fatalf("page %d: %d connections, %v", pages, len(page.Connections), err)
		}
		if w.Body.Len() > maxConnectionBytes+1<<20 {
			t.Errorf("page %d has %d bytes", pages, w.Body.Len())
		}
		for i := range page.Connections {
			ids = append(ids, page.Connections[i].ID)
		}
		if next = page.Next; next == "" {
			if pages == 0 {
				t.Errorf("there are %d pages, so this test shows nothing", pages+1)
			}
			break
		}
	}
	if len(ids) != connectionsOfMany || !slices.IsSortedFunc(ids, func(a, b string) int { return len(a) - len(b) }) || len(slices.Compact(ids)) != connectionsOfMany {
		t.Errorf("%d connections: %v", len(ids), ids)
	}
}
