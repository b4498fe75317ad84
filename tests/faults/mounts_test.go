//go:build integration

package faults

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// deaf mounts a file system on a folder whose server answers nothing; ending it makes every
// access an error.
func deaf(t *testing.T) (dir string, end func()) {
	t.Helper()
	server, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	must(t, err)
	dir = t.TempDir()
	must(t, unix.Mount("test", dir, "fuse.test", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", server.Fd())))
	t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	t.Cleanup(func() { _ = server.Close() }) // also if the test ended it
	return dir, func() { must(t, server.Close()) }
}

// A mount's source on a file system whose server is dead is an error that names it; one whose
// server does not answer holds up its own container and nobody else.
func TestMountSourceWithoutServer(t *testing.T) {
	s := start(t, testenv.Setup{})
	podConfig := s.podConfig("sources")
	pod := s.pod(podConfig, "")
	mounted := func(name, source string) *criv1.ContainerConfig {
		config := script(name, "true")
		config.Mounts = []*criv1.Mount{{HostPath: source, ContainerPath: "/v"}}
		return config
	}

	dead, end := deaf(t)
	end()
	for name, source := range map[string]string{"dead": dead, "below-dead": filepath.Join(dead, "x", "y")} {
		_, err := s.create(pod, podConfig, mounted(name, source))
		if !oneOf(err, codes.FailedPrecondition) || !strings.Contains(fmt.Sprint(err), source) {
			t.Errorf("%s: %v", name, err)
		}
	}

	silent, answer := deaf(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_, err := s.CRI.CreateContainer(ctx, &criv1.CreateContainerRequest{
		PodSandboxId: pod, Config: mounted("silent", filepath.Join(silent, "x")), SandboxConfig: podConfig,
	})
	if !oneOf(err, codes.DeadlineExceeded) {
		t.Errorf("a server that does not answer: %v", err)
	}
	s.waitExit(s.container(pod, podConfig, script("other", "true")), patience)
	s.pod(s.podConfig("other"), "")
	answer()
	eventually(t, patience, "end of the creation", func() error {
		_, err := s.create(pod, podConfig, mounted("silent", filepath.Join(silent, "x")))
		if !oneOf(err, codes.FailedPrecondition) {
			return fmt.Errorf("%w", err)
		}
		return nil
	})
	must(t, s.removePod(pod))
}

// Whoever forwards a port of a pod whose namespace is gone is told, and does not wait.
func TestPortForwardWithoutNamespace(t *testing.T) {
	s := start(t, testenv.Setup{})
	podConfig := s.podConfig("bare")
	pod := s.pod(podConfig, "")
	s.container(pod, podConfig, script("main", "exec sleep 1000"))
	path := s.Path("run", "ns", pod, "net")
	for _, step := range []struct {
		name    string
		destroy func() error
	}{
		{"nobody listens", func() error { return nil }},
		{"not a namespace", func() error { return unix.Unmount(path, unix.MNT_DETACH) }},
		{"file gone", func() error { return os.Remove(path) }},
	} {
		must(t, step.destroy())
		if said, err := s.forward(pod, "80"); err != nil || said == "" {
			t.Errorf("%s: %q, %v", step.name, said, err)
		}
	}
	must(t, errors.Join(s.stopPod(pod), s.removePod(pod)))
}

// forward opens one connection to a port of a pod and returns what is said of it.
func (s *system) forward(pod, port string) (string, error) {
	s.t.Helper()
	answer, err := s.CRI.PortForward(s.t.Context(), &criv1.PortForwardRequest{PodSandboxId: pod})
	if err != nil {
		return "", err
	}
	address, err := url.Parse(answer.GetUrl())
	must(s.t, err)
	transport, upgrader, err := spdy.RoundTripperFor(&rest.Config{})
	must(s.t, err)
	connection, _, err := spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, address).Dial(portforward.PortForwardProtocolV1Name)
	if err != nil {
		return "", err
	}
	time.AfterFunc(patience, func() { _ = connection.Close() }) // ends the reading below
	header := http.Header{"Port": {port}, "Requestid": {"0"}, "Streamtype": {"error"}}
	problems, err := connection.CreateStream(header)
	must(s.t, err)
	must(s.t, problems.Close())
	header.Set("streamType", "data")
	_, err = connection.CreateStream(header)
	must(s.t, err)
	said, err := io.ReadAll(problems)
	return string(said), errors.Join(err, connection.Close())
}
