package facade

import (
	"bufio"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"
)

const (
	// controlBuffer holds the largest control frame of a server (2 + 125 bytes). Each control frame
	// thus reaches the wire in one Write and never splits a message.
	controlBuffer = 256
	// pongBacklog is how many bytes may wait behind a write in progress before pings go unanswered.
	// RFC 6455, section 5.5.3, lets a server answer only the latest ping.
	pongBacklog = 4 << 10
	// atOnce is the longest time that a read over TLS takes when its bytes have already arrived.
	atOnce = 20 * time.Millisecond
	// stallSteps is how often, within the stall time, a waiting write checks whether the peer has
	// taken a byte.
	stallSteps = 16
	// tlsPart is how many bytes are written at a time over TLS: the size of the largest record.
	tlsPart = 16 << 10
	// lastWrite is how long Close tries to write what is still buffered.
	lastWrite = time.Second
	// opcodeBits masks the opcode in the first byte of a frame (RFC 6455, section 5.2).
	opcodeBits  = 0x0f
	opcodeClose = 0x08
	// closeHead is how many bytes of a server's close frame precede the reason.
	closeHead = 4
	// maxPooled is the largest buffer, in bytes, that returns to the pool.
	maxPooled = 1 << 20
)

// closeNotUTF8 is a close frame with the code 1007 and no reason.
var closeNotUTF8 = []byte{0x80 | opcodeClose, 2, 1007 >> 8, 1007 & 0xff}

// errStalled is returned by wire's writes when the peer has taken no byte for the stall time.
var errStalled = errors.New("facade: write: the peer does not read")

// buffers is shared by all connections; an idle connection holds no buffer.
var buffers = sync.Pool{New: func() any { b := make([]byte, 0, 4<<10); return &b }}

func putBuffer(b *[]byte) {
	if cap(*b) > maxPooled {
		return
	}
	*b = (*b)[:0]
	buffers.Put(b)
}

// wire is the net.Conn below one WebSocket connection. It has two writers. The session sends framed
// messages through send, many at a time, because the WebSocket library would flush each of them.
// The library writes its control frames through Write; they go out at once, or along with a write
// in progress. No message follows a close frame.
//
// Read and send may each be called by one goroutine at a time. All other methods may be called
// concurrently.
type wire struct {
	net.Conn
	stall time.Duration

	reads   atomic.Uint64 // successful reads: the peer is alive
	waiting atomic.Bool   // a read waits for the peer
	readAt  time.Time     // time of the last read; owned by the reader
	arrived time.Time     // latest time at which its bytes had arrived; owned by the reader
	backlog []mark        // bytes that arrived while the reader was away; owned by the reader

	mu       sync.Mutex
	quiet    sync.Cond // signalled when flushing ends
	buf      *[]byte   // written and not yet flushed; nil when empty
	written  int64     // bytes given to Write and send since the upgrade
	accepted int64     // how many of these bytes the kernel took
	flushing bool
	parting  bool      // a close frame was written
	hurried  bool      // the deadlines are final
	due      time.Time // the deadline of writes
	closed   bool
	err      error // the first error of a write, kept
}

func newWire(stall time.Duration) *wire {
	w := &wire{stall: stall}
	w.quiet.L = &w.mu
	return w
}

// Read records that the peer is alive, and when its bytes arrived.
func (w *wire) Read(p []byte) (int, error) {
	var asked time.Time
	if len(w.backlog) > 0 {
		asked = time.Now()
	}
	w.waiting.Store(true)
	n, err := w.Conn.Read(p)
	w.waiting.Store(false)
	if n > 0 {
		w.reads.Add(1)
		w.readAt = time.Now()
		w.arrived = w.readAt
		if len(w.backlog) > 0 {
			w.arrived = w.arrival(n, asked)
		}
	}
	return n, err
}

// mark is a number of bytes, next in line to be read, and the time at which they had arrived.
type mark struct {
	bytes int
	at    time.Time
}

// away records that the reader did not read from since until now. The bytes in the socket count as
// having arrived at since, which is the worst case.
func (w *wire) away(since time.Time) {
	var n int
	if c, secure := w.Conn.(*tls.Conn); secure {
		n = received(c.NetConn()) + tlsPart // some bytes may already be decrypted
	} else {
		n = received(w.Conn)
	}
	for _, m := range w.backlog {
		n -= m.bytes
	}
	if n > 0 {
		w.backlog = append(w.backlog, mark{bytes: n, at: since})
	}
}

// arrival returns the latest time at which the n bytes that were just read had arrived, and removes
// these bytes from the backlog. asked is when the read began. Over TLS the backlog counts more
// bytes than can be read; the backlog ends when a read has to wait.
func (w *wire) arrival(n int, asked time.Time) time.Time {
	if _, secure := w.Conn.(*tls.Conn); secure && w.readAt.Sub(asked) > atOnce {
		w.backlog = nil
		return w.readAt
	}
	at := w.backlog[0].at
	for n > 0 && len(w.backlog) > 0 {
		m := &w.backlog[0]
		if m.bytes > n {
			m.bytes -= n
			break
		}
		n -= m.bytes
		w.backlog = w.backlog[1:]
	}
	return at
}

// Write buffers a control frame, and flushes unless another goroutine is flushing.
func (w *wire) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return 0, w.err
	}
	// each frame comes in one Write, see controlBuffer
	size := len(p)
	if size > 0 && p[0]&opcodeBits == opcodeClose {
		w.parting = true
		if size > closeHead && !utf8.Valid(p[closeHead:]) { // the library echoes the peer's reason
			p = closeNotUTF8
		}
	}
	if w.buf == nil {
		w.buf, _ = buffers.Get().(*[]byte)
	}
	*w.buf = append(*w.buf, p...)
	w.written += int64(len(p))
	if w.flushing {
		return size, nil
	}
	if err := w.flushLocked(); err != nil {
		return 0, err
	}
	return size, nil
}

