package main

import (
	"testing"

	"github.com/alecthomas/kong"
)

// TestClientsLeaveFiles fits the limits to processes that may have more or fewer files open. What
// clients can take never exceeds three quarters of them.
func TestClientsLeaveFiles(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{nil, {"--nats-listen=127.0.0.1:0"}, {"--nats-listen=127.0.0.1:0", "--nats-isolation=off"}, {"--limit-unauthenticated=5000", "--limit-principal-connections=5000"}} {
		var all commands
		parser, err := kong.New(&all)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := parser.Parse(append([]string{"serve"}, args...)); err != nil {
			t.Fatal(err)
		}
		for _, files := range []int{256, 1024, 4096, 20_000, 131_072, 1 << 20} {
			cmd := all.Serve
			was := cmd.Connections
			lowered := cmd.fitFiles(files)
			each := 0
			if cmd.NATSListen != "" {
				each = 1
				if cmd.Isolation == "on" {
					each = guardedFiles
				}
			}
			taken := cmd.Connections + each*cmd.clients + waitingRooms*cmd.WaitingConnections + cmd.Requests + cmd.Streams + cmd.Pulls
			if taken > files-files/keptFiles {
				t.Errorf("%v, %d files: clients may take %d", args, files, taken)
			}
			if files > 131_072 && (cmd.Connections != was || len(lowered) > 0) {
				t.Errorf("%v, %d files: %d connections, want %d", args, files, cmd.Connections, was)
			}
			if cmd.Connections < 1 || cmd.clients < 1 || cmd.Unauthenticated > cmd.Connections || cmd.PrincipalConnections > cmd.Connections {
				t.Errorf("%v, %d files: %+v", args, files, cmd.limitFlags)
			}
		}
	}
}
