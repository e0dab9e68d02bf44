package upcast

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream/jsonequal"
)

// The long form:
//
//	go test ./jetstream/schema/upcast -run TestProgramsAreTotal -upcast.programs 20000
var programs = flag.Int("upcast.programs", 3_000, "how many random programs TestProgramsAreTotal runs")

func caster(tb testing.TB, up, down string) *Caster {
	tb.Helper()
	c, err := Compile([]byte(up), []byte(down))
	if err != nil {
		tb.Fatalf("%s %s: %v", up, down, err)
	}
	return c
}

// Each operation changes what it names, and nothing else.
func TestOperations(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ op, doc, want string }{
		{`{"rename":{"at":"/a","to":"b"}}`, `{"x":1.0,"a": "é" ,"y":[ 1 ]}`, `{"x":1.0,"b":"é","y":[ 1 ]}`},
		{`{"rename":{"at":"/a","to":"b"}}`, `{"b":1,"a":2,"c":3}`, `{"b":2,"c":3}`},
		{`{"rename":{"at":"/a","to":"a"}}`, `{"a":1}`, `{"a":1}`},
		{`{"rename":{"at":"/none","to":"b"}}`, `{"a":1}`, `{"a":1}`},
		{`{"rename":{"at":"/none","to":"b","required":true}}`, `{"a":1}`, `!/none: nothing is there`},
		{`{"rename":{"at":"/l/*/a","to":"b"}}`, `{"l":[{"a":1},{"a":2},{}]}`, `{"l":[{"b":1},{"b":2},{}]}`},
		{`{"rename":{"at":"/0","to":"b"}}`, `[1]`, `!/0: an element of an array has no name`},
		{`{"move":{"from":"/a/b","to":"/c/d"}}`, `{"a":{"b":1e3,"x":2}}`, `{"a":{"x":2},"c":{"d":1e3}}`},
		{`{"move":{"from":"/a/b","to":"/c"}}`, `{"a":{"b":1},"c":0}`, `{"a":{},"c":1}`},
		{`{"move":{"from":"/a","to":""}}`, `{"a":{"b":1},"c":0}`, `{"b":1}`},
		{`{"move":{"from":"","to":"/a"}}`, ``, `?to: a value cannot be moved into itself`},
		{`{"move":{"from":"/a","to":"/a/b"}}`, ``, `?to: a value cannot be moved into itself`},
		{`{"move":{"from":"/none","to":"/c"}}`, `{"a":1}`, `{"a":1}`},
		{`{"move":{"from":"/none","to":"/c","required":true}}`, `{"a":1}`, `!/none: nothing is there`},
		{`{"move":{"from":"/l/*/a","to":"/l/*/b/c"}}`, `{"l":[{"a":1},{"a":2,"b":{"x":0}}]}`, `{"l":[{"b":{"c":1}},{"b":{"x":0,"c":2}}]}`},
		{`{"move":{"from":"/l/*/a","to":"/m/*/a"}}`, ``, `?* may stand only where both`},
		{`{"move":{"from":"/a","to":"/b/c"}}`, `{"a":1,"b":2}`, `!/a: a part of the target is no object and no array`},
		{`{"copy":{"from":"/a","to":"/b/c"}}`, `{"a":[1, 2]}`, `{"a":[1, 2],"b":{"c":[1, 2]}}`},
		{`{"copy":{"from":"","to":"/self"}}`, `{"a":1}`, `{"a":1,"self":{"a":1}}`},
		{`{"default":{"at":"/a/b","value":{"x": 1}}}`, `{}`, `{"a":{"b":{"x": 1}}}`},
		{`{"default":{"at":"/a","value":1}}`, `{"a":null}`, `{"a":null}`},
		{`{"default":{"at":"/l/*/a","value":1}}`, `{"l":[{},{"a":2}]}`, `{"l":[{"a":1},{"a":2}]}`},
		{`{"default":{"at":"/a/b","value":1}}`, `{"a":"text"}`, `!/a/b: a part of the place is no object and no array`},
		{`{"default":{"at":"/5","value":1}}`, `[1]`, `!/5: an array has no such element`},
		{`{"set":{"at":"/a","value":1}}`, `{"a":2,"a":3}`, `{"a":1}`},
		{`{"set":{"at":"","value":[]}}`, `{"a":2}`, `[]`},
		{`{"set":{"at":"/*","value":0}}`, `{"a":2,"b":"x"}`, `{"a":0,"b":0}`},
		{`{"set":{"at":"/x/*/y","value":0}}`, `{}`, `{"x":{}}`},
		{`{"remove":{"at":"/a~1b"}}`, `{"a/b":1,"c":2}`, `{"c":2}`},
		{`{"remove":{"at":"/1"}}`, `[1,2,3]`, `[1,3]`},
		{`{"remove":{"at":"/01"}}`, `[1,2,3]`, `[1,2,3]`},
		{`{"remove":{"at":"/*"}}`, `{"a":1,"b":2}`, `{}`},
		{`{"remove":{"at":"/a/b","required":true}}`, `{"a":1}`, `!/a/b: nothing is there`},
		{`{"wrap":{"at":"/a"}}`, `{"a":1}`, `{"a":[1]}`},
		{`{"wrap":{"at":"/a","in":"v\""}}`, `{"a":1}`, `{"a":{"v\"":1}}`},
		{`{"wrap":{"at":"","in":"all"}}`, ` 5 `, `{"all": 5 }`},
		{`{"unwrap":{"at":"/a"}}`, `{"a":[1]}`, `{"a":1}`},
		{`{"unwrap":{"at":"/a"}}`, `{"a":[1,2]}`, `!/a: is no array of one`},
		{`{"unwrap":{"at":"/a"}}`, `{"a":{"x":1}}`, `!/a: is no array`},
		{`{"unwrap":{"at":"/a","of":"x"}}`, `{"a":{"x":1,"y":2}}`, `{"a":1}`},
		{`{"unwrap":{"at":"/a","of":"x"}}`, `{"a":{"y":2}}`, `!/a: has no member to unwrap`},
		{`{"unwrap":{"at":"/a","of":"x"}}`, `{"a":3}`, `!/a: is no object`},
		{`{"map":{"at":"/s","values":[["alive","up"],[1,"one"],[{"a":1,"b":2},[]]]}}`, `{"s":"\u0061live"}`, `{"s":"up"}`},
		{`{"map":{"at":"/s","values":[["alive","up"],[1,"one"]]}}`, `{"s":10e-1}`, `{"s":"one"}`},
		{`{"map":{"at":"/s","values":[[{"a":1,"b":2},[]]]}}`, `{"s":{"b":2.0,"a":1}}`, `{"s":[]}`},
		{`{"map":{"at":"/s","values":[["alive","up"]],"otherwise":"unknown"}}`, `{"s":7}`, `{"s":"unknown"}`},
		{`{"map":{"at":"/s","values":[["alive","up"]],"otherwise":null}}`, `{"s":7}`, `{"s":null}`},
		{`{"map":{"at":"/s","values":[["alive","up"]]}}`, `{"s":7}`, `{"s":7}`},
		{`{"map":{"at":"/s","values":[["alive","up"]],"strict":true}}`, `{"s":"secret"}`, `!/s: has a value that map does not know`},
		{`{"map":{"at":"/*","values":[[1,2]]}}`, `[1,2,1]`, `[2,2,2]`},
		{`{"explode":{"at":"/a"}}`, ``, `?up/0/explode: there is no such operation`},
		{`{"rename":{"at":"/a"}}`, ``, `?up/0/rename: to is missing`},
		{`{"rename":{"at":"/*","to":"b"}}`, ``, `?must end with the name of a member`},
		{`{"rename":{"at":"a","to":"b"}}`, ``, `?"a": must begin with /`},
		{`{"remove":{"at":"/a","value":1}}`, ``, `?value is unknown; it takes at required`},
		{`{"remove":{"At":"/a"}}`, ``, `?at is missing`},
		{`{"remove":{"at":""}}`, ``, `?the whole document cannot be removed`},
		{`{"remove":{"at":7}}`, ``, `?must be strings`},
		{`{"map":{"at":"/a","values":[[1]]}}`, ``, `?values/0 must be an array of two values`},
		{`{"set":{"at":"/a","value":1},"remove":{"at":"/b"}}`, ``, `?up/0: must have exactly one member`},
		{`{"set":{"at":"` + strings.Repeat("/a", 33) + `","value":1}}`, ``, `?has 33 segments, at most 32`},
	} {
		c, err := Compile([]byte("["+test.op+"]"), nil)
		if want, refused := strings.CutPrefix(test.want, "?"); refused || err != nil {
			if err == nil || !refused || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q", test.op, err, want)
			}
			continue
		}
		got, err := NewChain(1, c).Cast(t.Context(), []byte(test.doc), 1, 2)
		if want, fails := strings.CutPrefix(test.want, "!"); fails {
			if err == nil || err.Error() != "upcast v1→v2: "+want {
				t.Errorf("%s of %s: %s, %v, want %s", test.op, test.doc, got, err, want)
			}
			continue
		}
		if err != nil || string(got) != test.want {
			t.Errorf("%s of %s: %s, %v, want %s", test.op, test.doc, got, err, test.want)
		}
	}
	for _, test := range []struct{ up, want string }{
		{`{}`, "up: must be an array"},
		{`[`, "up: is not JSON"},
		{`[1]`, "up: must be an array of objects"},
		{"[" + strings.Repeat(`{"remove":{"at":"/a"}},`, MaxOperations) + `{"remove":{"at":"/a"}}]`, "has 101 operations, at most 100"},
		{`[{"set":{"at":"/a","value":"` + strings.Repeat("x", MaxProgram) + `"}}]`, "at most 262144 are allowed"},
	} {
		if _, err := Compile([]byte(test.up), nil); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%.60s: %v, want %q", test.up, err, test.want)
		}
	}
}

