// Command eventhub runs a hub, and is the command line of one: publish, subscribe, heartbeat.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
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
	if err != nil {
		return fail(std, fmt.Errorf("%w: see eventhub --help", err))
	}
	if err := call.Run(); err != nil {
		return fail(std, err)
	}
	return 0
}

// fail prints err as one line.
func fail(std streams, err error) int {
	_, _ = fmt.Fprintln(std.err, "eventhub: "+strings.ReplaceAll(err.Error(), "\n", "; "))
	return 1
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
