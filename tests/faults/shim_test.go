//go:build integration

package faults

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// A pod whose own process or shim dies is shown as not ready, can still be asked about,
// and makes room for the next attempt.
func TestDeadPodIsToldAndReplaced(t *testing.T) {
	s := start(t, testenv.Setup{})
	for _, test := range []struct {
		name    string
		shared  bool // the pod has a process of its own
		restart bool // sandboxd is away when it dies
		victim  func(id string) int
	}{
		{"own process", true, false, s.firstProcess},
		{"own process while sandboxd is away", true, true, s.firstProcess},
		{"shim", false, false, s.shimOf},
		{"shim while sandboxd is away", false, true, s.shimOf},
		{"shim of a pod with a process of its own", true, false, s.shimOf},
	} {
		t.Run(test.name, func(t *testing.T) {
			config := s.podConfig("dying")
			if test.shared {
				config.Linux.SecurityContext.NamespaceOptions = &criv1.NamespaceOption{Pid: criv1.NamespaceMode_POD}
			}
			id := s.pod(config, "")
			c := s.container(id, config, script("main", "sleep 1000"))
			victim := test.victim(id)
			if test.restart {
				must(t, s.Kill(t.Context(), testenv.Sandboxd))
			}
			must(t, syscall.Kill(victim, syscall.SIGKILL))
			if test.restart {
				must(t, s.Run(testenv.Sandboxd))
				must(t, s.WaitReady(t.Context()))
			}
			s.waitNotReady(id)
			if st := s.waitExit(c, patience); st.GetExitCode() == 0 || st.GetReason() == "" || st.GetFinishedAt() == 0 {
				t.Errorf("the container ended with %d, %q at %d", st.GetExitCode(), st.GetReason(), st.GetFinishedAt())
			}
			if _, _, err := s.exec(c, "true"); err == nil {
				t.Error("a command ran in a dead container")
			}
			if _, err := s.CRI.ListPodSandboxStats(t.Context(), &criv1.ListPodSandboxStatsRequest{}); err != nil {
				t.Errorf("stats: %v", err)
			}
			if _, err := s.create(id, config, script("late", "true")); !oneOf(err, codes.FailedPrecondition) {
				t.Errorf("container in a dead pod: %v", err)
			}
			must(t, s.stopPod(id))
			next := s.podConfig("dying")
			next.Metadata.Attempt = 1
			nextID := s.pod(next, "")
			must(t, errors.Join(s.removePod(id), s.removePod(nextID)))
			if n := s.networkCalls("DEL", id); n == 0 {
				t.Error("the network was not told")
			}
		})
	}
}

// The end of a container is seen however many commands are being started in it.
func TestEndIsSeenInAStormOfCommands(t *testing.T) {
	w := newSwitches(t)
	runtime := w.runtime()
	s := start(t, testenv.Setup{Configure: onSandboxd(func(settings testenv.Settings) {
		for name, shim := range bothShims(t) {
			shim["binary_name"] = runtime
			handler(settings, name, shim)
		}
	})})
	for name := range bothShims(t) {
		t.Run(name, func(t *testing.T) {
			inner := *s
			inner.t = t
			inner.stormOfCommands(w, name)
		})
	}
}

// bothShims are the settings of handlers with the stock shim and with our own, by name.
func bothShims(t *testing.T) map[string]map[string]any {
	t.Helper()
	all := map[string]map[string]any{}
	for name, kind := range map[string][2]string{
		"with-stock-shim": {"io.containerd.runc.v2", "containerd-shim-runc-v2"},
		"with-own-shim":   {"io.containerd.crisp.v1", "containerd-shim-crisp-v1"},
	} {
		binary, err := testenv.Binary(kind[1])
		must(t, err)
		all[name] = map[string]any{"runtime_type": kind[0], "shim_path": binary, "sandboxer": "podsandbox"}
	}
	return all
}

