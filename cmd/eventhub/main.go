// Command eventhub runs a hub. Its other commands publish, subscribe, measure, and manage tokens,
// topics, and outboxes.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"
)

func main() {
	// Treat an empty variable as unset, because compose files often set variables to nothing.
	for _, pair := range os.Environ() {
		if name, value, _ := strings.Cut(pair, "="); value == "" && name != "" {
			_ = os.Unsetenv(name)
		}
	}
	// Without SIGPIPE, a reader that disappears causes a write error, so that events which were not
	// printed can be returned to the hub.
	signal.Ignore(syscall.SIGPIPE)
	ctx, stop := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() { // lives as long as the process
		<-signals
		// Reset first, so that a second signal ends the process at once.
		signal.Reset(os.Interrupt, syscall.SIGTERM)
		stop()
	}()
	std := streams{in: os.Stdin, out: toTerminal(os.Stdout), err: toTerminal(os.Stderr)}
	code := run(ctx, os.Args[1:], std)
	flush(std.out)
	flush(std.err)
	os.Exit(code)
}

// streams are the standard streams of a command. A terminal escapes what it is given, so that a
// command may write what other clients have sent.
type streams struct {
	in  io.Reader
	out io.Writer
	err io.Writer
}

// say prints news for people.
func (s streams) say(text string) { _, _ = fmt.Fprintln(s.err, "eventhub: "+text) }

// commands is the command line.
type commands struct {
	Serve       serveCmd       `cmd:"" default:"withargs" help:"Run a hub (the default command)."`
	Pub         pubCmd         `cmd:"" help:"Publish events and print their ids."`
	Sub         subCmd         `cmd:"" help:"Subscribe and print one event record per line."`
	Replay      replayCmd      `cmd:"" help:"Print stored events, one record per line."`
	Export      exportCmd      `cmd:"" help:"Write the stored events of a topic, one record per line."`
	Import      importCmd      `cmd:"" help:"Publish the events of an export."`
	Heartbeat   heartbeatCmd   `cmd:"" help:"Publish heartbeats of processes on this host."`
	Health      healthCmd      `cmd:"" help:"Ask a running hub whether it is healthy."`
	Token       tokenCmd       `cmd:"" help:"Sign a token (JWT) for development and tests, or revoke tokens."`
	ACL         aclCmd         `cmd:"" name:"acl" help:"Check the rights of a token."`
	AuthCallout authCalloutCmd `cmd:"" name:"auth-callout" help:"Configure NATS so that native clients show their tokens to hubs, and explain what a token allows natively."`
	Group       groupCmd       `cmd:"" help:"Manage groups of a running hub."`
	DLQ         dlqCmd         `cmd:"" name:"dlq" help:"List, redrive and discard dead letters of a running hub."`
	Delayed     delayedCmd     `cmd:"" help:"List and cancel delayed events of a running hub."`
	Connections connectionsCmd `cmd:"" help:"List and close the connections of a running hub."`
	Topics      topicsCmd      `cmd:"" help:"Manage topics: list them, compare them with the topics file, and apply it."`
	Schema      schemaCmd      `cmd:"" help:"Read, compare and register the schemas of topics."`
	Outbox      outboxCmd      `cmd:"" help:"Manage an outbox, a database table whose rows become events."`
	Backup      backupCmd      `cmd:"" help:"Write a backup of a running hub with NATS inside to a file."`
	Restore     restoreCmd     `cmd:"" help:"Restore a backup to an empty data directory, or to a NATS of your own."`
	Migrate     migrateCmd     `cmd:"" help:"Copy a stopped hub with NATS inside to a NATS of your own, with all groups."`
	Bench       benchCmd       `cmd:"" help:"Measure a hub and compare it with nats.go."`
	Version     versionCmd     `cmd:"" help:"Print the version."`
}

// exited is the panic value by which kong's --help leaves the parser.
type exited int

// run runs the program and returns its exit code, which is 0 also when ctx ended. It prints a
// failure as one line on the error stream.
func run(ctx context.Context, args []string, std streams) (code int) {
	var cmds commands
	help, _ := screenOf(std.out) // kong asks an *os.File for its width
	parser, err := kong.New(&cmds,
		kong.Name("eventhub"),
		kong.Description("An event bus for browsers and scripts on NATS JetStream."),
		kong.Writers(help, std.err),
		kong.Exit(func(code int) { panic(exited(code)) }),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.Bind(std),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
	)
	if err != nil {
		return fail(std, err)
	}
	defer func() {
		switch left := recover().(type) {
		case nil:
		case exited:
			code = int(left)
		default:
			panic(left)
		}
	}()
	call, err := parser.Parse(args)
	if err != nil && slices.Contains(args, "--check") {
		call, cmds.Serve.unread, err = parseRest(parser, args, err)
	}
	if err != nil {
		err = fmt.Errorf("%w; see eventhub --help", err)
		if e, ok := errors.AsType[*kong.ParseError](err); ok && strings.HasPrefix(e.Context.Command(), "acl") {
			err = &exitError{exitUnsure, err}
		}
		return fail(std, err)
	}
	if cmds.Serve.Check {
		cmds.Serve.unread = append(cmds.Serve.unread, unknownVariables(parser)...)
	}
	if err := call.Run(); err != nil {
		return fail(std, err)
	}
	return 0
}

// exitError is a failure with a specific exit code. A nil err prints nothing.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return "exit code " + strconv.Itoa(e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// fail prints err as one line and returns the exit code.
func fail(std streams, err error) int {
	code := 1
	if e, ok := errors.AsType[*exitError](err); ok {
		if code = e.code; e.err == nil {
			return code
		}
	}
	_, _ = fmt.Fprintln(std.err, "eventhub: "+strings.ReplaceAll(err.Error(), "\n", "; "))
	return code
}

// logFlags configure logging to the error stream.
type logFlags struct {
	LogLevel  string `env:"LOG_LEVEL" default:"info" enum:"debug,info,warn,error" help:"Minimum log level: ${enum}."`
	LogFormat string `env:"LOG_FORMAT" default:"text" enum:"text,json" help:"Log format: ${enum}."`
}

func (f logFlags) logger(w io.Writer) (*slog.Logger, error) {
	var opts slog.HandlerOptions
	var level slog.Level
	if err := level.UnmarshalText([]byte(f.LogLevel)); err != nil {
		return nil, errors.New("unknown log level; use debug, info, warn or error (--log-level, LOG_LEVEL)")
	}
	opts.Level = level
	if f.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, &opts)), nil
	}
	return slog.New(slog.NewTextHandler(w, &opts)), nil
}
