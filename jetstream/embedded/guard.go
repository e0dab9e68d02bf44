package embedded

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"eventhub/jetstream/panics"
)

const (
	// guardFirst is how much of a connection is read at a time, doubled up to guardMost while reads
	// fill the buffer. The first size holds a line of maxControlLine.
	guardFirst = 8 << 10
	guardMost  = 64 << 10
	// guardWait bounds the first line of the server, the TLS handshake, and each write to a client.
	// A client that reads more slowly is disconnected, as the server itself would do.
	guardWait = 10 * time.Second
	// guardLinger is how long a client that the server has disconnected may take to read why.
	guardLinger = time.Second
	// guardAcceptWait is the pause after a connection could not be accepted.
	guardAcceptWait = 100 * time.Millisecond
)

// guard accepts native clients in place of the server, and connects each one to the server, which
// listens on loopback. It removes reply subjects from requests that are not below the inbox of the
// client, because the server does not check them: the server would send its answer, or the events
// that the client pulls, to any subject of the account.
type guard struct {
	server   *Server
	listener net.Listener
	ctx      context.Context
	end      context.CancelFunc
	wg       sync.WaitGroup

	mu    sync.Mutex
	conns map[guardedID]*guarded
}

// guardedID is a connection as the server names it.
type guardedID struct {
	server string
	id     uint64
}

// guarded is the connection of a client.
type guarded struct {
	address string
	// admitted is closed when the client may do what its permissions say.
	admitted chan struct{}
	// inbox is what reply subjects must begin with, if not empty. Set before admitted is closed.
	inbox string
	// ended is closed when the server has ended the connection.
	ended chan struct{}
}

// newGuard begins to listen. Run accepts the clients.
func newGuard(ctx context.Context, e *Server) (*guard, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", e.cfg.Listen)
	if err != nil {
		return nil, &placeError{ErrListen, fmt.Sprintf("%s: %v: choose another", e.cfg.Listen, innermost(err)), err}
	}
	g := &guard{server: e, listener: l, conns: make(map[guardedID]*guarded)}
	g.ctx, g.end = context.WithCancel(context.WithoutCancel(ctx))
	return g, nil
}

// url is the address at which clients reach the guard.
func (g *guard) url() string {
	scheme := "nats://"
	if g.server.cfg.TLS != nil {
		scheme = "tls://"
	}
	host, _, _ := net.SplitHostPort(g.server.cfg.Listen) // was checked
	_, port, _ := net.SplitHostPort(g.listener.Addr().String())
	return scheme + net.JoinHostPort(host, port)
}

// run accepts clients until close.
func (g *guard) run() {
	g.wg.Go(func() {
		for {
			conn, err := g.listener.Accept()
			switch {
			case g.ctx.Err() != nil:
				if err == nil {
					_ = conn.Close()
				}
				return
			case err != nil:
				g.server.cfg.Logger.Warn("failed to accept a native client; retrying", slog.Any("error", err))
				select {
				case <-time.After(guardAcceptWait):
				case <-g.ctx.Done():
				}
			default:
				g.wg.Go(func() {
					defer func() { _ = conn.Close() }()
					err := panics.Call(g.server.cfg.Logger, "native client", func() error { return g.serve(conn) })
					if err != nil {
						g.server.cfg.Logger.Debug("a native client was disconnected", slog.Any("error", err))
					}
				})
			}
		}
	})
}

// close ends all connections, and waits for their end. It may be called twice.
func (g *guard) close() {
	g.end()
	_ = g.listener.Close()
	g.wg.Wait()
}

// origin returns the address of a client.
func (g *guard) origin(id guardedID) (address string, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	c := g.conns[id]
	if c == nil {
		return "", false
	}
	return c.address, true
}

// admit lets a client do what its permissions say.
func (g *guard) admit(id guardedID, inbox string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c := g.conns[id]; c != nil {
		select {
		case <-c.admitted:
		default:
			c.inbox = inbox
			close(c.admitted)
		}
	}
}