func (s *system) stormOfCommands(w switches, handler string) {
	t := s.t
	for _, test := range []struct {
		name string
		tty  bool
		pid  criv1.NamespaceMode
		slow bool // a command is between its creation and its start when the container dies
	}{
		{"pipes", false, criv1.NamespaceMode_CONTAINER, false},
		{"terminal", true, criv1.NamespaceMode_CONTAINER, false},
		{"processes of the node", false, criv1.NamespaceMode_NODE, false},
		{"slow runtime", false, criv1.NamespaceMode_CONTAINER, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			config := s.podConfig("storm")
			config.Linux.SecurityContext.NamespaceOptions = &criv1.NamespaceOption{Pid: test.pid}
			id := s.pod(config, handler)
			c := script("main", "while true; do sleep 1000; done")
			c.Tty = test.tty
			c.Linux.SecurityContext = &criv1.LinuxContainerSecurityContext{NamespaceOptions: config.Linux.SecurityContext.NamespaceOptions}
			container := s.container(id, config, c)
			victim := s.firstProcess(container)
			if test.slow {
				w.set("exec", "sleep 0.7")
			}
			var wg sync.WaitGroup
			next := make(chan int)
			for range 8 {
				wg.Go(func() {
					for range next {
						_, _, err := s.exec(container, "sh", "-c", "date; sleep 0.3")
						if oneOf(err, codes.DeadlineExceeded, codes.Unknown) {
							t.Errorf("exec: %v", err)
						}
					}
				})
			}
			killed := make(chan struct{})
			go func() {
				defer close(killed)
				time.Sleep(time.Second)
				_ = syscall.Kill(victim, syscall.SIGKILL)
			}()
			for n := range scaled(t, 40) {
				next <- n
			}
			close(next)
			<-killed
			if st := s.waitExit(container, patience); st.GetExitCode() != 137 {
				t.Errorf("exit code %d, want 137", st.GetExitCode())
			}
			wg.Wait()
			w.set("exec", "")
			eventually(t, patience, "processes end with their container", func() error {
				if left := containerPIDs(t, container); len(left) > 0 {
					return fmt.Errorf("left are %v", left)
				}
				return nil
			})
			must(t, s.removePod(id))
		})
	}
}

// firstProcess is the first process of a container, or of a pod that has one.
func (s *system) firstProcess(id string) int {
	s.t.Helper()
	text, err := os.ReadFile(filepath.Join(s.bundle(id), "init.pid"))
	must(s.t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	must(s.t, err)
	return pid
}

// bundle is the folder of a container or pod that its shim works with.
func (s *system) bundle(id string) string {
	s.t.Helper()
	found := ""
	must(s.t, filepath.WalkDir(s.Path("run"), func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil
		}
		if d.Name() == "rootfs" || d.Name() == "ns" {
			return filepath.SkipDir
		}
		if _, err := os.Stat(filepath.Join(path, "config.json")); err == nil && d.Name() == id {
			found = path
		}
		return nil
	}))
	if found == "" {
		s.t.Fatalf("container %s has no bundle", id)
	}
	return found
}

