package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/acl"
	"eventhub/docs"
	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/cputime"
	"eventhub/ops"
	"eventhub/projections"
	"eventhub/projections/process"
)

// drainTimeout limits the orderly shutdown of a hub, so that the whole shutdown takes less than
// 10 seconds. maxGrace is the part of it that clients may use.
const (
	drainTimeout = 6 * time.Second
	maxGrace     = 5 * time.Second
)

// The demo reports the demoTop busiest processes of this host and the hub's own process, every
// demoEvery.
const (
	demoTop   = 5
	demoEvery = time.Second
)

// serveCmd is `eventhub serve`.
type serveCmd struct {
	listenFlags      `group:"Clients"`
	tokenFlags       `group:"Tokens"`
	authFlags        `group:"Tokens"`
	tlsFlags         `group:"TLS"`
	busFlags         `group:"Bus"`
	calloutFlags     `group:"Native clients"`
	outboxServeFlags `group:"Outbox"`
	traceFlags       `group:"Tracing"`
	limitFlags       `group:"Limits" prefix:"limit-" envprefix:"EVENTHUB_LIMIT_"`
	logFlags         `group:"Log"`

	Projector bool `env:"EVENTHUB_PROJECTOR" help:"Project heartbeat.received to process.state."`
	Demo      bool `help:"Run a demo: the projector, and heartbeats of processes on this host."`
	Ephemeral bool `help:"For tests: keep everything in memory, take free ports of this host, print one line of JSON with the addresses and the token when ready, and end when standard input is closed. Settings of addresses and of data have no effect, and there is no POST /outbox."`
	Check     bool `help:"Print what the hub would do (exit code 0) or all configuration errors (exit code 1), without starting anything or opening a port."`

	// unread holds the errors of flag values that could not be parsed, and of unknown variables. It
	// is set only with Check; otherwise parsing fails, and unknown variables have no effect.
	unread []error
}

var _ facade.Observer = (*ops.Metrics)(nil)

// Run serves until ctx ends or a part of the hub fails.
func (cmd *serveCmd) Run(ctx context.Context, std streams) error {
	var contradiction error
	if cmd.Ephemeral {
		contradiction = cmd.makeEphemeral()
	}
	set, faults := cmd.prepare()
	if contradiction != nil {
		faults = append(faults, contradiction)
	}
	if err := cmd.checkData(&set); err != nil {
		faults = append(faults, err)
	}
	if cmd.Check {
		return cmd.check(ctx, std, set, faults)
	}
	if len(faults) > 0 {
		return errors.Join(faults...)
	}
	log, err := cmd.logger(std.err)
	if err != nil {
		return err
	}
	defer keepHeapFloor()()
	if set.cert == nil {
		var stop func()
		ctx, stop = hangUp(ctx, log)
		defer stop()
	} else {
		set.cert.listen() // before anybody learns that the hub is ready
	}
	if cmd.Ephemeral {
		var stop context.CancelFunc
		ctx, stop = endWithInput(ctx, std.in, log)
		defer stop()
	}
	h := &hub{cmd: cmd, settings: set, log: log, failed: make(chan error, 1)}
	err = h.open(ctx)
	if err == nil {
		h.start(ctx)
		if !cmd.Ephemeral {
			h.greet(std.out)
		} else if err = h.tell(std.out); err != nil {
			return errors.Join(err, h.close(context.WithoutCancel(ctx)))
		}
		select {
		case <-ctx.Done():
			log.LogAttrs(ctx, slog.LevelInfo, "draining")
		case err = <-h.failed:
		}
	} else if cause := context.Cause(ctx); errors.Is(cause, errInputEnded) {
		err = cause // what failed because of that would mislead
	}
	return errors.Join(err, h.close(context.WithoutCancel(ctx)))
}

// hub is a running hub. open, start, and close must be called in this order; close also after a
// failed open.
type hub struct {
	settings

	cmd *serveCmd
	log *slog.Logger

	tokenMade bool
	demoToken string // of the demo's page, or ""
	tokens    *acl.Verifier
	metrics   *ops.Metrics
	tracer    *tracer // nil without tracing
	bus       *jetstream.Bus
	facade    *facade.Server
	answers   *jetstream.CalloutConfig
	callouts  *jetstream.Callouts // nil unless native clients show their tokens to the hub
	ws        listener
	http      listener
	ops       listener
	own       *ownOutbox      // nil if POST /outbox is disabled
	database  *databaseOutbox // nil without OUTBOX_DSN
	progress  *progress       // of the projector; nil without one

	draining atomic.Bool
	// failed receives the error that ends the hub early.
	failed chan error
	// inner ends the hub's own tasks: the projector, the compactors, the copies of topics in other
	// versions, the demo, and the certificate watch. All of the hub's goroutines are in wg.
	inner context.CancelFunc
	// unfollow ends the observation of revoked tokens; nil if there is none.
	unfollow context.CancelFunc
	wg       sync.WaitGroup
}

