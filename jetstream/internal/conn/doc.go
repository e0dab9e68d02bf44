// Package conn has the connections of a bus to NATS, and what every part of the bus asks over them:
// questions with an answer, requests of JetStream that are repeated while a stream has no leader,
// single messages, direct gets, and messages in order. It knows of no topic and no group.
//
// A [Pool] has the links, the clock, and the life of the bus, from [New] to [Pool.Close]. A [Link]
// is one connection, over which [Link.Ask] sends a question. What stands above the links is told of
// them by [Hooks].
package conn
