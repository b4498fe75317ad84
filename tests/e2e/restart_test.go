//go:build integration

package e2e

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// Each of the processes that hold nothing may die at any moment: the next call
// after its return works, and an exit that happened meanwhile is told.
func TestKilledProcessesComeBack(t *testing.T) {
	for _, victim := range []testenv.Process{testenv.Gateway, testenv.NRIHub, testenv.EventBus} {
		t.Run(string(victim), func(t *testing.T) {
			s := start(t, testenv.Setup{})
			s.pull(busybox)
			pod, config := s.pod("survivor")
			steady := s.container(pod, config, containerConfig("steady", "sleep 1000"))
			ending := s.container(pod, config, containerConfig("ending", "while ! test -e /tmp/go; do sleep 0.1; done; exit 9"))

			must(t, s.Kill(t.Context(), victim))
			releaseFromOutside(t, ending)
			time.Sleep(time.Second)
			must(t, s.Run(victim))
			must(t, s.WaitReady(t.Context()))

			if status := s.waitExit(ending); status.GetExitCode() != 9 {
				t.Errorf("exit code %d, want 9", status.GetExitCode())
			}
			if state := s.status(steady).GetState(); state != criv1.ContainerState_CONTAINER_RUNNING {
				t.Errorf("the steady container is %s", state)
			}
			s.waitNews(ending, wholeLife...)
			s.exec(steady, "true")
			next := s.container(pod, config, containerConfig("next", "exit 4"))
			s.waitExit(next)
			s.waitNews(next, wholeLife...)
		})
	}
}

// Containers run on without the process that owns them, and what ended without
// it is known to the digit after its return.
func TestContainersOutliveSandboxd(t *testing.T) {
	testenv.EachHandler(t, tellContainersOutliveSandboxd)
}

func tellContainersOutliveSandboxd(t *testing.T, handler string) {
	s := start(t, testenv.Setup{Handler: handler})
	s.pull(busybox)
	pod, config := s.pod("orphans")
	steady := s.container(pod, config, containerConfig("steady", "n=0; while true; do n=$((n+1)); echo $n > /tmp/next; mv /tmp/next /tmp/count; sleep 0.1; done"))
	ending := s.container(pod, config, containerConfig("ending", "while ! test -e /tmp/go; do sleep 0.1; done; exit 23"))
	first := s.exec(steady, "sh", "-c", "until cat /tmp/count; do sleep 0.1; done")

	must(t, s.Kill(t.Context(), testenv.Sandboxd))
	releaseFromOutside(t, ending)
	time.Sleep(2 * time.Second)
	must(t, s.Run(testenv.Sandboxd))
	must(t, s.WaitReady(t.Context()))

	if status := s.waitExit(ending); status.GetExitCode() != 23 || status.GetReason() != "Error" {
		t.Errorf("exit code %d, reason %q; want 23, Error", status.GetExitCode(), status.GetReason())
	}
	mine := s.waitNews(ending, wholeLife...)
	if mine[2].exit != 23 {
		t.Errorf("exit status in the event is %d, want 23", mine[2].exit)
	}
	later := s.exec(steady, "cat", "/tmp/count")
	a, errA := strconv.Atoi(strings.TrimSpace(first))
	b, errB := strconv.Atoi(strings.TrimSpace(later))
	if err := errors.Join(errA, errB); err != nil || b < a+10 {
		t.Errorf("the steady container counted from %q to %q: %v", first, later, err)
	}
	_, err := s.CRI.StopContainer(t.Context(), &criv1.StopContainerRequest{ContainerId: steady, Timeout: 1})
	must(t, err)
	s.waitNews(steady, wholeLife...)
	next := s.container(pod, config, containerConfig("next", "exit 4"))
	s.waitExit(next)
}

// A stop in good order leaves containers alone too.
func TestContainersOutliveAnOrderlyStop(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	pod, config := s.pod("upgrade")
	id := s.container(pod, config, containerConfig("main", "sleep 1000"))
	for _, p := range []testenv.Process{testenv.Gateway, testenv.NRIHub, testenv.Sandboxd, testenv.EventBus} {
		must(t, s.Stop(t.Context(), p))
	}
	for _, p := range []testenv.Process{testenv.EventBus, testenv.Sandboxd, testenv.NRIHub, testenv.Gateway} {
		must(t, s.Run(p))
	}
	must(t, s.WaitReady(t.Context()))
	s.exec(id, "true")
	if attempt := s.status(id).GetMetadata().GetAttempt(); attempt != 1 {
		t.Errorf("attempt %d, want 1", attempt)
	}
}

// A death between prepare and commit leaves no half-made pod.
func TestGatewayDiesWhileAPodIsMade(t *testing.T) {
	s := start(t, testenv.Setup{})
	must(t, s.SlowNetwork(3*time.Second))
	failed := make(chan error, 1)
	go func() {
		_, err := s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: s.podConfig("half")})
		failed <- err
	}()
	eventually(t, "the network is being attached", func() error {
		calls, err := s.NetworkCalls()
		if len(calls) == 0 {
			return errors.Join(err, errors.New("no call yet"))
		}
		return err
	})
	must(t, s.Kill(t.Context(), testenv.Gateway))
	if err := <-failed; err == nil {
		t.Error("the call succeeded without a gateway")
	}
	must(t, s.Run(testenv.Gateway))
	must(t, s.SlowNetwork(0))
	must(t, s.WaitReady(t.Context()))
	// The same pod can be made at once, as kubelet does.
	answer, err := s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: s.podConfig("half")})
	must(t, err)
	if pods := strings.Fields(s.crictl("pods", "-q")); len(pods) != 1 || pods[0] != answer.GetPodSandboxId() {
		t.Errorf("pods are %v, want only %s", pods, answer.GetPodSandboxId())
	}
}

// releaseFromOutside lets the container that waits for /tmp/go end, without the runtime.
func releaseFromOutside(t *testing.T, id string) {
	t.Helper()
	// The container's init is the process whose cgroup has its id.
	entries, err := os.ReadDir("/proc")
	must(t, err)
	for _, entry := range entries {
		if _, err := strconv.Atoi(entry.Name()); err != nil {
			continue
		}
		groups, err := os.ReadFile("/proc/" + entry.Name() + "/cgroup")
		if err != nil || !strings.Contains(string(groups), id) {
			continue
		}
		must(t, os.WriteFile("/proc/"+entry.Name()+"/root/tmp/go", nil, 0o644))
		return
	}
	t.Fatal(fmt.Errorf("no process of container %s", id))
}
