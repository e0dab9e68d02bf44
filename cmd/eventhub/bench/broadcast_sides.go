package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"

	psutil "github.com/shirou/gopsutil/v4/process"

	"eventhub/jetstream/natstest/freeport"
)

// castHub broadcasts a topic of a hub.
type castHub struct {
	sys       *system
	topic     string
	publisher publisher
	payload   []byte
	sent      int
}

// newCastHub connects the publisher. before is how many events the topic has at first.
func newCastHub(ctx context.Context, b *run, size, before int) (*castHub, error) {
	b.count++
	h := &castHub{sys: b.sys, topic: fmt.Sprintf("bench.broadcast.%s.%d", b.id, b.count), payload: newPayload(size)}
	var err error
	if h.publisher, err = b.sys.newPublisher(ctx, viaWS, publishing{topic: h.topic, inFlight: 1000, batch: 1}, nil); err != nil {
		return nil, err
	}
	if err := h.send(ctx, before); err != nil {
		return nil, errors.Join(err, h.close())
	}
	return h, nil
}

func (h *castHub) open(ctx context.Context) (*rawSocket, error) {
	s, err := h.connect(ctx, h.sys.bearer)
	if err != nil {
		return nil, err
	}
	if err := s.ask(h.subscribe(""), `"corr":2`, `"op":"ERR"`); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// connect opens a socket that has not subscribed.
func (h *castHub) connect(ctx context.Context, token string) (*rawSocket, error) {
	s, err := dialRaw(ctx, h.sys.wsURL)
	if err != nil {
		return nil, err
	}
	if err := s.ask(fmt.Sprintf(`{"op":"AUTH","token":%q,"corr":1}`, token), `"corr":1`, `"op":"ERR"`); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// subscribe is a SUBSCRIBE with further options, as JSON members that each begin with a comma.
func (h *castHub) subscribe(options string) string {
	return fmt.Sprintf(`{"op":"SUBSCRIBE","topic":%q,"opts":{"mode":"broadcast"%s},"corr":2}`, h.topic, options)
}

func (h *castHub) send(ctx context.Context, n int) error {
	for range n {
		if err := h.sendDue(now()); err != nil {
			return err
		}
	}
	if n > 100 { // the topic is filled
		return h.publisher.drain(ctx)
	}
	return nil
}

func (h *castHub) pids() []int32 { return h.sys.hubPIDs }
func (h *castHub) close() error  { return h.publisher.close() }

// castFloor is a process that writes the same bytes to all connections, and does nothing else.
type castFloor struct {
	process *process
	control *rawSocket
	frame   []byte
}

func newCastFloor(ctx context.Context, frame []byte) (*castFloor, error) {
	binary, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p, err := startProcess(ctx, "floor", binary, nil, "listen", "bench", "broadcast-floor")
	if err != nil {
		return nil, err
	}
	f := &castFloor{process: p, frame: frame}
	if f.control, err = dialPlain(ctx, p.said["listen"]); err != nil {
		return nil, errors.Join(err, p.close())
	}
	return f, nil
}

func (f *castFloor) open(ctx context.Context) (*rawSocket, error) {
	s, err := dialPlain(ctx, f.process.said["listen"])
	if err != nil {
		return nil, err
	}
	if _, err := s.next(); err != nil { // it says that the process has the connection
		s.close()
		return nil, err
	}
	return s, nil
}

func (f *castFloor) send(_ context.Context, n int) error {
	piece := bytes.Repeat(f.frame, n)
	return f.control.write(append(binary.BigEndian.AppendUint32(nil, uint32(len(piece))), piece...)) //nolint:gosec // bounded by --size
}

func (f *castFloor) pids() []int32 { return []int32{pidOf(f.process)} }

func (f *castFloor) close() error {
	f.control.close()
	return f.process.close()
}

// broadcastFloor is `eventhub bench broadcast-floor`. What comes on the first connection, behind
// its length in four bytes, is written to all others.
type broadcastFloor struct{}

// Run serves until ctx ends.
func (*broadcastFloor) Run(ctx context.Context, env Env) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = listener.Close() })
	defer stop()
	if _, err := fmt.Fprintf(env.Out, "listen %s\n", listener.Addr()); err != nil {
		return err
	}
	control, err := listener.Accept()
	if err != nil {
		return nil // ctx has ended
	}
	stopControl := context.AfterFunc(ctx, func() { _ = control.Close() })
	defer stopControl()
	conns := make(chan net.Conn, maxGroups)
	accepting := make(chan struct{})
	go func() { // Run waits for it below
		defer close(accepting)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			conns <- conn
			_, _ = conn.Write(appendFrame(nil, []byte("ready")))
		}
	}()
	var all []net.Conn
	defer func() {
		_ = listener.Close()
		<-accepting
		close(conns)
		for conn := range conns {
			all = append(all, conn)
		}
		for _, conn := range all {
			_ = conn.Close()
		}
	}()
	var head [4]byte
	var piece []byte
	for {
		if _, err := io.ReadFull(control, head[:]); err != nil {
			return nil // the other side has ended
		}
		piece = append(piece[:0], make([]byte, binary.BigEndian.Uint32(head[:]))...)
		if _, err := io.ReadFull(control, piece); err != nil {
			return nil // the other side has ended
		}
		for range len(conns) {
			all = append(all, <-conns)
		}
		for _, conn := range all {
			if _, err := conn.Write(piece); err != nil {
				return nil // the other side has ended
			}
		}
	}
}

