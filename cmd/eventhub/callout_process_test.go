//go:build unix

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/acl"
	"eventhub/jetstream"
	"eventhub/sdk/go/wire"
)

// scoped signs a token with scopes.
func scoped(t *testing.T, subject string, scopes ...string) string {
	t.Helper()
	return granted(t, acl.Grant{Subject: subject, ID: subject, Scopes: scopes, TTL: time.Hour})
}

func granted(t *testing.T, g acl.Grant) string {
	t.Helper()
	token, err := acl.Sign([]byte(revokeSecret), g)
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// dialNative connects with a token, and with the inbox that belongs to it.
func dialNative(t *testing.T, url, token string, options ...nats.Option) (*nats.Conn, natsjs.JetStream) {
	t.Helper()
	options = append([]nats.Option{nats.Token(token), nats.CustomInboxPrefix(jetstream.NativeInbox(token)), nats.Timeout(patience)}, options...)
	nc, err := nats.Connect(url, options...)
	for deadline := time.Now().Add(patience); err != nil && time.Now().Before(deadline); {
		nc, err = nats.Connect(url, options...)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return nc, js
}

// plainNative is a native client that speaks the protocol itself, so that it knows of each request
// whether the server has refused it: the server answers in order.
type plainNative struct {
	t     *testing.T
	conn  net.Conn
	lines *bufio.Reader
	inbox string
	asked int
}

// dialPlain connects with a token.
func dialPlain(t *testing.T, url, token string) *plainNative {
	t.Helper()
	p := &plainNative{t: t, inbox: jetstream.NativeInbox(token)}
	err := p.dial(url, token)
	for deadline := time.Now().Add(patience); err != nil && time.Now().Before(deadline); {
		err = p.dial(url, token)
	}
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *plainNative) dial(url, token string) (err error) {
	p.t.Helper()
	if p.conn, err = (&net.Dialer{}).DialContext(p.t.Context(), "tcp", strings.TrimPrefix(url, "nats://")); err != nil {
		return err
	}
	p.t.Cleanup(func() { _ = p.conn.Close() })
	if err := p.conn.SetDeadline(time.Now().Add(10 * patience)); err != nil {
		return err
	}
	p.lines = bufio.NewReader(p.conn)
	if _, err := p.lines.ReadString('\n'); err != nil { // INFO
		return err
	}
	options, err := json.Marshal(map[string]any{"auth_token": token, "verbose": false, "pedantic": false, "headers": true, "no_responders": true, "protocol": 1})
	if err != nil {
		return err
	}
	if errs, _ := p.exchange("CONNECT " + string(options) + "\r\n"); errs != "" {
		return errors.New(errs)
	}
	if errs, _ := p.exchange("SUB " + p.inbox + ".> 1\r\n"); errs != "" {
		return errors.New(errs)
	}
	return nil
}

// exchange sends something, and returns the errors that the server answers before the pong, and
// the messages that came.
func (p *plainNative) exchange(text string) (errs string, messages []plainMessage) {
	p.t.Helper()
	if _, err := io.WriteString(p.conn, text+"PING\r\n"); err != nil {
		return err.Error(), nil
	}
	for {
		m, line, err := p.read()
		switch {
		case err != nil:
			return err.Error(), messages
		case line == "PONG":
			return errs, messages
		case m != nil:
			messages = append(messages, *m)
		case strings.HasPrefix(line, "-ERR"):
			errs += line
		}
	}
}

// plainMessage is a message that came.
type plainMessage struct{ subject, reply, text string }

// read reads a message, or a line of another kind.
func (p *plainNative) read() (m *plainMessage, line string, err error) {
	line, err = p.lines.ReadString('\n')
	if err != nil {
		return nil, "", err
	}
	line = strings.TrimSpace(line)
	words := strings.Fields(line)
	switch {
	case len(words) > 0 && words[0] == "PING":
		_, err = io.WriteString(p.conn, "PONG\r\n")
		return nil, line, err
	case len(words) < 4 || words[0] != "MSG" && words[0] != "HMSG":
		return nil, line, nil
	}
	size, err := strconv.Atoi(words[len(words)-1])
	if err != nil {
		return nil, "", err
	}
	m = &plainMessage{subject: words[1]}
	if len(words) == 5 && words[0] == "MSG" || len(words) == 6 {
		m.reply = words[3]
	}
	body := make([]byte, size+2)
	if _, err = io.ReadFull(p.lines, body); err != nil {
		return nil, "", err
	}
	m.text = string(body[:size])
	return m, "", nil
}

// publish sends a message, with a reply subject or without, and reports whether the server refuses
// it.
func (p *plainNative) publish(subject, reply, body string) (refused bool) {
	p.t.Helper()
	errs, _ := p.exchange(fmt.Sprintf("PUB %s %s %d\r\n%s\r\n", subject, reply, len(body), body))
	return p.violation(errs)
}

// violation reports whether the server has refused something.
func (p *plainNative) violation(errs string) bool {
	p.t.Helper()
	if errs != "" && !strings.Contains(errs, "Permissions Violation") {
		p.t.Fatalf("the server answers %s", errs)
	}
	return errs != ""
}

// subscribe subscribes, and reports whether the server refuses that.
func (p *plainNative) subscribe(subject string) (refused bool) {
	p.t.Helper()
	p.asked++
	errs, _ := p.exchange(fmt.Sprintf("SUB %s 9%d\r\n", subject, p.asked))
	return p.violation(errs)
}

// request asks, and returns the answer, or that the server refuses the request.
func (p *plainNative) request(subject, body string) (answer plainMessage, refused bool) {
	p.t.Helper()
	p.asked++
	reply := p.inbox + "." + strconv.Itoa(p.asked)
	errs, messages := p.exchange(fmt.Sprintf("PUB %s %s %d\r\n%s\r\n", subject, reply, len(body), body))
	if p.violation(errs) {
		return plainMessage{}, true
	}
	for len(messages) == 0 {
		m, _, err := p.read()
		if err != nil {
			p.t.Fatalf("no answer from %s: %v", subject, err)
		}
		if m != nil {
			messages = append(messages, *m)
		}
	}
	return messages[0], false
}

// TestNativeClientWithScopes has a native client of the embedded server publish, pull, acknowledge
// and read with a JWT, alone in its account and in that of the hub.
func TestNativeClientWithScopes(t *testing.T) {
	t.Parallel()
	for _, isolation := range []string{"on", "off"} {
		t.Run(isolation, func(t *testing.T) {
			hub := startNode(t, "--nats-listen=127.0.0.1:0", "--jwt-secret-file="+secretFile(t), "--nats-isolation="+isolation)
			admin := hub.dial()
			publishTo(t, admin, "orders.placed", `"first"`)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			for _, group := range []string{"billing", "mail"} {
				if _, err := admin.Subscribe(ctx, "orders.placed", group, wire.SubscribeOptions{From: "earliest", MaxInFlight: 1}, func(wire.Event) {}); err != nil {
					t.Fatal(err)
				}
			}
			admin.Abort()
			token := scoped(t, "shop", "publish:orders.*", "subscribe:orders.*::billing")
			_, js := dialNative(t, hub.nats, token)
			ack, err := js.Publish(ctx, "keyed.7.orders.placed", []byte(`"second"`))
			if err != nil || ack.Stream != "orders=2Eplaced" {
				t.Fatalf("publish: %+v, %v", ack, err)
			}
			c, err := js.Consumer(ctx, "orders=2Eplaced", "billing")
			if err != nil {
				t.Fatal(err)
			}
			for got := 0; got < 2; {
				batch, err := c.Fetch(2, natsjs.FetchMaxWait(time.Second))
				if err != nil {
					t.Fatal(err)
				}
				for m := range batch.Messages() {
					got++
					if err := m.DoubleAck(ctx); err != nil {
						t.Errorf("ack: %v", err)
					}
				}
			}
			plain := dialPlain(t, hub.nats, token)
			for _, subject := range []string{
				"event.secret", "keyed.1.secret", "$JS.API.CONSUMER.MSG.NEXT.orders=2Eplaced.mail", "$JS.API.STREAM.INFO.orders=2Eplaced",
				"$JS.API.DIRECT.GET.orders=2Eplaced", "$JS.API.STREAM.DELETE.orders=2Eplaced", "$JS.ACK.orders=2Eplaced.mail.1.1.1.1.1",
			} {
				if !plain.publish(subject, "", "") {
					t.Errorf("%s is allowed", subject)
				}
			}
			closed := make(chan struct{})
			dialNative(t, hub.nats, token, nats.NoReconnect(), nats.ClosedHandler(func(*nats.Conn) { close(closed) }))
			runCommand(t, "token", "revoke", token, "--ops-url="+hub.ops, "--token="+nodeToken)
			select {
			case <-closed:
			case <-time.After(patience):
				t.Error("a client whose token was revoked stays connected")
			}
		})
	}
}
