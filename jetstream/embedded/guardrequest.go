package embedded

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// maxRequest is how long a request whose body the guard reads may be, with its headers.
const maxRequest = 16 << 10

// Subjects of acknowledgements, of requests to the server, and of pulls among them.
var (
	ackPrefix  = []byte("$JS.ACK.")
	apiPrefix  = []byte("$JS.API.")
	pullPrefix = []byte("$JS.API.CONSUMER.MSG.NEXT.")
)

// Subjects of requests to the server whose bodies decide what the requests cost.
var (
	streamInfo = []byte("$JS.API.STREAM.INFO.")
	streamGet  = []byte("$JS.API.STREAM.MSG.GET.")
	directGet  = []byte("$JS.API.DIRECT.GET.")
)

// bodyCounts reports whether the guard must read the body of a message. Of the other requests that
// clients may send, a pull takes what waits for its group, and the rest have no body.
func bodyCounts(subject []byte) bool {
	return bytes.HasPrefix(subject, directGet) || bytes.HasPrefix(subject, streamGet) || bytes.HasPrefix(subject, streamInfo)
}

// refusedRequest returns what a client may not ask for in a request, or "" if the request may pass.
// A request gets one message by its sequence or its subject, or the state of a stream. The others
// read as much of the stream as the client likes, while everybody waits: subjects, deleted
// messages, batches, and searches by time and by patterns. Fields without a value ask for nothing.
func refusedRequest(subject, body []byte) (what string) {
	const pattern, malformed = "a pattern of subjects", "anything but one JSON object"
	if at, ok := bytes.CutPrefix(subject, directGet); ok && bytes.ContainsAny(at, "*>") {
		return pattern
	}
	// The server also takes several objects, one after the other.
	if len(body) == 0 || string(body) == "null" {
		return ""
	}
	d := json.NewDecoder(bytes.NewReader(body))
	if begin, _ := d.Token(); begin != json.Delim('{') || !json.Valid(body) {
		return malformed
	}
	info := bytes.HasPrefix(subject, streamInfo)
	for d.More() {
		token, _ := d.Token() // is valid
		name, _ := token.(string)
		var value any
		if d.Decode(&value) != nil {
			return malformed
		}
		text, _ := value.(string)
		switch {
		case slices.Contains([]any{nil, false, 0.0, ""}, value):
		case !info && (name == "seq" || name == "no_hdr"):
		case !info && name == "next_by_subj" && text == ">": // the next one, whatever its subject
		case !info && name == "last_by_subj" && !strings.ContainsAny(text, "*>"):
		default:
			return name
		}
	}
	return ""
}

// refusal is a message that the server answers with an error in place of m. It refuses JSON that is
// followed by something, or, where it reads no further than the object, the unknown field, which it
// names.
func (m *guardMessage) refusal(what string) []byte {
	body, _ := json.Marshal(map[string]int{fmt.Sprintf("native clients may not ask for %.40s", what): 0})
	return fmt.Appendf(nil, "PUB %s %s %d\r\n%s.\r\n", m.subject, m.reply, len(body)+1, body)
}
