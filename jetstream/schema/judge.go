package schema

import (
	"bytes"
	"cmp"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	// maxSteps bounds the work of a payload. A step takes about 25 ns: a rule that meets a value,
	// or as much of what a keyword has to do.
	maxSteps = 1 << 21
	// bytesBrief is how many bytes of a payload there may be for a step that Brief may take.
	bytesBrief = 2
	// restEvery is how many steps are done without a rest.
	restEvery = 1 << 13
	// decoding is how many bytes of a payload are decoded in a step, and scanning how many a
	// program reads.
	decoding, scanning = 2, 8
	// bytesAStep is how many bytes of texts are read, compared, hashed or counted in a step.
	bytesAStep = 32
	// searchesAStep is how many comparisons of names there are in a step: see search.
	searchesAStep = 8
	// matchingAStep is how many instructions of a pattern meet a byte in a step.
	matchingAStep = 8
	// Matches whose cost is timedFrom or more are timed, and count for a timedLeast-th of it at
	// least.
	timedFrom, timedLeast = 256, 64
	// maxOpen bounds the stack: rules that wait for others.
	maxOpen = 50_000
	// straight is how many rules may lead to each other for one value before a judge looks for a
	// circle of references.
	straight = 8
)

// judge judges one payload. Each loop over a part of the payload or of the schema pays its steps
// before it takes them, so that the bound holds for every keyword.
type judge struct {
	left    int    // steps
	saved   int    // of those that were paid for matches, and not taken
	rest    func() // called about every restEvery steps; nil: it does not rest
	restAt  int    // how many are left then
	spent   string // "size" or "pattern" once there are too few
	open    []*rule
	start   int // of those in open that the value of the last one has met
	path    []segment
	quiet   int // above 0 within what needs no explanation
	broken  bool
	pointer []byte // of the violation to be told
	keyword string
	buffer  []byte
}

// segment is a part of the way to a value: a name, or an index if that is not -1.
type segment struct {
	name  string
	index int
}

// judgement returns a violation of a payload, or nil. Of all violations it is the one with the
// smallest pointer, and of those the one with the smallest keyword. The branches of what needs one
// of several have none of their own.
//
// Where the steps are not enough, spent is more than these, and the violation says that. took are
// the steps that were taken.
func (r *rule) judgement(v *value, steps int, rest func()) (broken *Violation, spent, took int) {
	j := judge{left: steps, rest: rest, restAt: steps - restEvery}
	ok := j.takes(r, v)
	spent = steps - j.left
	switch took = spent - j.saved; {
	case ok:
		return nil, spent, took
	case j.broken:
		return &Violation{Pointer: strings.ToValidUTF8(string(j.pointer), ""), Keyword: j.keyword}, spent, took
	}
	return &Violation{Keyword: j.spent}, spent, took
}

// takes reports whether a rule takes a value, and the steps were enough to tell.
func (j *judge) takes(r *rule, v *value) bool { return j.meets(r, v, nil) && j.left >= 0 }

// pay takes steps, and returns false if too few are left. What is said from then on is void.
func (j *judge) pay(steps int) bool {
	if j.left -= steps; j.left < 0 && j.spent == "" {
		j.spent = "size"
	}
	if j.left < j.restAt && j.rest != nil {
		j.restAt = j.left - restEvery
		j.rest()
	}
	return j.left >= 0
}

// stops reports whether a judge that has met a violation need not look for another one.
func (j *judge) stops() bool { return j.quiet > 0 || j.left < 0 }

// fail notes a violation of the value that the judge is at. It returns false.
func (j *judge) fail(keyword string) bool {
	if j.quiet > 0 || !j.pay(1+len(j.path)/4) {
		return false
	}
	p := j.buffer[:0]
	for i := 0; i < len(j.path) && len(p) < maxPointer; i++ {
		p = append(p, '/')
		if s := &j.path[i]; s.index >= 0 {
			p = strconv.AppendInt(p, int64(s.index), 10)
		} else {
			p = appendName(p, s.name)
		}
	}
	j.buffer = p
	p = p[:min(len(p), maxPointer)]
	if order := bytes.Compare(p, j.pointer); !j.broken || order < 0 || order == 0 && keyword < j.keyword {
		j.broken, j.keyword = true, keyword
		j.pointer = append(j.pointer[:0], p...)
	}
	return false
}

