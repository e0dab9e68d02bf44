// Package bench implements `eventhub bench`. It measures a hub over WebSocket and HTTP, and
// compares it with nats.go in the same run.
//
// A run consists of rounds, each on a fresh topic. In a comparison, the rounds of the two sides
// alternate, because on a busy machine only neighbouring rounds are comparable; the report includes
// the spread of their ratios. A round fails unless every event was stored, delivered, and
// acknowledged.
package bench

import (
	"errors"
	"fmt"
	"io"
	"time"
)

// Ways to reach the stream.
const (
	viaWS       = "ws"        // the hub's WebSocket
	viaHTTP     = "http"      // the hub's HTTP
	viaNative   = "native"    // nats.go over TCP
	viaNativeWS = "native-ws" // nats.go over the WebSocket listener of a nats-server
)

// stallAfter is how long a round may make no progress before it fails.
const stallAfter = 30 * time.Second

// Env holds what the command line provides to a benchmark.
type Env struct {
	Out io.Writer // receives results
	Err io.Writer // receives progress messages
	// Screen receives the control sequences of progress messages, if Err is a terminal. Nil
	// disables progress messages.
	Screen io.Writer
	// FindToken returns the token for the hub at url: given, if not empty, or the token in the data
	// directory.
	FindToken func(url, given, data string) (string, error)
}

// Commands are the subcommands of `eventhub bench`.
type Commands struct {
	Target

	Pub         Pub            `cmd:"" help:"Measure publishing, in confirmed events per second."`
	Sub         Sub            `cmd:"" help:"Measure delivery with acknowledgement, in events per second."`
	Latency     Latency        `cmd:"" help:"Measure the time from publish to delivery at a fixed rate."`
	Fanout      Fanout         `cmd:"" help:"Measure delivery of one topic to many groups."`
	Connections Connections    `cmd:"" help:"Measure the cost of idle connections."`
	Scale       Scale          `cmd:"" help:"Measure the cost of connections, topics and groups beside a nats-server, and a restart."`
	Hubs        Hubs           `cmd:"" help:"Compare the cost of an event with several hubs beside one cluster."`
	Plan        Plan           `cmd:"" help:"Compute how many hubs and clusters are needed."`
	Reconnect   Reconnect      `cmd:"" help:"Measure how clients come back after a restart of the hub."`
	Node        Node           `cmd:"" help:"Measure publishing and delivery from Node, compared with nats.js."`
	Sizing      Sizing         `cmd:"" help:"Measure the cost of an event, a connection, a topic and a group."`
	Keyed       Keyed          `cmd:"" help:"Measure reading a compacted topic by key, compared with nats.go."`
	Ordered     Ordered        `cmd:"" help:"Measure ordered groups, compared with groups that are not."`
	Schema      Schema         `cmd:"" help:"Measure publishing with schemas, and delivery in another version."`
	Broadcast   Broadcast      `cmd:"" help:"Measure broadcasts, compared with a bare loop of writes, with groups, and with Centrifugo."`
	Export      Export         `cmd:"" help:"Measure the export of a topic, compared with nats.go."`
	Reader      reader         `cmd:"" hidden:"" name:"export-native" help:"Write a topic as NDJSON with nats.go."`
	Gate        Gate           `cmd:"" help:"Fail if the hub has become slower, compared with nats.go."`
	Floor       broadcastFloor `cmd:"" hidden:"" name:"broadcast-floor" help:"Write the same bytes to many connections."`
	NATSServer  natsServer     `cmd:"" hidden:"" name:"nats-server" help:"Run a nats-server for a benchmark."`
}

// Target selects the system to measure.
type Target struct {
	URL      string `name:"url" env:"EVENTHUB_URL" help:"WebSocket URL of a running hub. Default: start a hub as a separate process on fresh data."`
	HTTPURL  string `name:"http-url" help:"HTTP URL of the running hub. Default: port 8081 of the same host."`
	Token    string `env:"EVENTHUB_TOKEN,WS_TOKEN" help:"Token of the running hub. Default: as for the other commands."`
	Data     string `env:"EVENTHUB_DATA" default:"./eventhub-data" help:"Data directory of the running hub on this host, for its token."`
	HubPID   int32  `name:"hub-pid" help:"Process id of the running hub, to measure its CPU and memory."`
	NATSURL  string `name:"nats-url" env:"NATS_URL" help:"NATS behind the running hub, for native clients (nats://TOKEN@HOST:PORT). Without --url, the started hub uses it."`
	External bool   `name:"external-nats" help:"Start a nats-server as a separate process, and the hub on it."`
	Sync     string `default:"1s" help:"Interval between flushes of a started server to disk: a duration, or always."`
	Replicas int    `default:"1" help:"Replicas of each new stream, 1 to 5. More than 1 without --nats-url starts a cluster of three nats-servers for the hub."`
	Dir      string `help:"Directory for the data of started servers, removed at the end. Default: the system's temporary directory."`
	Binary   string `placeholder:"FILE" help:"Build of eventhub to start the hub from. Default: this program."`
	JSON     bool   `name:"json" help:"Print one JSON object instead of text."`
}

