package embedded

import (
	"syscall"
	"testing"
	"time"
)

// A disk becomes full again and again. Once it has room, the server waits for at most a minute
// before it is restarted. It is restarted ever more rarely when restarts do not help for another
// reason.
func TestPaceOfRestarts(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	// fail plays that streams fail some time after they could be written, and returns how long a
	// restart is not due.
	fail := func(p *pace, after time.Duration, faults ...*fault) (waited time.Duration) {
		p.note(now, nil)
		now = now.Add(after)
		for _, f := range faults {
			p.note(now, f)
		}
		for !p.due(now) {
			now = now.Add(time.Second)
			waited += time.Second
			p.note(now, faults[len(faults)-1])
		}
		p.restart(now)
		return waited
	}
	full := &fault{streams: []string{"orders"}, cause: syscall.ENOSPC.Error()}
	broken := &fault{streams: []string{"orders"}, cause: syscall.EIO.Error()}
	// seen when there is room again
	stopped := &fault{cause: "the embedded nats server has stopped storing"}

	p := &pace{gap: storageGapFirst}
	for range 30 {
		if waited := fail(p, 10*time.Second, full, stopped); waited > time.Minute {
			t.Fatalf("a full disk that had room again waited for %v", waited)
		}
	}
	p = &pace{gap: storageGapFirst}
	var waited time.Duration
	for range 10 {
		waited = fail(p, 10*time.Second, broken)
	}
	if waited < 55*time.Minute || waited > time.Hour {
		t.Errorf("a broken disk waited for %v before its tenth restart, want about an hour", waited)
	}
	if waited := fail(p, 10*time.Second, full); waited > time.Minute {
		t.Errorf("after that, a full disk waited for %v", waited)
	}
	if waited := fail(p, 3*time.Hour, broken); waited > 0 {
		t.Errorf("after hours without a fault, a restart waited for %v", waited)
	}
}
