package rule

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	nri "github.com/containerd/nri/pkg/api"
	nriplugin "github.com/containerd/nri/pkg/plugin"
)

// Demand names plugins for some pods.
type Demand struct {
	// Plugins are names with or without index. In an exemption, none means all.
	Plugins []string
	// Pods are those that it is about.
	Pods Selector
}

// Required says which plugins must have answered before a pod or container is made.
type Required struct {
	Demands []Demand
	// Exempt pods do not need the plugins that the exemption names.
	Exempt []Demand
	// Annotations honours NRI's own annotation on pods.
	Annotations bool
}

// Any reports whether a plugin can be required without an annotation.
func (r Required) Any() bool { return len(r.Demands) > 0 }

// Names are all plugins that the demands name.
func (r Required) Names() []string {
	var names []string
	for _, d := range r.Demands {
		names = append(names, d.Plugins...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// For are the plugins that a pod needs, or one of its containers if the name of one is
// given, in a fixed order. An annotation that cannot be read is an error: to pass it by
// would let a pod through that somebody wanted guarded.
func (r Required) For(pod *nri.PodSandbox, container string) ([]string, error) {
	var names []string
	for _, d := range r.Demands {
		if d.Pods.Match(pod) {
			names = append(names, d.Plugins...)
		}
	}
	if r.Annotations {
		more, err := annotated(pod, container)
		if err != nil {
			return nil, err
		}
		names = append(names, more...)
	}
	names = slices.DeleteFunc(names, func(name string) bool { return r.exempt(pod, name) })
	slices.Sort(names)
	return slices.Compact(names), nil
}

func (r Required) exempt(pod *nri.PodSandbox, name string) bool {
	return slices.ContainsFunc(r.Exempt, func(d Demand) bool {
		return (len(d.Plugins) == 0 || slices.Contains(d.Plugins, name)) && d.Pods.Match(pod)
	})
}

// annotated reads the list in the pod's annotation: in JSON, or with commas or lines
// between the names.
func annotated(pod *nri.PodSandbox, container string) ([]string, error) {
	value, ok := nriplugin.GetEffectiveAnnotation(pod, nriplugin.RequiredPluginsAnnotation, container)
	if !ok || strings.TrimSpace(value) == "" {
		return nil, nil
	}
	value = strings.TrimSpace(value)
	var names []string
	if strings.HasPrefix(value, "[") {
		if json.Unmarshal([]byte(value), &names) == nil {
			return names, nil
		}
		value = strings.Trim(value, "[]") // YAML's own form, without quotes
	}
	for _, n := range strings.FieldsFunc(value, func(r rune) bool { return r == ',' || r == '\n' }) {
		n = strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(n), "- "))
		n = strings.Trim(n, `"'`)
		if n == "" || strings.ContainsAny(n, " :{}[]") {
			return nil, fmt.Errorf("annotation %s: %q is no list of plugins, write for example [\"10-guard\"]",
				nriplugin.RequiredPluginsAnnotation, value)
		}
		names = append(names, n)
	}
	return names, nil
}
