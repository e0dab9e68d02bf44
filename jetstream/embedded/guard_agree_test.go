package embedded

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// honestLines are n operations as clients may write them.
func honestLines(r *rand.Rand, n int) []byte {
	var out bytes.Buffer
	blank := func() string { return []string{" ", "\t", "  ", " \t "}[r.IntN(4)] }
	end := func() string { return []string{"", " ", "\t"}[r.IntN(3)] + []string{"\r\n", "\n"}[r.IntN(2)] }
	name := func(s string) string {
		if r.IntN(4) == 0 {
			return strings.ToLower(s)
		}
		return s
	}
	for range n {
		subject := []string{"event.a", "keyed.x.a", "$JS.ACK.s.g.1.1.1.1.1", "$JS.API.CONSUMER.MSG.NEXT.s.g", "$JS.API.STREAM.INFO.s", "$JS.API.DIRECT.GET.s", "$JS.API.DIRECT.GET.s.event.a", "event." + strings.Repeat("x", r.IntN(3900))}[r.IntN(8)]
		body := []string{"", "x", "\r\n", "PUB a b 1\r\nx\r\n", "+ACK", strings.Repeat("y", r.IntN(100_000))}[r.IntN(6)]
		if bodyCounts([]byte(subject)) {
			body = []string{"", "{}", "null", `{"seq":7,"no_hdr":true}`, `{"last_by_subj":"event.a"}`}[r.IntN(5)]
			if strings.Contains(subject, "INFO") {
				body = ""
			}
		}
		reply := ""
		if r.IntN(2) == 0 {
			reply = "in.x" + blank()
		}
		switch r.IntN(6) {
		case 0:
			out.WriteString(name("PING") + end())
		case 1:
			out.WriteString(name("SUB") + blank() + "in.>" + blank() + strconv.Itoa(r.IntN(100)+2) + end())
		case 2:
			out.WriteString(name("UNSUB") + blank() + strconv.Itoa(r.IntN(100)+2) + end())
		case 3:
			const headers = "NATS/1.0\r\nA: b\r\n\r\n"
			out.WriteString(name("HPUB") + blank() + subject + blank() + reply + strconv.Itoa(len(headers)) + blank() + strconv.Itoa(len(headers)+len(body)) + end() + headers + body + "\r\n")
		default:
			out.WriteString(name("PUB") + blank() + subject + blank() + reply + strconv.Itoa(len(body)) + end() + body + "\r\n")
		}
	}
	return out.Bytes()
}

// guardedLines passes data through a guardLines as the guard does, in pieces of at most size bytes.
// It returns what the server gets, and what counts.
func guardedLines(data []byte, size func() int) (out []byte, spent guardSpent) {
	var held []byte
	g := guardLines{connected: true, inbox: []byte("in.")}
	for len(data) > 0 {
		n := min(size(), len(data))
		held, data = append(held, data[:n]...), data[n:]
		for state := guardPaused; state != guardMore; {
			var passed int
			passed, state = g.pass(held)
			spent.messages += g.spent.messages
			spent.requests += g.spent.requests
			spent.settles += g.spent.settles
			g.spent = guardSpent{}
			out = append(out, held[:passed]...)
			held = held[passed:]
			if state == guardMalformed {
				return out, spent
			}
			if state == guardRefused {
				out = append(out, g.instead...)
				held = held[g.refused:]
			}
		}
	}
	return out, spent
}

// TestGuardPassesWhatClientsWrite has operations pass byte for byte, however they come in pieces.
func TestGuardPassesWhatClientsWrite(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		in := honestLines(r, 50)
		whole, spent := guardedLines(bytes.Clone(in), func() int { return len(in) })
		if !bytes.Equal(whole, in) {
			t.Fatalf("seed %d: %d of %d bytes pass", seed, len(whole), len(in))
		}
		if spent.messages+spent.settles != 50 {
			t.Fatalf("seed %d: 50 operations count as %+v", seed, spent)
		}
		pieces, again := guardedLines(bytes.Clone(in), func() int { return 1 + r.IntN(5000) })
		if !bytes.Equal(pieces, in) || spent != again {
			t.Fatalf("seed %d: in pieces, %d of %d bytes pass; they count as %+v and %+v", seed, len(pieces), len(in), spent, again)
		}
	}
}

