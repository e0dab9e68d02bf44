// Package model holds a randomized model checker of the hub, which is a test.
//
// TestModel runs hubs and nats-servers in processes of their own, lets clients do at random what the protocol allows, and
// injects faults. It keeps a history of every frame with the times between which it was on its way, and then asks the
// rules whether the history could have come from a hub that keeps its promises (protocol.md, section 3). The rules are pure
// functions of a history, so TestRules tries each with small histories, legal and illegal.
//
//	go test ./cmd/eventhub/model -run TestModel -model.seed=7 -model.for=60m -v -timeout 0
//
// A history of a failing seed is written to -model.log, or else to the directory for artifacts of the test;
// -model.check=FILE asks the rules about it once more. What the rules excuse after which fault is one table, in
// allowances_test.go; what today's hub is known to break is another, in known_test.go.
package model
