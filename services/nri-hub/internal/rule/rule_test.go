package rule_test

import (
	"slices"
	"testing"
	"time"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/rule"
)

func pod(namespace string, labels, annotations map[string]string) *nri.PodSandbox {
	return &nri.PodSandbox{Namespace: namespace, Labels: labels, Annotations: annotations}
}

func TestFirstRuleThatMatches(t *testing.T) {
	t.Parallel()
	rules := rule.Plugins{
		{Name: "10-a", Timeout: 1},
		{Name: "a", Timeout: 2, Timeouts: map[nri.Event]time.Duration{nri.Event_STOP_CONTAINER: 9}},
		{Name: "9?-*", Timeout: 3},
	}
	for full, want := range map[[2]string]time.Duration{
		{"10", "a"}: 1, {"20", "a"}: 2, {"95", "z"}: 3, {"10", "z"}: 0,
	} {
		got := rules.For(full[0], full[1])
		if got.Timeout != want || got.Listed != (want != 0) {
			t.Errorf("%v: %v listed %v, want %v", full, got.Timeout, got.Listed, want)
		}
	}
	a := rules.For("20", "a")
	if a.TimeoutOf(nri.Event_STOP_CONTAINER) != 9 || a.TimeoutOf(nri.Event_CREATE_CONTAINER) != 2 {
		t.Errorf("timeouts of single requests: %v", a)
	}
}

func TestMayChange(t *testing.T) {
	t.Parallel()
	everything, nothing := rule.Rights{}, rule.Rights{Fields: []string{}}
	some := rule.Rights{Fields: []string{"env", "linux.resources.cpu"}}
	for _, tt := range []struct {
		rights rule.Rights
		field  string
		want   bool
	}{
		{everything, "hooks.prestart", true},
		{nothing, "env", false},
		{rule.Rights{Fields: []string{"*"}}, "mounts", true},
		{some, "env", true},
		{some, "linux.resources.cpu.shares", true},
		{some, "linux.resources.cpuset", false},
		{some, "linux.resources", false},
		{some, "mounts", false},
	} {
		if got := tt.rights.MayChange(tt.field); got != tt.want {
			t.Errorf("%v may change %s: %v, want %v", tt.rights.Fields, tt.field, got, tt.want)
		}
	}
}

func TestRequired(t *testing.T) {
	t.Parallel()
	const key = "required-plugins.noderesource.dev"
	r := rule.Required{
		Demands: []rule.Demand{
			{Plugins: []string{"guard"}, Pods: rule.Selector{NotNamespaces: []string{"dev"}}},
			{Plugins: []string{"net"}, Pods: rule.Selector{Labels: map[string]string{"rdma": "*"}}},
		},
		Exempt: []rule.Demand{
			{Pods: rule.Selector{Namespaces: []string{"kube-system"}}},
			{Plugins: []string{"guard"}, Pods: rule.Selector{Labels: map[string]string{"app": "guard"}}},
		},
		Annotations: true,
	}
	tests := map[string]struct {
		pod       *nri.PodSandbox
		container string
		want      []string
	}{
		"by namespace":          {pod("prod", nil, nil), "", []string{"guard"}},
		"not in this namespace": {pod("dev", nil, nil), "", nil},
		"by label":              {pod("dev", map[string]string{"rdma": "1"}, nil), "", []string{"net"}},
		"exempt namespace":      {pod("kube-system", map[string]string{"rdma": "1"}, map[string]string{key: "x"}), "", nil},
		"the plugin's own pod":  {pod("prod", map[string]string{"app": "guard", "rdma": "1"}, nil), "", []string{"net"}},
		"annotation in JSON":    {pod("dev", nil, map[string]string{key: `["b","10-a"]`}), "", []string{"10-a", "b"}},
		"annotation, plain":     {pod("dev", nil, map[string]string{key: "a, b"}), "", []string{"a", "b"}},
		"annotation, YAML":      {pod("dev", nil, map[string]string{key: "- a\n- 10-b\n"}), "", []string{"10-b", "a"}},
		"annotation, YAML flow": {pod("dev", nil, map[string]string{key: "[a, b]"}), "", []string{"a", "b"}},
		"of the container":      {pod("dev", nil, map[string]string{key: "a", key + "/container.c": "b"}), "c", []string{"b"}},
		"of another container":  {pod("dev", nil, map[string]string{key: "a", key + "/container.c": "b"}), "d", []string{"a"}},
		"named twice":           {pod("prod", nil, map[string]string{key: "guard"}), "", []string{"guard"}},
	}
	for name, tt := range tests {
		got, err := r.For(tt.pod, tt.container)
		if err != nil || !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, %v; want %v", name, got, err, tt.want)
		}
	}
	if _, err := r.For(pod("dev", nil, map[string]string{key: `{"a": 1}`}), ""); err == nil {
		t.Error("an annotation that is no list is passed by")
	}
	if got, _ := (rule.Required{}).For(pod("dev", nil, map[string]string{key: "a"}), ""); len(got) != 0 {
		t.Errorf("annotation counts although it is off: %v", got)
	}
}
