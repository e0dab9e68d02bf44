package main

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
)

// versionCmd is `eventhub version`.
type versionCmd struct{}

// Run prints the versions of eventhub, Go, and NATS.
func (versionCmd) Run(std streams) error {
	version, revision := "unknown", ""
	modules := map[string]string{}
	if info, ok := debug.ReadBuildInfo(); ok {
		version = info.Main.Version
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				revision = " (" + s.Value + ")"
			}
		}
		for _, dep := range info.Deps {
			modules[dep.Path] = dep.Version
		}
	}
	_, err := fmt.Fprintf(std.out, "eventhub %s%s\n%s %s/%s\nnats-server %s\nnats.go %s\n", version, revision,
		strings.Replace(runtime.Version(), "go", "go ", 1), runtime.GOOS, runtime.GOARCH,
		modules["github.com/nats-io/nats-server/v2"], modules["github.com/nats-io/nats.go"])
	return err
}
