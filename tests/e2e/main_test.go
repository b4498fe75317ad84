//go:build integration

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/fixture"
	"github.com/crisp-cri/crisp/tests/testenv"
)

const busybox = fixture.BusyboxImage

func TestMain(m *testing.M) {
	os.Exit(testenv.Main(context.Background(), m))
}

// images are made once for all stories.
var images = sync.OnceValues(func() ([]fixture.Image, error) {
	parts, err := fixture.FindParts(context.Background(), fixture.PartsConfig{})
	if err != nil {
		return nil, err
	}
	return fixture.Conformance(parts)
})

// system is a running system with what stories often need of it.
type system struct {
	*testenv.System

	t *testing.T
}

func start(t *testing.T, setup testenv.Setup) *system {
	t.Helper()
	all, err := images()
	if err != nil {
		t.Fatal(err)
	}
	setup.Images = all
	return &system{System: testenv.Start(t, setup), t: t}
}

// pull makes an image present.
func (s *system) pull(image string) {
	s.t.Helper()
	if _, err := s.Images.PullImage(s.t.Context(), &criv1.PullImageRequest{Image: &criv1.ImageSpec{Image: image}}); err != nil {
		s.t.Fatalf("pull %s: %v", image, err)
	}
}

// podConfig is an ordinary pod of that name.
func (s *system) podConfig(name string) *criv1.PodSandboxConfig {
	return &criv1.PodSandboxConfig{
		Metadata:     &criv1.PodSandboxMetadata{Name: name, Uid: name + "-uid", Namespace: "e2e", Attempt: 1},
		Hostname:     name,
		LogDirectory: s.Path("podlogs", name),
		Labels:       map[string]string{"story": s.t.Name()},
		Annotations:  map[string]string{"crisp.test/pod": name},
		Linux:        &criv1.LinuxPodSandboxConfig{CgroupParent: s.CgroupParent(), SecurityContext: &criv1.LinuxSandboxSecurityContext{}},
	}
}

// containerConfig is a container of the busybox image that runs a shell script.
func containerConfig(name, script string) *criv1.ContainerConfig {
	return &criv1.ContainerConfig{
		Metadata:    &criv1.ContainerMetadata{Name: name, Attempt: 1},
		Image:       &criv1.ImageSpec{Image: busybox},
		Command:     []string{"sh", "-c", script},
		LogPath:     name + ".log",
		Labels:      map[string]string{"container": name},
		Annotations: map[string]string{"crisp.test/container": name},
		Linux:       &criv1.LinuxContainerConfig{},
	}
}

// pod runs a pod and gives its id and configuration.
func (s *system) pod(name string) (string, *criv1.PodSandboxConfig) {
	s.t.Helper()
	config := s.podConfig(name)
	answer, err := s.CRI.RunPodSandbox(s.t.Context(), &criv1.RunPodSandboxRequest{Config: config})
	if err != nil {
		s.t.Fatalf("run pod %s: %v", name, err)
	}
	return answer.GetPodSandboxId(), config
}

// container creates and starts a container.
func (s *system) container(pod string, podConfig *criv1.PodSandboxConfig, config *criv1.ContainerConfig) string {
	s.t.Helper()
	created, err := s.CRI.CreateContainer(s.t.Context(), &criv1.CreateContainerRequest{PodSandboxId: pod, Config: config, SandboxConfig: podConfig})
	if err != nil {
		s.t.Fatalf("create container %s: %v", config.GetMetadata().GetName(), err)
	}
	if _, err := s.CRI.StartContainer(s.t.Context(), &criv1.StartContainerRequest{ContainerId: created.GetContainerId()}); err != nil {
		s.t.Fatalf("start container %s: %v", config.GetMetadata().GetName(), err)
	}
	return created.GetContainerId()
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

// waitExit waits until a container has exited.
func (s *system) waitExit(id string) *criv1.ContainerStatus {
	s.t.Helper()
	var status *criv1.ContainerStatus
	eventually(s.t, "container exits", func() error {
		status = s.status(id)
		if status.GetState() != criv1.ContainerState_CONTAINER_EXITED {
			return fmt.Errorf("state is %s", status.GetState())
		}
		return nil
	})
	return status
}

// exec runs a command in a container and gives its output; it must succeed.
func (s *system) exec(id string, command ...string) string {
	s.t.Helper()
	answer, err := s.CRI.ExecSync(s.t.Context(), &criv1.ExecSyncRequest{ContainerId: id, Cmd: command, Timeout: 20})
	if err != nil {
		s.t.Fatalf("exec %q: %v", command, err)
	}
	if answer.GetExitCode() != 0 {
		s.t.Fatalf("exec %q: exit code %d, stdout %q, stderr %q", command, answer.GetExitCode(), answer.GetStdout(), answer.GetStderr())
	}
	return string(answer.GetStdout())
}

// crictl runs crictl; it must succeed.
func (s *system) crictl(args ...string) string {
	s.t.Helper()
	out, err := s.Crictl(s.t.Context(), args...)
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

// file writes a value as JSON for crictl and gives the path.
func (s *system) file(name string, value any) string {
	s.t.Helper()
	data, err := json.Marshal(value)
	if err != nil {
		s.t.Fatal(err)
	}
	path := filepath.Join(s.t.TempDir(), name)
	if err := os.WriteFile(path, data, 0o600); err != nil {
		s.t.Fatal(err)
	}
	return path
}

// pids gives the process ids of the four processes.
func (s *system) pids() [4]int {
	return [4]int{s.Pid(testenv.EventBus), s.Pid(testenv.Sandboxd), s.Pid(testenv.NRIHub), s.Pid(testenv.Gateway)}
}

// eventually polls until check succeeds, at most 20 seconds.
func eventually(t *testing.T, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// must fails the test on an error.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// contains fails the test if a text lacks one of the words.
func contains(t *testing.T, text string, words ...string) {
	t.Helper()
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("%q is missing in:\n%s", word, text)
		}
	}
}
