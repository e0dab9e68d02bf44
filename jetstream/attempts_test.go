package jetstream

import (
	"math/rand/v2"
	"testing"
)

// modelHub is what one hub knows of the deliveries of one event.
type modelHub struct{ known attempts }

// modelGroup is a group of several hubs, one event, and a server that counts every delivery to a
// hub. The attempts bucket holds what hubs noted before they gave the event back.
type modelGroup struct {
	t         *testing.T
	rnd       *rand.Rand
	hubs      []modelHub
	delivered int // the server's count
	bucket    int // the newest note; 0: none

	handed  int // how often a client had the event
	skipped int // deliveries that died with their hub before a client had them
	shown   int // the attempt that a client saw last
}

const modelSeq = 7

// TestAttemptsCountWhatClientsHad drives the bookkeeping of attempts by random histories: an event
// wanders between hubs, is handed out and fails, is given back unseen, is lost with a connection,
// or dies with its hub; hubs forget by their bound or by a restart, and the server forgets its last
// moments. Whatever happens, an attempt is one more than what clients had, plus what died unseen
// with its hub.
func TestAttemptsCountWhatClientsHad(t *testing.T) {
	t.Parallel()
	for seed := range uint64(2_000) {
		m := &modelGroup{t: t, rnd: rand.New(rand.NewPCG(seed, 1)), hubs: make([]modelHub, 1+seed%3)}
		for range 60 {
			m.step(seed)
			if t.Failed() {
				return
			}
		}
	}
}

func (m *modelGroup) step(seed uint64) {
	m.delivered++
	hub := &m.hubs[m.rnd.IntN(len(m.hubs))]
	spared, how := hub.known.arrived(modelSeq, m.delivered)
	switch how {
	case unknown:
		spared = asNoted(m.bucket, spared, m.delivered)
		m.bucket = min(m.bucket, spared)
	case forgotten:
		m.bucket = spared
	case known, settled:
	}
	attempt := max(m.delivered-spared, 1)
	if want := m.handed + m.skipped + 1; attempt != want {
		m.t.Errorf("seed %d: delivery %d is attempt %d, want %d: clients had it %d times, %d died with a hub", seed, m.delivered, attempt, want, m.handed, m.skipped)
	}
	switch m.rnd.IntN(8) {
	case 0, 1, 2: // a client has it, and fails
		if attempt <= m.shown {
			m.t.Errorf("seed %d: attempt %d follows attempt %d", seed, attempt, m.shown)
		}
		m.shown = attempt
		m.handed++
		hub.known.failed(modelSeq, m.delivered, spared, 10)
	case 3, 4, 5: // it goes back unseen: by a pause, an end, a lost connection
		m.bucket = spared + 1
		hub.known.spare(modelSeq, m.delivered, spared, 10)
	case 6: // the hub dies with it
		m.skipped++
		hub.known = attempts{}
	case 7: // a client has it, and the hub dies
		m.shown = attempt
		m.handed++
		hub.known = attempts{}
	}
	if m.rnd.IntN(10) == 0 { // the bound makes a hub forget
		m.hubs[m.rnd.IntN(len(m.hubs))].known = attempts{}
	}
}

// An event that was handed out once and refused once has failed once, however often it went back
// unseen before, between and after, and through whichever hubs.
func TestARefusalIsOneFailure(t *testing.T) {
	t.Parallel()
	var a, b attempts
	bucket := 0
	delivered := 0
	back := func(at *attempts) int {
		delivered++
		spared, how := at.arrived(modelSeq, delivered)
		if how == unknown {
			spared = asNoted(bucket, spared, delivered)
		}
		attempt := delivered - spared
		bucket = spared + 1
		at.spare(modelSeq, delivered, spared, 10)
		return attempt
	}
	for range 6 {
		if got := back(&a); got != 1 {
			t.Fatalf("attempt %d before any client had it", got)
		}
	}
	delivered++
	spared, how := b.arrived(modelSeq, delivered)
	if how != unknown {
		t.Fatal("another hub knows without asking")
	}
	if got := delivered - bucket; got != 1 || spared != 0 {
		t.Fatalf("attempt %d, %d spared", got, spared)
	}
	b.failed(modelSeq, delivered, bucket, 10)
	for range 6 {
		if got := back(&b); got != 2 {
			t.Fatalf("attempt %d after one refusal", got)
		}
	}
}

// A server that was restarted may count deliveries from an older number. Attempts rise all the
// same, on whichever hub, once a hub that knows better has had the event.
func TestAttemptsRiseWhenTheServerForgets(t *testing.T) {
	t.Parallel()
	var a, b attempts
	a.failed(modelSeq, 1, 0, 10)
	a.failed(modelSeq, 2, 0, 10)
	spared, how := a.arrived(modelSeq, 1)
	if attempt := 1 - spared; how != forgotten || attempt != 3 {
		t.Fatalf("attempt %d, %v", attempt, how)
	}
	bucket := spared
	a.failed(modelSeq, 1, spared, 10)
	spared, how = b.arrived(modelSeq, 2)
	if how != unknown {
		t.Fatal("another hub knows without asking")
	}
	spared = asNoted(bucket, spared, 2)
	if attempt := 2 - spared; attempt != 4 {
		t.Fatalf("attempt %d at the other hub", attempt)
	}
	b.failed(modelSeq, 2, spared, 10)
	spared, how = a.arrived(modelSeq, 3)
	if attempt := 3 - asNoted(bucket, spared, 3); how != unknown || attempt != 5 {
		t.Fatalf("attempt %d, %v", attempt, how)
	}
}

func TestAttemptsAreBounded(t *testing.T) {
	t.Parallel()
	var a attempts
	for seq := range uint64(100) {
		full := a.failed(seq, 1, 0, 10)
		if full != (seq >= 10) || len(a.accounts) > 10 {
			t.Fatalf("after %d events %d are kept, full %v", seq+1, len(a.accounts), full)
		}
	}
	a.settledUpTo(1_000, 0)
	if len(a.accounts) != 0 {
		t.Errorf("%d are kept behind the ack floor", len(a.accounts))
	}
}