// open opens the ports before the data, so that a hub started twice by mistake changes nothing.
func (h *hub) open(ctx context.Context) error {
	cmd := h.cmd
	for _, l := range []struct {
		to                 *listener
		host               string
		port               uint16
		portFlag, hostFlag string
	}{
		{&h.ws, cmd.Bind, cmd.WSPort, "--ws-port, WS_PORT", "--bind, EVENTHUB_BIND"},
		{&h.http, cmd.Bind, cmd.HTTPPort, "--http-port, HTTP_PORT", "--bind, EVENTHUB_BIND"},
		{&h.ops, cmd.OpsBind, cmd.OpsPort, "--ops-port, OPS_PORT", "--ops-bind, EVENTHUB_OPS_BIND"},
	} {
		if err := l.to.open(ctx, l.host, l.port, l.portFlag, l.hostFlag); err != nil {
			return err
		}
	}
	if h.makesToken {
		var err error
		if h.token, h.tokenMade, err = ensureToken(cmd.Data); err != nil {
			return err
		}
		h.auth.Static[0].Token = h.token
	}
	h.auth.Logger = h.log
	if err := h.addDemoToken(); err != nil {
		return err
	}
	if cmd.jwt() {
		h.auth.Revocations = acl.NewRevocations(jetstream.MaxRevocations)
	}
	lowered := cmd.fitFiles(maxFiles())
	var err error
	if h.tokens, err = acl.NewVerifier(ctx, h.auth); err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	h.metrics = ops.NewMetrics(registry)
	metrics := h.metrics
	metrics.Codes(facade.ErrorCodes(), facade.StatusOf, facade.CloseCodes())
	computing := cputime.New(cmd.SchemaTime, runtime.GOMAXPROCS(0), cmd.Topics, metrics.LimitReached)
	cfg := jetstream.Config{Limits: cmd.bus(), Logger: h.log, Observer: metrics, Topics: h.topics, Computing: computing}
	if h.tracing != nil {
		if h.tracer, err = newTracer(ctx, h.tracing, cmd.OpenSpans, metrics, h.log); err != nil {
			return err
		}
		cfg.Tracer = h.tracer
	}
	if cmd.Projector || cmd.Demo {
		cfg.Derived = []jetstream.DerivedKeys{process.Keys()}
	}
	if err := h.prepareCallouts(); err != nil {
		return err
	}
	if h.bus, err = cmd.busFlags.open(ctx, cfg); err != nil {
		return err
	}
	if len(lowered) > 0 {
		h.log.LogAttrs(ctx, slog.LevelInfo, "limits of connections are lowered, because the process may have too few files open; raise that (ulimit -n, LimitNOFILE)",
			append(lowered, slog.Int("files", maxFiles()))...)
	}
	if err := h.followRevocations(ctx); err != nil {
		return err
	}
	h.applyTopics(ctx)
	if err := h.openOutboxes(ctx); err != nil {
		return err
	}
	clients := facade.Config{
		Bus: facade.JetStream(h.bus), Auth: facade.Tokens(h.tokens), Observer: metrics, Logger: h.log, Origins: cmd.origins(), Headers: cmd.Headers, TrustedProxies: cmd.trusted(),
		DrainGrace: max(cmd.Grace, time.Millisecond), Limits: cmd.facade(), Documents: docs.Handlers(), Accepted: ownedBy, Computing: computing,
	}
	if h.own != nil {
		clients.Outbox = h.own
	}
	if h.facade, err = facade.New(clients); err != nil {
		return err
	}
	if err := h.serveCallouts(ctx); err != nil {
		return err
	}
	if cmd.Projector || cmd.Demo {
		h.progress = newProgress(process.Group, h.bus.Group(process.TopicHeartbeat, process.Group), metrics, h.log)
	}
	guard := ops.Guard{Identify: h.identify}
	operators := ops.Config{
		Bus: h.bus, Registry: registry, Ready: h.ready, Parts: h.parts, Logger: h.log,
		Groups: h.bus, Topics: ops.TopicsOf(h.bus), DeadLetters: h.bus.Admin().DeadLetters(), Connections: connectionsOf{h.facade}, Events: h.bus,
		NATS: h.bus.Admin().NATS(), Guard: guard, Status: facade.StatusOf, Revocations: h.revocations(), Documents: docs.Handlers(),
		LimitReached: metrics.LimitReached, Throttle: h.throttle, Observed: metrics, Series: cmd.series(), KeysAge: h.tokens.KeysAge,
		Outbound:   func() ops.Outbound { return ops.Outbound(h.facade.Outbound()) },
		Broadcasts: func() ops.Broadcasts { return ops.Broadcasts(h.facade.Broadcasts()) },
		Outboxes:   outboxesOf{h},
		Follow: func(w http.ResponseWriter, r *http.Request, id *acl.Identity, topic string, hide func([]byte) []byte) {
			h.facade.Follow(w, r, id, topic, hide)
		},
		Backups:   h.backups(),
		Addresses: ops.Addresses{WebSocket: scheme("ws", h.cert) + h.ws.visited(), HTTP: scheme("http", h.cert) + h.http.visited()},
	}
	if cmd.metricsNeedToken() {
		operators.Metrics = &guard
	} else {
		operators.Local = isLoopback(cmd.OpsBind)
	}
	serve := func(l *listener, handler http.Handler, cert *certificate) {
		l.serveWith(handler, cert, newWaitingRoom(cmd.WaitingConnections, metrics.LimitReached), h.log)
	}
	h.ws.upgrades = true
	serve(&h.ws, h.besideDemo(h.facade.WebSocket()), h.cert)
	clientsHTTP := h.facade.HTTP()
	if h.tracer != nil {
		clientsHTTP = h.tracer.Handler(clientsHTTP)
	}
	serve(&h.http, secure(clientsHTTP, h.cert != nil), h.cert)
	serve(&h.ops, secure(answerWithin(opsTimeout, ops.New(operators).Handler()), h.opsCert() != nil), h.opsCert()) //nolint:contextcheck // scrapes have no context
	return nil
}

