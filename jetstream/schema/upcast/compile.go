package upcast

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"eventhub/jetstream/jsonequal"
	"eventhub/jetstream/jsonpointer"
	"eventhub/jetstream/jsonscan"
)

// Bounds of the operations of a version.
const (
	// MaxProgram is the most bytes of all operations one way.
	MaxProgram = 256 << 10
	// MaxOperations is how many operations there may be one way.
	MaxOperations = 100
	// MaxSegments is the most segments of a place.
	MaxSegments = 32
	// maxPairs is how many pairs of a map may have an object or an array as their first.
	maxPairs = 100
)

// every is the segment that stands for all members or elements.
const every = "*"

// Compile returns the Caster of two lists of operations, each of which may be empty: there is no
// cast that way then. Its error names the operation, as in "up/2/rename: at: must begin with /".
func Compile(up, down json.RawMessage) (*Caster, error) {
	var c Caster
	for _, way := range []struct {
		name string
		text json.RawMessage
		to   *step
	}{{"up", up, &c.up}, {"down", down, &c.down}} {
		if len(way.text) == 0 || string(way.text) == "null" {
			continue
		}
		p, err := compile(way.text)
		if err != nil {
			return nil, fmt.Errorf("%s%w", way.name, err)
		}
		*way.to = p
	}
	return &c, nil
}

// program is a list of operations.
type program []operation

// operation changes a document. at is for errors.
type operation struct {
	name string
	at   jsonpointer.Pointer // or from
	text string              // of at
	to   jsonpointer.Pointer // of move and copy
	same int                 // how many segments at and to have in common, up to the last *

	required, strict bool
	existing         bool   // default leaves alone what is not an object, and makes none
	member           string // to, in or of; key is its JSON
	key              []byte
	named            bool // member is given
	value            []byte
	// Pairs of map: those of scalars by their only spelling, and others.
	scalars map[string][]byte
	pairs   []pair
}

// pair is a pair of map whose first is an object or an array.
type pair struct {
	from any
	size int
	to   []byte
}

func compile(text []byte) (program, error) {
	if len(text) > MaxProgram {
		return nil, fmt.Errorf(": has %d bytes, at most %d are allowed", len(text), MaxProgram)
	}
	if !jsonscan.Valid(text) {
		return nil, errors.New(": is not JSON")
	}
	var list []map[string]json.RawMessage
	if json.Unmarshal(text, &list) != nil || list == nil {
		return nil, errors.New(": must be an array of objects, one for each operation")
	}
	if len(list) > MaxOperations {
		return nil, fmt.Errorf(": has %d operations, at most %d are allowed", len(list), MaxOperations)
	}
	p := make(program, 0, len(list))
	for i, o := range list {
		if len(o) != 1 {
			return nil, fmt.Errorf("/%d: must have exactly one member, the name of the operation", i)
		}
		for name, args := range o {
			op, err := compileOperation(name, args)
			if err != nil {
				return nil, fmt.Errorf("/%d/%s: %w", i, name, err)
			}
			p = append(p, op)
		}
	}
	return p, nil
}

// arguments are the members that operations have.
type arguments struct {
	At        *string            `json:"at"`
	From      *string            `json:"from"`
	To        *string            `json:"to"`
	In        *string            `json:"in"`
	Of        *string            `json:"of"`
	Value     json.RawMessage    `json:"value"`
	Values    []*json.RawMessage `json:"values"`
	Otherwise json.RawMessage    `json:"otherwise"`
	Strict    bool               `json:"strict"`
	Required  bool               `json:"required"`
	Existing  bool               `json:"existing"`
}

// takes are the members of each operation; a ! is behind those that must be there.
var takes = map[string]string{
	"rename": "at! to! required", "move": "from! to! required", "copy": "from! to! required", "default": "at! value! existing", "set": "at! value!",
	"remove": "at! required", "wrap": "at! in required", "unwrap": "at! of required", "map": "at! values! otherwise strict required",
}