// A chain goes from any version to any other, tells which step fails, and leaves equal versions as
// they are.
func TestChain(t *testing.T) {
	t.Parallel()
	panics := New(func([]byte) ([]byte, error) { panic("secret") }, func([]byte) ([]byte, error) { return nil, errors.New("no") })
	chain := NewChain(3,
		caster(t, `[{"rename":{"at":"/a","to":"b"}}]`, `[{"rename":{"at":"/b","to":"a"}}]`),
		nil,
		caster(t, `[{"wrap":{"at":"/b"}},{"remove":{"at":"/gone","required":true}}]`, ``),
		panics,
	)
	doc := []byte(` {"a" : 1, "gone":0} `)
	for _, test := range []struct {
		from, to int
		want     string
	}{
		{3, 3, string(doc)},
		{3, 4, `{"b":1,"gone":0}`},
		{3, 5, `{"b":1,"gone":0}`},
		{3, 6, `{"b":[1]}`},
		{4, 5, string(doc)},
		{5, 4, string(doc)},
		{4, 3, `{"a":1,"gone":0}`},
		{3, 7, "!upcast v6→v7: the function of this step panicked"},
		{7, 3, "!downcast v7→v6: no"},
		{6, 3, "!downcast v6→v5: there is no cast this way"},
		{2, 3, "!upcast v2→v3: the versions are 3 to 7"},
		{3, 8, "!upcast v3→v8: the versions are 3 to 7"},
	} {
		got, err := chain.Cast(t.Context(), doc, test.from, test.to)
		if want, fails := strings.CutPrefix(test.want, "!"); fails {
			if _, placed := errors.AsType[*CastError](err); !placed || err.Error() != want {
				t.Errorf("from %d to %d: %s, %v, want %s", test.from, test.to, got, err, want)
			}
		} else if err != nil || string(got) != test.want {
			t.Errorf("from %d to %d: %s, %v, want %s", test.from, test.to, got, err, test.want)
		}
	}
	if _, err := chain.Cast(t.Context(), []byte(`{"b":1}`), 5, 6); err == nil || err.Error() != "upcast v5→v6: /gone: nothing is there" {
		t.Errorf("%v", err)
	}
	if _, err := chain.Cast(t.Context(), []byte(`{`), 3, 4); err == nil || err.Error() != "upcast v3→v4: the document is not JSON" {
		t.Errorf("%v", err)
	}
	if chain.Casts(4, 5) || chain.Casts(3, 3) || !chain.Casts(5, 3) || chain.Casts(1, 3) {
		t.Error("Casts is wrong")
	}
	if got, err := chain.Cast(t.Context(), doc, 3, 3); err != nil || &got[0] != &doc[0] {
		t.Error("a document of an equal version was copied")
	}
}

