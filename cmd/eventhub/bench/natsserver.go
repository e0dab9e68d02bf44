package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
)

// natsServer is `eventhub bench nats-server`: what bench starts when a hub or a comparison needs a nats-server of its own. It
// has the settings of the hub's embedded server, and a WebSocket listener beside the TCP one.
type natsServer struct {
	StoreDir    string   `required:"" help:"Where the streams go."`
	ServerName  string   `default:"bench" help:"Its name, which no other server of its cluster has."`
	ClusterPort int      `help:"Where it listens to the other servers of its cluster. Default: it is alone."`
	Routes      []string `help:"All servers of the cluster."`
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
			return fmt.Errorf("--sync %q: give a duration such as 1s, or always", target.Sync)
		}
		opts.SyncInterval = every
	}
	if n.ClusterPort != 0 {
		opts.Cluster = natsserver.ClusterOpts{Name: "bench", Host: "127.0.0.1", Port: n.ClusterPort, NoAdvertise: true}
		opts.Routes = natsserver.RoutesFromStr(strings.Join(n.Routes, ","))
	}
	s, err := natsserver.NewServer(opts)
	if err != nil {
		return fmt.Errorf("nats-server: %w", err)
	}
	s.Start()
	defer s.WaitForShutdown()
	defer s.Shutdown()
	if !s.ReadyForConnections(startTimeout) {
		return errors.New("nats-server: it did not start")
	}
	_, err = fmt.Fprintf(env.Out, "nats %s\nnats-ws %s\n", s.ClientURL(), s.WebsocketURL())
	if err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}
