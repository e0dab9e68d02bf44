// Package check tests what runs a hub in production with the tools that take it: Helm, the types of
// Kubernetes, Compose, and the parser of Dockerfiles. It is a module of its own, so that eventhub
// does not depend on them.
package check

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
)

const chartDir = "../helm/eventhub"

// values are values of the chart; with is what a user sets beside a file.
type values struct {
	file string
	with map[string]any
}

// hubs beside a cluster, set as the head of values.yaml says.
func besideACluster() values {
	return values{"", map[string]any{
		"image": map[string]any{"repository": "example.com/eventhub"}, "nats": map[string]any{"url": "nats://nats:4222"},
		"tokens": map[string]any{"existingSecret": "eventhub"},
	}}
}

// one hub with NATS inside, set as the head of values-embedded.yaml says.
func embedded() values {
	return values{filepath.Join(chartDir, "values-embedded.yaml"), map[string]any{
		"image": map[string]any{"repository": "example.com/eventhub"}, "tokens": map[string]any{"existingSecret": "eventhub"},
	}}
}

// render renders the chart as helm install does.
func render(t *testing.T, v values) (map[string]string, error) {
	t.Helper()
	chart, err := loader.Load(chartDir)
	if err != nil {
		t.Fatal(err)
	}
	if err := chart.Validate(); err != nil {
		t.Fatal(err)
	}
	given := chartutil.Values{}
	if v.file != "" {
		if given, err = chartutil.ReadValuesFile(v.file); err != nil {
			t.Fatal(err)
		}
	}
	given = chartutil.CoalesceTables(v.with, given)
	release := chartutil.ReleaseOptions{Name: "live", Namespace: "events", Revision: 1, IsInstall: true}
	all, err := chartutil.ToRenderValues(chart, given, release, chartutil.DefaultCapabilities)
	if err != nil {
		t.Fatal(err)
	}
	return engine.Engine{Strict: true}.Render(chart, all)
}

// decode decodes the manifests strictly: a field that a type lacks, or has twice, is an error.
func decode(t *testing.T, files map[string]string) (objects []runtime.Object) {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		appsv1.AddToScheme, corev1.AddToScheme, networkingv1.AddToScheme, policyv1.AddToScheme, monitoringv1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	for name, text := range files {
		if filepath.Ext(name) != ".yaml" {
			continue
		}
		docs := yaml.NewDocumentDecoder(io.NopCloser(strings.NewReader(text)))
		buf := make([]byte, 1<<20)
		for {
			n, err := docs.Read(buf)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if len(strings.TrimSpace(string(buf[:n]))) == 0 {
				continue
			}
			object, _, err := decoder.Decode(buf[:n], nil, nil)
			if err != nil {
				t.Errorf("%s: %v\n%s", name, err, buf[:n])
				continue
			}
			objects = append(objects, object)
		}
	}
	return objects
}

// kinds returns the kinds of objects, sorted.
func kinds(objects []runtime.Object) string {
	var names []string
	for _, o := range objects {
		names = append(names, o.GetObjectKind().GroupVersionKind().Kind)
	}
	slices.Sort(names)
	return strings.Join(names, " ")
}

// workload returns the StatefulSet, and its only container.
func workload(t *testing.T, objects []runtime.Object) (*appsv1.StatefulSet, *corev1.Container) {
	t.Helper()
	for _, o := range objects {
		if set, ok := o.(*appsv1.StatefulSet); ok && len(set.Spec.Template.Spec.Containers) == 1 {
			return set, &set.Spec.Template.Spec.Containers[0]
		}
	}
	t.Fatal("there is no StatefulSet with one container")
	return nil, nil
}

// environment returns the variables of a container.
func environment(c *corev1.Container) map[string]string {
	env := make(map[string]string)
	for _, v := range c.Env {
		env[v.Name] = v.Value
	}
	return env
}

func TestChart(t *testing.T) {
	for name, c := range map[string]struct {
		values
		kinds string
		env   map[string]string
	}{
		"beside a cluster": {
			besideACluster(), "PodDisruptionBudget Service Service Service ServiceAccount StatefulSet",
			map[string]string{"NATS_URL": "nats://nats:4222", "EVENTHUB_REPLICAS": "3", "WS_TOKEN_FILE": "/etc/eventhub/tokens/token", "GOMEMLIMIT": "966367641", "JWT_SECRET_FILE": ""},
		},
		"embedded": {
			embedded(), "Service Service Service ServiceAccount StatefulSet",
			map[string]string{"NATS_URL": "", "EVENTHUB_REPLICAS": "", "GOMEMLIMIT": "1932735283"},
		},
		"everything": {
			values{"values-full.yaml", map[string]any{"image": map[string]any{"repository": "example.com/eventhub"}}},
			"ConfigMap Ingress NetworkPolicy PodDisruptionBudget PrometheusRule Service Service Service ServiceAccount ServiceMonitor StatefulSet",
			map[string]string{
				"NATS_CREDS": "/etc/eventhub/nats/creds", "NATS_TLS_CA": "/etc/eventhub/nats-ca/ca.crt", "JWT_SECRET_FILE": "/etc/eventhub/tokens/jwt-secret",
				"EVENTHUB_TLS_CERT": "/etc/eventhub/tls/tls.crt", "EVENTHUB_ORIGINS": "https://app.example.com,https://*.example.org",
				"EVENTHUB_TRUSTED_PROXIES": "10.0.0.0/8", "EVENTHUB_LIMIT_CONNECTIONS": "50000",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			files, err := render(t, c.values)
			if err != nil {
				t.Fatal(err)
			}
			objects := decode(t, files)
			if got := kinds(objects); got != c.kinds {
				t.Errorf("the chart makes %s, want %s", got, c.kinds)
			}
			set, hub := workload(t, objects)
			env := environment(hub)
			for name, want := range c.env {
				if env[name] != want {
					t.Errorf("%s is %q, want %q", name, env[name], want)
				}
			}
			checkSettings(t, env)
			checkHardened(t, set, hub)
			checkMounts(t, set, hub)
		})
	}
}