// TestGuardReadsAsTheServer damages what clients write, and has a server read what passes. The
// server sees the requests and acknowledgements that the guard has counted, and no others, and none
// that the guard would refuse or whose reply subject it would remove.
func TestGuardReadsAsTheServer(t *testing.T) {
	s, err := natsserver.NewServer(&natsserver.Options{Host: loopback, Port: natsserver.RANDOM_PORT, NoSigs: true, NoLog: true, MaxPayload: MaxMessage, NoSystemAccount: true})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { Shutdown(s) })
	if !s.ReadyForConnections(startWait) {
		t.Fatal("the server is not ready")
	}
	spy, err := nats.Connect(s.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(spy.Close)
	seen, err := spy.SubscribeSync(">")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(seen.SetPendingLimits(-1, -1), spy.Flush()); err != nil {
		t.Fatal(err)
	}
	damages := []string{"\r", "\n", " ", "\t", "\x00", "PUB ", "0", "9", "*", "in.x", "\r\n", "{", "}", "\"", "hpub a 1 1\r\n", "PING", "\v", "é"}
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 2))
		in := honestLines(r, 20)
		for range r.IntN(4) {
			at := r.IntN(len(in))
			switch r.IntN(3) {
			case 0:
				in = append(in[:at:at], in[min(at+1+r.IntN(3), len(in)):]...)
			case 1:
				in = append(in[:at:at], append([]byte(damages[r.IntN(len(damages))]), in[at:]...)...)
			default:
				in = bytes.Replace(in, []byte(`"seq":7`), []byte([]string{`"batch":7`, `"SEQ":7`, `"seq":7,"multi_last":[">"]`}[r.IntN(3)]), 1)
			}
		}
		out, spent := guardedLines(bytes.Clone(in), func() int { return 1 + r.IntN(5000) })
		sendTo(t, s, out)
		if err := spy.Flush(); err != nil {
			t.Fatal(err)
		}
		var got guardSpent
		for {
			n, _, _ := seen.Pending()
			if n == 0 {
				break
			}
			m, err := seen.NextMsg(time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			got.add(&guardMessage{subject: []byte(m.Subject), reply: []byte(m.Reply)})
			if m.Reply != "" && !strings.HasPrefix(m.Reply, "in.") {
				t.Errorf("seed %d: the server sees the reply subject %q", seed, m.Reply)
			}
			if strings.HasPrefix(m.Subject, "$JS.API.DIRECT.GET.") && !bytes.HasPrefix(m.Data, []byte(`{"native clients`)) {
				if what := refusedRequest([]byte(m.Subject), m.Data); what != "" {
					t.Errorf("seed %d: the server sees %s %.100q", seed, m.Subject, m.Data)
				}
			}
		}
		// The last one may have no end.
		if d := spent.requests - got.requests; d < 0 || d > 1 {
			t.Errorf("seed %d: the server sees %+v, the guard counts %+v", seed, got, spent)
		}
		if d := spent.settles - got.settles; d < 0 || d > 1 {
			t.Errorf("seed %d: the server sees %+v, the guard counts %+v", seed, got, spent)
		}
		if got.messages > spent.messages {
			t.Errorf("seed %d: the server sees %+v, the guard counts %+v", seed, got, spent)
		}
	}
}

// sendTo sends what passed the guard to the server, and waits until the server has read it or has
// disconnected.
func sendTo(t *testing.T, s *natsserver.Server, out []byte) {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close() //nolint:errcheck // read to its end
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		_, _ = io.WriteString(conn, "CONNECT {\"headers\":true,\"echo\":false,\"lang\":\"go\"}\r\n")
		_, _ = conn.Write(out)
		if half, ok := conn.(*net.TCPConn); ok {
			_ = half.CloseWrite()
		}
	}()
	_, _ = io.Copy(io.Discard, bufio.NewReader(conn))
	<-sent
}

// FuzzGuardLines has any bytes pass in any pieces: what the server gets does not depend on them,
// and passes once more as it is.
func FuzzGuardLines(f *testing.F) {
	f.Add([]byte("PUB $JS.API.DIRECT.GET.s in.x 11\r\n{\"batch\":9}\r\nPING\r\n"), uint16(3))
	f.Add(honestLines(rand.New(rand.NewPCG(1, 2)), 5), uint16(100))
	f.Fuzz(func(t *testing.T, in []byte, size uint16) {
		whole, spent := guardedLines(bytes.Clone(in), func() int { return len(in) })
		pieces, again := guardedLines(bytes.Clone(in), func() int { return int(size) + 1 })
		if !bytes.Equal(bytes.Join(bytes.Fields(whole), nil), bytes.Join(bytes.Fields(pieces), nil)) || spent != again {
			t.Fatalf("%q and %q pass; they count as %+v and %+v", whole, pieces, spent, again)
		}
	})
}