func compileOperation(name string, text []byte) (op operation, err error) {
	known, ok := takes[name]
	if !ok {
		return op, errors.New("there is no such operation: use rename, move, copy, default, set, remove, wrap, unwrap or map")
	}
	given := make(map[string]json.RawMessage)
	if json.Unmarshal(text, &given) != nil || given == nil {
		return op, errors.New("must be an object")
	}
	for member := range strings.FieldsSeq(known) {
		member, must := strings.CutSuffix(member, "!")
		if _, has := given[member]; must && !has {
			return op, fmt.Errorf("%s is missing", member)
		}
		delete(given, member)
	}
	for member := range given {
		return op, fmt.Errorf("%s is unknown; it takes %s", member, strings.ReplaceAll(known, "!", ""))
	}
	var args arguments
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields() // a member in another case
	if err := d.Decode(&args); err != nil {
		return op, errors.New("at, from, to, in and of must be strings, values an array, and strict, required and existing true or false")
	}
	op = operation{name: name, required: args.Required, strict: args.Strict, existing: args.Existing, value: args.Value}
	if args.At == nil {
		args.At = args.From
	}
	if args.At == nil {
		return op, errors.New("at or from must be a string")
	}
	if op.at, err = place(*args.At); err != nil {
		return op, fmt.Errorf("%q: %w", *args.At, err)
	}
	op.text = *args.At
	return op, op.complete(name, &args)
}

// complete reads what only some operations have.
func (op *operation) complete(name string, args *arguments) (err error) {
	switch name {
	case "rename":
		if len(op.at) == 0 {
			return errors.New("at: must be a member")
		}
		if args.To == nil {
			return errors.New("to must be a string")
		}
		if op.at[len(op.at)-1] == every {
			return errors.New("at: must end with the name of a member, not *")
		}
		op.member, op.named = *args.To, true
	case "move", "copy":
		if args.To == nil {
			return errors.New("to must be a string")
		}
		if op.to, err = place(*args.To); err != nil {
			return fmt.Errorf("to: %q: %w", *args.To, err)
		}
		return op.pairUp(name)
	case "remove":
		if len(op.at) == 0 {
			return errors.New("at: the whole document cannot be removed")
		}
	case "wrap":
		op.member, op.named = text(args.In)
	case "unwrap":
		op.member, op.named = text(args.Of)
	case "map":
		op.value = args.Otherwise
		for i, v := range args.Values {
			var two []json.RawMessage
			if v == nil || json.Unmarshal(*v, &two) != nil || len(two) != 2 {
				return fmt.Errorf("values/%d must be an array of two values", i)
			}
			scalar, is := jsonequal.Scalar(two[0])
			switch {
			case !is && len(op.pairs) == maxPairs:
				return fmt.Errorf("values has more than %d pairs whose first is an object or an array", maxPairs)
			case !is:
				op.pairs = append(op.pairs, pair{jsonequal.Decode(two[0]), len(two[0]), two[1]})
			case op.scalars == nil:
				op.scalars = map[string][]byte{scalar: two[1]}
			default:
				if _, before := op.scalars[scalar]; !before { // the first one counts
					op.scalars[scalar] = two[1]
				}
			}
		}
	}
	op.key = jsonscan.AppendString(nil, op.member)
	return nil
}

// pairUp finds the segments that from and to have in common.
func (op *operation) pairUp(name string) error {
	for i := range max(len(op.at), len(op.to)) {
		from, to := segment(op.at, i), segment(op.to, i)
		if from != every && to != every {
			continue
		}
		for k := range i + 1 {
			if segment(op.at, k) != segment(op.to, k) {
				return errors.New("to: * may stand only where both places have it, behind the same segments")
			}
		}
		op.same = i + 1
	}
	if name == "move" && len(op.to) > len(op.at) && equalPlaces(op.to[:len(op.at)], op.at) {
		return errors.New("to: a value cannot be moved into itself")
	}
	return nil
}

func segment(p jsonpointer.Pointer, i int) string {
	if i < len(p) {
		return p[i]
	}
	return ""
}

func equalPlaces(a, b jsonpointer.Pointer) bool {
	return strings.Join(a, "\x00") == strings.Join(b, "\x00") && len(a) == len(b)
}

func text(s *string) (string, bool) {
	if s == nil {
		return "", false
	}
	return *s, true
}

func place(text string) (jsonpointer.Pointer, error) {
	p, err := jsonpointer.Parse(text)
	if err != nil {
		return nil, err
	}
	if len(p) > MaxSegments {
		return nil, fmt.Errorf("has %d segments, at most %d are allowed", len(p), MaxSegments)
	}
	return p, nil
}