// centrifugo is a Centrifugo with its memory engine and JSON protocol, without history.
type centrifugo struct {
	process *process
	host    string
	client  *http.Client
	payload []byte
	sent    int
}

// centrifugoKey allows to publish.
const centrifugoKey = "bench"

func newCentrifugo(ctx context.Context, binary string, size int) (*centrifugo, error) {
	ports, release, err := freeport.Take(ctx, 1)
	if err != nil {
		return nil, err
	}
	defer release()
	port := ports[0]
	c := &centrifugo{host: net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), client: &http.Client{}, payload: newPayload(size)}
	c.process, err = runProcess(ctx, "centrifugo", binary, []string{
		"CENTRIFUGO_ADDRESS=127.0.0.1", "CENTRIFUGO_PORT=" + strconv.Itoa(port), "CENTRIFUGO_API_KEY=" + centrifugoKey,
		"CENTRIFUGO_CLIENT_INSECURE=true", "CENTRIFUGO_ALLOWED_ORIGINS=*", "CENTRIFUGO_HEALTH=true", "CENTRIFUGO_LOG_LEVEL=error",
		"CENTRIFUGO_PING_INTERVAL=24h", // a ping would count as an event
	})
	if err != nil {
		return nil, err
	}
	for begin := time.Now(); ; {
		err := c.ask(ctx, http.MethodGet, "/health", nil)
		if err == nil {
			return c, nil
		}
		if time.Since(begin) > startTimeout {
			return nil, errors.Join(fmt.Errorf("centrifugo was not ready after %v: %w", startTimeout, err), c.close())
		}
		if err := sleep(ctx, 50*time.Millisecond); err != nil {
			return nil, errors.Join(err, c.close())
		}
	}
}

func (c *centrifugo) ask(ctx context.Context, method, path string, body []byte) error {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+c.host+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("X-Api-Key", centrifugoKey)
	resp, err := c.client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err := io.ReadAll(resp.Body)
	if err == nil && (resp.StatusCode != http.StatusOK || bytes.Contains(answer, []byte(`"error"`))) {
		err = fmt.Errorf("%s: %s: %.300s", path, resp.Status, answer)
	}
	return err
}

func (c *centrifugo) open(ctx context.Context) (*rawSocket, error) {
	s, err := dialRaw(ctx, "ws://"+c.host+"/connection/websocket")
	if err != nil {
		return nil, err
	}
	err = s.ask(`{"id":1,"connect":{}}`, `"id":1`, `"error"`)
	if err == nil {
		err = s.ask(`{"id":2,"subscribe":{"channel":"bench"}}`, `"id":2`, `"error"`)
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (c *centrifugo) send(ctx context.Context, n int) error {
	body := []byte(`{"commands":[`)
	for i := range n {
		if i > 0 {
			body = append(body, ',')
		}
		c.sent++
		stamp(c.payload, c.sent, now())
		body = append(append(append(body, `{"publish":{"channel":"bench","data":`...), c.payload...), `}}`...)
	}
	return c.ask(ctx, http.MethodPost, "/api/batch", append(body, `]}`...))
}

func (c *centrifugo) pids() []int32 { return []int32{pidOf(c.process)} }

func (c *centrifugo) close() error {
	c.client.CloseIdleConnections()
	return c.process.close()
}

// cpuOf is the CPU time of processes in seconds.
func cpuOf(pids []int32) (float64, error) {
	var all []*psutil.Process
	for _, pid := range pids {
		p, err := psutil.NewProcess(pid)
		if err != nil {
			return 0, fmt.Errorf("find process %d: %w", pid, err)
		}
		all = append(all, p)
	}
	return cpuSeconds(all...)
}
