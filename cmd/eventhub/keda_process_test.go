//go:build unix

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"
	"go.yaml.in/yaml/v3"

	"eventhub/acl"
	"eventhub/jetstream/natstest"
	"eventhub/sdk/go/wire"
)

// The parts of KEDA's types that packaging/keda uses, under their names there. What else is in the
// file is an error.
type (
	kedaMeta struct {
		APIVersion string `yaml:"apiVersion"`
		Kind       string `yaml:"kind"`
		Metadata   struct {
			Name string `yaml:"name"`
		} `yaml:"metadata"`
	}
	kedaAuthentication struct {
		kedaMeta `yaml:",inline"`
		Spec     struct {
			SecretTargetRef []struct {
				Parameter string `yaml:"parameter"`
				Name      string `yaml:"name"`
				Key       string `yaml:"key"`
			} `yaml:"secretTargetRef"`
		} `yaml:"spec"`
	}
	kedaObject struct {
		kedaMeta `yaml:",inline"`
		Spec     struct {
			ScaleTargetRef struct {
				Name string `yaml:"name"`
			} `yaml:"scaleTargetRef"`
			PollingInterval *int32 `yaml:"pollingInterval"`
			MinReplicaCount *int32 `yaml:"minReplicaCount"`
			MaxReplicaCount *int32 `yaml:"maxReplicaCount"`
			Fallback        struct {
				FailureThreshold int32  `yaml:"failureThreshold"`
				Replicas         int32  `yaml:"replicas"`
				Behavior         string `yaml:"behavior"`
			} `yaml:"fallback"`
			Triggers []struct {
				Type              string            `yaml:"type"`
				MetricType        string            `yaml:"metricType"`
				Metadata          map[string]string `yaml:"metadata"`
				AuthenticationRef struct {
					Name string `yaml:"name"`
				} `yaml:"authenticationRef"`
			} `yaml:"triggers"`
		} `yaml:"spec"`
	}
)

// kedaScaler asks as KEDA's metrics-api scaler does.
type kedaScaler struct {
	at       *url.URL
	location string
	token    string
	web      *http.Client
}

// value is what KEDA scales by. An error is one for KEDA, too.
func (s *kedaScaler) value(ctx context.Context) (float64, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.at.String(), http.NoBody)
	if err != nil {
		return 0, err
	}
	r.Header.Add("Authorization", "Bearer "+s.token)
	answer, err := s.web.Do(r)
	if err != nil {
		return 0, err
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("%s: api returned %d", r.URL.Path, answer.StatusCode)
	}
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		return 0, err
	}
	got := gjson.GetBytes(body, s.location)
	if got.Type != gjson.Number {
		return 0, fmt.Errorf("valueLocation %q must point to a numeric value, got %s", s.location, got.Type)
	}
	return got.Num, nil
}