// serve connects a client to the server until either ends.
func (g *guard) serve(client net.Conn) error {
	server, err := g.server.dial(g.ctx, "tcp", "")
	if err != nil {
		return err
	}
	defer func() { _ = server.Close() }()
	stop := context.AfterFunc(g.ctx, func() {
		_ = client.Close()
		_ = server.Close()
	})
	defer stop()
	address, _, err := net.SplitHostPort(client.RemoteAddr().String())
	if err != nil {
		return err
	}
	c := &guarded{address: address, admitted: make(chan struct{}), ended: make(chan struct{})}
	answers := bufio.NewReaderSize(server, guardFirst)
	_ = server.SetReadDeadline(time.Now().Add(guardWait))
	info, id, err := readInfo(answers, address, g.server.cfg.TLS != nil)
	if err != nil {
		return err
	}
	_ = server.SetReadDeadline(time.Time{})
	g.mu.Lock()
	g.conns[id] = c
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		delete(g.conns, id)
		g.mu.Unlock()
	}()
	_ = client.SetDeadline(time.Now().Add(guardWait))
	if _, err := client.Write(info); err != nil {
		return err
	}
	if g.server.cfg.TLS != nil {
		secured := tls.Server(client, g.server.cfg.TLS)
		if err := secured.HandshakeContext(g.ctx); err != nil {
			return err
		}
		client = secured
	}
	_ = client.SetDeadline(time.Time{})
	var down sync.WaitGroup
	down.Go(func() {
		err := panics.Call(g.server.cfg.Logger, "answers to a native client", func() error {
			c.down(client, answers)
			return nil
		})
		if err != nil {
			_ = client.Close()
		}
	})
	err = c.up(client, server)
	_ = server.Close()
	down.Wait()
	// Closed with unread bytes, the connection would be reset, and the last words lost.
	_, _ = io.Copy(io.Discard, client)
	return err
}

// readInfo reads the first line of the server, and returns that of the guard and the name of the
// connection.
func readInfo(server *bufio.Reader, address string, secure bool) (line []byte, id guardedID, err error) {
	text, err := server.ReadSlice('\n')
	if err != nil {
		return nil, id, err
	}
	text, ok := bytes.CutPrefix(text, []byte("INFO "))
	if !ok {
		return nil, id, errors.New("the server does not begin with INFO")
	}
	var named struct {
		Server string `json:"server_id"`
		ID     uint64 `json:"client_id"`
	}
	fields := make(map[string]json.RawMessage)
	if err := errors.Join(json.Unmarshal(text, &named), json.Unmarshal(text, &fields)); err != nil {
		return nil, id, err
	}
	if named.Server == "" || named.ID == 0 {
		return nil, id, errors.New("the server does not name the connection")
	}
	if fields["client_ip"], err = json.Marshal(address); err != nil {
		return nil, id, err
	}
	if secure {
		fields["tls_required"] = json.RawMessage("true")
	}
	text, err = json.Marshal(fields)
	return fmt.Appendf(nil, "INFO %s\r\n", text), guardedID{named.Server, named.ID}, err
}

// up passes what the client sends.
func (c *guarded) up(client io.Reader, server io.Writer) error {
	buf, held := make([]byte, guardFirst), 0
	var lines guardLines
	for {
		n, err := client.Read(buf[held:])
		if err != nil {
			return err
		}
		full := held+n == len(buf)
		held += n
		done := 0
		for done < held {
			passed, state := lines.pass(buf[done:held])
			if passed > 0 {
				if _, err := server.Write(buf[done : done+passed]); err != nil {
					return err
				}
				done += passed
			}
			if state == guardMore {
				break
			}
			if state == guardConnected {
				select {
				case <-c.admitted:
					lines.inbox = []byte(c.inbox)
				case <-c.ended:
					return nil
				}
				continue
			}
			// The server knows no such operation, says so after what it still has to say, and
			// disconnects.
			_, err := io.WriteString(server, "?\r\n")
			<-c.ended
			return err
		}
		if held -= done; held > 0 {
			copy(buf, buf[done:done+held])
		}
		if full && len(buf) < guardMost {
			grown := make([]byte, 2*len(buf))
			copy(grown, buf[:held])
			buf = grown
		}
	}
}

// down passes what the server answers. When the server ends the connection, the client has some
// time to read the last words.
func (c *guarded) down(client net.Conn, server io.Reader) {
	defer close(c.ended)
	buf := make([]byte, guardFirst)
	for {
		n, err := server.Read(buf)
		if n > 0 {
			_ = client.SetWriteDeadline(time.Now().Add(guardWait))
			if _, err := client.Write(buf[:n]); err != nil {
				_ = client.Close()
				return
			}
			if n == len(buf) && n < guardMost {
				buf = make([]byte, 2*n)
			}
		}
		if err != nil {
			break
		}
	}
	_ = client.SetReadDeadline(time.Now().Add(guardLinger))
	if half, ok := client.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
	}
}
