package jetstream

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/reading"
	"eventhub/jetstream/native"
	"eventhub/jetstream/natstest"
)

// mapped looks at the map for native clients of a hub, and at what each look costs.
type mapped struct {
	t     *testing.T
	bus   *Bus
	nc    *nats.Conn
	js    natsjs.JetStream
	asked chan *nats.Msg
}

func mapNatively(t *testing.T, bus *Bus, url string) *mapped {
	t.Helper()
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	m := &mapped{t, bus, nc, nil, make(chan *nats.Msg, 1<<12)}
	if m.js, err = natsjs.New(nc); err != nil {
		t.Fatal(err)
	}
	if _, err := nc.ChanSubscribe("$JS.API.>", m.asked); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	return m
}

// has reports whether a client with all rights may read the topic and pull from the group, which
// are one or neither.
func (m *mapped) has(topic, group string) bool {
	m.t.Helper()
	yes, both := func(string) bool { return true }, func(string, string) bool { return true }
	p, err := m.bus.Admin().NATS().Permissions(m.t.Context(), &NativeRights{Publish: yes, Read: yes, Join: both, Inspect: both, MayJoin: yes}, "_INBOX_x", false)
	if err != nil {
		m.t.Fatal(err)
	}
	if group == "" {
		return slices.Contains(p.Publish, "$JS.API.STREAM.INFO."+objectName(topic))
	}
	return slices.ContainsFunc(p.Publish, func(s string) bool {
		return strings.HasPrefix(s, "$JS.API.CONSUMER.MSG.NEXT."+objectName(topic)+"."+objectName(group))
	})
}

// requests returns what was asked of JetStream since the last call to find topics and groups, but
// for what a hub asks by itself now and then.
func (m *mapped) requests() (found []string) {
	m.t.Helper()
	if err := m.nc.Flush(); err != nil { // what was asked before has come
		m.t.Fatal(err)
	}
	for {
		select {
		case msg := <-m.asked:
			if timed.MatchString("PUB " + msg.Subject) {
				continue
			}
			what := strings.TrimPrefix(msg.Subject, "$JS.API.")
			for _, look := range []string{"STREAM.LIST", "STREAM.NAMES", "STREAM.INFO.", "CONSUMER.LIST.", "CONSUMER.CREATE.KV_" + native.AttemptsBucket} {
				if strings.HasPrefix(what, look) {
					found = append(found, what)
				}
			}
		default:
			return found
		}
	}
}

// settled waits until the advisories of what was made before have come.
func (m *mapped) settled() {
	m.t.Helper()
	for quiet, deadline := 0, time.Now().Add(wait); quiet < 20; time.Sleep(time.Millisecond) {
		m.has("", "")
		if quiet++; len(m.requests()) > 0 {
			quiet = 0
		}
		if time.Now().After(deadline) {
			m.t.Fatal("the map does not come to rest")
		}
	}
}

// becomes waits until a topic or group is there, or is not.
func (m *mapped) becomes(there bool, topic, group string) {
	m.t.Helper()
	for deadline := time.Now().Add(wait); m.has(topic, group) != there; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			m.t.Fatalf("topic %s, group %q: there is not %v", topic, group, there)
		}
	}
}

