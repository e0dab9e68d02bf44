package ops

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"strings"

	"eventhub/jetstream"
)

// NATSTopic is the topic that represents the NATS behind the hub in policies: its servers, and the
// streams on them.
const NATSTopic = "eventhub.nats"

// Bounds of the number of streams in an answer.
const (
	defaultStreams = 100
	maxStreams     = 1000
)

// NATS describes the NATS behind the hub. jetstream.NATS implements it.
type NATS interface {
	Info(ctx context.Context) (jetstream.ServerInfo, error)
	// Streams lists what the streams of topics store, and Placements where all streams are stored.
	Streams(ctx context.Context) ([]jetstream.StreamStorage, error)
	Placements(ctx context.Context) ([]jetstream.Placement, error)
	// Gone returns those of topics that do not exist.
	Gone(ctx context.Context, topics []string) ([]string, error)
}

var _ NATS = jetstream.NATS{}

// natsPage is the answer to GET /nats.
type natsPage struct {
	Servers []natsServer `json:"servers"`
	File    storageUse   `json:"file"`
	Memory  storageUse   `json:"memory"`
	Count   int          `json:"count"`
	Total   int          `json:"total"`
	Streams []natsStream `json:"streams"`
	Next    string       `json:"next,omitempty"`
}

// natsServer is a server that has streams of the account, or that the hub is connected to.
type natsServer struct {
	Server string `json:"server"`
	// Leads is how many streams the server leads, and Copies is how many it has. Behind and Offline
	// are how many of its copies are not up to date, and cannot be reached.
	Leads   int    `json:"leads"`
	Copies  int    `json:"copies"`
	Behind  int    `json:"behind"`
	Offline int    `json:"offline"`
	Bytes   uint64 `json:"bytes"`
}

// storageUse is the use of one kind of storage.
type storageUse struct {
	Bytes uint64 `json:"bytes"`
	// Limit is the bound of the account, or -1.
	Limit int64 `json:"limit"`
	// Left is how much may be added; absent if that is not known.
	Left *int64 `json:"left,omitempty"`
}

type natsStream struct {
	Stream    string        `json:"stream"`
	Topic     string        `json:"topic,omitempty"`
	Storage   string        `json:"storage"`
	Replicas  int           `json:"replicas"`
	Leader    string        `json:"leader,omitempty"`
	Copies    []natsReplica `json:"copies"`
	Events    uint64        `json:"events"`
	Bytes     uint64        `json:"bytes"`
	Consumers int           `json:"consumers"`
}

type natsReplica struct {
	Server   string `json:"server"`
	Current  bool   `json:"current"`
	Offline  bool   `json:"offline"`
	Lag      uint64 `json:"lag"`
	ActiveMS int64  `json:"activeMs"`
}

// nats answers GET /nats. The figures of servers are those of all streams; the streams are paged.
func (s *Server) nats(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	limit, badLimit := number(q, "limit", defaultStreams, 1, maxStreams)
	if fault := cmp.Or(checkQuery(q, "limit", "next"), badLimit); fault != "" {
		badQuery(w, fault)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), topicTimeout)
	defer cancel()
	info, err := s.cfg.NATS.Info(ctx)
	var all []jetstream.Placement
	if err == nil {
		all, err = s.cfg.NATS.Placements(ctx)
	}
	if err != nil {
		s.fail(w, r, err, "NATS", "ask NATS about its streams")
		return
	}
	page := natsPage{
		Servers: serversOf(all, info.Server), Total: len(all), Streams: []natsStream{},
		File: storageOf(info.FileBytes, info.FileLimit, info.FileLeft), Memory: storageOf(info.MemoryBytes, info.MemoryLimit, info.MemoryLeft),
	}
	for i := range all {
		if all[i].Stream <= q.Get("next") {
			continue
		}
		if len(page.Streams) == int(limit) {
			page.Next = page.Streams[len(page.Streams)-1].Stream
			break
		}
		page.Streams = append(page.Streams, streamOf(&all[i]))
	}
	page.Count = len(page.Streams)
	answer(w, page)
}

// storageOf is the use of a storage. left is -1 if it is not known.
func storageOf(used uint64, limit, left int64) storageUse {
	use := storageUse{Bytes: used, Limit: limit}
	if left >= 0 {
		use.Left = &left
	}
	return use
}

func streamOf(p *jetstream.Placement) natsStream {
	st := natsStream{
		Stream: p.Stream, Topic: p.Topic, Storage: "file", Replicas: p.Replicas, Leader: p.Leader, Copies: []natsReplica{},
		Events: p.Messages, Bytes: p.Bytes, Consumers: p.Consumers,
	}
	if p.Memory {
		st.Storage = "memory"
	}
	for _, c := range p.Servers {
		st.Copies = append(st.Copies, natsReplica{c.Server, c.Current, c.Offline, c.Lag, c.Active.Milliseconds()})
	}
	return st
}

// serversOf adds up what each server has. own is the server that the hub is connected to.
func serversOf(all []jetstream.Placement, own string) []natsServer {
	found := make(map[string]*natsServer)
	at := func(name string) *natsServer {
		if found[name] == nil {
			found[name] = &natsServer{Server: name}
		}
		return found[name]
	}
	if own != "" {
		at(own)
	}
	for i := range all {
		for _, c := range all[i].Servers {
			server := at(c.Server)
			server.Copies++
			server.Bytes += all[i].Bytes
			switch {
			case c.Offline:
				server.Offline++
			case !c.Current:
				server.Behind++
			}
			if c.Server == all[i].Leader {
				server.Leads++
			}
		}
	}
	servers := make([]natsServer, 0, len(found))
	for _, server := range found {
		servers = append(servers, *server)
	}
	slices.SortFunc(servers, func(a, b natsServer) int { return strings.Compare(a.Server, b.Server) })
	return servers
}