// identify returns the owner of the token of a request of an operator. The facade rations refused
// tokens on all ports.
func (h *hub) identify(r *http.Request, token string) (*acl.Identity, *ops.Refusal) {
	p, refused := h.facade.Identify(r, token)
	id, _ := p.(*acl.Identity) // what facade.Tokens returns
	if id != nil {
		ownedBy(r, id.Key())
	}
	return id, (*ops.Refusal)(refused)
}

// throttle takes a publish of an operator from the quotas that clients have.
func (h *hub) throttle(id *acl.Identity, topic string) *ops.Refusal {
	return (*ops.Refusal)(h.facade.Throttle(id, topic))
}

func (h *hub) ready() error {
	if h.draining.Load() {
		return errors.New("draining")
	}
	return nil
}

// parts returns the states of the optional parts of the hub.
func (h *hub) parts() map[string]string {
	parts := make(map[string]string)
	if h.database != nil {
		parts["outbox"] = h.database.state.String()
	}
	if h.progress != nil {
		parts["projector"] = h.progress.String()
	}
	if file, memory := h.bus.Admin().NATS().StorageLow(); file || memory {
		parts["storage"] = "low: clients store nothing until there is more room"
	}
	return parts
}

// start begins to serve. ctx ends the hub's own tasks; close ends everything else.
func (h *hub) start(ctx context.Context) {
	for _, l := range []*listener{&h.ws, &h.http, &h.ops} {
		h.run(l.serve)
	}
	ctx, h.inner = context.WithCancel(ctx)
	if h.cert != nil {
		h.wg.Go(func() { h.cert.watch(ctx, reloadEvery, h.log) })
	}
	if h.progress != nil {
		h.wg.Go(func() { h.progress.watch(ctx) })
		states := process.Config{Bus: projections.JetStream(h.bus), Logger: h.log, Observer: h.metrics}
		if h.tracer != nil {
			states.Tracer = h.tracer
		}
		projector := process.New(states)
		h.run(func() error { return projector.Run(ctx) })
	}
	for _, rule := range h.bus.Admin().Snapshots() {
		compactor := projections.NewCompactor(projections.CompactorConfig{
			Bus: projections.JetStream(h.bus), Topic: rule.Pattern, Snapshot: rule.Snapshot.Topic, Every: rule.Snapshot.Every,
			KeySource: rule.Snapshot.KeySource, BatchKeys: rule.Snapshot.BatchKeys, Logger: h.log,
			Written: func(keys int) { h.metrics.Snapshots(rule.Pattern, keys) },
		})
		h.run(func() error { return compactor.Run(ctx) })
	}
	for _, rule := range h.bus.Schemas().Mirrors() {
		copies := projections.NewDualWrite(projections.DualWriteConfig{
			Bus: projections.JetStream(h.bus), Topic: rule.Pattern, Versions: rule.Schema.Mirrors, Observer: h.metrics, Logger: h.log,
		})
		h.run(func() error { return copies.Run(ctx) })
	}
	if h.cmd.Demo {
		h.run(func() error { return h.demo(ctx) })
	}
}

