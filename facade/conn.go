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
)

const (
	// controlBuffer holds the largest control frame of a server (2 + 125 bytes), so that each arrives at the wire in
	// one Write and never splits a frame of ours.
	controlBuffer = 256
	// pongBacklog is how many bytes may wait behind a write that is under way before pings go unanswered. RFC 6455
	// section 5.5.3 lets a server answer only the latest ping.
	pongBacklog = 4 << 10
	// atOnce is how long a read over TLS takes at most when the bytes are there already.
	atOnce = 20 * time.Millisecond
	// stallSteps is how often a write that waits looks whether the peer has taken something, within
	// the stall time.
	stallSteps = 16
	// tlsPart is how many bytes are written at a time over TLS: what the largest record holds.
	tlsPart = 16 << 10
	// lastWrite is how long Close tries to get rid of what is still held back.
	lastWrite = time.Second
	// opcodeBits of a frame's first byte are its opcode (RFC 6455, section 5.2).
	opcodeBits  = 0x0f
	opcodeClose = 0x08
	// maxPooled is the largest buffer that goes back to the pool.
	maxPooled = 1 << 20
)

// errStalled is returned by wire's writes when the peer has taken no byte for the stall time.
var errStalled = errors.New("facade: the peer does not read")

// buffers are shared by all connections: an idle one holds none.
var buffers = sync.Pool{New: func() any { b := make([]byte, 0, 4<<10); return &b }}

func putBuffer(b *[]byte) {
	if cap(*b) > maxPooled {
		return
	}
	*b = (*b)[:0]
	buffers.Put(b)
}

// wire is the net.Conn below one WebSocket connection. It is written to from two sides: messages come framed and many at a
// time through send, because the WebSocket library would flush each of them; Write is what the library uses for its
// control frames, which go out at once, or along with a write that is under way. No message follows a close frame.
//
// Read and send are for one goroutine at a time each; everything else may be called concurrently.
type wire struct {
	net.Conn
	stall time.Duration

	reads   atomic.Uint64 // successful reads: the peer is alive
	waiting atomic.Bool   // a read waits for the peer
	readAt  time.Time     // when the last one came, for all frames in it; the reader's own
	arrived time.Time     // when that had arrived at the latest; the reader's own
	backlog []mark        // what had arrived and was not read while the reader was away; its own

	mu       sync.Mutex
	quiet    sync.Cond // signalled when flushing ends
	buf      *[]byte   // written and not yet flushed; nil when there is nothing
	written  int64     // bytes given to Write and send since the upgrade
	accepted int64     // bytes of them that the kernel took
	flushing bool
	parting  bool // a close frame was written
	hurried  bool // the deadlines are final
	closed   bool
	err      error // the first error of a write, kept
}

func newWire(stall time.Duration) *wire {
	w := &wire{stall: stall}
	w.quiet.L = &w.mu
	return w
}

// Read notes that the peer is alive, and when what it sent has arrived.
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

// mark says that so many of the next bytes had arrived at a moment.
type mark struct {
	bytes int
	at    time.Time
}

// away notes that the reader did not read from since until now: what lies in the socket has arrived
// then, at the worst.
func (w *wire) away(since time.Time) {
	var n int
	if c, secure := w.Conn.(*tls.Conn); secure {
		n = received(c.NetConn()) + tlsPart // some of it may have been decrypted
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

// arrival returns when the n bytes that were just read had arrived at the latest, and takes them
// off the backlog. asked is when the read began. Over TLS the backlog counts more bytes than there
// are to read; it is over when a read has to wait.
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

// Write takes a control frame, and flushes unless another goroutine does already.
func (w *wire) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return 0, w.err
	}
	if len(p) > 0 && p[0]&opcodeBits == opcodeClose { // each frame comes in one Write, see controlBuffer
		w.parting = true
	}
	if w.buf == nil {
		w.buf, _ = buffers.Get().(*[]byte)
	}
	*w.buf = append(*w.buf, p...)
	w.written += int64(len(p))
	if w.flushing {
		return len(p), nil
	}
	if err := w.flushLocked(); err != nil {
		return 0, err
	}
	return len(p), nil
}

// send hands whole messages to the kernel; p is not kept. It returns the offset on the wire at which p begins, and
// errStalled when the peer took nothing for the stall time.
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
	return offset, w.flushLocked() // what the library wrote meanwhile
}

// keepLocked keeps what is left of a write that stalled: truncate may still want to finish a frame that was cut. What was
// to follow is forgotten.
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

// flushLocked is called with mu held, and gives it up while it writes.
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

// push writes b. It returns errStalled when the peer has taken no byte for the stall time, which it
// looks at stallSteps times within that.
func (w *wire) push(b []byte) (n int, err error) {
	step, limit := w.stall/stallSteps, len(b)
	_, secure := w.Conn.(*tls.Conn)
	if secure {
		// A write that has timed out breaks a TLS connection, so each part has the whole time.
		step, limit = w.stall, tlsPart
	}
	took := time.Now() // when the peer took a byte last
	for now := took; ; now = time.Now() {
		final := w.setDeadline(now.Add(step))
		m, err := w.Conn.Write(b[n:min(len(b), n+limit)])
		n += m
		switch {
		case err == nil && n == len(b):
			return n, nil
		case err == nil: // the next part
		case final || !errors.Is(err, os.ErrDeadlineExceeded):
			return n, err
		case m > 0 && !secure:
			took = time.Now()
		case (secure || time.Since(took) >= w.stall) && !w.isHurried():
			return n, errStalled
		}
	}
}

func (w *wire) setDeadline(at time.Time) (final bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.hurried {
		_ = w.SetWriteDeadline(at)
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

// truncate forgets what was written from offset on, after a send that returned errStalled, so that a close frame can
// follow the frame that was cut. offset must be the start of a frame, and not be accepted yet.
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

// crowded reports that a write is under way and enough waits behind it.
func (w *wire) crowded() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.flushing && w.buf != nil && len(*w.buf) > pongBacklog
}

// busy reports that a write is under way.
func (w *wire) busy() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.flushing
}

// hurry gives all reads and writes, those under way too, until d from now. Only the first call counts.
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

// Close tries for a moment to write what is held back, and closes the connection.
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

// wireHijacker gives the WebSocket library the wire in place of the bare connection.
type wireHijacker struct {
	http.ResponseWriter
	wire *wire
}

// Hijack keeps net/http's reader, which may hold a client's first frames, and replaces its writer by a small one that
// writes to the wire.
func (h *wireHijacker) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, brw, err := http.NewResponseController(h.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	h.wire.Conn = conn
	return h.wire, bufio.NewReadWriter(brw.Reader, bufio.NewWriterSize(h.wire, controlBuffer)), nil
}
