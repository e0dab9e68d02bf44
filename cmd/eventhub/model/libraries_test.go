//go:build unix

package model

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/coder/websocket"

	eventhub "eventhub/sdk/go"
	"eventhub/sdk/sdktest"
)

// tap stands between a client library and the hubs, and takes each frame down. Each connection goes
// to any hub.
type tap struct {
	rig   *rig
	count *counters
	name  string // of the client
	web   *httptest.Server

	mu  sync.Mutex
	rnd *rand.Rand
}

func startTap(r *rig, rnd *rand.Rand, count *counters, name string) *tap {
	p := &tap{rig: r, count: count, name: name, rnd: rnd}
	p.web = httptest.NewServer(p)
	return p
}

func (p *tap) url() string { return "ws" + strings.TrimPrefix(p.web.URL, "http") }

func (p *tap) anyHub() *hub {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rig.hubs[p.rnd.IntN(len(p.rig.hubs))]
}

// ServeHTTP passes the frames of one connection on, until either side ends it.
func (p *tap) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	client, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
	if err != nil {
		return
	}
	defer func() { _ = client.CloseNow() }()
	client.SetReadLimit(1 << 22)
	ctx, cancel := context.WithCancel(context.WithoutCancel(r.Context()))
	defer cancel()
	h := p.anyHub()
	hub, err := dialHub(p.rig.rec, int(p.count.conns.Add(1)), h.addr, h.name+" by="+p.name, false, func(text []byte) {
		_ = client.Write(ctx, websocket.MessageText, text) // the reader below notices
	})
	if err != nil {
		_ = client.Close(websocket.StatusTryAgainLater, "")
		return
	}
	stop := make(chan struct{})
	go func() {
		defer close(stop)
		<-hub.ended
		_ = client.CloseNow()
	}()
	for {
		_, text, err := client.Read(ctx)
		if err != nil {
			break
		}
		hub.pass(text)
	}
	hub.end(endHalf)
	select {
	case <-hub.ended:
	case <-time.After(20 * time.Second):
		_ = hub.tcp.Close() // that the hub does not end it is the rules' business
	}
	<-stop
}

// pass takes a frame down that another client made, and writes it.
func (c *wsConn) pass(message []byte) {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.rec.add(c.number, kindSent, string(bytes.ReplaceAll(message, []byte("\n"), []byte(" "))))
	c.write(opText, message)
}

// goClient is a program with the Go client.
func (r *rig) goClient(ctx context.Context, rnd *rand.Rand, count *counters) {
	p := startTap(r, rnd, count, "go")
	defer p.web.Close()
	hub, err := eventhub.New(p.url(), eventhub.Options{
		Token: password, MinPause: 20 * time.Millisecond, MaxPause: 300 * time.Millisecond, DrainTimeout: 2 * time.Second,
		OnError: func(err error) { r.rec.add(0, kindNote, fmt.Sprintf("go: %v", err)) },
	})
	if err != nil {
		r.Error(err)
		return
	}
	var lanes sync.WaitGroup
	for _, g := range r.plan.groups[:2] {
		lanes.Go(func() {
			for ctx.Err() == nil {
				_, err := hub.Subscribe(ctx, g.topics[0], g.name, eventhub.SubscribeOptions{From: g.from, Concurrency: 4, AckTimeout: 3 * time.Second, MaxAttempts: new(int)},
					func(ctx context.Context, d *eventhub.Delivery) error {
						r.rec.add(0, kindSaw, asJSON(saw{Client: "go", Topic: d.Topic, Group: d.Group, ID: d.ID, Attempt: d.Attempt}))
						wait(ctx, time.Duration(rand.IntN(150))*time.Millisecond)
						if rand.IntN(8) == 0 {
							return errors.New("refused by a handler")
						}
						return nil
					})
				if err == nil {
					return // it stays a member over reconnects
				}
				wait(ctx, 200*time.Millisecond)
			}
		})
	}
	topics := make(chan string)
	for range 3 {
		lanes.Go(func() {
			for topic := range topics {
				n := count.payloads.Add(1)
				id, err := hub.Publish(ctx, topic, json.RawMessage(fmt.Sprintf(`{"n":%d}`, n)), eventhub.PublishOptions{Key: "host:" + strconv.Itoa(int(n%5))})
				if err == nil {
					r.rec.add(0, kindSaw, asJSON(saw{Client: "go", Topic: topic, ID: id, N: int(n)}))
				}
			}
		})
	}
	for ctx.Err() == nil {
		select {
		case topics <- r.plan.topics[rand.IntN(len(r.plan.topics))]:
			wait(ctx, time.Duration(rand.IntN(100))*time.Millisecond)
		case <-ctx.Done():
		}
	}
	close(topics)
	lanes.Wait()
	_ = hub.Close()
}

// sdkBuilt compiles the TypeScript client, unless that was done before. testdata/driver.mjs imports
// it from its place.
var sdkBuilt = sync.OnceValue(func() error {
	return sdktest.Build(context.Background(), filepath.FromSlash("../../../sdk"))
})

// tsClient is a program with the TypeScript client in a process of Node: testdata/driver.mjs.
func (r *rig) tsClient(ctx context.Context, rnd *rand.Rand, count *counters) {
	p := startTap(r, rnd, count, "ts")
	defer p.web.Close()
	type member struct {
		Topic string `json:"topic"`
		Group string `json:"group"`
		From  string `json:"from"`
	}
	told := struct {
		URL     string   `json:"url"`
		Token   string   `json:"token"`
		Topics  []string `json:"topics"`
		Members []member `json:"members"`
		First   int      `json:"first"` // the number of its first publish
	}{p.url(), password, r.plan.topics, nil, 10_000_000}
	for _, g := range r.plan.groups[:2] {
		told.Members = append(told.Members, member{g.topics[0], g.name, g.from})
	}
	cmd := exec.Command("node", filepath.FromSlash("testdata/driver.mjs"), asJSON(told))
	cmd.Stderr = r.Output()
	in, err := cmd.StdinPipe()
	if err != nil {
		r.Error(err)
		return
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		r.Error(err)
		return
	}
	if err := cmd.Start(); err != nil {
		r.Error(err)
		return
	}
	stop := context.AfterFunc(ctx, func() { _ = in.Close() })
	defer stop()
	kill := context.AfterFunc(ctx, func() { time.AfterFunc(patience, func() { _ = cmd.Process.Kill() }) })
	defer kill()
	for lines := bufio.NewReader(out); ; {
		line, err := lines.ReadString('\n')
		if line = strings.TrimSpace(line); line != "" {
			if note, ok := strings.CutPrefix(line, "note "); ok {
				r.rec.add(0, kindNote, "ts: "+note)
			} else {
				r.rec.add(0, kindSaw, line)
			}
		}
		if err != nil {
			break
		}
	}
	_, _ = io.Copy(io.Discard, out)
	if err := cmd.Wait(); err != nil {
		r.Errorf("the driver of the TypeScript client: %v", err)
	}
}
