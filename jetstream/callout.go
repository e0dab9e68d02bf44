package jetstream

import (
	"cmp"
	linked "container/list" // a test has a function of this name
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/panics"
	"eventhub/jetstream/quota"
)

const (
	// calloutSubject is where a server asks who a client is, and calloutQueue is the group of the
	// hubs that answer.
	calloutSubject = "$SYS.REQ.USER.AUTH"
	calloutQueue   = "eventhub"
	// calloutXKey is the header that has the key to which an answer is encrypted.
	calloutXKey = "Nats-Server-Xkey"
	// calloutWait bounds one answer, and kickWait one request to end a connection.
	calloutWait = 10 * time.Second
	kickWait    = 5 * time.Second
	// turnWait is how long a client waits for its turn. Clients of NATS give up after 2 s. An
	// answer that comes later is of no use, and takes the turn of a client that still waits.
	turnWait = 1500 * time.Millisecond
	// maxCallouts ("callouts") is how many clients are being checked at a time. The server of
	// another client gets no answer.
	maxCallouts = 4096
	// maxNativeClients ("native_clients") is how many connections of native clients are followed,
	// to end them when their tokens are revoked, and maxOwnNativeClients how many of one principal.
	// NATS does not say when a connection ends, so those that have ended count until their tokens
	// expire. Beyond the limits, the oldest connection of the principal, or of any, is ended.
	maxNativeClients    = 100_000
	maxOwnNativeClients = maxNativeClients / 10
	// revokedEvery is the interval between checks for revoked tokens, and the first pause after a
	// server did not answer. Pauses double up to maxKickRetry.
	revokedEvery = time.Second
	maxKickRetry = time.Minute
)

// KickSubject is where servers take requests to end a connection. The account of the hub imports it
// from the account of the system.
const KickSubject = "$SYS.REQ.SERVER.*.KICK"

// NativeService is a subject that the account of the hub exports as a service to the account of
// native clients.
type NativeService struct {
	Subject string
	// Stream reports that a request may have several answers.
	Stream bool
}

// NativeServices returns everything that native clients may reach from an account of their own. No
// two of the subjects overlap.
func NativeServices() []NativeService {
	return []NativeService{
		{Subject: "event.>"},
		{Subject: "keyed.>"},
		{Subject: "$JS.ACK.>"},
		{Subject: "$JS.API.CONSUMER.INFO.>"},
		{Subject: "$JS.API.CONSUMER.MSG.NEXT.>", Stream: true},
		{Subject: "$JS.API.DIRECT.GET.>", Stream: true},
		{Subject: "$JS.API.STREAM.INFO.>"},
		{Subject: "$JS.API.STREAM.MSG.GET.>"},
	}
}

// NativeClient is a native client that wants to connect.
type NativeClient struct {
	// Address is the host that the server of NATS sees, and Token is what the client shows.
	Address, Token string
}

// NativeGrant is what a native client gets.
type NativeGrant struct {
	// Name is the user name under which the server shows the client.
	Name string
	// Full gives full access to the account of the hub, as the hub's own token has it. Otherwise,
	// Rights limit the client.
	Full   bool
	Rights *NativeRights
	// Expires is when the server ends the connection; zero: never.
	Expires time.Time
	// Revoked, when not nil, reports that the token was withdrawn. The client is disconnected.
	Revoked func() bool
}

// CalloutConfig configures the answers to the auth callouts of a NATS server.
type CalloutConfig struct {
	// Issuer is the seed of the account key that signs the answers. Required.
	Issuer []byte
	// XKey is the seed of the curve key to which questions are encrypted. By default, they are not.
	// With a key, clear questions are refused.
	XKey []byte
	// Account is the account in which clients are placed, and HubAccount the account of the hub.
	// Both are required, and may be the same. In an account of their own, answers to the requests
	// of a client cannot leave that account. In the account of the hub, a client may have the
	// server send them to any subject unless Guarded: NATS does not check the reply subject of a
	// request.
	Account, HubAccount string
	// Guarded has all clients pass the guard of Config.Server, a NativeGuard. Others are refused.
	Guarded bool
	// Life ends connections after this time, so that their clients connect and are checked again.
	// By default, a connection ends with its token.
	Life time.Duration
	// Authorize returns what a client gets. Any error refuses the client, and is not shown to it.
	// Required.
	Authorize func(context.Context, NativeClient) (*NativeGrant, error)
	// Counted counts clients by Callout outcome, and Narrowed grants whose permissions allow less
	// than the rights. Both are required and must not block.
	Counted  func(outcome string)
	Narrowed func()
}

