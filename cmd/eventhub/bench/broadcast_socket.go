package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"
)

// rawSocket is the client side of a WebSocket that costs next to nothing: it splits what comes into
// messages, in a buffer of its own, and does no more. One goroutine uses it, but for close.
type rawSocket struct {
	conn net.Conn
	buf  []byte
	from int // of what has not been returned
}

// rawBuffer is the size of the buffer at first. It grows with the largest message.
const rawBuffer = 8 << 10

// dialRaw opens a WebSocket.
func dialRaw(ctx context.Context, at string) (*rawSocket, error) {
	u, err := url.Parse(at)
	if err != nil {
		return nil, fmt.Errorf("parse %q: %w", at, err)
	}
	s, err := dialPlain(ctx, u.Host)
	if err != nil {
		return nil, err
	}
	path := u.RequestURI()
	err = s.write([]byte("GET " + path + " HTTP/1.1\r\nHost: " + u.Host + "\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" +
		"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"))
	for err == nil {
		if end := bytes.Index(s.buf, []byte("\r\n\r\n")); end >= 0 {
			if status, _, _ := strings.Cut(string(s.buf), "\r\n"); !strings.Contains(status, " 101 ") {
				err = fmt.Errorf("open a WebSocket at %s: %s", at, status)
				break
			}
			s.from = end + 4
			return s, nil
		}
		err = s.fill()
	}
	s.close()
	return nil, err
}

// dialPlain opens a connection whose messages are framed as those of a WebSocket.
func dialPlain(ctx context.Context, address string) (*rawSocket, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return &rawSocket{conn: conn, buf: make([]byte, 0, rawBuffer)}, nil
}

func (s *rawSocket) write(b []byte) error {
	_, err := s.conn.Write(b)
	return err
}

// fill reads more into the buffer.
func (s *rawSocket) fill() error {
	if s.from > 0 {
		s.buf = s.buf[:copy(s.buf, s.buf[s.from:])]
		s.from = 0
	}
	if len(s.buf) == cap(s.buf) {
		s.buf = slices.Grow(s.buf, cap(s.buf))
	}
	n, err := s.conn.Read(s.buf[len(s.buf):cap(s.buf)])
	s.buf = s.buf[:len(s.buf)+n]
	return err
}

// Opcodes of a WebSocket.
const (
	opText = 0x1
	opPing = 0x9
	opPong = 0xA
	opEnd  = 0x8
)

// split returns the first frame of b without its header, and how long it is with it; 0 if b does
// not have all of it.
func split(b []byte) (op byte, body []byte, size int) {
	if len(b) < 2 {
		return 0, nil, 0
	}
	head, length := 2, int(b[1]&0x7f)
	switch length {
	case 126:
		if len(b) < 4 {
			return 0, nil, 0
		}
		head, length = 4, int(binary.BigEndian.Uint16(b[2:]))
	case 127:
		if len(b) < 10 {
			return 0, nil, 0
		}
		head, length = 10, int(binary.BigEndian.Uint64(b[2:])) //nolint:gosec // a length
	}
	if len(b) < head+length {
		return 0, nil, 0
	}
	return b[0] & 0xf, b[head : head+length], head + length
}

// next returns the next message, which is valid until the next call. It answers pings.
func (s *rawSocket) next() ([]byte, error) {
	for {
		op, body, size := split(s.buf[s.from:])
		if size == 0 {
			if err := s.fill(); err != nil {
				return nil, err
			}
			continue
		}
		s.from += size
		switch op {
		case opPing:
			if err := s.sendFrame(opPong, body); err != nil {
				return nil, err
			}
		case opPong:
		case opEnd:
			code := 1005
			if len(body) >= 2 {
				code = int(binary.BigEndian.Uint16(body))
			}
			return nil, fmt.Errorf("the server closed the connection with %d", code)
		default:
			return body, nil
		}
	}
}

// more reports whether next has a message without reading. It says no before a control frame,
// behind which there may be none.
func (s *rawSocket) more() bool {
	op, _, size := split(s.buf[s.from:])
	return size > 0 && op == opText
}

// appendFrame appends a message of a server.
func appendFrame(dst, message []byte) []byte {
	switch n := len(message); {
	case n < 126:
		dst = append(dst, 0x80|opText, byte(n))
	case n <= 0xffff:
		dst = binary.BigEndian.AppendUint16(append(dst, 0x80|opText, 126), uint16(n))
	default:
		dst = binary.BigEndian.AppendUint64(append(dst, 0x80|opText, 127), uint64(n))
	}
	return append(dst, message...)
}

// send sends a text.
func (s *rawSocket) send(text string) error { return s.sendFrame(opText, []byte(text)) }

// sendFrame sends a frame of a client. Its mask is zero, which changes nothing.
func (s *rawSocket) sendFrame(op byte, body []byte) error {
	out := []byte{0x80 | op}
	if n := len(body); n < 126 {
		out = append(out, 0x80|byte(n))
	} else {
		out = binary.BigEndian.AppendUint16(append(out, 0x80|126), uint16(n)) //nolint:gosec // requests are short
	}
	return s.write(append(append(out, 0, 0, 0, 0), body...))
}

// ask sends a request and reads up to the first message that has want, or fails at one that has
// fail.
func (s *rawSocket) ask(text, want, fail string) error {
	if err := s.send(text); err != nil {
		return err
	}
	if err := s.conn.SetReadDeadline(time.Now().Add(stallAfter)); err != nil {
		return err
	}
	for {
		m, err := s.next()
		switch {
		case err != nil:
			return err
		case bytes.Contains(m, []byte(fail)):
			return fmt.Errorf("the server answered %.300s", m)
		case bytes.Contains(m, []byte(want)):
			return s.conn.SetReadDeadline(time.Time{})
		}
	}
}

func (s *rawSocket) close() { _ = s.conn.Close() }

// messagesIn is the number of messages in a frame: Centrifugo puts several into one, a line each.
func messagesIn(frame []byte) int { return 1 + bytes.Count(frame, []byte{'\n'}) }

// over reports whether an error is the end of a connection that this side closed.
func over(err error) bool { return errors.Is(err, net.ErrClosed) || errors.Is(err, io.EOF) }
