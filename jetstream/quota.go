package jetstream

import (
	"strconv"
	"time"

	"eventhub/jetstream/quota"
)

// topicRefill is how long a client waits for one more new topic, once it has made
// Limits.TopicsPerClient.
const topicRefill = 10 * time.Second

// ownClient begins the names of clients that nobody named. No name that is given begins with it.
const ownClient = "\x00"

// newTopicQuota counts the topics that clients bring into being. Only those are held that made one
// not long ago, so there cannot be many more of them than topics.
func newTopicQuota(l Limits) *quota.Set {
	return quota.New(1/topicRefill.Seconds(), l.TopicsPerClient, l.Topics, nil)
}

// mayMake reports whether the client may bring one more topic into being, and counts it. "" is the
// hub itself, which may.
func (b *Bus) mayMake(client string) bool {
	return client == "" || b.made.Take(client) == 0
}

// unnamed is a name for a client that nobody named.
func (b *Bus) unnamed() string {
	return ownClient + strconv.FormatUint(b.clients.Add(1), 36)
}