// NativeGuard passes what native clients send to a server, and removes reply subjects that are not
// below the inbox of the client. The server of package embedded has one.
type NativeGuard interface {
	// Origin returns the address of a client, and false if the client did not pass the guard.
	Origin(server string, id uint64) (address string, ok bool)
	// Admit lets a client of a principal pass whose reply subjects must begin with inbox; empty:
	// with anything. The guard ends the connection of a principal that has too many.
	Admit(server string, id uint64, inbox, owner string)
}

// Outcomes of CalloutConfig.Counted.
const (
	CalloutAllowed = "allowed"
	CalloutRefused = "refused" // the token is not valid
	CalloutFailed  = "failed"  // the question is malformed, or NATS did not answer
	CalloutKicked  = "kicked"  // disconnected: the token was revoked, or too many are followed
)

// Callouts answers the auth callouts of NATS servers. Close ends it.
type Callouts struct {
	access *access
	cfg    CalloutConfig
	issuer nkeys.KeyPair
	xkey   nkeys.KeyPair // nil: questions are not encrypted
	guard  NativeGuard   // nil: clients reach the server without one
	nc     *nats.Conn    // for questions and answers
	sub    *nats.Subscription
	places chan struct{}
	grants *quota.Places // for answers: half of the processors, and half of that for one principal
	ctx    context.Context
	end    context.CancelFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	live    map[calloutConn]*calloutEnd
	own     map[string]*linked.List // connections of each principal, the oldest first
	kicking map[string]bool         // servers that are asked to end connections
}

// calloutConn is a connection of a native client.
type calloutConn struct {
	server string
	id     uint64
}

// calloutEnd is what may end a connection.
type calloutEnd struct {
	principal string
	place     *linked.Element // in own; nil: the connection has to end
	revoked   func() bool
	expires   time.Time
}

// ServeCallouts begins to answer auth callouts, and returns when servers can ask. Several hubs
// share the questions. Close the Callouts before the Bus.
func (n NATS) ServeCallouts(ctx context.Context, cfg CalloutConfig) (*Callouts, error) {
	b := n.bus
	c := &Callouts{access: b.access, cfg: cfg, places: make(chan struct{}, maxCallouts)}
	processors := max(runtime.GOMAXPROCS(0)/2, 1)
	c.grants = quota.NewPlaces(processors, (processors+1)/2)
	c.live, c.own, c.kicking = make(map[calloutConn]*calloutEnd), make(map[string]*linked.List), make(map[string]bool)
	var err error
	if c.issuer, err = issuerOf(cfg.Issuer); err != nil {
		return nil, fmt.Errorf("auth callout: issuer key: %w", err)
	}
	if cfg.XKey != nil {
		if c.xkey, err = xkeyOf(cfg.XKey); err != nil {
			return nil, fmt.Errorf("auth callout: xkey: %w", err)
		}
	}
	if cfg.Guarded {
		var ok bool
		if c.guard, ok = b.cfg.Server.(NativeGuard); !ok {
			return nil, errors.New("auth callout: the server has no guard; set Guarded for a server of package embedded only")
		}
	}
	starting, cancel := context.WithTimeout(ctx, calloutWait)
	defer cancel()
	// The server needs some ms for an answer, and reads nothing else of its connection meanwhile.
	for {
		if c.nc, err = b.conn.Connection("eventhub callouts"); err == nil {
			break
		}
		if b.conn.Pause(starting, conn.AskFirst) != nil {
			return nil, fmt.Errorf("auth callout: connect to nats at %s: %w", b.conn.Where(), err)
		}
	}
	c.ctx, c.end = context.WithCancel(context.WithoutCancel(ctx))
	if c.sub, err = c.nc.QueueSubscribe(calloutSubject, calloutQueue, c.receive); err != nil {
		c.end()
		c.nc.Close()
		return nil, fmt.Errorf("auth callout: %w", err)
	}
	c.wg.Go(c.watchRevoked)
	if err := c.nc.FlushWithContext(starting); err != nil {
		c.Close()
		return nil, fmt.Errorf("auth callout: nats at %s: %w", b.conn.Where(), err)
	}
	return c, nil
}

// KeyKind is a kind of key.
type KeyKind int

// The kinds of keys that auth callouts need.
const (
	IssuerKey     KeyKind = iota // CalloutConfig.Issuer
	EncryptionKey                // CalloutConfig.XKey
	UserKey                      // of the hub, in the account HubAccount
)

// Key is a key of NATS (nkey).
type Key struct {
	// Seed is the secret, and Public is what a configuration names.
	Seed   []byte
	Public string
}

