package jsonscan

// Walker goes through the members of an object or the elements of an array, and validates each on
// the way:
//
//	w := jsonscan.Walk(b, 0)
//	for w.Next() {
//		use(w.Key, w.Value)
//	}
//	if w.Err() != nil { … }
//
// Duplicate keys are reported each time they occur.
type Walker struct {
	// Key is the member's key as a raw token, quotes and escapes included; nil in an array.
	Key []byte
	// Value is the raw value.
	Value []byte

	b     []byte
	i     int // the next byte to read; after a fault its complement
	depth int
	begun bool
	done  bool
}

// Walk returns a Walker on the object or array that b consists of, blanks around it allowed. depth
// is how many levels will stand around b in the end: those and the levels of b must keep to
// MaxDepth.
func Walk(b []byte, depth int) Walker {
	w := Walker{b: b, i: skipBlanks(b, 0), depth: depth + 1}
	if w.i >= len(b) || (b[w.i] != '{' && b[w.i] != '[') || w.depth > MaxDepth {
		w.i = ^w.i
	}
	return w
}

// Next goes to the next item. It returns false after the last one and at a fault; Err tells which.
func (w *Walker) Next() bool {
	if w.i < 0 || w.done {
		return false
	}
	b, i := w.b, w.i
	object := w.Key != nil
	if !w.begun {
		w.begun = true
		object = b[i] == '{'
		i = skipBlanks(b, i+1)
		if i < len(b) && (b[i] == '}' && object || b[i] == ']' && !object) {
			return w.end(i + 1)
		}
	} else {
		i = skipBlanks(b, i)
		if i >= len(b) {
			return w.fault(^i)
		}
		switch {
		case b[i] == ',':
			i = skipBlanks(b, i+1)
		case b[i] == '}' && object || b[i] == ']' && !object:
			return w.end(i + 1)
		default:
			return w.fault(^i)
		}
	}
	if object {
		if i >= len(b) || b[i] != '"' {
			return w.fault(^i)
		}
		end := str(b, i+1)
		if end < 0 {
			return w.fault(end)
		}
		w.Key = b[i:end:end]
		i = skipBlanks(b, end)
		if i >= len(b) || b[i] != ':' {
			return w.fault(^i)
		}
		i = skipBlanks(b, i+1)
	}
	end := value(b, i, w.depth)
	if end < 0 {
		return w.fault(end)
	}
	w.Value = b[i:end:end]
	w.i = end
	return true
}

// end closes the walk; nothing but blanks may follow.
func (w *Walker) end(i int) bool {
	w.Key, w.Value = nil, nil
	w.done = true
	if i = skipBlanks(w.b, i); i < len(w.b) {
		return w.fault(^i)
	}
	return false
}

func (w *Walker) fault(at int) bool {
	w.Key, w.Value = nil, nil
	w.i = at
	return false
}

// Err returns nil after a walk to the end of a valid text, else a *SyntaxError. It is of use once
// Next returned false.
func (w *Walker) Err() error {
	if w.i < 0 {
		return &SyntaxError{Offset: ^w.i}
	}
	return nil
}
