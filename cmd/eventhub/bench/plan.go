package bench

import (
	"errors"
	"fmt"
	"math"
	"strings"
)

// Limits of the model. recommendedAssets is the number of replicated streams, groups and buckets of
// a cluster that the maintainers of NATS recommend at most. usedMemory and usedCPU are the parts of
// a machine that a hub uses, so that there is room for bursts. maxReturnSeconds is the longest
// pause that a hub that ends asks of a client.
const (
	recommendedAssets = 2000
	usedMemory        = 0.7
	usedCPU           = 0.5
	maxReturnSeconds  = 60
)

// holding is what a hub and its nats-server hold.
type holding struct{ connections, topics, groups, subscriptions float64 }

// hubKiB is the resident memory of a hub.
func (c *unitCosts) hubKiB(h holding) float64 {
	return c.hubKiBEmpty + h.connections*c.hubKiBConnection + h.topics*c.hubKiBTopic + h.groups*c.hubKiBGroup + (h.subscriptions-h.groups)*c.hubKiBMember
}

// natsKiB is the resident memory of one nats-server with one copy of each stream.
func (c *unitCosts) natsKiB(h holding) float64 {
	return c.natsKiBEmpty + h.topics*c.natsKiBTopic + h.groups*c.natsKiBGroup + (h.subscriptions-h.groups)*c.natsKiBMember
}

// goroutines are those of a hub.
func (c *unitCosts) goroutines(h holding) float64 {
	return c.goroutinesEmpty + h.connections*c.goroutinesConnection + h.groups*c.goroutinesGroup + (h.subscriptions-h.groups)*c.goroutinesMember
}

// Plan is `eventhub bench plan`.
type Plan struct {
	Connections float64 `default:"1000000" help:"Connections, over all hubs, each with one subscription."`
	Topics      float64 `default:"100000" help:"Topics."`
	Families    float64 `default:"200" help:"Families that the topics share, a stream each. 0 gives each topic a stream of its own."`
	Groups      float64 `default:"1800" help:"Durable groups."`
	Published   float64 `default:"5000" help:"Events published per second."`
	Delivered   float64 `default:"20000" help:"Events delivered per second."`
	HubMemory   float64 `default:"8" help:"Memory of the machine of a hub, in GiB."`
	HubCores    float64 `default:"4" help:"Cores of the machine of a hub."`
	HubLimit    float64 `default:"20000" help:"Connections that a hub takes (EVENTHUB_LIMIT_CONNECTIONS)."`
	ReturnRate  float64 `default:"1000" help:"Clients a second that a hub that ends asks to come back."`
}

// Planned is what a plan needs.
type Planned struct {
	// HubsByLimit, HubsByMemory, HubsByCPU and HubsByReturn are the hubs that each of these needs.
	// Hubs is the largest of them and one more, so that one can be away.
	HubsByLimit  float64 `json:"hubs_by_limit"`
	HubsByMemory float64 `json:"hubs_by_memory"`
	HubsByCPU    float64 `json:"hubs_by_cpu"`
	HubsByReturn float64 `json:"hubs_by_return"`
	Hubs         float64 `json:"hubs"`
	// ConnectionsPerHub and HubGiB are those of a hub while one is away.
	ConnectionsPerHub float64 `json:"connections_per_hub"`
	HubGiB            float64 `json:"hub_gib"`
	// Streams and groups have three copies, on clusters of three servers.
	Streams   float64 `json:"streams"`
	Assets    float64 `json:"assets"`
	Clusters  float64 `json:"clusters"`
	ServerGiB float64 `json:"server_gib"`
	// ServerIdleCores and ServerBusyCores are of one cluster.
	ServerIdleCores float64 `json:"cluster_idle_cores"`
	ServerBusyCores float64 `json:"all_clusters_busy_cores"`
}

// Help returns the detailed help text.
func (*Plan) Help() string {
	return `Computes how many hubs and clusters a number of connections, topics and groups needs, by the model of docs/sizing/scale.md.

  eventhub bench plan --connections 1000000 --topics 100000 --groups 1800 --families 200`
}