// Operations cannot make a document grow without bounds, and take deep ones.
func TestCastIsBounded(t *testing.T) {
	t.Parallel()
	double := "[" + strings.Repeat(`{"copy":{"from":"","to":"/a"}},`, 99) + `{"copy":{"from":"","to":"/a"}}]`
	if got, err := NewChain(1, caster(t, double, "")).Cast(t.Context(), []byte(`{"text":"`+strings.Repeat("x", 1000)+`"}`), 1, 2); err == nil || !strings.Contains(err.Error(), "more than 4194304 bytes") {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	set := `[{"set":{"at":"/*/v","value":"` + strings.Repeat("x", 1000) + `"}}]`
	if got, err := NewChain(1, caster(t, set, "")).Cast(t.Context(), []byte("["+strings.Repeat("{},", 9_999)+"{}]"), 1, 2); err == nil || !strings.Contains(err.Error(), "more than 4194304 bytes") {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	large := New(func([]byte) ([]byte, error) { return make([]byte, MaxOutput+1), nil }, nil)
	if _, err := NewChain(1, large).Cast(t.Context(), []byte(`1`), 1, 2); err == nil {
		t.Error("a function made a document that is too large")
	}
	deep := strings.Repeat(`[`, 9_000) + strings.Repeat(`]`, 9_000)
	if got, err := NewChain(1, caster(t, `[{"wrap":{"at":"/0/0"}},{"copy":{"from":"/0","to":"/0/0"}}]`, "")).Cast(t.Context(), []byte(deep), 1, 2); err != nil || !json.Valid(got) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// machine is what TestMigration's documents describe, in version 5.
type machine struct {
	ID      string `json:"id"`
	Machine struct {
		Name string   `json:"name"`
		IPs  []string `json:"ips"`
	} `json:"machine"`
	Status string         `json:"status"`
	Load   map[string]any `json:"load"`
	Labels map[string]any `json:"labels"`
	Format int            `json:"format"`
}

// A chain from version 1 to version 5 does what a migration in Go does, for 2,000 documents.
func TestMigration(t *testing.T) {
	t.Parallel()
	chain := NewChain(1,
		caster(t, `[{"rename":{"at":"/host","to":"hostname"}},{"default":{"at":"/labels","value":{}}}]`, ``),
		caster(t, `[{"move":{"from":"/hostname","to":"/machine/name"}},{"wrap":{"at":"/ip"}},{"move":{"from":"/ip","to":"/machine/ips"}}]`, ``),
		caster(t, `[{"map":{"at":"/status","values":[["alive","up"],["dead","down"],[0,"down"],[1,"up"]],"otherwise":"unknown"}},{"default":{"at":"/status","value":"unknown"}},{"wrap":{"at":"/cpu","in":"cpu"}},{"rename":{"at":"/cpu","to":"load"}}]`, ``),
		caster(t, `[{"remove":{"at":"/secret"}},{"set":{"at":"/format","value":5}},{"default":{"at":"/load","value":{"cpu":0}}},{"default":{"at":"/machine/ips","value":[]}}]`, ``),
	)
	random := rand.New(rand.NewPCG(1, 1))
	for n := range 2_000 {
		id, host := strconv.Itoa(n), "host-"+strconv.Itoa(random.IntN(100))+"é\"\n"
		doc := map[string]any{"id": id, "host": host}
		var want machine
		want.ID, want.Machine.Name, want.Machine.IPs = id, host, []string{}
		want.Status, want.Format, want.Load, want.Labels = "unknown", 5, map[string]any{"cpu": 0.0}, map[string]any{}
		if random.IntN(2) == 0 {
			ip := fmt.Sprintf("10.0.0.%d", random.IntN(256))
			doc["ip"], want.Machine.IPs = ip, []string{ip}
		}
		if random.IntN(4) > 0 {
			status := []any{"alive", "dead", "stale", 0, 1, nil, true}[random.IntN(7)]
			doc["status"] = status
			switch status {
			case "alive", 1:
				want.Status = "up"
			case "dead", 0:
				want.Status = "down"
			}
		}
		if random.IntN(2) == 0 {
			cpu := float64(random.IntN(1000)) / 8
			doc["cpu"], want.Load["cpu"] = cpu, cpu
		}
		if random.IntN(2) == 0 {
			doc["secret"] = "x"
		}
		if random.IntN(3) == 0 {
			doc["labels"] = map[string]any{"a": 1.5, "b": []any{"c"}}
			want.Labels = map[string]any{"a": 1.5, "b": []any{"c"}}
		}
		text, _ := json.Marshal(doc)
		got, err := chain.Cast(t.Context(), text, 1, 5)
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		wanted, _ := json.Marshal(want)
		if !jsonequal.Values(jsonequal.Decode(got), jsonequal.Decode(wanted)) {
			t.Fatalf("%s became %s, want %s", text, got, wanted)
		}
	}
}

// randomProgram returns operations on few names.
func randomProgram(r *rand.Rand, n int) string {
	place := func() string {
		var p strings.Builder
		for range r.IntN(4) {
			p.WriteString("/" + []string{"a", "b", "0", "1", "*", "x~1y"}[r.IntN(6)])
		}
		return p.String()
	}
	value := []string{`1`, `"t"`, `null`, `{"a":1}`, `[1,2]`}
	ops := make([]string, 0, n)
	for len(ops) < n {
		at := place()
		extra := ""
		if r.IntN(5) == 0 {
			extra = `,"required":true`
		}
		var op string
		switch r.IntN(9) {
		case 0:
			op = fmt.Sprintf(`{"rename":{"at":%q,"to":"b"%s}}`, at, extra)
		case 1:
			op = fmt.Sprintf(`{"move":{"from":%q,"to":%q%s}}`, at, place(), extra)
		case 2:
			op = fmt.Sprintf(`{"copy":{"from":%q,"to":%q%s}}`, at, place(), extra)
		case 3:
			op = fmt.Sprintf(`{"default":{"at":%q,"value":%s}}`, at, value[r.IntN(5)])
		case 4:
			op = fmt.Sprintf(`{"set":{"at":%q,"value":%s}}`, at, value[r.IntN(5)])
		case 5:
			op = fmt.Sprintf(`{"remove":{"at":%q%s}}`, at, extra)
		case 6:
			op = fmt.Sprintf(`{"wrap":{"at":%q,"in":"b"%s}}`, at, extra)
		case 7:
			op = fmt.Sprintf(`{"unwrap":{"at":%q,"of":"b"%s}}`, at, extra)
		default:
			op = fmt.Sprintf(`{"map":{"at":%q,"values":[[1,%s],["t",2]]%s}}`, at, value[r.IntN(5)], extra)
		}
		if _, err := Compile([]byte("["+op+"]"), nil); err == nil {
			ops = append(ops, op)
		}
	}
	return "[" + strings.Join(ops, ",") + "]"
}

func randomDoc(r *rand.Rand, depth int) string {
	kind := r.IntN(6)
	if depth == 0 {
		kind = r.IntN(3)
	}
	switch kind {
	case 0:
		return []string{"1", "1.0", "1e2", "null"}[r.IntN(4)]
	case 1, 2:
		return []string{`"t"`, `"\u0074"`, `"é"`}[r.IntN(3)]
	case 3:
		var list []string
		for range r.IntN(3) {
			list = append(list, randomDoc(r, depth-1))
		}
		return "[" + strings.Join(list, " ,") + "]"
	default:
		var list []string
		for range r.IntN(4) {
			list = append(list, []string{`"a"`, `"b"`, `"x/y"`, `"\u0061"`}[r.IntN(4)]+": "+randomDoc(r, depth-1))
		}
		return "{" + strings.Join(list, ",") + "}"
	}
}

// plenty is more work than a test does.
func plenty() *work { return &work{ctx: context.Background(), left: MaxWork} }

// Programs are total: each makes JSON of JSON, or fails at a place, always in the same way, and
// does not change what it was given.
func TestProgramsAreTotal(t *testing.T) {
	t.Parallel()
	failed := 0
	for seed := range uint64(*programs) {
		r := rand.New(rand.NewPCG(seed, 3))
		up, doc := randomProgram(r, 1+r.IntN(6)), randomDoc(r, 3)
		c := caster(t, up, "")
		given := []byte(doc)
		got, err := c.up.run(given, plenty())
		again, errAgain := c.up.run(given, plenty())
		switch {
		case string(given) != doc:
			t.Fatalf("%s changed %s to %s", up, doc, given)
		case err != nil:
			failed++
			if _, placed := errors.AsType[*placeError](err); !placed || errAgain == nil || errAgain.Error() != err.Error() {
				t.Fatalf("%s of %s: %v and %v", up, doc, err, errAgain)
			}
		case !json.Valid(got) || string(got) != string(again):
			t.Fatalf("%s of %s: %s and %s", up, doc, got, again)
		}
	}
	if failed == 0 || failed > *programs*3/4 {
		t.Errorf("%d programs failed", failed)
	}
}

// A Chain serves many at a time.
func TestChainIsForMany(t *testing.T) {
	t.Parallel()
	chain := NewChain(1, caster(t, `[{"copy":{"from":"/a","to":"/b"}},{"set":{"at":"/a/x","value":{"y":1}}},{"default":{"at":"/a/x/z","value":2}}]`, ``))
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 500 {
				if got, err := chain.Cast(t.Context(), []byte(`{"a":{"q":0}}`), 1, 2); err != nil || string(got) != `{"a":{"q":0,"x":{"y":1,"z":2}},"b":{"q":0}}` {
					t.Errorf("%s, %v", got, err)
				}
			}
		})
	}
	all.Wait()
}

