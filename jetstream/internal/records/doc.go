// Package records keeps what hubs note about groups, in buckets that they share: which consumer a
// group is, how far it was, who made it, what it has lost, its bookmarks, and which deliveries
// count for no attempt. A group outlives its consumer, its hub and its server by these records.
//
// [New] makes the [Records] of a bus. [Records.Generation] and [Records.Swap] read and replace, by
// compare-and-set, which consumer a group is; [Records.Follow] hears of what others replace, and
// calls [Hooks]. [Turn] has moves and removals wait for one another, and [Records.AskHubs] asks
// other hubs what they hold.
package records
