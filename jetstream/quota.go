package jetstream

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/quota"
)

// newRefill is how long a client waits for one more new topic, or one more new group, once it has
// made Limits.TopicsPerClient or Limits.GroupsPerClient.
const newRefill = 10 * time.Second

// ownClient begins the names of clients that nobody named. No name that is given begins with it.
const ownClient = "\x00"

// ration counts what clients bring into being. Only those clients are held that made something not
// long ago.
type ration struct {
	core  *core
	limit string // its name
	what  string
	burst int
	set   *quota.Set
}

// newRation makes a ration of burst things at once for each client, and then one every newRefill.
func newRation(c *core, limit, what string, burst int) *ration {
	return &ration{core: c, limit: limit, what: what, burst: burst, set: quota.New(1/newRefill.Seconds(), burst, c.limits.Topics, nil)}
}

// take counts one thing that the client is about to bring into being, or returns the refusal. "" is
// the hub itself, which has no ration.
func (r *ration) take(client string) error {
	if client == "" {
		return nil
	}
	wait := r.set.Take(client)
	if wait == 0 {
		return nil
	}
	r.core.obs.LimitReached(r.limit)
	return &event.Error{Code: event.CodeRateLimited, Msg: fmt.Sprintf("this client has made %d new %s, which is its limit: one more is allowed every %v", r.burst, r.what, newRefill), Wait: wait}
}

// rationed reports whether a client has rations and a count of its own: "", which is the hub
// itself, and clients that nobody named have none.
func rationed(client string) bool { return client != "" && !strings.HasPrefix(client, ownClient) }

// unnamed is a name for a client that nobody named.
func (p *publishing) unnamed() string {
	return ownClient + strconv.FormatUint(p.clients.Add(1), 36)
}
