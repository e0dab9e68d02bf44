package cloudevents

import (
	"encoding/json"
	"maps"
	"reflect"
	"strings"
	"testing"
)

// The events of the examples in the specification's JSON event format, section 3.2, and in its HTTP
// binding.
func TestParseExamplesOfTheSpecification(t *testing.T) {
	common := map[string]string{
		"specversion": "1.0", "type": "com.example.someevent", "source": "/mycontext", "time": "2018-04-05T17:31:00Z",
		"comexampleextension1": "value", "comexampleothervalue": "5",
	}
	const attributes = `"specversion": "1.0", "type": "com.example.someevent", "source": "/mycontext",
		"time": "2018-04-05T17:31:00Z", "comexampleextension1": "value", "comexampleothervalue": 5,`
	for name, c := range map[string]struct {
		text string
		more map[string]string
		data string
	}{
		"binary": {
			`"id": "A234-1234-1234", "datacontenttype": "application/vnd.apache.thrift.binary", "data_base64": "AAEC/w=="`,
			map[string]string{"id": "A234-1234-1234", "datacontenttype": "application/vnd.apache.thrift.binary"},
			"\x00\x01\x02\xff",
		},
		"XML": {
			`"id": "B234-1234-1234", "unsetextension": null, "datacontenttype": "application/xml", "data": "<much wow=\"xml\"/>"`,
			map[string]string{"id": "B234-1234-1234", "datacontenttype": "application/xml"},
			`<much wow="xml"/>`,
		},
		"object": {
			`"subject": null, "id": "C234-1234-1234", "datacontenttype": "application/json", "data": {"appinfoA": "abc", "appinfoB": 123, "appinfoC": true}`,
			map[string]string{"id": "C234-1234-1234", "datacontenttype": "application/json"},
			`{"appinfoA": "abc", "appinfoB": 123, "appinfoC": true}`,
		},
		"number": {
			`"subject": null, "id": "C234-1234-1234", "datacontenttype": "application/json", "data": 1.5`,
			map[string]string{"id": "C234-1234-1234", "datacontenttype": "application/json"},
			"1.5",
		},
		"string of an implied type": {
			`"id": "D234-1234-1234", "data": "I'm just a string"`,
			map[string]string{"id": "D234-1234-1234", "datacontenttype": "application/json"},
			`"I'm just a string"`,
		},
		"binary without a type": {
			`"id": "D234-1234-1234", "data_base64": "eyAieHl6IjogMTIzIH0="`,
			map[string]string{"id": "D234-1234-1234"},
			`{ "xyz": 123 }`,
		},
		"no data": {`"id": "E"`, map[string]string{"id": "E"}, ""},
		"null":    {`"id": "E", "data": null`, map[string]string{"id": "E", "datacontenttype": "application/json"}, "null"},
	} {
		t.Run(name, func(t *testing.T) {
			e, err := Parse([]byte("{" + attributes + c.text + "}"))
			if err != nil {
				t.Fatal(err)
			}
			want := maps.Clone(common)
			maps.Copy(want, c.more)
			if !maps.Equal(e.Attributes, want) || string(e.Data) != c.data {
				t.Fatalf("got %v, %q\nwant %v, %q", e.Attributes, e.Data, want, c.data)
			}
			again, err := Parse(e.Append(nil))
			if err != nil || !maps.Equal(again.Attributes, want) || string(again.Data) != c.data {
				t.Fatalf("written as %s: %v, %q, %v", e.Append(nil), again.Attributes, again.Data, err)
			}
			headers := make(map[string]string)
			e.SetHeaders(headers)
			delete(headers, contentTypeHeader)
			got, err := FromHeaders(headers)
			if err != nil || !maps.Equal(got, want) {
				t.Fatalf("as headers %v: %v, %v", headers, got, err)
			}
		})
	}
}

