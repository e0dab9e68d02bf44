package jetstream

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/embedded"
	"eventhub/jetstream/event"
	"eventhub/jetstream/natstest"
)

// restarts is an Observer that counts restarts of the embedded server.
type restarts struct {
	event.NopObserver
	n chan struct{}
}

func (r *restarts) ServerRestarted() { r.n <- struct{}{} }

// Some failures of the disk make the embedded server end JetStream. The hub starts the server
// again, on the same port: members and native clients go on, what was leased comes again at once,
// what was refused with a delay when that is over.
func TestEmbeddedServerThatStoredNoMoreIsRestarted(t *testing.T) {
	t.Parallel()
	for name, how := range map[string]func(*embedded.Config){"in process": func(*embedded.Config) {}, "listening": natstest.Listening("t")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seen := &restarts{n: make(chan struct{}, 10)}
			server := natstest.Embed(t, t.TempDir(), how, func(c *embedded.Config) { c.StorageCheck = 20 * time.Millisecond })
			b := open(t, Config{Server: server, Observer: seen})
			publishAll(t, b, "again", numbers(6)...)
			k := take(t, b, "again", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: 4})
			for i := range 4 {
				d := k.next()
				switch i {
				case 0:
					if err := d.Ack(); err != nil {
						t.Fatal(err)
					}
				case 1:
					if err := d.Nack("later", 4*time.Second); err != nil {
						t.Fatal(err)
					}
				}
			}
			refused := time.Now()
			var nc *nats.Conn
			var native *nats.Subscription
			back := make(chan struct{}, 1)
			if server.ClientURL() != "" {
				var err error
				nc, err = nats.Connect(b.Admin().NATS().URL(), nats.Token("t"), nats.ReconnectWait(50*time.Millisecond), nats.MaxReconnects(-1),
					nats.ReconnectHandler(func(*nats.Conn) { back <- struct{}{} }))
				if err != nil {
					t.Fatal(err)
				}
				defer nc.Close()
				if native, err = nc.SubscribeSync("event.again"); err != nil {
					t.Fatal(err)
				}
			}
			url := b.Admin().NATS().URL()
			// the server writes the state of consumers down ten times a second
			<-time.After(300 * time.Millisecond)

			if err := server.NATS().ShutdownJetStream(); err != nil {
				t.Fatal(err)
			}
			select {
			case <-seen.n:
			case <-time.After(wait):
				t.Fatal("the server was not restarted")
			}
			eventually(t, "it is ready", func() bool { return b.Ready(t.Context()) == nil })
			if got := b.Admin().NATS().URL(); got != url {
				t.Errorf("it is reached at %s, it was at %s", got, url)
			}
			got := k.payloads(4)
			slices.Sort(got)
			if !slices.Equal(got, []string{"2", "3", "4", "5"}) {
				t.Errorf("at first came %q", got)
			}
			if native != nil {
				select { // its subscription is with the server again
				case <-back:
				case <-time.After(wait):
					t.Fatal("the native client is not connected again")
				}
				if err := nc.Flush(); err != nil {
					t.Fatal(err)
				}
				publishAll(t, b, "again", `"heard"`)
				if m, err := native.NextMsg(wait); err != nil || string(m.Data) != `"heard"` {
					t.Errorf("the native client got %v, %v", m, err)
				}
				k.payloads(1)
			}
			if got := k.payloads(1); got[0] != "1" || time.Since(refused) < 3*time.Second {
				t.Errorf("then came %q, %v after the refusal", got, time.Since(refused))
			}
			if len(seen.n) > 0 {
				t.Error("it was restarted twice")
			}
		})
	}
}

// While nothing can be written the server is left alone, and a bus that closes does not wait for a
// disk.
func TestNoRestartWithoutRoom(t *testing.T) {
	t.Parallel()
	seen := &restarts{n: make(chan struct{}, 10)}
	dir := t.TempDir()
	server := natstest.Embed(t, dir, func(c *embedded.Config) { c.StorageCheck = 5 * time.Millisecond })
	b := open(t, Config{Server: server, Observer: seen})
	// The check of the room cannot write where a directory is.
	if err := os.Mkdir(filepath.Join(dir, "nats", "room.check"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "nats", "room.check", "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := server.NATS().ShutdownJetStream(); err != nil {
		t.Fatal(err)
	}
	var failed *StorageError
	eventually(t, "it is not ready", func() bool {
		// a server without JetStream does not answer
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		var ok bool
		failed, ok = errors.AsType[*StorageError](b.Ready(ctx))
		return ok
	})
	if want := "the streams cannot be written: is a directory"; failed.Error() != want {
		t.Errorf("it says %q, want %q", failed, want)
	}
	<-time.After(100 * time.Millisecond) // some checks
	if len(seen.n) > 0 {
		t.Error("the server was restarted")
	}
}