// Run computes the plan.
func (cmd *Plan) Run(env Env, target *Target) error {
	if min(cmd.Connections, cmd.Topics, cmd.HubMemory, cmd.HubCores, cmd.HubLimit, cmd.ReturnRate) <= 0 || min(cmd.Groups, cmd.Families, cmd.Published, cmd.Delivered) < 0 {
		return errors.New("connections, topics, memory, cores, the limit and the return rate must be positive, and the other numbers not negative")
	}
	p, err := cmd.plan(&measuredCosts)
	if err != nil {
		return err
	}
	if target.JSON {
		return printJSON(env.Out, p)
	}
	_, err = fmt.Fprint(env.Out, p.text())
	return err
}

// plan applies the model.
func (cmd *Plan) plan(c *unitCosts) (*Planned, error) {
	p := &Planned{Streams: cmd.Families}
	if cmd.Families == 0 {
		p.Streams = cmd.Topics
	}
	p.Assets = p.Streams + cmd.Groups
	p.Clusters = math.Ceil(p.Assets / recommendedAssets)
	perServer := p.Assets / p.Clusters
	p.ServerGiB = (c.natsKiBEmpty + perServer*c.replicatedKiBAsset + cmd.Topics/p.Clusters*c.subjectKiB) / (1 << 20)
	p.ServerIdleCores = perServer * c.replicatedCPUAsset / 100
	p.ServerBusyCores = (cmd.Published*c.natsMicrosPublished + cmd.Delivered*c.natsMicrosDelivered) / 1e6

	// In the worst case, each hub has a publisher or member of each topic and a member of each
	// group.
	of := func(hubs float64) holding {
		n := cmd.Connections / hubs
		return holding{connections: n, topics: cmd.Topics, groups: min(cmd.Groups, n), subscriptions: n}
	}
	most := cmd.HubMemory * (1 << 20) * usedMemory
	if fixed := of(math.Inf(1)); c.hubKiB(fixed) >= most {
		return nil, fmt.Errorf("%.0f topics alone take %.1f GiB of each hub, of which %.1f may be used; use larger machines, or hubs for parts of the topics",
			cmd.Topics, c.hubKiB(fixed)/(1<<20), most/(1<<20))
	}
	for p.HubsByMemory = 1; c.hubKiB(of(p.HubsByMemory)) > most; p.HubsByMemory++ {
	}
	micros := cmd.Published*c.hubMicrosPublished + cmd.Delivered*c.hubMicrosDelivered
	idle := cmd.Connections / 1000 * c.hubCPUThousand / 100
	p.HubsByCPU = max(1, math.Ceil((micros/1e6+idle)/(cmd.HubCores*usedCPU)))
	p.HubsByReturn = max(1, math.Ceil(cmd.Connections/(cmd.ReturnRate*maxReturnSeconds)))
	p.HubsByLimit = math.Ceil(cmd.Connections / cmd.HubLimit)
	needed := max(p.HubsByLimit, p.HubsByMemory, p.HubsByCPU, p.HubsByReturn)
	p.Hubs = needed + 1
	p.ConnectionsPerHub, p.HubGiB = math.Ceil(cmd.Connections/needed), c.hubKiB(of(needed))/(1<<20)
	return p, nil
}

// text returns the plan as text.
func (p *Planned) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "hubs: %.0f (%.0f by the limit of connections, %.0f by memory, %.0f by CPU, %.0f by the return of clients, and one more), %.0f connections and %.1f GiB each while one is away\n",
		p.Hubs, p.HubsByLimit, p.HubsByMemory, p.HubsByCPU, p.HubsByReturn, p.ConnectionsPerHub, p.HubGiB)
	fmt.Fprintf(&b, "clusters of three nats-servers: %.0f, for %.0f streams and %.0f groups; %.2f GiB a server; a cluster takes %.1f cores when idle, and all take %.1f for the events\n",
		p.Clusters, p.Streams, p.Assets-p.Streams, p.ServerGiB, p.ServerIdleCores, p.ServerBusyCores)
	return b.String()
}
