//go:build unix

package model

// sound are the features that the short form uses: those whose promises today's hub is known to keep. The long form uses
// all. Left out are
//   - pause, with which much of what is fetched is given back, so that rule "attempts" is broken at once;
//   - topics: at maxInFlight 1 the hub hoards events of the other topics (rule "hoarded");
//   - corrless: answers without corr do not keep the order of the frames, as a PUBLISH is answered later than an ACK;
//   - ttl: such groups are lost when NATS restarts;
//   - cluster: when a leader steps down, leased events are given away (rule "holder").
var sound = []string{"deaf"}

// known are rules that today's hub is known to break, and that the short form does not ask.
var known = []string{
	"attempts", // what was fetched and is given back unwritten counts as an attempt: PAUSE, UNSUBSCRIBE, a lost connection
}
