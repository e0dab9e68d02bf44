//go:build unix

package main

import (
	"strings"
	"testing"

	"eventhub/sdk/go/wire"
)

// whenAsked does something when a command waits for an answer, and then answers yes.
type whenAsked struct {
	do     func()
	answer strings.Reader
}

func (a *whenAsked) Read(p []byte) (int, error) {
	if a.do != nil {
		a.do()
		a.do = nil
		a.answer.Reset("yes\n")
	}
	return a.answer.Read(p)
}

// Commands that destroy remove no more than what they have shown: what comes while they ask stays.
func TestNoMoreIsDestroyedThanWasShown(t *testing.T) {
	t.Parallel()
	hub := startNode(t)
	c := hub.dial()
	publish := func(topic string, n int) {
		for range n {
			if _, err := c.Publish(t.Context(), topic, []byte(`{"n":1}`), wire.PublishOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	flags := opsFlags{OpsURL: hub.ops, credentialFlags: credentialFlags{Token: nodeToken}}
	publish("orders", 3)
	publish("dlq.orders", 3) // no hub wrote them, and they are discarded all the same
	for _, tt := range []struct {
		name, topic, did string
		run              func(std streams) error
	}{
		{"discard", "dlq.orders", "discarded 3 dead letters\n", func(std streams) error {
			cmd := &dlqDiscardCmd{changeFlags: changeFlags{letterFlags: letterFlags{opsFlags: flags}, Topic: "orders", All: true}}
			return cmd.Run(t.Context(), std)
		}},
		{"purge", "orders", "removed 3 events of orders, 2 are left\n", func(std streams) error {
			cmd := &topicsPurgeCmd{destroyFlags: destroyFlags{topicFlags: topicFlags{opsFlags: flags, Topic: "orders"}}, All: true}
			return cmd.Run(t.Context(), std)
		}},
	} {
		var out, asked strings.Builder
		if err := tt.run(streams{in: &whenAsked{do: func() { publish(tt.topic, 2) }}, out: &out, err: &asked}); err != nil || !strings.HasPrefix(out.String(), tt.did) {
			t.Errorf("%s: %q, %v; it asked %q", tt.name, out.String(), err, asked.String())
		}
	}
}

// A redrive or discard of a topic that does not exist fails. A topic without dead letters is none
// of these.
func TestRedriveOfAnUnknownTopic(t *testing.T) {
	t.Parallel()
	hub := startNode(t)
	if _, err := hub.dial().Publish(t.Context(), "known", []byte(`1`), wire.PublishOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		topic string
		works bool
	}{{"known", true}, {"unknown", false}} {
		flags := changeFlags{letterFlags: letterFlags{opsFlags: opsFlags{OpsURL: hub.ops, credentialFlags: credentialFlags{Token: nodeToken}}}, Topic: tt.topic, All: true}
		for what, run := range map[string]func(streams) error{
			"redriven 0": func(std streams) error {
				return (&dlqRedriveCmd{changeFlags: flags, To: "group"}).Run(t.Context(), std)
			},
			"redriven 0 ": func(std streams) error {
				return (&dlqRedriveCmd{changeFlags: flags, To: "topic"}).Run(t.Context(), std)
			},
			"discarded 0": func(std streams) error {
				return (&dlqDiscardCmd{changeFlags: flags, yesFlag: yesFlag{Yes: true}}).Run(t.Context(), std)
			},
		} {
			var out, said strings.Builder
			err := run(streams{in: strings.NewReader(""), out: &out, err: &said})
			switch {
			case tt.works && (err != nil || !strings.HasPrefix(out.String(), what)):
				t.Errorf("%s of a topic without letters: %q, %v", what, out.String(), err)
			case !tt.works && (err == nil || !strings.Contains(err.Error(), "There is no topic unknown") || out.String() != ""):
				t.Errorf("%s of an unknown topic: %q, %v", what, out.String(), err)
			}
		}
	}
}
