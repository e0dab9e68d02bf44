package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/creack/pty"

	"eventhub/jetstream/natstest"
	"eventhub/sdk/go/wire"
)

// Texts of another client, and how a terminal shows them. The hub takes no control characters in
// names and headers.
const (
	oddName      = "a\u202eb\u2066c\u2028d\u200be\U000e0041"
	oddNameShown = `a\u202eb\u2066c\u2028d\u200be\udb40\udc41`
	oddText      = oddName + "\u009b31m\u007f"
	oddTextShown = oddNameShown + `\u009b31m\u007f`
)

// On a terminal, no command writes a character of another client that does something. To a pipe,
// each byte goes as it is.
func TestHostileTextsOnATerminal(t *testing.T) {
	t.Parallel()
	hub := startNode(t)
	c := hub.dial()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	publish := func(topic string, o wire.PublishOptions) {
		t.Helper()
		if _, err := c.Publish(ctx, topic, []byte(`{"`+oddText+`":"`+oddText+`"}`), o); err != nil {
			t.Fatal(err)
		}
	}
	publish("odd", wire.PublishOptions{ID: oddName, Key: oddText, Headers: map[string]string{"odd": oddName}})
	publish("later", wire.PublishOptions{ID: oddName, DelayMS: 3_600_000})
	publish("broken", wire.PublishOptions{})
	one := 1
	for topic, reason := range map[string]string{"odd": oddText, "broken": "a\nforged line"} {
		e := subscribeTo(t, c, topic, oddName, wire.SubscribeOptions{From: "earliest", MaxAttempts: &one}).next()
		if err := e.Nack(reason, 0); err != nil {
			t.Fatal(err)
		}
		subscribeTo(t, c, "dlq."+topic, "waiting", wire.SubscribeOptions{From: "earliest"}).next()
	}

	// encoding/json escapes separators of lines only.
	inJSON := func(text string) string { return strings.ReplaceAll(text, "\u2028", `\u2028`) }
	for _, command := range []struct {
		args        string
		text, shown string
		fails       bool
	}{
		{args: "sub odd --from earliest --no-ack --count 1 --group", text: oddText, shown: oddTextShown},
		{args: "replay odd", text: oddText, shown: oddTextShown},
		{args: "replay odd --header odd=NAME", text: oddText, shown: oddTextShown},
		{args: "export odd", text: oddText, shown: oddTextShown},
		{args: "group list", text: oddName, shown: oddNameShown},
		{args: "group show odd NAME", text: oddName, shown: oddNameShown},
		{args: "dlq list odd", text: oddText, shown: oddTextShown},
		// one line a letter
		{args: "dlq list broken", text: `"a\nforged line"`, shown: `"a\nforged line"`},
		{args: "dlq list odd --json", text: inJSON(oddText), shown: oddTextShown},
		{args: "dlq list", text: oddName, shown: oddNameShown},
		{args: "dlq show NAME", text: oddName, shown: oddNameShown, fails: true},
		{args: "delayed list later", text: oddName, shown: oddNameShown},
		{args: "delayed list later --json", text: inJSON(oddName), shown: oddNameShown},
		{args: "connections list", text: oddName, shown: oddNameShown},
	} {
		t.Run(command.args, func(t *testing.T) {
			t.Parallel()
			args := strings.Fields(command.args)
			for i := range args {
				args[i] = strings.ReplaceAll(args[i], "NAME", oddName)
			}
			for _, onTerminal := range []bool{true, false} {
				full := args
				if args[0] == "sub" { // each time in a new group, which gets the event
					full = append(args[:len(args):len(args)], fmt.Sprint(oddName, onTerminal))
				}
				out, err := hub.command(t, onTerminal, full...)
				if command.fails != (err != nil) {
					t.Errorf("terminal %v: %v", onTerminal, err)
				}
				if want := map[bool]string{true: command.shown, false: command.text}[onTerminal]; !strings.Contains(out, want) {
					t.Errorf("terminal %v: the output lacks %q:\n%q", onTerminal, want, out)
				}
				if onTerminal && strings.ContainsAny(out, "\x1b\u007f\u009b\u202e\u2066\u2028\u200b\U000e0041") {
					t.Errorf("the terminal gets %q", out)
				}
			}
		})
	}
}

// On a terminal, a benchmark shows its progress in a line that changes, and help has the width of
// the terminal.
func TestProgramOnATerminal(t *testing.T) {
	t.Parallel()
	hub := startNode(t)
	out, err := hub.command(t, true, "bench", "pub", "--n=100", "--rounds=1")
	if err != nil || !strings.Contains(out, "\rround ") || !strings.Contains(out, " s \r\x1b[K") {
		t.Errorf("a benchmark: %v\n%q", err, out)
	}
	out, err = hub.command(t, true, "sub", "--help")
	if _, rest, _ := strings.Cut(out, "--until-end"); err != nil || !strings.Contains(rest, "newest at the start, or when no event has come for 3s.") {
		t.Errorf("help: %v\n%s", err, out)
	}
}

// command runs a command for the hub, and returns what it writes to a terminal 200 columns wide, or
// to a pipe.
func (n *node) command(t *testing.T, onTerminal bool, args ...string) (string, error) {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, path)
	cmd.Args = append([]string{"eventhub"}, args...)
	cmd.Dir = t.TempDir()
	cmd.Env = append(os.Environ(), "EVENTHUB_URL="+n.url, "EVENTHUB_HTTP_URL="+n.http, "EVENTHUB_OPS_URL="+n.ops, "EVENTHUB_TOKEN="+nodeToken, natstest.RaceEnv())
	if !onTerminal {
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	screen, keyboard := openTerminal(t)
	if err := pty.Setsize(screen, &pty.Winsize{Rows: 50, Cols: 200}); err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = keyboard, keyboard
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = keyboard.Close()
	out, _ := io.ReadAll(screen) // ends with EIO, when the command has closed the terminal
	return string(bytes.ReplaceAll(out, []byte("\r\n"), []byte("\n"))), cmd.Wait()
}
