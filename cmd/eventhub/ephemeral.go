package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
)

// loopback is where an ephemeral hub listens.
const loopback = "127.0.0.1"

// ephemeral is what a hub prints that was started by `eventhub serve --ephemeral`, as one line of
// JSON.
type ephemeral struct {
	WebSocket string `json:"websocket"`
	HTTP      string `json:"http"`
	Ops       string `json:"ops"`
	NATS      string `json:"nats"`
	Token     string `json:"token"`
}

// makeEphemeral turns the flags into those of a hub that leaves nothing behind: nothing on disk,
// free ports of loopback, and a token in any case. So what a developer's environment says about
// addresses and data does not matter to tests.
func (cmd *serveCmd) makeEphemeral() error {
	if cmd.NATSURL != "" {
		return errors.New("--ephemeral keeps its events in memory, and --nats-url names a NATS server that stores them; choose one (NATS_URL)")
	}
	if cmd.DSN != "" && !strings.HasPrefix(cmd.DSN, "kv:") {
		return errors.New("--ephemeral keeps its events in memory, and --outbox-dsn names a database whose rows would be lost with them; choose one (OUTBOX_DSN)")
	}
	cmd.Bind, cmd.OpsBind = loopback, loopback
	cmd.WSPort, cmd.HTTPPort, cmd.OpsPort = 0, 0, 0
	cmd.NATSListen, cmd.AuthCallout = loopback+":0", false
	cmd.Data, cmd.memory = "", true
	cmd.HTTP = false // its outbox is a file
	cmd.Grace = 0
	if cmd.TokenFile == "" {
		cmd.Token = cmp.Or(cmd.Token, rand.Text())
	}
	return nil
}

// errInputEnded is the cause of the end of an ephemeral hub. It is reported by one that was not
// ready yet.
var errInputEnded = errors.New("standard input was closed before the ephemeral hub was ready; start the hub with a pipe, and keep the pipe open")

// endWithInput returns a context that ends when r does, as it does when the process at the other
// end of a pipe has ended, however that came about. The goroutine that reads lives as long as the
// process.
func endWithInput(ctx context.Context, r io.Reader, log *slog.Logger) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		defer cancel(errInputEnded)
		_, err := io.Copy(io.Discard, r)
		if err != nil {
			log.LogAttrs(ctx, slog.LevelInfo, "standard input cannot be read; the ephemeral hub ends", slog.Any("error", err))
			return
		}
		log.LogAttrs(ctx, slog.LevelInfo, "standard input is closed; the ephemeral hub ends")
	}()
	return ctx, func() { cancel(nil) }
}

// tell prints where the hub is, for a program.
func (h *hub) tell(w io.Writer) error {
	line, err := json.Marshal(ephemeral{
		WebSocket: scheme("ws", h.cert) + h.ws.address(), HTTP: scheme("http", h.cert) + h.http.address(), Ops: scheme("http", h.opsCert()) + h.ops.address(),
		NATS: h.bus.Admin().NATS().URL(), Token: h.token,
	})
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(w, "%s\n", line); err != nil {
		return fmt.Errorf("print the addresses of the ephemeral hub: %w", err)
	}
	return nil
}