// appendName appends as much of a name as has room in a pointer.
func appendName(p []byte, name string) []byte {
	for i := 0; i < len(name) && len(p) < maxPointer; i++ {
		switch c := name[i]; c {
		case '~':
			p = append(p, "~0"...)
		case '/':
			p = append(p, "~1"...)
		default:
			p = append(p, c)
		}
	}
	return p
}

// meets reports whether a rule takes a value. If seen is not nil, it marks there what the rule
// evaluates of the value.
func (j *judge) meets(r *rule, v *value, seen *evaluated) bool {
	switch {
	case !j.pay(1):
		return false
	case r.always:
		return true
	case r.never:
		return j.fail("false")
	case len(j.open) == maxOpen:
		return j.pay(maxSteps)
	}
	if before := j.open[j.start:]; len(before) >= straight {
		if !j.pay(len(before) / 8) {
			return false
		}
		if slices.Contains(before, r) {
			return j.fail("$ref")
		}
	}
	j.open = append(j.open, r)
	ok := j.judge(r, v, seen)
	j.open = j.open[:len(j.open)-1]
	return ok
}

// judge is meets for a rule that is open.
func (j *judge) judge(r *rule, v *value, seen *evaluated) bool {
	switch {
	case r.types != 0 && !j.is(v, r.types):
		return j.fail("type")
	case r.constant != nil && !j.among(v, r.constant):
		return j.fail("const")
	case r.enum != nil && !j.among(v, r.enum):
		return j.fail("enum")
	}
	if seen == nil && (r.unevaluated != nil && v.kind == isObject || r.unevaluatedItems != nil && v.kind == isArray) {
		seen = &evaluated{}
	}
	var ok bool
	switch v.kind {
	case isObject:
		ok = j.object(r, v, seen)
	case isArray:
		ok = j.array(r, v, seen)
	case isString:
		ok = j.string(r, v)
	default:
		ok = !r.numbers || v.kind&(isInteger|isNumber) == 0 || j.number(r, v)
	}
	if r.combines && (ok || !j.stops()) {
		ok = j.combined(r, v, seen) && ok
	}
	if seen != nil && (ok || !j.stops()) {
		ok = j.unevaluated(r, v, seen) && ok
	}
	return ok
}

// inside is meets for a member or an element.
func (j *judge) inside(r *rule, v *value, at segment) bool {
	start := j.start
	j.start = len(j.open)
	j.path = append(j.path, at)
	ok := j.meets(r, v, nil)
	j.path = j.path[:len(j.path)-1]
	j.start = start
	return ok
}

// also is meets for a further rule of the value. What that evaluates counts if it takes the value.
func (j *judge) also(r *rule, v *value, seen *evaluated) bool {
	if seen == nil {
		return j.meets(r, v, nil)
	}
	if !j.pay(1 + v.size()/512) { // for marks
		return false
	}
	var own evaluated
	ok := j.meets(r, v, &own)
	if ok {
		seen.merge(&own)
	}
	return ok
}

// branch is also for a rule that may fail.
func (j *judge) branch(r *rule, v *value, seen *evaluated) bool {
	j.quiet++
	ok := j.also(r, v, seen)
	j.quiet--
	return ok
}

// is reports whether a value is of one of the types.
func (j *judge) is(v *value, t types) bool {
	return v.kind&t != 0 || v.kind == isNumber && t&isInteger != 0 && j.pay(len(v.text)/bytesAStep) && parse(v.text).whole()
}

// among reports whether a set has a value.
func (j *judge) among(v *value, s set) bool {
	sum := j.sum(v)
	if !j.pay(1 + bits.Len(uint(len(s)))/4) {
		return false
	}
	i, _ := slices.BinarySearchFunc(s, sum, func(v value, sum uint64) int { return cmp.Compare(v.hash, sum) })
	for ; i < len(s) && s[i].hash == sum; i++ {
		if j.equal(&s[i], v) {
			return true
		}
	}
	return false
}

// object judges the members of an object.
func (j *judge) object(r *rule, v *value, seen *evaluated) bool {
	ok := true
	if r.members.few(len(v.members)) {
		ok = j.fail("minProperties")
	}
	if r.members.many(len(v.members)) {
		ok = j.fail("maxProperties")
	}
	if !j.hasAll(v, r.required) {
		ok = j.fail("required")
	}
	if !j.pay(len(r.dependents) * v.search() / searchesAStep) {
		return false
	}
	for i := range r.dependents {
		switch d := &r.dependents[i]; {
		case v.member(d.name) == nil:
		case d.rule != nil:
			ok = j.also(d.rule, v, seen) && ok
		case !j.hasAll(v, d.required):
			ok = j.fail(d.keyword)
		}
	}
	if !r.looksInside {
		return ok
	}
	for i := range v.members {
		if !ok && j.stops() {
			return false
		}
		ok = j.member(r, v, i, seen) && ok
	}
	return ok
}