// A shim that cannot be started fails its pod soon, with its own words, and nothing else.
func TestUnusableShimFailsOnlyItsPod(t *testing.T) {
	folder := t.TempDir()
	must(t, os.Chmod(folder, 0o755))
	real, err := testenv.Binary("containerd-shim-runc-v2")
	must(t, err)
	sleeps := fmt.Sprintf("sleep 1234.%d", os.Getpid()) // told from those of other runs
	shims := map[string]struct{ text, says string }{
		"failing": {"echo out of cheese >&2; exit 1", "out of cheese"},
		"nobody":  {"printf unix:///run/nobody-listens-here.sock", "nobody-listens-here"},
		"rubbish": {"head -c 10000000 /dev/urandom", "too long"},
		"silent":  {"exec " + sleeps, "no answer"},
		"empty":   {"exit 0", ""},
		"child":   {sleeps + " & " + sleeps, "no answer"},
	}
	s := start(t, testenv.Setup{Configure: onSandboxd(func(settings testenv.Settings) {
		settings.Set("runtime.shim.start_timeout", "2s")
		handler(settings, "missing", map[string]any{"shim_path": filepath.Join(folder, "absent")})
		for name, shim := range shims {
			path := filepath.Join(folder, name)
			must(t, os.WriteFile(path, []byte("#!/bin/sh\n"+shim.text+"\n"), 0o755))
			handler(settings, name, map[string]any{"shim_path": path})
		}
		path := filepath.Join(folder, "short")
		text := fmt.Sprintf(`#!/bin/sh
for word in "$@"; do last=$word; done
end() {
	sleep 1
	for p in /proc/[0-9]*; do
		tr '\0' ' ' <"$p/cmdline" | grep -q "containerd-shim-runc-v2 .*-id $(basename "$PWD")" && kill -9 "${p#/proc/}"
	done
}
if [ "$last" = start ]; then end </dev/null >/dev/null 2>&1 & fi
exec %s "$@"
`, real)
		must(t, os.WriteFile(path, []byte(text), 0o755))
		handler(settings, "short", map[string]any{"shim_path": path})
	})})
	shims["missing"] = struct{ text, says string }{"", "absent"}
	var wg sync.WaitGroup
	for name, shim := range shims {
		wg.Go(func() {
			begun := time.Now()
			_, err := s.try(s.podConfig("pod-"+name), name, 30*time.Second)
			if err == nil || oneOf(err, codes.DeadlineExceeded) || !strings.Contains(err.Error(), shim.says) {
				t.Errorf("%s: %v, want an error with %q", name, err, shim.says)
			}
			if took := time.Since(begun); took > 15*time.Second {
				t.Errorf("%s: took %s", name, took)
			}
		})
	}
	wg.Go(func() {
		if _, err := s.try(s.podConfig("pod-unknown"), "unknown", time.Second); !oneOf(err, codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition) {
			t.Errorf("unknown handler: %v", err)
		}
	})
	wg.Go(func() {
		for n := range 3 {
			begun := time.Now()
			id, err := s.try(s.podConfig(fmt.Sprintf("good%d", n)), "", 30*time.Second)
			if err == nil {
				err = s.removePod(id)
			}
			if took := time.Since(begun); err != nil || took > 8*time.Second {
				t.Errorf("good pod beside the bad ones: %v, took %s", err, took)
			}
		}
	})
	wg.Wait()
	// This one comes up and then dies.
	short, err := s.try(s.podConfig("pod-short"), "short", 30*time.Second)
	if err == nil {
		s.waitNotReady(short)
		must(t, s.removePod(short))
	}
	s.waitAddresses(0, patience)
	for name := range shims {
		must(t, s.removePod(s.pod(s.podConfig("pod-"+name), "")))
	}
	if left := processes(t, func(_ int, cmdline string) bool { return strings.Contains(cmdline, sleeps) }); len(left) > 0 {
		t.Errorf("processes of bad shims are left: %v", left)
	}
}

// A shim that takes long to unmount delays neither the ends of other pods' containers nor
// its own removal for good.
func TestSlowUnmountDelaysNobodyElse(t *testing.T) {
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Fatal("needs strace, which `deploy/run/install.sh --test` installs")
	}
	s := start(t, testenv.Setup{Configure: onSandboxd(func(settings testenv.Settings) {
		for name, shim := range bothShims(t) {
			handler(settings, name, shim)
		}
	})})
	for name := range bothShims(t) {
		t.Run(name, func(t *testing.T) {
			inner := *s
			inner.t = t
			inner.slowUnmount(strace, name)
		})
	}
}