// A program makes JSON of JSON, or fails.
func FuzzCast(f *testing.F) {
	for seed := range uint64(30) {
		r := rand.New(rand.NewPCG(seed, 4))
		f.Add([]byte(randomProgram(r, 3)), []byte(randomDoc(r, 3)))
	}
	f.Fuzz(func(t *testing.T, up, doc []byte) {
		c, err := Compile(up, nil)
		if err != nil || c.up == nil {
			return
		}
		if got, err := c.up.run(doc, plenty()); err == nil && !json.Valid(got) {
			t.Errorf("%s of %s: %s", up, doc, got)
		}
	})
}

func BenchmarkCast(b *testing.B) {
	doc := []byte(`{"id":"01a20b53-1e41-7d72-9e8c-be08630a2e85","status":"alive","host":"web-17.example.com","owner":{"name":"Ada","mail":"ada@example.com"},"cpu":0.42,"memory":{"used":123456789,"free":987654321},"tags":["web","eu-west","blue"],"seen":1795199000000,"note":"moved in May"}`)
	chain := NewChain(1, caster(b, `[{"rename":{"at":"/host","to":"hostname"}},{"wrap":{"at":"/cpu","in":"total"}},{"map":{"at":"/status","values":[["alive","up"]]}},{"default":{"at":"/owner/team","value":"none"}}]`, ``))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := chain.Cast(b.Context(), doc, 1, 2); err != nil {
			b.Fatal(err)
		}
	}
}

