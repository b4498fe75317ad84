//go:build kubelet

package kubelet

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// restartErrors are answers that kubelet gets while a process is away.
var restartErrors = []string{"code = Unavailable", "code = DeadlineExceeded", "code = Canceled", "code = Aborted"}

// Whatever process is killed under a running pod, the pod stays ready all the time, and kubelet
// makes and ends other pods afterwards.
func TestRestarts(t *testing.T) {
	n := start(t, options{expected: restartErrors})
	s := n.story(t)
	main := shell("main", "echo up; "+forever)
	main.ReadinessProbe, main.LivenessProbe = probe(execHandler("true")), probe(execHandler("true"))
	main.LivenessProbe.FailureThreshold = 3
	before := s.runReady(pod("steady", main, shell("other", forever)))
	for _, p := range []testenv.Process{testenv.Gateway, testenv.Sandboxd, testenv.NRIHub, testenv.EventBus} {
		t.Run(string(p), func(t *testing.T) {
			must(t, n.Restart(t.Context(), p))
			n.story(t).steady(before, string(p))
		})
	}
	t.Run("all", func(t *testing.T) {
		all := []testenv.Process{testenv.Gateway, testenv.NRIHub, testenv.Sandboxd, testenv.EventBus}
		for _, p := range all {
			must(t, n.Kill(t.Context(), p))
		}
		for _, p := range all {
			must(t, n.Run(p))
		}
		must(t, n.WaitReady(t.Context()))
		n.story(t).steady(before, "all")
	})
	t.Run("kubelet", func(t *testing.T) {
		n.stopKubelet()
		n.startKubelet()
		n.story(t).steady(before, "kubelet")
	})
	t.Run("end-meanwhile", func(t *testing.T) {
		s := n.story(t)
		s.runReady(pod("mortal", shell("main", "echo up; exec sleep 100000")))
		pid := s.hostPid("mortal")
		must(t, n.Kill(t.Context(), testenv.Sandboxd))
		must(t, syscall.Kill(pid, syscall.SIGKILL))
		must(t, n.Run(testenv.Sandboxd))
		must(t, n.WaitReady(t.Context()))
		p := s.wait("mortal", func(p corev1.Pod) error {
			if got := status(p, "main").RestartCount; got != 1 {
				return fmt.Errorf("restarted %d times", got)
			}
			return ready(p)
		})
		if err := terminated("main", "Error", 137)(p); err != nil {
			t.Error(err)
		}
	})
}

// steady wants the pod to be what it was, and a new one to come and go.
func (s *story) steady(before corev1.Pod, name string) {
	s.t.Helper()
	s.runReady(pod("after-"+name, shell("main", "echo here; "+forever)))
	s.wantLogs("after-"+name, "main", "", "here\n")
	now := s.wait("steady", ready)
	for _, container := range []string{"main", "other"} {
		was, is := status(before, container), status(now, container)
		if is.ContainerID != was.ContainerID || is.RestartCount != 0 {
			s.t.Errorf("container %s is %+v", container, is)
		}
	}
	// A kubelet without a control plane forgets since when.
	if was, is := readySince(before), readySince(now); was != is && name != "kubelet" {
		s.t.Errorf("the pod is ready since %s, and was since %s", is, was)
	}
	s.wantDo("well\n", "steady", "main", "echo", "well")
	s.wantLogs("steady", "main", "", "up\n")
}

func readySince(p corev1.Pod) string {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.LastTransitionTime.String()
		}
	}
	return ""
}

// hostPid is the process of a container as the node sees it.
func (s *story) hostPid(name string) (pid int) {
	s.t.Helper()
	p, err := s.find(name)
	must(s.t, err)
	id := strings.TrimPrefix(status(p, "main").ContainerID, "crisp://")
	must(s.t, s.walkGroups(func(dir string) error {
		if filepath.Base(dir) != id || pid > 0 {
			return nil
		}
		text, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if err == nil {
			_, err = fmt.Sscan(string(text), &pid)
		}
		return err
	}))
	if pid <= 1 {
		s.t.Fatalf("no process of container %s", id)
	}
	return pid
}