func (s *system) slowUnmount(strace, handler string) {
	t := s.t
	config := s.podConfig("slow")
	slow := s.pod(config, handler)
	s.container(slow, config, script("main", "sleep 1000"))
	shim := s.shimOf(slow)
	tracer := exec.Command(strace, "-f", "-qq", "-o", "/dev/null", "-e", "trace=umount2", "-e", "inject=umount2:delay_enter=5000000", "-p", strconv.Itoa(shim))
	must(t, tracer.Start())
	defer func() { _ = tracer.Process.Kill(); _ = tracer.Wait() }()
	eventually(t, patience, "the shim is traced", func() error {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", shim))
		if err != nil || strings.Contains(string(text), "TracerPid:\t0\n") {
			return errors.Join(err, errors.New("no tracer"))
		}
		return nil
	})
	otherConfig := s.podConfig("other")
	other := s.pod(otherConfig, handler)
	stopped := make(chan error, 1)
	go func() { stopped <- s.stopPod(slow) }()
	for n := range scaled(t, 10) {
		id := s.container(other, otherConfig, script(fmt.Sprintf("c%d", n), "exit 5"))
		s.waitExit(id, patience)
	}
	if err := <-stopped; err != nil {
		t.Logf("first stop: %v", err)
	}
	eventually(t, time.Minute, "the pod is stopped", func() error { return s.stopPod(slow) })
	must(t, errors.Join(s.removePod(slow), s.removePod(other)))
	eventually(t, patience, "the shim is gone", func() error {
		left := processes(t, func(_ int, cmdline string) bool {
			return strings.Contains(cmdline, slow) && strings.Contains(cmdline, "shim")
		})
		if len(left) > 0 {
			return fmt.Errorf("left are %v", left)
		}
		return nil
	})
}

// What happens to one pod's shim, or to what is known of it, while sandboxd is away, is that
// pod's matter alone, and the pod can be removed.
func TestDamagedShimFailsOnlyItsPod(t *testing.T) {
	s := start(t, testenv.Setup{Configure: onSandboxd(func(settings testenv.Settings) {
		for name, shim := range bothShims(t) {
			handler(settings, name, shim)
		}
	})})
	for name := range bothShims(t) {
		for damage, do := range map[string]func(bundle string, shim int) error{
			"stopped":       func(_ string, shim int) error { return syscall.Kill(shim, syscall.SIGSTOP) },
			"cut bootstrap": func(b string, _ int) error { return os.Truncate(filepath.Join(b, "bootstrap.json"), 7) },
			"no bootstrap":  func(b string, _ int) error { return os.Remove(filepath.Join(b, "bootstrap.json")) },
			"no socket":     func(b string, _ int) error { return removeSocketOf(b) },
			"no metadata":   func(b string, _ int) error { return os.Truncate(filepath.Join(b, "sandbox.json"), 3) },
			"dead, no metadata": func(b string, shim int) error {
				return errors.Join(syscall.Kill(shim, syscall.SIGKILL), os.Truncate(filepath.Join(b, "sandbox.json"), 3))
			},
			"dead, no bundle": func(b string, shim int) error {
				return errors.Join(syscall.Kill(shim, syscall.SIGKILL), loseBundle(b))
			},
		} {
			t.Run(name+" "+damage, func(t *testing.T) {
				inner := *s
				inner.t = t
				inner.damagedShim(name, do)
			})
		}
	}
}

// loseBundle removes a pod's bundle with those of its containers, whose processes run on.
func loseBundle(bundle string) error {
	roots, err := filepath.Glob(filepath.Join(bundle, "containers", "*", "rootfs"))
	errs := []error{err}
	for _, root := range roots {
		errs = append(errs, unix.Unmount(root, unix.MNT_DETACH))
	}
	return errors.Join(append(errs, os.RemoveAll(bundle))...)
}

// removeSocketOf removes the socket that a shim told in its bundle.
func removeSocketOf(bundle string) error {
	text, err := os.ReadFile(filepath.Join(bundle, "bootstrap.json"))
	if err != nil {
		return err
	}
	_, rest, found := strings.Cut(string(text), "unix://")
	path, _, ended := strings.Cut(rest, `"`)
	if !found || !ended {
		return fmt.Errorf("no socket in %q", text)
	}
	return os.Remove(path)
}

