//go:build integration

package faults

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/fixture"
	"github.com/crisp-cri/crisp/tests/testenv"
)

const busybox = fixture.BusyboxImage

// patience is how long tests wait for what must happen, also on a busy machine.
const patience = time.Minute

func TestMain(m *testing.M) {
	os.Exit(testenv.Main(context.Background(), m))
}

// images are made once for all tests.
var images = sync.OnceValues(func() ([]fixture.Image, error) {
	parts, err := fixture.FindParts(context.Background(), fixture.PartsConfig{})
	if err != nil {
		return nil, err
	}
	return fixture.Conformance(parts)
})

// scaled is n times the environment variable CRISP_FAULT_SCALE.
func scaled(t *testing.T, n int) int {
	t.Helper()
	text := os.Getenv("CRISP_FAULT_SCALE")
	if text == "" {
		return n
	}
	factor, err := strconv.ParseFloat(text, 64)
	if err != nil {
		t.Fatalf("CRISP_FAULT_SCALE: %v", err)
	}
	return max(1, int(float64(n)*factor))
}

// system is a running system with what the tests often need of it.
type system struct {
	*testenv.System

	t *testing.T
}

// start launches a system with the busybox image on the node.
func start(t *testing.T, setup testenv.Setup) *system {
	t.Helper()
	all, err := images()
	must(t, err)
	setup.Images = all
	s := &system{System: testenv.Start(t, setup), t: t}
	s.pull(busybox)
	return s
}

func (s *system) pull(image string) {
	s.t.Helper()
	_, err := s.Images.PullImage(s.t.Context(), &criv1.PullImageRequest{Image: &criv1.ImageSpec{Image: image}})
	if err != nil {
		s.t.Fatalf("pull %s: %v", image, err)
	}
}

// podConfig is an ordinary pod of that name.
func (s *system) podConfig(name string) *criv1.PodSandboxConfig {
	return &criv1.PodSandboxConfig{
		Metadata:     &criv1.PodSandboxMetadata{Name: name, Uid: name + "-uid", Namespace: "faults"},
		Hostname:     name,
		LogDirectory: s.Path("podlogs", name),
		Labels:       map[string]string{"test": s.t.Name()},
		Linux:        &criv1.LinuxPodSandboxConfig{CgroupParent: s.CgroupParent(), SecurityContext: &criv1.LinuxSandboxSecurityContext{}},
	}
}

// script is a container of the busybox image that runs a shell script.
func script(name, text string) *criv1.ContainerConfig {
	return &criv1.ContainerConfig{
		Metadata: &criv1.ContainerMetadata{Name: name},
		Image:    &criv1.ImageSpec{Image: busybox},
		Command:  []string{"sh", "-c", text},
		LogPath:  name + ".log",
		Linux:    &criv1.LinuxContainerConfig{},
	}
}

// try runs a pod within a time limit.
func (s *system) try(config *criv1.PodSandboxConfig, handler string, limit time.Duration) (string, error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), limit)
	defer cancel()
	answer, err := s.CRI.RunPodSandbox(ctx, &criv1.RunPodSandboxRequest{Config: config, RuntimeHandler: handler})
	return answer.GetPodSandboxId(), err
}

// pod runs a pod, which must succeed.
func (s *system) pod(config *criv1.PodSandboxConfig, handler string) string {
	s.t.Helper()
	id, err := s.try(config, handler, 30*time.Second)
	if err != nil {
		s.t.Fatalf("run pod %s: %v", config.GetMetadata().GetName(), err)
	}
	return id
}

func (s *system) create(pod string, podConfig *criv1.PodSandboxConfig, config *criv1.ContainerConfig) (string, error) {
	answer, err := s.CRI.CreateContainer(s.t.Context(), &criv1.CreateContainerRequest{PodSandboxId: pod, Config: config, SandboxConfig: podConfig})
	return answer.GetContainerId(), err
}

func (s *system) startContainer(id string) error {
	_, err := s.CRI.StartContainer(s.t.Context(), &criv1.StartContainerRequest{ContainerId: id})
	return err
}

// container creates and starts a container, which must succeed.
func (s *system) container(pod string, podConfig *criv1.PodSandboxConfig, config *criv1.ContainerConfig) string {
	s.t.Helper()
	id, err := s.create(pod, podConfig, config)
	if err == nil {
		err = s.startContainer(id)
	}
	if err != nil {
		s.t.Fatalf("container %s: %v", config.GetMetadata().GetName(), err)
	}
	return id
}

