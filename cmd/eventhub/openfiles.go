package main

import "log/slog"

const (
	// keptFiles is which part of the files that this process may have open is never given to
	// clients, as a divisor: streams, other servers and operators need them.
	keptFiles = 4
	// nativeFiles is how many descriptors a native client takes: its connection, and both ends of
	// the one from the guard to the server.
	nativeFiles = 3
)

// fitFiles bounds the connections of clients so that all of them together leave keptFiles. With a
// listener for native clients, WebSockets and native clients have half each.
func (cmd *serveCmd) fitFiles(log *slog.Logger) {
	cmd.clients = cmd.Connections
	room := maxFiles()
	room -= room / keptFiles
	if cmd.NATSListen != "" && cmd.NATSURL == "" {
		room /= 2
		if cmd.clients = min(cmd.clients, room/nativeFiles); cmd.clients < cmd.Connections {
			log.Info("native connections are bounded by the number of files that this process may have open: raise that (ulimit -n, LimitNOFILE), or lower EVENTHUB_LIMIT_CONNECTIONS",
				slog.Int("files", maxFiles()), slog.Int("limit", cmd.Connections), slog.Int("allowed", cmd.clients))
		}
	}
	if cmd.Connections > room {
		log.Info("WebSocket connections are bounded by the number of files that this process may have open: raise that (ulimit -n, LimitNOFILE), or lower EVENTHUB_LIMIT_CONNECTIONS",
			slog.Int("files", maxFiles()), slog.Int("limit", cmd.Connections), slog.Int("allowed", room))
		cmd.Connections = room
	}
}