// member judges the member of an object at an index.
func (j *judge) member(r *rule, v *value, i int, seen *evaluated) bool {
	m := &v.members[i]
	if !j.pay(1 + len(m.name)/bytesAStep) {
		return false
	}
	at := segment{m.name, -1}
	sub, declared := r.properties[m.name]
	ok := !declared || j.inside(sub, &m.value, at)
	for k := range r.patterns {
		if p := &r.patterns[k]; j.matches(p.pattern, m.name) {
			declared = true
			ok = j.inside(p.rule, &m.value, at) && ok
		}
	}
	switch {
	case declared:
	case r.closed:
		declared = true
		ok = j.fail("additionalProperties")
	case r.additional != nil:
		declared = true
		ok = j.inside(r.additional, &m.value, at)
	}
	if r.names != nil {
		j.quiet++
		fits := j.inside(r.names, &value{kind: isString, text: m.name}, at)
		if j.quiet--; !fits {
			ok = j.fail("propertyNames")
		}
	}
	if declared && seen != nil {
		seen.mark(i)
	}
	return ok
}

// hasAll reports whether an object has members of all names.
func (j *judge) hasAll(v *value, names []string) bool {
	each, cost := v.search(), 0
	for _, name := range names {
		cost += each * (1 + len(name)/bytesAStep)
	}
	if !j.pay(cost / searchesAStep) {
		return false
	}
	for _, name := range names {
		if v.member(name) == nil {
			return false
		}
	}
	return true
}

// matches reports whether a text has a match of a pattern.
func (j *judge) matches(p *pattern, text string) bool {
	cost := p.cost(len(text))
	if j.left >= 0 && cost > j.left {
		j.spent = "pattern"
	}
	if !j.pay(cost) {
		return false
	}
	ok, took := timed(cost, func() bool { return p.MatchString(text) })
	j.saved += cost - took
	return ok
}

// array judges the elements of an array.
func (j *judge) array(r *rule, v *value, seen *evaluated) bool {
	ok := true
	if r.elements.few(len(v.elements)) {
		ok = j.fail("minItems")
	}
	if r.elements.many(len(v.elements)) {
		ok = j.fail("maxItems")
	}
	if r.unique && !j.unique(v) {
		ok = j.fail("uniqueItems")
	}
	for i := range v.elements {
		sub := r.items
		if i < len(r.prefix) {
			sub = r.prefix[i]
		}
		if sub == nil || !ok && j.stops() {
			break
		}
		ok = j.inside(sub, &v.elements[i], segment{index: i}) && ok
		if seen != nil {
			seen.mark(i)
		}
	}
	if r.contains != nil && (ok || !j.stops()) {
		ok = j.contains(r, v, seen) && ok
	}
	return ok
}

// contains judges how many elements of an array the rule of contains takes.
func (j *judge) contains(r *rule, v *value, seen *evaluated) bool {
	n := 0
	j.quiet++
	for i := range v.elements {
		if j.inside(r.contains, &v.elements[i], segment{index: i}) {
			n++
			if seen != nil {
				seen.mark(i)
			}
		}
	}
	j.quiet--
	switch {
	case r.once && n == 0:
		return j.fail("contains")
	case r.contained.few(n):
		return j.fail("minContains")
	case r.contained.many(n):
		return j.fail("maxContains")
	}
	return true
}

// unique reports whether no two elements of an array are equal.
func (j *judge) unique(v *value) bool {
	first := make(map[uint64]*value)
	for i := range v.elements {
		if !j.pay(4) {
			return false
		}
		e := &v.elements[i]
		other, known := first[j.sum(e)]
		if known && j.equal(e, other) {
			return false
		}
		first[e.hash] = e
	}
	return true
}

func (j *judge) string(r *rule, v *value) bool {
	ok := true
	if r.length != anySpan {
		if !j.pay(len(v.text) / bytesAStep) {
			return false
		}
		length := utf8.RuneCountInString(v.text)
		if r.length.few(length) {
			ok = j.fail("minLength")
		}
		if r.length.many(length) {
			ok = j.fail("maxLength")
		}
	}
	if r.pattern != nil && !j.matches(r.pattern, v.text) {
		ok = j.fail("pattern")
	}
	return ok
}

