package check

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/loader"
	"github.com/compose-spec/compose-go/v2/types"
)

func compose(t *testing.T, environment map[string]string) (*types.Project, error) {
	t.Helper()
	return loader.LoadWithContext(t.Context(), types.ConfigDetails{
		WorkingDir: "..", ConfigFiles: []types.ConfigFile{{Filename: "../compose.yaml"}}, Environment: maps.Clone(environment),
	})
}

func TestCompose(t *testing.T) {
	secrets := map[string]string{"HUB_TOKEN": "hub-token", "NATS_TOKEN": "nats-token", "POSTGRES_PASSWORD": "password"}
	project, err := compose(t, secrets)
	if err != nil {
		t.Fatal(err)
	}
	names := project.ServiceNames()
	slices.Sort(names)
	if got := strings.Join(names, " "); got != "hub-1 hub-2 nats-1 nats-2 nats-3 postgres" {
		t.Errorf("the services are %s", got)
	}
	for _, name := range []string{"hub-1", "hub-2"} {
		hub := project.Services[name]
		env := make(map[string]string)
		for name, value := range hub.Environment {
			env[name] = *value
		}
		checkSettings(t, env)
		if !hub.ReadOnly || !slices.Equal(hub.CapDrop, []string{"ALL"}) || hub.Build.Dockerfile != "packaging/Dockerfile" {
			t.Errorf("%s may too much, or is built from %s", name, hub.Build.Dockerfile)
		}
		if env["WS_TOKEN"] != "hub-token" || env["OUTBOX_DSN"] != "postgres://eventhub:password@postgres:5432/eventhub" {
			t.Errorf("%s has %v", name, env)
		}
		for _, server := range []string{"nats-1", "nats-2", "nats-3"} {
			if !strings.Contains(env["NATS_URL"], "nats://nats-token@"+server+":4222") {
				t.Errorf("%s knows %s, not %s", name, env["NATS_URL"], server)
			}
		}
		for _, port := range hub.Ports {
			if port.HostIP != "127.0.0.1" {
				t.Errorf("%s listens at %s for everybody", name, port.Published)
			}
		}
	}
	routes := "--routes=nats://nats-1:6222,nats://nats-2:6222,nats://nats-3:6222"
	for _, name := range []string{"nats-1", "nats-2", "nats-3"} {
		command := project.Services[name].Command
		if !slices.Contains(command, "--server_name="+name) || !slices.Contains(command, routes) || !slices.Contains(command, "--auth=nats-token") {
			t.Errorf("%s runs %v", name, command)
		}
		if len(project.Services[name].Ports) > 0 {
			t.Errorf("%s is open to the host", name)
		}
	}
	for name := range secrets {
		others := make(map[string]string)
		for other, value := range secrets {
			if other != name {
				others[other] = value
			}
		}
		if _, err := compose(t, others); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("set %s, for example", name)) {
			t.Errorf("without %s: %v", name, err)
		}
	}
}
