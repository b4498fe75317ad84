package engine_test

import (
	"testing"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
)

// A change that is refused leaves record and cgroup as they were: at the limit of the last
// change, or without a limit if there was none.
func TestRefusedUpdateOfAContainerIsTakenBack(t *testing.T) {
	n := start(t, newWorld(t), "boot")
	n.session(t, "gw")
	id := startContainer(t, n, runPod(t, n, "a"), "c")
	limit := func() int64 {
		n.w.mu.Lock()
		defer n.w.mu.Unlock()
		return n.w.limits[id]
	}
	for _, want := range []int64{-1, 7} {
		n.w.set("tasks.update", errdefs.ErrFailedPrecondition)
		if _, err := n.Containers.Update(t.Context(), id, memory(5), nil, nil); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("refused update: %v", err)
		}
		if limit() != want {
			t.Errorf("the cgroup has %d, want %d", limit(), want)
		}
		if kept := state(t, n, id).GetResources().GetMemoryLimitInBytes(); kept != max(0, want) {
			t.Errorf("the record has %d, want %d", kept, want)
		}
		n.w.set("tasks.update", nil)
		if _, err := n.Containers.Update(t.Context(), id, memory(7), nil, nil); err != nil || limit() != 7 {
			t.Fatalf("update: %v, limit %d", err, limit())
		}
	}
}

// A set of processors that nobody chose has no value of its own: the one in force comes back.
func TestRefusedSetOfProcessorsIsTakenBack(t *testing.T) {
	n := start(t, newWorld(t), "boot")
	n.session(t, "gw")
	id := startContainer(t, n, runPod(t, n, "a"), "c")
	n.w.set("tasks.update", errdefs.ErrFailedPrecondition)
	asked := memory(5)
	asked.CpusetCpus = "1"
	if _, err := n.Containers.Update(t.Context(), id, asked, nil, nil); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("refused update: %v", err)
	}
	n.w.mu.Lock()
	defer n.w.mu.Unlock()
	if got := n.w.cpus[id]; got != "0-3" {
		t.Errorf("the cgroup has the processors %q, want 0-3", got)
	}
}

// Huge pages can be limited before a container runs, and not changed afterwards.
func TestHugePagesOfARunningContainerAreFixed(t *testing.T) {
	n := start(t, newWorld(t), "boot")
	n.session(t, "gw")
	id := startContainer(t, n, runPod(t, n, "a"), "c")
	pages := &criv1.LinuxContainerResources{HugepageLimits: []*criv1.HugepageLimit{{PageSize: "2MB", Limit: 1 << 21}}}
	if _, err := n.Containers.Update(t.Context(), id, pages, nil, nil); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("running: %v", err)
	}
	if rec := state(t, n, id); len(rec.GetResources().GetHugepageLimits()) != 0 || rec.GetState() != table.ContainerRunning {
		t.Errorf("record after a refusal: %v", rec)
	}
	if n.w.called("tasks.update") != 0 {
		t.Error("the runtime was asked")
	}
}
