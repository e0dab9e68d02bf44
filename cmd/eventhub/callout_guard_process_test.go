//go:build unix

package main

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	psutil "github.com/shirou/gopsutil/v4/process"

	"eventhub/jetstream"
	"eventhub/sdk/go/wire"
)

// forgeries are requests with a reply subject of somebody else, as a client may write them. Some
// are malformed: the server and what reads the protocol before it could disagree about them.
var forgeries = []string{
	"PUB event.load victim.1 1\r\n1\r\n",
	"PUB event.load victim.2 1\n1\r\n",
	"pub\tevent.load \t victim.3\t\t1 \r\n1\r\n",
	"HPUB event.load victim.4 12 13\r\nNATS/1.0\r\n\r\n1\r\n",
	"hpub event.load victim.5 24 25\r\nNATS/1.0\r\nReply: a.b\r\n\r\n1\r\n",
	"PUB event.load INBOX.victim.6 1\r\n1\r\n", "PUB event.load INBOX 1\r\n1\r\n", "PUB event.load INBOXx.victim.7 1\r\n1\r\n",
	"PUB $JS.API.CONSUMER.MSG.NEXT.load.g victim.8 25\r\n{\"batch\":1,\"no_wait\":true}\r\n",
	"PUB $JS.API.CONSUMER.INFO.load.g victim.9 0\r\n\r\n",
	"PUB $JS.API.CONSUMER.INFO.load.g victim.10 00000000\r\n\r\n",
	"PUB event.load 1\r\n1\r\nPUB event.load victim.11 1\r\n1\r\n",
	"PUB event.load 34\r\n1\r\nPUB event.load victim.12 1\r\n1\r\n\r\n",
	"PUB event.load 2\r\n1\r\nPUB event.load victim.13 1\r\n1\r\n",
	"PUB \nevent.load victim.14 1\r\n1\r\n", "PUB \r\nevent.load victim.15 1\r\n1\r\n", "PUB\nPUB event.load victim.16 1\r\n1\r\n",
	"SUB \nPUB event.load victim.17 1\r\n1\r\n", "UNSUB \nPUB event.load victim.18 1\r\n1\r\n", "CONNECT \nPUB event.load victim.19 1\r\n1\r\n",
	"PINGPUB event.load victim.20 1\r\n1\r\n", "+OKPUB event.load victim.21 1\r\n1\r\n", "+OK\nPUB event.load victim.22 1\r\n1\r\n",
	"INFO {}\r\nPUB event.load victim.23 1\r\n1\r\n", "-ERR \nPUB event.load victim.24 1\r\n1\r\n",
	"PUB event.load\rvictim.25 1\r\n1\r\n", "PUB event.load\r victim.26 1\r\n1\r\n", "PUB event.load\x00victim.27 1\r\n1\r\n",
	"PUB event.load +1\r\n1\r\nPUB event.load victim.28 1\r\n1\r\n", "PUB event.load -1\r\n1\r\nPUB event.load victim.29 1\r\n1\r\n",
	"PUB event.load 4294967297\r\n1\r\nPUB event.load victim.30 1\r\n1\r\n",
	"HPUB event.load 13 12\r\nNATS/1.0\r\n\r\nPUB event.load victim.31 1\r\n1\r\n",
	"PUB event.load INBOX.x victim.32 1\r\n1\r\n",
	"PING" + strings.Repeat(" ", 5000) + "\r\nPUB event.load victim.33 1\r\n1\r\n",
	"CONNECT {\"auth_token\":\"" + nodeToken + "\"}\r\nPUB event.load victim.34 1\r\n1\r\n",
	"HPUB event.load 51 52\r\nNATS/1.0\r\nNats-Request-Info: {\"reply\":\"victim\"}\r\n\r\n1\r\n",
	"HPUB event.load 40 41\r\nNATS/1.0\r\nNats-Trace-Dest: victim.35\r\n\r\n1\r\n",
}

