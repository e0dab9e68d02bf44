package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"eventhub/projections/process"
	"eventhub/sdk/go/wire"
)

// TestDemoShowsThisProcess runs the demo and waits, as a WebSocket client, for the state of a
// process that really runs: that of the test itself.
func TestDemoShowsThisProcess(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	serving, stop := context.WithCancel(ctx)
	reader, writer := io.Pipe()
	var log bytes.Buffer
	code := make(chan int, 1)
	go func() {
		code <- run(serving, []string{
			"serve", "--demo", "--ws-port=0", "--http-port=0", "--ops-port=0", "--data=" + t.TempDir(),
		}, streams{in: strings.NewReader(""), out: writer, err: &log})
		_ = writer.Close()
	}()
	shown := make(map[string]string)
	for lines := bufio.NewScanner(reader); shown["token"] == "" && lines.Scan(); {
		if f := strings.Fields(lines.Text()); len(f) > 1 {
			shown[f[0]] = f[1]
		}
	}
	defer func() {
		stop()
		if got := <-code; got != 0 {
			t.Errorf("serve ended with %d, want 0:\n%s", got, log.String())
		}
	}()
	if shown["token"] == "" {
		t.Error("the hub did not start")
		return
	}

	c, err := wire.Dial(ctx, shown["websocket"], wire.Options{Token: shown["token"]})
	if err != nil {
		t.Error(err)
		return
	}
	defer func() { _ = c.Close() }()
	found := make(chan process.State, 1)
	_, err = c.Subscribe(ctx, process.TopicState, "test", wire.SubscribeOptions{From: "earliest"}, func(ev wire.Event) {
		var state process.State
		if err := json.Unmarshal(ev.Payload, &state); err != nil {
			t.Errorf("%s: %v", ev.Payload, err)
		}
		if state.PID == int64(os.Getpid()) {
			select {
			case found <- state:
			default:
			}
		}
		_ = ev.Ack()
	})
	if err != nil {
		t.Error(err)
		return
	}
	select {
	case state := <-found:
		host, _ := os.Hostname()
		if state.Host != host || state.Status != process.Alive || state.MemMB <= 0 ||
			time.Since(time.UnixMilli(state.LastSeenTS)) > patience {
			t.Errorf("the state of this process is %+v", state)
		}
	case <-ctx.Done():
		t.Error("no state of this process came")
	}
}
