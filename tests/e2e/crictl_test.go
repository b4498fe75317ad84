//go:build integration

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// A pod's whole life, as an operator drives it with crictl.
func TestPodLifeWithCrictl(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.crictl("pull", busybox)

	podFile := s.file("pod.json", s.podConfig("life"))
	containerFile := s.file("container.json", containerConfig("talker", `echo to stdout; echo to stderr >&2; trap 'exit 7' TERM; while true; do sleep 0.1; done`))
	pod := strings.TrimSpace(s.crictl("runp", podFile))
	if len(pod) != 64 {
		t.Errorf("pod id %q has not 64 characters", pod)
	}
	contains(t, s.crictl("pods"), "life", "Ready")
	contains(t, s.crictl("inspectp", pod), `"SANDBOX_READY"`, "10.88.", `"crisp.test/pod"`)
	// Tools enter the network of a pod by the path that its specification has.
	netns := s.crictl("inspectp", "-o", "go-template", "--template",
		`{{range .info.runtimeSpec.linux.namespaces}}{{if eq .type "network"}}{{.path}}{{end}}{{end}}`, pod)
	_, err := os.Stat(strings.TrimSpace(netns))
	must(t, err)

	container := strings.TrimSpace(s.crictl("create", pod, containerFile, podFile))
	contains(t, s.crictl("ps", "-a"), "talker", "Created")
	s.crictl("start", container)
	contains(t, s.crictl("ps"), "talker", "Running")
	contains(t, s.crictl("inspect", container), `"CONTAINER_RUNNING"`, busybox, `"crisp.test/container"`)

	eventually(t, "log has both lines", func() error {
		text := s.crictl("logs", container)
		if !strings.Contains(text, "to stdout") {
			return fmt.Errorf("log is %q", text)
		}
		return nil
	})
	if out := s.crictl("exec", "--sync", container, "cat", "/etc/hostname"); strings.TrimSpace(out) != "life" {
		t.Errorf("exec --sync: hostname is %q", out)
	}
	if out := s.crictl("exec", container, "echo", "streamed"); strings.TrimSpace(out) != "streamed" {
		t.Errorf("exec: got %q", out)
	}
	if _, err := s.Crictl(t.Context(), "exec", "--sync", container, "sh", "-c", "exit 3"); err == nil || !strings.Contains(err.Error(), "3") {
		t.Errorf("exec --sync of a failing command: %v, want exit code 3", err)
	}

	s.crictl("stop", "--timeout", "10", container)
	contains(t, s.crictl("ps", "-a"), "talker", "Exited")
	if code := s.status(container).GetExitCode(); code != 7 {
		t.Errorf("exit code %d, want the 7 of the TERM handler", code)
	}
	s.crictl("rm", container)
	s.crictl("stopp", pod)
	contains(t, s.crictl("pods"), "NotReady")
	s.crictl("rmp", pod)
	if out := s.crictl("pods", "-q"); out != "" {
		t.Errorf("pods after rmp: %q", out)
	}
	if out := s.crictl("ps", "-aq"); out != "" {
		t.Errorf("containers after rm: %q", out)
	}
}

// What a runtime says about itself.
func TestRuntimeInformationWithCrictl(t *testing.T) {
	s := start(t, testenv.Setup{})
	contains(t, s.crictl("version"), "RuntimeName", "RuntimeApiVersion:  v1")
	contains(t, s.crictl("info"), "RuntimeReady", "NetworkReady")
	contains(t, s.crictl("runtime-config"), "cgroup driver")
	// Both shims do what runc and the kernel can.
	status, err := s.CRI.Status(t.Context(), &criv1.StatusRequest{})
	must(t, err)
	handlers := map[string]*criv1.RuntimeHandlerFeatures{}
	for _, h := range status.GetRuntimeHandlers() {
		handlers[h.GetName()] = h.GetFeatures()
	}
	stock := handlers[testenv.HandlerStock]
	for _, name := range []string{"", testenv.HandlerCrisp} {
		f := handlers[name]
		if f == nil || f.GetUserNamespaces() != stock.GetUserNamespaces() || f.GetRecursiveReadOnlyMounts() != stock.GetRecursiveReadOnlyMounts() {
			t.Errorf("features of handler %q are %v, those of the stock shim %v", name, f, stock)
		}
	}
}

// The log file is in the form that kubelet reads.
func TestLogHasTimeStreamAndTag(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	pod, config := s.pod("logs")
	id := s.container(pod, config, containerConfig("lines", "echo one; echo two >&2; printf three"))
	status := s.waitExit(id)
	eventually(t, "log is complete", func() error {
		lines := readLines(t, status.GetLogPath())
		want := map[string]string{"stdout F one": "", "stderr F two": "", "stdout P three": "stdout F three"}
		found := 0
		for _, line := range lines {
			_, rest, _ := strings.Cut(line, " ")
			for a, b := range want {
				if rest == a || rest == b {
					found++
				}
			}
		}
		if found != len(want) {
			return fmt.Errorf("lines are %q", lines)
		}
		return nil
	})
}

// Info of a verbose status is JSON that an operator can read.
func TestVerboseStatusIsJSON(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	pod, config := s.pod("verbose")
	id := s.container(pod, config, containerConfig("main", "sleep 1000"))
	sandbox, err := s.CRI.PodSandboxStatus(t.Context(), &criv1.PodSandboxStatusRequest{PodSandboxId: pod, Verbose: true})
	must(t, err)
	container, err := s.CRI.ContainerStatus(t.Context(), &criv1.ContainerStatusRequest{ContainerId: id, Verbose: true})
	must(t, err)
	for what, info := range map[string]map[string]string{"sandbox": sandbox.GetInfo(), "container": container.GetInfo()} {
		if !json.Valid([]byte(info["info"])) {
			t.Errorf("%s: info is not JSON: %v", what, info)
		}
	}
}
