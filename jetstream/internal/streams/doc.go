// Package streams has the topics of a bus, and the streams and buckets of JetStream behind them. It
// makes these when a topic is first used, by the rules of topics, and refuses what only has their
// names.
//
// [New] makes the [Streams] of a bus. [Streams.Topic] returns a [Topic], whose [Stream] may hold
// other topics too; [Streams.Existing] and [Streams.Readable] make nothing. What stands above the
// streams is told of them, and asked, by [Hooks].
package streams