func (s *system) damagedShim(handler string, damage func(bundle string, shim int) error) {
	t := s.t
	config, goodConfig := s.podConfig("damaged"), s.podConfig("good")
	id, good := s.pod(config, handler), s.pod(goodConfig, handler)
	c := s.container(id, config, script("main", "sleep 1000"))
	other := s.container(good, goodConfig, script("main", "sleep 1000"))
	victim := s.firstProcess(c)
	must(t, s.Kill(t.Context(), testenv.Sandboxd))
	must(t, damage(s.bundle(id), s.shimOf(id)))
	must(t, s.Run(testenv.Sandboxd))
	must(t, s.WaitReady(t.Context()))
	if out, code, err := s.exec(other, "echo", "here"); err != nil || code != 0 || strings.TrimSpace(out) != "here" {
		t.Errorf("the other pod: %q, %d, %v", out, code, err)
	}
	status, err := s.CRI.PodSandboxStatus(t.Context(), &criv1.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
	if err != nil || status.GetStatus().GetId() != id {
		t.Errorf("status of the damaged pod: %v, %v", status, err)
	}
	began := time.Now()
	eventually(t, time.Minute, "the pod is stopped", func() error { return s.stopPod(id) })
	t.Logf("stopped in %s", time.Since(began))
	if err := syscall.Kill(victim, 0); err == nil && !isZombie(victim) {
		t.Error("the container's process lives on")
	}
	must(t, errors.Join(s.removePod(id), s.removePod(good)))
	s.nothingLeftOf(c, other)
}

// nothingLeftOf checks that neither the OCI runtime nor a cgroup knows removed containers.
func (s *system) nothingLeftOf(ids ...string) {
	s.t.Helper()
	must(s.t, filepath.WalkDir(s.Path("run"), func(path string, d os.DirEntry, _ error) error {
		if d != nil && slices.Contains(ids, d.Name()) {
			s.t.Errorf("left: %s", path)
		}
		return nil
	}))
	must(s.t, filepath.WalkDir("/sys/fs/cgroup", func(path string, d os.DirEntry, _ error) error {
		if d != nil && slices.Contains(ids, d.Name()) {
			s.t.Errorf("left: %s", path)
		}
		return nil
	}))
}

// A shim that stops answering while sandboxd is there holds up neither the stop of its
// containers nor the removal of its pod.
func TestDamagedShimHoldsUpNoStop(t *testing.T) { //nolint:tparallel // one system for all cases, alone on the machine
	s := start(t, testenv.Setup{Configure: onSandboxd(func(settings testenv.Settings) {
		for name, shim := range bothShims(t) {
			handler(settings, name, shim)
		}
	})})
	for name := range bothShims(t) {
		for _, shared := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, pod with a process of its own: %t", name, shared), func(t *testing.T) {
				t.Parallel() // nearly all of it is waiting
				inner := *s
				inner.t = t
				inner.stoppedShim(name, shared)
			})
		}
	}
}

