package engine_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func memory(n int64) *criv1.LinuxContainerResources {
	return &criv1.LinuxContainerResources{MemoryLimitInBytes: n}
}

func TestSandboxUpdateReachesShimAndRecord(t *testing.T) {
	for _, tc := range []struct {
		name, handler string
		shim          error // what the controller answers
		refused       bool
	}{
		{"shim that can", "vm", nil, false},
		{"shim that cannot", "vm", errdefs.ErrNotImplemented, true},
		{"pod without a process", "runc", errdefs.ErrNotImplemented, false},
		{"failing shim", "runc", errdefs.ErrUnavailable, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := start(t, newWorld(t), "boot")
			n.session(t, "gw")
			rec, _, err := n.Sandboxes.Prepare(t.Context(), "gw", podConfig("a"), tc.handler)
			if err != nil {
				t.Fatal(err)
			}
			id := rec.GetId()
			if _, err := n.Sandboxes.Update(t.Context(), id, nil, memory(1)); !errdefs.IsFailedPrecondition(err) {
				t.Errorf("update of a prepared sandbox: %v", err)
			}
			if err := n.Sandboxes.Commit(t.Context(), id); err != nil {
				t.Fatal(err)
			}
			n.w.set("controller.update", tc.shim)
			got, err := n.Sandboxes.Update(t.Context(), id, memory(5), memory(100))
			if !tc.refused {
				if err != nil || got.GetResources().GetMemoryLimitInBytes() != 100 || got.GetOverhead().GetMemoryLimitInBytes() != 5 {
					t.Errorf("update: %v, %v", got, err)
				}
				if tc.shim == nil && n.w.limits[id] != 105 {
					t.Errorf("the shim has %d, want 105", n.w.limits[id])
				}
				return
			}
			if !errors.Is(err, tc.shim) || !strings.Contains(fmt.Sprint(err), id) {
				t.Errorf("update: %v", err)
			}
			if kept, err := n.Views.Sandbox(id); err != nil || kept.GetResources() != nil {
				t.Errorf("record after a refusal: %v, %v", kept.GetResources(), err)
			}
		})
	}
}

func TestCommitOfALostPreparationCanBeRepeatedFromTheStart(t *testing.T) {
	w := newWorld(t)
	n := start(t, w, "boot")
	n.session(t, "gw")
	pod := runPod(t, n, "kept")
	sb, _, err := n.Sandboxes.Prepare(t.Context(), "gw", podConfig("a"), "")
	if err != nil {
		t.Fatal(err)
	}
	ct, _, err := n.Containers.Prepare(t.Context(), "gw", pod, containerConfig("c"), "")
	if err != nil {
		t.Fatal(err)
	}
	n.close()
	n = start(t, w, "boot")
	n.session(t, "gw")
	if err := n.Sandboxes.Commit(t.Context(), sb.GetId()); !errdefs.IsUnavailable(err) || errdefs.IsNotFound(err) {
		t.Errorf("sandbox: %v", err)
	}
	if err := n.Containers.Commit(t.Context(), ct, nil); !errdefs.IsUnavailable(err) || errdefs.IsNotFound(err) {
		t.Errorf("container: %v", err)
	}
	eventually(t, "the name is free again", func() bool {
		again, existing, err := n.Sandboxes.Prepare(t.Context(), "gw", podConfig("a"), "")
		return err == nil && !existing && again.GetId() != sb.GetId()
	})
}
