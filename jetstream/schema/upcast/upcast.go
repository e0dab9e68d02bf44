// Package upcast turns JSON documents of one version of a schema into ones of another. An up-caster
// is a list of operations, which are total and have no loops, or a Go function:
//
//	[
//	  {"rename":  {"at": "/host", "to": "hostname"}},
//	  {"move":    {"from": "/hostname", "to": "/machine/name"}},
//	  {"copy":    {"from": "/id", "to": "/machine/id"}},
//	  {"default": {"at": "/status", "value": "unknown"}},
//	  {"set":     {"at": "/format", "value": 2}},
//	  {"remove":  {"at": "/password"}},
//	  {"wrap":    {"at": "/tag"}},
//	  {"unwrap":  {"at": "/price", "of": "amount"}},
//	  {"map":     {"at": "/status", "values": [["alive", "up"], ["dead", "down"]], "otherwise": "unknown"}}
//	]
//
// Places are JSON pointers (RFC 6901). A segment * stands for every member of an object or every
// element of an array; move and copy may have it only in the segments with which both places begin.
// An operation on a place where nothing is does nothing, unless the operation has "required": true.
//
//   - rename gives a member another name, in its place among the members. A member that has the
//     name already is replaced.
//   - move and copy make the objects on the way to their target, and replace what is there.
//   - default sets a value where nothing is, and set in any case. Both make the objects on the way;
//     default with "existing": true leaves alone what is no object, and makes none.
//   - remove removes a member or an element.
//   - wrap puts a value into an object with the member "in", or into an array without "in".
//   - unwrap takes a value out of an object's member "of", or out of an array of one without "of".
//   - map replaces a value that equals the first of a pair by the second. Without a match, a value
//     becomes "otherwise", if given, or stays; with "strict": true, it fails.
//
// What no operation reaches stays byte for byte, but for blanks around the values that are reached.
// Of several members of the same name, the last one counts, and an operation leaves only that one.
package upcast

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// MaxWork is the most work of a cast over all versions that it goes through, in steps of about
// StepTime: about 50 ms.
const MaxWork = 12 << 20

// StepTime is about what a step takes: to read a byte, or to look at a member or an element.
const StepTime = 4 * time.Nanosecond

const (
	copied = 8  // bytes that are written in a step
	made   = 64 // steps to take a member or an element apart, or to make a value
	looked = 16 // steps of an operation, and of a value that is compared
)

// MaxParts is the most members and elements that the operations of one version take apart.
const MaxParts = 100_000

// MaxOutput is the most bytes that a document has after each version that it goes through, and the
// most that the operations of one version add to it.
const MaxOutput = 4 << 20

// Func turns a document into one of the next version, or of the version before. It must not change
// doc, and may be called concurrently. Its error is shown to clients, and must not tell values of
// the document.
type Func func(doc []byte) ([]byte, error)

// Caster leads from one version to the next one, and perhaps back. It is immutable, and may be used
// concurrently.
type Caster struct {
	up, down step
}

// step leads from one version to another. nil: there is no cast this way.
type step interface {
	run(doc []byte, w *work) ([]byte, error)
}

func (f Func) run(doc []byte, w *work) ([]byte, error) {
	cast, err := f(doc)
	if err == nil {
		err = w.spend(len(cast))
	}
	return cast, err
}

// New returns a Caster of Go functions. Each may be nil, if that way is not needed.
func New(up, down Func) *Caster {
	var c Caster
	if up != nil {
		c.up = up
	}
	if down != nil {
		c.down = down
	}
	return &c
}

// work is what a cast may still do.
type work struct {
	ctx   context.Context
	rest  func() // or nil
	most  int
	left  int
	until int // where left is when ctx is looked at next
}

func newWork(ctx context.Context, b Budget) *work {
	return &work{ctx: ctx, rest: b.Rest, most: b.Steps, left: b.Steps, until: b.Steps - lookEvery}
}

// lookEvery is how much work is done between two looks at the context: about 0.25 ms.
const lookEvery = 1 << 16

// spend takes some work.
func (w *work) spend(n int) error {
	w.left -= n
	if w.left < 0 {
		return fmt.Errorf("the cast takes more than %d steps", w.most)
	}
	if w.left < w.until {
		w.until = w.left - lookEvery
		if w.rest != nil {
			w.rest()
		}
		return w.ctx.Err()
	}
	return nil
}

// Up reports whether documents of the version before can be cast, and Down whether documents can be
// cast back. A nil Caster casts none.
func (c *Caster) Up() bool { return c != nil && c.up != nil }

