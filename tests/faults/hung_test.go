//go:build integration

package faults

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// hungFolder is a file system whose server answers nothing, until lift is called.
func hungFolder(t *testing.T) (dir string, lift func()) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "hung")
	must(t, os.Mkdir(dir, 0o755))
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("file systems in user space: %v", err)
	}
	must(t, unix.Mount("hung", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd)))
	lifted := false
	lift = func() {
		if !lifted {
			lifted = true
			must(t, unix.Close(fd))
			must(t, unix.Unmount(dir, unix.MNT_DETACH))
		}
	}
	t.Cleanup(lift)
	return dir, lift
}

// A volume whose file system hangs, as one of a server that is away, fails its container with a
// reason, and holds up neither the pod's end nor, once it is back, the same container.
func TestHungVolumeHoldsUpNoPod(t *testing.T) {
	s := start(t, testenv.Setup{})
	dir, lift := hungFolder(t)
	podConfig := s.podConfig("hung")
	pod := s.pod(podConfig, "")
	config := script("main", "exec sleep 1000")
	config.Mounts = []*criv1.Mount{{HostPath: filepath.Join(dir, "data"), ContainerPath: "/v"}}
	first, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := s.CRI.CreateContainer(first, &criv1.CreateContainerRequest{PodSandboxId: pod, Config: config, SandboxConfig: podConfig})
	if !oneOf(err, codes.DeadlineExceeded) {
		t.Errorf("a caller with little time: %v", err)
	}
	s.container(pod, podConfig, script("other", "exec sleep 1000"))
	if _, err := s.create(pod, podConfig, config); !oneOf(err, codes.Unavailable) {
		t.Errorf("a volume that hangs: %v", err)
	}
	for _, end := range []func(string) error{s.stopPod, s.removePod} {
		if err := end(pod); err != nil {
			t.Errorf("end of the pod: %v", err)
		}
	}
	podConfig.Metadata.Attempt++
	pod = s.pod(podConfig, "")
	lift()
	s.container(pod, podConfig, config)
}

// What the OCI runtime keeps of a container, and does not understand any more, keeps nobody from
// removing it.
func TestDamagedStateOfTheRuntimeKeepsNoContainer(t *testing.T) {
	testenv.EachHandler(t, tellDamagedState)
}

func tellDamagedState(t *testing.T, handler string) {
	s := start(t, testenv.Setup{Handler: handler})
	podConfig := s.podConfig("damaged")
	pod := s.pod(podConfig, "")
	for name, state := range map[string]string{"empty": "", "half": `{"id":"`} {
		id := s.container(pod, podConfig, script(name, "exec sleep 1000"))
		must(t, os.WriteFile(s.Path("run", "runc", "k8s.io", id, "state.json"), []byte(state), 0o600))
		if err := s.stopContainer(id, 0); err != nil {
			t.Errorf("%s: stop: %v", name, err)
		}
		s.waitExit(id, patience)
		if err := s.removeContainer(id); err != nil {
			t.Errorf("%s: removal: %v", name, err)
		}
		s.container(pod, podConfig, script(name, "exec sleep 1000")) // the name is free
	}
}