// TestNativeMapCostsNothing has native clients connect while nothing changes, and between changes
// by this hub, another one, and native clients.
func TestNativeMapCostsNothing(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	bus := open(t, Config{URL: url})
	for i := range 20 {
		makes(t, bus, "map."+strconv.Itoa(i), "g", SubscribeOptions{})
	}
	m := mapNatively(t, bus, url)
	if !m.has("map.0", "") || !m.has("map.19", "g") || m.has("map.20", "") {
		t.Error("the first map is wrong")
	}
	if first := len(m.requests()); first < 20 {
		t.Errorf("the first map took %d requests", first)
	}
	m.settled()
	for range 100 {
		m.has("map.0", "g")
	}
	if asked := m.requests(); len(asked) > 0 {
		t.Errorf("clients of an unchanged hub cost %q", asked)
	}

	// A change by this hub is in the map at once, and costs requests for its stream alone.
	makes(t, bus, "map.20", "g", SubscribeOptions{})
	if !m.has("map.20", "") || !m.has("map.20", "g") {
		t.Error("a new topic is not there")
	}
	makes(t, bus, "map.0", "late", SubscribeOptions{})
	if !m.has("map.0", "late") {
		t.Error("a new group is not there")
	}
	if err := bus.Group("map.0", "late").Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	if m.has("map.0", "late") {
		t.Error("a deleted group is there")
	}
	if err := bus.Admin().Topic("map.20").Delete(t.Context(), DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if m.has("map.20", "") || m.has("map.20", "g") {
		t.Error("a deleted topic is there")
	}
	for _, what := range m.requests() {
		if strings.Contains(what, "map=2E1") {
			t.Errorf("changes of other topics cost %s", what)
		}
	}

	// Others, a moment later.
	other := open(t, Config{URL: url})
	makes(t, other, "map.1", "other", SubscribeOptions{})
	m.becomes(true, "map.1", "other")
	if _, err := m.js.CreateOrUpdateConsumer(t.Context(), objectName("map.2"), natsjs.ConsumerConfig{Durable: "native"}); err != nil {
		t.Fatal(err)
	}
	m.becomes(true, "map.2", "native")
	if err := m.js.DeleteStream(t.Context(), objectName("map.2")); err != nil {
		t.Fatal(err)
	}
	m.becomes(false, "map.2", "native")
	if m.has("map.2", "") {
		t.Error("a topic whose stream was deleted is there")
	}

	// Readers of events are no groups.
	m.settled()
	for range 5 {
		if err := bus.messages.Through(t.Context(), objectName("map.3"), reading.Query{}, func(*conn.StoredMsg) error { return nil }); err != nil {
			t.Fatal(err)
		}
		if _, err := m.js.OrderedConsumer(t.Context(), objectName("map.3"), natsjs.OrderedConsumerConfig{}); err != nil {
			t.Fatal(err)
		}
	}
	m.requests() // of the readers
	for range 100 {
		m.has("map.3", "")
	}
	if asked := m.requests(); len(asked) > 0 {
		t.Errorf("readers of events cost %q", asked)
	}
}

// TestNativeMapAfterACut changes something while the hub is away from its NATS.
func TestNativeMapAfterACut(t *testing.T) {
	t.Parallel()
	server := natstest.Run(t)
	proxy := natstest.StartProxy(t, server.ClientURL())
	bus := open(t, Config{URL: proxy.URL()})
	makes(t, bus, "map.a", "g", SubscribeOptions{})
	m := mapNatively(t, bus, server.ClientURL())
	if !m.has("map.a", "g") {
		t.Fatal("the first map is wrong")
	}
	for i := range 3 {
		name := "late" + strconv.Itoa(i)
		if err := bus.conn.Links[0].NC.ForceReconnect(); err != nil {
			t.Fatal(err)
		}
		if _, err := m.js.CreateOrUpdateConsumer(t.Context(), objectName("map.a"), natsjs.ConsumerConfig{Durable: name}); err != nil {
			t.Fatal(err)
		}
		m.becomes(true, "map.a", name)
	}
	m.becomes(true, "map.a", "g")
}

// withoutAdvisories has a server let the user hub subscribe to no advisory, and the user all to
// everything.
func withoutAdvisories(o *natsserver.Options) {
	o.Users = []*natsserver.User{{Username: "all", Password: "x"}, {Username: "hub", Password: "x", Permissions: &natsserver.Permissions{
		Publish: &natsserver.SubjectPermission{Allow: []string{">"}}, Subscribe: &natsserver.SubjectPermission{Allow: []string{">"}, Deny: []string{"$JS.EVENT.>"}},
	}}}
}

func userURL(server *natsserver.Server, user string) string {
	return strings.Replace(server.ClientURL(), "://", "://"+user+":x@", 1)
}

// TestNativeMapWithoutAdvisories has a hub whose NATS user may not subscribe to advisories list all
// for each client.
func TestNativeMapWithoutAdvisories(t *testing.T) {
	t.Parallel()
	server := natstest.Run(t, withoutAdvisories)
	bus := open(t, Config{URL: userURL(server, "hub")})
	makes(t, bus, "map.a", "g", SubscribeOptions{})
	m := mapNatively(t, bus, userURL(server, "all"))
	for i := range 3 {
		name := "native" + strconv.Itoa(i)
		if _, err := m.js.CreateOrUpdateConsumer(t.Context(), objectName("map.a"), natsjs.ConsumerConfig{Durable: name}); err != nil {
			t.Fatal(err)
		}
		if !m.has("map.a", name) {
			t.Errorf("group %s is not there", name)
		}
	}
}
