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

	natsserver "github.com/nats-io/nats-server/v2/server"

	"eventhub/jetstream/panics"
	"eventhub/jetstream/quota"
)

const (
	// guardFirst is how much of a client is read at a time, and guardAnswers how much of the
	// server, doubled up to guardMost while reads fill the buffer.
	guardFirst   = 2 << 10
	guardAnswers = 8 << 10
	guardMost    = 64 << 10
	// guardWait bounds the first line of the server, the time until CONNECT has come, that of the
	// TLS handshake included, and each write to a client. A client that reads more slowly is
	// disconnected, as the server itself would do.
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
//
// The guard connects to the server when CONNECT has come, so that a stranger who sends nothing
// costs one descriptor and one goroutine.
type guard struct {
	server   *Server
	listener net.Listener
	ctx      context.Context
	end      context.CancelFunc
	wg       sync.WaitGroup

	greeting greeting

	mu    sync.Mutex
	conns map[guardedID]*guarded
	room  guardRoom
}

// guardedID is a connection as the server names it.
type guardedID struct {
	server string
	id     uint64
}

// guarded is the connection of a client.
type guarded struct {
	conn    net.Conn
	address string
	place   guardPlace
	// ctx ends when both connections must end.
	ctx context.Context
	end context.CancelFunc
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
	g := &guard{server: e, listener: l, conns: make(map[guardedID]*guarded), room: newGuardRoom(e.cfg.Clients, e.cfg.Strangers), greeting: greeting{turn: make(chan struct{}, 1)}}
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
				g.server.often.Log(g.ctx, slog.LevelWarn, "failed to accept a native client; retrying", "", slog.Any("error", err))
				select {
				case <-time.After(guardAcceptWait):
				case <-g.ctx.Done():
				}
			default:
				g.accept(conn)
			}
		}
	})
}

