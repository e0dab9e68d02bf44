package jetstream

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strconv"
	"testing"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/topics"
)

// letterOf stores a dead letter of an event for a group.
func letterOf(t *testing.T, b *Bus, topic, group string, payload []byte) {
	t.Helper()
	if _, err := b.Publish(t.Context(), topic, payload, PublishOptions{}); err != nil {
		t.Fatal(err)
	}
	newest, err := b.History(topic).Newest(t.Context(), 1)
	if err != nil || len(newest) != 1 {
		t.Fatal(newest, err)
	}
	if err := b.Group(topic, group).DeadLetter(t.Context(), newest[0], "broken", 1); err != nil {
		t.Fatal(err)
	}
}

// Counts that grow are those that reading all letters gives, whatever came and went since the last
// count: letters, discards, purges, and streams that were created again.
func TestCountsFollowTheLetters(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), Topics: []topics.Rule{{Pattern: "dlq.**", MaxAge: time.Hour}}})
	letters := b.Admin().DeadLetters()
	topics, groups := []string{"a", "b", "own"}, []string{"g", "h"}
	random := rand.New(rand.NewPCG(1, 2)) // the same steps each time
	for step := range 25 {
		topic := topics[random.IntN(len(topics))]
		what := "letters"
		switch random.IntN(6) {
		case 0:
			what = "a discard"
			if _, err := letters.Discard(t.Context(), LetterFilter{Topic: topic, Group: groups[random.IntN(2)]}, RedriveOptions{Rate: maxRedriveRate}); err != nil {
				t.Fatal(err)
			}
		case 1:
			what = "a purge"
			if _, err := b.Admin().Topic("dlq."+topic).Purge(t.Context(), PurgeOptions{All: true, Needed: true}); err != nil && !errors.Is(err, event.ErrNotFound) {
				t.Fatal(err)
			}
		case 2:
			what = "a stream created again"
			if err := b.Admin().Topic("dlq.own").Delete(t.Context(), DeleteOptions{Needed: true}); err != nil && !errors.Is(err, event.ErrNotFound) {
				t.Fatal(err)
			}
			letterOf(t, b, "own", "g", []byte("1"))
		default:
			for range 1 + random.IntN(3) {
				letterOf(t, b, topic, groups[random.IntN(2)], []byte("1"))
			}
		}
		for _, of := range []string{"", topic} {
			for name, visible := range map[string]func(*Letter) bool{"all": nil, "one group": func(l *Letter) bool { return l.Group == "g" }} {
				got, err := letters.Count(t.Context(), LetterFilter{Topic: of}, "", visible)
				if err != nil {
					t.Fatal(err)
				}
				want, err := letters.Count(t.Context(), LetterFilter{Topic: of, Since: time.UnixMilli(1)}, "", visible)
				if err != nil {
					t.Fatal(err)
				}
				if !reflect.DeepEqual(got, want) {
					t.Fatalf("step %d, after %s of %s: %s of %q are %+v, want %+v", step, what, topic, name, of, got, want)
				}
			}
		}
	}
}

// More groups than are told apart count in the total, for those who may see all groups of a topic.
func TestCountsOfManyGroups(t *testing.T) {
	t.Parallel()
	sum := newLetterSum()
	for i := range letterGroups + 10 {
		for range 2 {
			sum.add(&Letter{Topic: "a", Group: strconv.Itoa(i), StoredAt: int64(i) * 1e6})
		}
	}
	for i := range letterGroups + 1 {
		sum.add(&Letter{Topic: fmt.Sprintf("t%d", i), Group: "g"})
	}
	all, one := sum.selected("", nil), sum.selected("a", func(l *Letter) bool { return l.Topic == "a" })
	if all.Total != 2*(letterGroups+10)+letterGroups+1 || len(all.Groups) != letterGroups {
		t.Errorf("%d letters of %d groups", all.Total, len(all.Groups))
	}
	if one.Total != 2*(letterGroups+10) || len(one.Groups) != letterGroups {
		t.Errorf("of one topic, %d letters of %d groups", one.Total, len(one.Groups))
	}
	if few := sum.selected("", func(l *Letter) bool { return l.Group == "7" }); few.Total != 2 || len(few.Groups) != 1 || few.Groups[0] != (LetterCount{"a", "7", 2, 7, 7}) {
		t.Errorf("of one group: %+v", few)
	}
}
