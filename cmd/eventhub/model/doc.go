// Package model holds a randomized model checker of the hub, which is a test.
//
// TestModel runs hubs and nats-servers in processes of their own, lets clients do at random what the protocol allows, and
// injects faults. It keeps a history of every frame with the times between which it was on its way, and then asks the
// rules whether the history could have come from a hub that keeps its promises (protocol.md, section 3). The rules are pure
// functions of a history, so TestRules tries each with small histories, legal and illegal.
//
//	go test ./cmd/eventhub/model -run '^TestModel$' -model.seed=7 -model.for=60m -v -timeout 0
//
// A seed stands for the machines, the groups, and the decisions of clients and of the injector; when which of them meets
// which event differs from run to run. -model.faults and -model.with choose subsets. A history of a failing seed is written to
// -model.log, or else to the directory for artifacts of the test (-artifacts keeps it); -model.check=FILE asks the rules
// about it once more. What the rules excuse after which fault is one table, in allowances_test.go.
//
// # What is found
//
// The rules were tried with hubs that were broken on purpose. The time is that of the first seed that showed it, with
// starting and draining, on a busy machine with two cores; "long" are seeds with -model.active of 20 s or more.
//
//	an event is acknowledged when it is written               lost                9 s
//	every tenth refusal is not sent to NATS                   hoarded             27 s, the second seed
//	leases do not expire                                      letters, lost       10 s
//	leases end after nine tenths of their time                holder, inflight    10 s
//	MODACK is answered and does nothing                       holder, acked       10 s
//	leases of a lost client are not given back                hoarded             12 s
//	the attempt is one less                                   attempts            10 s
//	dead letters at the attempt before the last               letters             10 s
//	no dead letter at expiry                                  letters             22 s, long
//	UNSUBSCRIBE dead-letters                                  letters             20 s, the second seed
//	OK to a PUBLISH before the stream's ack, and a kill       stored, lost        40 s
//	one of 16 publishes is sent 5 ms later                    order               10 s
//	one more than maxInFlight                                 inflight            10 s
//	a late ACK settles another's delivery                     lost                65 s, long, the third seed
//	an ACK of many ids settles the first only                 acked               10 s
//	PAUSE is answered and does nothing                        frames              22 s, long
//	no fence after a standstill (freeze)                      lost, holder        48 s, long, the second seed
//	in-progress is never sent                                 holder              22 s, long
//	NACK's delay_ms is halved                                 backoff             10 s
//
// Not found in a minute: that what was fetched and not written counts as a failed delivery. It takes a client with a full
// socket that is lost just then.
package model
