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
// subsets. The history of a failing seed, and its timeline as SVG, are written to -model.log, or
// otherwise to the artifact directory of the test, which -artifacts keeps. -model.check
// applies the rules again to the histories whose names fit its pattern, draws those that break one,
// and prints what clients saw of each fault. The table in allowances_test.go lists what the rules
// excuse after each fault.
//
// # Faults
//
// -model.faults takes these names, and a seed that fails prints the command that repeats it:
//
//	kill, stop      a hub or a node ends by SIGKILL, or in good order, and comes back
//	freeze          a hub or a node stands still by SIGSTOP
//	delay           the links of a hub hold all bytes back, or are slow
//	stepdown, meta  the leader of a stream, of a consumer, or of the cluster hands over
//	partition       a node is apart from the others, or a hub from one node
//	oneway          the same in one direction, or a hub from all nodes
//	slowroute       what a node and the others say to each other comes later
//	diskfull        the disk of a node is full, then larger, and the node starts again
//	diskslow        a node stands still for up to half a second again and again
//	diskloss        a node is killed, and comes back with an empty disk
//	jump            the clock of a hub goes forward by seconds
//	rollhubs        all hubs end in good order and come back, one after the other
//	rollnodes       the same for nodes; with -model.old they change their version
//	silent          a member takes events, and neither settles them nor leaves
//
// Links are proxies in the harness. A link that holds bytes back keeps its connections, as a
// network does that loses all packets. A hub's time of leases is monotonic, so changes of its
// wall clock cannot move a lease; the clocks of nodes are not moved. A slow disk is a slow
// node, because no file system here delays single writes. -model.cluster runs all seeds beside
// three nodes.
//
// # Clients
//
// Most clients speak the protocol over WebSockets of their own. The others are members of the same
// groups and write the same history:
//
//   - "native" speaks NATS with package jetstream/native. Its history has the frames that a
//     WebSocket would have had, without the times at which a hub wrote them.
//   - "http" pulls, and reads server-sent events. It settles by handles, at any hub.
//   - "go" and "ts" are programs with the client libraries. They connect through a tap, which
//     takes down each frame and passes it on to any hub. The rule "handlers" compares what the
//     programs saw with what came to their connections. The TypeScript client runs in Node.
//   - "reads" asks for cursors, the newest events of keys, and replays.
//   - "projection" and "outbox" run in the hubs: a projection, which is compared with the fold of
//     its topic at the end, and a drainer of a table in SQLite, in which some transactions are
//     rolled back.
//
// One or two groups of each seed are ordered, unless -model.with leaves out "ordered". Clients with
// WebSockets are their members, and read ASSIGN and event.partition.
//
// # Ordered groups
//
// Two rules are about ordered groups. "keys" wants one lease at a time of the events of a key, and
// no event before all that are stored before it with its key may have been settled. It also wants a
// slot to go to another member only when its last lease has ended. "slots" wants event.partition to
// be the hash of the key, ASSIGN before the first event of a slot, epochs that rise at each member,
// and each slot in one hand. An old member may hear a little later than the new one that a slot has
// moved: the bound is that of -model.tolerance.
//
// Clients cannot see which hub gives out the events of a group. So what excuses the end of leases
// on a hub excuses it on all hubs of an ordered group, if the hub had a member before. A hub that
// has had no members of the group for 10 s hands over, which excuses the same. The rule "hoarded"
// looks at a key only when the events before are surely settled, at the member that was told of the
// slot, while no other event of the slot is leased. After the end of a fault that ends leases or
// leaves consumers without a leader, it leaves out 10 s and AckWait, which other hubs wait for. The
// count of attempts has no more excuses than for other groups.
//
// # Soak
//
// TestSoak runs the program beside three nats-servers for long, with the faults above but for those
// of clocks and full disks:
//
//	go test ./cmd/eventhub/model -run '^TestSoak$' -soak.for=20m -soak.seed=7 -v -timeout 0
//
// It measures how many events a second two groups on each of two topics follow, over WebSockets,
// and goes on with half of that; its short form, of 2 s, has a fixed rate. Clients come and go
// meanwhile: members of the same groups that leave in good order, that break off while they hold
// events, that read server-sent events, and that pull. The seed selects a hub and a node whose
// processes no fault ends, so that there are long lives to look at.
//
// A ledger of bounded memory numbers the events of each publisher. Each confirmed event must come
// to each group, and after each fault the groups must catch up within 90 s. Samples of all
// processes say what they need: memory, goroutines, files and threads. The rule for leaks compares
// an earlier quarter of each life with the last one (soak_flat_test.go). The hub that lived through
// must also be at the end, without clients, as it was before. The leaks of testdata/leaks try the
// rule with -soak.leak=NAME.
//
// With -soak.keep, a run that passes adds a piece to testdata/soak, and -soak.draw draws all of
// them.
//
// # Mutations
//
// The rules are tried with hubs that are broken on purpose. Each file of testdata/mutations says
// what is wrong with a hub, and has the edits that make it so. TestMutations wants each edit to fit
// the source, and with -mutations builds the model with each of them and wants TestModel to find
// it:
//
//	go test ./cmd/eventhub/model -run '^TestMutations$' -v -timeout 0 -mutations=.
//
// RELIABILITY.md has the table of what found which mutation, and when. Two more faults were not
// found in four seeds of 20 s, and are not among the files. A hub that counts an unwritten event as
// failed shows only if a client with a full socket is lost at that moment. A group that continues
// one event too far after the loss of its consumer shows only if the consumer is lost while that
// very event is unsettled.
package model
