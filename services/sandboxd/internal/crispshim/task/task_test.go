package task_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/stdio"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/task"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/task/tasktest"
)

func create(t *testing.T, n *tasktest.Node, spec task.Spec) *task.Container {
	t.Helper()
	c, err := task.Create(t.Context(), n.Host, spec)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func first(t *testing.T, c *task.Container) *task.Process {
	t.Helper()
	p, err := c.Process("")
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func start(t *testing.T, p *task.Process) {
	t.Helper()
	if pid, err := p.Start(t.Context()); err != nil || pid == 0 {
		t.Fatalf("start: %d, %v", pid, err)
	}
}

func wait(t *testing.T, p *task.Process, want int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	if e, err := p.Wait(ctx); err != nil || e.Status != want {
		t.Errorf("ended with %+v, %v, want %d", e, err, want)
	}
}

func TestLife(t *testing.T) {
	n := tasktest.New(t)
	c := create(t, n, n.Spec("c", "echo hello; exit 7"))
	p := first(t, c)
	if state, _ := p.State(); state != task.Created || p.Pid() == 0 {
		t.Errorf("created: %v, %d", state, p.Pid())
	}
	start(t, p)
	if _, err := p.Start(t.Context()); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("second start: %v", err)
	}
	wait(t, p, 7)
	if e, err := task.SavedExit(c.Bundle()); err != nil || e.Status != 7 || e.Pid != p.Pid() {
		t.Errorf("saved exit %+v, %v", e, err)
	}
	for name, err := range map[string]error{
		"signal": c.Kill(t.Context(), "", unix.SIGTERM, false), "exec": c.AddExec("x", nil, stdio.Config{}),
	} {
		if !errdefs.IsNotFound(err) && !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s after the end: %v", name, err)
		}
	}
	if err := c.Delete(t.Context()); err != nil {
		t.Error(err)
	}
	if err := c.Delete(t.Context()); !errdefs.IsNotFound(err) {
		t.Errorf("second delete: %v", err)
	}
	if out, err := os.ReadFile(c.Bundle() + "/out"); err != nil || string(out) != "hello\n" {
		t.Errorf("output %q, %v", out, err)
	}
	if got := n.Events(); got != "create,start,exit,delete" {
		t.Errorf("events %s", got)
	}
	n.Clean()
}

