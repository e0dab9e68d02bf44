package bench

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// clusterSize is the number of nats-servers of a started cluster.
const clusterSize = 3

// startNATS starts a nats-server, or a cluster if streams have replicas. The native sides use it.
func (s *system) startNATS(ctx context.Context) error {
	if err := s.makeDir(); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("start a nats-server: %w", err)
	}
	n := 1
	if s.target.Replicas > 1 {
		n = clusterSize
	}
	ports, err := freePorts(ctx, n)
	if err != nil {
		return fmt.Errorf("start a cluster: %w", err)
	}
	routes := make([]string, n)
	for i, port := range ports {
		routes[i] = "nats://127.0.0.1:" + port
	}
	var urls, wsURLs []string
	for i, port := range ports {
		name := "nats-" + strconv.Itoa(i+1)
		args := []string{"bench", "--sync=" + s.target.Sync, "nats-server", "--server-name=" + name, "--store-dir=" + filepath.Join(s.dir, name)}
		if n > 1 {
			args = append(args, "--cluster-port="+port, "--routes="+strings.Join(routes, ","))
		}
		p, err := startProcess(ctx, "nats-server", self, []string{"WS_TOKEN=" + s.token}, "nats-ws", args...)
		if err != nil {
			return err
		}
		s.owned = append(s.owned, p)
		s.nativePIDs = append(s.nativePIDs, pidOf(p))
		urls = append(urls, withToken(p.said["nats"], s.token))
		wsURLs = append(wsURLs, withToken(p.said["nats-ws"], s.token))
	}
	s.native.url, s.native.wsURL = strings.Join(urls, ","), strings.Join(wsURLs, ",")
	if n == 1 {
		return nil
	}
	return s.awaitCluster(ctx)
}

// awaitCluster waits until the cluster can create streams with the configured number of replicas.
func (s *system) awaitCluster(ctx context.Context) error {
	a, err := s.admin(viaNative)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	const topic = "bench.cluster"
	for {
		// Servers without a leader may not answer a request.
		try, stop := context.WithTimeout(ctx, time.Second)
		err := a.makeStream(try, topic, s.target.Replicas)
		stop()
		if err == nil {
			return a.remove(ctx, topic)
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return fmt.Errorf("cluster was not ready after %v: %w", startTimeout, err)
		}
	}
}

// freePorts returns n free TCP ports of this host. The servers of a cluster must know each other's
// ports before they start, so they cannot choose ports themselves.
func freePorts(ctx context.Context, n int) ([]string, error) {
	ports := make([]string, n)
	for i := range ports {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer func() { _ = l.Close() }() // close all listeners together, so that the ports differ
		if _, ports[i], err = net.SplitHostPort(l.Addr().String()); err != nil {
			return nil, err
		}
	}
	return ports, nil
}
