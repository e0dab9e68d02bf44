package ops

import (
	"fmt"
	"testing"
	"time"

	"eventhub/acl"
)

// What a mask names is hidden in events, and in dead letters of them.
func TestHide(t *testing.T) {
	t.Parallel()
	token, err := acl.Sign(signingKey, acl.Grant{TTL: time.Hour, Policy: []byte(
		`{"rules":[{"effect":"allow","action":"admin","topics":["**"],"mask":["/card","X-Token"]}]}`,
	)})
	if err != nil {
		t.Fatal(err)
	}
	id, err := newVerifier(t).Verify(t.Context(), token)
	if err != nil {
		t.Fatal(err)
	}
	const (
		event  = `{"card": 4111, "card":17, "n":1.0}`
		letter = `{"topic":"orders","card":1,"original":{"payload":{"card":4111,"n":1},"headers":{"x-tOKen":"secret","a":"b"}},"err":"no"}`
	)
	headers := map[string]string{"X-TOKEN": "secret", "a": "b"}
	for _, test := range []struct{ topic, payload, want string }{
		{"orders", event, `{"card": "***", "card":"***", "n":1.0}`},
		{"orders", `[1]`, `[1]`},
		{"orders", `{"card"`, `"***"`},
		{"dlq.orders", letter, `{"topic":"orders","card":"***","original":{"payload":{"card":"***","n":1},"headers":{"x-tOKen":"***","a":"b"}},"err":"no"}`},
		{"orders", letter, `{"topic":"orders","card":"***","original":{"payload":{"card":4111,"n":1},"headers":{"x-tOKen":"secret","a":"b"}},"err":"no"}`},
	} {
		masks, ok := id.Shows(test.topic, "")
		if !ok {
			t.Fatalf("%s is not shown", test.topic)
		}
		payload, shown := hide(masks, test.topic, []byte(test.payload), headers)
		if string(payload) != test.want || fmt.Sprint(shown) != "map[X-TOKEN:*** a:b]" {
			t.Errorf("%s of %s became %s with headers %v", test.payload, test.topic, payload, shown)
		}
	}
	if headers["X-TOKEN"] != "secret" {
		t.Error("the event itself was changed")
	}
	if payload, shown := hide(nil, "orders", []byte(event), headers); string(payload) != event || len(shown) != 2 {
		t.Errorf("without a mask, %s became %s with headers %v", event, payload, shown)
	}
}
