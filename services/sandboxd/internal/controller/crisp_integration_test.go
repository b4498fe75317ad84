//go:build integration

package controller_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	runtimespec "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/shimtest"
)

// recorder keeps the events of shims.
type recorder struct {
	mu     sync.Mutex
	events []string
}

// record keeps an event as its topic and its container.
func (r *recorder) record(_ context.Context, topic string, event any) {
	id := ""
	if e, ok := event.(interface{ GetContainerID() string }); ok {
		id = e.GetContainerID()
	}
	if e, ok := event.(interface{ GetID() string }); ok && e.GetID() != "" && e.GetID() != id {
		topic += " exec"
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, id+" "+topic)
}

// of lists the topics of a container's events.
func (r *recorder) of(id string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []string
	for _, e := range r.events {
		if topic, ok := strings.CutPrefix(e, id+" "); ok {
			out = append(out, topic)
		}
	}
	return strings.Join(out, ", ")
}

// created creates and starts a container with a changed specification.
func (n *node) created(sb string, change func(*runtimespec.Spec), args ...string) string {
	n.t.Helper()
	id := shimtest.ID()
	stdio, err := n.io.Open(n.t.Context(), id, port.IOSpec{LogPath: filepath.Join(n.dir, id+".log")})
	if err != nil {
		n.t.Fatal(err)
	}
	var spec runtimespec.Spec
	if err := json.Unmarshal(shimtest.Spec(n.t, sb, id, false, args...), &spec); err != nil {
		n.t.Fatal(err)
	}
	change(&spec)
	data, err := json.Marshal(&spec)
	if err != nil {
		n.t.Fatal(err)
	}
	_, err = n.tasks.Create(n.t.Context(), port.TaskSpec{
		SandboxID: sb, ContainerID: id, Handler: n.handler, Rootfs: n.mounts(), Stdio: stdio, Spec: data,
	})
	if err != nil {
		n.t.Fatal(err)
	}
	if _, err := n.tasks.Start(n.t.Context(), sb, id, ""); err != nil {
		n.t.Fatal(err)
	}
	return id
}

func hostPids(s *runtimespec.Spec) {
	var kept []runtimespec.LinuxNamespace
	for _, ns := range s.Linux.Namespaces {
		if ns.Type != runtimespec.PIDNamespace {
			kept = append(kept, ns)
		}
	}
	s.Linux.Namespaces = kept
}

// Without a process namespace of its own a container takes its execs along all the same.
func TestHostPidExecsEnd(t *testing.T) { eachShim(t, testHostPidExecsEnd) }

func testHostPidExecsEnd(t *testing.T, n *node) {
	t.Helper()
	sb := n.sandbox()
	id := n.created(sb, hostPids, "/bin/sleep", "1000")
	var execs []string
	for range 5 {
		x := shimtest.ID()
		if err := n.tasks.Exec(t.Context(), sb, id, port.ExecSpec{ID: x, Process: shimtest.Process("/bin/sleep", "1000")}); err != nil {
			t.Fatal(err)
		}
		if _, err := n.tasks.Start(t.Context(), sb, id, x); err != nil {
			t.Fatal(err)
		}
		execs = append(execs, x)
	}
	pids, err := n.tasks.Pids(t.Context(), sb, id)
	if err != nil || len(pids) != 6 {
		t.Fatalf("pids %v, %v", pids, err)
	}
	if err := n.tasks.Kill(t.Context(), sb, id, "", syscall.SIGKILL, false); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for _, x := range append(execs, "") {
		if e, err := n.tasks.Wait(ctx, sb, id, x); err != nil || e.Code != 137 {
			t.Errorf("wait for %q: %+v, %v", x, e, err)
		}
	}
	for _, pid := range pids {
		if syscall.Kill(int(pid), 0) == nil && !zombie(pid) {
			t.Errorf("process %d lives", pid)
		}
	}
	if _, err := n.finish(sb, id); err != nil {
		t.Error(err)
	}
	if n.handler.Name != "crisp" {
		return
	}
	want := "/tasks/create, /tasks/start" + strings.Repeat(", /tasks/exec-added, /tasks/exec-started", 5) +
		strings.Repeat(", /tasks/exit exec", 5) + ", /tasks/exit, /tasks/delete"
	eventually(t, func() bool { return strings.HasSuffix(n.events.of(id), "/tasks/delete") })
	if got := n.events.of(id); got != want {
		t.Errorf("events %s", got)
	}
}

// The kernel's killing for lack of memory is told before the end that it caused.
func TestLackOfMemory(t *testing.T) { eachShim(t, testLackOfMemory) }