// NewKey makes a key.
func NewKey(kind KeyKind) (k Key, err error) {
	pair, err := map[KeyKind]func() (nkeys.KeyPair, error){
		IssuerKey: nkeys.CreateAccount, EncryptionKey: nkeys.CreateCurveKeys, UserKey: nkeys.CreateUser,
	}[kind]()
	if err != nil {
		return k, err
	}
	if k.Seed, err = pair.Seed(); err != nil {
		return k, err
	}
	k.Public, err = pair.PublicKey()
	return k, err
}

// issuerOf and xkeyOf read seeds.
func issuerOf(seed []byte) (nkeys.KeyPair, error) {
	if kind, _, err := nkeys.DecodeSeed(seed); err != nil || kind != nkeys.PrefixByteAccount {
		return nil, errors.New("it is no seed of an account key, which begins with SA; eventhub auth-callout config makes one")
	}
	return nkeys.FromSeed(seed)
}

func xkeyOf(seed []byte) (nkeys.KeyPair, error) {
	if kind, _, err := nkeys.DecodeSeed(seed); err != nil || kind != nkeys.PrefixByteCurve {
		return nil, errors.New("it is no seed of a curve key, which begins with SX; eventhub auth-callout config makes one")
	}
	return nkeys.FromCurveSeed(seed)
}

// Close stops answering, and waits for what is being answered. It may be called twice. Clients that
// are connected stay.
func (c *Callouts) Close() {
	_ = c.sub.Unsubscribe() // fails only when the connection is closed
	c.end()
	c.wg.Wait()
	c.nc.Close()
}

// receive takes a question.
func (c *Callouts) receive(m *nats.Msg) {
	select {
	case c.places <- struct{}{}:
	default:
		c.access.obs.LimitReached("callouts")
		return
	}
	c.wg.Go(func() {
		defer func() { <-c.places }()
		ctx, cancel := context.WithTimeout(c.ctx, calloutWait)
		defer cancel()
		err := panics.Call(c.access.often.By("func"), "auth callout", func() error { return c.answer(ctx, m) })
		if err != nil && c.ctx.Err() == nil {
			c.cfg.Counted(CalloutFailed)
			c.access.often.Log(ctx, slog.LevelWarn, "failed to answer an auth callout", "", slog.Any("error", err))
		}
	})
}

// answer answers a question. A client that is refused is no error.
func (c *Callouts) answer(ctx context.Context, m *nats.Msg) error {
	data, server := m.Data, m.Header.Get(calloutXKey)
	if c.xkey != nil {
		if server == "" {
			return errors.New("the question is not encrypted; set xkey in the auth_callout of the server")
		}
		var err error
		if data, err = c.xkey.Open(data, server); err != nil {
			return fmt.Errorf("the question cannot be decrypted; compare xkey in the auth_callout of the server: %w", err)
		}
	}
	asked, err := jwt.DecodeAuthorizationRequestClaims(string(data))
	if err != nil {
		return fmt.Errorf("the question is malformed: %w; if the server encrypts, set the xkey", err)
	}
	if c.xkey != nil && asked.Server.XKey != server {
		return errors.New("the question names another key for the answer")
	}
	response := jwt.NewAuthorizationResponseClaims(asked.UserNkey)
	response.Audience = asked.Server.ID
	grant, err := c.authorize(ctx, asked)
	var known *nativeMap
	if err == nil && !grant.Full {
		known, err = c.access.native.get(ctx)
	}
	var user *jwt.UserClaims
	if err == nil {
		left, ok := c.turn(ctx, grant, asked)
		if !ok {
			return nil
		}
		defer left()
		user = c.user(ctx, asked, grant, known)
	}
	switch {
	case err != nil && grant != nil: // the client may, and it cannot be said what
		c.access.often.Log(ctx, slog.LevelWarn, "failed to list what a native client may do", grant.Name, slog.String("client", grant.Name), slog.Any("error", err))
		c.cfg.Counted(CalloutFailed)
		response.Error = "try again later"
	case err != nil:
		c.cfg.Counted(CalloutRefused)
		response.Error = "the token was refused"
	default:
		if response.Jwt, err = user.Encode(c.issuer); err != nil {
			return err
		}
	}
	text, err := response.Encode(c.issuer)
	if err != nil {
		return err
	}
	reply := []byte(text)
	if c.xkey != nil {
		if reply, err = c.xkey.Seal(reply, server); err != nil {
			return err
		}
	}
	if grant != nil && response.Error == "" {
		c.cfg.Counted(CalloutAllowed)
		c.follow(calloutConn{asked.Server.ID, asked.ClientInformation.ID}, grant)
		if c.guard != nil {
			inbox := ""
			if !grant.Full {
				inbox = NativeInbox(tokenOf(asked)) + "."
			}
			c.guard.Admit(asked.Server.ID, asked.ClientInformation.ID, inbox, grant.Name)
		}
	}
	if err := m.Respond(reply); err != nil {
		return err
	}
	if c.guard != nil {
		// The server, in this process, has then read the answer, which is as much work as to write
		// it. The answer is on its way in any case.
		_ = c.nc.FlushWithContext(ctx)
	}
	return nil
}

