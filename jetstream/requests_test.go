package jetstream

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

// TestRequests compares what Open and Close say to NATS, and in which order, with a file. Each
// request counts once, where it comes first, for one that a busy server answers late is repeated.
// Over several connections the order is that of each. What Close waits for before it ends the
// connections says nothing, and is not seen.
func TestRequests(t *testing.T) {
	t.Parallel()
	got, late := requests(t)
	// A Close on a busy machine does not wait for all answers.
	for n := 0; late && n < 3; n++ {
		got, late = requests(t)
	}
	Golden(t, "requests.txt", got)
}

// requests returns what Open and Close say, and whether a Close was late.
func requests(t *testing.T) (said string, late bool) {
	t.Helper()
	var out strings.Builder
	url, dir := natsServer(t), t.TempDir()

	w := record(t, url)
	b := open(t, requestsConfig(Config{URL: w.proxy.URL(), Connections: 2}))
	w.opened(&out, "first Open, 2 connections", b)
	publishAll(t, b, "before", "1")
	_ = b.Close()

	w = record(t, url)
	b = open(t, requestsConfig(Config{URL: w.proxy.URL(), Connections: 1}))
	w.opened(&out, "second Open, 1 connection", b)
	late = w.closed(&out, "Close", b, open(t, requestsConfig(Config{URL: url})))

	w = recordEmbedded(t, dir)
	b = open(t, requestsConfig(Config{Server: w, Connections: 1}))
	w.opened(&out, "first Open, embedded server", b)
	late = w.closed(&out, "Close, embedded server", b, open(t, requestsConfig(Config{URL: w.url}))) || late

	w = recordEmbedded(t, dir)
	b = open(t, requestsConfig(Config{Server: w, Connections: 1}))
	w.opened(&out, "second Open, embedded server", b)
	return out.String(), late
}

// requestsConfig completes a configuration. A rule asks for schemas, one dead letter of a client
// passes at once, and what is done from time to time is seldom done.
func requestsConfig(cfg Config) Config {
	cfg.Topics = []topics.Rule{{Pattern: "checked", Schema: topics.SchemaRule{Mode: topics.SchemaWarn}}}
	cfg.Limits = Limits{DeadLetterRate: 1, DeadLetterBurst: 1}
	cfg.OwnerLease, cfg.askStorage = time.Minute, time.Hour
	return cfg
}

// wire notes what a hub says to NATS. If it has a server, it is that server, and notes its end.
type wire struct {
	Server

	tb    testing.TB
	proxy *natstest.Proxy
	url   string // that does not lead through the proxy

	mu   sync.Mutex
	said []request
	subs map[string]string // subjects, by connection and sid
	open int               // connections
}

// request is something that a hub says.
type request struct {
	conn int // numbered in the order in which they began
	text string
}

// record notes what is said to the server of a URL.
func record(tb testing.TB, url string) *wire {
	tb.Helper()
	w := &wire{tb: tb, proxy: natstest.StartProxy(tb, url), subs: make(map[string]string)}
	w.proxy.Watch(w.note)
	return w
}

// recordEmbedded starts an embedded server on a directory, and notes what is said to it.
func recordEmbedded(tb testing.TB, dir string) *wire {
	tb.Helper()
	server := natstest.Embed(tb, dir, natstest.Listening("t"))
	url, _ := server.Connection()
	w := record(tb, url)
	w.Server, w.url = server, strings.Replace(url, "//", "//t@", 1)
	return w
}

func (w *wire) Connection() (string, []nats.Option) {
	_, options := w.Server.Connection()
	return w.proxy.URL(), options
}

// Close ends the server. The bus has ended its connections before.
func (w *wire) Close() error {
	w.ended()
	w.mu.Lock()
	w.said = append(w.said, request{text: "Server.Close"})
	w.mu.Unlock()
	return w.Server.Close()
}

// ended waits for the end of all connections.
func (w *wire) ended() {
	w.tb.Helper()
	eventually(w.tb, "the end of the connections", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.open == 0
	})
}

var (
	// made matches what differs from run to run: names, times and numbers.
	made = regexp.MustCompile(`\b(?:[A-Za-z0-9]{22}|[0-9a-z]{12,}|\d+)\b`)
	// watching matches the consumer of a watch.
	watching = regexp.MustCompile(`(\.CONSUMER\.(?:CREATE|DELETE)\.KV_\w+)\.\w+`)
	// reply matches an answer, or a probe.
	reply = regexp.MustCompile(`^PUB _INBOX\.#\.\w+$`)
	// timed matches what is said from time to time, or depends on the time.
	timed = regexp.MustCompile(`^PUB (_INBOX\.#\.#|\$KV\.eventhub_attempts\.ordered\..*|\$JS\.API\.(STREAM\.(INFO\.(eventhub_delayed|KV_eventhub_schemas)|MSG\.GET\..*)|CONSUMER\.(INFO|MSG\.NEXT)\..*))$`)
)

// note notes a line, except for PING and PONG. Random names and numbers become #.
func (w *wire) note(conn int, line string) {
	words := strings.Fields(line)
	verb := "END"
	if len(words) > 0 {
		verb = strings.ToUpper(words[0])
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	subject := ""
	switch verb {
	case "CONNECT":
		w.open++
	case "END":
		w.open--
	case "SUB": // subject, perhaps a queue, sid
		subject = strings.Join(words[1:len(words)-1], " ")
		w.subs[fmt.Sprint(conn, " ", words[len(words)-1])] = subject
	case "UNSUB":
		subject = w.subs[fmt.Sprint(conn, " ", words[1])]
	case "PUB", "HPUB":
		verb, subject = "PUB", words[1]
	default:
		return
	}
	text := strings.TrimSpace(verb + " " + watching.ReplaceAllString(made.ReplaceAllString(subject, "#"), "$1.#"))
	w.said = append(w.said, request{conn, reply.ReplaceAllString(text, "PUB _INBOX.#.#")})
}

// all returns what was said.
func (w *wire) all() []request {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.said)
}

