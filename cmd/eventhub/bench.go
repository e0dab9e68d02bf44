package main

import (
	"github.com/alecthomas/kong"

	"eventhub/cmd/eventhub/bench"
)

// benchCmd is `eventhub bench`.
type benchCmd struct {
	bench.Commands
}

// AfterApply gives the benchmarks access to the output streams and to token lookup.
func (cmd *benchCmd) AfterApply(call *kong.Context, std streams) error { //nolint:unparam // kong wants an error
	env := bench.Env{
		Out: std.out, Err: std.err,
		FindToken: func(url, given, data string) (string, error) {
			return hubFlags{URL: url, credentialFlags: credentialFlags{Token: given, Data: data}}.token()
		},
	}
	if screen, is := screenOf(std.err); is {
		env.Screen = screen
	}
	call.Bind(env, &cmd.Target)
	return nil
}
