//go:build !race || slowrace

package main

import (
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestScripts runs the scripts of testdata/script, which run hundreds of commands. With the race
// detector, a process takes 0.3 s to begin: so they run with the long tests (-tags=slowrace).
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		Setup: func(env *testscript.Env) error {
			env.Values["scene"] = &scene{hubs: make(map[string]*hubProcess)}
			// by default a program with the race detector takes 1 s to end
			env.Setenv("GORACE", "atexit_sleep_ms=20")
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"run":     runCommandOf,
			"hub":     startHub,
			"signal":  signalHub,
			"ended":   hubEnded,
			"logged":  hubLogged,
			"fetch":   fetch,
			"post":    post,
			"oneline": oneLine,
			"mode":    fileMode,
		},
	})
}
