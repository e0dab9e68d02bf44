//go:build unix && !race

package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	psutil "github.com/shirou/gopsutil/v4/process"

	"eventhub/sdk/go/wire"
)

// keysMeasured is larger for the figure in docs/sizing.
var keysMeasured = flag.Int("keys.measured", 20_000, "keys of which TestMemoryOfKeys measures the memory")

// TestMemoryOfKeys measures the memory of the hub, with its embedded server, for each key of a
// compacted topic: when the key was made, and after a restart.
func TestMemoryOfKeys(t *testing.T) {
	dir := t.TempDir()
	topics := filepath.Join(dir, "topics.yaml")
	if err := os.WriteFile(topics, []byte("topics:\n  - {topic: keys, compaction: true}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	flags := []string{"--topics=" + topics, "--data=" + filepath.Join(dir, "data"), "--limit-new-keys=off", "--limit-frames=off"}
	memory := func(n *node) int {
		t.Helper()
		p, err := psutil.NewProcess(int32(n.cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		m, err := p.MemoryInfo()
		if err != nil {
			t.Fatal(err)
		}
		return int(m.RSS)
	}
	n := startNode(t, flags...)
	c := n.dial()
	publishKeyed := func(from, to int) {
		t.Helper()
		var wg sync.WaitGroup
		for i := from; i < to; i++ {
			wg.Add(1)
			err := c.PublishAsync("keys", fmt.Appendf(nil, `{"n":%d}`, i), wire.PublishOptions{Key: fmt.Sprintf("host-%d:name:%d", i%100, i)}, func(_ string, err error) {
				if err != nil {
					t.Error(err)
				}
				wg.Done()
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		wg.Wait()
	}
	publishKeyed(0, 1000)
	before := memory(n)
	publishKeyed(1000, 1000+*keysMeasured)
	made := (memory(n) - before) / *keysMeasured
	n.terminate()
	n = startNode(t, flags...)
	c = n.dial()
	publishKeyed(0, 1)
	again := (memory(n) - before) / *keysMeasured
	t.Logf("%d keys: %d bytes each when made, %d after a restart", *keysMeasured, made, again)
	if most := 4096; *keysMeasured >= 10_000 && max(made, again) > most {
		t.Errorf("a key takes more than %d bytes", most)
	}
}
