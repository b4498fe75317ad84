// Package podselector chooses pods by namespace, label and annotation. It is pure.
package podselector

import (
	"path"
	"slices"
)

// Pod is what is chosen by.
type Pod interface {
	GetNamespace() string
	GetLabels() map[string]string
	GetAnnotations() map[string]string
}

// Selector chooses pods. The zero value chooses all of them.
type Selector struct {
	// Namespaces are names or shell patterns such as "team-*"; empty means all.
	Namespaces []string
	// NotNamespaces are left out, whatever Namespaces says.
	NotNamespaces []string
	// Labels must all be there; the value "*" stands for any.
	Labels map[string]string
	// Annotations must all be there; the value "*" stands for any.
	Annotations map[string]string
}

// Match reports whether the pod is one of the chosen.
func (s Selector) Match(pod Pod) bool {
	ns := pod.GetNamespace()
	if len(s.Namespaces) > 0 && !Any(s.Namespaces, ns) || Any(s.NotNamespaces, ns) {
		return false
	}
	return contains(pod.GetLabels(), s.Labels) && contains(pod.GetAnnotations(), s.Annotations)
}

// All reports whether the selector chooses every pod.
func (s Selector) All() bool {
	return len(s.Namespaces)+len(s.NotNamespaces)+len(s.Labels)+len(s.Annotations) == 0
}

// Any reports whether one of the shell patterns matches the name.
func Any(patterns []string, name string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		ok, err := path.Match(p, name)
		return ok && err == nil
	})
}

func contains(have, want map[string]string) bool {
	for k, v := range want {
		got, ok := have[k]
		if !ok || v != "*" && got != v {
			return false
		}
	}
	return true
}