func TestFailedCreationLeavesNothing(t *testing.T) {
	n := tasktest.New(t)
	spec := n.Spec("c", "true")
	n.Write("c", "fail-create", "no such program")
	if _, err := task.Create(t.Context(), n.Host, spec); err == nil || !strings.Contains(err.Error(), "no such program") {
		t.Errorf("create: %v", err)
	}
	n.Write("c", "fail-create", "")
	for name, change := range map[string]func(*task.Spec){
		"no id":           func(s *task.Spec) { s.ID = "" },
		"id with a slash": func(s *task.Spec) { s.ID = "../c" },
		"relative bundle": func(s *task.Spec) { s.Bundle = "c" },
		"no bundle":       func(s *task.Spec) { s.Bundle += "-absent" },
		"unknown stream":  func(s *task.Spec) { s.Stdout = "pigeon:///x" },
		"relative images": func(s *task.Spec) { s.Checkpoint = "x" },
	} {
		bad := spec
		change(&bad)
		if _, err := task.Create(t.Context(), n.Host, bad); !errdefs.IsInvalidArgument(err) && !errdefs.IsNotImplemented(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := n.Events(); got != "" {
		t.Errorf("events %s", got)
	}
	n.Clean()
	c := create(t, n, spec)
	if err := c.Delete(t.Context()); err != nil {
		t.Errorf("delete of a container that never ran: %v", err)
	}
	n.Clean()
}

// Each command of a container is told that systemd keeps its cgroup, those after the death of
// the shim too.
func TestSystemdCgroupReachesTheRuntime(t *testing.T) {
	n := tasktest.New(t)
	dir := t.TempDir()
	calls, wrapper := filepath.Join(dir, "calls"), filepath.Join(dir, "runtime")
	script := "#!/bin/sh\necho \"$*\" >>" + calls + "\nexec " + n.Options().GetBinaryName() + " \"$@\"\n"
	if err := os.WriteFile(wrapper, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	spec := n.Spec("c", "exit 0")
	spec.Options = &options.Options{BinaryName: wrapper, Root: n.Options().GetRoot(), SystemdCgroup: true}
	c := create(t, n, spec)
	p := first(t, c)
	start(t, p)
	wait(t, p, 0)
	saved, err := task.SavedRuntime(c.Bundle())
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(c.Delete(t.Context()), saved.Delete(t.Context(), c.Bundle(), "c")); err != nil {
		t.Error(err)
	}
	text, err := os.ReadFile(calls)
	if err != nil {
		t.Fatal(err)
	}
	verbs := map[string]int{}
	for line := range strings.Lines(string(text)) {
		if !strings.Contains(line, " --systemd-cgroup ") {
			t.Errorf("the runtime was called with %q", line)
		}
		for _, verb := range []string{"create", "start", "delete"} {
			if strings.Contains(line, " "+verb+" ") {
				verbs[verb]++
			}
		}
	}
	if verbs["create"] != 1 || verbs["start"] != 1 || verbs["delete"] != 2 {
		t.Errorf("calls %v", verbs)
	}
}

// A runtime whose delete command fails may say the next time that there is nothing to delete:
// the deletion is over when its folder of the container is gone, and not before.
func TestDeletionInsistsOnTheStateOfTheRuntime(t *testing.T) {
	testkit.NeedRoot(t)
	n := tasktest.New(t)
	c := create(t, n, n.Spec("c", "exit 0"))
	p := first(t, c)
	start(t, p)
	wait(t, p, 0)
	state := filepath.Join(n.Options().GetRoot(), "ns", "c")
	place := filepath.Join(state, "obstacle")
	if err := os.Mkdir(place, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", place, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	release := func() { _ = unix.Unmount(place, unix.MNT_DETACH) }
	t.Cleanup(release)
	for range 3 {
		if err := c.Delete(t.Context()); err == nil || !strings.Contains(err.Error(), state) {
			t.Errorf("delete with an obstacle: %v", err)
		}
	}
	if got := n.Events(); strings.Contains(got, "delete") {
		t.Errorf("events %s before the deletion", got)
	}
	release()
	if err := c.Delete(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(state); !os.IsNotExist(err) {
		t.Errorf("the state: %v, want it gone", err)
	}
}

func TestExecs(t *testing.T) {
	n := tasktest.New(t)
	c := create(t, n, n.Spec("c", "exec sleep 100"))
	start(t, first(t, c))
	add := func(id, script string) *task.Process {
		process, err := json.Marshal(map[string]any{"args": []string{n.Write("c", id+".sh", script)}, "cwd": "/"})
		if err != nil {
			t.Fatal(err)
		}
		if err := c.AddExec(id, process, stdio.Config{Stdout: "file://" + c.Bundle() + "/" + id + ".out"}); err != nil {
			t.Fatal(err)
		}
		p, err := c.Process(id)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	x := add("x", "echo in; exit 5")
	if err := c.AddExec("x", nil, stdio.Config{}); !errdefs.IsAlreadyExists(err) {
		t.Errorf("second of the id: %v", err)
	}
	if err := c.Kill(t.Context(), "x", unix.SIGKILL, false); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("signal before the start: %v", err)
	}
	start(t, x)
	wait(t, x, 5)
	if _, err := c.DeleteExec(t.Context(), "x"); err != nil {
		t.Error(err)
	}
	if _, err := c.DeleteExec(t.Context(), "x"); !errdefs.IsNotFound(err) {
		t.Errorf("second delete: %v", err)
	}
	y := add("y", "exec sleep 100")
	start(t, y)
	if _, err := c.DeleteExec(t.Context(), "y"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("delete of a running one: %v", err)
	}
	if err := c.Kill(t.Context(), "y", unix.SIGTERM, false); err != nil {
		t.Error(err)
	}
	wait(t, y, 143)
	n.Write("c", "fail-exec", "cannot join")
	z := add("z", "true")
	if _, err := z.Start(t.Context()); err == nil || !strings.Contains(err.Error(), "cannot join") {
		t.Errorf("failing start: %v", err)
	}
	if _, err := c.DeleteExec(t.Context(), "z"); err != nil {
		t.Errorf("delete of one that never ran: %v", err)
	}
	if err := c.Destroy(t.Context()); err != nil {
		t.Error(err)
	}
	want := "create,start,exec-added,exec-started,exit x,delete x,exec-added,exec-started,exit y,exec-added,exit,delete"
	n.Eventually("the last event", func() bool { return strings.HasSuffix(n.Events(), ",delete") })
	if got := n.Events(); got != want {
		t.Errorf("events %s", got)
	}
	n.Clean()
}

// However many execs are being started, the end of the container comes, and comes last.
func TestEndInAStormOfExecs(t *testing.T) {
	n := tasktest.New(t)
	c := create(t, n, n.Spec("c", "exec sleep 100"))
	start(t, first(t, c))
	script := n.Write("c", "date.sh", "exec date")
	process, err := json.Marshal(map[string]any{"args": []string{script}, "cwd": "/"})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for id := range strings.SplitSeq("abdefghijklm", "") {
		wg.Go(func() {
			if c.AddExec(id, process, stdio.Config{}) != nil {
				return
			}
			p, err := c.Process(id)
			if err != nil {
				return
			}
			// After the kill it may fail, but it must come back.
			if _, err := p.Start(t.Context()); err == nil {
				_, err = p.Wait(t.Context())
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	time.Sleep(20 * time.Millisecond)
	if err := c.Kill(t.Context(), "", unix.SIGKILL, false); err != nil {
		t.Fatal(err)
	}
	wait(t, first(t, c), 137)
	wg.Wait()
	if err := c.Delete(t.Context()); err != nil {
		t.Error(err)
	}
	if got := n.Events(); !strings.HasSuffix(got, ",exit,delete") || strings.Count(got, "exec-started") != strings.Count(got, "exit ") {
		t.Errorf("events %s", got)
	}
	n.Clean()
}

func TestPauseUpdateCheckpointRestore(t *testing.T) {
	n := tasktest.New(t)
	c := create(t, n, n.Spec("c", "exec sleep 100"))
	image := t.TempDir() + "/image"
	if err := c.Checkpoint(t.Context(), image, nil); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("checkpoint before the start: %v", err)
	}
	p := first(t, c)
	start(t, p)
	if err := c.Pause(t.Context()); err != nil {
		t.Error(err)
	}
	if state, _ := p.State(); state != task.Paused {
		t.Errorf("state %v", state)
	}
	if err := c.Update(t.Context(), []byte(`{"cpu":{"shares":7}}`)); err != nil {
		t.Error(err)
	}
	if data, err := os.ReadFile(c.Bundle() + "/resources"); err != nil || !strings.Contains(string(data), `"shares":7`) {
		t.Errorf("resources %q, %v", data, err)
	}
	if err := c.Update(t.Context(), []byte(`{`)); !errdefs.IsInvalidArgument(err) {
		t.Errorf("broken update: %v", err)
	}
	if err := c.Resume(t.Context()); err != nil {
		t.Error(err)
	}
	n.Write("c", "fail-checkpoint", "criu is not there")
	if err := c.Checkpoint(t.Context(), image, nil); err == nil || !strings.Contains(err.Error(), "criu is not there") {
		t.Errorf("failing checkpoint: %v", err)
	}
	n.Write("c", "fail-checkpoint", "")
	if err := c.Checkpoint(t.Context(), "", &options.CheckpointOptions{ImagePath: image, Exit: true}); err != nil {
		t.Fatal(err)
	}
	wait(t, p, 137)
	spec := n.Spec("r", "exit 3")
	spec.Checkpoint = image
	r := create(t, n, spec)
	if first(t, r).Pid() != 0 {
		t.Error("a process before the start")
	}
	start(t, first(t, r))
	wait(t, first(t, r), 3)
	spec = n.Spec("k", "exit 3")
	spec.Checkpoint = image
	k := create(t, n, spec)
	if err := k.Kill(t.Context(), "", unix.SIGKILL, true); err != nil {
		t.Errorf("kill before the restore: %v", err)
	}
	wait(t, first(t, k), 137)
	if _, err := first(t, k).Start(t.Context()); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("start after the kill: %v", err)
	}
	for _, c := range []*task.Container{c, r, k} {
		if err := c.Delete(t.Context()); err != nil {
			t.Error(err)
		}
	}
	n.Clean()
}
