//go:build integration

package controller_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/containerio"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/controller"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/client"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/hints"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/shimtest"
)

// node is one run of the process on a run folder that outlives it.
type node struct {
	t       *testing.T
	dir     string
	handler pod.Handler
	rootfs  string

	shims  *shim.Manager
	tasks  *controller.Tasks
	ctl    *controller.Router
	io     port.IO
	fifos  *containerio.IO
	events recorder
	stop   func()
}

// shims are the shims that must all behave the same, by the name of the test.
var shims = map[string]func(t testing.TB, dir string) pod.Handler{
	"stock": shimtest.Handler,
	"crisp": shimtest.Crisp,
	"crisp with sandbox api": func(t testing.TB, dir string) pod.Handler {
		h := shimtest.Crisp(t, dir)
		h.Sandboxer = pod.SandboxerShim
		return h
	},
}

// eachShim runs a test with each shim.
func eachShim(t *testing.T, test func(t *testing.T, n *node)) {
	t.Helper()
	for name, handler := range shims {
		t.Run(name, func(t *testing.T) { test(t, newNode(t, handler)) })
	}
}

func newNode(t *testing.T, handler func(t testing.TB, dir string) pod.Handler) *node {
	t.Helper()
	dir := shimtest.Dir(t)
	n := &node{t: t, dir: dir, handler: handler(t, dir), rootfs: shimtest.Rootfs(t, dir)}
	n.up()
	t.Cleanup(func() {
		for _, i := range n.shims.All() {
			if err := n.ctl.Shutdown(context.Background(), i.ID()); err != nil {
				t.Errorf("shutdown: %v", err)
			}
		}
		n.down()
		for _, sub := range []string{"shims", "io", "s"} {
			entries, _ := os.ReadDir(filepath.Join(dir, sub))
			for _, e := range entries {
				t.Errorf("left behind: %s/%s", sub, e.Name())
			}
		}
	})
	return n
}

func (n *node) log() *slog.Logger {
	return slog.New(slog.NewTextHandler(n.t.Output(), &slog.HandlerOptions{Level: slog.LevelInfo}))
}

// up starts what a process would.
func (n *node) up() {
	n.t.Helper()
	socket := filepath.Join(n.dir, "shim-events.sock")
	var err error
	n.shims, err = shim.New(n.t.Context(), shim.Config{
		Dir: filepath.Join(n.dir, "shims"), SocketDir: filepath.Join(n.dir, "s"), EventsSocket: socket,
	}, n.log())
	if err != nil {
		n.t.Fatal(err)
	}
	l, err := hints.Listen(n.t.Context(), socket)
	if err != nil {
		n.t.Fatal(err)
	}
	srv, err := hints.New(n.log(), n.events.record)
	if err != nil {
		n.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan struct{})
	go func() {
		defer close(served)
		if err := srv.Serve(ctx, l); err != nil {
			n.t.Errorf("serve: %v", err)
		}
	}()
	n.stop = func() {
		cancel()
		<-served
	}
	n.tasks = controller.NewTasks(n.shims)
	n.ctl = controller.New(n.shims, n.tasks)
	tasks := n.tasks
	n.fifos = containerio.New(containerio.Config{
		Dir: filepath.Join(n.dir, "io"),
		StdinClosed: func(ctx context.Context, id string) {
			for _, i := range n.shims.All() {
				if i.Bundle().HasContainer(id) {
					_ = tasks.CloseIO(ctx, i.ID(), id, "")
				}
			}
		},
	}, n.log())
	n.io = n.fifos
	if n.handler.Name == "crisp" {
		n.io = client.New(client.Config{Execs: n.fifos, Bundle: n.bundleOf})
	}
}

// bundleOf finds the pod of a container.
func (n *node) bundleOf(id string) (string, error) {
	for _, i := range n.shims.All() {
		if i.Bundle().HasContainer(id) {
			return i.Bundle().Dir(), nil
		}
	}
	return "", errdefs.ErrNotFound
}