func ExampleChain_Cast() {
	second, err := Compile([]byte(`[{"rename":{"at":"/host","to":"hostname"}}]`), []byte(`[{"rename":{"at":"/hostname","to":"host"}}]`))
	if err != nil {
		fmt.Println(err)
		return
	}
	third, err := Compile([]byte(`[{"move":{"from":"/hostname","to":"/machine/name","required":true}}]`), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	chain := NewChain(1, second, third)
	doc, err := chain.Cast(context.Background(), []byte(`{"host":"a","cpu":0.50}`), 1, 3)
	fmt.Println(string(doc), err)
	_, err = chain.Cast(context.Background(), []byte(`{"cpu":0.50}`), 1, 3)
	fmt.Println(err)
	// Output:
	// {"cpu":0.50,"machine":{"name":"a"}} <nil>
	// upcast v2→v3: /hostname: nothing is there
}

// The cost of a cast is bounded, whatever its operations and the document are, and a cast ends with
// its context.
func TestWorkIsBounded(t *testing.T) {
	t.Parallel()
	var scalars, objects []string
	for i := range 10_000 {
		scalars = append(scalars, fmt.Sprintf(`[1%d.0,1]`, i))
	}
	for i := range maxPairs {
		objects = append(objects, fmt.Sprintf(`[{"a":%d},1]`, i))
	}
	many := func(of string, n int) []byte { return []byte("[" + strings.Repeat(of+",", n-1) + of + "]") }
	copies := strings.Repeat(`{"map":{"at":"/*","values":[]}},`, 99) + `{"map":{"at":"/*","values":[]}}`
	// sixteenth is how long a cast takes that has a sixteenth of the work.
	var sixteenth time.Duration
	for _, test := range []struct {
		name, up, want string
		doc            []byte
		steps          int
		work           int // that is left of MaxWork; 0: all
	}{
		{"pairs of numbers", `[{"map":{"at":"/*","values":[` + strings.Join(scalars, ",") + `]}}]`, "", many("7", 50_000), 1, 0},
		{"pairs of objects", `[{"map":{"at":"/*","values":[` + strings.Join(objects, ",") + `]}}]`, "more than 786432 steps", many(`{"a":-1}`, 100_000), 1, MaxWork / 16},
		{"operations", "[" + copies + "]", "more than 786432 steps", many("7", 50_000), 1, MaxWork / 16},
		{"versions", `[{"map":{"at":"/*","values":[]}}]`, "more than 12582912 steps", many("7", 50_000), 400, 0},
		{"parts", `[{"map":{"at":"/*","values":[]}}]`, "more than 100000 members and elements", many("7", 100_001), 1, 0},
	} {
		c := caster(t, test.up, "")
		casters := make([]*Caster, test.steps)
		for i := range casters {
			casters[i] = c
		}
		began := time.Now()
		var err error
		if test.work > 0 {
			_, err = c.up.run(test.doc, newWork(t.Context(), Budget{Steps: test.work}))
		} else {
			_, err = NewChain(1, casters...).Cast(t.Context(), test.doc, 1, 1+test.steps)
		}
		// It is a second on a machine with nothing else to do.
		took := time.Since(began)
		most := 10 * time.Second
		if test.work > 0 {
			sixteenth = max(sixteenth, took)
		} else {
			most = max(most, 3*16*sixteenth)
		}
		if took > most {
			t.Errorf("%s: took %v; a sixteenth took %v", test.name, took, sixteenth)
		}
		if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
			t.Errorf("%s: %v, want %q", test.name, err, test.want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := NewChain(1, caster(t, "["+copies+"]", "")).Cast(ctx, many("7", 50_000), 1, 2); err == nil || !strings.Contains(err.Error(), "context canceled") {
		t.Errorf("%v", err)
	}
	if _, err := Compile([]byte(`[{"map":{"at":"/a","values":[`+strings.Join(append(objects, `[[],1]`), ",")+`]}}]`), nil); err == nil || !strings.Contains(err.Error(), "more than 100 pairs") {
		t.Errorf("%v", err)
	}
}