// send hands whole messages to the kernel and does not keep p. It returns the offset on the wire at
// which p begins. It returns errStalled when the peer took no byte for the stall time.
func (w *wire) send(p []byte) (offset int64, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.flushWhenQuiet(); err != nil {
		return w.written, err
	}
	offset = w.written
	if w.parting {
		return offset, net.ErrClosed
	}
	w.written += int64(len(p))
	w.flushing = true
	w.mu.Unlock()
	n, err := w.push(p)
	w.mu.Lock()
	w.accepted += int64(n)
	if err != nil {
		w.err = err
		if errors.Is(err, errStalled) {
			w.keepLocked(p[n:])
		}
	}
	return offset, w.flushLocked() // flushes what the library wrote meanwhile
}

// keepLocked keeps the rest of a write that stalled, because truncate may still finish a frame that
// was cut. Anything behind that write is dropped.
func (w *wire) keepLocked(rest []byte) {
	if w.buf == nil {
		w.buf, _ = buffers.Get().(*[]byte)
	}
	*w.buf = append((*w.buf)[:0], rest...)
}

func (w *wire) flushWhenQuiet() error {
	for w.flushing {
		w.quiet.Wait()
	}
	return w.flushLocked()
}

// flushLocked writes the buffer. mu is held, and released during the write.
func (w *wire) flushLocked() error {
	w.flushing = true
	for w.err == nil && w.buf != nil {
		b := w.buf
		w.buf = nil
		w.mu.Unlock()
		n, err := w.push(*b)
		w.mu.Lock()
		w.accepted += int64(n)
		w.err = err
		if errors.Is(err, errStalled) {
			w.keepLocked((*b)[n:])
		}
		putBuffer(b)
	}
	w.flushing = false
	w.quiet.Broadcast()
	return w.err
}

// push writes b. It returns errStalled when the peer has taken no byte for the stall time. It
// checks stallSteps times within that time.
func (w *wire) push(b []byte) (n int, err error) {
	step, limit := w.stall/stallSteps, len(b)
	_, secure := w.Conn.(*tls.Conn)
	if secure {
		// A write that has timed out breaks a TLS connection, so each part has the whole time.
		step, limit = w.stall, tlsPart
	}
	took := time.Now() // when the peer last took a byte
	for now := took; ; now = time.Now() {
		final := w.setDeadline(now, step, secure)
		m, err := w.Conn.Write(b[n:min(len(b), n+limit)])
		n += m
		switch {
		case err == nil && n == len(b):
			return n, nil
		case err == nil: // go on with the next part
		case final || !errors.Is(err, os.ErrDeadlineExceeded):
			return n, err
		case m > 0 && !secure:
			took = time.Now()
		case (secure || time.Since(took) >= w.stall) && !w.isHurried():
			return n, errStalled
		}
	}
}

// setDeadline has a write end after step. A deadline that is set costs as much as a tenth of a
// short write: unless it must be exact, one that is at least half of step away stays.
func (w *wire) setDeadline(now time.Time, step time.Duration, exact bool) (final bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.hurried && (exact || w.due.Sub(now) < step/2) {
		w.due = now.Add(step)
		_ = w.SetWriteDeadline(w.due)
	}
	return w.hurried
}

func (w *wire) isHurried() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.hurried
}

// taken returns how many bytes the kernel has accepted.
func (w *wire) taken() int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.accepted
}

// truncate drops what was written from offset on, after a send that returned errStalled, so that a
// close frame can follow the frame that was cut. offset must be the start of a frame that the
// kernel has not accepted yet.
func (w *wire) truncate(offset int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !errors.Is(w.err, errStalled) || w.closed {
		return
	}
	w.err = nil
	*w.buf = (*w.buf)[:min(offset-w.accepted, int64(len(*w.buf)))]
	w.written = w.accepted + int64(len(*w.buf))
}

// crowded reports whether a write is in progress and more than pongBacklog bytes wait behind it.
func (w *wire) crowded() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.flushing && w.buf != nil && len(*w.buf) > pongBacklog
}

// busy reports whether a write is in progress.
func (w *wire) busy() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.flushing
}

// hurry ends all reads and writes, also those in progress, d from now. Only the first call counts.
func (w *wire) hurry(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hurryLocked(d)
}

func (w *wire) hurryLocked(d time.Duration) {
	if w.hurried {
		return
	}
	w.hurried = true
	_ = w.SetDeadline(time.Now().Add(d))
}

// Close tries for lastWrite to write what is buffered, and closes the connection.
func (w *wire) Close() error {
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		return net.ErrClosed
	}
	w.closed = true
	w.hurryLocked(lastWrite)
	if err := w.flushWhenQuiet(); err == nil {
		w.err = net.ErrClosed
	}
	if w.buf != nil {
		putBuffer(w.buf)
		w.buf = nil
	}
	w.mu.Unlock()
	return w.Conn.Close()
}

// wireHijacker gives the WebSocket library the wire instead of the bare connection.
type wireHijacker struct {
	http.ResponseWriter
	wire *wire
}

// Hijack keeps net/http's reader, which may hold a client's first frames. It replaces net/http's
// writer with a small one that writes to the wire.
func (h *wireHijacker) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, brw, err := http.NewResponseController(h.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	h.wire.Conn = conn
	return h.wire, bufio.NewReadWriter(brw.Reader, bufio.NewWriterSize(h.wire, controlBuffer)), nil
}
