// Command natsserver is the nats-server of package natstest as a program of its own. Test binaries
// that are told its path by EVENTHUB_TEST_NATS_SERVER run it in place of themselves, so that the
// race detector, which is for the code under test, does not slow the server down.
package main

import "eventhub/jetstream/natstest"

func main() { natstest.RunChild(nil) }
