package engine_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A pod holds its SELinux label until it is removed or given up, over restarts.
func TestPodsHoldTheirLabels(t *testing.T) {
	w := newWorld(t)
	n := start(t, w, "boot")
	n.session(t, "gw")
	held := func(when string, want map[string]bool) {
		t.Helper()
		w.mu.Lock()
		defer w.mu.Unlock()
		if diff := cmp.Diff(want, w.labels); diff != "" {
			t.Errorf("labels %s (-want +got):\n%s", when, diff)
		}
	}
	of := func(id, want string) {
		t.Helper()
		rec, err := n.Views.Sandbox(id)
		if err != nil || rec.GetSelinuxLabel() != want {
			t.Errorf("the pod has the label %q, %v, want %q", rec.GetSelinuxLabel(), err, want)
		}
	}
	first := runPod(t, n, "a")
	of(first, "u:r:t:s0:c0")
	w.set("namespaces.pin", errInjected)
	if _, _, err := n.Sandboxes.Prepare(t.Context(), "gw", podConfig("b"), ""); err == nil {
		t.Error("a pod without namespaces was made")
	}
	w.set("namespaces.pin", nil)
	second := runPod(t, n, "c")
	held("of three", map[string]bool{"u:r:t:s0:c0": true, "u:r:t:s0:c1": false, "u:r:t:s0:c2": true})
	if err := n.Sandboxes.Remove(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	held("after a removal", map[string]bool{"u:r:t:s0:c0": false, "u:r:t:s0:c1": false, "u:r:t:s0:c2": true})

	n.close()
	w.mu.Lock()
	clear(w.labels)
	w.mu.Unlock()
	n = start(t, w, "boot")
	held("after a restart", map[string]bool{"u:r:t:s0:c2": true})
	of(second, "u:r:t:s0:c2")
}
