package backend

import (
	"testing"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/google/go-cmp/cmp"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
)

// hubWith is a hub with plugins that listen to CreateContainer, or to nothing of interest if
// their name ends with a dash.
func hubWith(names ...string) *Hub {
	h := &Hub{}
	var refs []*nriv1.PluginRef
	for _, n := range names {
		mask := nri.MustParseEventMask("CreateContainer")
		if n[len(n)-1] == '-' {
			mask = nri.MustParseEventMask("StopContainer")
		}
		refs = append(refs, &nriv1.PluginRef{Name: n, Events: int32(mask)})
	}
	h.state.init(hubState{plugins: refs})
	return h
}

func TestPluginsOfSeveralHubsHaveOneOrder(t *testing.T) {
	t.Parallel()
	a, b, c := hubWith("00-a", "10-c", "10-d", "50-x", "60-late-"), hubWith("10-b", "20-e"), hubWith("30-quiet-")
	names := map[*Hub]string{a: "a", b: "b", c: "c"}
	type row struct{ Hub, After, Last string }
	var got []row
	for _, p := range divide([]*Hub{a, b, c}, []nri.Event{nri.Event_CREATE_CONTAINER}) {
		got = append(got, row{names[p.hub], p.after, p.last})
	}
	want := []row{
		{"a", "", "00-a"},
		{"b", "", "10-b"},
		{"a", "00-a", "10-d"},
		{"b", "10-b", ""},
		{"a", "10-d", ""},
		{"c", "", ""},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
