//go:build unix

package model

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"time"
)

// wsConn is a WebSocket connection that takes down each frame. Unlike a library's it knows when its
// socket was last seen empty, which bounds the moment at which the hub wrote what comes then.
type wsConn struct {
	rec    *recorder
	number int
	tcp    *net.TCPConn
	raw    syscall.RawConn
	heard  func(wireText []byte) // each text message, by the reader

	writing sync.Mutex

	gateMu sync.Mutex
	gate   chan struct{} // closed when the client reads again; nil while it does

	buf    []byte
	empty  time.Duration // when the socket was last empty; the reader's own
	ended  chan struct{}
	closed sync.Once
}

const (
	opText  = 1
	opClose = 8
	opPing  = 9
	opPong  = 10
)

// errPeerClosed says that the hub sent a close frame.
var errPeerClosed = errors.New("closed by the hub")

// dialHub connects to the hub at addr. A small connection has little room in the kernel: a client
// that does not read soon leaves events in the hub, but an empty socket says nothing of when the
// hub wrote what comes then. heard is called by the reader for each text message, in their order.
func dialHub(rec *recorder, number int, addr, hub string, small bool, heard func([]byte)) (*wsConn, error) {
	d := net.Dialer{Timeout: time.Second}
	nc, err := d.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	tcp, ok := nc.(*net.TCPConn)
	if !ok {
		return nil, errors.New("no TCP connection")
	}
	c := &wsConn{rec: rec, number: number, tcp: tcp, heard: heard, ended: make(chan struct{})}
	room := 1 << 20
	if small {
		room, hub = 4096, hub+" small"
	}
	_ = tcp.SetReadBuffer(room)
	if err := c.upgrade(addr); err != nil {
		_ = tcp.Close()
		return nil, err
	}
	if c.raw, err = tcp.SyscallConn(); err != nil {
		_ = tcp.Close()
		return nil, err
	}
	c.empty = rec.now()
	rec.add(number, kindOpen, hub)
	go c.read()
	return c, nil
}

func (c *wsConn) upgrade(addr string) error {
	_ = c.tcp.SetDeadline(time.Now().Add(2 * time.Second))
	_, err := io.WriteString(c.tcp, "GET / HTTP/1.1\r\nHost: "+addr+"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"+
		"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
	if err != nil {
		return err
	}
	r := bufio.NewReader(c.tcp)
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		return err
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusSwitchingProtocols {
		return fmt.Errorf("upgrade: %s", resp.Status)
	}
	c.buf, _ = r.Peek(r.Buffered())
	return c.tcp.SetDeadline(time.Time{})
}

// send takes a frame down and writes it.
func (c *wsConn) send(f *wireFrame) {
	message := text(f)
	c.writing.Lock()
	defer c.writing.Unlock()
	c.rec.add(c.number, kindSent, message)
	c.write(opText, []byte(message))
}

// write sends a message. The reader notices a broken connection.
func (c *wsConn) write(op byte, message []byte) {
	_ = c.tcp.SetWriteDeadline(time.Now().Add(20 * time.Second))
	_, _ = c.tcp.Write(masked(op, message))
}

// masked frames a message with a mask of zeros, which changes nothing.
func masked(op byte, message []byte) []byte {
	out := []byte{0x80 | op}
	switch n := len(message); {
	case n < 126:
		out = append(out, 0x80|byte(n))
	case n <= 0xffff:
		out = binary.BigEndian.AppendUint16(append(out, 0x80|126), uint16(n))
	default:
		out = binary.BigEndian.AppendUint64(append(out, 0x80|127), uint64(n))
	}
	return append(append(out, 0, 0, 0, 0), message...)
}

// read takes down what comes, until the end.
func (c *wsConn) read() {
	defer close(c.ended)
	var why error
	for why == nil {
		if why = c.frames(); why != nil {
			break
		}
		why = c.fill()
	}
	c.rec.received(c.number, c.empty, kindEnd, strings.ReplaceAll(why.Error(), "\n", " "))
	_ = c.tcp.Close()
}

// fill waits for bytes, and notes each moment at which there are none.
func (c *wsConn) fill() error {
	c.gateMu.Lock()
	gate := c.gate
	c.gateMu.Unlock()
	if gate != nil {
		<-gate
	}
	var room [64 << 10]byte
	n, fault := 0, error(nil)
	err := c.raw.Read(func(fd uintptr) bool {
		for {
			n, fault = syscall.Read(int(fd), room[:])
			switch {
			case errors.Is(fault, syscall.EINTR):
				continue
			case errors.Is(fault, syscall.EAGAIN):
				c.empty = c.rec.now()
				return false
			}
			return true
		}
	})
	if err == nil {
		err = fault
	}
	if err != nil {
		return err
	}
	if n <= 0 {
		return io.EOF
	}
	c.buf = append(c.buf, room[:n]...)
	return nil
}

// frames works off the whole frames that are buffered.
func (c *wsConn) frames() error {
	for len(c.buf) >= 2 {
		head, size := 2, int(c.buf[1]&0x7f)
		switch size {
		case 126:
			head = 4
		case 127:
			head = 10
		}
		if len(c.buf) < head {
			return nil
		}
		switch head {
		case 4:
			size = int(binary.BigEndian.Uint16(c.buf[2:]))
		case 10:
			size = int(binary.BigEndian.Uint64(c.buf[2:]))
		}
		if len(c.buf) < head+size {
			return nil
		}
		op, message := c.buf[0]&0xf, bytes.Clone(c.buf[head:head+size])
		c.buf = c.buf[head+size:]
		switch op {
		case opText:
			c.rec.received(c.number, c.empty, kindGot, string(message))
			c.heard(message)
		case opPing:
			c.writing.Lock()
			c.write(opPong, message)
			c.writing.Unlock()
		case opClose:
			code := 0
			if len(message) >= 2 {
				code = int(binary.BigEndian.Uint16(message))
				message = message[2:]
			}
			return fmt.Errorf("%w: %d %s", errPeerClosed, code, message)
		}
	}
	return nil
}

// deaf stops reading until hear. A read that waits already ends with what comes first.
func (c *wsConn) deaf() {
	c.gateMu.Lock()
	defer c.gateMu.Unlock()
	if c.gate == nil {
		c.rec.add(c.number, kindDeaf, "")
		c.gate = make(chan struct{})
	}
}

func (c *wsConn) hear() {
	c.gateMu.Lock()
	defer c.gateMu.Unlock()
	if c.gate != nil {
		c.rec.add(c.number, kindHears, "")
		close(c.gate)
		c.gate = nil
	}
}

// The ways to end a connection.
const (
	endAbrupt = iota // at once: what is unread is lost
	endHalf          // by a half-close: all that the hub still writes is taken down
	endClose         // by a close frame, and as endHalf then
)

// end ends the connection.
func (c *wsConn) end(how int) {
	if how != endAbrupt {
		c.hear()
	}
	defer c.hear()
	c.closed.Do(func() {
		c.writing.Lock()
		defer c.writing.Unlock()
		switch how {
		case endAbrupt:
			c.rec.add(c.number, kindClose, "abrupt")
			_ = c.tcp.SetLinger(0)
			_ = c.tcp.Close()
		case endHalf:
			c.rec.add(c.number, kindClose, "half")
			_ = c.tcp.CloseWrite()
		case endClose:
			c.rec.add(c.number, kindClose, "frame")
			c.write(opClose, []byte{0x03, 0xe8})
			_ = c.tcp.CloseWrite()
		}
	})
}
