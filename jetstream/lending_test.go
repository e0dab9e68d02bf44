package jetstream

import (
	"reflect"
	"testing"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/streams"
)

// An event that is lent over NATS arrives as it was, whichever fields it has.
func TestLendingsArriveAsTheyWere(t *testing.T) {
	t.Parallel()
	g := &group{topic: &streams.Topic{Name: "orders", Stream: &streams.Stream{Name: "S"}}}
	whole := event.Event{
		ID: "id", TS: 1, Topic: "orders", Key: "k", SID: "sid", Headers: map[string]string{"a": "1", "b": ""}, CausedBy: []string{"x", "y"}, Tags: []string{"t"},
		Partition: 7, HasPartition: true, Payload: []byte("payload\x00"), Tombstone: true, Stream: "other", Sequence: 1 << 60, Gone: true, StoredAt: 1795199112245e6,
	}
	fields := reflect.ValueOf(whole)
	for i := range fields.NumField() {
		if fields.Field(i).IsZero() {
			t.Fatalf("the test has no %s", fields.Type().Field(i).Name)
		}
	}
	native := event.Event{ID: "S@5", TS: -1, Topic: "orders", Payload: []byte{}, Stream: "S", Sequence: 5, StoredAt: 5}
	var sent []byte
	want := []lending{
		{event: whole, attempt: 2, delivered: 3, seq: 9, size: 1 << 20, group: g},
		{event: native, attempt: 1, delivered: 1, seq: 5, size: 1, group: g},
	}
	for i := range want {
		l := want[i]
		l.loan = &loan{number: uint64(100 + i)}
		sent = l.appendTo(sent, uint64(10+i))
	}
	r := lendings{left: sent}
	for i, w := range want {
		l, number, place, err := r.next(g)
		if err != nil || number != uint64(100+i) || place != uint64(10+i) || !reflect.DeepEqual(l, w) {
			t.Errorf("got %+v, loan %d, place %d, %v; want %+v", l, number, place, err, w)
		}
	}
	if len(r.left) > 0 {
		t.Errorf("%d bytes are left", len(r.left))
	}
	for cut := range sent {
		r := lendings{left: sent[:cut]}
		if _, _, _, err := r.next(g); err == nil {
			_, _, _, err = r.next(g)
			if err == nil {
				t.Errorf("%d of %d bytes have both events", cut, len(sent))
			}
		}
	}
}
