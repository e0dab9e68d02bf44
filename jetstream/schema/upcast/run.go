package upcast

import (
	"errors"
	"fmt"

	"eventhub/jetstream/jsonequal"
	"eventhub/jetstream/jsonpointer"
	"eventhub/jetstream/jsonscan"
)

// run applies the operations to a document.
func (p program) run(doc []byte, w *work) ([]byte, error) {
	if !jsonscan.Valid(doc) {
		return nil, errors.New("the document is not JSON")
	}
	r := runner{root: &value{raw: doc}, work: w}
	for i := range p {
		r.op = &p[i]
		if err := r.apply(); err != nil {
			return nil, err
		}
	}
	size := r.root.size()
	if size > MaxOutput {
		return nil, errTooLarge
	}
	if err := w.spend(size / copied); err != nil {
		return nil, err
	}
	return r.root.appendTo(nil), nil
}

// runner applies operations to a document.
type runner struct {
	root  *value
	op    *operation
	added int // bytes that operations have added
	parts int // that were taken apart
	work  *work
}

// open takes a value apart, and counts its members or elements as visited. has is false for a value
// that has none.
func (r *runner) open(v *value) (has bool, err error) {
	if v.raw != nil {
		if err := r.work.spend(len(v.raw)); err != nil {
			return false, r.fails(err.Error())
		}
		afford := max(r.work.left, 0) / made
		has, fits := v.open(min(MaxParts-r.parts, afford))
		if !fits && afford < MaxParts-r.parts {
			return false, r.fails(r.work.spend(r.work.left + 1).Error())
		}
		if !fits {
			return false, r.fails(errTooMany.Error())
		}
		if !has {
			return false, nil
		}
		r.parts += len(v.parts)
		if err := r.work.spend(made * len(v.parts)); err != nil {
			return false, r.fails(err.Error())
		}
	}
	if err := r.work.spend(len(v.parts)); err != nil {
		return false, r.fails(err.Error())
	}
	return true, nil
}

var errTooMany = fmt.Errorf("the document has more than %d members and elements to look at", MaxParts)

func (r *runner) fails(cause string) error { return &placeError{r.op.text, cause} }

// missing is for an operation on a place where nothing is.
func (r *runner) missing() error {
	if r.op.required {
		return r.fails("nothing is there")
	}
	return nil
}

// add makes a value of a text, and counts its bytes.
func (r *runner) add(text []byte) (*value, error) {
	if err := r.work.spend(made / 2); err != nil {
		return nil, r.fails(err.Error())
	}
	if r.added += len(text) + 8; r.added > MaxOutput {
		return nil, &placeError{r.op.text, errTooLarge.Error()}
	}
	return &value{raw: text}, nil
}

func (r *runner) apply() error {
	if err := r.work.spend(looked); err != nil {
		return r.fails(err.Error())
	}
	switch op := r.op; op.name {
	case "move", "copy":
		return r.each(r.root, op.at[:op.same], func(base *value) error { return r.carry(base) })
	case "default", "set":
		if len(op.at) == 0 {
			if op.name == "default" {
				return nil
			}
			v, err := r.add(op.value)
			if err == nil {
				r.root = v
			}
			return err
		}
		return r.each(r.root, op.at[:len(op.at)-1], func(parent *value) error { return r.put(parent, op.at[len(op.at)-1]) })
	case "wrap", "unwrap", "map":
		if len(op.at) == 0 {
			v, err := r.change(r.root)
			if err == nil {
				r.root = v
			}
			return err
		}
	}
	op := r.op
	last := op.at[len(op.at)-1]
	return r.each(r.root, op.at[:len(op.at)-1], func(parent *value) error {
		has, err := r.open(parent)
		switch {
		case err != nil:
			return err
		case !has:
			return r.missing()
		}
		if last == every {
			for i := len(parent.parts) - 1; i >= 0; i-- {
				if err := r.one(parent, i); err != nil {
					return err
				}
			}
			return nil
		}
		i := parent.find(last)
		if i < 0 {
			return r.missing()
		}
		return r.one(parent, i)
	})
}

// each calls f with the values at a place. Operations that set a value make the objects on the way.
func (r *runner) each(v *value, at jsonpointer.Pointer, f func(*value) error) error {
	if len(at) == 0 {
		return f(v)
	}
	makes := r.op.name == "default" && !r.op.existing || r.op.name == "set"
	has, err := r.open(v)
	if err != nil {
		return err
	}
	if !has {
		if makes {
			return r.fails("a part of the place is no object and no array")
		}
		return r.missing()
	}
	if at[0] == every {
		for i := range v.parts {
			if err := r.each(v.parts[i].of, at[1:], f); err != nil {
				return err
			}
		}
		return nil
	}
	i := v.find(at[0])
	if i < 0 {
		if !makes {
			return r.missing()
		}
		var err error
		if i, err = r.member(v, at[0], []byte("{}")); err != nil {
			return err
		}
	}
	return r.each(v.parts[i].of, at[1:], f)
}

// member adds a member to an object, and returns its index.
func (r *runner) member(v *value, name string, text []byte) (int, error) {
	if !v.object {
		return 0, r.fails("an array has no such element")
	}
	if name == every {
		return 0, r.fails("* has nothing to stand for")
	}
	if err := r.work.spend(made + 8*len(name)); err != nil {
		return 0, r.fails(err.Error())
	}
	of, err := r.add(text)
	if err != nil {
		return 0, err
	}
	key := jsonscan.AppendString(nil, name)
	if r.added += len(key); r.added > MaxOutput {
		return 0, r.fails(errTooLarge.Error())
	}
	v.parts = append(v.parts, part{key, name, of})
	return len(v.parts) - 1, nil
}