// checkSettings wants each variable of the hub to be one that docs/settings.md lists.
func checkSettings(t *testing.T, env map[string]string) {
	t.Helper()
	page, err := os.ReadFile("../../docs/settings.md")
	if err != nil {
		t.Fatal(err)
	}
	for name := range env {
		short := strings.TrimPrefix(name, "EVENTHUB_LIMIT_")
		if name != "GOMEMLIMIT" && !strings.Contains(string(page), "| `"+short+"` |") {
			t.Errorf("docs/settings.md has no %s", name)
		}
	}
}

// checkHardened wants what the policy "restricted" of Kubernetes wants, and a read-only root.
func checkHardened(t *testing.T, set *appsv1.StatefulSet, hub *corev1.Container) {
	t.Helper()
	pod, own := set.Spec.Template.Spec.SecurityContext, hub.SecurityContext
	switch {
	case pod == nil || own == nil:
		t.Fatal("a security context is missing")
	case !*pod.RunAsNonRoot || *pod.RunAsUser != 65532 || *pod.FSGroup == *pod.RunAsGroup:
		t.Errorf("the pod runs as %+v", pod)
	case pod.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault || *own.AllowPrivilegeEscalation || !*own.ReadOnlyRootFilesystem:
		t.Errorf("the container may too much: %+v", own)
	case !slices.Equal(own.Capabilities.Drop, []corev1.Capability{"ALL"}) || own.Capabilities.Add != nil:
		t.Errorf("the container has capabilities: %+v", own.Capabilities)
	case *set.Spec.Template.Spec.AutomountServiceAccountToken:
		t.Error("the pod has a token of Kubernetes")
	}
	if hub.LivenessProbe.HTTPGet.Path != "/livez" || hub.ReadinessProbe.HTTPGet.Path != "/readyz" || hub.StartupProbe.HTTPGet.Path != "/livez" {
		t.Error("a probe asks at the wrong path")
	}
	if hub.Resources.Requests.Memory().IsZero() || hub.Resources.Limits.Memory().IsZero() || hub.Resources.Requests.Cpu().IsZero() {
		t.Errorf("the container asks for %+v", hub.Resources)
	}
}

// checkMounts wants each file in a variable to be on a volume, and each volume to be used.
func checkMounts(t *testing.T, set *appsv1.StatefulSet, hub *corev1.Container) {
	t.Helper()
	volumes := map[string]bool{}
	for _, v := range set.Spec.Template.Spec.Volumes {
		volumes[v.Name] = true
	}
	for _, c := range set.Spec.VolumeClaimTemplates {
		volumes[c.Name] = true
	}
	for _, m := range hub.VolumeMounts {
		if !volumes[m.Name] {
			t.Errorf("there is no volume %s", m.Name)
		}
		delete(volumes, m.Name)
	}
	if len(volumes) > 0 {
		t.Errorf("volumes that nobody mounts: %v", volumes)
	}
	for name, value := range environment(hub) {
		if strings.HasPrefix(value, "/") && !slices.ContainsFunc(hub.VolumeMounts, func(m corev1.VolumeMount) bool {
			return strings.HasPrefix(value, m.MountPath+"/")
		}) {
			t.Errorf("%s=%s is on no volume", name, value)
		}
	}
}

// Values that cannot work are refused in plain words.
func TestChartRefuses(t *testing.T) {
	for want, change := range map[string]map[string]any{
		"set nats.url to the addresses":         {"nats": map[string]any{"url": ""}},
		"contradict each other":                 {"embedded": map[string]any{"enabled": true}, "replicaCount": 1},
		"set tokens.existingSecret to a Secret": {"tokens": map[string]any{"existingSecret": ""}},
		"needs tokens.token or":                 {"tokens": map[string]any{"existingSecret": "a", "token": false}},
		"needs serviceMonitor.tokenSecret":      {"serviceMonitor": map[string]any{"enabled": true}},
		"write a whole number with":             {"resources": map[string]any{"limits": map[string]any{"memory": "1.5Gi"}}},
	} {
		v := besideACluster()
		v.with = chartutil.CoalesceTables(change, v.with)
		if _, err := render(t, v); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", change, err, want)
		}
	}
	v := embedded()
	v.with["replicaCount"] = 2
	if _, err := render(t, v); err == nil || !strings.Contains(err.Error(), "set replicaCount to 1") {
		t.Error(err)
	}
}

// The chart makes the alert rules that ship, and names the job as they expect.
func TestChartHasTheAlerts(t *testing.T) {
	files, err := render(t, values{"values-full.yaml", map[string]any{"image": map[string]any{"repository": "example.com/eventhub"}}})
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("../prometheus/alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var want monitoringv1.PrometheusRuleSpec
	if err := yaml.Unmarshal(text, &want); err != nil {
		t.Fatal(err)
	}
	met := 0
	for _, o := range decode(t, files) {
		switch o := o.(type) {
		case *monitoringv1.PrometheusRule:
			met++
			if len(want.Groups) == 0 || !reflect.DeepEqual(o.Spec, want) {
				t.Errorf("the rules of the chart are %+v, want %+v", o.Spec, want)
			}
		case *monitoringv1.ServiceMonitor:
			met++
			if o.Spec.JobLabel != "app.kubernetes.io/name" {
				t.Errorf("the job is named by the label %q", o.Spec.JobLabel)
			}
		}
	}
	if met != 2 {
		t.Errorf("the chart has %d of the two", met)
	}
}