// turn waits for the turn of a client among those of its principal. ok is false if it does not come
// in time, or the client has gone. Such a client gets no answer: a client of NATS that is refused
// twice does not connect again.
func (c *Callouts) turn(ctx context.Context, grant *NativeGrant, asked *jwt.AuthorizationRequestClaims) (left func(), ok bool) {
	const limit = "callout_places"
	ctx, cancel := context.WithTimeout(ctx, turnWait)
	defer cancel()
	if !c.grants.Enter(ctx, grant.Name, maxCallouts/4, func() { c.access.obs.LimitReached(limit) }) {
		c.cfg.Counted(CalloutFailed)
		c.access.often.Log(ctx, slog.LevelInfo, "too many clients of a principal connect at a time; those that get no answer connect again", grant.Name,
			slog.String("limit", limit), slog.String("client", grant.Name))
		return nil, false
	}
	if c.guard != nil {
		if _, here := c.guard.Origin(asked.Server.ID, asked.ClientInformation.ID); !here {
			c.grants.Leave(grant.Name)
			return nil, false
		}
	}
	return func() { c.grants.Leave(grant.Name) }, true
}

// authorize returns the grant of a client, or why the client is refused.
func (c *Callouts) authorize(ctx context.Context, asked *jwt.AuthorizationRequestClaims) (*NativeGrant, error) {
	token, address := tokenOf(asked), asked.ClientInformation.Host
	if c.guard != nil {
		var ok bool
		if address, ok = c.guard.Origin(asked.Server.ID, asked.ClientInformation.ID); !ok {
			return nil, errors.New("the client did not pass the guard")
		}
	}
	return c.cfg.Authorize(ctx, NativeClient{Address: address, Token: token})
}

// user returns what a client with the grant gets. known is for grants that are not Full.
func (c *Callouts) user(ctx context.Context, asked *jwt.AuthorizationRequestClaims, grant *NativeGrant, known *nativeMap) *jwt.UserClaims {
	user := jwt.NewUserClaims(asked.UserNkey)
	user.Name, user.Audience = grant.Name, c.cfg.Account
	ends := grant.Expires
	if c.cfg.Life > 0 && (ends.IsZero() || time.Until(ends) > c.cfg.Life) {
		ends = time.Now().Add(c.cfg.Life)
	}
	if !ends.IsZero() {
		user.Expires = ends.Unix()
	}
	if grant.Full {
		user.Audience = c.cfg.HubAccount
		return user
	}
	p := c.access.permissions(known, grant.Rights, NativeInbox(tokenOf(asked)), c.cfg.Account == c.cfg.HubAccount && c.guard == nil)
	user.Pub.Allow, user.Sub.Allow = p.Publish, p.Subscribe
	if len(p.Publish) == 0 {
		user.Pub.Deny = jwt.StringList{">"} // without any entry, everything would be allowed
	}
	if len(p.Narrowed) > 0 {
		c.cfg.Narrowed()
		c.access.often.Log(ctx, slog.LevelInfo, "a native client may do less than its token allows; eventhub auth-callout explain says what", grant.Name,
			slog.String("client", grant.Name), slog.Int("narrowed", len(p.Narrowed)), slog.String("first", p.Narrowed[0]))
	}
	return user
}

// tokenOf returns what a client shows.
func tokenOf(asked *jwt.AuthorizationRequestClaims) string {
	return cmp.Or(asked.ConnectOptions.Token, asked.ConnectOptions.Password)
}

// NativeInbox returns the prefix of the subjects at which the native client with a token gets
// answers, without the last dot. The client has to set it: others are refused.
func NativeInbox(token string) string {
	sum := sha256.Sum256([]byte(token))
	return "_INBOX_" + hex.EncodeToString(sum[:16])
}

