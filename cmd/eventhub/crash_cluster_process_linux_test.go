package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"eventhub/jetstream/natstest"
	"eventhub/jetstream/natstest/lossyfs"
)

// clusterCrash is a crash of machines of a cluster with three copies of each stream, or their disks
// are full.
type clusterCrash struct {
	name     string
	interval time.Duration // 0: always
	machines int           // how many crash at once
	disks    bool          // their disks are lost, too
	full     bool          // their disks are full instead; their servers are killed afterwards
	bound    time.Duration // how old what is lost may be
}

var clusterCrashes = []clusterCrash{
	{name: "one of three, syncing every two minutes", interval: 2 * time.Minute, machines: 1},
	{name: "one of three and its disk, syncing every two minutes", interval: 2 * time.Minute, machines: 1, disks: true},
	{name: "one of three is full, syncing every two minutes", interval: 2 * time.Minute, machines: 1, full: true},
	{name: "three of three are full, syncing every two minutes", interval: 2 * time.Minute, machines: 3, full: true},
	{name: "one of three is full, syncing always", machines: 1, full: true},
	{name: "three of three are full, syncing always", machines: 3, full: true},
	{name: "three of three, syncing always", machines: 3},
	{name: "three of three, syncing every second", interval: time.Second, machines: 3, bound: 3 * time.Second},
	{name: "three of three, syncing every two minutes", interval: 2 * time.Minute, machines: 3, bound: time.Hour},
}

// crashMachines crashes machines of a cluster under load. What was answered OK is there afterwards,
// but for what the servers had not synced when all machines crash at once.
func crashMachines(t *testing.T, crash clusterCrash) {
	t.Helper()
	disks := make([]*lossyfs.System, 3)
	storage := make([]natstest.Storage, len(disks))
	for i := range disks {
		disks[i] = lossyfs.Mount(t)
		storage[i] = natstest.Storage{Dir: filepath.Join(disks[i].Dir(), "store"), Sync: crash.interval, Always: crash.interval == 0}
	}
	servers := natstest.StartStoring(t, storage...)
	look := natstest.Look(t, natstest.URLs(servers)...)
	look.Replicating(3)
	flags := append([]string{"--nats-url=" + servers[0].URL() + "," + servers[1].URL() + "," + servers[2].URL(), "--replicas=3", "--ack-wait=5s"}, crashLimits...)
	hub := startNode(t, flags...)
	load := startCrashLoad(t, hub)
	<-time.After(*crashFor)
	if crash.full {
		for _, disk := range disks[:crash.machines] {
			disk.SetRoom(0)
		}
		<-time.After(*crashFor)
	}
	crashed := time.Now()
	if crash.full {
		for i, s := range servers[:crash.machines] {
			s.Kill()
			disks[i].SetRoom(-1)
		}
	} else {
		lossyfs.Crash(t, nil, func() {
			for _, s := range servers[:crash.machines] {
				s.Strike()
			}
		}, func() {
			for _, s := range servers[:crash.machines] {
				s.Kill()
			}
		}, disks[:crash.machines]...)
	}
	hub.kill() // and its clients
	load.wg.Wait()

	for _, s := range servers[:crash.machines] {
		if crash.disks {
			s.Wipe()
		}
		s.Start()
	}
	look.Replicating(3)
	if crash.machines == len(servers) && crash.interval > 0 && !crash.full {
		equalCopies(t, servers)
	}
	hub = startNode(t, flags...)
	losses := load.losses(t, hub, crashed)
	within := func(loss crashLoss) bool { return loss.lost == 0 || loss.oldest <= crash.bound }
	for deadline := time.Now().Add(patience); !every(losses, within) && time.Now().Before(deadline); {
		<-time.After(time.Second)
		losses = load.losses(t, hub, crashed) // a leader may not have caught up yet
	}
	for _, loss := range losses {
		if !within(loss) {
			t.Errorf("%d %s of %d are lost, the oldest was answered %v before the crash", loss.lost, loss.kind, loss.answered, loss.oldest)
		}
		t.Logf("%-15s answered %6d  lost %5d  oldest %v", loss.kind, loss.answered, loss.lost, loss.oldest.Round(time.Millisecond))
	}
	checkGroup(t, hub, load, crashed)
	hub.terminate()
}

// equalCopies does what docs/operations.md says after all machines crashed.
func equalCopies(t *testing.T, servers []*natstest.Server) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, errs, code := tool(ctx, "topics", "replicas", "1", "--replicas=3", "--nats-url="+natstest.URLs(servers)[0])
	if code != 0 {
		t.Logf("the copies differ too much: exit code %d\n%s%s", code, out, errs)
		makeAnew(t, servers)
		return
	}
	if out, errs, code := tool(t.Context(), "topics", "replicas", "3", "--replicas=3", "--nats-url="+natstest.URLs(servers)[0]); code != 0 {
		t.Fatalf("3 copies: exit code %d\n%s%s", code, out, errs)
	}
}

// makeAnew makes each stream anew from the copy of its leader.
func makeAnew(t *testing.T, servers []*natstest.Server) {
	t.Helper()
	c := &command{t: t}
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), c.tool(), args...)
		cmd.Env = append(os.Environ(), "NATS_URL="+natstest.URLs(servers)[0], "XDG_CONFIG_HOME="+t.TempDir(), "NO_COLOR=1")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("nats %v: %v\n%s", args, err, out)
		}
		return string(out)
	}
	dir := t.TempDir()
	for _, stream := range strings.Fields(run("stream", "ls", "--names", "--all")) {
		run("stream", "backup", stream, filepath.Join(dir, stream), "--no-progress")
		run("stream", "rm", "--force", stream)
		run("stream", "restore", filepath.Join(dir, stream), "--no-progress", "--replicas=3")
	}
}

func every(losses []crashLoss, ok func(crashLoss) bool) bool {
	return !slices.ContainsFunc(losses, func(l crashLoss) bool { return !ok(l) })
}
