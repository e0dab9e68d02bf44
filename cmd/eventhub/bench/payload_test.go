package bench

import (
	"encoding/json"
	"testing"
)

func TestPayload(t *testing.T) {
	for _, size := range []int{minPayload, minPayload + 1, 100, 256, 4096} {
		payload := newPayload(size)
		stamp(payload, 1234567890, 987_654_321_012_345)
		if len(payload) != size || !json.Valid(payload) {
			t.Errorf("%d bytes: %d of %s", size, len(payload), payload)
		}
		seq, at, err := readStamp(payload)
		if err != nil || seq != 1234567890 || at != 987_654_321_012_345 {
			t.Errorf("%d bytes: %d, %d, %v", size, seq, at, err)
		}
		stamp(payload, 7, 8)
		if seq, at, err = readStamp(payload); err != nil || seq != 7 || at != 8 {
			t.Errorf("%d bytes, stamped again: %d, %d, %v", size, seq, at, err)
		}
	}
	for _, foreign := range []string{"", "1", `{"hello":"world","and":"something that is as long as one of ours"}`} {
		if _, _, err := readStamp([]byte(foreign)); err == nil {
			t.Errorf("%q was taken for one of ours", foreign)
		}
	}
}
