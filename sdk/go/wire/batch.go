package wire

import (
	crand "crypto/rand"
	"math/rand/v2"
	"net"
	"runtime"
	"sync"
	"time"

	"eventhub/facade/textmsg"
)

// Bounds of what waits to be sent.
const (
	// softBuffer is how many bytes may wait before publishes wait.
	softBuffer = 4 << 20
	// hardBuffer is how many bytes may wait before the connection is closed. Only acks and requests
	// reach this bound.
	hardBuffer = 64 << 20
	// keepBuffer is the largest buffer, in bytes, that is reused.
	keepBuffer = 1 << 20
	// lastWrite bounds the last write of a connection that is being closed.
	lastWrite = time.Second
)

// batchConn is a net.Conn that batches writes. The WebSocket library flushes each message, and a
// system call for each would cost more than everything else. Messages are therefore framed right
// into the batch (message), and the library writes only its control frames. One goroutine sends the
// batch, after yielding once to goroutines that are about to write. Only patient messages wait: a
// handler's ack cannot block the reader.
type batchConn struct {
	net.Conn
	flushed chan struct{} // closed when the flusher has ended

	mu      sync.Mutex
	more    sync.Cond // there is something to send, or the connection ended
	below   sync.Cond // buf is below softBuffer again, or the connection ended
	started bool
	closed  bool
	parting bool // a close frame is in the batch: no message follows it
	err     error
	buf     []byte
	spare   []byte
	keys    *rand.ChaCha8 // masks messages; RFC 6455, section 5.3, requires unpredictable keys
}

func newBatchConn(conn net.Conn) *batchConn {
	var seed [32]byte
	_, _ = crand.Read(seed[:]) // never fails
	b := &batchConn{Conn: conn, flushed: make(chan struct{}), keys: rand.NewChaCha8(seed)}
	b.more.L, b.below.L = &b.mu, &b.mu
	return b
}

// start begins batching. Before it, during the handshake, writes go straight through.
func (b *batchConn) start() {
	b.mu.Lock()
	b.started = true
	b.mu.Unlock()
	go b.flushLoop() // owned by Close, which waits for flushed
}

// Write implements net.Conn. It copies p and does not wait for the network.
func (b *batchConn) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.started {
		return b.Conn.Write(p)
	}
	if err := b.openLocked(); err != nil {
		return 0, err
	}
	// RFC 6455, section 5.2; each control frame comes in one Write
	b.parting = b.parting || len(p) > 0 && p[0]&0x0f == 0x08
	b.buf = append(b.buf, p...)
	return len(p), b.gatheredLocked(len(b.buf) - len(p))
}

// message adds a text message, which build appends to its argument, to the batch. It does not wait
// for the network, but a patient message waits while softBuffer bytes or more are unsent. If
// message returns an error, no part of the message will be sent.
func (b *batchConn) message(build func([]byte) []byte, patient bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for patient && len(b.buf) >= softBuffer && b.openLocked() == nil {
		b.below.Wait()
	}
	if err := b.openLocked(); err != nil {
		return err
	}
	if b.parting {
		return net.ErrClosed
	}
	start := len(b.buf)
	b.buf = textmsg.EndMasked(build(textmsg.BeginMasked(b.buf)), start, uint32(b.keys.Uint64())) //nolint:gosec // any 32 bits
	return b.gatheredLocked(start)
}

// openLocked returns nil while the batch accepts bytes.
func (b *batchConn) openLocked() error {
	if b.err != nil {
		return b.err
	}
	if b.closed {
		return net.ErrClosed
	}
	return nil
}

// gatheredLocked wakes the flusher for the bytes from start on, or closes the connection when the
// batch is too large.
func (b *batchConn) gatheredLocked(start int) error {
	if len(b.buf) > hardBuffer {
		b.buf = b.buf[:start]
		b.err = ErrStalled
		b.below.Broadcast()
		return b.err
	}
	if start == 0 {
		b.more.Signal()
	}
	return nil
}

func (b *batchConn) flushLoop() {
	defer close(b.flushed)
	for {
		b.mu.Lock()
		for len(b.buf) == 0 && !b.closed && b.err == nil {
			b.more.Wait()
		}
		closed := b.closed
		b.mu.Unlock()
		if !closed {
			runtime.Gosched() // goroutines that are about to write join this batch
		}

		b.mu.Lock()
		out := b.buf
		b.buf, b.spare = b.spare[:0], nil
		over := len(out) == 0 || b.err != nil
		b.below.Broadcast()
		b.mu.Unlock()
		if over {
			return
		}

		_, err := b.Conn.Write(out)
		b.mu.Lock()
		if err != nil && b.err == nil {
			b.err = err
			b.below.Broadcast()
		}
		if cap(out) <= keepBuffer {
			b.spare = out[:0]
		}
		b.mu.Unlock()
	}
}

// Close sends the unsent bytes, for at most lastWrite, and closes the connection. It may be called
// twice.
func (b *batchConn) Close() error {
	b.mu.Lock()
	b.closed = true
	started := b.started
	b.more.Signal()
	b.below.Broadcast()
	b.mu.Unlock()
	if started {
		// An error here means that the connection is closed, and then the flusher ends at once.
		_ = b.Conn.SetWriteDeadline(time.Now().Add(lastWrite))
		<-b.flushed
	}
	return b.Conn.Close()
}

// abort closes the connection without sending the unsent bytes. It may be called at any time, and
// twice.
func (b *batchConn) abort() {
	// Closing the connection under the flusher makes its write fail.
	_ = b.Conn.Close()
	_ = b.Close()
}
