// Package bench is `eventhub bench`: it measures what a hub does, over WebSocket, HTTP and natively, and compares it with
// nats.go in the same run.
//
// A run is a number of rounds, each on a fresh topic. In a comparison the rounds of the two sides alternate, because on a
// machine that does other things too only neighbours in time can be compared; the spread of their ratios is reported.
// A round fails unless everything was stored, delivered and acknowledged.
package bench

import (
	"errors"
	"fmt"
	"io"
	"time"
)

// The ways to the stream.
const (
	viaWS       = "ws"        // the hub's WebSocket
	viaHTTP     = "http"      // the hub's HTTP
	viaNative   = "native"    // nats.go over TCP
	viaNativeWS = "native-ws" // nats.go over the WebSocket listener of a nats-server
)

// stallAfter is how long a round may make no progress before it fails.
const stallAfter = 30 * time.Second

// Env is what the command line gives to a benchmark.
type Env struct {
	Out io.Writer // results
	Err io.Writer // progress and rounds
	// Progress is whether somebody watches Err.
	Progress bool
	// FindToken returns the token for the hub at a URL: the one that was given, or that in the data directory.
	FindToken func(url, given, data string) (string, error)
}

// Commands are the subcommands of `eventhub bench`.
type Commands struct {
	Target

	Pub         Pub         `cmd:"" help:"Publish: confirmed events a second."`
	Sub         Sub         `cmd:"" help:"Deliver and acknowledge: events a second."`
	Latency     Latency     `cmd:"" help:"Time from publish to delivery at a fixed rate."`
	Fanout      Fanout      `cmd:"" help:"Deliver one topic to many groups."`
	Connections Connections `cmd:"" help:"What idle connections cost."`
	Node        Node        `cmd:"" help:"Publish and deliver from Node, compared with nats.js."`
	Sizing      Sizing      `cmd:"" help:"What a core, a connection, a topic and a group cost."`
	Keyed       Keyed       `cmd:"" help:"Read a compacted topic by key, compared with nats.go."`
	Gate        Gate        `cmd:"" help:"Fail when the hub has become slower, compared with nats.go."`
	NATSServer  natsServer  `cmd:"" hidden:"" name:"nats-server" help:"Run a nats-server for a benchmark."`
}

// Target says what is measured.
type Target struct {
	URL      string `name:"url" env:"EVENTHUB_URL" help:"A running hub's WebSocket. Default: a hub is started as a process of its own, on fresh data."`
	HTTPURL  string `name:"http-url" help:"The running hub's HTTP. Default: port 8081 of the same host."`
	Token    string `env:"WS_TOKEN" help:"The running hub's token. Default: as for the other commands."`
	Data     string `env:"EVENTHUB_DATA" default:"./eventhub-data" help:"The data directory of a running hub on this host, for its token."`
	HubPID   int32  `name:"hub-pid" help:"The running hub's process, to measure its CPU and memory."`
	NATSURL  string `name:"nats-url" env:"NATS_URL" help:"The NATS behind the running hub, for native clients (nats://TOKEN@HOST:PORT); without --url, the hub that is started uses it."`
	External bool   `name:"external-nats" help:"Start a nats-server as a second process, and the hub on it."`
	Sync     string `default:"1s" help:"How often a server that is started flushes to disk: a duration, or always."`
	Replicas int    `default:"1" help:"Copies of each new stream. More than 1, without --nats-url: a cluster of three nats-servers is started, and the hub beside it."`
	Dir      string `help:"Where the data of what is started goes; it is removed at the end. Default: the system's directory for temporary files."`
	Binary   string `placeholder:"FILE" help:"Start the hub from this build of eventhub instead of this program."`
	JSON     bool   `name:"json" help:"Print one JSON object instead of text."`
}

