package facade_test

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/cputime"
	"eventhub/jetstream/schemas"
	"eventhub/jetstream/topics"
)

// longCasts are how many elements are removed from the front of a list in its second version.
const longCasts = 40

// longList is a list that takes several milliseconds to cast, and shortList one that takes none.
func longList(n int) string {
	return "[" + strings.Repeat("1,", 20_000) + strconv.Itoa(n) + "]"
}

func shortList(n int) string {
	return "[" + strings.Repeat("1,", longCasts) + strconv.Itoa(n) + "]"
}

// castTimeRig has the topic lists with two versions, in which clients may have events cast for so
// long in each second.
func castTimeRig(t *testing.T, each time.Duration, change func(*facade.Config)) (*rig, *cputime.Ration) {
	t.Helper()
	ration := cputime.New(each, 8, 100, func(string) {}) // four places, two of them for one client
	r := newRigOn(t, jetstream.Config{
		Topics:    []topics.Rule{{Pattern: "lists", Schema: topics.SchemaRule{Mode: topics.SchemaWarn, Compatibility: "none"}}},
		Computing: ration,
	}, func(cfg *facade.Config) {
		cfg.Auth, cfg.Computing = facade.Tokens(newVerifier(t)), ration
		if change != nil {
			change(cfg)
		}
	})
	for _, d := range []schemas.Draft{
		{Schema: json.RawMessage(`{"type":"array"}`)},
		{Schema: json.RawMessage(`{"type":"array"}`), Up: json.RawMessage("[" + strings.Repeat(`{"remove":{"at":"/0"}},`, longCasts-1) + `{"remove":{"at":"/0"}}]`)},
	} {
		if _, _, err := r.bus.Schemas().Register(t.Context(), "lists", d); err != nil {
			t.Fatal(err)
		}
	}
	return r, ration
}

// putLists publishes n lists of the first version, of which every fourth is short.
func (r *rig) putLists(t *testing.T, n int) {
	t.Helper()
	p := r.bus.NewPublisher()
	for i := range n {
		payload := longList(i)
		if i%4 == 3 {
			payload = shortList(i)
		}
		if _, err := p.Publish(t.Context(), "lists", []byte(payload), jetstream.PublishOptions{Headers: map[string]string{"x-schema-version": "1"}}); err != nil {
			t.Fatal(err)
		}
	}
}

// lastOf returns the last element of a list that was cast, or -1.
func lastOf(payload []byte) int {
	var list []int
	if err := json.Unmarshal(payload, &list); err != nil || len(list) != 1 && len(list) != 20_001-longCasts {
		return -1
	}
	return list[len(list)-1]
}

// TestLongCastsHoldUpNobody sends many events that take long to cast, beyond the ration of the
// client. Frames of the connection are answered meanwhile, the events keep their order, and another
// client has its own ration.
func TestLongCastsHoldUpNobody(t *testing.T) {
	t.Parallel()
	r, _ := castTimeRig(t, 150*time.Millisecond, nil)
	const n = 60
	r.putLists(t, n)
	p := r.dial(t)
	p.send(`{"op":"AUTH","token":"` + grant(t, "eve", "subscribe:lists") + `"}`)
	p.next("OK", "")
	p.send(`{"op":"SUBSCRIBE","topic":"lists","group":"g","opts":{"from":"earliest","schemaVersion":2,"maxInFlight":100}}`)
	p.next("OK", "")
	came, before := 0, -1
	for came < n || before < 0 {
		switch a := p.any(); {
		case a.Corr == "resume":
			before = came
			begun := time.Now()
			if a := r.get(t, "/replay?topic=lists&limit=1&schemaVersion=2", "Authorization", "Bearer "+grant(t, "bob", "subscribe:lists")); a.status != http.StatusOK {
				t.Errorf("another client: %d %.200s", a.status, a.text)
			}
			if took := time.Since(begun); took > time.Second {
				t.Errorf("another client waited for %v", took)
			}
		case a.Op == "EVENT":
			if last := lastOf(a.Event.Payload); last != came {
				t.Fatalf("event %d is list %d", came, last)
			}
			if came == 0 {
				p.send(`{"op":"RESUME","topic":"lists","group":"nobody","corr":"resume"}`)
			}
			came++
		default:
			t.Fatalf("got %+v", a)
		}
	}
	if before > n/2 {
		t.Errorf("a frame was answered after %d of %d events", before, n)
	}
}

