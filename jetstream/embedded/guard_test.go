package embedded

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"
)

// TestGuardLines has the guard read what clients may send, at once and byte by byte.
func TestGuardLines(t *testing.T) {
	const connect = "CONNECT {\"auth_token\":\"a b\"}\r\n"
	same := "="
	for _, tt := range []struct{ in, out string }{
		{"PING\r\nPONG\nping \r\n", same},
		{"SUB in.> 1\r\nSUB in.> q 1\r\nUNSUB 1\r\nUNSUB 1 5\r\n", same},
		{"PUB a 5\r\nhello\r\nPUB a 0\r\n\r\n", same},
		{"PUB a in.x 5\r\nhello\r\nPING\r\n", same},
		{"PUB a in.x 5\nhello\r\nPING\r\n", same},
		{"HPUB a in.x 12 17\r\nNATS/1.0\r\n\r\nhello\r\nHPUB a 12 12\r\nNATS/1.0\r\n\r\n\r\n", same},
		{"PUB a other 5\r\nhello\r\n", "PUB a       5\r\nhello\r\n"},
		{"pUb\ta \t other\t5 \r\nhello\r\n", "pUb\ta \t      \t5 \r\nhello\r\n"},
		{"HPUB a other 12 17\r\nNATS/1.0\r\n\r\nhello\r\n", "HPUB a       12 17\r\nNATS/1.0\r\n\r\nhello\r\n"},
		{"PUB a in 1\r\nx\r\nPUB a inx.y 1\r\nx\r\n", "PUB a    1\r\nx\r\nPUB a       1\r\nx\r\n"},
		{"PUB a $JS.ACK.x 1\r\nx\r\n", "PUB a           1\r\nx\r\n"},
		// what looks like a request is the body of another, and the reverse
		{"PUB a 18\r\nPUB a other 1\r\nx\r\n\r\nPING\r\n", same},
		{"PUB a 17\r\nPUB a other 1\r\nx\r\n\r\n", "PUB a 17\r\nPUB a other 1\r\nx\r"},
		{"PUB a 1\r\nxPUB a other 1\r\nx\r\n", "PUB a 1\r\nx"},
		{"PUB a 1\r\nx\nPUB a other 1\r\nx\r\n", "PUB a 1\r\nx"},
		// requests that read as much as they like are replaced, whole and once
		{"PUB $JS.API.STREAM.INFO.s in.x 0\r\n\r\nPUB $JS.API.STREAM.INFO.s in.x 2\r\n{}\r\nPING\r\n", same},
		{"PUB $JS.API.STREAM.INFO.s in.x 23\r\n{\"subjects_filter\":\">\"}\r\nPING\r\n", refusal("$JS.API.STREAM.INFO.s in.x", "subjects_filter") + "PING\r\n"},
		{"hpub\t$JS.API.DIRECT.GET.s \t other 12 23 \nNATS/1.0\r\n\r\n{\"batch\":9}\r\nPING\r\n", refusal("$JS.API.DIRECT.GET.s ", "batch") + "PING\r\n"},
		{"HPUB $JS.API.DIRECT.GET.s in.x 12 21\r\nNATS/1.0\r\n\r\n{\"seq\":1}\r\n", same},
		{"PUB $JS.API.DIRECT.GET.s.a.* in.x 0\r\n\r\n", refusal("$JS.API.DIRECT.GET.s.a.* in.x", "a pattern of subjects")},
		{"PUB $JS.API.STREAM.MSG.GET.s in.x 9\r\n{\"x\\n\":1}\r\n", refusal("$JS.API.STREAM.MSG.GET.s in.x", "x\\n")},
		{"PUB $JS.API.STREAM.MSG.GET.s in.x 1\r\n{\r\n", refusal("$JS.API.STREAM.MSG.GET.s in.x", "anything but one JSON object")},
		{"PUB $JS.API.STREAM.MSG.GET.s in.x 9\r\n{\"seq\":1}x\nPING\r\n", "PUB $JS.API.STREAM.MSG.GET.s in.x 9\r\n{\"seq\":1}"},
		{"PUB $JS.API.STREAM.MSG.GET.s in.x 99999\r\n{", ""},
		// what the server would read in another way, or not at all
		{"HPUB a 13 12\r\nNATS/1.0\r\n\r\n\r\n", ""},
		{"HPUB a x 12\r\nNATS/1.0\r\n\r\n\r\n", ""},
		{"PUB \na other 1\r\nx\r\n", ""},
		{"PUB \r\na other 1\r\nx\r\n", ""},
		{"SUB \nPUB a other 1\r\nx\r\n", ""},
		{"PUB a\rother 1\r\nx\r\n", ""},
		{"PUB a other\r 1\r\nx\r\n", ""},
		{"PUB a\x00other 1\r\nx\r\n", ""},
		{"PUB a\vother 1\r\nx\r\n", ""},
		{" PUB a other 1\r\nx\r\n", ""},
		{"\r\nPUB a other 1\r\nx\r\n", ""},
		{"PINGPUB a other 1\r\n", ""},
		{"PING PUB a other 1\r\n", ""},
		{"+OK\r\n", ""},
		{"-ERR 'x'\r\n", ""},
		{"INFO {}\r\n", ""},
		{"MSG a 1 1\r\nx\r\n", ""},
		{"RMSG a 1\r\n", ""},
		{"LS+ a\r\n", ""},
		{"PUB a b c 1\r\nx\r\n", ""},
		{"PUB a\r\n", ""},
		{"HPUB a 1\r\n", ""},
		{"HPUB a b c 12 17\r\n", ""},
		{"SUB a\r\n", ""},
		{"UNSUB\r\n", ""},
		{"PUB a -1\r\n", ""},
		{"PUB a +1\r\n", ""},
		{"PUB a 1x\r\n", ""},
		{"PUB a 0x1\r\n", ""},
		{"PUB a 1000000000\r\n", ""},
		{"PUB a b c d e f g 1\r\nx\r\n", ""},
		{connect, ""},
		{"\u017fUB a 1\r\n", ""}, // a letter that folds to S
	} {
		want := tt.out
		if want == same {
			want = tt.in
		}
		for _, size := range []int{1, 2, 3, 7, len(connect) + len(tt.in)} {
			got := guardAll([]byte(connect+tt.in), size)
			if got != connect+want {
				t.Errorf("%q, %d bytes at a time: %q passes, want %q", tt.in, size, strings.TrimPrefix(got, connect), want)
			}
		}
	}
	for _, first := range []string{"PING\r\n", "PUB a 1\r\nx\r\n", "CONNECT\r\n", "CONNECT \n{}\r\n", "CONNECT x\r\n", "CONNECT{}\r\n"} {
		if got := guardAll([]byte(first+connect), 1); got != "" {
			t.Errorf("before CONNECT, %q passes", got)
		}
	}
	if got := guardAll([]byte(connect+"PUB "+strings.Repeat("a", maxControlLine)), 100); got != connect {
		t.Errorf("a line without an end: %d bytes pass", len(got))
	}
}