// follow remembers a client whose token may be revoked.
func (c *Callouts) follow(conn calloutConn, grant *NativeGrant) {
	if grant.Revoked == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forget(conn)
	own := c.own[grant.Name]
	switch {
	case own != nil && own.Len() >= maxOwnNativeClients:
		c.evict(own)
	case len(c.live) >= maxNativeClients:
		for _, other := range c.own {
			c.evict(other)
			break
		}
	}
	if own = c.own[grant.Name]; own == nil {
		own = linked.New()
		c.own[grant.Name] = own
	}
	c.live[conn] = &calloutEnd{grant.Name, own.PushBack(conn), grant.Revoked, grant.Expires}
}

// evict has the oldest of a principal's connections end, which cannot be followed any more. c.mu is
// held.
func (c *Callouts) evict(own *linked.List) {
	c.access.obs.LimitReached("native_clients")
	conn, _ := own.Front().Value.(calloutConn)
	end := c.live[conn]
	c.leave(end)
	if len(c.live) >= 2*maxNativeClients { // their servers do not answer
		delete(c.live, conn)
	}
}

// leave removes a connection from those of its principal. c.mu is held.
func (c *Callouts) leave(end *calloutEnd) {
	if end.place == nil {
		return
	}
	own := c.own[end.principal]
	own.Remove(end.place)
	end.place = nil
	if own.Len() == 0 {
		delete(c.own, end.principal)
	}
}

// forget ends the watch over a connection. c.mu is held.
func (c *Callouts) forget(conn calloutConn) {
	if end := c.live[conn]; end != nil {
		c.leave(end)
		delete(c.live, conn)
	}
}

// watchRevoked disconnects clients whose tokens are revoked. Each server is asked on its own, so
// that one that is gone does not keep the others waiting.
func (c *Callouts) watchRevoked() {
	tick := time.NewTicker(revokedEvery)
	defer tick.Stop()
	for {
		select {
		case <-c.ctx.Done():
			return
		case now := <-tick.C:
			for server := range c.ended(now) {
				c.mu.Lock()
				busy := c.kicking[server]
				c.kicking[server] = true
				c.mu.Unlock()
				if !busy {
					c.wg.Go(func() { c.disconnect(server) })
				}
			}
		}
	}
}

// ended returns the connections of each server that have to end, and forgets those that have
// expired.
func (c *Callouts) ended(now time.Time) map[string][]calloutConn {
	c.mu.Lock()
	defer c.mu.Unlock()
	ended := make(map[string][]calloutConn)
	for conn, end := range c.live {
		switch {
		case !end.expires.IsZero() && now.After(end.expires):
			c.forget(conn)
		case end.place == nil, end.revoked():
			ended[conn.server] = append(ended[conn.server], conn)
		}
	}
	return ended
}

// disconnect asks a server to end connections, until none is left that has to.
func (c *Callouts) disconnect(server string) {
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.kicking, server)
	}()
	retry := revokedEvery
	for conns := c.ended(time.Now())[server]; len(conns) > 0; conns = c.ended(time.Now())[server] {
		for _, conn := range conns {
			err := c.kick(conn)
			if err == nil {
				c.mu.Lock()
				c.forget(conn)
				c.mu.Unlock()
				c.cfg.Counted(CalloutKicked)
				retry = revokedEvery
				continue
			}
			if c.ctx.Err() != nil {
				return
			}
			c.access.often.Log(c.ctx, slog.LevelWarn, "failed to disconnect native clients; retrying", server, slog.String("server", server),
				slog.Int("connections", len(conns)), slog.Duration("pause", retry), slog.Any("error", err))
			select {
			case <-c.ctx.Done():
				return
			case <-time.After(retry):
			}
			retry = min(2*retry, maxKickRetry)
			break
		}
	}
}

// kick asks a server to end a connection. A connection that is gone is no error.
func (c *Callouts) kick(conn calloutConn) error {
	ctx, cancel := context.WithTimeout(c.ctx, kickWait)
	defer cancel()
	req, err := json.Marshal(map[string]uint64{"cid": conn.id})
	if err != nil {
		return err
	}
	m, err := c.access.conn.Links[0].NC.RequestWithContext(ctx, strings.Replace(KickSubject, "*", conn.server, 1), req)
	if errors.Is(err, nats.ErrNoResponders) {
		return errors.New("the account of the hub cannot reach $SYS.REQ.SERVER.*.KICK, or the server is gone; eventhub auth-callout config shows the import")
	}
	if err != nil {
		return err
	}
	c.mu.Lock()
	client := ""
	if end := c.live[conn]; end != nil {
		client = end.principal
	}
	c.mu.Unlock()
	c.access.often.Log(ctx, slog.LevelInfo, "disconnected a native client", client, slog.String("client", client), slog.String("answer", fmt.Sprintf("%.200s", m.Data)))
	return nil
}
