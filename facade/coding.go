package facade

import (
	"io"
	"strconv"
	"strings"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// Content codings of long answers.
const (
	codingGzip = "gzip"
	codingZstd = "zstd"
	// packWindow is how far a zstd encoder looks back, in bytes. Encoder and decoder hold so many.
	packWindow = 1 << 20
)

// contentCoding returns the coding of an answer: the one of ours that an Accept-Encoding (RFC 9110,
// section 12.5.3) weighs the highest, zstd among equals, or "" for none. A coding that is not named
// is not used, "*" or not.
func contentCoding(lists []string) string {
	best, name := 0.0, ""
	for part := range strings.SplitSeq(strings.Join(lists, ","), ",") {
		coding, params, _ := strings.Cut(part, ";")
		coding = strings.ToLower(strings.TrimSpace(coding))
		if coding != codingGzip && coding != codingZstd {
			continue
		}
		weight := 1.0
		if q, ok := strings.CutPrefix(strings.ToLower(strings.TrimSpace(params)), "q="); ok {
			var err error
			if weight, err = strconv.ParseFloat(q, 64); err != nil {
				continue
			}
		}
		if weight > best || weight == best && best > 0 && coding == codingZstd {
			best, name = weight, coding
		}
	}
	return name
}

// newPacker returns a writer that compresses for a client on the fly.
func newPacker(coding string, w io.Writer) io.WriteCloser {
	if coding == codingZstd {
		z, err := zstd.NewWriter(w, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(packWindow), zstd.WithLowerEncoderMem(true))
		if err == nil {
			return z
		}
		panic("facade: the options of the zstd encoder: " + err.Error()) // they are constants
	}
	g, err := gzip.NewWriterLevel(w, gzip.BestSpeed)
	if err != nil {
		panic("facade: the level of the gzip encoder: " + err.Error()) // it is a constant
	}
	return g
}