// Down is as Up, for the other way.
func (c *Caster) Down() bool { return c != nil && c.down != nil }

// CastError says where a cast failed. It has nothing of the document but the names of members.
type CastError struct {
	// From and To are the versions of the step that failed.
	From, To int
	// Pointer is the place of the operation that failed; "" for none.
	Pointer string
	// Cause says why.
	Cause string
}

// Error returns, for example, "upcast v1→v2: /host: nothing is there".
func (f *CastError) Error() string {
	way := "upcast"
	if f.To < f.From {
		way = "downcast"
	}
	text := way + " v" + strconv.Itoa(f.From) + "→v" + strconv.Itoa(f.To) + ": "
	if f.Pointer != "" {
		text += f.Pointer + ": "
	}
	return text + f.Cause
}

// Chain has the casters between the versions of a schema. It is immutable, and may be used
// concurrently.
type Chain struct {
	first   int
	casters []*Caster
}

// NewChain returns a Chain that begins at the version first. The first caster leads from there to
// the next version, and so on. A nil caster takes documents as they are, both ways.
func NewChain(first int, casters ...*Caster) *Chain {
	return &Chain{first, slices.Clone(casters)}
}

// Casts reports whether documents change on the way from one version to another.
func (c *Chain) Casts(from, to int) bool {
	if !c.has(from) || !c.has(to) {
		return false
	}
	low, high := min(from, to)-c.first, max(from, to)-c.first
	return slices.ContainsFunc(c.casters[low:high], func(k *Caster) bool { return k != nil })
}

func (c *Chain) has(version int) bool {
	return version >= c.first && version <= c.first+len(c.casters)
}

// Budget is what a cast may do.
type Budget struct {
	// Steps is the most steps that it may take, up to MaxWork. A Func takes a step for each byte
	// that it is given and returns.
	Steps int
	// Rest, when not nil, is called about every 0.25 ms.
	Rest func()
}

// Cast turns a document of the version from into one of the version to. It returns doc itself if
// nothing leads to a change, and does not change doc. Its error is a *CastError. The end of ctx
// ends a long cast within about 0.25 ms, and not a Func.
func (c *Chain) Cast(ctx context.Context, doc []byte, from, to int) ([]byte, error) {
	cast, _, err := c.CastWithin(ctx, doc, from, to, Budget{Steps: MaxWork})
	return cast, err
}

// CastWithin is Cast within a budget. It returns how many steps were taken: more than
// Budget.Steps if they did not do.
func (c *Chain) CastWithin(ctx context.Context, doc []byte, from, to int, b Budget) (cast []byte, steps int, err error) {
	w := newWork(ctx, b)
	cast, err = c.cast(w, doc, from, to)
	return cast, w.most - w.left, err
}

func (c *Chain) cast(w *work, doc []byte, from, to int) ([]byte, error) {
	if from == to {
		return doc, nil
	}
	if !c.has(from) || !c.has(to) {
		return nil, &CastError{From: from, To: to, Cause: fmt.Sprintf("the versions are %d to %d", c.first, c.first+len(c.casters))}
	}
	dir := 1
	if to < from {
		dir = -1
	}
	for at := from; at != to; at += dir {
		k := c.casters[min(at, at+dir)-c.first]
		if k == nil {
			continue
		}
		way := k.up
		if dir < 0 {
			way = k.down
		}
		err := w.spend(made + len(doc))
		if err == nil {
			doc, err = apply(way, doc, w)
		}
		if err != nil {
			failure := &CastError{From: at, To: at + dir, Cause: err.Error()}
			if placed, ok := errors.AsType[*placeError](err); ok {
				failure.Pointer, failure.Cause = placed.at, placed.cause
			}
			return nil, failure
		}
	}
	return doc, nil
}

// apply calls a Func. A panic is an error.
func apply(way step, doc []byte, w *work) (cast []byte, err error) {
	if way == nil {
		return nil, errors.New("there is no cast this way")
	}
	defer func() {
		if recover() != nil { // what it says may have values of the document
			cast, err = nil, errors.New("the function of this step panicked")
		}
	}()
	if cast, err = way.run(doc, w); err == nil && len(cast) > MaxOutput {
		return nil, errTooLarge
	}
	return cast, err
}

var errTooLarge = fmt.Errorf("the document has more than %d bytes after it", MaxOutput)

// placeError is an error at a place.
type placeError struct{ at, cause string }

func (e *placeError) Error() string { return e.at + ": " + e.cause }
