//go:build unix

package model

// sound are the features that the short form uses. The long form uses all, and chooses seed by seed
// whether there is a cluster.
var sound = []string{"pause", "topics", "ttl", "deaf", "corrless", "tombstones", "reads", "projection", "outbox", "http", "native", "go", "ordered"}

// clusterSound are those of the short form's cluster.
var clusterSound = []string{"pause", "topics", "ttl", "deaf", "corrless", "ordered"}

// clusterShort are the faults of the short form's cluster: each is over soon.
var clusterShort = []string{"kill", "stepdown", "meta", "partition", "oneway", "diskfull", "diskloss", "jump", "silent"}
