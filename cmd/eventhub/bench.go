package main

import (
	"fmt"
	"os"

	"github.com/alecthomas/kong"

	"eventhub/cmd/eventhub/bench"
)

// benchCmd is `eventhub bench`.
type benchCmd struct {
	bench.Commands
}

// AfterApply gives the benchmarks access to the output streams and to token lookup.
func (cmd *benchCmd) AfterApply(call *kong.Context, std streams) error {
	env := bench.Env{
		Out: std.out, Err: std.err,
		FindToken: func(url, given, data string) (string, error) {
			return hubFlags{URL: url, credentialFlags: credentialFlags{Token: given, Data: data}}.token()
		},
	}
	if f, ok := std.err.(*os.File); ok {
		info, err := f.Stat()
		if err != nil {
			return fmt.Errorf("standard error: %w", err)
		}
		env.Progress = info.Mode()&os.ModeCharDevice != 0
	}
	call.Bind(env, &cmd.Target)
	return nil
}