// down ends what a process would take with it, gently.
func (n *node) down() {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := n.fifos.Stop(ctx); err != nil {
		n.t.Errorf("io stop: %v", err)
	}
	if err := n.shims.Close(); err != nil {
		n.t.Errorf("shims close: %v", err)
	}
	n.stop()
}

// restart forgets everything and loads it anew.
func (n *node) restart(between func()) []shim.Loaded {
	n.t.Helper()
	n.down()
	if between != nil {
		between()
	}
	n.up()
	loaded, err := n.shims.Reload(n.t.Context(), nil)
	if err != nil {
		n.t.Fatal(err)
	}
	return loaded
}

func (n *node) sandbox() string {
	n.t.Helper()
	id := shimtest.ID()
	if err := n.ctl.Create(n.t.Context(), port.SandboxSpec{ID: id, Handler: n.handler}); err != nil {
		n.t.Fatal(err)
	}
	if _, err := n.ctl.Start(n.t.Context(), id); err != nil {
		n.t.Fatal(err)
	}
	return id
}

func (n *node) mounts() []mount.Mount {
	return []mount.Mount{{Type: "bind", Source: n.rootfs, Options: []string{"rbind", "ro"}}}
}

// container creates and starts a container and returns its id.
func (n *node) container(sandboxID string, io port.IOSpec, args ...string) (string, error) {
	id, err := n.create(sandboxID, io, args...)
	if err != nil {
		return id, err
	}
	if _, err := n.tasks.Start(n.t.Context(), sandboxID, id, ""); err != nil {
		return id, errors.Join(err, n.io.Close(n.t.Context(), id))
	}
	return id, nil
}

// create creates a container and returns its id.
func (n *node) create(sandboxID string, io port.IOSpec, args ...string) (string, error) {
	id := shimtest.ID()
	if io.LogPath == "" {
		io.LogPath = filepath.Join(n.dir, id+".log")
	}
	stdio, err := n.io.Open(n.t.Context(), id, io)
	if err != nil {
		return id, err
	}
	_, err = n.tasks.Create(n.t.Context(), port.TaskSpec{
		SandboxID: sandboxID, ContainerID: id, Handler: n.handler, Rootfs: n.mounts(), Stdio: stdio,
		Spec: shimtest.Spec(n.t, sandboxID, id, io.Terminal, args...),
	})
	if err != nil {
		return id, errors.Join(err, n.io.Close(n.t.Context(), id))
	}
	return id, nil
}

// finish waits for a container and removes it.
func (n *node) finish(sandboxID, id string) (pod.Exit, error) {
	ctx, cancel := context.WithTimeout(n.t.Context(), 30*time.Second)
	defer cancel()
	e, err := n.tasks.Wait(ctx, sandboxID, id, "")
	if err != nil {
		return e, fmt.Errorf("wait: %w", err)
	}
	if err := n.io.Drain(ctx, id); err != nil {
		return e, fmt.Errorf("drain: %w", err)
	}
	d, err := n.tasks.Delete(ctx, sandboxID, id, "")
	if err != nil {
		return e, fmt.Errorf("delete: %w", err)
	}
	if d.Code != e.Code {
		return e, fmt.Errorf("delete says %d, wait %d", d.Code, e.Code)
	}
	if _, err := n.tasks.Delete(ctx, sandboxID, id, ""); !errdefs.IsNotFound(err) {
		return e, fmt.Errorf("second delete: %w", err)
	}
	return e, n.io.Close(ctx, id)
}

// content joins the contents of a log's records per stream.
func (n *node) content(id, stream string) string {
	n.t.Helper()
	data, err := os.ReadFile(filepath.Join(n.dir, id+".log"))
	if err != nil {
		n.t.Fatal(err)
	}
	var out strings.Builder
	for line := range strings.SplitSeq(strings.TrimSuffix(string(data), "\n"), "\n") {
		if line == "" {
			continue
		}
		m := strings.SplitN(line, " ", 4)
		if len(m) != 4 || (m[2] != "P" && m[2] != "F") {
			n.t.Fatalf("bad record %q", line)
		}
		if m[1] != stream {
			continue
		}
		out.WriteString(m[3])
		if m[2] == "F" {
			out.WriteByte('\n')
		}
	}
	return out.String()
}

