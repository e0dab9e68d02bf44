package conn

import (
	"strconv"
	"strings"
)

// DeliveryMeta is what the server's reply subject says of a delivery.
type DeliveryMeta struct {
	Prefix    int // length of what all ack subjects of the consumer begin with
	Delivered int
	StreamSeq uint64
	Order     uint64
	StoredAt  int64
}

// ParseAckSubject reads $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer
// seq>.<time>.<pending>, or the newer form with domain and account in front and perhaps a random
// token behind.
func ParseAckSubject(s string) (DeliveryMeta, bool) {
	var dots [12]int
	n := 0
	for i := range len(s) {
		if s[i] == '.' {
			if n == len(dots) {
				return DeliveryMeta{}, false
			}
			dots[n] = i
			n++
		}
	}
	if !strings.HasPrefix(s, "$JS.ACK.") {
		return DeliveryMeta{}, false
	}
	first := 3 // the dot before <delivered>
	switch {
	case n == 8:
	case n >= 10:
		first = 5
	default:
		return DeliveryMeta{}, false
	}
	field := func(i int) (uint64, bool) {
		v, err := strconv.ParseUint(s[dots[first+i]+1:dots[first+i+1]], 10, 63)
		return v, err == nil
	}
	delivered, ok1 := field(0)
	seq, ok2 := field(1)
	order, ok3 := field(2)
	stored, ok4 := field(3)
	return DeliveryMeta{
		Prefix: dots[first] + 1, Delivered: int(delivered), StreamSeq: seq, Order: order, StoredAt: int64(stored), //nolint:gosec // 63 bits
	}, ok1 && ok2 && ok3 && ok4
}

// ackPending reads the last number of <delivered>.<stream seq>.<consumer seq>.<time>.<pending>,
// which others may follow.
func ackPending(s string) uint64 {
	for range 4 {
		_, s, _ = strings.Cut(s, ".")
	}
	s, _, _ = strings.Cut(s, ".")
	n, _ := strconv.ParseUint(s, 10, 64)
	return n
}
