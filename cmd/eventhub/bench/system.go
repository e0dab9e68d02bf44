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
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	psutil "github.com/shirou/gopsutil/v4/process"

	"eventhub/acl"
)

// system is the measured system: a hub, the NATS behind it, and the nats-server of a comparison if
// that is a different one.
type system struct {
	target *Target
	dir    string // data of started servers; removed by close
	owned  []*process

	wsURL, httpURL, token string
	// hubArgs are the arguments of the started hub. serving, if not empty, are the WebSocket URLs
	// of the hubs among which dial takes turns, and dialled counts them.
	hubArgs []string
	serving []string
	dialled atomic.Int64
	// secret signs tokens with policies, for a started hub. bearer is the credential of the clients
	// in the current round.
	secret, bearer string
	// natsURL is the NATS behind the hub, or "" if unknown. native is the server for the sides
	// native and native-ws.
	natsURL string
	native  struct{ url, wsURL string }
	// hubPIDs and nativePIDs are the processes that serve the hub's clients and the native clients.
	hubPIDs, nativePIDs []int32

	admins map[string]*admin // keyed by NATS URL
}

// needs lists the parts of a system that a run uses.
type needs struct {
	hub, native, nativeWS bool
	topics                string // the topics file of a hub that is started; "" for none
}

func needsOf(sides []side) needs {
	var n needs
	for _, s := range sides {
		switch s.via {
		case viaWS, viaHTTP, viaNode, viaSDK:
			n.hub = true
		case viaNative:
			n.native = true
		case viaNativeWS, viaNATSJS:
			n.nativeWS = true
		}
	}
	return n
}

// openSystem attaches to a running hub or starts the needed servers. The caller must close the
// system.
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
		err = s.start(ctx, need.topics)
	}
	if err != nil {
		return nil, err
	}
	if s.natsURL == "" {
		s.natsURL = target.NATSURL
	}
	switch {
	case need.nativeWS && s.native.wsURL == "":
		// The embedded server has no WebSocket listener, so the comparison uses a separate server.
		return s, s.startNATS(ctx)
	case need.native && s.natsURL == "":
		return nil, errors.New("native clients require access to the NATS behind the hub; set --nats-url")
	case need.native && s.native.url == "":
		s.native.url, s.nativePIDs = s.natsURL, s.hubPIDs
	}
	return s, nil
}

// attach uses a running hub.
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
			return fmt.Errorf("parse hub URL %q: %w", t.URL, err)
		}
		s.httpURL = "http://" + net.JoinHostPort(u.Hostname(), "8081")
	}
	if t.HubPID != 0 {
		s.hubPIDs = []int32{t.HubPID}
	}
	return nil
}

// start starts a hub on fresh data.
func (s *system) start(ctx context.Context, topics string) error {
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
	if topics != "" {
		path, err := s.writeTopics(topics)
		if err != nil {
			return err
		}
		args = append(args, "--topics="+path)
	}
	s.hubArgs = args
	hub, err := s.startHub(ctx, s.hubEnv(), args...)
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

// startHub starts a hub process. The caller must close it.
func (s *system) startHub(ctx context.Context, env []string, args ...string) (*process, error) {
	binary := s.target.Binary
	if binary == "" {
		var err error
		if binary, err = os.Executable(); err != nil {
			return nil, fmt.Errorf("start a hub: %w", err)
		}
	}
	return startProcess(ctx, "hub", binary, env, "token", args...)
}

// hubEnv returns the environment of a started hub. It enables all limits at values that the
// benchmark, whose clients are a single principal, never reaches. Old builds without these limits
// ignore the variables.
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
		"EVENTHUB_LIMIT_PRINCIPAL_BYTES=1000000000",
		"EVENTHUB_LIMIT_PRINCIPAL_CONNECTIONS=20000",
		"EVENTHUB_LIMIT_NEW_TOPICS=1000000",
	}
}

// beyondReach is a rate, and a burst, far above any benchmark.
const beyondReach = "100000000"

// become sets the credential for the next round: a JWT whose policy has the given number of rules,
// of which the last one matches, or the hub's own token if rules is 0.
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
		return fmt.Errorf("create the data directory: %w; choose another place (--dir)", err)
	}
	s.dir = dir
	return nil
}

// close ends the started servers, the hub before its NATS, and removes their data.
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

// servers returns the processes that serve the clients of a side, or none if they are unknown.
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

// describe describes a side.
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
		return library + " at a separate cluster" + groups
	case isNative(of.via) && s.native.url != s.natsURL:
		return library + " at a separate nats-server" + groups
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
		return nil, fmt.Errorf("connect to NATS at %s: %w", redact(at), err)
	}
	return nc, nil
}

// admin inspects, creates, and removes streams over a separate connection.
type admin struct {
	conn *nats.Conn
	js   natsjs.JetStream
}

// admin returns the admin for the server with a side's streams, or nil if the server is not
// accessible natively.
func (s *system) admin(via string) (*admin, error) {
	at := s.natsURL
	if isNative(via) {
		at = s.native.url
	}
	if at == "" {
		return nil, nil //nolint:nilnil // no native access is not an error
	}
	if a := s.admins[at]; a != nil {
		return a, nil
	}
	nc, err := nats.Connect(at, nats.Name("eventhub bench"))
	if err != nil {
		return nil, fmt.Errorf("connect to NATS at %s: %w", redact(at), err)
	}
	js, err := natsjs.New(nc)
	if err != nil {
		nc.Close()
		return nil, fmt.Errorf("open JetStream at %s: %w", redact(at), err)
	}
	a := &admin{conn: nc, js: js}
	s.admins[at] = a
	return a, nil
}

func pidOf(p *process) int32 { return int32(p.cmd.Process.Pid) } //nolint:gosec // process ids fit

// withToken adds a token to a NATS URL.
func withToken(at, token string) string {
	u, err := url.Parse(at)
	if err != nil {
		return at
	}
	u.User = url.User(token)
	return u.String()
}

// redact removes credentials from NATS URLs.
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