func (s *system) stoppedShim(handler string, shared bool) {
	t := s.t
	config := s.podConfig(fmt.Sprintf("%s-%t", handler, shared))
	if shared {
		config.Linux.SecurityContext.NamespaceOptions = &criv1.NamespaceOption{Pid: criv1.NamespaceMode_POD}
	}
	id := s.pod(config, handler)
	c := s.container(id, config, script("main", "sleep 1000"))
	running, other := s.container(id, config, script("running", "sleep 1000")), s.container(id, config, script("other", "sleep 1000"))
	victim, shim := s.firstProcess(c), s.shimOf(id)
	must(t, syscall.Kill(shim, syscall.SIGSTOP))
	began := time.Now()
	removed := make(chan error, 1)
	go func() { removed <- s.removeContainer(running) }()
	_, err := s.CRI.StopContainer(t.Context(), &criv1.StopContainerRequest{ContainerId: c, Timeout: 2})
	must(t, err)
	if took := time.Since(began); took > 15*time.Second {
		t.Errorf("stop of the container took %s", took)
	}
	if syscall.Kill(victim, 0) == nil && !isZombie(victim) {
		t.Error("the container's process lives on")
	}
	if st := s.waitExit(c, patience); st.GetExitCode() != 137 {
		t.Errorf("exit code %d, want 137", st.GetExitCode())
	}
	must(t, <-removed)
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("removal of a running container took %s", took)
	}
	s.nothingLeftOf(running)
	must(t, syscall.Kill(shim, syscall.SIGCONT))
	if out, code, err := s.exec(other, "echo", "here"); err != nil || code != 0 || strings.TrimSpace(out) != "here" {
		t.Errorf("another container of the pod, once its shim goes on: %q, %d, %v", out, code, err)
	}
	must(t, syscall.Kill(shim, syscall.SIGSTOP))
	began = time.Now()
	must(t, errors.Join(s.stopPod(id), s.removePod(id)))
	if took := time.Since(began); took > 40*time.Second {
		t.Errorf("stop and removal of the pod took %s", took)
	}
}

// isZombie says whether a process has ended and nobody has collected it.
func isZombie(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(text), ") Z ")
}

// A process that the kernel does not let die is told, holds up nothing else, and is ended as soon
// as it can be. Freezing a cgroup above the container's is how a test gets one.
func TestProcessThatCannotDie(t *testing.T) {
	if _, err := os.Stat("/sys/fs/cgroup/freezer"); err != nil {
		t.Skip("only a freezer of cgroup v1 keeps a process from dying")
	}
	s := start(t, testenv.Setup{})
	config := s.podConfig("stuck")
	config.Linux.CgroupParent = s.CgroupParent() + "/stuck"
	pod := s.pod(config, "")
	c := s.container(pod, config, script("main", "sleep 1000"))
	victim := s.firstProcess(c)
	state := filepath.Join("/sys/fs/cgroup/freezer", config.Linux.CgroupParent, "freezer.state")
	must(t, os.WriteFile(state, []byte("FROZEN"), 0o600))
	t.Cleanup(func() { _ = os.WriteFile(state, []byte("THAWED"), 0o600) })
	began := time.Now()
	err := s.stopContainer(c, 1)
	told := err != nil && (strings.Contains(err.Error(), fmt.Sprintf("processes [%d] do not end", victim)) || strings.Contains(err.Error(), "survives SIGKILL"))
	if took := time.Since(began); !told || took > 40*time.Second {
		t.Errorf("stop: %v after %s", err, took)
	}
	if st := s.status(c); st.GetState() != criv1.ContainerState_CONTAINER_RUNNING {
		t.Errorf("state %s of a container whose process %d lives", st.GetState(), victim)
	}
	began = time.Now()
	other := s.podConfig("other")
	id := s.pod(other, "")
	must(t, s.stopContainer(s.container(id, other, script("main", "sleep 1000")), 0))
	must(t, errors.Join(s.stopPod(id), s.removePod(id)))
	if took := time.Since(began); took > 15*time.Second {
		t.Errorf("another pod took %s", took)
	}
	must(t, os.WriteFile(state, []byte("THAWED"), 0o600))
	if st := s.waitExit(c, patience); st.GetExitCode() != 137 {
		t.Errorf("exit code %d, want 137", st.GetExitCode())
	}
	must(t, errors.Join(s.stopPod(pod), s.removePod(pod)))
	// A pod's cgroup is kubelet's to remove.
	groups, err := filepath.Glob(filepath.Join("/sys/fs/cgroup/*", config.Linux.CgroupParent))
	must(t, err)
	for _, g := range groups {
		must(t, os.Remove(g))
	}
}
