package controller_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/controller"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/shimtest"
)

// life is what happened to one container of a fake shim.
type life struct {
	create, start, exec, kill error
	exit                      pod.Exit
}

// live takes a container of a fake shim through its life, as far as it gets; created is called between
// its creation and its start.
func live(t *testing.T, tasks *controller.Tasks, spec port.TaskSpec, created func()) life {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	var l life
	if _, l.create = tasks.Create(ctx, spec); l.create != nil {
		return l
	}
	created()
	if _, l.start = tasks.Start(ctx, spec.SandboxID, spec.ContainerID, ""); l.start == nil {
		l.exec = tasks.Exec(ctx, spec.SandboxID, spec.ContainerID, port.ExecSpec{ID: "x", Process: shimtest.Process("/bin/true")})
		l.kill = tasks.Kill(ctx, spec.SandboxID, spec.ContainerID, "", syscall.SIGKILL, true)
	}
	var err error
	if l.exit, err = tasks.Wait(ctx, spec.SandboxID, spec.ContainerID, ""); err != nil {
		t.Errorf("wait: %v", err)
	}
	st, err := tasks.State(ctx, spec.SandboxID, spec.ContainerID, "")
	if err != nil || st.Status != "stopped" || st.Exit.Code != l.exit.Code {
		t.Errorf("state %+v, %v, want the exit %+v", st, err, l.exit)
	}
	if e, err := tasks.Delete(ctx, spec.SandboxID, spec.ContainerID, ""); err != nil || e.Code != l.exit.Code {
		t.Errorf("delete: %+v, %v, want the exit %+v", e, err, l.exit)
	}
	if _, err := tasks.Delete(ctx, spec.SandboxID, spec.ContainerID, ""); !errdefs.IsNotFound(err) {
		t.Errorf("second delete: %v", err)
	}
	return l
}

// A shim may die at any step: the step fails as unavailable, the container has ended, the pod
// is shown as dead, and nothing is left of either.
func TestShimDiesAtAStep(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can end what a dead shim left")
	}
	for _, step := range []string{"create", "created", "start", "exec", "kill", "delete", "never"} {
		t.Run(step, func(t *testing.T) {
			dir := shimtest.Dir(t)
			m, ctl := fakeNode(t, dir)
			tasks := controller.NewTasks(m)
			h := shimtest.Fake(t, dir, "dies-"+step, "")
			sb, id := shimtest.ID(), shimtest.ID()
			if err := ctl.Create(t.Context(), port.SandboxSpec{ID: sb, Handler: h}); err != nil {
				t.Fatal(err)
			}
			if _, err := ctl.Start(t.Context(), sb); err != nil {
				t.Fatal(err)
			}
			l := live(t, tasks, port.TaskSpec{
				SandboxID: sb, ContainerID: id, Handler: h, Spec: shimtest.Spec(t, sb, id, false, "/bin/sleep", "1000"),
			}, func() {
				if step != "created" {
					return
				}
				st, err := ctl.Status(t.Context(), sb, false)
				if err != nil {
					t.Fatal(err)
				}
				if err := syscall.Kill(int(st.ShimPid), syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
				if _, err := ctl.Wait(t.Context(), sb); err != nil {
					t.Error(err)
				}
			})
			failed := map[string]error{"create": l.create, "created": l.start, "start": l.start, "exec": l.exec}
			for name, err := range failed {
				if (name == step) && (!errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), id)) {
					t.Errorf("%s: %v", name, err)
				}
			}
			// Killing everything works without the shim.
			if l.kill != nil && step != "exec" {
				t.Errorf("kill: %v", l.kill)
			}
			if l.create == nil && l.exit.Code != 137 && l.exit.Code != pod.ExitCodeUnknown {
				t.Errorf("exit %+v", l.exit)
			}
			dead := step != "never"
			if dead {
				if e, err := ctl.Wait(t.Context(), sb); err != nil || e.At.IsZero() {
					t.Errorf("wait for the sandbox: %+v, %v", e, err)
				}
			}
			if st, err := ctl.Status(t.Context(), sb, true); err != nil || st.Alive == dead || st.ExitedAt.IsZero() == dead {
				t.Errorf("status %+v, %v", st, err)
			}
			if err := ctl.Stop(t.Context(), sb, time.Second); err != nil {
				t.Errorf("stop: %v", err)
			}
			for range 2 {
				if err := ctl.Shutdown(t.Context(), sb); err != nil {
					t.Errorf("shutdown: %v", err)
				}
			}
			shimtest.NothingLeft(t, dir, id)
		})
	}
}

// A checkpoint reaches shims of all versions and protocols; options only those that are known
// to understand them.
func TestCheckpointReachesAnyShim(t *testing.T) {
	for _, mode := range []string{"plain", "proto", "grpc"} {
		t.Run(mode, func(t *testing.T) {
			dir := shimtest.Dir(t)
			m, ctl := fakeNode(t, dir)
			tasks := controller.NewTasks(m)
			for kind, options := range map[string]string{"io.containerd.other.v1": "", "io.containerd.runc.v2": "containerd.runc.v1.CheckpointOptions"} {
				h := shimtest.Fake(t, dir, mode, "")
				h.RuntimeType = kind
				sb, id := shimtest.ID(), shimtest.ID()
				if err := ctl.Create(t.Context(), port.SandboxSpec{ID: sb, Handler: h}); err != nil {
					t.Fatal(err)
				}
				if _, err := ctl.Start(t.Context(), sb); err != nil {
					t.Fatal(err)
				}
				_, err := tasks.Create(t.Context(), port.TaskSpec{
					SandboxID: sb, ContainerID: id, Handler: h, Spec: shimtest.Spec(t, sb, id, false, "/bin/sleep", "1000"),
				})
				if err != nil {
					t.Fatal(err)
				}
				image := filepath.Join(dir, "image")
				if err := tasks.Checkpoint(t.Context(), sb, id, port.CheckpointSpec{ImagePath: image}); err != nil {
					t.Error(err)
				}
				if got, err := os.ReadFile(image); err != nil || string(got) != options {
					t.Errorf("%s: options of type %q, %v, want %q", kind, got, err, options)
				}
				err = tasks.Checkpoint(t.Context(), sb, id, port.CheckpointSpec{ImagePath: image, Exit: true})
				if (options == "") != errdefs.IsNotImplemented(err) {
					t.Errorf("%s with options: %v", kind, err)
				}
				if err := tasks.Kill(t.Context(), sb, id, "", syscall.SIGKILL, true); err != nil {
					t.Error(err)
				}
				if _, err := tasks.Wait(t.Context(), sb, id, ""); err != nil {
					t.Error(err)
				}
				if _, err := tasks.Delete(t.Context(), sb, id, ""); err != nil {
					t.Error(err)
				}
				if err := ctl.Shutdown(t.Context(), sb); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
