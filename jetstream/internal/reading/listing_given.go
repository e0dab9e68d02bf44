package reading

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
)

// listingsBucket says which keys were given on the pages of each listing, so that any hub can
// continue it: a record for each page but the last, under <listing>.<record>. A record is the
// number of the page's before it, and then a hash of each key.
const (
	listingsBucket = "eventhub_listings"
	listingsStream = "KV_" + listingsBucket
	// listingsBytes bounds it. The oldest records go when it is full, and their listings begin
	// anew.
	listingsBytes = 256 << 20
)

const (
	// listingGrace is how long the records of a listing stay that has ended, for a client that asks
	// for its last page again.
	listingGrace = 30 * time.Second
	// listingsFinished is the most listings of which this hub removes the records; those of others
	// go with time.
	listingsFinished = 1_000
	// givenWait is how long a replica may take to know of a record.
	givenWait = 2 * time.Second
)

func recordPrefix(listing string) string { return "$KV." + listingsBucket + "." + listing + "." }

// record stores which keys the page gives, and moves the cursor behind it.
func (l *listing) record(ctx context.Context) error {
	data := make([]byte, 8, 8+8*len(l.page.Events))
	binary.BigEndian.PutUint64(data, l.at.last)
	for _, e := range l.page.Events {
		data = binary.BigEndian.AppendUint64(data, l.at.keyHash(e.Key))
	}
	var number [8]byte
	_, _ = rand.Read(number[:]) // never fails
	n := binary.BigEndian.Uint64(number[:]) | 1
	msg := &nats.Msg{Subject: recordPrefix(l.at.name()) + strconv.FormatUint(n, 16), Data: data}
	if err := l.reads.putRecord(ctx, msg); err != nil {
		return fmt.Errorf("jetstream: write to bucket %s: %w", listingsBucket, err)
	}
	l.at.last = n
	return nil
}

// putRecord stores a record, and makes the bucket when it is not there.
func (r *Reads) putRecord(ctx context.Context, msg *nats.Msg) error {
	ctx, cancel := context.WithTimeout(ctx, conn.PublishWait)
	defer cancel()
	for wait := 2 * time.Millisecond; ; wait = min(2*wait, 250*time.Millisecond) {
		// A leader that changes does not answer.
		reply, err := conn.Again(ctx, func(ctx context.Context) (*nats.Msg, error) {
			return r.Conn.Link().Request(ctx, msg.Subject, msg.Data)
		})
		if err != nil {
			return err
		}
		if !conn.NoResponders(reply) {
			_, err := conn.ParsePubAck(reply.Data, listingsStream)
			return err
		}
		if err := r.makeListings(ctx); err != nil {
			return err
		}
		if err := r.Conn.Pause(ctx, wait); err != nil { // it was just made, or has no leader now
			return err
		}
	}
}

// makeListings makes the bucket unless it exists. It is a KV bucket but for one thing: the oldest
// go when it is full.
func (r *Reads) makeListings(ctx context.Context) error {
	cfg := natsjs.StreamConfig{
		Name: listingsStream, Description: "eventhub: what was given on the pages of listings", Subjects: []string{"$KV." + listingsBucket + ".>"},
		MaxMsgsPerSubject: 1, MaxAge: listingLife + time.Minute, MaxBytes: listingsBytes, Discard: natsjs.DiscardOld,
		AllowRollup: true, DenyDelete: true, AllowDirect: true, Replicas: r.Replicas,
	}
	if r.Memory {
		cfg.Storage = natsjs.MemoryStorage
	}
	_, err := r.Conn.JS.CreateStream(ctx, cfg)
	if errors.Is(err, natsjs.ErrStreamNameAlreadyInUse) {
		return nil // another hub, or another version, made it
	}
	if err != nil {
		return fmt.Errorf("jetstream: create bucket %s: %w", listingsBucket, err)
	}
	return nil
}

