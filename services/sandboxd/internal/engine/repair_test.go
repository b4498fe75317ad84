package engine_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// An undoing that failed is repeated while the gateway's session lives on, and whoever asks
// again for the sandbox does not wait for that.
func TestFailedUndoIsRepeated(t *testing.T) {
	w := newWorld(t)
	n := start(t, w, "boot")
	n.session(t, "gw")
	w.set("controller.start", errInjected)
	w.set("namespaces.unpin", errInjected)
	if _, _, err := n.Sandboxes.Prepare(t.Context(), "gw", podConfig("a"), ""); !errors.Is(err, errInjected) {
		t.Fatalf("prepare: %v", err)
	}
	w.set("controller.start", nil)
	w.set("namespaces.unpin", nil)
	runPod(t, n, "a")

	w.set("rootfs.accounts", errInjected)
	w.set("rootfs.remove", errInjected)
	sid := runPod(t, n, "b")
	if _, _, err := n.Containers.Prepare(t.Context(), "gw", sid, containerConfig("c"), ""); !errors.Is(err, errInjected) {
		t.Fatalf("prepare container: %v", err)
	}
	w.set("rootfs.accounts", nil)
	w.set("rootfs.remove", nil)
	eventually(t, "the name is free", func() bool {
		_, _, err := n.Containers.Prepare(t.Context(), "gw", sid, containerConfig("c"), "")
		return err == nil
	})
}

// A start whose answer was an error may have worked: nothing of it may run on.
func TestFailedStartEndsTheTask(t *testing.T) {
	for _, op := range []string{"tasks.start", "programs.check"} {
		t.Run(op, func(t *testing.T) {
			w := newWorld(t)
			n := start(t, w, "boot")
			n.session(t, "gw")
			sid := runPod(t, n, "a")
			id := createContainer(t, n, sid, "c")
			w.set(op, errInjected)
			w.set("tasks.delete", errInjected)
			if err := n.Tasks.Start(t.Context(), id); !errors.Is(err, errInjected) {
				t.Fatalf("start: %v", err)
			}
			rec := state(t, n, id)
			if rec.GetState() != recordv1.ContainerState_CONTAINER_STATE_EXITED || rec.GetExitCode() != 128 || rec.GetReason() != pod.ReasonStartError {
				t.Errorf("record = %v", rec)
			}
			p, err := w.proc(id)
			if err != nil {
				t.Fatal(err)
			}
			testkit.Receive(t, p.done) // killed
			w.set("tasks.delete", nil)
			eventually(t, "the task is deleted", func() bool {
				_, err := w.proc(id)
				return errdefs.IsNotFound(err)
			})
		})
	}
}

// Exit code 255 of a process is a code like others; unknown is only an end that nobody saw.
func TestExitCode255IsAnError(t *testing.T) {
	w := newWorld(t)
	n := start(t, w, "boot")
	n.session(t, "gw")
	id := startContainer(t, n, runPod(t, n, "a"), "c")
	w.end(id, 255)
	eventually(t, "the end is recorded", func() bool {
		return state(t, n, id).GetState() == recordv1.ContainerState_CONTAINER_STATE_EXITED
	})
	if rec := state(t, n, id); rec.GetExitCode() != 255 || rec.GetReason() != pod.ReasonError {
		t.Errorf("exit code %d, reason %q", rec.GetExitCode(), rec.GetReason())
	}
}

// A clock that was set back does not make a container end before it started.
//
// The jump is played here, by the time that a shim reports, and not with real processes: the
// time of day belongs to the machine (time namespaces have none of their own, and libraries
// that fake it do not reach static programs), so a test that sets it would move the clock
// under everything else that runs. That durations do not depend on it is held by
// TestDurationsAreMonotonic of tests/arch.
func TestClockSetBackKeepsTheOrder(t *testing.T) {
	w := newWorld(t)
	n := start(t, w, "boot")
	n.session(t, "gw")
	id := startContainer(t, n, runPod(t, n, "a"), "c")
	w.endAt(id, 0, time.Unix(0, 0))
	eventually(t, "the end is recorded", func() bool {
		return state(t, n, id).GetState() == recordv1.ContainerState_CONTAINER_STATE_EXITED
	})
	rec := state(t, n, id)
	created, started, finished := rec.GetCreatedAt().AsTime(), rec.GetStartedAt().AsTime(), rec.GetFinishedAt().AsTime()
	if started.Before(created) || finished.Before(started) {
		t.Errorf("created %v, started %v, finished %v", created, started, finished)
	}
}

