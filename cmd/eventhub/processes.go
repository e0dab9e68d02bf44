package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"

	psutil "github.com/shirou/gopsutil/v4/process"

	"eventhub/projections/process"
)

// processWatch reads the process table of this host. Its methods must not be called concurrently.
type processWatch struct {
	host string
	top  int
	pids []int32
	// known holds the processes of the last reading, because CPU use is measured between readings.
	known map[int32]*psutil.Process
}

// newProcessWatch watches the top processes by CPU use and the processes pids, which must exist.
func newProcessWatch(ctx context.Context, top int, pids []int32) (*processWatch, error) {
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("read host name: %w", err)
	}
	for _, pid := range pids {
		if there, err := psutil.PidExistsWithContext(ctx, pid); err != nil || !there {
			return nil, fmt.Errorf("process %d does not exist; use the id of a running process (--pid)", pid)
		}
	}
	return &processWatch{host: host, top: top, pids: pids, known: make(map[int32]*psutil.Process)}, nil
}

// read returns a heartbeat for each watched process that is alive. CPU use is in percent of one
// core since the last reading; in the first reading, since the process started.
func (w *processWatch) read(ctx context.Context) ([]process.Heartbeat, error) {
	candidates := w.pids
	if w.top > 0 {
		all, err := psutil.PidsWithContext(ctx)
		if err != nil {
			return nil, fmt.Errorf("read the process table: %w", err)
		}
		candidates = all
	}
	seen := make(map[int32]*psutil.Process, len(candidates))
	var beats []process.Heartbeat
	for _, pid := range candidates {
		p, h, err := w.readOne(ctx, pid)
		if err != nil {
			continue // the process has ended or belongs to another user
		}
		seen[pid] = p
		beats = append(beats, h)
	}
	w.known = seen
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if w.top > 0 {
		slices.SortFunc(beats, func(a, b process.Heartbeat) int {
			return cmp.Or(cmp.Compare(b.CPUPct, a.CPUPct), cmp.Compare(b.MemMB, a.MemMB), cmp.Compare(a.PID, b.PID))
		})
		rank := 0
		beats = slices.DeleteFunc(beats, func(h process.Heartbeat) bool {
			rank++
			return rank > w.top && !slices.Contains(w.pids, int32(h.PID)) //nolint:gosec // converted from an int32
		})
	}
	return beats, nil
}

func (w *processWatch) readOne(ctx context.Context, pid int32) (*psutil.Process, process.Heartbeat, error) {
	p, err := psutil.NewProcessWithContext(ctx, pid)
	if err != nil {
		return nil, process.Heartbeat{}, err
	}
	var cpu float64
	if old := w.known[pid]; old != nil && same(ctx, old, p) {
		p = old
		cpu, err = p.PercentWithContext(ctx, 0)
	} else {
		// The first call of Percent sets the starting point for the next.
		_, _ = p.PercentWithContext(ctx, 0)
		cpu, err = p.CPUPercentWithContext(ctx)
	}
	name, nameErr := p.NameWithContext(ctx)
	mem, memErr := p.MemoryInfoWithContext(ctx)
	if err := errors.Join(err, nameErr, memErr); err != nil {
		return nil, process.Heartbeat{}, err
	}
	if name == "" {
		return nil, process.Heartbeat{}, errors.New("process has no name")
	}
	return p, process.Heartbeat{
		PID: int64(pid), Name: name, Host: w.host,
		CPUPct: round(cpu), MemMB: round(float64(mem.RSS) / (1 << 20)),
	}, nil
}

// same reports whether two readings of a process id belong to the same process.
func same(ctx context.Context, a, b *psutil.Process) bool {
	began, err := a.CreateTimeWithContext(ctx)
	if err != nil {
		return false
	}
	again, err := b.CreateTimeWithContext(ctx)
	return err == nil && began == again
}

// round rounds to one decimal place.
func round(f float64) float64 { return math.Round(f*10) / 10 }