func testLackOfMemory(t *testing.T, n *node) {
	t.Helper()
	sb := n.sandbox()
	limit := int64(8 << 20)
	id := n.created(sb, func(s *runtimespec.Spec) {
		s.Linux.Resources = &runtimespec.LinuxResources{Memory: &runtimespec.LinuxMemory{Limit: &limit, Swap: &limit}}
	}, "/bin/dd", "if=/dev/zero", "of=/dev/null", "bs=64M")
	e, err := n.finish(sb, id)
	if err != nil || e.Code != 137 {
		t.Errorf("%+v, %v", e, err)
	}
	eventually(t, func() bool { return strings.Contains(n.events.of(id), "/tasks/delete") })
	got := n.events.of(id)
	if want := "/tasks/create, /tasks/start, /tasks/oom, /tasks/exit, /tasks/delete"; n.handler.Name == "crisp" && got != want {
		t.Errorf("events %s", got)
	}
}

// While nobody is there a container writes on, and nothing of it is lost.
func TestLogGoesOnWithoutUs(t *testing.T) {
	n := newNode(t, shimtest.Crisp)
	sb := n.sandbox()
	const lines = 300000
	id, err := n.container(sb, port.IOSpec{}, "/bin/sh", "-c", fmt.Sprintf("seq 1 %d; yes %s | head -c 50000000; exit 6", lines, strings.Repeat("0123456789", 10)))
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	n.restart(func() {
		for time.Since(began) < time.Minute {
			if _, err := os.Stat(filepath.Join(n.dir, "shims", sb, "containers", id, "exit.json")); err == nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	})
	t.Logf("52 MB in %s", time.Since(began))
	if e, err := n.finish(sb, id); err != nil || e.Code != 6 {
		t.Errorf("%+v, %v", e, err)
	}
	var want bytes.Buffer
	for i := 1; i <= lines; i++ {
		fmt.Fprintln(&want, i)
	}
	got := n.content(id, "stdout")
	if !strings.HasPrefix(got, want.String()) || len(got) != want.Len()+50000000 {
		t.Errorf("log has %d bytes, want %d", len(got), want.Len()+50000000)
	}
}

func TestAttachAndReopen(t *testing.T) { eachShim(t, testAttachAndReopen) }

func testAttachAndReopen(t *testing.T, n *node) {
	t.Helper()
	sb := n.sandbox()
	id, err := n.container(sb, port.IOSpec{Stdin: true}, "/bin/cat")
	if err != nil {
		t.Fatal(err)
	}
	log := filepath.Join(n.dir, id+".log")
	for i := range 3 {
		ctx, cancel := context.WithCancel(t.Context())
		in, w := io.Pipe()
		out, echoed := io.Pipe()
		done := make(chan error, 1)
		go func() { done <- n.io.Attach(ctx, id, pod.Streams{Stdin: in, Stdout: echoed}) }()
		line := fmt.Sprintf("line %d\n", i)
		if _, err := io.WriteString(w, line); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(line))
		if _, err := io.ReadFull(out, got); err != nil || string(got) != line {
			t.Fatalf("echo %q, %v", got, err)
		}
		cancel()
		if err := <-done; !strings.Contains(err.Error(), context.Canceled.Error()) {
			t.Errorf("attach: %v", err)
		}
		_ = w.Close()
		if err := os.Rename(log, fmt.Sprintf("%s.%d", log, i)); err != nil {
			t.Fatal(err)
		}
		if err := n.io.ReopenLog(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.io.Attach(t.Context(), shimtest.ID(), pod.Streams{}); !errdefs.IsNotFound(err) {
		t.Errorf("attach to the unknown: %v", err)
	}
	n.kill(sb, id)
	for i := range 3 {
		data, err := os.ReadFile(fmt.Sprintf("%s.%d", log, i))
		if err != nil || !strings.HasSuffix(string(data), fmt.Sprintf(" stdout F line %d\n", i)) || strings.Count(string(data), "\n") != 1 {
			t.Errorf("log %d: %q, %v", i, data, err)
		}
	}
}

func TestPauseUpdateStats(t *testing.T) { eachShim(t, testPauseUpdateStats) }

func testPauseUpdateStats(t *testing.T, n *node) {
	t.Helper()
	sb := n.sandbox()
	id, err := n.container(sb, port.IOSpec{}, "/bin/sleep", "1000")
	if err != nil {
		t.Fatal(err)
	}
	if err := n.tasks.Pause(t.Context(), sb, id); err != nil {
		t.Error(err)
	}
	if st, err := n.tasks.State(t.Context(), sb, id, ""); err != nil || st.Status != "paused" {
		t.Errorf("%+v, %v", st, err)
	}
	if err := n.tasks.Resume(t.Context(), sb, id); err != nil {
		t.Error(err)
	}
	shares := uint64(512)
	if err := n.tasks.Update(t.Context(), sb, id, &runtimespec.LinuxResources{CPU: &runtimespec.LinuxCPU{Shares: &shares}}, nil); err != nil {
		t.Error(err)
	}
	if data, err := os.ReadFile("/sys/fs/cgroup/cpu/" + shimtest.Group() + "/" + id + "/cpu.shares"); err == nil && string(data) != "512\n" {
		t.Errorf("shares %q", data)
	}
	if a, err := n.tasks.Stats(t.Context(), sb, id); err != nil || !strings.HasPrefix(a.GetTypeUrl(), "io.containerd.cgroups.") {
		t.Errorf("stats %v, %v", a.GetTypeUrl(), err)
	}
	if err := n.tasks.Kill(t.Context(), sb, id, "", 99, false); err == nil {
		t.Error("signal 99 was sent")
	}
	n.kill(sb, id)
	if err := n.tasks.Kill(t.Context(), sb, id, "", syscall.SIGKILL, false); !errdefs.IsNotFound(err) {
		t.Errorf("signal to the deleted: %v", err)
	}
}

// A sandbox's resources and annotations change where there is a shim, or a process, to hold them.
func TestSandboxUpdate(t *testing.T) { eachShim(t, testSandboxUpdate) }

func testSandboxUpdate(t *testing.T, n *node) {
	t.Helper()
	ctx := t.Context()
	shares := uint64(300)
	resources := &runtimespec.LinuxResources{CPU: &runtimespec.LinuxCPU{Shares: &shares}}
	sb := n.sandbox()
	err := n.ctl.Update(ctx, sb, resources, map[string]string{"a": "b"})
	if n.handler.Sandboxer != pod.SandboxerShim {
		if !errdefs.IsNotImplemented(err) {
			t.Errorf("update without a process: %v", err)
		}
	} else if err != nil {
		t.Error(err)
	} else if st, err := n.ctl.Status(ctx, sb, true); err != nil || st.Info["annotations"] != `{"a":"b"}` || !strings.Contains(st.Info["resources"], "300") {
		t.Errorf("after the update: %v, %v", st.Info, err)
	}
	own := shimtest.ID()
	err = n.ctl.Create(ctx, port.SandboxSpec{
		ID: own, Handler: n.handler, InitRootfs: n.mounts(), Init: shimtest.Spec(t, own, own, false, "/bin/sleep", "1000"),
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.ctl.Start(ctx, own); err != nil {
		t.Fatal(err)
	}
	for _, r := range []*runtimespec.LinuxResources{resources, nil} {
		if err := n.ctl.Update(ctx, own, r, nil); err != nil {
			t.Error(err)
		}
	}
	if data, err := os.ReadFile("/sys/fs/cgroup/cpu/" + shimtest.Group() + "/" + own + "/cpu.shares"); err == nil && string(data) != "300\n" {
		t.Errorf("shares %q", data)
	}
}

// Who is started is the container's program, to which a signal means something; the OCI runtime's
// own process is waited for a little while, which on a busy machine may not be enough.
func TestStartedIsTheProgram(t *testing.T) {
	const little = 50 * time.Millisecond
	eachShim(t, func(t *testing.T, n *node) {
		sb := n.sandbox()
		for range 10 {
			id, err := n.create(sb, port.IOSpec{}, "/bin/sleep", "1000")
			if err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			if _, err := n.tasks.Start(t.Context(), sb, id, ""); err != nil {
				t.Fatal(err)
			}
			took := time.Since(began)
			pid, err := os.ReadFile(filepath.Join(n.dir, "shims", sb, "containers", id, "init.pid"))
			if err != nil {
				t.Fatal(err)
			}
			if exe, err := os.Readlink("/proc/" + string(pid) + "/exe"); err != nil || strings.Contains(exe, "runc") && took < little {
				t.Errorf("process is %q after %s, %v", exe, took, err)
			}
			n.kill(sb, id)
		}
	})
}

// A shim that ends takes everything with it, and its socket.
func TestShutdownLeavesNothing(t *testing.T) {
	eachShim(t, func(t *testing.T, n *node) {
		sb := n.sandbox()
		id, err := n.container(sb, port.IOSpec{}, "/bin/sleep", "1000")
		if err != nil {
			t.Fatal(err)
		}
		st, err := n.ctl.Status(t.Context(), sb, true)
		if err != nil {
			t.Fatal(err)
		}
		if err := n.ctl.Shutdown(t.Context(), sb); err != nil {
			t.Error(err)
		}
		if err := n.io.Close(t.Context(), id); err != nil {
			t.Error(err)
		}
		if err := syscall.Kill(int(st.ShimPid), 0); err == nil && !zombie(st.ShimPid) {
			t.Error("shim lives")
		}
		if left := shimtest.Groups(id); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
		mounts, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil || strings.Contains(string(mounts), n.dir+"/shims") {
			t.Errorf("mounts left, %v", err)
		}
	})
}
