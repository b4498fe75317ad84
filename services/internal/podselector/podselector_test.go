package podselector_test

import (
	"testing"

	"github.com/crisp-cri/crisp/services/internal/podselector"
)

type named struct {
	namespace           string
	labels, annotations map[string]string
}

func (p named) GetNamespace() string              { return p.namespace }
func (p named) GetLabels() map[string]string      { return p.labels }
func (p named) GetAnnotations() map[string]string { return p.annotations }

func pod(namespace string, labels, annotations map[string]string) named {
	return named{namespace, labels, annotations}
}

func TestSelector(t *testing.T) {
	t.Parallel()
	web := map[string]string{"app": "web", "tier": "front"}
	tests := map[string]struct {
		selector podselector.Selector
		pod      named
		want     bool
	}{
		"zero value":                {podselector.Selector{}, pod("a", nil, nil), true},
		"namespace":                 {podselector.Selector{Namespaces: []string{"a", "b"}}, pod("b", nil, nil), true},
		"another namespace":         {podselector.Selector{Namespaces: []string{"a", "b"}}, pod("c", nil, nil), false},
		"pattern":                   {podselector.Selector{Namespaces: []string{"team-*"}}, pod("team-x", nil, nil), true},
		"left out":                  {podselector.Selector{NotNamespaces: []string{"kube-*"}}, pod("kube-system", nil, nil), false},
		"left out of what is in":    {podselector.Selector{Namespaces: []string{"*"}, NotNamespaces: []string{"a"}}, pod("a", nil, nil), false},
		"label":                     {podselector.Selector{Labels: map[string]string{"app": "web"}}, pod("a", web, nil), true},
		"any value of a label":      {podselector.Selector{Labels: map[string]string{"app": "*"}}, pod("a", web, nil), true},
		"another value":             {podselector.Selector{Labels: map[string]string{"app": "db"}}, pod("a", web, nil), false},
		"missing label":             {podselector.Selector{Labels: map[string]string{"zone": "*"}}, pod("a", web, nil), false},
		"annotation":                {podselector.Selector{Annotations: map[string]string{"x": "y"}}, pod("a", nil, map[string]string{"x": "y"}), true},
		"annotation is no label":    {podselector.Selector{Annotations: map[string]string{"app": "web"}}, pod("a", web, nil), false},
		"all of the parts, not one": {podselector.Selector{Namespaces: []string{"b"}, Labels: map[string]string{"app": "web"}}, pod("a", web, nil), false},
	}
	for name, tt := range tests {
		if got := tt.selector.Match(tt.pod); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}
