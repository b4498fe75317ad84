//go:build integration

package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// All but sandboxd run as an ordinary user without a capability, and a pod runs.
func TestOnlySandboxdNeedsPrivileges(t *testing.T) {
	s := start(t, testenv.Setup{})
	for _, p := range []testenv.Process{testenv.EventBus, testenv.NRIHub, testenv.Gateway} {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.Pid(p)))
		must(t, err)
		for line := range strings.Lines(string(data)) {
			field := strings.Fields(line)
			switch {
			case field[0] == "Uid:" && field[2] == "0":
				t.Errorf("%s runs as root", p)
			case field[0] == "CapEff:" && strings.Trim(field[1], "0") != "":
				t.Errorf("%s has capabilities %s", p, field[1])
			}
		}
	}
	s.pull(busybox)
	pod, config := s.pod("ordinary")
	id := s.container(pod, config, containerConfig("main", "sleep 1000"))
	s.exec(id, "true")
}

// The four processes work as root too.
func TestAllAsRoot(t *testing.T) {
	s := start(t, testenv.Setup{Privileged: true})
	s.pull(busybox)
	pod, config := s.pod("root")
	id := s.container(pod, config, containerConfig("main", "echo hi"))
	if code := s.waitExit(id).GetExitCode(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}