func (j *judge) number(r *rule, v *value) bool {
	if !j.pay(1 + len(v.text)/bytesAStep) {
		return false
	}
	ok, n := true, parse(v.text)
	if r.minimum != nil && n.compare(*r.minimum) < 0 {
		ok = j.fail("minimum")
	}
	if r.maximum != nil && n.compare(*r.maximum) > 0 {
		ok = j.fail("maximum")
	}
	if r.exclusiveMin != nil && n.compare(*r.exclusiveMin) <= 0 {
		ok = j.fail("exclusiveMinimum")
	}
	if r.exclusiveMax != nil && n.compare(*r.exclusiveMax) >= 0 {
		ok = j.fail("exclusiveMaximum")
	}
	if r.multipleOf != nil && (!j.pay(r.multipleOf.cost(n)) || !r.multipleOf.divides(n)) {
		ok = j.fail("multipleOf")
	}
	return ok
}

// combined judges a value by further rules.
func (j *judge) combined(r *rule, v *value, seen *evaluated) bool {
	ok := r.ref == nil || j.also(r.ref, v, seen)
	if r.dynamic != nil && (ok || !j.stops()) {
		ok = j.also(j.target(r), v, seen) && ok
	}
	for _, sub := range r.allOf {
		if !ok && j.stops() {
			return false
		}
		ok = j.also(sub, v, seen) && ok
	}
	if len(r.anyOf) > 0 && j.fitting(r.anyOf, v, seen, 1) == 0 {
		ok = j.fail("anyOf")
	}
	if len(r.oneOf) > 0 && j.fitting(r.oneOf, v, seen, 2) != 1 {
		ok = j.fail("oneOf")
	}
	if r.not != nil && j.branch(r.not, v, nil) {
		ok = j.fail("not")
	}
	if r.when == nil || !ok && j.stops() {
		return ok
	}
	then := r.otherwise
	if j.branch(r.when, v, seen) {
		then = r.then
	}
	return (then == nil || j.also(then, v, seen)) && ok
}

// fitting returns how many of the rules take a value. It need not count beyond a number if nobody
// asks what they evaluate.
func (j *judge) fitting(all []*rule, v *value, seen *evaluated, most int) (n int) {
	for _, sub := range all {
		if j.left < 0 {
			return 0
		}
		if j.branch(sub, v, seen) {
			if n++; n == most && (seen == nil || most > 1) {
				break
			}
		}
	}
	return n
}

// target returns where the $dynamicRef of an open rule leads: of all resources on the way to it,
// the first one that has the anchor.
func (j *judge) target(r *rule) *rule {
	if r.anchor != "" {
		for i, on := range j.open {
			if to := on.resource.anchors[r.anchor]; to != nil {
				j.pay(i)
				return to
			}
		}
	}
	return r.dynamic
}

// unevaluated judges what no other keyword has evaluated.
func (j *judge) unevaluated(r *rule, v *value, seen *evaluated) bool {
	ok := true
	rest := r.unevaluated
	if v.kind == isArray {
		rest = r.unevaluatedItems
	}
	if rest == nil || v.container == nil {
		return true
	}
	for i := range v.elements {
		if !seen.has(i) {
			ok = j.inside(rest, &v.elements[i], segment{index: i}) && ok
		}
	}
	for i := range v.members {
		if !seen.has(i) {
			ok = j.inside(rest, &v.members[i].value, segment{v.members[i].name, -1}) && ok
		}
	}
	seen.all = true
	return ok
}

// evaluated are the elements or members of a value that keywords have evaluated.
type evaluated struct {
	all   bool
	marks []uint64
}

func (e *evaluated) has(i int) bool {
	return e.all || i/64 < len(e.marks) && e.marks[i/64]>>(i%64)&1 != 0
}

func (e *evaluated) mark(i int) {
	for i/64 >= len(e.marks) {
		e.marks = append(e.marks, 0)
	}
	e.marks[i/64] |= 1 << (i % 64)
}

func (e *evaluated) merge(o *evaluated) {
	e.all = e.all || o.all
	for i, marks := range o.marks {
		for i >= len(e.marks) {
			e.marks = append(e.marks, 0)
		}
		e.marks[i] |= marks
	}
}