func (s *system) stopContainer(id string, timeout int64) error {
	_, err := s.CRI.StopContainer(s.t.Context(), &criv1.StopContainerRequest{ContainerId: id, Timeout: timeout})
	return err
}

func (s *system) removeContainer(id string) error {
	_, err := s.CRI.RemoveContainer(s.t.Context(), &criv1.RemoveContainerRequest{ContainerId: id})
	return err
}

func (s *system) stopPod(id string) error {
	_, err := s.CRI.StopPodSandbox(s.t.Context(), &criv1.StopPodSandboxRequest{PodSandboxId: id})
	return err
}

func (s *system) removePod(id string) error {
	_, err := s.CRI.RemovePodSandbox(s.t.Context(), &criv1.RemovePodSandboxRequest{PodSandboxId: id})
	return err
}

// status is a container's status.
func (s *system) status(id string) *criv1.ContainerStatus {
	s.t.Helper()
	answer, err := s.CRI.ContainerStatus(s.t.Context(), &criv1.ContainerStatusRequest{ContainerId: id})
	if err != nil {
		s.t.Fatalf("status of container %s: %v", id, err)
	}
	return answer.GetStatus()
}

// podStatus is a pod's status.
func (s *system) podStatus(id string) *criv1.PodSandboxStatus {
	s.t.Helper()
	answer, err := s.CRI.PodSandboxStatus(s.t.Context(), &criv1.PodSandboxStatusRequest{PodSandboxId: id})
	if err != nil {
		s.t.Fatalf("status of pod %s: %v", id, err)
	}
	return answer.GetStatus()
}

// exec runs a command; it gives its output, exit code and error.
func (s *system) exec(id string, command ...string) (string, int32, error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), 30*time.Second)
	defer cancel()
	answer, err := s.CRI.ExecSync(ctx, &criv1.ExecSyncRequest{ContainerId: id, Cmd: command, Timeout: 20})
	return string(answer.GetStdout()) + string(answer.GetStderr()), answer.GetExitCode(), err
}

// waitExit waits until a container has exited.
func (s *system) waitExit(id string, limit time.Duration) *criv1.ContainerStatus {
	s.t.Helper()
	var st *criv1.ContainerStatus
	eventually(s.t, limit, "container exits", func() error {
		st = s.status(id)
		if st.GetState() != criv1.ContainerState_CONTAINER_EXITED {
			return fmt.Errorf("container %s is %s", id, st.GetState())
		}
		return nil
	})
	return st
}

// waitNotReady waits until a pod is shown as not ready.
func (s *system) waitNotReady(id string) {
	s.t.Helper()
	eventually(s.t, patience, "pod becomes not ready", func() error {
		if state := s.podStatus(id).GetState(); state != criv1.PodSandboxState_SANDBOX_NOTREADY {
			return fmt.Errorf("pod %s is %s", id, state)
		}
		return nil
	})
}

// pods gives the ids of all listed pods.
func (s *system) pods() []string {
	s.t.Helper()
	answer, err := s.CRI.ListPodSandbox(s.t.Context(), &criv1.ListPodSandboxRequest{})
	must(s.t, err)
	ids := []string{}
	for _, item := range answer.GetItems() {
		ids = append(ids, item.GetId())
	}
	return ids
}

