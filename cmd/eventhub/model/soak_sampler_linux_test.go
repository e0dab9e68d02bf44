package model

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

// soakSampler takes samples of the processes of a rig.
type soakSampler struct {
	rig *rig
	web *http.Client

	mu      sync.Mutex
	samples []soakSample
	lives   map[string]int // by name
	pids    map[string]int
	used    map[int]time.Duration // of processors, by process
}

func newSoakSampler(r *rig) *soakSampler {
	s := &soakSampler{rig: r, web: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Second}, lives: map[string]int{}, pids: map[string]int{}, used: map[int]time.Duration{}}
	return s
}

// run takes samples until ctx ends.
func (s *soakSampler) run(ctx context.Context, every time.Duration) {
	beat := time.NewTicker(every)
	defer beat.Stop()
	for {
		select {
		case <-beat.C:
			s.all(ctx)
		case <-ctx.Done():
			return
		}
	}
}

// all takes a sample of each process that runs.
func (s *soakSampler) all(ctx context.Context) {
	for _, h := range s.rig.hubs {
		s.take(ctx, h.name, h.process(), h.role.Besides.Ops)
	}
	for _, n := range s.rig.nodes {
		s.take(ctx, n.Name(), n.PID(), n.Metrics())
	}
}

func (s *soakSampler) take(ctx context.Context, name string, pid int, metrics string) {
	one, ok := processSample(pid)
	if !ok {
		return
	}
	one.heap, one.goroutines = s.ask(ctx, metrics)
	s.mu.Lock()
	defer s.mu.Unlock()
	if was := s.pids[name]; was != pid {
		if was != 0 {
			s.lives[name]++
		}
		s.pids[name] = pid
	}
	one.at, one.name, one.life = s.rig.rec.now(), name, s.lives[name]
	s.samples = append(s.samples, one)
	if used, ok := processTime(pid); ok {
		s.used[pid] = used
	}
}

// processors is the time of processors that hubs and nodes, and the test itself, have used so far.
func (s *soakSampler) processors() (system, test time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, used := range s.used {
		system += used
	}
	test, _ = processTime(os.Getpid())
	return system, test
}

// processTime is the time of processors that a process has used.
func processTime(pid int) (used time.Duration, ok bool) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, false
	}
	_, rest, _ := strings.Cut(string(text), ") ") // of the name
	fields := strings.Fields(rest)
	const user, ticks = 11, 10 * time.Millisecond
	if len(fields) < user+2 {
		return 0, false
	}
	for _, f := range fields[user : user+2] {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0, false
		}
		used += time.Duration(n) * ticks
	}
	return used, true
}

// processSample reads what the system knows of a process. It reports false if there is none, or if
// it has just ended.
func processSample(pid int) (one soakSample, ok bool) {
	dir := "/proc/" + strconv.Itoa(pid)
	files, err := os.ReadDir(dir + "/fd")
	if err != nil {
		return one, false
	}
	status, err := os.ReadFile(dir + "/status")
	if err != nil {
		return one, false
	}
	one.fds = int64(len(files))
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		n, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
		switch name {
		case "VmRSS":
			one.rss = n
		case "Threads":
			one.threads = n
		}
	}
	return one, one.rss > 0
}

// ask returns the heap in KiB and the goroutines of a process by the metrics at an address, or
// zeros if it does not answer.
func (s *soakSampler) ask(ctx context.Context, address string) (heap, goroutines int64) {
	status, text := request(ctx, s.web, http.MethodGet, address+"/metrics", "")
	if status != http.StatusOK {
		return 0, 0
	}
	value := func(name string) int64 {
		_, rest, _ := bytes.Cut(text, []byte("\n"+name+" "))
		line, _, _ := bytes.Cut(rest, []byte("\n"))
		f, _ := strconv.ParseFloat(string(line), 64)
		return int64(f)
	}
	return value("go_memstats_next_gc_bytes") >> 10, value("go_goroutines")
}

// rest is what a hub needs without clients: the least of several samples.
func (s *soakSampler) rest(ctx context.Context, h *hub, quiet time.Duration) (soakSample, error) {
	var least soakSample
	for until := time.Now().Add(quiet); ; wait(ctx, quiet/20) {
		one, ok := processSample(h.process())
		if _, one.goroutines = s.ask(ctx, h.role.Besides.Ops); ok && one.goroutines > 0 {
			if least.goroutines == 0 {
				least = one
			}
			least.goroutines, least.fds = min(least.goroutines, one.goroutines), min(least.fds, one.fds)
		}
		if time.Now().After(until) {
			break
		}
	}
	if least.goroutines == 0 {
		return least, fmt.Errorf("hub %s does not tell its metrics", h.name)
	}
	return least, nil
}