// await waits until a request was made.
func (w *wire) await(begin string) {
	w.tb.Helper()
	eventually(w.tb, begin, func() bool {
		return slices.ContainsFunc(w.all(), func(r request) bool { return strings.HasPrefix(r.text, begin) })
	})
}

// flush waits until all was passed on that a bus has said.
func flush(tb testing.TB, b *Bus) {
	tb.Helper()
	for _, l := range b.conn.Links {
		if err := l.NC.Flush(); err != nil {
			tb.Fatal(err)
		}
	}
}

// opened writes what Open has said. Over connection 0, Open asks last for the room of the server.
// The goroutines that Open then starts ask in any order, and over connection 0 alone.
func (w *wire) opened(out *strings.Builder, title string, b *Bus) {
	w.tb.Helper()
	flush(w.tb, b)
	for _, begun := range []string{"CONSUMER.CREATE.KV_eventhub_groups", "CONSUMER.CREATE.KV_eventhub_owners", "STREAM.INFO.eventhub_delayed"} {
		w.await("PUB $JS.API." + begun)
	}
	said := w.all()
	slices.SortStableFunc(said, func(a, b request) int { return b.conn - a.conn })
	n := len(said) - 1
	for n >= 0 && said[n].text != "PUB $JS.API.INFO" {
		n--
	}
	if n < 0 {
		w.tb.Fatalf("Open has not asked for the room of the server: %v", said)
	}
	write(out, title, false, slices.Clone(said[:n]))
	write(out, title+": background, sorted", true, steady(said[n:]))
}

// closed writes what Close says where members of a plain and of an ordered group hold an event, and
// a dead letter waits. The ordered group has a member on another hub, so that this hub owns the
// group until Close comes to ordered groups. closed reports whether Close was late.
func (w *wire) closed(out *strings.Builder, title string, b, other *Bus) (late bool) {
	w.tb.Helper()
	publishAll(w.tb, b, "plain", "1")
	publishAll(w.tb, b, "ordered", "1")
	publishAll(w.tb, b, "failed", "1", "2")
	_ = take(w.tb, b, "plain", "g", SubscribeOptions{From: FromEarliest}).next()
	ordered := take(w.tb, b, "ordered", "g", SubscribeOptions{From: FromEarliest, OrderByKey: true})
	_ = ordered.next()
	failed := take(w.tb, b, "failed", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 1, CountFor: "client"})
	for range 2 {
		if err := failed.next().Nack("no", 0); err != nil {
			w.tb.Fatal(err)
		}
	}
	_ = take(w.tb, other, "ordered", "g", SubscribeOptions{OrderByKey: true, Paused: true})
	eventually(w.tb, "a member on another hub", func() bool {
		o := ordered.sub.members[0].group.ordering
		o.mu.Lock()
		defer o.mu.Unlock()
		return o.own != nil && o.own.guests[other.handles.hub] != nil
	})
	w.await("PUB $KV.eventhub_attempts.failed") // of the letter that waits
	eventually(w.tb, "the end of the other letter", func() bool {
		b.dead.mu.Lock()
		defer b.dead.mu.Unlock()
		return len(b.dead.waiting) == 1
	})
	flush(w.tb, b)
	from := len(w.all())
	began := time.Now()
	_ = b.Close()
	late = time.Since(began) >= closeWait
	w.ended()
	said := steady(w.all()[from:])
	until := func(last string) []request {
		n := slices.IndexFunc(said, func(r request) bool { return r.text == last }) + 1
		defer func() { said = said[n:] }()
		return slices.Clone(said[:n])
	}
	drop := func(pattern string) {
		drops := regexp.MustCompile(pattern)
		said = slices.DeleteFunc(said, func(r request) bool { return drops.MatchString(r.text) })
	}
	write(out, title+": subscriptions and ordered groups, sorted", true, until("PUB $KV.eventhub_owners.group.ordered.g"))
	drop(`^UNSUB|\.ACK\.(plain|ordered)\.`) // what was given back may come once more
	write(out, title+": dead letters", false, until("PUB $JS.ACK.failed.g.#.#.#.#.#"))
	drop(`\.CONSUMER\.DELETE\.`) // by watches, some of which outlive the connection
	write(out, title+": end", false, said)
	return late
}

// steady returns what was said except for what depends on the time.
func steady(said []request) []request {
	return slices.DeleteFunc(said, func(r request) bool { return timed.MatchString(r.text) })
}

// write writes what was said, in the order of each connection, or sorted.
func write(out *strings.Builder, title string, sorted bool, said []request) {
	fmt.Fprintf(out, "# %s\n", title)
	slices.SortStableFunc(said, func(a, b request) int { return a.conn - b.conn })
	if sorted {
		slices.SortFunc(said, func(a, b request) int { return strings.Compare(a.text, b.text) })
	}
	written := make(map[request]bool)
	for _, r := range said {
		if !written[r] {
			fmt.Fprintln(out, r.conn, r.text)
		}
		written[r] = true
	}
	fmt.Fprintln(out)
}
