package embedded

import "bytes"

// maxControlLine is the longest line that the server takes (max_control_line), and the name of the
// operation.
const maxControlLine = 4096 + 16

// guardAtOnce is how many operations are passed at a time, so that connections of one principal
// take turns, and a burst does not grow by what a read brings.
const guardAtOnce = 512

// maxSizeDigits is how many digits the server takes for the size of a message.
const maxSizeDigits = 9

// guardState is what follows the bytes that may pass.
type guardState int

const (
	guardMore      guardState = iota // more bytes are needed
	guardConnected                   // CONNECT has passed, and the client must be admitted
	guardMalformed                   // the client must be disconnected
	guardRefused                     // instead must be sent in place of the next bytes
	guardPaused                      // enough has passed at once
)

// guardLines reads the protocol of a client. It passes only what it and the server read the same
// way: operations of clients, with as many arguments as they have and without control characters.
type guardLines struct {
	// inbox is what reply subjects must begin with, if not empty.
	inbox []byte

	connected bool
	payload   int // bytes of the payload that are to come
	ending    int // bytes of the line end after the payload that are to come

	// instead is what the server gets for the next refused bytes, after guardRefused.
	instead []byte
	refused int

	// spent is what pass has read since it was last reset, of a client with an inbox.
	spent guardSpent
}

// guardSpent is what counts in Rates, without the bytes.
type guardSpent struct{ messages, requests, settles int }

// guardMessage is the line of a message.
type guardMessage struct {
	subject, reply []byte // subject is nil in other lines
	headers, size  int    // of the headers, and of headers and body
}

// pass returns how many bytes may pass to the server, and what follows. It overwrites reply
// subjects outside the inbox with blanks, and the request goes without.
func (g *guardLines) pass(data []byte) (passed int, state guardState) {
	for passed < len(data) {
		rest := data[passed:]
		switch {
		case g.payload > 0:
			n := min(g.payload, len(rest))
			g.payload -= n
			passed += n
			continue
		case g.ending > 0:
			if rest[0] != "\r\n"[2-g.ending] {
				return passed, guardMalformed
			}
			g.ending--
			passed++
			continue
		}
		end := bytes.IndexByte(rest, '\n')
		if end > maxControlLine || end < 0 && len(rest) > maxControlLine {
			return passed, guardMalformed
		}
		if end < 0 {
			return passed, guardMore
		}
		first := !g.connected
		var m guardMessage
		if !g.line(bytes.TrimSuffix(rest[:end], []byte{'\r'}), &m) {
			return passed, guardMalformed
		}
		if len(g.inbox) > 0 && bodyCounts(m.subject) {
			whole := end + 1 + m.size + len("\r\n")
			switch {
			case m.size > maxRequest:
				return passed, guardMalformed
			case len(rest) < whole:
				return passed, guardMore
			}
			if what := refusedRequest(m.subject, rest[end+1+m.headers:whole-len("\r\n")]); what != "" {
				g.spent.add(&m)
				g.instead, g.refused = m.refusal(what), whole
				return passed, guardRefused
			}
		}
		if m.subject != nil {
			g.payload, g.ending = m.size, 2
		}
		passed += end + 1
		if first {
			return passed, guardConnected
		}
		if len(g.inbox) == 0 {
			continue
		}
		if g.spent.add(&m); g.spent.messages+g.spent.settles >= guardAtOnce {
			return passed, guardPaused
		}
	}
	return passed, guardMore
}

// add counts the operation that m is. An acknowledgement that wants an answer is a message: the
// answer may be the next event, as that to a pull.
func (s *guardSpent) add(m *guardMessage) {
	if len(m.reply) == 0 && bytes.HasPrefix(m.subject, ackPrefix) {
		s.settles++
		return
	}
	s.messages++
	if bytes.HasPrefix(m.subject, apiPrefix) && !bytes.HasPrefix(m.subject, pullPrefix) {
		s.requests++
	}
}

// line reads a line, and reports whether it may pass.
func (g *guardLines) line(line []byte, m *guardMessage) bool {
	var fields [6][]byte
	n, start := 0, -1
	for i, b := range line {
		if b != ' ' && b != '\t' {
			if b < ' ' || b == 0x7f {
				return false
			}
			if start < 0 {
				start = i
			}
			continue
		}
		if i == 0 {
			return false
		}
		if start >= 0 {
			if n < len(fields) {
				fields[n] = line[start:i]
			}
			n++
			start = -1
		}
	}
	if start >= 0 {
		if n < len(fields) {
			fields[n] = line[start:]
		}
		n++
	}
	if n == 0 {
		return false
	}
	switch name := fields[0]; {
	case !g.connected:
		g.connected = named(name, "CONNECT") && n > 1 && fields[1][0] == '{'
		return g.connected
	case named(name, "PUB") && (n == 3 || n == 4):
		return g.message(m, fields[1:n])
	case named(name, "HPUB") && (n == 4 || n == 5):
		var ok bool
		m.headers, ok = sizeOf(fields[n-2])
		fields[n-2] = fields[n-1] // what remains is as of PUB
		return ok && g.message(m, fields[1:n-1]) && m.headers <= m.size
	case named(name, "SUB"):
		return n == 3 || n == 4
	case named(name, "UNSUB"):
		return n == 2 || n == 3
	default:
		return n == 1 && (named(name, "PING") || named(name, "PONG"))
	}
}

// named reports whether an operation has a name, in whatever case.
func named(word []byte, name string) bool {
	if len(word) != len(name) {
		return false
	}
	for i, b := range word {
		if b&^0x20 != name[i] {
			return false
		}
	}
	return true
}

// message reads the arguments of a message without the size of its headers: subject, reply subject
// if any, and size.
func (g *guardLines) message(m *guardMessage, args [][]byte) (ok bool) {
	if m.size, ok = sizeOf(args[len(args)-1]); !ok {
		return false
	}
	m.subject = args[0]
	if len(args) < 3 {
		return true
	}
	if m.reply = args[1]; len(g.inbox) > 0 && !bytes.HasPrefix(m.reply, g.inbox) {
		for i := range m.reply {
			m.reply[i] = ' '
		}
		m.reply = nil
	}
	return true
}

// sizeOf reads a size as the server does.
func sizeOf(digits []byte) (n int, ok bool) {
	if len(digits) > maxSizeDigits {
		return 0, false
	}
	for _, b := range digits {
		if b < '0' || b > '9' {
			return 0, false
		}
		n = 10*n + int(b-'0')
	}
	return n, true
}
