package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
)

// natsServer is `eventhub bench nats-server`, which bench starts for a hub or a comparison that
// needs a separate nats-server. It has the settings of the hub's embedded server, and a WebSocket
// listener besides the TCP listener. Its cache of subjects is on, as is nats-server's default.
type natsServer struct {
	StoreDir    string   `required:"" help:"Directory of the streams."`
	ServerName  string   `default:"bench" help:"Name of the server, unique in its cluster."`
	ClusterPort int      `help:"Port for the other servers of its cluster. Default: no cluster."`
	Routes      []string `help:"Routes to all servers of the cluster."`
}

// Run serves until ctx ends.
func (n *natsServer) Run(ctx context.Context, env Env, target *Target) error {
	opts := &natsserver.Options{
		ServerName:    n.ServerName,
		Host:          "127.0.0.1",
		Port:          natsserver.RANDOM_PORT,
		Authorization: target.Token,
		JetStream:     true,
		StoreDir:      n.StoreDir,
		MaxPayload:    4 << 20,
		MaxPending:    256 << 20,
		NoSigs:        true,
		NoLog:         true,
		Websocket:     natsserver.WebsocketOpts{Host: "127.0.0.1", Port: natsserver.RANDOM_PORT, NoTLS: true},
	}
	if strings.EqualFold(target.Sync, "always") {
		opts.SyncAlways = true
	} else {
		every, err := time.ParseDuration(target.Sync)
		if err != nil || every <= 0 {
			return fmt.Errorf("--sync %q: use a duration such as 1s, or always", target.Sync)
		}
		opts.SyncInterval = every
	}
	if n.ClusterPort != 0 {
		opts.Cluster = natsserver.ClusterOpts{Name: "bench", Host: "127.0.0.1", Port: n.ClusterPort, NoAdvertise: true}
		opts.Routes = natsserver.RoutesFromStr(strings.Join(n.Routes, ","))
	}
	s, err := natsserver.NewServer(opts)
	if err != nil {
		return fmt.Errorf("create nats-server: %w", err)
	}
	s.Start()
	defer s.WaitForShutdown()
	defer s.Shutdown()
	if !s.ReadyForConnections(startTimeout) {
		return errors.New("nats-server did not start")
	}
	_, err = fmt.Fprintf(env.Out, "nats %s\nnats-ws %s\n", s.ClientURL(), s.WebsocketURL())
	if err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}
