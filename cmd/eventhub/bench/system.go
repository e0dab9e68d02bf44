package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	psutil "github.com/shirou/gopsutil/v4/process"

	"eventhub/acl"
)

// system is what is measured: a hub, the NATS behind it, and the nats-server of a comparison where that is another one.
type system struct {
	target *Target
	dir    string // of what was started; close removes it
	owned  []*process

	wsURL, httpURL, token string
	// secret signs the tokens of policies, for a hub that was started; bearer is what the clients of the round authenticate
	// with.
	secret, bearer string
	// natsURL is the NATS behind the hub, "" when it is not known. native is the server of the sides native and native-ws.
	natsURL string
	native  struct{ url, wsURL string }
	// pids are the processes that serve a hub's clients, or native ones.
	hubPIDs, nativePIDs []int32

	admins map[string]*admin // by NATS URL
}

// needs are the parts of a system that a run uses.
type needs struct{ hub, native, nativeWS bool }

func needsOf(sides []side) needs {
	var n needs
	for _, s := range sides {
		switch s.via {
		case viaWS, viaHTTP, viaNode:
			n.hub = true
		case viaNative:
			n.native = true
		case viaNativeWS, viaNATSJS:
			n.nativeWS = true
		}
	}
	return n
}

// openSystem starts what is not running. The caller closes the system.
func openSystem(ctx context.Context, env Env, target *Target, need needs) (_ *system, err error) {
	s := &system{target: target, admins: make(map[string]*admin)}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if target.URL != "" {
		err = s.attach(env)
	} else if need.hub || need.native && target.NATSURL == "" {
		err = s.start(ctx)
	}
	if err != nil {
		return nil, err
	}
	if s.natsURL == "" {
		s.natsURL = target.NATSURL
	}
	switch {
	case need.nativeWS && s.native.wsURL == "":
		// The embedded server has no WebSocket listener, so the comparison has a server of its own.
		return s, s.startNATS(ctx)
	case need.native && s.natsURL == "":
		return nil, errors.New("native clients need the NATS behind the hub: give --nats-url")
	case need.native && s.native.url == "":
		s.native.url, s.nativePIDs = s.natsURL, s.hubPIDs
	}
	return s, nil
}

// attach finds a hub that runs.
func (s *system) attach(env Env) error {
	t := s.target
	var err error
	if s.token, err = env.FindToken(t.URL, t.Token, t.Data); err != nil {
		return err
	}
	s.bearer = s.token
	s.wsURL, s.httpURL = t.URL, t.HTTPURL
	if s.httpURL == "" {
		u, err := url.Parse(t.URL)
		if err != nil {
			return fmt.Errorf("hub at %q: %w", t.URL, err)
		}
		s.httpURL = "http://" + net.JoinHostPort(u.Hostname(), "8081")
	}
	if t.HubPID != 0 {
		s.hubPIDs = []int32{t.HubPID}
	}
	return nil
}

// start runs a hub on fresh data.
func (s *system) start(ctx context.Context) error {
	if err := s.makeDir(); err != nil {
		return err
	}
	args := []string{
		"serve", "--ws-port=0", "--http-port=0", "--ops-port=0", "--log-level=warn",
		"--data=" + filepath.Join(s.dir, "hub"), "--replicas=" + strconv.Itoa(s.target.Replicas), "--sync=" + s.target.Sync,
	}
	switch {
	case s.target.external():
		if err := s.startNATS(ctx); err != nil {
			return err
		}
		s.natsURL = s.native.url
		args = append(args, "--nats-url="+s.natsURL)
	case s.target.NATSURL != "":
		args = append(args, "--nats-url="+s.target.NATSURL)
	default:
		args = append(args, "--nats-listen=127.0.0.1:0")
	}
	binary := s.target.Binary
	if binary == "" {
		var err error
		if binary, err = os.Executable(); err != nil {
			return fmt.Errorf("start a hub: %w", err)
		}
	}
	hub, err := startProcess(ctx, "hub", binary, s.hubEnv(), "token", args...)
	if err != nil {
		return err
	}
	s.owned = append(s.owned, hub)
	s.wsURL, s.httpURL = hub.said["websocket"], hub.said["http"]
	s.hubPIDs = append([]int32{pidOf(hub)}, s.nativePIDs...)
	if s.natsURL == "" && hub.said["nats"] != "" {
		s.natsURL = withToken(hub.said["nats"], s.token)
	}
	return nil
}

// hubEnv configures a hub that is started. All limits are on, and none is reached: its clients here are one principal.
// Builds from before the limits take no notice.
func (s *system) hubEnv() []string {
	s.secret = rand.Text() + rand.Text()
	s.bearer = s.token
	return []string{
		"WS_TOKEN=" + s.token,
		"JWT_SECRET=" + s.secret,
		"EVENTHUB_LIMIT_FRAMES=" + beyondReach,
		"EVENTHUB_LIMIT_SETTLES=" + beyondReach,
		"EVENTHUB_LIMIT_TOPIC_PUBLISHES=" + beyondReach,
		"EVENTHUB_LIMIT_PRINCIPAL_PUBLISHES=" + beyondReach,
		"EVENTHUB_LIMIT_PRINCIPAL_CONNECTIONS=20000",
		"EVENTHUB_LIMIT_NEW_TOPICS=1000000",
	}
}

// beyondReach is a rate, and a burst, that no benchmark comes near.
const beyondReach = "100000000"

