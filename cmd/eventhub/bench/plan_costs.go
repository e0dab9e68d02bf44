package bench

// unitCosts are the constants of the model of docs/sizing/scale.md.
type unitCosts struct {
	// A hub: resident memory in KiB, goroutines, and idle CPU of 1,000 connections in percent of a
	// core. Member is a further subscription to a group that has a member on the hub.
	hubKiBEmpty, hubKiBConnection, hubKiBTopic, hubKiBGroup, hubKiBMember    float64
	goroutinesEmpty, goroutinesConnection, goroutinesGroup, goroutinesMember float64
	hubCPUThousand                                                           float64
	// A nats-server with one copy of each stream.
	natsKiBEmpty, natsKiBTopic, natsKiBGroup, natsKiBMember float64
	// A stream or group with three copies: KiB on each server, and idle CPU of all three servers in
	// percent of a core. subjectKiB is a topic within a family.
	replicatedKiBAsset, replicatedCPUAsset, subjectKiB float64
	// CPU time of an event beside a cluster with three copies, in µs.
	hubMicrosPublished, hubMicrosDelivered, natsMicrosPublished, natsMicrosDelivered float64
}

// measuredCosts are the constants that were measured. docs/sizing/scale.md says how.
var measuredCosts = unitCosts{
	hubKiBEmpty: 36_700, hubKiBConnection: 27.8, hubKiBTopic: 32, hubKiBGroup: 34.4, hubKiBMember: 15.9,
	goroutinesEmpty: 77, goroutinesConnection: 2, goroutinesGroup: 1, goroutinesMember: 1,
	hubCPUThousand: 0.55,
	natsKiBEmpty:   28_600, natsKiBTopic: 70.8, natsKiBGroup: 114,
	replicatedKiBAsset: 160, replicatedCPUAsset: 0.026, subjectKiB: 0.3,
	hubMicrosPublished: 160, hubMicrosDelivered: 160, natsMicrosPublished: 320, natsMicrosDelivered: 320,
}