// TestCastsBeyondTheRation has a client that owes time read by each route: its answers come late or
// are refused, and nothing is lost. Others do not wait.
func TestCastsBeyondTheRation(t *testing.T) {
	t.Parallel()
	r, ration := castTimeRig(t, 200*time.Millisecond, func(cfg *facade.Config) {
		cfg.Auth = everybody{}
		cfg.Limits.StreamBeat = 20 * time.Millisecond
	})
	r.srv.SetPullCasts(50 * time.Millisecond)
	r.putLists(t, 4)
	const owed = 400 * time.Millisecond
	eve, bob := []string{"Authorization", "Bearer eve"}, []string{"Authorization", "Bearer bob"}
	// owes has eve owe time, and do something meanwhile.
	owes := func(what string, f func()) {
		t.Helper()
		for ration.Owes("eve") < owed {
			ration.Charge("eve", cputime.Burst)
		}
		begun := time.Now()
		f()
		if took := time.Since(begun); took < owed/2 {
			t.Errorf("%s took only %v", what, took)
		}
	}
	pull := func(client []string) answer {
		return r.post(t, "/groups/lists/pulled/pull", `{"max":4,"opts":{"from":"earliest","schemaVersion":2}}`, client...)
	}

	s := r.subscribe(t, "topic=lists&group=streamed&from=latest&schemaVersion=2", eve...)
	owes("a stream", func() {
		r.putLists(t, 1)
		if e := s.event(); lastOf(e.Event.Payload) != 0 || s.beats < 3 {
			t.Errorf("got %.100s, after %d beats", e.Event.Payload, s.beats)
		}
	})
	for ration.Owes("dan") < 2*rigPatience { // so that dan owes time still when his pull has come
		ration.Charge("dan", cputime.Burst)
	}
	if a := pull([]string{"Authorization", "Bearer dan"}); a.status != http.StatusTooManyRequests || a.Code != "rate_limited" || a.header.Get("Retry-After") == "" {
		t.Errorf("a pull: %d %.300s", a.status, a.text)
	}
	owes("pulls", func() {
		eventually(t, "a pull has events", func() bool {
			a := pull(eve)
			var got struct{ Events []consumed }
			if err := json.Unmarshal([]byte(a.text), &got); a.status == http.StatusOK && err == nil && len(got.Events) > 0 {
				e := got.Events[0]
				if lastOf(e.Event.Payload) < 0 || e.Ctx.Attempt != 1 {
					t.Errorf("attempt %d, %.100s", e.Ctx.Attempt, e.Event.Payload)
				}
				return true
			}
			return false
		})
	})
	paths := []string{"/replay?topic=lists&schemaVersion=2", "/export?topic=lists&ndjson=1&schemaVersion=2"}
	for _, path := range paths {
		owes(path, func() {
			if a := r.get(t, path, eve...); a.status != http.StatusOK || strings.Count(a.text, `"x-schema-version":"2"`) != 5 {
				t.Errorf("%s: %d %.300s", path, a.status, a.text)
			}
		})
	}
	owes("a compressed export", func() {
		if a := r.get(t, "/export?topic=lists&ndjson=1", append(eve, "Accept-Encoding", "gzip")...); a.status != http.StatusOK || a.header.Get("Content-Encoding") != "gzip" {
			t.Errorf("compressed: %d %v", a.status, a.header)
		}
	})
	for ration.Owes("eve") < 2*rigPatience {
		ration.Charge("eve", cputime.Burst)
	}
	for _, path := range paths {
		begun := time.Now()
		if a := r.get(t, path, bob...); a.status != http.StatusOK {
			t.Errorf("%s of another client: %d %.300s", path, a.status, a.text)
		}
		if took := time.Since(begun); took > rigPatience {
			t.Errorf("%s of another client took %v", path, took)
		}
	}
}

// TestTheIdleListenerPays has two clients listen to a broadcast in a version. The first one has its
// places taken, and then owes time.
func TestTheIdleListenerPays(t *testing.T) {
	t.Parallel()
	r, ration := castTimeRig(t, time.Millisecond, func(cfg *facade.Config) { cfg.Auth = everybody{} })
	r.putLists(t, 1)
	eve, _ := r.listen(t, "lists", "schemaVersion=2", "Authorization", "Bearer eve")
	bob, _ := r.listen(t, "lists", "schemaVersion=2", "Authorization", "Bearer bob")
	want := func(while string) {
		t.Helper()
		r.putLists(t, 1)
		for name, s := range map[string]*sse{"eve": eve, "bob": bob} {
			if f, _ := s.frame("event"); lastOf(f.Event.Payload) != 0 {
				t.Errorf("while %s, %s got %.100s", while, name, f.Event.Payload)
			}
		}
	}
	for range 2 {
		if err := ration.Enter(t.Context(), "eve", 2); err != nil {
			t.Fatal(err)
		}
	}
	want("the first one computes")
	for ration.Owes("eve") < 2*rigPatience {
		ration.Charge("eve", cputime.Burst)
	}
	want("the first one owes time")
}