func TestParseFaults(t *testing.T) {
	for text, want := range map[string]string{
		`[]`:                    "must be a JSON object",
		`["a"]`:                 "must be a JSON object",
		`{`:                     "not a JSON object",
		`{"specversion":"1.0"}`: "id is missing",
		`{"specversion":"0.3","id":"1","source":"/","type":"t"}`:                                                       `specversion is "0.3"; this hub takes 1.0`,
		`{"specversion":1.0,"id":"1","source":"/","type":"t"}`:                                                         "specversion must be a string",
		`{"specversion":"1.0","id":1,"source":"/","type":"t"}`:                                                         "id must be a string",
		`{"specversion":"1.0","id":"","source":"/","type":"t"}`:                                                        "id is missing or empty",
		`{"specversion":"1.0","id":"1","source":"::","type":"t"}`:                                                      "source is not a URI reference",
		`{"specversion":"1.0","id":"1","source":"/","type":"t","time":"now"}`:                                          "time is not a time as in RFC 3339",
		`{"specversion":"1.0","id":"1","source":"/","type":"t","time":"2026-01-31T12:00:00,5Z"}`:                       "time is not a time",
		`{"specversion":"1.0","id":"1","source":"/","type":"t","subject":""}`:                                          "subject is empty",
		`{"specversion":"1.0","id":"1","source":"/","type":"t","dataschema":"rel"}`:                                    "dataschema is not an absolute URI",
		`{"specversion":"1.0","id":"1","source":"/","type":"t","datacontenttype":";"}`:                                 "datacontenttype is not a media type",
		`{"specversion":"1.0","id":"1","source":"/","type":"t","Other":"x"}`:                                           `"Other" is not a name`,
		`{"specversion":"1.0","id":"1","source":"/","type":"t","x":{}}`:                                                "x must be a string, a boolean, or an integer",
		`{"specversion":"1.0","id":"1","source":"/","type":"t","x":2147483648}`:                                        "x must be",
		`{"specversion":"1.0","id":"1","source":"/","type":"t","x":1.5}`:                                               "x must be",
		`{"specversion":"1.0","id":"a\u0007","source":"/","type":"t"}`:                                                 "id has a character",
		`{"specversion":"1.0","id":"a\ufffe","source":"/","type":"t"}`:                                                 "id has a character",
		`{"specversion":"1.0","id":"1","source":"/","type":"t","data":1,"data_base64":"AA=="}`:                         "exclude each other",
		`{"specversion":"1.0","id":"1","source":"/","type":"t","id":"2"}`:                                              `"id" is given twice`,
		`{"specversion":"1.0","id":"1","source":"/","type":"t","x":null,"x":"2"}`:                                      `"x" is given twice`,
		`{"specversion":"1.0","id":"1","source":"/","type":"t","data":1,"data":2}`:                                     `"data" is given twice`,
		`{"specversion":"1.0","id":"1","source":"/","type":"t","data_base64":null,"data_base64":"AA=="}`:               `"data_base64" is given twice`,
		`{"specversion":"1.0","id":"1","source":"/","type":"t","data_base64":"A"}`:                                     "not standard base64",
		`{"specversion":"1.0","id":"1","source":"/","type":"t","data_base64":7}`:                                       "data_base64 must be a string",
		`{"specversion":"1.0","id":"1","source":"/","type":"t","datacontenttype":"text/plain","data":{"no":"string"}}`: "data must be a string",
	} {
		if e, err := Parse([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, %v; want an error with %q", text, e, err, want)
		}
	}
}

func TestHeaderValues(t *testing.T) {
	for value, want := range map[string]string{
		"Euro € 😀":  "Euro%20%E2%82%AC%20%F0%9F%98%80", // the example of the specification
		"100%":      "100%25",
		`a"b`:       "a%22b",
		"plain/?&~": "plain/?&~",
		"":          "",
	} {
		if got := Encode(value); got != want {
			t.Errorf("%q is encoded as %q, want %q", value, got, want)
		}
		if got, err := Decode(want); err != nil || got != value {
			t.Errorf("%q is decoded as %q, %v; want %q", want, got, err, value)
		}
	}
	for value, want := range map[string]string{
		"%41":           "A", // unnecessary
		"%e2%82%ac":     "€", // lower case
		"100%":          "100%",
		"%zz":           "%zz",
		`"a \"b\" c"`:   `a "b" c`, // older versions quote
		`"a%20b"`:       "a b",
		"%2520":         "%20", // decoded once
		`"`:             `"`,
		"€ not encoded": "€ not encoded",
	} {
		if got, err := Decode(value); err != nil || got != want {
			t.Errorf("%q is decoded as %q, %v; want %q", value, got, err, want)
		}
	}
	if got, err := Decode("%C0%A0"); err == nil {
		t.Errorf("an overlong encoding is decoded as %q", got)
	}
	got, err := FromHeaders(map[string]string{"CE-ID": "1", "Ce-Source": "/a%20b", "content-TYPE": "text/plain", "other": "x"})
	if want := map[string]string{"id": "1", "source": "/a b", "datacontenttype": "text/plain"}; err != nil || !maps.Equal(got, want) {
		t.Errorf("got %v, %v; want %v", got, err, want)
	}
	got, err = FromHeaders(map[string]string{"ce-datacontenttype": "text/xml", "content-type": "text/plain"})
	if want := map[string]string{"datacontenttype": "text/xml"}; err != nil || !maps.Equal(got, want) {
		t.Errorf("got %v, %v; want %v", got, err, want)
	}
	for range 20 { // the order of a map changes
		if got, err := FromHeaders(map[string]string{"ce-id": "1", "CE-Id": "2"}); err == nil || !strings.Contains(err.Error(), "ce-id is given more than once") {
			t.Errorf("an id in two cases of letters: %v, %v", got, err)
		}
		if got, err := FromHeaders(map[string]string{"Content-Type": "a/b", "content-type": "a/c"}); err == nil {
			t.Errorf("a type in two cases of letters: %v", got)
		}
	}
	if _, err := FromHeaders(map[string]string{"ce-subject": "%ff"}); err == nil || !strings.Contains(err.Error(), "ce-subject") {
		t.Errorf("got %v", err)
	}
}

func TestModes(t *testing.T) {
	for kind, want := range map[string]Mode{
		"": Binary, "application/json": Binary, "application/cloudevents+json": Structured,
		"Application/CloudEvents+JSON; charset=utf-8": Structured, "application/cloudevents-batch+json": Batch,
		"application/cloudevents+avro": Unsupported, "application/cloudevents": Unsupported,
	} {
		if got := ModeOf(kind); got != want {
			t.Errorf("%q: got %v, want %v", kind, got, want)
		}
	}
	for kind, want := range map[string]bool{
		"application/json": true, "text/json; charset=utf-8": true, "application/vnd.x+JSON": true,
		"application/jsonx": false, "json": false, "text/plain": false, "": false,
	} {
		if IsJSON(kind) != want {
			t.Errorf("%q: got %v", kind, !want)
		}
	}
}

func TestTimes(t *testing.T) {
	for value, legal := range map[string]bool{
		"2026-01-31T12:00:00Z": true, "2026-01-31t12:00:00.123456789z": true, "2026-01-31T12:00:00-05:30": true,
		"2026-01-31T1:00:00Z": false, "2026-01-31T12:00:00,5Z": false, "2026-01-31T12:00:00+24:00": false,
		"2026-02-30T12:00:00Z": false, "2026-01-31": false, "": false,
	} {
		if got, err := ParseTime(value); (err == nil) != legal {
			t.Errorf("%q: got %v, %v", value, got, err)
		}
	}
}

// Whatever Parse takes is written as JSON that stands for the same event, and so are its headers.
func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"specversion":"1.0","id":"1","source":"/","type":"t","data":{"a":[1,"\u00e9"]},"x":true}`))
	f.Add([]byte(`{"specversion":"1.0","id":"1","source":"/","type":"t","datacontenttype":"text/plain","data":"\ud800"}`))
	f.Add([]byte(`{"specversion":"1.0","id":"€","source":"%20","type":"t","data_base64":"AAEC"}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		e, err := Parse(text)
		if err != nil {
			return
		}
		written := e.Append(nil)
		if !json.Valid(written) {
			t.Fatalf("not JSON: %s", written)
		}
		again, err := Parse(written)
		if err != nil || !reflect.DeepEqual(again.Attributes, e.Attributes) || string(again.Data) != string(e.Data) || (again.Data == nil) != (e.Data == nil) {
			t.Fatalf("%s\nis written as %s: %+v, %v", text, written, again, err)
		}
		headers := make(map[string]string)
		e.SetHeaders(headers)
		if got, err := FromHeaders(headers); err != nil || !maps.Equal(got, e.Attributes) {
			t.Fatalf("as headers %v: %v, %v", headers, got, err)
		}
	})
}
