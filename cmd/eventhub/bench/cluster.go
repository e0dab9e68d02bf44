package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"eventhub/jetstream/natstest/freeport"
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
	ports, release, err := freeport.Take(ctx, n)
	if err != nil {
		return fmt.Errorf("start a cluster: %w", err)
	}
	defer release()
	routes := make([]string, n)
	for i, port := range ports {
		routes[i] = "nats://127.0.0.1:" + strconv.Itoa(port)
	}
	var urls, wsURLs []string
	for i, port := range ports {
		name := "nats-" + strconv.Itoa(i+1)
		args := []string{"bench", "--sync=" + s.target.Sync, "nats-server", "--server-name=" + name, "--store-dir=" + filepath.Join(s.dir, name)}
		if n > 1 {
			args = append(args, "--cluster-port="+strconv.Itoa(port), "--routes="+strings.Join(routes, ","))
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
