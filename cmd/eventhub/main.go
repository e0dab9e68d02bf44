// Command eventhub runs a hub, and is the command line of one: publish, subscribe, heartbeat, and tokens.
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
	// A variable that is set to nothing, as compose files like to do, is not set.
	for _, pair := range os.Environ() {
		if name, value, _ := strings.Cut(pair, "="); value == "" && name != "" {
			_ = os.Unsetenv(name)
		}
	}
	// A reader that went away is an error of the write, so that what was not printed is given back to the hub.
	signal.Ignore(syscall.SIGPIPE)
	ctx, stop := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() { // it lives as long as the process
		<-signals
		// First of all they work as usual again: a second signal ends the process at once, however early it comes.
		signal.Reset(os.Interrupt, syscall.SIGTERM)
		stop()
	}()
	os.Exit(run(ctx, os.Args[1:], streams{in: os.Stdin, out: os.Stdout, err: os.Stderr}))
}

// streams are what a command reads and writes.
type streams struct {
	in  io.Reader
	out io.Writer
	err io.Writer
}

// commands is the command line.
type commands struct {
	Serve     serveCmd     `cmd:"" default:"withargs" help:"Run a hub (the default command)."`
	Pub       pubCmd       `cmd:"" help:"Publish events and print their ids."`
	Sub       subCmd       `cmd:"" help:"Subscribe, and print one event record a line."`
	Heartbeat heartbeatCmd `cmd:"" help:"Publish heartbeats of processes of this host."`
	Token     tokenCmd     `cmd:"" help:"Sign a token (JWT) for development and tests."`
	ACL       aclCmd       `cmd:"" name:"acl" help:"Check what a token may do."`
	Topics    topicsCmd    `cmd:"" help:"Compare the topics file with the streams, and apply it."`
	Outbox    outboxCmd    `cmd:"" help:"Look after an outbox: a table of a database whose rows become events."`
	Bench     benchCmd     `cmd:"" help:"Measure a hub, and compare it with nats.go."`
	Version   versionCmd   `cmd:"" help:"Print the version."`
}

// exited is how kong's --help leaves the parser.
type exited int

// run is the program: it returns the exit code, 0 also when ctx ended. A failure is one line on the error stream.
func run(ctx context.Context, args []string, std streams) (code int) {
	var cmds commands
	parser, err := kong.New(&cmds,
		kong.Name("eventhub"),
		kong.Description("An event bus for browsers and scripts on NATS JetStream."),
		kong.Writers(std.out, std.err),
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
		err = fmt.Errorf("%w: see eventhub --help", err)
		if e, ok := errors.AsType[*kong.ParseError](err); ok && strings.HasPrefix(e.Context.Command(), "acl") {
			err = &exitError{exitUnsure, err}
		}
		return fail(std, err)
	}
	if err := call.Run(); err != nil {
		return fail(std, err)
	}
	return 0
}

// exitError is a failure with an exit code of its own. Without err there is nothing to say about it.
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

// logFlags are the flags about logs, which go to the error stream.
type logFlags struct {
	LogLevel  string `env:"LOG_LEVEL" default:"info" enum:"debug,info,warn,error" help:"Least level that is logged: ${enum}."`
	LogFormat string `env:"LOG_FORMAT" default:"text" enum:"text,json" help:"Format of the log: ${enum}."`
}

func (f logFlags) logger(w io.Writer) (*slog.Logger, error) {
	var opts slog.HandlerOptions
	var level slog.Level
	if err := level.UnmarshalText([]byte(f.LogLevel)); err != nil {
		return nil, errors.New("the log level is unknown: choose debug, info, warn or error (--log-level, LOG_LEVEL)")
	}
	opts.Level = level
	if f.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, &opts)), nil
	}
	return slog.New(slog.NewTextHandler(w, &opts)), nil
}
