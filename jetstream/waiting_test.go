package jetstream

import (
	"errors"
	"strconv"
	"testing"
	"time"

	"eventhub/jetstream/event"
)

// Operators see what waits for a topic, page by page, and can cancel it.
func TestListOfDelayedEvents(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	orders := b.Admin().Topic("orders.reminders")
	if page, err := orders.Delayed(t.Context(), "", 10); err != nil || len(page.Events) != 0 || page.Next != "" {
		t.Fatalf("before there is any: %+v, %v", page, err)
	}
	at := time.Now().Add(time.Hour).Truncate(time.Millisecond)
	for i := range 7 {
		opts := PublishOptions{ID: "id " + strconv.Itoa(i), Key: "k." + strconv.Itoa(i), At: at}
		if _, err := b.Publish(t.Context(), "orders.reminders", []byte(`"1234567"`), opts); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Publish(t.Context(), "orders", []byte("1"), PublishOptions{Delay: time.Hour, CountFor: "jwt:eve"}); err != nil {
			t.Fatal(err)
		}
	}
	var all []DelayedEvent
	pages := 0
	for next := ""; ; pages++ {
		page, err := orders.Delayed(t.Context(), next, 3)
		if err != nil || len(page.Events) > 3 {
			t.Fatalf("%+v, %v", page, err)
		}
		if all = append(all, page.Events...); page.Next == "" {
			break
		}
		next = page.Next
	}
	if len(all) != 7 || pages < 2 {
		t.Fatalf("%d events on %d pages", len(all), pages+1)
	}
	for i, e := range all {
		n := strconv.Itoa(i)
		if e.ID != "id "+n || e.Key != "k."+n || !e.At.Equal(at) || e.Bytes != 9 || time.Since(e.Published) > time.Hour {
			t.Errorf("event %d is %+v", i, e)
		}
	}
	if err := orders.CancelDelayed(t.Context(), "id 3"); err != nil {
		t.Fatal(err)
	}
	if err := orders.CancelDelayed(t.Context(), "id 3"); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("again: %v", err)
	}
	if page, err := orders.Delayed(t.Context(), "", 10); err != nil || len(page.Events) != 6 {
		t.Errorf("%+v, %v", page, err)
	}
	for _, err := range []error{
		second(orders.Delayed(t.Context(), "x", 10)), second(orders.Delayed(t.Context(), "0", 10)),
		second(orders.Delayed(t.Context(), "", 0)), second(orders.Delayed(t.Context(), "", MaxDelayedPage+1)),
	} {
		if !hasCode(err, event.CodeBadOptions) {
			t.Errorf("%v", err)
		}
	}
}

func second(_ DelayedPage, err error) error { return err }
