package outbox

import (
	"cmp"
	"encoding/json"
	"math"
	"slices"
	"strings"
)

// kvText bounds, in bytes as JSON with its quotes, the name of a worker and the text of an error in a KVStore. Every record
// reserves as much for each.
const kvText = 200

// shard is what one entry holds.
type shard struct {
	// Last is the sequence that was given out last. Each shard counts for itself, which is enough for the order of a lane.
	Last    int64     `json:"last"`
	Records []*Record `json:"-"` // in order
}

// shardJSON is a shard as it is written. Payloads are strings in it, for the encoder would change their bytes.
type shardJSON struct {
	*shard
	Rows []rowJSON `json:"records"`
}

type rowJSON struct {
	*Record
	Payload string `json:"payload"`
	// Attempts is left out when it is 0, unlike in earlier versions: that makes room to claim in the entries that they filled.
	Attempts int `json:"attempts,omitempty"`
}

func (sh *shard) encode() ([]byte, error) {
	rows := make([]rowJSON, len(sh.Records))
	for i, r := range sh.Records {
		rows[i] = rowJSON{r, string(r.Payload), r.Attempts}
	}
	return json.Marshal(shardJSON{sh, rows})
}

// reserved is the size in bytes that the shard has with every record in its largest form: a NATS that takes so much takes all
// that can become of these records.
func (sh *shard) reserved() (int, error) {
	largest := &shard{Last: sh.Last, Records: make([]*Record, len(sh.Records))}
	for i, r := range sh.Records {
		largest.Records[i] = r.largest()
	}
	value, err := largest.encode()
	return len(value), err
}

// largest is the record in the form that takes most bytes of all that claims, renewals and settlements can give it: each field
// that they write is as long as it may become, whether they can be so together or not.
func (r *Record) largest() *Record {
	l := *r
	text := strings.Repeat("x", kvText-len(`""`))
	if jsonLen(l.ClaimedBy) < kvText {
		l.ClaimedBy = text
	}
	if jsonLen(l.LastErr) < kvText {
		l.LastErr = text
	}
	l.Status, l.Attempts = Claimed, math.MaxInt // no status is longer
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
	waits := make(map[string]bool) // lanes that something waits in
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

// hasClaimed says whether a worker has records of the shard.
func (sh *shard) hasClaimed() bool {
	return slices.ContainsFunc(sh.Records, func(r *Record) bool { return r.Status == Claimed })
}

// fail ends a worker's hold. Without texts it makes the record smaller than it was while claimed.
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

// kvErrText is an error's text as a KVStore keeps it: as much of its beginning as kvText allows.
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

// jsonLen is how many bytes a string has as JSON, with its quotes.
func jsonLen(s string) int {
	b, _ := json.Marshal(s) // no string fails
	return len(b)
}
