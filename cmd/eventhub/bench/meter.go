package bench

import (
	"fmt"
	"os"
	"runtime"
	"time"

	psutil "github.com/shirou/gopsutil/v4/process"
)

// meter measures the duration of a round and the CPU time that the servers and the client process
// spend in it.
type meter struct {
	servers []*psutil.Process
	nats    []*psutil.Process // those of servers that are nats-servers behind a hub
	client  *psutil.Process
	start   time.Time
	before  usage
}

// usage is CPU time in seconds.
type usage struct{ client, server, nats float64 }

// newMeter starts a measurement with this process as the client.
func (s *system) newMeter(via string) (*meter, error) {
	return s.newMeterOf(via, os.Getpid())
}

// newMeterOf starts a measurement with another process as the client.
func (s *system) newMeterOf(via string, client int) (*meter, error) {
	m := &meter{}
	var err error
	if m.servers, err = s.servers(via); err != nil {
		return nil, err
	}
	if s.target.external() && !isNative(via) {
		m.nats = m.servers[len(m.servers)-len(s.nativePIDs):]
	}
	if m.client, err = psutil.NewProcess(int32(client)); err != nil { //nolint:gosec // process ids fit
		return nil, fmt.Errorf("find client process %d: %w", client, err)
	}
	runtime.GC() // so that this round does not pay for garbage of earlier rounds
	if m.before, err = m.read(); err != nil {
		return nil, err
	}
	m.start = time.Now()
	return m, nil
}

func (m *meter) read() (u usage, err error) {
	if u.client, err = cpuSeconds(m.client); err != nil {
		return u, err
	}
	if u.server, err = cpuSeconds(m.servers...); err != nil {
		return u, err
	}
	u.nats, err = cpuSeconds(m.nats...)
	return u, err
}

// cpuSeconds returns the total CPU time of the processes in seconds.
func cpuSeconds(processes ...*psutil.Process) (float64, error) {
	sum := 0.0
	for _, p := range processes {
		t, err := p.Times()
		if err != nil {
			return 0, fmt.Errorf("read the CPU time of process %d: %w", p.Pid, err)
		}
		sum += t.User + t.System
	}
	return sum, nil
}

// stop ends the measurement of n events and stores it in r.
func (m *meter) stop(n int, r *Result) error {
	took := time.Since(m.start)
	after, err := m.read()
	if err != nil {
		return err
	}
	micros := func(seconds float64) float64 { return round(seconds*1e6/float64(n), 3) }
	r.MS = round(float64(took)/1e6, 3)
	r.MPS = round(float64(n)/took.Seconds(), 1)
	r.ClientCPU = micros(after.client - m.before.client)
	if len(m.servers) == 0 {
		return nil
	}
	r.ServerCPU = micros(after.server - m.before.server)
	r.NATSCPU = micros(after.nats - m.before.nats)
	rss, err := residentKiB(m.servers)
	r.ServerRSS = round(rss, 0)
	return err
}

// residentKiB returns the total resident memory of the processes.
func residentKiB(processes []*psutil.Process) (float64, error) {
	sum := 0.0
	for _, p := range processes {
		m, err := p.MemoryInfo()
		if err != nil {
			return 0, fmt.Errorf("read the memory of process %d: %w", p.Pid, err)
		}
		sum += float64(m.RSS) / 1024
	}
	return sum, nil
}
