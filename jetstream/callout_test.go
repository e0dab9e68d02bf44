package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"eventhub/jetstream/natstest"
)

// TestCalloutsAnswerOnlyWhatTheyUnderstand asks about clients in the place of a server: in the
// clear, encrypted for somebody else, and malformed. Such questions get no answer, and a good one
// gets one that only the server can read.
func TestCalloutsAnswerOnlyWhatTheyUnderstand(t *testing.T) {
	t.Parallel()
	server := natstest.Run(t)
	bus, err := Open(t.Context(), Config{URL: server.ClientURL()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bus.Close() })
	issuer, err := NewKey(IssuerKey)
	if err != nil {
		t.Fatal(err)
	}
	encryption, err := NewKey(EncryptionKey)
	if err != nil {
		t.Fatal(err)
	}
	outcomes := make(chan string, 10)
	cfg := CalloutConfig{
		Issuer: issuer.Seed, XKey: encryption.Seed, Account: "A", HubAccount: "H", Narrowed: func() {}, Counted: func(o string) { outcomes <- o },
		Authorize: func(_ context.Context, c NativeClient) (*NativeGrant, error) {
			if c.Token != "good" {
				return nil, errors.New("no")
			}
			return &NativeGrant{Name: "n", Full: true, Expires: time.Now().Add(time.Hour)}, nil
		},
	}
	for _, bad := range [][2][]byte{{nil, nil}, {encryption.Seed, nil}, {issuer.Seed, issuer.Seed}, {[]byte("SA"), nil}} {
		wrong := cfg
		wrong.Issuer, wrong.XKey = bad[0], bad[1]
		if _, err := bus.Admin().NATS().ServeCallouts(t.Context(), wrong); err == nil || !strings.Contains(err.Error(), "auth-callout config") {
			t.Errorf("keys %.2q: %v", bad, err)
		}
	}
	callouts, err := bus.Admin().NATS().ServeCallouts(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	nc, err := nats.Connect(server.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	identity, err := nkeys.CreateServer()
	if err != nil {
		t.Fatal(err)
	}
	user, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	name, err := user.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	curve, err := nkeys.CreateCurveKeys()
	if err != nil {
		t.Fatal(err)
	}
	public, err := curve.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	question := func(token string) []byte {
		asked := jwt.NewAuthorizationRequestClaims(name)
		asked.UserNkey, asked.Server.ID, asked.Server.XKey, asked.ConnectOptions.Token = name, "S", public, token
		text, err := asked.Encode(identity)
		if err != nil {
			t.Fatal(err)
		}
		return []byte(text)
	}
	seal := func(data []byte, to string) []byte {
		sealed, err := curve.Seal(data, to)
		if err != nil {
			t.Fatal(err)
		}
		return sealed
	}
	ask := func(data []byte, key string) (answer *nats.Msg, outcome string) {
		replies := nats.NewInbox()
		sub, err := nc.SubscribeSync(replies)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = sub.Unsubscribe() }()
		m := &nats.Msg{Subject: calloutSubject, Reply: replies, Data: data, Header: nats.Header{}}
		if key != "" {
			m.Header.Set(calloutXKey, key)
		}
		if err := nc.PublishMsg(m); err != nil {
			t.Fatal(err)
		}
		select {
		case outcome = <-outcomes:
		case <-time.After(30 * time.Second):
			t.Fatal("a question was ignored")
		}
		if outcome == CalloutFailed {
			return nil, outcome
		}
		answer, err = sub.NextMsg(30 * time.Second)
		if err != nil {
			t.Fatal(err)
		}
		return answer, outcome
	}
	for what, bad := range map[string][2]string{
		"in the clear":            {string(question("good")), ""},
		"for somebody else":       {string(seal(question("good"), public)), public},
		"malformed":               {string(seal([]byte("x"), encryption.Public)), public},
		"with another key inside": {string(seal(question("good"), encryption.Public)), encryption.Public},
		"empty":                   {"", public},
	} {
		if answer, outcome := ask([]byte(bad[0]), bad[1]); answer != nil || outcome != CalloutFailed {
			t.Errorf("a question %s: %s %v", what, outcome, answer)
		}
	}
	for token, want := range map[string]string{"good": CalloutAllowed, "bad": CalloutRefused} {
		answer, outcome := ask(seal(question(token), encryption.Public), public)
		if outcome != want {
			t.Errorf("the token %s: %s, want %s", token, outcome, want)
		}
		clear, err := curve.Open(answer.Data, encryption.Public)
		if err != nil {
			t.Fatal(err)
		}
		response, err := jwt.DecodeAuthorizationResponseClaims(string(clear))
		if err != nil || response.Issuer != issuer.Public || response.Audience != "S" || (response.Jwt != "") != (token == "good") {
			t.Errorf("the token %s: %+v, %v", token, response, err)
		}
	}
	callouts.Close()
	callouts.Close()
}

// followingCallouts answers callouts of a server that the test stands for: it takes the requests to
// end connections of the server LIVE. No other server is there.
func followingCallouts(t *testing.T) (c *Callouts, ended <-chan uint64) {
	t.Helper()
	server := natstest.Run(t)
	bus, err := Open(t.Context(), Config{URL: server.ClientURL()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bus.Close() })
	nc, err := nats.Connect(server.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	ids := make(chan uint64, 100)
	_, err = nc.Subscribe(strings.Replace(KickSubject, "*", "LIVE", 1), func(m *nats.Msg) {
		var asked struct{ CID uint64 }
		if err := json.Unmarshal(m.Data, &asked); err != nil {
			t.Error(err)
		}
		ids <- asked.CID
		_ = m.Respond([]byte("{}"))
	})
	if err == nil {
		err = nc.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	issuer, err := NewKey(IssuerKey)
	if err != nil {
		t.Fatal(err)
	}
	c, err = bus.Admin().NATS().ServeCallouts(t.Context(), CalloutConfig{Issuer: issuer.Seed, Account: "A", HubAccount: "H", Narrowed: func() {}, Counted: func(string) {}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c, ids
}

// calloutAsker asks about native clients in the place of a server that does not encrypt.
type calloutAsker struct {
	t        *testing.T
	callouts *Callouts
	nc       *nats.Conn
	identity nkeys.KeyPair
	user     string
	failed   atomic.Int64 // clients that get no answer
}

// asking answers callouts, and asks them. The name of a client is its token; write is called where
// the permissions of a client are written.
func asking(t *testing.T, bus *Bus, url string, write func(token string)) *calloutAsker {
	t.Helper()
	issuer, err := NewKey(IssuerKey)
	if err != nil {
		t.Fatal(err)
	}
	a := &calloutAsker{t: t}
	yes, both := func(string) bool { return true }, func(string, string) bool { return true }
	a.callouts, err = bus.Admin().NATS().ServeCallouts(t.Context(), CalloutConfig{
		Issuer: issuer.Seed, Account: "A", HubAccount: "H", Narrowed: func() {},
		Counted: func(outcome string) {
			if outcome == CalloutFailed {
				a.failed.Add(1)
			}
		},
		Authorize: func(_ context.Context, c NativeClient) (*NativeGrant, error) {
			rights := &NativeRights{Read: yes, Join: both, Inspect: both, MayJoin: yes, Publish: func(string) bool {
				write(c.Token)
				return true
			}}
			return &NativeGrant{Name: c.Token, Rights: rights}, nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.callouts.Close)
	if a.nc, err = nats.Connect(url); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.nc.Close)
	if a.identity, err = nkeys.CreateServer(); err != nil {
		t.Fatal(err)
	}
	user, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	a.user, err = user.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func (a *calloutAsker) question(token string) []byte {
	a.t.Helper()
	asked := jwt.NewAuthorizationRequestClaims(a.user)
	asked.UserNkey, asked.Server.ID, asked.ConnectOptions.Token = a.user, "S", token
	text, err := asked.Encode(a.identity)
	if err != nil {
		a.t.Fatal(err)
	}
	return []byte(text)
}

// ask waits for the answer to a question.
func (a *calloutAsker) ask(token string) {
	a.t.Helper()
	if _, err := a.nc.Request(calloutSubject, a.question(token), wait); err != nil {
		a.t.Fatalf("%s: %v", token, err)
	}
}

// crowd asks as many questions, and counts the answers.
func (a *calloutAsker) crowd(n int, token func(i int) string) (answered *atomic.Int64) {
	a.t.Helper()
	answered = new(atomic.Int64)
	replies := nats.NewInbox()
	if _, err := a.nc.Subscribe(replies, func(*nats.Msg) { answered.Add(1) }); err != nil {
		a.t.Fatal(err)
	}
	for i := range n {
		if err := a.nc.PublishRequest(calloutSubject, replies, a.question(token(i))); err != nil {
			a.t.Fatal(err)
		}
	}
	return answered
}

// all waits for as many answers.
func (a *calloutAsker) all(answered *atomic.Int64, n int) {
	a.t.Helper()
	for deadline := time.Now().Add(wait); answered.Load() < int64(n); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			a.t.Fatalf("%d of %d clients got an answer", answered.Load(), n)
		}
	}
}

// TestCalloutsOfOnePrincipalTakeTurns has many clients of one principal connect at a time, and one
// of another.
func TestCalloutsOfOnePrincipalTakeTurns(t *testing.T) {
	t.Parallel()
	const crowd = 64
	server := natstest.Run(t)
	bus := open(t, Config{URL: server.ClientURL()})
	makes(t, bus, "callout", "g", SubscribeOptions{})
	var crowded, most atomic.Int64
	entered := make(chan struct{}, crowd)
	a := asking(t, bus, server.ClientURL(), func(token string) {
		if token != "crowd" {
			return
		}
		now := crowded.Add(1)
		defer crowded.Add(-1)
		for before := most.Load(); now > before && !most.CompareAndSwap(before, now); before = most.Load() {
		}
		entered <- struct{}{}
		time.Sleep(5 * time.Millisecond)
	})
	answered := a.crowd(crowd, func(int) string { return "crowd" })
	<-entered
	a.ask("other")
	if n := answered.Load(); n > crowd/2 {
		t.Errorf("%d of %d clients of another principal were let in first", n, crowd)
	}
	for deadline := time.Now().Add(wait); answered.Load()+a.failed.Load() < crowd; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("of %d clients, %d got an answer, and %d came too late", crowd, answered.Load(), a.failed.Load())
		}
	}
	if n := answered.Load(); n < crowd/4 {
		t.Errorf("%d of %d clients got an answer", n, crowd)
	}
	if n, limit := most.Load(), int64((max(runtime.GOMAXPROCS(0)/2, 1)+1)/2); n > limit {
		t.Errorf("%d answers of one principal were written at a time, of %d", n, limit)
	}
}

// TestLateCalloutsGetNoAnswer has more clients connect at a time than can be let in before they
// give up. Those that give up are not let in one after the other, while new ones wait.
func TestLateCalloutsGetNoAnswer(t *testing.T) {
	t.Parallel()
	const crowd = 100
	server := natstest.Run(t)
	bus := open(t, Config{URL: server.ClientURL()})
	makes(t, bus, "callout", "g", SubscribeOptions{})
	a := asking(t, bus, server.ClientURL(), func(string) {
		time.Sleep(time.Duration(runtime.GOMAXPROCS(0)) * 30 * time.Millisecond)
	})
	answered := a.crowd(crowd, func(int) string { return "crowd" })
	time.Sleep(turnWait)
	a.ask("crowd")
	if n := answered.Load(); n == 0 || n > 3*crowd/4 {
		t.Errorf("%d of %d clients got an answer, and then one that came later", n, crowd)
	}
}

// TestCalloutsShareAMap has clients of many principals connect at a time to a hub that gets no
// advisories, so that each needs a new map.
func TestCalloutsShareAMap(t *testing.T) {
	t.Parallel()
	const crowd = 50
	server := natstest.Run(t, withoutAdvisories)
	bus := open(t, Config{URL: userURL(server, "hub")})
	for i := range 10 {
		makes(t, bus, "map."+strconv.Itoa(i), "g", SubscribeOptions{})
	}
	a := asking(t, bus, userURL(server, "all"), func(string) {})
	a.ask("first")
	var lists atomic.Int64
	if _, err := a.nc.Subscribe("$JS.API.STREAM.LIST", func(*nats.Msg) { lists.Add(1) }); err != nil {
		t.Fatal(err)
	}
	a.all(a.crowd(crowd, strconv.Itoa), crowd)
	if err := a.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if n := lists.Load(); n == 0 || n > crowd/2 {
		t.Errorf("%d clients had the hub list all streams %d times", crowd, n)
	}
}

// TestCalloutsBeginAfterAnOutage has the hub begin to answer while NATS is away.
func TestCalloutsBeginAfterAnOutage(t *testing.T) {
	t.Parallel()
	server := natstest.Run(t)
	bus := open(t, Config{URL: server.ClientURL()})
	makes(t, bus, "callout", "g", SubscribeOptions{})
	again := natstest.Again(server)
	server.Shutdown()
	server.WaitForShutdown()
	up := make(chan struct{})
	go func() {
		defer close(up)
		time.Sleep(200 * time.Millisecond)
		natstest.Run(t, again)
	}()
	a := asking(t, bus, server.ClientURL(), func(string) {})
	<-up
	a.ask("client")
	a.callouts.Close()
	if err := bus.Close(); err != nil { // before the server ends
		t.Error(err)
	}
}

// TestServersThatAreGoneDelayNoRevocation revokes tokens of clients of a server that is gone, and
// of one that is there.
func TestServersThatAreGoneDelayNoRevocation(t *testing.T) {
	t.Parallel()
	c, ended := followingCallouts(t)
	grant := &NativeGrant{Name: "n", Expires: time.Now().Add(time.Hour), Revoked: func() bool { return true }}
	for id := range uint64(2_000) {
		c.follow(calloutConn{"GONE", id}, grant)
	}
	c.follow(calloutConn{"LIVE", 7}, grant)
	select {
	case id := <-ended:
		if id != 7 {
			t.Errorf("connection %d is ended", id)
		}
	case <-time.After(30 * time.Second):
		t.Error("a client whose token was revoked stays connected")
	}
}

// TestConnectionsThatAreNotFollowedEnd has a principal connect more often than it is followed. Its
// oldest connections end, and those of others are still followed.
func TestConnectionsThatAreNotFollowedEnd(t *testing.T) {
	t.Parallel()
	c, ended := followingCallouts(t)
	var revoked atomic.Bool
	other := &NativeGrant{Name: "other", Expires: time.Now().Add(time.Hour), Revoked: revoked.Load}
	c.follow(calloutConn{"LIVE", 1}, other)
	eager := &NativeGrant{Name: "eager", Expires: time.Now().Add(time.Hour), Revoked: func() bool { return false }}
	const beyond = 3
	for id := range uint64(maxOwnNativeClients + beyond) {
		c.follow(calloutConn{"LIVE", 100 + id}, eager)
	}
	next := func() uint64 {
		select {
		case id := <-ended:
			return id
		case <-time.After(30 * time.Second):
			t.Fatal("no connection is ended")
			return 0
		}
	}
	got := []uint64{next(), next(), next()}
	slices.Sort(got)
	if !slices.Equal(got, []uint64{100, 101, 102}) {
		t.Errorf("the connections %v are ended, want the oldest", got)
	}
	revoked.Store(true)
	if id := next(); id != 1 {
		t.Errorf("connection %d is ended, want the one whose token was revoked", id)
	}
}