func (t *Target) validate() error {
	switch {
	case t.URL != "" && (t.External || t.Binary != ""):
		return errors.New("--external-nats and --binary require a hub that bench starts, so they exclude --url")
	case t.External && t.NATSURL != "":
		return errors.New("--external-nats starts a nats-server, so it excludes --nats-url")
	case t.Replicas < 1 || t.Replicas > 5:
		return fmt.Errorf("--replicas %d: must be 1 to 5", t.Replicas)
	case t.Replicas > 1 && t.URL != "" && t.NATSURL == "":
		return errors.New("--replicas with --url also requires --nats-url, because a running hub chooses its own replicas")
	case t.Replicas > clusterSize && t.NATSURL == "":
		return fmt.Errorf("--replicas %d: the cluster that bench starts has only %d servers; set --nats-url", t.Replicas, clusterSize)
	}
	return nil
}

// external reports whether the started hub uses nats-servers that bench also starts.
func (t *Target) external() bool { return t.External || t.Replicas > 1 && t.NATSURL == "" }

// load describes the work of a round.
type load struct {
	N           int    `env:"N" default:"100000" help:"Events per round."`
	Topic       string `env:"TOPIC" default:"bench.topic" help:"Topic prefix of the rounds. A single round on a running hub uses it unchanged."`
	Size        int    `default:"256" help:"Bytes of the JSON payload."`
	Connections int    `default:"4" help:"Client connections."`
	InFlight    int    `default:"256" help:"Maximum number of unconfirmed publishes or unacknowledged events per connection."`
}

func (l *load) validate() error {
	switch {
	case l.N < 1 || l.N > maxEvents:
		return fmt.Errorf("--n %d: must be 1 to %d", l.N, maxEvents)
	case l.Size < minPayload || l.Size > 4<<20:
		return fmt.Errorf("--size %d: must be %d to %d bytes", l.Size, minPayload, 4<<20)
	case l.Connections < 1 || l.Connections > 100_000:
		return fmt.Errorf("--connections %d: must be 1 to 100000", l.Connections)
	case l.InFlight < 1 || l.InFlight > 10_000:
		return fmt.Errorf("--in-flight %d: must be 1 to 10000", l.InFlight)
	}
	return nil
}

// comparePolicy compares clients with a policy to clients without one. policyRules is the default
// number of rules. maxPolicyRules is the maximum number that fits into a token.
const (
	comparePolicy  = "policy"
	policyRules    = 100
	maxPolicyRules = 150
)

// rounds configures the number of rounds and the comparison.
type rounds struct {
	Compare     string `enum:",native,native-ws,policy" default:"" help:"Alternate with nats.go over TCP (native), nats.go over the WebSocket listener of a nats-server (native-ws), or clients without a policy (policy), and print the ratios."`
	Rounds      int    `help:"Rounds of each side, after a warm-up round. Default: 1, or 7 with --compare."`
	PolicyRules int    `name:"policy-rules" help:"Authenticate with a JWT whose policy has this many rules, of which the last one matches. Default: 0 (the hub's own token), or 100 with --compare policy."`
	WarmUp      int    `name:"warm-up" default:"20000" help:"Maximum number of events of the warm-up round; 0 for no warm-up. A running hub is warmed up only in comparisons."`
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
		return fmt.Errorf("--policy-rules %d: must be 0 to %d to fit into a token", r.PolicyRules, maxPolicyRules)
	case sides[0].rules > 0 && isNative(sides[0].via):
		return errors.New("--policy-rules requires clients of the hub; use another --via")
	case r.Rounds < 1 || r.Rounds > 1000:
		return fmt.Errorf("--rounds %d: must be 1 to 1000", r.Rounds)
	case r.WarmUp < 0:
		return fmt.Errorf("--warm-up %d: must not be negative", r.WarmUp)
	case len(sides) > 1 && sides[0] == sides[1]:
		return fmt.Errorf("cannot compare %s with itself", sides[0].via)
	}
	return nil
}