// put is default and set at a member of a value.
func (r *runner) put(parent *value, name string) error {
	has, err := r.open(parent)
	switch {
	case err != nil:
		return err
	case r.op.existing && !parent.object:
		return nil
	case !has:
		return r.fails("a part of the place is no object and no array")
	}
	set := r.op.name == "set"
	if name == every {
		if !set {
			return nil // there are values already
		}
		for i := range parent.parts {
			v, err := r.add(r.op.value)
			if err != nil {
				return err
			}
			parent.parts[i].of = v
		}
		return nil
	}
	i := parent.find(name)
	if i < 0 {
		_, err := r.member(parent, name, r.op.value)
		return err
	}
	if !set {
		return nil
	}
	v, err := r.add(r.op.value)
	if err == nil {
		parent.parts[i].of = v
	}
	return err
}

// one applies an operation to a member or an element.
func (r *runner) one(parent *value, i int) error {
	switch r.op.name {
	case "rename":
		if !parent.object {
			return r.fails("an element of an array has no name")
		}
		if parent.parts[i].name == r.op.member {
			return nil
		}
		r.added += len(r.op.key)
		parent.parts[i].key, parent.parts[i].name = r.op.key, r.op.member
		for k := range parent.parts {
			if k != i && parent.parts[k].name == r.op.member {
				parent.remove(k)
				break
			}
		}
		return nil
	case "remove":
		parent.remove(i)
		return nil
	}
	v, err := r.change(parent.parts[i].of)
	if err == nil {
		parent.parts[i].of = v
	}
	return err
}

func (v *value) remove(i int) { v.parts = append(v.parts[:i], v.parts[i+1:]...) }

// change is wrap, unwrap and map.
func (r *runner) change(v *value) (*value, error) {
	op := r.op
	switch op.name {
	case "wrap":
		if r.added += len(op.key) + 8; r.added > MaxOutput {
			return nil, &placeError{op.text, errTooLarge.Error()}
		}
		if err := r.work.spend(made); err != nil {
			return nil, r.fails(err.Error())
		}
		if op.named {
			return &value{object: true, parts: []part{{op.key, op.member, v}}}, nil
		}
		return &value{parts: []part{{of: v}}}, nil
	case "unwrap":
		has, err := r.open(v)
		if err != nil {
			return nil, err
		}
		if !has || v.object != op.named {
			if op.named {
				return nil, r.fails("is no object")
			}
			return nil, r.fails("is no array")
		}
		if !op.named {
			if len(v.parts) != 1 {
				return nil, r.fails("is no array of one")
			}
			return v.parts[0].of, nil
		}
		i := v.find(op.member)
		if i < 0 {
			return nil, r.fails("has no member to unwrap")
		}
		return v.parts[i].of, nil
	}
	to, found, err := r.lookUp(v)
	switch {
	case err != nil:
		return nil, err
	case found:
		return r.add(to)
	}
	switch {
	case op.value != nil:
		return r.add(op.value)
	case op.strict:
		return nil, r.fails("has a value that map does not know")
	}
	return v, nil
}

// lookUp returns what map makes of a value.
func (r *runner) lookUp(v *value) (to []byte, found bool, err error) {
	op := r.op
	size := v.size()
	if err := r.work.spend(looked + size); err != nil {
		return nil, false, r.fails(err.Error())
	}
	if v.raw != nil {
		if scalar, is := jsonequal.Scalar(v.raw); is {
			to, found = op.scalars[scalar]
			return to, found, nil
		}
	}
	if len(op.pairs) == 0 {
		return nil, false, nil
	}
	if err := r.work.spend(16 * size); err != nil { // what it takes to decode
		return nil, false, r.fails(err.Error())
	}
	now := jsonequal.Decode(v.appendTo(nil))
	for i := range op.pairs {
		if err := r.work.spend(looked + size + op.pairs[i].size); err != nil {
			return nil, false, r.fails(err.Error())
		}
		if jsonequal.Values(now, op.pairs[i].from) {
			return op.pairs[i].to, true, nil
		}
	}
	return nil, false, nil
}

// carry is move and copy, below what both places have in common.
func (r *runner) carry(base *value) error {
	op := r.op
	from, to := op.at[op.same:], op.to[op.same:]
	parent, i := base, -1
	for k, name := range from {
		has, err := r.open(parent)
		switch {
		case err != nil:
			return err
		case !has:
			return r.missing()
		}
		if i = parent.find(name); i < 0 {
			return r.missing()
		}
		if k < len(from)-1 {
			parent = parent.parts[i].of
		}
	}
	source := base
	if i >= 0 {
		source = parent.parts[i].of
	}
	carried := source
	if op.name == "copy" {
		size := source.size()
		if err := r.work.spend(size); err != nil {
			return r.fails(err.Error())
		}
		if r.added += size; r.added > MaxOutput {
			return &placeError{op.text, errTooLarge.Error()}
		}
		carried = &value{raw: source.appendTo(nil)}
	} else if i >= 0 {
		parent.remove(i)
	}
	if len(to) == 0 {
		*base = *carried
		return nil
	}
	at := base
	for k, name := range to {
		has, err := r.open(at)
		switch {
		case err != nil:
			return err
		case !has:
			return r.fails("a part of the target is no object and no array")
		}
		i := at.find(name)
		last := k == len(to)-1
		switch {
		case i < 0:
			var err error
			if i, err = r.member(at, name, []byte("{}")); err != nil {
				return err
			}
			if last {
				at.parts[i].of = carried
			}
		case last:
			at.parts[i].of = carried
		}
		at = at.parts[i].of
	}
	return nil
}
