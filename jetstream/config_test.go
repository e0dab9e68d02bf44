package jetstream

import (
	"strings"
	"testing"

	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

func TestConfigRefusesRules(t *testing.T) {
	t.Parallel()
	alone := natstest.Embed(t, t.TempDir())
	if err := (&Config{Server: alone}).validate(); err != nil {
		t.Fatal(err)
	}
	faulty := []topics.Rule{{Pattern: "a.**"}, {Pattern: "a"}}
	if err := (&Config{Server: alone, Topics: faulty}).validate(); err == nil || !strings.Contains(err.Error(), "never used") {
		t.Errorf("rules with a fault: %v", err)
	}
	copied := []topics.Rule{{Pattern: "a", Replicas: 3}}
	if err := (&Config{Server: alone, Topics: copied}).validate(); err == nil || !strings.Contains(err.Error(), "needs a cluster") {
		t.Errorf("3 replicas on one server: %v", err)
	}
	if err := (&Config{URL: "nats://127.0.0.1:1", Topics: copied}).validate(); err != nil {
		t.Errorf("3 replicas in a cluster: %v", err)
	}
}