// addresses gives what the address plugin holds.
func (s *system) addresses() []string {
	s.t.Helper()
	entries, err := os.ReadDir(s.Path("addresses", "crisp-test"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	must(s.t, err)
	var held []string
	for _, entry := range entries {
		if strings.Count(entry.Name(), ".") == 3 {
			held = append(held, entry.Name())
		}
	}
	return held
}

// waitAddresses waits until the address plugin holds so many.
func (s *system) waitAddresses(want int, limit time.Duration) {
	s.t.Helper()
	eventually(s.t, limit, "addresses are released", func() error {
		if held := s.addresses(); len(held) != want {
			return fmt.Errorf("held are %v, want %d", held, want)
		}
		return nil
	})
}

// networkCalls counts the bridge plugin's calls of a command for a pod, or for all of them.
func (s *system) networkCalls(command, pod string) int {
	s.t.Helper()
	calls, err := s.NetworkCalls()
	must(s.t, err)
	count := 0
	for _, call := range calls {
		if strings.HasPrefix(call, command+":"+pod) {
			count++
		}
	}
	return count
}

// processes gives the ids of the processes that the predicate accepts by their command line.
func processes(t *testing.T, accept func(pid int, cmdline string) bool) []int {
	t.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*")
	must(t, err)
	var found []int
	for _, dir := range dirs {
		raw, err := os.ReadFile(dir + "/cmdline")
		if err != nil || len(raw) == 0 {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(dir))
		must(t, err)
		if accept(pid, strings.ReplaceAll(string(raw), "\x00", " ")) {
			found = append(found, pid)
		}
	}
	return found
}

// shimOf is the process of a pod's shim.
func (s *system) shimOf(pod string) int {
	s.t.Helper()
	pid, err := s.ShimOf(pod)
	must(s.t, err)
	return pid
}

// containerPIDs are the processes whose cgroup is named after the container or pod.
func containerPIDs(t *testing.T, id string) []int {
	t.Helper()
	return processes(t, func(pid int, _ string) bool {
		groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		return err == nil && strings.Contains(string(groups), id)
	})
}

// descriptors counts a process's open files.
func descriptors(t *testing.T, pid int) int {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	must(t, err)
	return len(entries)
}

// oneOf says whether an error has one of the codes.
func oneOf(err error, accepted ...codes.Code) bool {
	return slices.Contains(accepted, status.Code(err))
}

// eventually polls until check succeeds.
func eventually(t *testing.T, limit time.Duration, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %s: %v", what, limit, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// must fails the test on an error.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// switches is a folder with wrapper programs that do what a test tells them before they
// call the real one.
type switches struct {
	t   *testing.T
	dir string
}

func newSwitches(t *testing.T) switches {
	t.Helper()
	dir := t.TempDir()
	must(t, os.Chmod(dir, 0o755))
	return switches{t: t, dir: dir}
}

// set makes the wrapper run a piece of shell at the command; empty ends that.
func (w switches) set(command, shell string) {
	w.t.Helper()
	must(w.t, os.WriteFile(filepath.Join(w.dir, "at-"+command), []byte(shell), 0o644))
}

// runtime is a wrapper of the OCI runtime, with switches for its commands.
func (w switches) runtime() string {
	w.t.Helper()
	real, err := testenv.Binary("runc")
	must(w.t, err)
	path := filepath.Join(w.dir, "runtime")
	must(w.t, os.WriteFile(path, []byte(fmt.Sprintf(`#!/bin/sh
for word in "$@"; do
	case "$word" in create|start|exec|kill|delete|state) command=$word; break;; esac
done
if [ -s "%[1]s/at-$command" ]; then . "%[1]s/at-$command"; fi
exec %[2]s "$@"
`, w.dir, real)), 0o755))
	return path
}

// plugin writes a wrapper of a CNI plugin into a folder, with switches for its commands.
func (w switches) plugin(folder, name, real string) {
	w.t.Helper()
	plugins, err := testenv.CNIFolder()
	must(w.t, err)
	must(w.t, os.WriteFile(filepath.Join(folder, name), []byte(fmt.Sprintf(`#!/bin/sh
if [ -s "%[1]s/at-$CNI_COMMAND" ]; then . "%[1]s/at-$CNI_COMMAND"; fi
exec %[2]s "$@"
`, w.dir, filepath.Join(plugins, real))), 0o755))
}

// handler adds a runtime handler like the default one, but for what change says.
func handler(settings testenv.Settings, name string, changed map[string]any) {
	for key, value := range settings.Get("runtime.handlers." + settings.Get("runtime.default_handler").(string)).(map[string]any) {
		settings.Set("runtime.handlers."+name+"."+key, value)
	}
	for key, value := range changed {
		settings.Set("runtime.handlers."+name+"."+key, value)
	}
}

// onSandboxd configures sandboxd alone.
func onSandboxd(change func(testenv.Settings)) func(testenv.Process, testenv.Settings) {
	return func(p testenv.Process, settings testenv.Settings) {
		if p == testenv.Sandboxd {
			change(settings)
		}
	}
}

// command runs a program of the machine.
func command(t *testing.T, name string, args ...string) {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
}