// refusal is what the server gets for a request that asks for too much. what is as in JSON.
func refusal(subjects, what string) string {
	body := `{"native clients may not ask for ` + what + `":0}.`
	return fmt.Sprintf("PUB %s %d\r\n%s\r\n", subjects, len(body), body)
}

// guardAll passes data in pieces through guardLines with the inbox "in.", and returns what passes.
func guardAll(data []byte, size int) string {
	var lines guardLines
	var out strings.Builder
	var held []byte
	for len(data) > 0 {
		n := min(size, len(data))
		held, data = append(held, data[:n]...), data[n:]
		for {
			passed, state := lines.pass(held)
			out.Write(held[:passed])
			held = held[passed:]
			if state == guardMalformed {
				return out.String()
			}
			if state == guardRefused {
				out.Write(lines.instead)
				held = held[lines.refused:]
				continue
			}
			if state == guardConnected {
				lines.inbox = []byte("in.")
				continue
			}
			break
		}
	}
	return out.String()
}

// TestGuardOutlivesRestarts has clients reach the server at the same address after a restart, and
// not wait for it meanwhile. Close ends all connections.
func TestGuardOutlivesRestarts(t *testing.T) {
	public := func(make func() (nkeys.KeyPair, error)) string {
		pair, err := make()
		if err != nil {
			t.Fatal(err)
		}
		key, err := pair.PublicKey()
		if err != nil {
			t.Fatal(err)
		}
		return key
	}
	e, err := Start(t.Context(), Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0", Callout: &Callout{
		Issuer: public(nkeys.CreateAccount), XKey: public(nkeys.CreateCurveKeys), System: "$SYS.REQ.SERVER.*.KICK", Guarded: true,
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Close() })
	url := e.ClientURL()
	greeted := func() (string, *bufio.Reader) {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(url, "nats://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewReader(conn)
		line, _ := lines.ReadString('\n')
		return line, lines
	}
	first, before := greeted()
	if !strings.Contains(first, `"client_ip":"127.0.0.1"`) {
		t.Errorf("the first line is %q", first)
	}
	if err := e.restart(t.Context(), func(*natsserver.Server) {
		if line, _ := greeted(); line != "" {
			t.Errorf("during the restart, the first line is %q", line)
		}
	}); err != nil {
		t.Fatal(err)
	}
	for line, err := "", error(nil); err == nil; line, err = before.ReadString('\n') {
		if strings.HasPrefix(line, "INFO") {
			t.Errorf("the connection goes on with %q", line)
		}
	}
	again, after := greeted()
	if !strings.HasPrefix(again, "INFO ") || e.ClientURL() != url {
		t.Errorf("after the restart, the first line at %s is %q", e.ClientURL(), again)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	for err := error(nil); err == nil; _, err = after.ReadString('\n') {
	}
	if _, err := (&net.Dialer{}).DialContext(context.Background(), "tcp", strings.TrimPrefix(url, "nats://")); err == nil {
		t.Error("the guard still listens")
	}
}
