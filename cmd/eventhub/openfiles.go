package main

import "log/slog"

const (
	// keptFiles is which part of the files that this process may have open is never given to
	// clients, as a divisor: streams, other servers and operators need them.
	keptFiles = 4
	// waitingFiles is which part of the rest connections without a request may take, those of all
	// ports together, and httpFiles that of requests, streams and pulls, each.
	waitingFiles = 2
	httpFiles    = 12
	// waitingRooms is how many rooms of WAITING_CONNECTIONS there are: one on each port.
	waitingRooms = 3
	// guardedFiles is how many descriptors a native client takes behind the guard: its connection,
	// and both ends of the one from the guard to the server.
	guardedFiles = 3
)

// fitFiles lowers the limits of connections so that all clients together leave keptFiles of the
// files that the process may have open. With a listener for native clients, WebSockets and native
// clients share what is left by halves. It returns what was lowered, for the log.
func (cmd *serveCmd) fitFiles(files int) (lowered []slog.Attr) {
	room := files - files/keptFiles
	fit := func(limit *int, most int, flag string) {
		if most = max(most, 1); *limit > most {
			*limit = most
			lowered = append(lowered, slog.Int(flag, most))
		}
	}
	fit(&cmd.WaitingConnections, room/waitingFiles/waitingRooms, "waiting-connections")
	fit(&cmd.Requests, room/httpFiles, "requests")
	fit(&cmd.Streams, room/httpFiles, "streams")
	fit(&cmd.Pulls, room/httpFiles, "pulls")
	room -= waitingRooms*cmd.WaitingConnections + cmd.Requests + cmd.Streams + cmd.Pulls
	cmd.clients = cmd.Connections
	if cmd.NATSListen != "" && cmd.NATSURL == "" {
		room /= 2
		each := 1
		if cmd.Isolation == "on" {
			each = guardedFiles
		}
		fit(&cmd.clients, room/each, "native-connections")
	}
	fit(&cmd.Connections, room, "connections")
	// The limit of one principal, or of strangers, is at most that of all. 0 stands for a share.
	for _, of := range []struct{ part, all *int }{
		{&cmd.PrincipalConnections, &cmd.Connections},
		{&cmd.Unauthenticated, &cmd.Connections},
		{&cmd.PrincipalRequests, &cmd.Requests},
		{&cmd.PrincipalStreams, &cmd.Streams},
		{&cmd.PrincipalPulls, &cmd.Pulls},
	} {
		*of.part = min(*of.part, *of.all)
	}
	return lowered
}
