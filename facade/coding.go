package facade

import (
	"bytes"
	"context"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"eventhub/jetstream/cputime"
)

// Content codings of long answers.
const (
	codingGzip = "gzip"
	codingZstd = "zstd"
	// packWindow is how far a zstd encoder looks back, in bytes. Encoder and decoder hold so many.
	packWindow = 1 << 20
	// packTime is about what it takes to compress a byte.
	packTime = 5 * time.Nanosecond
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

// packer compresses an answer on the fly, within the ration of time of a client.
type packer struct {
	ration *cputime.Ration
	client string
	packed bytes.Buffer
	to     io.WriteCloser
}

// newPacker returns a packer for a client.
func newPacker(coding string, ration *cputime.Ration, client string) *packer {
	p := &packer{ration: ration, client: client}
	var err error
	if coding == codingZstd {
		p.to, err = zstd.NewWriter(&p.packed, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(packWindow), zstd.WithLowerEncoderMem(true))
	} else {
		p.to, err = gzip.NewWriterLevel(&p.packed, gzip.BestSpeed)
	}
	if err != nil {
		panic("facade: the options of an encoder: " + err.Error()) // they are constants
	}
	return p
}

// pack compresses a piece of the answer, and returns what is to be written now, until the next
// call. It waits as long as ctx allows for the ration of the client. A piece is too short for a
// place.
func (p *packer) pack(ctx context.Context, b []byte, last bool) ([]byte, error) {
	if err := p.ration.Await(ctx, p.client); err != nil {
		return nil, err
	}
	p.packed.Reset()
	_, err := p.to.Write(b)
	if err == nil && last {
		err = p.to.Close()
	}
	p.ration.Charge(p.client, time.Duration(len(b))*packTime)
	return p.packed.Bytes(), err
}
