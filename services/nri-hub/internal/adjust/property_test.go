package adjust_test

import (
	"errors"
	"maps"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/adjust"
)

// change is what one plugin wants of one key.
type change struct {
	key         string
	remove, set bool
	value       string
}

func changes() *rapid.Generator[[]change] {
	one := rapid.Custom(func(t *rapid.T) change {
		return change{
			key:    rapid.SampledFrom([]string{"A", "B", "C"}).Draw(t, "key"),
			remove: rapid.Bool().Draw(t, "remove"),
			set:    rapid.Bool().Draw(t, "set"),
			value:  rapid.StringMatching(`[a-z]{0,3}`).Draw(t, "value"),
		}
	})
	return rapid.SliceOfNDistinct(one, 0, 3, func(c change) string { return c.key })
}

// model says what must come out for the environment and the annotations, which follow
// the same rules.
type model struct {
	env   map[string]string // as the container sees it
	owner map[string]string // who has set, or removed what was set
}

// apply reports whether the plugin conflicts with an earlier one.
func (m *model) apply(plugin string, cs []change, collected map[string]bool) bool {
	for _, c := range cs {
		if c.remove && collected[c.key] {
			m.owner[c.key] = plugin
		}
		if c.remove && !c.set {
			delete(m.env, c.key)
			collected[c.key] = false
		}
		if !c.set {
			continue
		}
		if o, ok := m.owner[c.key]; ok && o != plugin {
			return true
		}
		m.owner[c.key], m.env[c.key], collected[c.key] = plugin, c.value, true
	}
	return false
}

func answer(cs []change) *nri.CreateContainerResponse {
	a := &nri.ContainerAdjustment{Annotations: map[string]string{}}
	for _, c := range cs {
		if c.remove {
			a.Env = append(a.Env, &nri.KeyValue{Key: "-" + c.key})
			a.Annotations["-"+c.key] = ""
		}
		if c.set {
			a.Env = append(a.Env, &nri.KeyValue{Key: c.key, Value: c.value})
			a.Annotations[c.key] = c.value
		}
	}
	return &nri.CreateContainerResponse{Adjust: a}
}

func TestMergeFollowsTheModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		start := map[string]string{"A": "a", "Z": "z"}
		req := &nri.CreateContainerRequest{Container: &nri.Container{
			Id: "c", Env: []string{"A=a", "Z=z"}, Annotations: maps.Clone(start),
		}}
		c := adjust.NewCreate(req)
		m := &model{env: maps.Clone(start), owner: map[string]string{}}
		collected := map[string]bool{}
		for i, cs := range rapid.SliceOfN(changes(), 1, 4).Draw(t, "plugins") {
			plugin := string(rune('a' + i))
			conflict := m.apply(plugin, cs, collected)
			err := c.Apply(plugin, answer(cs))
			if conflict != (err != nil) || err != nil && !errors.Is(err, errdefs.ErrConflict) {
				t.Fatalf("plugin %s: conflict is %v, error is %v", plugin, conflict, err)
			}
			if conflict {
				return
			}
		}
		view := c.Request().GetContainer()
		if diff := cmp.Diff(m.env, lines(view.GetEnv())); diff != "" {
			t.Fatalf("view of the environment (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff(m.env, view.GetAnnotations()); diff != "" {
			t.Fatalf("view of the annotations (-want +got):\n%s", diff)
		}
		// Carrying out the merged answer gives what the last plugin would see.
		got := maps.Clone(start)
		seen := map[string]bool{}
		for _, kv := range c.Response().GetAdjust().GetEnv() {
			k, removal := nri.IsMarkedForRemoval(kv.GetKey())
			if seen[k] {
				t.Fatalf("key %q is in the merged answer twice", k)
			}
			seen[k] = true
			delete(got, k)
			if !removal {
				got[k] = kv.GetValue()
			}
		}
		if diff := cmp.Diff(m.env, got); diff != "" {
			t.Fatalf("result (-want +got):\n%s", diff)
		}
		for k := range c.Response().GetAdjust().GetAnnotations() {
			if key, removal := nri.IsMarkedForRemoval(k); removal {
				if _, both := c.Response().GetAdjust().GetAnnotations()[key]; both {
					t.Fatalf("annotation %q is both set and removed", key)
				}
			}
		}
	})
}

func lines(env []string) map[string]string {
	m := make(map[string]string, len(env))
	for _, l := range env {
		k, v, _ := strings.Cut(l, "=")
		m[k] = v
	}
	return m
}
