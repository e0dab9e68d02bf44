// Package model contains a randomized model checker of the hub. The checker is a test.
//
// TestModel runs hubs and nats-servers in separate processes, lets clients perform random
// operations of the protocol, and injects faults. It records a history of every frame, with the
// times at which the frame was sent and received. The rules then decide whether a hub that keeps
// its promises (protocol.md, section 3) could have produced the history. The rules are pure
// functions of a history; TestRules checks each rule with small legal and illegal histories.
//
//	go test ./cmd/eventhub/model -run '^TestModel$' -model.seed=7 -model.for=60m -v -timeout 0
//
// A seed determines the machines, the groups, and the decisions of clients and of the fault
// injector. The timing of events differs from run to run. -model.faults and -model.with select
// subsets. The history of a failing seed is written to -model.log, or otherwise to the artifact
// directory of the test, which -artifacts keeps. -model.check=FILE applies the rules to such a
// history again. The table in allowances_test.go lists what the rules excuse after each fault.
//
// # Detected faults
//
// The checker was tried on hubs that were broken on purpose. The table shows the fault, the rules
// that detected it, and the duration of the first seed that did, including startup and drain, on a
// busy machine with two cores. "long" marks seeds with -model.active of at least 20 seconds.
//
//	an event is acknowledged when it is written               lost                9 s
//	every tenth NACK is not sent to NATS                      hoarded             27 s, the second seed
//	leases do not expire                                      letters, lost       10 s
//	leases end after nine tenths of their time                holder, inflight    10 s
//	MODACK is answered and does nothing                       holder, acked       10 s
//	leases of a lost client are not given back                hoarded             12 s
//	the attempt number is one too low                         attempts            10 s
//	dead letters at the attempt before the last               letters             10 s
//	no dead letter at expiry                                  letters             22 s, long
//	UNSUBSCRIBE dead-letters                                  letters             20 s, the second seed
//	OK to a PUBLISH before the stream's ack, and a kill       stored, lost        40 s
//	one of 16 publishes is sent 5 ms later                    order               10 s
//	one lease more than maxInFlight                           inflight            10 s
//	a late ACK settles a later delivery                       lost                65 s, long, the third seed
//	an ACK of many ids settles the first only                 acked               10 s
//	PAUSE is answered and does nothing                        frames              22 s, long
//	no fence after a stall (freeze)                           lost, holder        48 s, long, the second seed
//	in-progress is never sent                                 holder              22 s, long
//	NACK's delay_ms is halved                                 backoff             10 s
//
// One fault was not detected within a minute: counting an event that was fetched but not written as
// a failed delivery. It shows only if a client with a full socket is lost at that moment.
package model
