package outbox

import (
	"cmp"
	"encoding/json"
	"math"
	"slices"
	"strings"
)

// kvText is the maximum size of a worker name and of an error text in a KVStore, in bytes of JSON
// including the quotes. Every record reserves this much for each of the two.
const kvText = 200

// shard is the content of one entry of the bucket.
type shard struct {
	// Last is the last sequence number assigned. Each shard numbers its own records, which suffices
	// because a lane lies in a single shard.
	Last    int64     `json:"last"`
	Records []*Record `json:"-"` // in sequence order
}

// shardJSON is the stored form of a shard. It holds payloads as strings, because the encoder would
// change their bytes.
type shardJSON struct {
	*shard
	Rows []rowJSON `json:"records"`
}

type rowJSON struct {
	*Record
	Payload string `json:"payload"`
	// Attempts is omitted when it is 0, unlike in earlier versions. The saved bytes make claims
	// possible in entries that those versions filled.
	Attempts int `json:"attempts,omitempty"`
}

func (sh *shard) encode() ([]byte, error) {
	rows := make([]rowJSON, len(sh.Records))
	for i, r := range sh.Records {
		rows[i] = rowJSON{r, string(r.Payload), r.Attempts}
	}
	return json.Marshal(shardJSON{sh, rows})
}

// reserved returns the size in bytes of the shard with every record in its largest form. If NATS
// accepts an entry of that size, every later claim, renewal, and settlement of these records fits
// too.
func (sh *shard) reserved() (int, error) {
	largest := &shard{Last: sh.Last, Records: make([]*Record, len(sh.Records))}
	for i, r := range sh.Records {
		largest.Records[i] = r.largest()
	}
	value, err := largest.encode()
	return len(value), err
}

// largest returns a copy of the record with every field that claims, renewals, and settlements
// write at its maximum length. The combination need not be reachable.
func (r *Record) largest() *Record {
	l := *r
	text := strings.Repeat("x", kvText-len(`""`))
	if jsonLen(l.ClaimedBy) < kvText {
		l.ClaimedBy = text
	}
	if jsonLen(l.LastErr) < kvText {
		l.LastErr = text
	}
	l.Status, l.Attempts = Claimed, math.MaxInt // Claimed is the longest status
	l.LeaseUntil, l.NextAt, l.PublishBegan = math.MaxInt64, math.MaxInt64, math.MaxInt64
	return &l
}

func decodeShard(value []byte) (*shard, error) {
	sh := new(shard)
	if len(value) == 0 {
		return sh, nil
	}
	read := shardJSON{shard: sh}
	if err := json.Unmarshal(value, &read); err != nil {
		return nil, err
	}
	for _, row := range read.Rows {
		row.Record.Payload, row.Record.Attempts = json.RawMessage(row.Payload), row.Attempts
		sh.Records = append(sh.Records, row.Record)
	}
	return sh, nil
}

func (sh *shard) claim(opts *ClaimOptions, limit, left int, now int64) (got []*Record, more bool) {
	waits := make(map[string]bool) // lanes blocked by an earlier record
	for _, r := range sh.Records {
		lane := r.lane()
		switch {
		case waits[lane]:
		case r.Status == Errored && opts.PassErrors:
		case r.Status != Pending || r.NextAt > now || slices.Contains(opts.ExceptTopics, r.Topic):
			waits[lane] = true
		case len(got) == limit || len(r.Payload) > left && left < opts.bytes():
			return got, true
		default:
			left -= len(r.Payload)
			r.Status, r.ClaimedBy, r.LeaseUntil = Claimed, opts.Worker, now+opts.Lease.Milliseconds()
			if r.PublishBegan == 0 {
				r.PublishBegan = cmp.Or(opts.Began, now)
			}
			got = append(got, r)
		}
	}
	return got, false
}

// hasClaimed reports whether any record of the shard is claimed.
func (sh *shard) hasClaimed() bool {
	return slices.ContainsFunc(sh.Records, func(r *Record) bool { return r.Status == Claimed })
}

// fail ends a worker's claim of the record. If texts is false, fail drops the error text, which
// makes the record smaller than it was while claimed.
func (r *Record) fail(f *Failure, now int64, texts bool) {
	r.Status, r.ClaimedBy, r.LeaseUntil, r.NextAt = Pending, "", 0, now+f.Delay.Milliseconds()
	if f.Park {
		r.Status = Errored
	}
	if f.Counts {
		r.Attempts++
	}
	if f.Unsent {
		r.PublishBegan = 0
	}
	switch {
	case !texts:
		r.LastErr = ""
	case f.Err != "":
		r.LastErr = kvErrText(f.Err)
	}
}

// kvErrText truncates an error text to what kvText allows.
func kvErrText(s string) string {
	s = errText(s)
	size := len(`""`)
	for i, c := range s {
		if size += jsonLen(string(c)) - len(`""`); size > kvText {
			return s[:i]
		}
	}
	return s
}

// jsonLen returns the length in bytes of a string as JSON, with its quotes.
func jsonLen(s string) int {
	b, _ := json.Marshal(s) // cannot fail for a string
	return len(b)
}
