//go:build unix

package model

// sound are the features that the short form uses. The long form uses all. Left out are clusters:
// three nats-servers take too long to start for the normal test run.
var sound = []string{"pause", "topics", "ttl", "deaf", "corrless"}