// become makes the clients of the next round authenticate with a policy of so many rules, of which the last decides; 0 is
// the hub's own token.
func (s *system) become(rules int) error {
	s.bearer = s.token
	if rules == 0 {
		return nil
	}
	var policy strings.Builder
	policy.WriteString(`{"rules":[`)
	for i := range rules - 1 {
		fmt.Fprintf(&policy, `{"effect":"deny","action":"*","topics":["tenant%d.**"]},`, i)
	}
	policy.WriteString(`{"effect":"allow","action":"*","topics":["**"]}]}`)
	var err error
	s.bearer, err = acl.Sign([]byte(s.secret), acl.Grant{Subject: "bench", Policy: []byte(policy.String()), TTL: time.Hour})
	return err
}

func (s *system) makeDir() error {
	if s.dir != "" {
		return nil
	}
	if s.token == "" {
		s.token = rand.Text()
	}
	dir, err := os.MkdirTemp(s.target.Dir, "eventhub-bench-")
	if err != nil {
		return fmt.Errorf("a directory for the data: %w: choose another place (--dir)", err)
	}
	s.dir = dir
	return nil
}

// close ends what was started, the hub before the NATS that it uses, and removes its data.
func (s *system) close() error {
	var errs []error
	for _, a := range s.admins {
		a.conn.Close()
	}
	for i := len(s.owned) - 1; i >= 0; i-- {
		errs = append(errs, s.owned[i].close())
	}
	if s.dir != "" {
		errs = append(errs, os.RemoveAll(s.dir))
	}
	return errors.Join(errs...)
}

// servers are the processes that serve the clients of a side; none when they are not known.
func (s *system) servers(via string) ([]*psutil.Process, error) {
	pids := s.hubPIDs
	if isNative(via) {
		pids = s.nativePIDs
	}
	var out []*psutil.Process
	for _, pid := range pids {
		p, err := psutil.NewProcess(pid)
		if err != nil {
			return nil, fmt.Errorf("process %d: %w", pid, err)
		}
		out = append(out, p)
	}
	return out, nil
}

// describe says what a side is.
func (s *system) describe(of side) string {
	groups := ""
	if of.groups > 0 {
		groups = fmt.Sprintf(", %d groups", of.groups)
	}
	if of.rules > 0 {
		groups += fmt.Sprintf(", policy of %d rules", of.rules)
	}
	library := "nats.go"
	if of.via == viaNATSJS {
		library = "nats.js"
	}
	switch {
	case isNative(of.via) && s.native.url != s.natsURL && s.target.Replicas > 1:
		return library + " at a cluster of its own" + groups
	case isNative(of.via) && s.native.url != s.natsURL:
		return library + " at a nats-server of its own" + groups
	case isNative(of.via) && s.target.Replicas > 1 && s.target.external():
		return library + " at the cluster behind the hub" + groups
	case isNative(of.via) && s.target.External:
		return library + " at the nats-server behind the hub" + groups
	case isNative(of.via) && s.target.NATSURL != "":
		return library + " at " + redact(s.native.url) + groups
	case isNative(of.via):
		return library + " at the server embedded in the hub" + groups
	case s.target.URL != "":
		return "hub at " + s.target.URL + groups
	case s.target.Replicas > 1 && s.target.external():
		return fmt.Sprintf("hub beside a cluster of %d nats-servers%s", clusterSize, groups)
	case s.target.External:
		return "hub beside a nats-server" + groups
	case s.target.NATSURL != "":
		return "hub beside NATS at " + redact(s.target.NATSURL) + groups
	default:
		return "hub with its embedded server" + groups
	}
}

func isNative(via string) bool { return via == viaNative || via == viaNativeWS || via == viaNATSJS }

// connect opens a native connection for a side.
func (s *system) connect(via string) (*nats.Conn, error) {
	at := s.native.url
	if via == viaNativeWS {
		at = s.native.wsURL
	}
	nc, err := nats.Connect(at, nats.Name("eventhub bench"))
	if err != nil {
		return nil, fmt.Errorf("nats at %s: %w", redact(at), err)
	}
	return nc, nil
}

// admin looks at streams, and makes and removes them, over a connection that carries nothing else.
type admin struct {
	conn *nats.Conn
	js   natsjs.JetStream
}

// admin is that of the server with a side's streams; nil when it cannot be reached natively.
func (s *system) admin(via string) (*admin, error) {
	at := s.natsURL
	if isNative(via) {
		at = s.native.url
	}
	if at == "" {
		return nil, nil //nolint:nilnil // having none is not an error
	}
	if a := s.admins[at]; a != nil {
		return a, nil
	}
	nc, err := nats.Connect(at, nats.Name("eventhub bench"))
	if err != nil {
		return nil, fmt.Errorf("nats at %s: %w", redact(at), err)
	}
	js, err := natsjs.New(nc)
	if err != nil {
		nc.Close()
		return nil, fmt.Errorf("nats at %s: %w", redact(at), err)
	}
	a := &admin{conn: nc, js: js}
	s.admins[at] = a
	return a, nil
}

func pidOf(p *process) int32 { return int32(p.cmd.Process.Pid) } //nolint:gosec // process ids are that small

// withToken puts a token into a NATS URL.
func withToken(at, token string) string {
	u, err := url.Parse(at)
	if err != nil {
		return at
	}
	u.User = url.User(token)
	return u.String()
}

// redact removes credentials from NATS URLs that are shown.
func redact(list string) string {
	urls := strings.Split(list, ",")
	for i, at := range urls {
		if u, err := url.Parse(at); err == nil {
			u.User = nil
			urls[i] = u.String()
		}
	}
	return strings.Join(urls, ",")
}