// A container that was created and not started before a reboot cannot be started any more.
func TestCreatedContainerEndsWithTheNode(t *testing.T) {
	w := newWorld(t)
	n := start(t, w, "boot 1")
	n.session(t, "gw")
	sid := runPod(t, n, "a")
	id := createContainer(t, n, sid, "c")
	n.close()
	n = start(t, w, "boot 2")
	n.session(t, "gw")
	rec := state(t, n, id)
	if rec.GetState() != recordv1.ContainerState_CONTAINER_STATE_EXITED || rec.GetExitCode() == 0 || rec.GetReason() != pod.ReasonUnknown || rec.GetFinishedAt() == nil {
		t.Errorf("record = %v", rec)
	}
	if err := n.Sandboxes.Remove(t.Context(), sid); err != nil {
		t.Errorf("remove: %v", err)
	}
}

// A removal ends what still runs in the container's cgroup, whatever the shims know.
func TestRemovalClearsTheCgroup(t *testing.T) {
	w := newWorld(t)
	n := start(t, w, "boot")
	n.session(t, "gw")
	id := startContainer(t, n, runPod(t, n, "a"), "c")
	w.set("tasks.clear", errInjected)
	if _, err := n.Containers.Remove(t.Context(), id); !errors.Is(err, errInjected) {
		t.Errorf("remove: %v", err)
	}
	w.set("tasks.clear", nil)
	if _, err := n.Containers.Remove(t.Context(), id); err != nil {
		t.Errorf("remove again: %v", err)
	}
}

// A pod with a process of its own that is not made to its end leaves no cgroup, though its
// shim may have died before it removed it.
func TestHalfMadePodLeavesNoCgroup(t *testing.T) {
	shared := podConfig("a")
	shared.Linux = &criv1.LinuxPodSandboxConfig{SecurityContext: &criv1.LinuxSandboxSecurityContext{
		NamespaceOptions: &criv1.NamespaceOption{Pid: criv1.NamespaceMode_POD},
	}}
	for _, tc := range []struct {
		name  string
		spoil func(t *testing.T, w *world, n *node)
	}{
		{"the start fails", func(t *testing.T, w *world, n *node) {
			w.set("controller.start", errInjected)
			if _, _, err := n.Sandboxes.Prepare(t.Context(), "gw", shared, ""); !errors.Is(err, errInjected) {
				t.Errorf("prepare: %v", err)
			}
		}},
		{"it is aborted", func(t *testing.T, w *world, n *node) {
			rec, _, err := n.Sandboxes.Prepare(t.Context(), "gw", shared, "")
			if err != nil {
				t.Fatal(err)
			}
			if held := w.held(); !slices.Contains(held, "cgroup "+rec.GetId()) {
				t.Errorf("holds %v, want the cgroup", held)
			}
			if err := n.Sandboxes.Abort(t.Context(), rec.GetId()); err != nil {
				t.Error(err)
			}
		}},
		{"it is aborted, and the cgroup cannot be removed at first", func(t *testing.T, w *world, n *node) {
			rec, _, err := n.Sandboxes.Prepare(t.Context(), "gw", shared, "")
			if err != nil {
				t.Fatal(err)
			}
			w.set("tasks.clear", errInjected)
			if err := n.Sandboxes.Abort(t.Context(), rec.GetId()); !errors.Is(err, errInjected) {
				t.Errorf("abort: %v", err)
			}
			w.set("tasks.clear", nil)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			n := start(t, w, "boot")
			n.session(t, "gw")
			tc.spoil(t, w, n)
			eventually(t, "nothing is held", func() bool { return len(w.held()) == 0 })
			if w.called("controller.init") == 0 {
				t.Error("the process was not begun with")
			}
		})
	}
}