// accept serves a client, or closes its connection when there is no room.
func (g *guard) accept(conn net.Conn) {
	c := &guarded{conn: conn, admitted: make(chan struct{}), ended: make(chan struct{})}
	c.address, _, _ = net.SplitHostPort(conn.RemoteAddr().String())
	c.ctx, c.end = context.WithCancel(g.ctx)
	g.mu.Lock()
	over, limit := g.room.enter(c, time.Now())
	g.mu.Unlock()
	if over != nil {
		g.reached(limit)
		over.end()
	}
	if over == c {
		_ = conn.Close()
		return
	}
	g.wg.Go(func() {
		defer func() {
			c.end()
			_ = conn.Close()
			g.mu.Lock()
			defer g.mu.Unlock()
			g.room.leave(c)
		}()
		if err := panics.Call(g.server.often.By("func"), "native client", func() error { return g.serve(c) }); err != nil {
			g.server.cfg.Logger.Debug("a native client was disconnected", slog.Any("error", err))
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

// reached counts and logs that a limit was reached.
func (g *guard) reached(limit string) {
	g.server.cfg.LimitReached(limit)
	g.server.often.Log(g.ctx, slog.LevelWarn, "native clients have reached a limit; closing the connection of one", limit, slog.String("limit", limit))
}

// admit lets a client of a principal do what its permissions say, or ends its connection if the
// principal has too many.
func (g *guard) admit(id guardedID, inbox, owner string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	c := g.conns[id]
	if c == nil {
		return
	}
	select {
	case <-c.admitted:
		return
	default:
	}
	if !g.room.admit(c, owner) {
		g.reached(limitClients)
		c.end()
		return
	}
	c.inbox = inbox
	close(c.admitted)
}

// serve connects a client to the server until either ends.
func (g *guard) serve(c *guarded) error {
	stop := context.AfterFunc(c.ctx, func() { _ = c.conn.Close() })
	defer stop()
	info, err := g.greeting.to(c.ctx, g.server, c.address)
	if err != nil {
		return err
	}
	_ = c.conn.SetDeadline(time.Now().Add(guardWait))
	if _, err := c.conn.Write(info); err != nil {
		return err
	}
	client := c.conn
	if g.server.cfg.TLS != nil {
		secured := tls.Server(client, g.server.cfg.TLS)
		if err := secured.HandshakeContext(c.ctx); err != nil {
			return err
		}
		client = secured
	}
	var server net.Conn
	var down sync.WaitGroup
	err = g.up(c, client, func() (net.Conn, error) {
		var id guardedID
		var answers *bufio.Reader
		var err error
		if server, answers, id, err = g.connect(c.ctx); err != nil {
			return nil, err
		}
		g.mu.Lock()
		g.room.connected(c)
		g.conns[id] = c
		g.mu.Unlock()
		_ = client.SetDeadline(time.Time{})
		down.Go(func() {
			defer func() {
				g.mu.Lock()
				delete(g.conns, id)
				g.mu.Unlock()
			}()
			err := panics.Call(g.server.often.By("func"), "answers to a native client", func() error {
				c.down(client, answers)
				return nil
			})
			if err != nil {
				_ = client.Close()
			}
		})
		return server, nil
	})
	if server == nil {
		return err
	}
	_ = server.Close()
	down.Wait()
	// Closed with unread bytes, the connection would be reset, and the last words lost.
	_, _ = io.Copy(io.Discard, client)
	return err
}

// connect connects to the server and reads its first line. The connection ends with ctx.
func (g *guard) connect(ctx context.Context) (server net.Conn, answers *bufio.Reader, id guardedID, err error) {
	if server, err = g.server.dial(ctx, "tcp", ""); err != nil {
		return nil, nil, id, err
	}
	context.AfterFunc(ctx, func() { _ = server.Close() })
	answers = bufio.NewReaderSize(server, guardAnswers)
	_ = server.SetReadDeadline(time.Now().Add(guardWait))
	fields, err := readInfo(answers)
	if err == nil {
		err = errors.Join(json.Unmarshal(fields["server_id"], &id.server), json.Unmarshal(fields["client_id"], &id.id))
	}
	if err == nil && (id.server == "" || id.id == 0) {
		err = errors.New("the server does not name the connection")
	}
	if err != nil {
		_ = server.Close()
		return nil, nil, id, err
	}
	_ = server.SetReadDeadline(time.Time{})
	return server, answers, id, nil
}

// readInfo reads the first line of the server.
func readInfo(server *bufio.Reader) (fields map[string]json.RawMessage, err error) {
	text, err := server.ReadSlice('\n')
	if err != nil {
		return nil, err
	}
	text, ok := bytes.CutPrefix(text, []byte("INFO "))
	if !ok {
		return nil, errors.New("the server does not begin with INFO")
	}
	return fields, json.Unmarshal(text, &fields)
}

// greeting is the first line for clients: that of the server, without what is about one connection.
type greeting struct {
	turn   chan struct{}      // of one: who may ask the server
	server *natsserver.Server // whose line it is
	fields map[string]json.RawMessage
}

// to returns the line for a client. The first client of a server waits until the server has been
// asked, and others wait with it.
func (l *greeting) to(ctx context.Context, e *Server, address string) ([]byte, error) {
	select {
	case l.turn <- struct{}{}:
		defer func() { <-l.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	current := e.server.Load()
	if current == nil {
		return nil, errRestarting
	}
	if l.server != current {
		conn, err := e.dial(ctx, "tcp", "")
		if err != nil {
			return nil, err
		}
		defer func() { _ = conn.Close() }()
		defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
		_ = conn.SetReadDeadline(time.Now().Add(guardWait))
		fields, err := readInfo(bufio.NewReaderSize(conn, guardAnswers))
		if err != nil {
			return nil, err
		}
		delete(fields, "client_id")
		delete(fields, "nonce") // no client authenticates with a key
		if e.cfg.TLS != nil {
			fields["tls_required"] = json.RawMessage("true")
		}
		l.server, l.fields = current, fields
	}
	var err error
	if l.fields["client_ip"], err = json.Marshal(address); err != nil {
		return nil, err
	}
	text, err := json.Marshal(l.fields)
	return fmt.Appendf(nil, "INFO %s\r\n", text), err
}

// errEnded says that the server has ended the connection of a client.
var errEnded = errors.New("the server has ended the connection")

// unknownOperation is what a server answers to what it does not know, before it disconnects.
const unknownOperation = "-ERR 'Unknown Protocol Operation'\r\n"

// up passes what the client sends. It connects to the server when CONNECT has come.
func (g *guard) up(c *guarded, client io.ReadWriter, connect func() (net.Conn, error)) error {
	var server net.Conn
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
			if server == nil && passed > 0 {
				if server, err = connect(); err != nil {
					return err
				}
			}
			if len(lines.inbox) > 0 {
				if err := g.pay(c, lines.spent, passed); err != nil {
					return err
				}
			}
			lines.spent = guardSpent{}
			if passed > 0 {
				if _, err := server.Write(buf[done : done+passed]); err != nil {
					return err
				}
				done += passed
			}
			if state == guardMore {
				break
			}
			if state == guardPaused {
				continue
			}
			if state == guardRefused {
				if _, err := server.Write(lines.instead); err != nil {
					return err
				}
				done += lines.refused
				continue
			}
			if state == guardConnected {
				select {
				case <-c.admitted:
					lines.inbox = []byte(c.inbox)
				case <-c.ended:
					return nil
				case <-c.ctx.Done():
					return c.ctx.Err()
				}
				continue
			}
			if server == nil {
				_, err := io.WriteString(client, unknownOperation)
				return err
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

// pay takes what a client sends from the rates of its principal, and waits until it is there. The
// server may end the connection meanwhile.
func (g *guard) pay(c *guarded, spent guardSpent, bytes int) error {
	rates, wait := &g.server.cfg.Rates, time.Duration(0)
	for _, of := range [...]struct {
		rate  *quota.Set
		n     int
		limit string
	}{
		{rates.Messages, spent.messages, limitMessages},
		{rates.Requests, spent.requests, limitRequests},
		{rates.Settles, spent.settles, limitSettles},
		{rates.Bytes, bytes, limitBytes},
	} {
		until := of.rate.Spend(c.place.owner, of.n)
		if until > 0 {
			g.server.cfg.LimitReached(of.limit)
			g.server.often.Log(c.ctx, slog.LevelInfo, "a native client has reached a limit; reading more slowly what its connections send", of.limit+" "+c.place.owner,
				slog.String("limit", of.limit), slog.String("client", c.place.owner))
		}
		wait = max(wait, until)
	}
	if wait == 0 {
		return nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-c.ended:
		return errEnded
	case <-c.ctx.Done():
		return c.ctx.Err()
	}
}

// down passes what the server answers. When the server ends the connection, the client has some
// time to read the last words.
func (c *guarded) down(client net.Conn, server io.Reader) {
	defer close(c.ended)
	buf := make([]byte, guardAnswers)
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
