package eventhub

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"sync"
	"time"
)

// idMaker makes UUIDv7s that rise. The random half is drawn once: time and counter make the ids of
// one maker differ, and 62 random bits tell makers apart.
type idMaker struct {
	mu    sync.Mutex
	ms    int64
	count uint16
	tail  [8]byte
}

func newIDMaker() *idMaker {
	m := &idMaker{ms: -1}
	_, _ = rand.Read(m.tail[:])       // never fails
	m.tail[0] = m.tail[0]&0x3f | 0x80 // the variant
	return m
}

// next returns another id. A full millisecond borrows from the next one, and a clock that is set
// back changes nothing.
func (m *idMaker) next() string {
	const perMS = 1 << 12
	now := time.Now().UnixMilli()
	m.mu.Lock()
	if m.count++; now > m.ms || m.count == perMS {
		m.ms, m.count = max(now, m.ms+1), 0
	}
	ms, count := m.ms, m.count
	m.mu.Unlock()

	var id [16]byte
	const version = 0x7000
	binary.BigEndian.PutUint64(id[:], uint64(ms)<<16|version|uint64(count)) //nolint:gosec // not negative
	copy(id[8:], m.tail[:])
	var text [36]byte
	hex.Encode(text[:8], id[:4])
	hex.Encode(text[9:13], id[4:6])
	hex.Encode(text[14:18], id[6:8])
	hex.Encode(text[19:23], id[8:10])
	hex.Encode(text[24:], id[10:])
	text[8], text[13], text[18], text[23] = '-', '-', '-', '-'
	return string(text[:])
}