func TestExitCodes(t *testing.T) { eachShim(t, testExitCodes) }

func testExitCodes(t *testing.T, n *node) {
	t.Helper()
	sb := n.sandbox()
	for _, tc := range []struct {
		name string
		args []string
		code uint32
	}{
		{"true", []string{"/bin/true"}, 0},
		{"exit 3", []string{"/bin/sh", "-c", "exit 3"}, 3},
		{"killed", []string{"/bin/sh", "-c", "sh -c 'kill -9 $PPID'; exit 137"}, 137},
	} {
		t.Run(tc.name, func(t *testing.T) {
			id, err := n.container(sb, port.IOSpec{}, tc.args...)
			if err != nil {
				t.Fatal(err)
			}
			e, err := n.finish(sb, id)
			if err != nil {
				t.Fatal(err)
			}
			if e.Code != tc.code || e.At.IsZero() || e.Pid == 0 {
				t.Errorf("exit %+v, want code %d", e, tc.code)
			}
		})
	}
	st, err := n.ctl.Status(t.Context(), sb, true)
	if err != nil || !st.Alive || st.ShimPid == 0 {
		t.Errorf("status %+v, %v", st, err)
	}
}

func TestEntryPointNotFoundLeavesNothing(t *testing.T) {
	eachShim(t, testEntryPointNotFoundLeavesNothing)
}

func testEntryPointNotFoundLeavesNothing(t *testing.T, n *node) {
	t.Helper()
	sb := n.sandbox()
	for _, args := range [][]string{{"/does/not/exist"}, {"/tmp"}} {
		id, err := n.container(sb, port.IOSpec{}, args...)
		if err == nil || !strings.Contains(err.Error(), args[0]) {
			t.Errorf("start of %v: %v", args, err)
		}
		if _, err := n.tasks.State(t.Context(), sb, id, ""); !errdefs.IsNotFound(err) {
			t.Errorf("state: %v", err)
		}
		if left := shimtest.Groups(id); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
}

func TestLogIsComplete(t *testing.T) { eachShim(t, testLogIsComplete) }

func testLogIsComplete(t *testing.T, n *node) {
	t.Helper()
	sb := n.sandbox()
	id, err := n.container(sb, port.IOSpec{}, "/bin/sh", "-c", "seq 1 200000; echo -n tail; echo oops >&2")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.finish(sb, id); err != nil {
		t.Fatal(err)
	}
	var want bytes.Buffer
	for i := 1; i <= 200000; i++ {
		fmt.Fprintln(&want, i)
	}
	want.WriteString("tail")
	if got := n.content(id, "stdout"); got != want.String() {
		t.Errorf("stdout has %d bytes, want %d", len(got), want.Len())
	}
	if got := n.content(id, "stderr"); got != "oops\n" {
		t.Errorf("stderr %q", got)
	}
}

func TestExec(t *testing.T) { eachShim(t, testExec) }

func testExec(t *testing.T, n *node) {
	t.Helper()
	sb := n.sandbox()
	id, err := n.container(sb, port.IOSpec{}, "/bin/sleep", "1000")
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	in := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
	code, err := n.exec(sb, id, pod.Streams{Stdin: bytes.NewReader(in), Stdout: &out}, "/bin/cat")
	if err != nil || code != 0 {
		t.Fatalf("exec: %d, %v", code, err)
	}
	if !bytes.Equal(out.Bytes(), in) {
		t.Errorf("cat gave %d bytes of %d", out.Len(), len(in))
	}
	out.Reset()
	if code, err = n.exec(sb, id, pod.Streams{Stdout: &out}, "/bin/sh", "-c", "echo hello; exit 7"); err != nil || code != 7 {
		t.Errorf("exec: %d, %v", code, err)
	}
	if out.String() != "hello\n" {
		t.Errorf("output %q", out.String())
	}
	if _, err = n.exec(sb, id, pod.Streams{}, "/no/such"); err == nil || !strings.Contains(err.Error(), "/no/such") {
		t.Errorf("exec of nothing: %v", err)
	}
	n.kill(sb, id)
}

func (n *node) kill(sb, id string) {
	n.t.Helper()
	if err := n.tasks.Kill(n.t.Context(), sb, id, "", syscall.SIGKILL, true); err != nil && !errdefs.IsNotFound(err) {
		n.t.Error(err)
	}
	if e, err := n.finish(sb, id); err != nil || e.Code != 137 {
		n.t.Errorf("killed container: %+v, %v", e, err)
	}
}

// exec runs one command to its end.
func (n *node) exec(sb, id string, s pod.Streams, args ...string) (uint32, error) {
	ctx, cancel := context.WithTimeout(n.t.Context(), 60*time.Second)
	defer cancel()
	execID := shimtest.ID()
	x, err := n.io.OpenExec(ctx, id, execID, false, s)
	if err != nil {
		return 0, err
	}
	defer x.Close()
	err = n.tasks.Exec(ctx, sb, id, port.ExecSpec{ID: execID, Process: shimtest.Process(args...), Stdio: x.Stdio()})
	if err != nil {
		return 0, err
	}
	if _, err := n.tasks.Start(ctx, sb, id, execID); err != nil {
		_, derr := n.tasks.Delete(ctx, sb, id, execID)
		return 0, errors.Join(err, derr)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		select {
		case <-x.StdinDone():
			if s.Stdin != nil {
				_ = n.tasks.CloseIO(ctx, sb, id, execID)
			}
		case <-ctx.Done():
		}
	})
	defer wg.Wait()
	e, err := n.tasks.Wait(ctx, sb, id, execID)
	if err != nil {
		return 0, err
	}
	if err := x.Drain(ctx); err != nil {
		return 0, err
	}
	_, err = n.tasks.Delete(ctx, sb, id, execID)
	return e.Code, err
}

