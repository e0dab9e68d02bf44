// Package textmsg frames WebSocket text messages (RFC 6455, section 5.2), each as one final frame.
// With it, a caller puts many messages into one buffer and writes the buffer once; a WebSocket
// library flushes each message separately.
package textmsg

import "encoding/binary"

const (
	finalText = 0x81
	maskBit   = 0x80
	// headerSpace is what Begin reserves: the header of a message of 126 to 65,535 bytes. For other
	// sizes the text is moved.
	headerSpace = 4
	keySize     = 4
	// twoBytes and twoBytesMax are the shortest and the longest payload with a length of two bytes.
	twoBytes    = 126
	twoBytesMax = 0xffff
)

// Begin reserves space at the end of dst for the header of a message. The bytes appended to the
// result until End are the message's text.
func Begin(dst []byte) []byte { return append(dst, make([]byte, headerSpace)...) }

// End finishes the message that begins at start, as a server sends it.
func End(dst []byte, start int) []byte { return header(dst, start, start+headerSpace, 0) }

// HeaderSize returns how long the header of a message is that a server sends.
func HeaderSize(message []byte) int {
	switch message[1] {
	case twoBytes:
		return headerSpace
	case twoBytes + 1:
		return 10
	}
	return 2
}

// BeginMasked is Begin for a client's message.
func BeginMasked(dst []byte) []byte { return append(dst, make([]byte, headerSpace+keySize)...) }

// EndMasked finishes the message that begins at start, as a client sends it. The key must be
// unpredictable and must not be used twice.
func EndMasked(dst []byte, start int, key uint32) []byte {
	text := start + headerSpace + keySize
	binary.LittleEndian.PutUint32(dst[text-keySize:], key)
	mask(dst[text:], key)
	return header(dst, start, text-keySize, maskBit)
}

// header puts the header at start. The bytes that follow the header, the key included, are at from,
// and are moved if the reserved space does not fit.
func header(dst []byte, start, from int, bit byte) []byte {
	size := len(dst) - from
	n := size
	if bit != 0 {
		n -= keySize
	}
	switch {
	case n < twoBytes:
		dst = dst[:start+2+copy(dst[start+2:], dst[from:])]
		dst[start+1] = byte(n) | bit //nolint:gosec // below 126
	case n <= twoBytesMax:
		dst[start+1] = twoBytes | bit
		binary.BigEndian.PutUint16(dst[start+2:], uint16(n))
	default:
		const more = 10 - headerSpace
		dst = append(dst, make([]byte, more)...)
		copy(dst[from+more:], dst[from:from+size])
		dst[start+1] = twoBytes + 1 | bit
		binary.BigEndian.PutUint64(dst[start+2:], uint64(n))
	}
	dst[start] = finalText
	return dst
}

// mask applies the key to b, eight bytes at a time.
func mask(b []byte, key uint32) {
	wide := uint64(key)<<32 | uint64(key)
	for len(b) >= 8 {
		binary.LittleEndian.PutUint64(b, binary.LittleEndian.Uint64(b)^wide)
		b = b[8:]
	}
	for i := range b {
		b[i] ^= byte(key >> (8 * (i % keySize))) //nolint:gosec // i is not negative
	}
}

// Cut returns the text of the first of several messages that a server sends, and the messages that
// follow it.
func Cut(messages []byte) (text, rest []byte) {
	n := int(messages[1])
	switch n {
	case twoBytes:
		n = int(binary.BigEndian.Uint16(messages[2:]))
	case twoBytes + 1:
		n = int(binary.BigEndian.Uint64(messages[2:])) //nolint:gosec // the size of a message in memory
	}
	start := HeaderSize(messages)
	return messages[start : start+n : start+n], messages[start+n:]
}
