package service

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	sandboxapi "github.com/containerd/containerd/api/runtime/sandbox/v1"
	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types"
	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	taskv1 "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/task/tasktest"
)

// shim is the services over a runtime for tests.
type shim struct {
	*Services

	t       *testing.T
	n       *tasktest.Node
	options *anypb.Any
	stopped atomic.Bool
}

func newShim(t *testing.T) *shim {
	t.Helper()
	n := tasktest.New(t)
	value, err := proto.Marshal(n.Options())
	if err != nil {
		t.Fatal(err)
	}
	s := &shim{t: t, n: n, options: &anypb.Any{TypeUrl: "containerd.runc.v1.Options", Value: value}}
	listen := func(context.Context) error { return nil }
	s.Services = New(n.Host, filepath.Join(t.TempDir(), "options.pb"), listen, func() { s.stopped.Store(true) })
	return s
}

func (s *shim) run(id, script string) {
	s.t.Helper()
	ctx := s.t.Context()
	created, err := s.Create(ctx, &taskapi.CreateTaskRequest{ID: id, Bundle: s.n.Bundle(id, script), Options: s.options})
	if err != nil {
		s.t.Fatal(err)
	}
	started, err := s.Start(ctx, &taskapi.StartRequest{ID: id})
	if err != nil || started.GetPid() == 0 || started.GetPid() != created.GetPid() {
		s.t.Fatalf("created %v, started %v, %v", created, started, err)
	}
}

