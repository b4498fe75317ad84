//go:build integration

package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

const freezers = "/sys/fs/cgroup/freezer"

// Whoever froze a container, and wherever in it, it can be stopped and removed: from outside, or
// by itself in a group of its own, as a runtime inside of a container does.
func TestFrozenContainersAreStopped(t *testing.T) { testenv.EachHandler(t, tellFrozen) }

func tellFrozen(t *testing.T, handler string) {
	if _, err := os.Stat(freezers); err != nil {
		t.Skip("what is frozen in a unified hierarchy dies")
	}
	s := start(t, testenv.Setup{Handler: handler})
	podConfig := s.podConfig("frozen")
	podConfig.Linux.SecurityContext.Privileged = true
	pod := s.pod(podConfig, "")
	inner := func(name string) string {
		config := script(name, `mkdir -p /sys/fs/cgroup/freezer/in/deep
			sleep 1001 & echo $! > /sys/fs/cgroup/freezer/in/deep/cgroup.procs
			echo FROZEN > /sys/fs/cgroup/freezer/in/deep/freezer.state; echo ready; exec sleep 1000`)
		config.Linux.SecurityContext = &criv1.LinuxContainerSecurityContext{Privileged: true}
		id := s.container(pod, podConfig, config)
		s.waitLog(podConfig, config, "ready")
		return id
	}
	freeze := func(id string) {
		must(t, os.WriteFile(filepath.Join(freezers, s.CgroupParent(), id, "freezer.state"), []byte("FROZEN"), 0))
	}

	outer := s.container(pod, podConfig, script("outer", "exec sleep 1000"))
	freeze(outer)
	if _, _, err := s.exec(outer, "true"); !oneOf(err, codes.FailedPrecondition) && handler == testenv.HandlerCrisp {
		t.Errorf("exec in what is frozen: %v", err)
	}
	both := inner("both")
	freeze(both)
	for what, id := range map[string]string{"from outside": outer, "by itself": inner("inner"), "both": both} {
		if err := s.stopContainer(id, 1); err != nil {
			t.Errorf("stop of a container frozen %s: %v", what, err)
		}
		if st := s.waitExit(id, patience); st.GetExitCode() != 137 {
			t.Errorf("frozen %s: exit code %d", what, st.GetExitCode())
		}
		if err := s.removeContainer(id); err != nil {
			t.Errorf("removal of a container frozen %s: %v", what, err)
		}
		if left := containerPIDs(t, id); len(left) > 0 {
			t.Errorf("frozen %s: processes %v are left", what, left)
		}
	}
	freeze(inner("last"))
	must(t, s.stopPod(pod))
	must(t, s.removePod(pod))
}

// Nothing of a command whose time is up stays, so that probes that hang do not fill a container:
// neither what it waits for nor what it has put in the background. What has made itself
// independent of it stays.
func TestNothingOutlivesACommandsTime(t *testing.T) {
	s := start(t, testenv.Setup{Handler: testenv.HandlerCrisp})
	podConfig := s.podConfig("probes")
	pod := s.pod(podConfig, "")
	id := s.container(pod, podConfig, script("main", "exec sleep 1000"))
	for _, text := range []string{
		"sleep 7771 & sleep 7772; true", "sh -c 'sleep 7773; true'; true", "trap '' TERM HUP; sleep 7774 | cat; true",
		"setsid sleep 8880 & sleep 7775; true",
	} {
		_, err := s.CRI.ExecSync(t.Context(), &criv1.ExecSyncRequest{ContainerId: id, Cmd: []string{"sh", "-c", text}, Timeout: 1})
		if !oneOf(err, codes.DeadlineExceeded) {
			t.Errorf("%q: %v", text, err)
		}
	}
	eventually(t, patience, "the commands are gone", func() error {
		out, _, err := s.exec(id, "ps", "-o", "args")
		must(t, err)
		if strings.Contains(out, "777") || !strings.Contains(out, "8880") {
			return fmt.Errorf("processes: %s", out)
		}
		return nil
	})
}