// readKEDA reads packaging/keda, strictly, and returns a scaler of its that asks a hub.
func readKEDA(t *testing.T, hub *node, token string) *kedaScaler {
	t.Helper()
	text, err := os.ReadFile("../../packaging/keda/scaledobject.yaml")
	if err != nil {
		t.Fatal(err)
	}
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	var auth kedaAuthentication
	var object kedaObject
	for _, into := range []any{&auth, &object} {
		if err := d.Decode(into); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Decode(&struct{}{}); !errors.Is(err, io.EOF) {
		t.Errorf("there is more in the file: %v", err)
	}
	spec, trigger := object.Spec, object.Spec.Triggers[0]
	switch {
	case auth.APIVersion != "keda.sh/v1alpha1" || auth.Kind != "TriggerAuthentication" || object.APIVersion != auth.APIVersion || object.Kind != "ScaledObject":
		t.Error("the kinds are wrong")
	case len(auth.Spec.SecretTargetRef) != 1 || auth.Spec.SecretTargetRef[0].Parameter != "token" || auth.Metadata.Name != trigger.AuthenticationRef.Name:
		t.Error("the scaler does not get the token")
	case len(spec.Triggers) != 1 || trigger.Type != "metrics-api" || trigger.Metadata["authMode"] != "bearer" || trigger.Metadata["format"] != "json":
		t.Errorf("the trigger is %+v", trigger)
	case spec.Fallback.Replicas < 1 || spec.Fallback.FailureThreshold < 1 || trigger.MetricType != "AverageValue":
		// KEDA scales to 0 after an error where the fallback is 0, and has none for other metrics
		t.Error("an error of the hub may scale to 0")
	case *spec.MinReplicaCount < 1 || *spec.MinReplicaCount > *spec.MaxReplicaCount || *spec.PollingInterval < 1 || spec.ScaleTargetRef.Name == "":
		t.Error("the counts of replicas are wrong")
	}
	for name := range trigger.Metadata {
		if !strings.Contains(" url format valueLocation targetValue authMode ", " "+name+" ") {
			t.Errorf("the trigger has %s", name)
		}
	}
	if target, err := strconv.ParseFloat(trigger.Metadata["targetValue"], 64); err != nil || target <= 0 {
		t.Errorf("the target is %q", trigger.Metadata["targetValue"])
	}
	at, err := url.Parse(trigger.Metadata["url"])
	if err != nil {
		t.Fatal(err)
	}
	if at.Hostname() != "eventhub-ops.events.svc" || at.Port() != "8082" {
		t.Errorf("the hub is %s", at.Host)
	}
	own, err := url.Parse(hub.ops)
	if err != nil {
		t.Fatal(err)
	}
	at.Host = own.Host
	s := &kedaScaler{at: at, location: trigger.Metadata["valueLocation"], token: token, web: &http.Client{Timeout: patience}}
	t.Cleanup(s.web.CloseIdleConnections)
	return s
}

// of is the scaler with other parameters.
func (s *kedaScaler) of(topic, group, token string) *kedaScaler {
	other := *s
	at := *s.at
	at.RawQuery = url.Values{"topic": {topic}, "group": {group}}.Encode()
	other.at, other.token = &at, token
	return &other
}

// TestKEDA has a hub answer KEDA's scaler as packaging/keda configures it: with the backlog of the
// group, and with errors where nothing is known, never with a number.
func TestKEDA(t *testing.T) {
	t.Parallel()
	server := natstest.Start(t)
	secret := []byte("0123456789abcdef0123456789abcdef")
	file := t.TempDir() + "/secret"
	if err := os.WriteFile(file, secret, 0o600); err != nil {
		t.Fatal(err)
	}
	hub := startNode(t, "--nats-url="+server.URL(), "--jwt-secret-file="+file, "--metrics-access=token")
	sign := func(scopes ...string) string {
		t.Helper()
		token, err := acl.Sign(secret, acl.Grant{Subject: "keda", Scopes: scopes, TTL: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		return token
	}
	const topic, group = "orders.placed", "billing"
	token := sign("inspect:" + topic)
	scaler := readKEDA(t, hub, token)
	v := natstest.Look(t, server.URL())
	wants := func(s *kedaScaler, want ...float64) {
		t.Helper()
		v.Until(fmt.Sprintf("KEDA reads one of %v", want), func(ctx context.Context) bool {
			got, err := s.value(ctx)
			return err == nil && slices.Contains(want, got)
		})
	}
	fails := func(s *kedaScaler, status int) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if got, err := s.value(ctx); err == nil || !strings.HasSuffix(err.Error(), fmt.Sprintf("api returned %d", status)) {
			t.Errorf("KEDA reads %v, %v of %s, want an error with %d", got, err, s.at.RawQuery, status)
		}
	}

	fails(scaler, 404) // neither the topic nor the group exists
	c := hub.dial()
	in := subscribeTo(t, c, topic, group, wire.SubscribeOptions{From: "earliest", MaxInFlight: 2})
	wants(scaler, 0)
	publishNumbers(t, c, topic, 5)
	held := in.take(2)
	wants(scaler, 5) // two of them are in flight
	ackAll(t, held[:1])
	wants(scaler, 4)

	fails(scaler.of(topic, "bill", token), 404)
	fails(scaler.of("orders.paid", group, sign("inspect:orders.*")), 404)
	fails(scaler.of("orders.paid", group, token), 403)
	fails(scaler.of(topic, group, sign("publish:**")), 403)
	fails(scaler.of(topic, group, "none"), 401)
	fails(scaler.of(topic, "", token), 400)
	other := *scaler
	other.location = "backlogs"
	if got, err := other.value(t.Context()); err == nil {
		t.Errorf("KEDA reads %v where there is nothing", got)
	}

	server.Kill()
	fails(scaler, 503)
	server.Start()
	wants(scaler, 4, 5) // a server that is killed may forget the last acks
	status, body := request(t, http.MethodDelete, hub.ops+"/groups/"+topic+"/"+group, sign("admin:"+topic))
	if status != http.StatusNoContent {
		t.Fatalf("%d %s", status, body)
	}
	fails(scaler, 404)
}

// TestKEDAWithoutAMajority has two of three servers end: the leader of the group keeps its figures
// for a while, and the hub answers with an error instead.
func TestKEDAWithoutAMajority(t *testing.T) {
	t.Parallel()
	nodes := natstest.StartCluster(t, 3)
	v := natstest.Look(t, natstest.URLs(nodes)...)
	v.Replicating(3)
	hub := startNode(t, "--nats-url="+strings.Join(natstest.URLs(nodes), ","), "--replicas=3")
	scaler := readKEDA(t, hub, nodeToken).of("orders.placed", "billing", nodeToken)
	c := hub.dial()
	subscribeTo(t, c, "orders.placed", "billing", wire.SubscribeOptions{From: "earliest", MaxInFlight: 1})
	publishNumbers(t, c, "orders.placed", 3)
	v.Until("KEDA reads the backlog", func(ctx context.Context) bool {
		got, err := scaler.value(ctx)
		return err == nil && got == 3
	})
	leader := v.Consumer("orders=2Eplaced").Cluster.Leader
	for _, n := range nodes {
		if n.Name() != leader {
			n.Kill()
		}
	}
	ask := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		got, err := scaler.value(ctx)
		if err == nil && got != 3 {
			t.Errorf("KEDA reads %v", got)
		}
		return err
	}
	end := time.Now().Add(2 * patience)
	for ask() == nil {
		if time.Now().After(end) {
			t.Fatal("KEDA reads old figures for ever")
		}
		<-time.After(100 * time.Millisecond)
	}
	for range 3 {
		if ask() == nil {
			t.Error("KEDA reads old figures again")
		}
	}
}
