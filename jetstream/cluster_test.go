package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/natstest"
)

// slow bounds what servers in processes of their own are waited for.
const slow = 60 * time.Second

// natsProcesses are nats-servers in processes of their own: one alone, or a cluster.
type natsProcesses struct {
	tb    testing.TB
	nodes []*natstest.Server
	conn  *nats.Conn
	js    natsjs.JetStream
}

// startProcesses starts n servers, which the end of the test stops, and waits until they make
// streams with n copies.
func startProcesses(tb testing.TB, n int) *natsProcesses {
	tb.Helper()
	c := &natsProcesses{tb: tb, nodes: natstest.StartCluster(tb, n)}
	c.conn, c.js = nativeConn(tb, c.urls())
	c.until("streams can be made", func(ctx context.Context) bool {
		_, err := c.js.CreateStream(ctx, natsjs.StreamConfig{Name: "ready", Replicas: n})
		return err == nil
	})
	c.until("the stream is gone again", func(ctx context.Context) bool {
		err := c.js.DeleteStream(ctx, "ready")
		return err == nil || errors.Is(err, natsjs.ErrStreamNotFound)
	})
	return c
}

// urls are those of all servers, as Config.URL has them.
func (c *natsProcesses) urls() string {
	urls := make([]string, len(c.nodes))
	for i, n := range c.nodes {
		urls[i] = n.URL()
	}
	return strings.Join(urls, ",")
}

// until waits for f, whose questions have a second each.
func (c *natsProcesses) until(what string, f func(context.Context) bool) {
	c.tb.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(slow)
	for {
		ctx, cancel := context.WithTimeout(c.tb.Context(), time.Second)
		done := f(ctx)
		cancel()
		if done {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			c.tb.Fatalf("waited in vain: %s", what)
		}
	}
}

// healthy waits until streams have a leader and all their copies are up to date.
func (c *natsProcesses) healthy(streams ...string) {
	c.tb.Helper()
	for _, name := range streams {
		c.until("stream "+name+" has all its copies", func(ctx context.Context) bool {
			info, err := c.info(ctx, name)
			if err != nil {
				return false
			}
			if len(c.nodes) == 1 {
				return true
			}
			if info.Cluster == nil || info.Cluster.Leader == "" || len(info.Cluster.Replicas) != len(c.nodes)-1 {
				return false
			}
			for _, r := range info.Cluster.Replicas {
				if !r.Current || r.Offline {
					return false
				}
			}
			return true
		})
	}
}

func (c *natsProcesses) info(ctx context.Context, stream string) (*natsjs.StreamInfo, error) {
	s, err := c.js.Stream(ctx, stream)
	if err != nil {
		return nil, err
	}
	return s.CachedInfo(), nil
}

// stepDown makes the leader of a stream hand over to another server.
func (c *natsProcesses) stepDown(ctx context.Context, stream string) error {
	m, err := c.conn.RequestWithContext(ctx, "$JS.API.STREAM.LEADER.STEPDOWN."+stream, nil)
	if err != nil {
		return err
	}
	var answer struct {
		Success bool           `json:"success"`
		Error   *conn.APIError `json:"error"`
	}
	if err := json.Unmarshal(m.Data, &answer); err != nil {
		return err
	}
	if !answer.Success {
		return fmt.Errorf("step down of %s: %w", stream, answer.Error)
	}
	return nil
}
