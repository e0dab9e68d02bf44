package embedded

import "bytes"

// maxControlLine is the longest line that the server takes (max_control_line), and the name of the
// operation.
const maxControlLine = 4096 + 16

// maxSizeDigits is how many digits the server takes for the size of a message.
const maxSizeDigits = 9

// guardState is what follows the bytes that may pass.
type guardState int

const (
	guardMore      guardState = iota // more bytes are needed
	guardConnected                   // CONNECT has passed, and the client must be admitted
	guardMalformed                   // the client must be disconnected
)

// guardLines reads the protocol of a client. It passes only what it and the server read the same
// way: operations of clients, with as many arguments as they have and without control characters.
type guardLines struct {
	// inbox is what reply subjects must begin with, if not empty.
	inbox []byte

	connected bool
	payload   int // bytes of the payload that are to come
	ending    int // bytes of the line end after the payload that are to come
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
		if !g.line(bytes.TrimSuffix(rest[:end], []byte{'\r'})) {
			return passed, guardMalformed
		}
		passed += end + 1
		if first {
			return passed, guardConnected
		}
	}
	return passed, guardMore
}

// line reads a line, and reports whether it may pass.
func (g *guardLines) line(line []byte) bool {
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
		return g.message(fields[1:n])
	case named(name, "HPUB") && (n == 4 || n == 5):
		fields[n-2] = fields[n-1] // what remains is as of PUB
		return g.message(fields[1 : n-1])
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
func (g *guardLines) message(args [][]byte) bool {
	size := args[len(args)-1]
	if len(size) > maxSizeDigits {
		return false
	}
	n := 0
	for _, b := range size {
		if b < '0' || b > '9' {
			return false
		}
		n = 10*n + int(b-'0')
	}
	g.payload, g.ending = n, 2
	if reply := args[1:]; len(reply) > 1 && len(g.inbox) > 0 && !bytes.HasPrefix(reply[0], g.inbox) {
		for i := range reply[0] {
			reply[0][i] = ' '
		}
	}
	return true
}
