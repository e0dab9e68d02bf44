package outbox

import "time"

// NeverStalls keeps topics from stalling, so that a test may hold publishes up. Call NeverStalls
// before Start.
func NeverStalls(d *Drainer) { d.stallAfter = time.Hour }
