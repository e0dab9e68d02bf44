package main

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
)

// release is the version of a release. The release build sets it with the linker.
var release string

// versionCmd is `eventhub version`.
type versionCmd struct{}

// Run prints the versions of eventhub, Go, and NATS.
func (versionCmd) Run(std streams) error {
	version, revision := cmp.Or(release, "unknown"), ""
	modules := map[string]string{}
	if info, ok := debug.ReadBuildInfo(); ok {
		version = cmp.Or(release, info.Main.Version)
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
