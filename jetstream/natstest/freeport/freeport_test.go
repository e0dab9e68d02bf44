package freeport

import (
	"net"
	"slices"
	"strconv"
	"testing"
)

// Ports are not taken twice, can be listened at, and are free again after release.
func TestTake(t *testing.T) {
	t.Parallel()
	one, release, err := Take(t.Context(), 200)
	if err != nil {
		t.Fatal(err)
	}
	two, releaseTwo, err := Take(t.Context(), 200)
	if err != nil {
		t.Fatal(err)
	}
	defer releaseTwo()
	all := slices.Concat(one, two)
	slices.Sort(all)
	if len(slices.Compact(all)) != 400 {
		t.Error("a port was taken twice")
	}
	for _, port := range one[:10] {
		l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:"+strconv.Itoa(port))
		if err != nil {
			t.Fatal(err)
		}
		_ = l.Close()
	}
	release()
	release()
	sign, err := (&net.ListenConfig{}).ListenPacket(t.Context(), "udp", "127.0.0.1:"+strconv.Itoa(one[0]))
	if err != nil {
		t.Fatalf("after release: %v", err)
	}
	_ = sign.Close()
}