func TestExecStorm(t *testing.T) { eachShim(t, testExecStorm) }

func testExecStorm(t *testing.T, n *node) {
	t.Helper()
	sb := n.sandbox()
	id, err := n.container(sb, port.IOSpec{}, "/bin/sleep", "1000")
	if err != nil {
		t.Fatal(err)
	}
	var g errgroup.Group
	g.SetLimit(20)
	for range 100 {
		g.Go(func() error {
			var out bytes.Buffer
			// After the kill an exec may fail in any way, but it must come back.
			_, _ = n.exec(sb, id, pod.Streams{Stdout: &out}, "/bin/date")
			return nil
		})
	}
	time.Sleep(time.Second)
	if err := n.tasks.Kill(t.Context(), sb, id, "", syscall.SIGKILL, false); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if e, err := n.tasks.Wait(ctx, sb, id, ""); err != nil || e.Code != 137 {
		t.Errorf("wait: %+v, %v", e, err)
	}
	_ = g.Wait()
	if _, err := n.finish(sb, id); err != nil {
		t.Error(err)
	}
}

func TestRestartKeepsContainersAndExits(t *testing.T) {
	eachShim(t, testRestartKeepsContainersAndExits)
}

func testRestartKeepsContainersAndExits(t *testing.T, n *node) {
	t.Helper()
	sb := n.sandbox()
	lives, err := n.container(sb, port.IOSpec{Stdin: true, StdinOnce: true}, "/bin/sh", "-c", "echo before; cat")
	if err != nil {
		t.Fatal(err)
	}
	ends, err := n.container(sb, port.IOSpec{}, "/bin/sh", "-c", "sleep 1; exit 3")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool { return n.content(lives, "stdout") == "before\n" })
	loaded := n.restart(func() { time.Sleep(1500 * time.Millisecond) })
	if len(loaded) != 1 || !loaded[0].Alive || len(loaded[0].Containers) != 2 {
		t.Fatalf("loaded %+v", loaded)
	}
	for _, id := range []string{lives, ends} {
		spec := port.IOSpec{LogPath: filepath.Join(n.dir, id+".log"), Stdin: id == lives, StdinOnce: true}
		if _, err := n.io.Open(t.Context(), id, spec); err != nil {
			t.Fatal(err)
		}
	}
	if e, err := n.finish(sb, ends); err != nil || e.Code != 3 {
		t.Errorf("ended meanwhile: %+v, %v", e, err)
	}
	if st, err := n.tasks.State(t.Context(), sb, lives, ""); err != nil || st.Status != "running" {
		t.Errorf("state %+v, %v", st, err)
	}
	// Its input is still open, and works.
	var out bytes.Buffer
	err = n.io.Attach(t.Context(), lives, pod.Streams{Stdin: strings.NewReader("after\n"), Stdout: &out})
	if err != nil || out.String() != "after\n" {
		t.Errorf("attach: %q, %v", out.String(), err)
	}
	if e, err := n.finish(sb, lives); err != nil || e.Code != 0 {
		t.Errorf("ended by its input: %+v, %v", e, err)
	}
	if got := n.content(lives, "stdout"); got != "before\nafter\n" {
		t.Errorf("log %q", got)
	}
}

