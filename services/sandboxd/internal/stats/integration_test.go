//go:build integration

package stats

import (
	"testing"

	"github.com/containerd/cgroups/v3"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/namespaces"
)

func TestRealGroupsAndNamespaces(t *testing.T) {
	testkit.NeedRoot(t)
	r := New("/sys/fs/cgroup", cgroups.Mode() == cgroups.Unified)
	got := r.Container(nil, "/", nil)
	if got.GetCpu().GetUsageCoreNanoSeconds().GetValue() == 0 {
		t.Errorf("the root group used no processor: %v", got)
	}
	pins := namespaces.New(t.TempDir(), namespaces.Defaults{})
	paths, err := pins.Pin(t.Context(), "n", namespaces.Request{Network: true})
	if err != nil {
		t.Fatal(err)
	}
	if n := r.network(paths["network"]); n.GetDefaultInterface() != nil {
		t.Errorf("an empty namespace has %v", n)
	}
	if err := pins.Unpin(t.Context(), "n"); err != nil {
		t.Error(err)
	}
	if n := r.network("/proc/self/ns/net"); n.GetDefaultInterface().GetName() == "" {
		testkit.Lacks(t, "interface in the host's network")
	}
}