// run runs f in a goroutine of the hub. An error of f ends the hub.
func (h *hub) run(f func() error) {
	h.wg.Go(func() {
		if err := f(); err != nil {
			select {
			case h.failed <- err:
			default: // only the first error is reported
			}
		}
	})
}

// demo publishes heartbeats until ctx ends.
func (h *hub) demo(ctx context.Context) error {
	watch, err := newProcessWatch(ctx, demoTop, []int32{int32(os.Getpid())}) //nolint:gosec // process ids fit
	if err != nil {
		return err
	}
	return publishHeartbeats(ctx, watch, demoEvery, func(ctx context.Context, payload []byte) error {
		if _, err := h.bus.Publish(ctx, process.TopicHeartbeat, payload, jetstream.PublishOptions{}); err != nil && ctx.Err() == nil {
			// The next heartbeat may succeed.
			h.log.LogAttrs(ctx, slog.LevelWarn, "failed to publish a heartbeat", slog.Any("error", err))
		}
		return nil
	})
}

// close shuts the hub down. It reports unready, returns the leases, tells clients to reconnect, and
// stops the parts in the order of their dependencies.
func (h *hub) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	h.draining.Store(true)
	if h.inner != nil {
		h.inner()
	}
	var errs []error
	if h.facade != nil {
		if err := h.facade.Drain(ctx); err != nil {
			h.log.LogAttrs(ctx, slog.LevelWarn, "failed to drain all clients; disconnecting them", slog.Any("error", err))
		}
	}
	for _, l := range []*listener{&h.ws, &h.http, &h.ops} {
		l.close(ctx)
	}
	if h.callouts != nil {
		h.callouts.Close()
	}
	if h.facade != nil {
		errs = append(errs, h.facade.Close())
	}
	if h.unfollow != nil {
		h.unfollow()
	}
	h.wg.Wait()
	errs = append(errs, h.closeOutboxes(ctx))
	if h.tokens != nil {
		h.tokens.Close()
	}
	if h.bus != nil {
		errs = append(errs, h.bus.Close()) //nolint:contextcheck // Close limits its own duration
	}
	if h.tracer != nil {
		h.tracer.close(ctx)
	}
	return errors.Join(errs...)
}

// greet prints the addresses and the token of the hub.
func (h *hub) greet(w io.Writer) {
	lines := [][2]string{
		{"websocket", scheme("ws", h.cert) + h.ws.address()},
		{"http", scheme("http", h.cert) + h.http.address()},
		{"ops", scheme("http", h.opsCert()) + h.ops.address()},
	}
	if h.cmd.Demo {
		lines = append(lines, [2]string{"demo", scheme("http", h.cert) + h.ws.address() + demoPath})
	}
	if url := h.bus.Admin().NATS().URL(); url != "" {
		lines = append(lines, [2]string{"nats", url})
	}
	lines = append(lines, [2]string{"data", h.cmd.where()})
	if h.outbox != nil {
		place := h.outbox.String()
		if h.database.state.waiting.Load() {
			place += ": not available yet (see the log)"
		}
		lines = append(lines, [2]string{"outbox", place})
	}
	own := "as configured"
	switch file := filepath.Join(h.cmd.Data, tokenName); {
	case h.tokenMade:
		own = h.token + " (new; stored in " + file + ")"
	case h.makesToken:
		own = "in " + file
	case h.token == "":
		own = "none; JWTs as configured"
	}
	lines = append(lines, [2]string{"token", own})
	printLines(w, "eventhub is ready", lines)
}

// scheme returns ws:// or http://, or with TLS wss:// or https://.
func scheme(name string, cert *certificate) string {
	if cert != nil {
		name += "s"
	}
	return name + "://"
}

func printLines(w io.Writer, title string, lines [][2]string) {
	var text strings.Builder
	text.WriteString(title + "\n")
	for _, l := range lines {
		fmt.Fprintf(&text, "  %-10s %s\n", l[0], l[1])
	}
	_, _ = io.WriteString(w, text.String()) // the hub serves even if nobody reads its output
}