func TestDeadShim(t *testing.T) {
	for _, away := range []bool{false, true} {
		t.Run(fmt.Sprintf("away=%v", away), func(t *testing.T) {
			eachShim(t, func(t *testing.T, n *node) { testDeadShim(t, n, away) })
		})
	}
}

func testDeadShim(t *testing.T, n *node, away bool) {
	t.Helper()
	sb := n.sandbox()
	running, err := n.container(sb, port.IOSpec{}, "/bin/sh", "-c", "sleep 1000 & sleep 1000")
	if err != nil {
		t.Fatal(err)
	}
	ended, err := n.container(sb, port.IOSpec{}, "/bin/sh", "-c", "exit 5")
	if err != nil {
		t.Fatal(err)
	}
	if e, err := n.tasks.Wait(t.Context(), sb, ended, ""); err != nil || e.Code != 5 {
		t.Fatalf("%+v, %v", e, err)
	}
	pids, err := n.tasks.Pids(t.Context(), sb, running)
	if err != nil || len(pids) < 2 {
		t.Fatalf("pids %v, %v", pids, err)
	}
	waited, executed := make(chan error, 1), make(chan error, 1)
	if !away {
		x := shimtest.ID()
		if err := n.tasks.Exec(t.Context(), sb, running, port.ExecSpec{ID: x, Process: shimtest.Process("/bin/sleep", "1000")}); err != nil {
			t.Fatal(err)
		}
		if _, err := n.tasks.Start(t.Context(), sb, running, x); err != nil {
			t.Fatal(err)
		}
		go func() {
			_, err := n.tasks.Wait(context.Background(), sb, running, x)
			executed <- err
		}()
		go func() {
			e, err := n.tasks.Wait(context.Background(), sb, running, "")
			if err == nil && e.Code != 137 {
				err = fmt.Errorf("code %d", e.Code)
			}
			waited <- err
		}()
	}
	time.Sleep(50 * time.Millisecond) // the exit file is written a little after Wait
	st, _ := n.ctl.Status(t.Context(), sb, false)
	kill := func() {
		if err := syscall.Kill(int(st.ShimPid), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	if away {
		loaded := n.restart(kill)
		if len(loaded) != 1 || loaded[0].Alive || loaded[0].Err == nil {
			t.Fatalf("loaded %+v", loaded)
		}
	} else {
		kill()
		select {
		case err := <-waited:
			if err != nil {
				t.Errorf("wait: %v", err)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("wait did not return")
		}
		// What it had come to when nobody was there any more to see its end is not known.
		if err := <-executed; !errdefs.IsUnavailable(err) {
			t.Errorf("wait for an exec: %v", err)
		}
	}
	for _, pid := range pids {
		if err := syscall.Kill(int(pid), 0); err == nil && !zombie(pid) {
			t.Errorf("process %d lives", pid)
		}
	}
	if e, err := n.ctl.Wait(t.Context(), sb); err != nil || e.At.IsZero() {
		t.Errorf("sandbox wait: %+v, %v", e, err)
	}
	if s, err := n.ctl.Status(t.Context(), sb, false); err != nil || s.Alive || s.ExitedAt.IsZero() {
		t.Errorf("status %+v, %v", s, err)
	}
	for id, code := range map[string]uint32{running: 137, ended: 5} {
		if e, err := n.tasks.Wait(t.Context(), sb, id, ""); err != nil || e.Code != code {
			t.Errorf("wait: %+v, %v, want %d", e, err, code)
		}
		if e, err := n.tasks.Delete(t.Context(), sb, id, ""); err != nil || e.Code != code {
			t.Errorf("delete: %+v, %v, want %d", e, err, code)
		}
		if _, err := n.tasks.Delete(t.Context(), sb, id, ""); !errdefs.IsNotFound(err) {
			t.Errorf("second delete: %v", err)
		}
		if err := n.io.Close(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
	if _, err := n.tasks.Create(t.Context(), port.TaskSpec{
		SandboxID: sb, ContainerID: shimtest.ID(), Handler: n.handler, Spec: []byte("{}"),
	}); !errdefs.IsUnavailable(err) {
		t.Errorf("create in a dead pod: %v", err)
	}
}

func zombie(pid uint32) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(data), ") Z ")
}

// stopped says whether all threads of a process are stopped.
func stopped(pid uint32) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	return len(threads) > 0 && !slices.ContainsFunc(threads, func(path string) bool {
		data, err := os.ReadFile(path)
		return err != nil || !strings.Contains(string(data), ") T ")
	})
}

func TestSharedInit(t *testing.T) { eachShim(t, testSharedInit) }

func testSharedInit(t *testing.T, n *node) {
	t.Helper()
	id := shimtest.ID()
	err := n.ctl.Create(t.Context(), port.SandboxSpec{
		ID: id, Handler: n.handler, InitRootfs: n.mounts(),
		Init: shimtest.Spec(t, id, id, false, "/bin/sleep", "1000"),
	})
	if err != nil {
		t.Fatal(err)
	}
	started, err := n.ctl.Start(t.Context(), id)
	if err != nil || started.Pid == 0 {
		t.Fatalf("%+v, %v", started, err)
	}
	if st, err := n.ctl.Status(t.Context(), id, false); err != nil || !st.Alive || st.Pid != started.Pid {
		t.Errorf("status %+v, %v", st, err)
	}
	// With the sandbox API it is the shim's business whether the process is all of the pod.
	if m, err := n.ctl.Metrics(t.Context(), id); err != nil || !strings.HasSuffix(m.GetTypeUrl(), ".Metrics") || len(m.GetValue()) == 0 {
		t.Errorf("metrics of type %q, %d bytes, %v", m.GetTypeUrl(), len(m.GetValue()), err)
	}
	if p, err := n.ctl.Platform(t.Context(), id); err != nil || p.OS != runtime.GOOS || p.Architecture != runtime.GOARCH {
		t.Errorf("platform %+v, %v", p, err)
	}
	if loaded := n.restart(nil); len(loaded) != 1 || !loaded[0].Alive {
		t.Fatalf("loaded %+v", loaded)
	}
	// A sleep that is process 1 ignores SIGTERM, as each does until it has a handler for it.
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	if err := n.ctl.Stop(ctx, id, time.Hour); err != nil {
		t.Fatal(err)
	}
	if e, err := n.ctl.Wait(t.Context(), id); err != nil || e.Code != 137 {
		t.Errorf("wait: %+v, %v", e, err)
	}
	if st, err := n.ctl.Status(t.Context(), id, false); err != nil || st.Alive {
		t.Errorf("status %+v, %v", st, err)
	}
	if err := n.ctl.Shutdown(t.Context(), id); err != nil {
		t.Error(err)
	}
	if _, err := n.ctl.Status(t.Context(), id, false); !errdefs.IsNotFound(err) {
		t.Errorf("status after shutdown: %v", err)
	}
	if err := n.ctl.Shutdown(t.Context(), id); err != nil {
		t.Errorf("second shutdown: %v", err)
	}
}

// The death of a shim takes the sandbox's own process along, and its traces.
func TestSharedInitOfADeadShim(t *testing.T) { eachShim(t, testSharedInitOfADeadShim) }

func testSharedInitOfADeadShim(t *testing.T, n *node) {
	t.Helper()
	id := shimtest.ID()
	err := n.ctl.Create(t.Context(), port.SandboxSpec{
		ID: id, Handler: n.handler, InitRootfs: n.mounts(),
		Init: shimtest.Spec(t, id, id, false, "/bin/sleep", "1000"),
	})
	if err != nil {
		t.Fatal(err)
	}
	started, err := n.ctl.Start(t.Context(), id)
	if err != nil || started.Pid == 0 {
		t.Fatalf("%+v, %v", started, err)
	}
	st, err := n.ctl.Status(t.Context(), id, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(int(st.ShimPid), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if _, err := n.ctl.Wait(t.Context(), id); err != nil {
		t.Error(err)
	}
	eventually(t, func() bool { return zombie(started.Pid) })
	if err := n.ctl.Shutdown(t.Context(), id); err != nil {
		t.Error(err)
	}
	if left := n.leftOf(id); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestTerminal(t *testing.T) { eachShim(t, testTerminal) }

func testTerminal(t *testing.T, n *node) {
	t.Helper()
	sb := n.sandbox()
	id, err := n.container(sb, port.IOSpec{Terminal: true, Stdin: true}, "/bin/sh")
	if err != nil {
		t.Fatal(err)
	}
	if err := n.tasks.ResizePty(t.Context(), sb, id, "", pod.TerminalSize{Width: 80, Height: 24}); err != nil {
		t.Error(err)
	}
	var out bytes.Buffer
	in, w := io.Pipe()
	go func() {
		_, _ = io.WriteString(w, "stty size; exit 4\n")
	}()
	if err := n.io.Attach(t.Context(), id, pod.Streams{Stdin: in, Stdout: &out}); err != nil {
		t.Error(err)
	}
	_ = w.Close()
	if e, err := n.finish(sb, id); err != nil || e.Code != 4 {
		t.Errorf("%+v, %v", e, err)
	}
	if !strings.Contains(out.String(), "24 80") {
		t.Errorf("output %q", out.String())
	}
}

func TestManyAtOnce(t *testing.T) { eachShim(t, testManyAtOnce) }

func testManyAtOnce(t *testing.T, n *node) {
	t.Helper()
	var g errgroup.Group
	g.SetLimit(10)
	sbs := make([]string, 5)
	for i := range sbs {
		sbs[i] = n.sandbox()
	}
	for i := range 50 {
		g.Go(func() error {
			code := uint32(i % 3)
			id, err := n.container(sbs[i%len(sbs)], port.IOSpec{}, "/bin/sh", "-c", fmt.Sprintf("echo %d; exit %d", i, code))
			if err != nil {
				return err
			}
			e, err := n.finish(sbs[i%len(sbs)], id)
			if err == nil && e.Code != code {
				err = fmt.Errorf("code %d, want %d", e.Code, code)
			}
			if got := n.content(id, "stdout"); err == nil && got != fmt.Sprintln(i) {
				err = fmt.Errorf("log %q", got)
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}

func TestStartTime(t *testing.T) { eachShim(t, testStartTime) }

func testStartTime(t *testing.T, n *node) {
	t.Helper()
	const rounds = 10
	var start, end time.Duration
	for range rounds {
		began := time.Now()
		id := n.sandbox()
		start += time.Since(began)
		began = time.Now()
		if err := n.ctl.Shutdown(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		end += time.Since(began)
	}
	t.Logf("create to connected: %s, shutdown: %s (mean of %d)", start/rounds, end/rounds, rounds)
}

func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	for began := time.Now(); time.Since(began) < testkit.Patience; time.Sleep(10 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatal("did not happen in time")
}
