//go:build unix

package model

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"eventhub/acl"
	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// hubRole is what the process of a hub is told.
type hubRole struct {
	URL       string
	Addr      string
	AckWaitMS int
	Replicas  int
	Log       string // a file, appended to; "" for none
	Besides   besides
}

// stallBeat is how often a hub looks whether it stood still, and stallLeast the shortest standstill
// that it tells of.
const (
	stallBeat  = 20 * time.Millisecond
	stallLeast = 250 * time.Millisecond
)

// jumpPath?by=DURATION moves the hub's clock forward. The clock of leases is monotonic, as the
// operating system's is: a jump is that of a machine that slept.
const jumpPath = "/test/jump"

// runHub is the process of a hub. It prints "stall DURATION" after it stood still for so long.
func runHub(ctx context.Context, r hubRole) error {
	log := slog.New(slog.DiscardHandler)
	if r.Log != "" {
		f, err := os.OpenFile(r.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		log = slog.New(slog.NewTextHandler(f, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", r.Addr)
	if err != nil {
		return err
	}
	var jump atomic.Int64
	bus, err := openBus(ctx, jetstream.Config{
		Clock: func() time.Time { return time.Now().Add(time.Duration(jump.Load())) },
		URL:   r.URL, AckWait: time.Duration(r.AckWaitMS) * time.Millisecond, Replicas: r.Replicas, Logger: log,
	})
	if err != nil {
		return err
	}
	srv, err := facade.New(facade.Config{Bus: facade.JetStream(bus), Auth: anybody{}, Logger: log, DrainGrace: 500 * time.Millisecond})
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("/", srv.WebSocket())
	mux.HandleFunc(jumpPath, func(w http.ResponseWriter, r *http.Request) {
		by, err := time.ParseDuration(r.URL.Query().Get("by"))
		if err != nil || by < 0 {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		jump.Add(int64(by))
	})
	web := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go func() { _ = web.Serve(narrow{l}) }()
	endBesides, err := r.Besides.start(ctx, bus, srv, log)
	if err != nil {
		return err
	}
	go tellStalls(ctx)
	natstest.Ready()
	<-ctx.Done()
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	_ = srv.Drain(end)
	return errors.Join(endBesides(end), srv.Close(), web.Shutdown(end), bus.Close())
}

// narrow gives the kernel little room for what goes to clients: events for one that does not read
// then stay in the hub.
type narrow struct{ net.Listener }

// Accept makes the send buffer small.
func (n narrow) Accept() (net.Conn, error) {
	c, err := n.Listener.Accept()
	if tcp, ok := c.(*net.TCPConn); ok {
		err = errors.Join(err, tcp.SetWriteBuffer(8<<10))
	}
	return c, err
}

// openBus tries for a while: at a restart NATS may be away.
func openBus(ctx context.Context, cfg jetstream.Config) (*jetstream.Bus, error) {
	deadline := time.After(20 * time.Second)
	for {
		bus, err := jetstream.Open(ctx, cfg)
		if err == nil {
			return bus, nil
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-deadline:
			return nil, err
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func tellStalls(ctx context.Context) {
	beat := time.NewTicker(stallBeat)
	defer beat.Stop()
	last := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-beat.C:
		}
		if gap := time.Since(last); gap >= stallLeast {
			_, _ = fmt.Fprintln(os.Stdout, "stall", gap)
		}
		last = time.Now()
	}
}

// anybody lets everybody in.
type anybody struct{}

// Authenticate takes any token.
func (anybody) Authenticate(context.Context, string) (facade.Principal, error) { return anybody{}, nil }

// Name is for logs.
func (anybody) Name() string { return "anybody" }

// Key is the same for all.
func (anybody) Key() string { return "anybody" }

// Allows allows everything.
func (anybody) Allows(acl.Action, string, string) bool { return true }

// Expires is never.
func (anybody) Expires() time.Time { return time.Time{} }
