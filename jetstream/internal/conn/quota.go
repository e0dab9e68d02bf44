package conn

import (
	"fmt"
	"strings"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/quota"
)

// NewRefill is how long a client waits for one more new topic, or one more new group, once it has
// made Limits.TopicsPerClient or Limits.GroupsPerClient.
const NewRefill = 10 * time.Second

// OwnClient begins the names of clients that nobody named. No name that is given begins with it.
const OwnClient = "\x00"

// Ration counts what clients bring into being. Only those clients are held that made something not
// long ago.
type Ration struct {
	obs   event.Observer
	limit string // its name
	what  string
	burst int
	set   *quota.Set
}

// NewRation makes a ration of burst things at once for each client, and then one every NewRefill,
// of at most so many clients. limit is its name for the observer.
func NewRation(obs event.Observer, limit, what string, burst, clients int) *Ration {
	return &Ration{obs: obs, limit: limit, what: what, burst: burst, set: quota.New(1/NewRefill.Seconds(), burst, clients, nil)}
}

// Take counts one thing that the client is about to bring into being, or returns the refusal. "" is
// the hub itself, which has no ration.
func (r *Ration) Take(client string) error {
	if client == "" {
		return nil
	}
	wait := r.set.Take(client)
	if wait == 0 {
		return nil
	}
	r.obs.LimitReached(r.limit)
	return &event.Error{Code: event.CodeRateLimited, Msg: fmt.Sprintf("this client has made %d new %s, which is its limit: one more is allowed every %v", r.burst, r.what, NewRefill), Wait: wait}
}

// Rationed reports whether a client has rations and a count of its own: "", which is the hub
// itself, and clients that nobody named have none.
func Rationed(client string) bool { return client != "" && !strings.HasPrefix(client, OwnClient) }
