//go:build unix && !race

package main

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// These tests measure the hub and its clients under attack. With the race detector, a test of the
// same name as the last one measures nothing.

// TestFloods lets attackers do all they can to a hub of its own process, while a neighbour
// publishes and consumes at a steady pace. The neighbour loses nothing and waits for nothing, and
// the hub's memory stays within bounds.
func TestFloods(t *testing.T) {
	f := newFloodedHub(t, "--limit-auth-timeout=1s",
		"--limit-connections="+strconv.Itoa(floodConnections), "--limit-waiting-connections="+strconv.Itoa(floodWaiting))
	quiet := f.neighbour.during(func() { f.pass(*attackFor) })
	t.Logf("%-22s neighbour %v; memory %d MiB", "nobody else", quiet, f.memory(t))
	for _, flood := range []struct {
		name string
		run  func(*testing.T, *floodedHub)
		most int // MiB by which the process may grow; what was measured is in the comments
	}{
		{"frames", floodFrames, 256},                    // 60
		{"frames without AUTH", floodUnauthorized, 256}, // 10
		{"connections", floodConnects, 256},             // 5
		{"connections held", floodHeld, 256},            // 30
		{"half-open upgrades", floodHalfOpen, 256},      // 10
		{"one-byte fragments", floodFragments, 256},     // 30
		{"unfinished messages", floodUnfinished, 640},   // 360, of which the hub's bound is 256
		{"unfinished AUTH", floodUnfinishedAuth, 256},   // 100: 64 KiB a connection
		{"pings", floodPings, 256},                      // 5
		{"pings, no reader", floodPingsUnread, 256},     // 5
		{"never reads", floodUnread, 640},               // 400
		{"never reads, groups", floodUnreadGroups, 640},
	} {
		t.Run(flood.name, func(t *testing.T) {
			before := f.memory(t)
			peak := f.watchMemory(t)
			var got latency
			for range attackTries {
				got = f.neighbour.during(func() { flood.run(t, f) })
				if got.p99 <= neighbourPatience {
					break
				}
				t.Logf("the neighbour had to wait: %v", got)
			}
			most := peak()
			t.Logf("%-22s neighbour %v; memory %d MiB before, %d at most", flood.name, got, before, most)
			if most > before+flood.most {
				t.Errorf("the hub grew from %d to %d MiB", before, most)
			}
			if got.p99 > neighbourPatience {
				t.Errorf("the neighbour had to wait each time: %v", got)
			}
		})
	}
	f.neighbour.stop()
	if text := f.hub.log.String(); strings.Contains(text, f.token) || strings.Contains(text, "eyJ") || strings.Contains(text, "xyzzy") {
		t.Error("the log holds a token or a payload")
	}
	f.hub.terminate()
}

// TestAttacks runs each attack beside a neighbour of its own token, which publishes, consumes, and
// uses the HTTP API at a steady pace. The neighbour loses nothing and is not refused, its times
// stay near those beside a permitted client, and the hub's memory and disk stay within bounds.
func TestAttacks(t *testing.T) {
	f := newAttackedHub(t, 1)
	f.neighbour.during(func() { f.pass(min(*attackFor, attackTelling)) })
	base := f.under(t, min(*attackFor, attackTelling), permitted)
	for _, a := range attacks {
		t.Run(a.name, func(t *testing.T) {
			memory, disk := f.memory(t), f.disk(t)
			base := base
			// A short attack does not tell. Beside it, nobody waits for long, or, on a slow
			// machine, does so beside the permitted load as well, if that is as long.
			beside := func(d time.Duration) {
				if a.like != nil {
					base = f.under(t, d, attack{name: a.name + likeSuffix, scopes: a.scopes, run: a.like})
				}
			}
			if *attackFor >= attackTelling {
				beside(*attackFor)
			}
			peak := f.watchMemory(t)
			var got times
			var lasted time.Duration
			for try := range attackTries {
				began := time.Now()
				got = f.under(t, *attackFor, a)
				lasted = time.Since(began)
				if got.patient(1, base) {
					break
				}
				t.Logf("try %d: somebody had to wait", try)
			}
			most := peak()
			if limit := memory + orDefault(a.memory, 256); most > limit {
				t.Errorf("the hub's memory grew from %d to %d MiB", memory, most)
			}
			if now := f.disk(t); now > disk+orDefault(a.disk, 64) {
				t.Errorf("the hub's data grew from %d to %d MiB", disk, now)
			}
			if a.check != nil {
				a.check(t, f)
			}
			if !got.patient(1, base) {
				beside(lasted)
			}
			if !got.patient(1, base) {
				t.Errorf("somebody had to wait each time: %v", got)
			}
			for _, got := range []struct {
				what      string
				now, base latency
			}{{"event", got.events, base.events}, {"request", got.requests, base.requests}, {"join", got.joins, base.joins}} {
				if *attackFor >= attackTelling && got.now.p99 > attackFactor*max(got.base.p99, time.Millisecond) {
					t.Errorf("the 99th percentile of the neighbour's %ss is over %d times that beside a permitted client: %v, %v", got.what, attackFactor, got.now, got.base)
				}
			}
		})
	}
	f.restart(t)
}

// TestAttacksAtOnce runs all attacks at a time, in one process that has half a core. The hub serves
// the neighbour all the while, keeps no memory but that of what it stores, and restarts in time.
func TestAttacksAtOnce(t *testing.T) {
	f := newAttackedHub(t, 1)
	f.neighbour.during(func() { f.pass(min(*attackFor, attackTelling)) })
	base := f.under(t, min(*attackFor, attackTelling), permitted)
	together := slices.DeleteFunc(slices.Clone(attacks), func(a attack) bool { return a.alone })
	memory, peak := f.memory(t), f.watchMemory(t)
	var got times
	for try := range attackTries {
		got = f.under(t, *attackFor, together...)
		if got.patient(2, base) {
			break
		}
		t.Logf("try %d: somebody had to wait", try)
	}
	t.Logf("memory %d MiB before, %d at most; data %d MiB", memory, peak(), f.disk(t))
	if !got.patient(2, base) {
		t.Errorf("somebody had to wait each time: %v", got)
	}
	long, kept := *attackFor >= attackTelling, 0
	if long {
		f.pass(memoryReturns)
		kept = live(t, f.hub)
		t.Logf("%v after the attacks: %d MiB, %d in use", memoryReturns, f.memory(t), kept)
	}
	again := f.restart(t)
	if !long {
		return
	}
	fresh := live(t, again)
	resident, err := residentSet(again)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("a hub that begins with the same data: %d MiB, %d in use", resident, fresh)
	if kept > fresh+memoryKept {
		t.Errorf("the hub used %d MiB %v after the attacks, and a hub that begins with the same data uses %d", kept, memoryReturns, fresh)
	}
}