// Every call about an unknown container, exec or sandbox says so.
func TestUnknownIsNotFound(t *testing.T) {
	s := newShim(t)
	s.run("c", "exec sleep 100")
	ctx := t.Context()
	for name, call := range map[string]func(id, exec string) error{
		"start": func(id, x string) error { _, err := s.Start(ctx, &taskapi.StartRequest{ID: id, ExecID: x}); return err },
		"state": func(id, x string) error { _, err := s.State(ctx, &taskapi.StateRequest{ID: id, ExecID: x}); return err },
		"wait":  func(id, x string) error { _, err := s.Wait(ctx, &taskapi.WaitRequest{ID: id, ExecID: x}); return err },
		"kill": func(id, x string) error {
			_, err := s.Kill(ctx, &taskapi.KillRequest{ID: id, ExecID: x, Signal: 15})
			return err
		},
		"delete": func(id, x string) error {
			_, err := s.Delete(ctx, &taskapi.DeleteRequest{ID: id, ExecID: x})
			return err
		},
		"resize": func(id, x string) error {
			_, err := s.ResizePty(ctx, &taskapi.ResizePtyRequest{ID: id, ExecID: x})
			return err
		},
		"closeio": func(id, x string) error {
			_, err := s.CloseIO(ctx, &taskapi.CloseIORequest{ID: id, ExecID: x, Stdin: true})
			return err
		},
	} {
		for _, who := range [][2]string{{"absent", ""}, {"c", "absent"}} {
			if err := call(who[0], who[1]); !errdefs.IsNotFound(err) {
				t.Errorf("%s of %v: %v", name, who, err)
			}
		}
	}
	for name, call := range map[string]func() error{
		"exec":       func() error { _, err := s.Exec(ctx, &taskapi.ExecProcessRequest{ID: "absent"}); return err },
		"pids":       func() error { _, err := s.Pids(ctx, &taskapi.PidsRequest{ID: "absent"}); return err },
		"pause":      func() error { _, err := s.Pause(ctx, &taskapi.PauseRequest{ID: "absent"}); return err },
		"resume":     func() error { _, err := s.Resume(ctx, &taskapi.ResumeRequest{ID: "absent"}); return err },
		"update":     func() error { _, err := s.Update(ctx, &taskapi.UpdateTaskRequest{ID: "absent"}); return err },
		"stats":      func() error { _, err := s.Stats(ctx, &taskapi.StatsRequest{ID: "absent"}); return err },
		"checkpoint": func() error { _, err := s.Checkpoint(ctx, &taskapi.CheckpointTaskRequest{ID: "absent"}); return err },
		"start sandbox": func() error {
			_, err := s.StartSandbox(ctx, &sandboxapi.StartSandboxRequest{SandboxID: "absent"})
			return err
		},
		"stop sandbox": func() error {
			_, err := s.StopSandbox(ctx, &sandboxapi.StopSandboxRequest{SandboxID: "absent"})
			return err
		},
		"ping": func() error { _, err := s.PingSandbox(ctx, &sandboxapi.PingRequest{SandboxID: "absent"}); return err },
		"shut down sandbox": func() error {
			_, err := s.ShutdownSandbox(ctx, &sandboxapi.ShutdownSandboxRequest{SandboxID: "absent"})
			return err
		},
	} {
		if err := call(); !errdefs.IsNotFound(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := s.Create(ctx, &taskapi.CreateTaskRequest{ID: "c", Bundle: "/x", Options: s.options}); !errdefs.IsAlreadyExists(err) {
		t.Errorf("second create: %v", err)
	}
	if err := s.destroyAll(ctx); err != nil {
		t.Error(err)
	}
	s.n.Clean()
}

// The shim ends by Shutdown only when there is nothing left in it, and takes no more then.
func TestShutdownWaitsForTheLast(t *testing.T) {
	s := newShim(t)
	ctx := t.Context()
	s.run("c", "exit 4")
	if _, err := s.Shutdown(ctx, &taskapi.ShutdownRequest{}); err != nil || s.stopped.Load() {
		t.Errorf("shutdown with a container: %v, stopped %v", err, s.stopped.Load())
	}
	if e, err := s.Wait(ctx, &taskapi.WaitRequest{ID: "c"}); err != nil || e.GetExitStatus() != 4 {
		t.Errorf("wait: %v, %v", e, err)
	}
	if st, err := s.State(ctx, &taskapi.StateRequest{ID: "c"}); err != nil || st.GetStatus() != taskv1.Status_STOPPED || st.GetExitStatus() != 4 {
		t.Errorf("state: %v, %v", st, err)
	}
	if c, err := s.Connect(ctx, &taskapi.ConnectRequest{ID: "c"}); err != nil || c.GetTaskPid() == 0 || int(c.GetShimPid()) != os.Getpid() {
		t.Errorf("connect: %v, %v", c, err)
	}
	if e, err := s.Delete(ctx, &taskapi.DeleteRequest{ID: "c"}); err != nil || e.GetExitStatus() != 4 || e.GetExitedAt() == nil {
		t.Errorf("delete: %v, %v", e, err)
	}
	if _, err := s.Shutdown(ctx, &taskapi.ShutdownRequest{}); err != nil || !s.stopped.Load() {
		t.Errorf("shutdown: %v, stopped %v", err, s.stopped.Load())
	}
	if _, err := s.Create(ctx, &taskapi.CreateTaskRequest{ID: "d", Bundle: "/x"}); !errdefs.IsUnavailable(err) {
		t.Errorf("create in an ending shim: %v", err)
	}
	s.n.Clean()
}

// A failed creation frees its id, and options come from the request or from the pod.
func TestCreateThatFails(t *testing.T) {
	s := newShim(t)
	ctx := t.Context()
	bundle := s.n.Bundle("c", "exit 0")
	s.n.Write("c", "fail-create", "refused by the runtime")
	for range 2 {
		_, err := s.Create(ctx, &taskapi.CreateTaskRequest{ID: "c", Bundle: bundle, Options: s.options})
		if err == nil || !strings.Contains(err.Error(), "refused by the runtime") {
			t.Errorf("create: %v", err)
		}
	}
	s.n.Write("c", "fail-create", "")
	broken := &anypb.Any{TypeUrl: s.options.GetTypeUrl(), Value: []byte{0xff}}
	if _, err := s.Create(ctx, &taskapi.CreateTaskRequest{ID: "c", Bundle: bundle, Options: broken}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("broken options: %v", err)
	}
	if err := os.WriteFile(s.optionsPath, s.options.GetValue(), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Create(ctx, &taskapi.CreateTaskRequest{ID: "c", Bundle: bundle}); err != nil {
		t.Errorf("options of the pod: %v", err)
	}
	if _, err := s.Exec(ctx, &taskapi.ExecProcessRequest{ID: "c", ExecID: "x", Stdout: "crilog:///x"}); !errdefs.IsNotImplemented(err) {
		t.Errorf("exec with a log: %v", err)
	}
	value, err := proto.Marshal(&runcoptions.CheckpointOptions{ImagePath: "relative"})
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range []*anypb.Any{{TypeUrl: "containerd.runc.v1.CheckpointOptions", Value: value}, {TypeUrl: "containerd.runc.v1.CheckpointOptions", Value: []byte{0xff}}} {
		if _, err := s.Checkpoint(ctx, &taskapi.CheckpointTaskRequest{ID: "c", Options: o}); !errdefs.IsInvalidArgument(err) {
			t.Errorf("checkpoint: %v", err)
		}
	}
	if _, err := s.Delete(ctx, &taskapi.DeleteRequest{ID: "c"}); err != nil {
		t.Error(err)
	}
	s.n.Clean()
}

func TestSandboxWithoutAProcess(t *testing.T) {
	s := newShim(t)
	ctx := t.Context()
	bundle := s.n.Bundle("sb", "")
	s.n.Write("sb", "config.json", `{"annotations":{}}`)
	for i := range 2 {
		_, err := s.CreateSandbox(ctx, &sandboxapi.CreateSandboxRequest{SandboxID: "sb", BundlePath: bundle, Annotations: map[string]string{"a": "1"}})
		if (i == 0) != (err == nil) || i == 1 && !errdefs.IsAlreadyExists(err) {
			t.Errorf("create %d: %v", i, err)
		}
	}
	state := func() *sandboxapi.SandboxStatusResponse {
		t.Helper()
		st, err := s.SandboxStatus(ctx, &sandboxapi.SandboxStatusRequest{SandboxID: "sb", Verbose: true})
		if err != nil {
			t.Fatal(err)
		}
		return st
	}
	if st := state(); st.GetState() != stateNotReady {
		t.Errorf("before the start: %v", st)
	}
	if r, err := s.StartSandbox(ctx, &sandboxapi.StartSandboxRequest{SandboxID: "sb"}); err != nil || r.GetPid() != 0 || r.GetCreatedAt() == nil {
		t.Errorf("start: %v, %v", r, err)
	}
	update := func(fields []string, spec string) error {
		_, err := s.UpdateSandbox(ctx, &sandboxapi.UpdateSandboxRequest{
			SandboxID: "sb", Fields: fields, Sandbox: &types.Sandbox{Spec: &anypb.Any{Value: []byte(spec)}},
		})
		return err
	}
	if err := update([]string{"spec"}, `{"annotations":{"b":"2"},"linux":{"resources":{"cpu":{"shares":9}}}}`); err != nil {
		t.Error(err)
	}
	if err := update([]string{"labels"}, `{}`); !errdefs.IsNotImplemented(err) {
		t.Errorf("update of labels: %v", err)
	}
	if err := update(nil, `{`); !errdefs.IsInvalidArgument(err) {
		t.Errorf("broken update: %v", err)
	}
	if st := state(); st.GetState() != stateReady || st.GetInfo()["annotations"] != `{"a":"1","b":"2"}` || st.GetInfo()["resources"] != `{"cpu":{"shares":9}}` {
		t.Errorf("status: %v", st)
	}
	if _, err := s.Shutdown(ctx, &taskapi.ShutdownRequest{}); err != nil || s.stopped.Load() {
		t.Errorf("shutdown of the task service ended the sandbox: %v", err)
	}
	if p, err := s.Platform(ctx, &sandboxapi.PlatformRequest{SandboxID: "sb"}); err != nil || p.GetPlatform().GetOS() != "linux" {
		t.Errorf("platform: %v, %v", p, err)
	}
	s.run("c", "exec sleep 100")
	if _, err := s.StopSandbox(ctx, &sandboxapi.StopSandboxRequest{SandboxID: "sb"}); err != nil {
		t.Error(err)
	}
	if _, err := s.WaitSandbox(ctx, &sandboxapi.WaitSandboxRequest{SandboxID: "sb"}); err != nil {
		t.Error(err)
	}
	if st := state(); st.GetState() != stateNotReady || st.GetExitedAt() == nil {
		t.Errorf("after the stop: %v", st)
	}
	if _, err := s.ShutdownSandbox(ctx, &sandboxapi.ShutdownSandboxRequest{SandboxID: "sb"}); err != nil || !s.stopped.Load() {
		t.Errorf("shutdown: %v, stopped %v", err, s.stopped.Load())
	}
	if _, err := s.get("c"); !errdefs.IsNotFound(err) {
		t.Errorf("container after the shutdown: %v", err)
	}
	s.n.Clean()
}

// A sandbox whose bundle describes a process has one, which the stop ends.
func TestSandboxWithAProcess(t *testing.T) {
	s := newShim(t)
	ctx := t.Context()
	bundle := s.n.Bundle("sb", "trap '' TERM; touch \"${0%script}ready\"; while true; do sleep 0.05; done")
	if _, err := s.CreateSandbox(ctx, &sandboxapi.CreateSandboxRequest{SandboxID: "sb", BundlePath: bundle, Options: s.options}); err != nil {
		t.Fatal(err)
	}
	s.n.Write("sb", "fail-start", "not today")
	if _, err := s.StartSandbox(ctx, &sandboxapi.StartSandboxRequest{SandboxID: "sb"}); err == nil || !strings.Contains(err.Error(), "not today") {
		t.Errorf("failing start: %v", err)
	}
	s.n.Write("sb", "fail-start", "")
	s.n.Clean()
	r, err := s.StartSandbox(ctx, &sandboxapi.StartSandboxRequest{SandboxID: "sb"})
	if err != nil || r.GetPid() == 0 {
		t.Fatalf("start: %v, %v", r, err)
	}
	s.n.Eventually("the process is ready", func() bool {
		_, err := os.Stat(filepath.Join(bundle, "ready"))
		return err == nil
	})
	ctx, cancel := context.WithTimeout(ctx, testkit.Patience)
	defer cancel()
	if _, err := s.StopSandbox(ctx, &sandboxapi.StopSandboxRequest{SandboxID: "sb", TimeoutSecs: 3600}); err != nil {
		t.Error(err)
	}
	if e, err := s.WaitSandbox(ctx, &sandboxapi.WaitSandboxRequest{SandboxID: "sb"}); err != nil || e.GetExitStatus() != 137 {
		t.Errorf("wait: %v, %v", e, err)
	}
	if _, err := s.ShutdownSandbox(ctx, &sandboxapi.ShutdownSandboxRequest{SandboxID: "sb"}); err != nil {
		t.Error(err)
	}
	s.n.Clean()
}