// TestNativeRepliesCannotBeForged has a client name subjects of others as reply subjects, in all
// ways that the protocol has and some that it has not. No answer may get there. Without isolation,
// answers do.
func TestNativeRepliesCannotBeForged(t *testing.T) {
	t.Parallel()
	for _, isolation := range []string{"on", "off"} {
		hub := startNode(t, "--nats-listen=127.0.0.1:0", "--jwt-secret-file="+secretFile(t), "--nats-isolation="+isolation)
		publishTo(t, hub.dial(), "load", `"first"`)
		maker := hub.dial()
		if _, err := maker.Subscribe(t.Context(), "load", "g", wire.SubscribeOptions{From: "earliest", MaxInFlight: 1}, func(wire.Event) {}); err != nil {
			t.Fatal(err)
		}
		maker.Abort()
		nc, _ := dialNative(t, hub.nats, nodeToken)
		token := scoped(t, "load", "publish:load", "subscribe:load::g")
		inbox := jetstream.NativeInbox(token)
		reached := make(chan string, 10*len(forgeries))
		if _, err := nc.Subscribe(">", func(m *nats.Msg) {
			if (strings.Contains(m.Subject, "victim") || strings.HasPrefix(m.Subject, inbox)) && !strings.HasPrefix(m.Subject, inbox+".") {
				reached <- m.Subject
			}
		}); err != nil {
			t.Fatal(err)
		}
		if err := nc.FlushTimeout(patience); err != nil {
			t.Fatal(err)
		}
		for _, forged := range forgeries {
			text := strings.ReplaceAll(forged, "INBOX", inbox)
			c := dialPlain(t, hub.nats, token)
			_, _ = c.exchange(text) // some end the connection
			// Before the server has decided about the client.
			conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(hub.nats, "nats://"))
			if err != nil {
				t.Fatal(err)
			}
			if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
				t.Fatal(err)
			}
			_, err = fmt.Fprintf(conn, "CONNECT {\"auth_token\":%q,\"headers\":true}\r\n%sPING\r\n", token, text)
			for lines, line := bufio.NewReader(conn), ""; err == nil && line != "PONG\r\n"; line, err = lines.ReadString('\n') {
			}
			_ = conn.Close()
		}
		// What the client may do still works, and everything before it has been answered.
		c := dialPlain(t, hub.nats, token)
		for _, subject := range []string{"event.load", "$JS.API.CONSUMER.INFO.load.g"} {
			if m, refused := c.request(subject, ""); refused || m.subject == "" {
				t.Errorf("isolation %s: %s is refused", isolation, subject)
			}
		}
		if err := nc.FlushTimeout(patience); err != nil {
			t.Fatal(err)
		}
		if isolation == "off" {
			waitFor(t, "a forged answer", func() bool { return len(reached) > 0 })
		} else if len(reached) > 0 {
			t.Errorf("answers reached %s", <-reached)
		}
		nc.Close()
		hub.terminate()
	}
}

// TestNativeClientsCannotPassTheGuard connects to all ports of a hub. The one at which the server
// listens behind the guard refuses all tokens.
func TestNativeClientsCannotPassTheGuard(t *testing.T) {
	t.Parallel()
	hub := startNode(t, "--nats-listen=127.0.0.1:0", "--jwt-secret-file="+secretFile(t))
	p, err := psutil.NewProcess(int32(hub.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	sockets, err := p.ConnectionsWithContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	refusing := 0
	for _, s := range sockets {
		if s.Status != "LISTEN" {
			continue
		}
		address := net.JoinHostPort("127.0.0.1", strconv.FormatUint(uint64(s.Laddr.Port), 10))
		if slices.ContainsFunc([]string{hub.url, hub.http, hub.ops, hub.nats}, func(known string) bool { return strings.Contains(known, address) }) {
			continue
		}
		refusing++
		for _, token := range []string{nodeToken, scoped(t, "load", "publish:load")} {
			nc, err := nats.Connect("nats://"+address, nats.Token(token), nats.Timeout(patience))
			if err == nil {
				nc.Close()
			}
			if !errors.Is(err, nats.ErrAuthorization) {
				t.Errorf("a client past the guard: %v", err)
			}
		}
	}
	if refusing != 1 {
		t.Errorf("the server listens on %d ports", refusing)
	}
}
