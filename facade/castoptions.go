package facade

import (
	"strconv"
	"strings"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/jsonscan"
)

const (
	modeBroadcast = "broadcast"
	// maxHistory is the most events of opts.history.
	maxHistory = 1_000
	// maxInterval is the longest opts.minIntervalMs, in milliseconds.
	maxInterval = 60_000
	// maxPos is the longest pos in bytes.
	maxPos = 64
)

// What a broadcast does when its socket does not keep up.
const (
	slowSkip    = "skip"
	slowCatchUp = "catchup"
	slowClose   = "close"
)

// castOptions are the options of a SUBSCRIBE of a broadcast.
type castOptions struct {
	history  int
	snapshot bool
	ends     bool   // opts.snapshotEnd: a SNAPSHOT ends the snapshot
	pos      *place // opts.from is "pos"
	after    *jetstream.Position
	slow     string
	conflate bool
	interval time.Duration
	presence bool
	version  int // of the schema, as *schemas.Registry.View takes it; 0: events stay as they are
}

// place is a place in the stream of a topic: behind the event with a sequence.
type place struct {
	made int64 // when the stream was created, in nanoseconds
	seq  uint64
}

// appendPos appends the text of a place: <made in base 36>-<seq>.
func appendPos(dst []byte, made int64, seq uint64) []byte {
	dst = append(strconv.AppendInt(dst, made, 36), '-')
	return strconv.AppendUint(dst, seq, 10)
}

func parsePos(text string) (*place, bool) {
	made, seq, found := strings.Cut(text, "-")
	if !found || len(text) > maxPos {
		return nil, false
	}
	var p place
	var err error
	if p.made, err = strconv.ParseInt(made, 36, 64); err != nil || p.made < 0 {
		return nil, false
	}
	if p.seq, err = strconv.ParseUint(seq, 10, 64); err != nil {
		return nil, false
	}
	return &p, true
}

// readCastOptions reads the opts of a SUBSCRIBE or UNSUBSCRIBE. It returns nil if they are not
// those of a broadcast.
func readCastOptions(o op, opts []byte) (*castOptions, *fault) {
	if !isObject(opts) {
		return nil, nil //nolint:nilnil // subscribeOptions refuses what is no object
	}
	raw := make(map[string][]byte)
	for w := jsonscan.Walk(opts, 0); w.Next(); {
		raw[string(unquoteName(w.Key, nil))] = w.Value
	}
	if missing(raw["mode"]) {
		return nil, nil //nolint:nilnil // a group
	}
	var r optionReader
	if mode := r.string("mode", raw["mode"]); mode != modeBroadcast {
		r.refuse("opts.mode must be " + modeBroadcast + "; leave it out for a group")
	}
	c := &castOptions{slow: slowSkip}
	if r.fail != nil || o == opUnsubscribe {
		return c, r.fail
	}
	n, _ := r.integer("history", raw["history"], 0, maxHistory)
	c.history = int(n)
	c.snapshot = r.bool("snapshot", raw["snapshot"])
	c.ends = r.bool("snapshotEnd", raw["snapshotEnd"])
	r.castFrom(c, raw)
	if slow := r.string("slow", raw["slow"]); slow != "" {
		if c.slow = slow; slow != slowSkip && slow != slowCatchUp && slow != slowClose {
			r.refuse("opts.slow must be " + slowSkip + ", " + slowCatchUp + " or " + slowClose)
		}
	}
	if conflate := r.string("conflate", raw["conflate"]); conflate != "" {
		if c.conflate = true; conflate != "key" {
			r.refuse("opts.conflate must be key")
		}
	}
	n, _ = r.integer("minIntervalMs", raw["minIntervalMs"], 0, maxInterval)
	c.interval = time.Duration(n) * time.Millisecond
	c.presence = r.bool("presence", raw["presence"])
	c.version = r.version(optSchemaVersion, raw[optSchemaVersion])
	return c, r.fail
}

// castFrom reads where a broadcast begins.
func (r *optionReader) castFrom(c *castOptions, raw map[string][]byte) {
	from := r.string("from", raw["from"])
	starts := 0
	for _, given := range []bool{c.history > 0, c.snapshot, from != "" && from != "latest"} {
		if given {
			starts++
		}
	}
	if starts > 1 {
		r.refuse("opts.history, opts.snapshot and opts.from are three ways to begin: give one")
	}
	switch from {
	case "", "latest":
	case "pos":
		var ok bool
		if c.pos, ok = parsePos(r.string("pos", raw["pos"])); !ok {
			r.refuse("opts.pos must be the pos of an OK, of an EVENT or of a GAP with from pos")
		}
	case "ts", "afterId":
		after := r.from(raw["from"], raw["ts"], raw["afterId"])
		c.after = &after
	default:
		r.refuse("opts.from must be latest, pos, ts or afterId for a broadcast")
	}
}