func (t *Target) validate() error {
	switch {
	case t.URL != "" && (t.External || t.Binary != ""):
		return errors.New("--external-nats and --binary are about a hub that bench starts, and --url names one that runs: choose")
	case t.External && t.NATSURL != "":
		return errors.New("--external-nats starts a nats-server, and --nats-url names one that runs: choose")
	case t.Replicas < 1 || t.Replicas > 5:
		return fmt.Errorf("--replicas %d: 1 to 5 are allowed", t.Replicas)
	case t.Replicas > 1 && t.URL != "" && t.NATSURL == "":
		return errors.New("the replicas of a running hub are its own choice: give --nats-url, too, for native clients, or leave --replicas")
	case t.Replicas > clusterSize && t.NATSURL == "":
		return fmt.Errorf("--replicas %d: the cluster that bench starts has %d servers: give --nats-url", t.Replicas, clusterSize)
	}
	return nil
}

// external is whether the hub that is started gets nats-servers that are started, too.
func (t *Target) external() bool { return t.External || t.Replicas > 1 && t.NATSURL == "" }

// load is what a round consists of.
type load struct {
	N           int    `env:"N" default:"100000" help:"Events a round."`
	Topic       string `env:"TOPIC" default:"bench.topic" help:"The topic; rounds append a name of their own. A single round on a running hub uses it as it is."`
	Size        int    `default:"256" help:"Bytes of the JSON payload."`
	Connections int    `default:"4" help:"Client connections."`
	InFlight    int    `default:"256" help:"The most unconfirmed publishes, or unacknowledged events, a connection."`
}

func (l *load) validate() error {
	switch {
	case l.N < 1 || l.N > maxEvents:
		return fmt.Errorf("--n %d: 1 to %d are allowed", l.N, maxEvents)
	case l.Size < minPayload || l.Size > 4<<20:
		return fmt.Errorf("--size %d: %d to %d bytes are allowed", l.Size, minPayload, 4<<20)
	case l.Connections < 1 || l.Connections > 100_000:
		return fmt.Errorf("--connections %d: 1 to 100000 are allowed", l.Connections)
	case l.InFlight < 1 || l.InFlight > 10_000:
		return fmt.Errorf("--in-flight %d: 1 to 10000 are allowed", l.InFlight)
	}
	return nil
}

// comparePolicy compares clients that have a policy with others that have none; policyRules is its size, maxPolicyRules
// what fits into a token.
const (
	comparePolicy  = "policy"
	policyRules    = 100
	maxPolicyRules = 150
)

// rounds say how often, and against what.
type rounds struct {
	Compare     string `enum:",native,native-ws,policy" default:"" help:"Alternate with nats.go over TCP (native) or over a nats-server's WebSocket listener (native-ws), or with clients that have no policy (policy), and print the ratios."`
	Rounds      int    `help:"Rounds of each side, after one to warm up. Default: 1, with --compare 7."`
	PolicyRules int    `name:"policy-rules" help:"Authenticate with a JWT that holds a policy of so many rules, of which the last decides. Default: the hub's own token, with --compare policy 100."`
	WarmUp      int    `name:"warm-up" default:"20000" help:"The most events of the round that warms up and does not count; 0: none. A hub that runs already is warmed up only in comparisons."`
}

func (r *rounds) validate(sides []side) error {
	if r.Rounds == 0 {
		r.Rounds = 1
		if len(sides) > 1 {
			r.Rounds = 7
		}
	}
	switch {
	case r.PolicyRules < 0 || r.PolicyRules > maxPolicyRules:
		return fmt.Errorf("--policy-rules %d: at most %d fit into a token", r.PolicyRules, maxPolicyRules)
	case sides[0].rules > 0 && isNative(sides[0].via):
		return errors.New("--policy-rules is for clients of the hub: choose another --via")
	case r.Rounds < 1 || r.Rounds > 1000:
		return fmt.Errorf("--rounds %d: 1 to 1000 are allowed", r.Rounds)
	case r.WarmUp < 0:
		return fmt.Errorf("--warm-up %d: it cannot be negative", r.WarmUp)
	case len(sides) > 1 && sides[0] == sides[1]:
		return fmt.Errorf("that would compare %s with itself", sides[0].via)
	}
	return nil
}
