package facade

import (
	"bufio"
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
	// lastWrite is how long Close tries to get rid of what is still held back.
	lastWrite = time.Second
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

// wire is the net.Conn below one WebSocket connection. The WebSocket library flushes after each message; while the wire
// is corked it holds back what it is given, so that many messages reach the kernel in one call. What is written while it
// is not corked (pongs, close frames) goes out at once, or along with a write that is under way.
//
// Read is for one goroutine at a time; everything else may be called concurrently.
type wire struct {
	net.Conn
	stall time.Duration

	reads   atomic.Uint64 // successful reads: the peer is alive
	waiting atomic.Bool   // a read waits for the peer

	mu       sync.Mutex
	quiet    sync.Cond // signalled when flushing ends
	buf      *[]byte   // written and not yet flushed; nil when there is nothing
	written  int64     // bytes given to Write since the upgrade
	accepted int64     // bytes of them that the kernel took
	corked   bool
	flushing bool
	hurried  bool // the deadlines are final
	closed   bool
	err      error // the first error of a write, kept
}

func newWire(stall time.Duration) *wire {
	w := &wire{stall: stall}
	w.quiet.L = &w.mu
	return w
}

// Read notes that the peer is alive.
func (w *wire) Read(p []byte) (int, error) {
	w.waiting.Store(true)
	n, err := w.Conn.Read(p)
	w.waiting.Store(false)
	if n > 0 {
		w.reads.Add(1)
	}
	return n, err
}

// Write takes p, and flushes unless the wire is corked or another goroutine flushes already.
func (w *wire) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return 0, w.err
	}
	if w.buf == nil {
		w.buf, _ = buffers.Get().(*[]byte)
	}
	*w.buf = append(*w.buf, p...)
	w.written += int64(len(p))
	if w.corked || w.flushing {
		return len(p), nil
	}
	if err := w.flushLocked(); err != nil {
		return 0, err
	}
	return len(p), nil
}

// cork makes Write hold back until uncork or flush.
func (w *wire) cork() {
	w.mu.Lock()
	w.corked = true
	w.mu.Unlock()
}

// uncork ends cork and flushes.
func (w *wire) uncork() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.corked = false
	return w.flushWhenQuiet()
}

// flush hands everything held back to the kernel. It returns errStalled when the peer took nothing for the stall time.
func (w *wire) flush() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.flushWhenQuiet()
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
			// truncate may still want to finish a frame that was cut.
			if w.buf != nil {
				putBuffer(w.buf)
			}
			*b = (*b)[n:]
			w.buf = b
			break
		}
		putBuffer(b)
	}
	w.flushing = false
	w.quiet.Broadcast()
	return w.err
}

// push writes b. The deadline is for progress, not for the whole of b.
func (w *wire) push(b []byte) (n int, err error) {
	for {
		final := w.setDeadline()
		m, err := w.Conn.Write(b[n:])
		n += m
		switch {
		case err == nil:
			return n, nil
		case final || !errors.Is(err, os.ErrDeadlineExceeded):
			return n, err
		case m == 0 && !w.isHurried():
			return n, errStalled
		}
	}
}

func (w *wire) setDeadline() (final bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.hurried {
		_ = w.SetWriteDeadline(time.Now().Add(w.stall))
	}
	return w.hurried
}

func (w *wire) isHurried() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.hurried
}

// mark returns the offset of the next byte written and how many bytes are held back.
func (w *wire) mark() (offset int64, held int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.buf != nil {
		held = len(*w.buf)
	}
	return w.written, held
}

// taken returns how many bytes the kernel has accepted.
func (w *wire) taken() int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.accepted
}

// truncate forgets what was written from offset on, after a flush that returned errStalled, and uncorks, so that a close
// frame can follow the frame that was cut. offset must be the start of a frame, and not be accepted yet.
func (w *wire) truncate(offset int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !errors.Is(w.err, errStalled) || w.closed {
		return
	}
	w.err = nil
	w.corked = false
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
