package jetstream

import (
	"errors"
	"maps"
	"slices"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/topics"
)

func TestFindIDs(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: []topics.Rule{{Pattern: "fam.**", Family: "fam"}, {Pattern: "few", MaxMsgs: 3}, {Pattern: "brief", MaxAge: time.Second}, {Pattern: "window", DuplicateWindow: 7 * time.Second}}})
	began := time.Now()
	put := func(topic, key string, ids ...string) {
		t.Helper()
		for _, id := range ids {
			if _, err := b.Publish(t.Context(), topic, []byte("1"), PublishOptions{ID: id, Key: key}); err != nil {
				t.Fatal(err)
			}
		}
	}
	put("a", "k", "1", "2")
	put("a", "", "3")
	put("fam.x", "k", "1")
	put("fam.y", "k", "2")
	put("few", "k", "1", "2", "3", "4", "5")
	for _, name := range []string{"one", "whole"} {
		if _, err := b.conn.JS.CreateStream(t.Context(), natsjs.StreamConfig{
			Name: name, Subjects: []string{"event." + name, "keyed.*." + name}, MaxMsgsPerSubject: 1, Duplicates: time.Minute,
		}); err != nil {
			t.Fatal(err)
		}
		put(name, "j", "1")
	}
	put("one", "k", "2", "3")
	// Of what topic old keeps for a week, a native client removes the first; of brief, the server
	// does.
	put("old", "", "0", "2")
	old, err := b.conn.JS.Stream(t.Context(), "old")
	if err != nil {
		t.Fatal(err)
	}
	if err := old.DeleteMsg(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	put("brief", "", "1")
	eventually(t, "the event is dropped", func() bool {
		info, err := b.conn.FindStream(t.Context(), "brief")
		return err == nil && info.State.Msgs == 0
	})
	expired := time.Now().Add(time.Millisecond)
	for _, test := range []struct {
		name     string
		topic    string
		search   IDSearch
		found    []string
		complete bool
	}{
		{"all", "a", IDSearch{IDs: []string{"1", "2", "3", "4"}}, []string{"1", "2", "3"}, true},
		{"of a key", "a", IDSearch{Key: "k", IDs: []string{"2", "3"}}, []string{"2"}, true},
		{"of another key", "a", IDSearch{Key: "l", IDs: []string{"2"}}, nil, true},
		{"in a family", "fam.x", IDSearch{IDs: []string{"1", "2"}}, []string{"1"}, true},
		{"no topic", "none", IDSearch{IDs: []string{"1"}}, nil, true},
		{"too many", "a", IDSearch{IDs: []string{"3"}, Max: 2}, nil, false},
		{"too many, but all found", "a", IDSearch{IDs: []string{"1"}, Max: 2}, []string{"1"}, true},
		{"dropped", "few", IDSearch{IDs: []string{"1", "4"}}, []string{"4"}, false},
		{"not dropped", "few", IDSearch{IDs: []string{"4"}}, []string{"4"}, true},
		{"of a key, dropped", "few", IDSearch{Key: "k", IDs: []string{"1"}}, nil, false},
		{"removed by a native client", "old", IDSearch{IDs: []string{"1"}}, nil, false},
		{"dropped from the middle", "one", IDSearch{IDs: []string{"2"}}, nil, false},
		{"nothing dropped from the middle", "whole", IDSearch{IDs: []string{"2"}}, nil, true},
		{"dropped by age", "brief", IDSearch{IDs: []string{"1"}}, nil, false},
		{"dropped by age, and nothing since", "brief", IDSearch{IDs: []string{"1"}, Since: expired}, nil, true},
		{"later", "few", IDSearch{IDs: []string{"1"}, Since: time.Now().Add(time.Minute)}, nil, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.search.Since.IsZero() {
				test.search.Since = began.Add(-time.Minute)
			}
			found, complete, err := b.History(test.topic).FindIDs(t.Context(), test.search)
			if err != nil {
				t.Fatal(err)
			}
			if got := slices.Sorted(maps.Keys(found)); !slices.Equal(got, test.found) || complete != test.complete {
				t.Errorf("got %q, complete %v; want %q, %v", got, complete, test.found, test.complete)
			}
		})
	}
	put("window", "", "1")
	if d, err := b.History("window").DuplicateWindow(t.Context()); d != 7*time.Second || err != nil {
		t.Errorf("got %v, %v", d, err)
	}
	if _, err := b.History("none").DuplicateWindow(t.Context()); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("got %v", err)
	}
}

func TestRefused(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	s, err := b.conn.JS.CreateStream(t.Context(), natsjs.StreamConfig{Name: "full", Subjects: []string{"event.full", "keyed.*.full"}, MaxMsgs: 1, Discard: natsjs.DiscardNew})
	if err != nil {
		t.Fatal(err)
	}
	publishAll(t, b, "full", "1")
	_, err = b.Publish(t.Context(), "full", []byte("2"), PublishOptions{})
	if !Refused(err) {
		t.Errorf("%v is not taken for a refusal of %s", err, s.CachedInfo().Config.Name)
	}
	if _, err = b.Publish(t.Context(), "a..b", nil, PublishOptions{}); Refused(err) {
		t.Errorf("%v is taken for the stream's", err)
	}
}
