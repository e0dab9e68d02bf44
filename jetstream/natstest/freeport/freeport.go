// Package freeport chooses ports for servers of tests and benchmarks that must know their ports
// before they start, such as those of a cluster.
package freeport

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
)

// The ports lie below those that systems give to outgoing connections, so that no connection takes
// one before its server listens, or while a server that was killed is away. A server that dials the
// port of another one could even be connected to itself.
const first, last = 16_000, 32_000

// Take returns n TCP ports of loopback that nobody listens at. No other call takes them, in any
// process, until release. Release may be called twice.
func Take(ctx context.Context, n int) (ports []int, release func(), err error) {
	var signs []net.PacketConn
	release = func() {
		for _, sign := range signs {
			_ = sign.Close()
		}
	}
	var lc net.ListenConfig
	for range last - first {
		if len(ports) == n {
			return ports, release, nil
		}
		port := first + rand.IntN(last-first) //nolint:gosec // no secret
		address := "127.0.0.1:" + strconv.Itoa(port)
		// The UDP port of the same number is the sign for other calls.
		sign, err := lc.ListenPacket(ctx, "udp", address)
		if err != nil {
			continue
		}
		signs = append(signs, sign)
		l, err := lc.Listen(ctx, "tcp", address)
		if err != nil {
			continue
		}
		_ = l.Close()
		ports = append(ports, port)
	}
	release()
	return nil, nil, fmt.Errorf("of %d free ports only %d were found", n, len(ports))
}