// given marks those of the hashes true whose keys were given on the pages that lead to the cursor.
func (l *listing) given(ctx context.Context, hashes map[uint64]bool) error {
	if l.at.last == 0 {
		return nil
	}
	for deadline := time.Now().Add(givenWait); ; {
		lost, err := l.readGiven(ctx, hashes)
		if err == nil && lost == 0 {
			return nil
		}
		if err != nil && !errors.Is(err, conn.ErrNoDirect) {
			return err
		}
		subject := recordPrefix(l.at.name()) + strconv.FormatUint(lost, 16)
		switch _, err := l.reads.Conn.LastBySubject(ctx, listingsStream, subject); {
		case errors.Is(err, event.ErrNotFound):
			return errListingOver("what was on its pages is not known any more")
		case err != nil:
			return err
		case time.Now().After(deadline):
			return ErrBehind
		}
		if err := l.reads.Conn.Pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

// readGiven reads the records at any replica. lost is the number of a record that the replica
// lacks, or 0.
func (l *listing) readGiven(ctx context.Context, hashes map[uint64]bool) (lost uint64, err error) {
	before := make(map[uint64]uint64) // the record before each
	found := make(map[uint64][]uint64)
	prefix := recordPrefix(l.at.name())
	q := conn.DirectQuery{Seq: 1, NextBySubj: prefix + "*"}
	for more := true; more; {
		q.Batch = conn.MaxDirect
		end, err := l.reads.Conn.Direct(ctx, listingsStream, &q, func(m *conn.StoredMsg, _ uint64) error {
			q.Seq = m.Seq + 1
			n, err := strconv.ParseUint(m.Subject[len(prefix):], 16, 64)
			if err != nil || len(m.Data)%8 != 0 || len(m.Data) == 0 {
				return nil //nolint:nilerr // nobody's: it is missed where it is needed
			}
			before[n] = binary.BigEndian.Uint64(m.Data)
			for b := m.Data[8:]; len(b) > 0; b = b[8:] {
				hash := binary.BigEndian.Uint64(b)
				if _, wanted := hashes[hash]; wanted {
					found[n] = append(found[n], hash)
				}
			}
			return nil
		})
		if err != nil {
			return l.at.last, err
		}
		more = end.Pending > 0 && end.Got > 0
	}
	// A page that was asked for again has a record that leads elsewhere.
	for n := l.at.last; n != 0; {
		next, known := before[n]
		if !known {
			return n, nil
		}
		for _, hash := range found[n] {
			hashes[hash] = true
		}
		delete(before, n) // a circle, which only a forged record makes, ends as a lost one
		n = next
	}
	return 0, nil
}

// finish has the records of a listing removed that has ended.
func (s *listings) finish(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.finished) < listingsFinished {
		s.finished = append(s.finished, finishedListing{name, time.Now()})
	}
}

// due takes out the listings that ended before a moment.
func (s *listings) due(before time.Time) (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.finished) > 0 && s.finished[0].at.Before(before) {
		names = append(names, s.finished[0].name)
		s.finished = s.finished[1:]
	}
	return names
}

// ForgetListings removes the records of the listings that ended before a moment, as far as they
// ended on this hub. It returns how many listings that are.
func (r *Reads) ForgetListings(before time.Time) int {
	names := r.listings.due(before)
	for _, name := range names {
		r.forgetGiven(r.Conn.Ctx, name)
	}
	return len(names)
}

// forgetGiven removes the records of a listing.
func (r *Reads) forgetGiven(ctx context.Context, name string) {
	ctx, cancel := context.WithTimeout(ctx, conn.PublishWait)
	defer cancel()
	body, err := json.Marshal(map[string]string{"filter": recordPrefix(name) + "*"})
	if err == nil {
		_, err = r.Conn.Link().Request(ctx, r.Conn.API+"STREAM.PURGE."+listingsStream, body)
	}
	if err != nil && ctx.Err() == nil {
		r.Log.LogAttrs(ctx, slog.LevelDebug, "failed to remove the records of a listing; they go with time", slog.Any("error", err))
	}
}
