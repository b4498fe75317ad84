//go:build integration

package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

const mappedRoot = 70_000

func mappings() []*criv1.IDMapping {
	return []*criv1.IDMapping{{ContainerId: 0, HostId: mappedRoot, Length: 65_536}}
}

// mappedPod runs a pod with a user namespace.
func (s *system) mappedPod(name string, change func(*criv1.NamespaceOption)) (string, *criv1.PodSandboxConfig, error) {
	config := s.podConfig(name)
	options := &criv1.NamespaceOption{
		Pid:           criv1.NamespaceMode_CONTAINER,
		UsernsOptions: &criv1.UserNamespace{Mode: criv1.NamespaceMode_POD, Uids: mappings(), Gids: mappings()},
	}
	if change != nil {
		change(options)
	}
	config.Linux.SecurityContext.NamespaceOptions = options
	answer, err := s.CRI.RunPodSandbox(s.t.Context(), &criv1.RunPodSandboxRequest{Config: config})
	return answer.GetPodSandboxId(), config, err
}

func mappedContainer(config *criv1.PodSandboxConfig, name, script string) *criv1.ContainerConfig {
	cfg := containerConfig(name, script)
	cfg.Linux.SecurityContext = &criv1.LinuxContainerSecurityContext{NamespaceOptions: config.GetLinux().GetSecurityContext().GetNamespaceOptions()}
	return cfg
}

// In a pod with a user namespace everything belongs to the pod's own users: the root file
// system, the files of the pod, volumes of the node, of images and declared by images.
func TestUserNamespace(t *testing.T) {
	testenv.EachHandler(t, tellUserNamespace)
}

func tellUserNamespace(t *testing.T, handler string) {
	declare := func(c *v1.Config) { c.Volumes = map[string]struct{}{"/data": {}} }
	s := startWith(t, testenv.Setup{Handler: handler}, derived(t, dataImage, declare, dataLayer(t)))
	host := t.TempDir()
	must(t, os.Chmod(host, 0o700))
	must(t, os.WriteFile(filepath.Join(host, "file"), []byte("of the node"), 0o600))

	pod, config, err := s.mappedPod("mapped", nil)
	must(t, err)
	cfg := mappedContainer(config, "main", "sleep 1000")
	cfg.Image.Image = dataImage
	volume := imageMount(dataImage, "/image", "data")
	volume.UidMappings, volume.GidMappings = mappings(), mappings()
	cfg.Mounts = []*criv1.Mount{{ContainerPath: "/host", HostPath: host, UidMappings: mappings(), GidMappings: mappings()}, volume}
	id := s.container(pod, config, cfg)

	if got := strings.Fields(s.exec(id, "cat", "/proc/self/uid_map")); strings.Join(got, " ") != "0 70000 65536" {
		t.Errorf("mapping: %q", got)
	}
	for path, want := range map[string]string{
		"/": "0 0", "/bin/sh": "0 0", "/etc/hosts": "0 0", "/etc/hostname": "0 0", "/etc/resolv.conf": "0 0",
		"/host": "0 0", "/host/file": "0 0", "/image/file": "12 12", "/data/file": "12 12", "/proc/self": "0 0", "/dev/shm": "*",
	} {
		got := strings.TrimSpace(s.exec(id, "stat", "-L", "-c", "%u %g", path))
		if got != want && want != "*" {
			t.Errorf("owner of %s: %q, want %q", path, got, want)
		}
	}
	s.exec(id, "sh", "-ec", "cat /etc/hosts /etc/resolv.conf /host/file /image/file >/dev/null; test $(hostname) = mapped; test $(cat /etc/hostname) = mapped; "+
		"echo x > /new; chown 5:6 /new; touch /host/new /data/new /dev/shm/new; mkdir /etc/made; ! touch /image/new; ! mount -t tmpfs none /mnt 2>/dev/null || true")
	// On the node the new files are root's, and the process is the mapped user's.
	fi, err := os.Stat(filepath.Join(host, "new"))
	must(t, err)
	if st, ok := fi.Sys().(*syscall.Stat_t); !ok || st.Uid != 0 {
		t.Errorf("owner of a new file on the node: %+v", st)
	}
	// A further container of the pod after a restart, and an exec into the first.
	must(t, s.Kill(t.Context(), testenv.Sandboxd))
	must(t, s.Run(testenv.Sandboxd))
	must(t, s.WaitReady(t.Context()))
	s.exec(id, "test", "-e", "/new")
	late := s.container(pod, config, mappedContainer(config, "late", "test $(stat -c %u /bin/sh) = 0 && touch /x"))
	if code := s.waitExit(late).GetExitCode(); code != 0 {
		t.Errorf("container after a restart: exit code %d", code)
	}
}

// All kinds of sharing work together with a user namespace.
func TestUserNamespaceWithSharedNamespaces(t *testing.T) {
	s := startWith(t, testenv.Setup{})
	for name, change := range map[string]func(*criv1.NamespaceOption){
		"shared-pid": func(o *criv1.NamespaceOption) { o.Pid = criv1.NamespaceMode_POD },
		"host-net":   func(o *criv1.NamespaceOption) { o.Network = criv1.NamespaceMode_NODE },
		"host-ipc":   func(o *criv1.NamespaceOption) { o.Ipc = criv1.NamespaceMode_NODE },
	} {
		t.Run(name, func(t *testing.T) {
			s := &system{System: s.System, t: t}
			pod, config, err := s.mappedPod(name, change)
			must(t, err)
			id := s.container(pod, config, mappedContainer(config, "main", "sleep 1000"))
			s.exec(id, "sh", "-ec", "test $(id -u) = 0; touch /x; ls /sys/class/net >/dev/null; cat /etc/hosts >/dev/null")
			_, err = s.CRI.RemovePodSandbox(t.Context(), &criv1.RemovePodSandboxRequest{PodSandboxId: pod})
			must(t, err)
		})
	}
}

// What cannot be is refused, and nothing is left of it.
func TestBadUserNamespaces(t *testing.T) {
	s := startWith(t, testenv.Setup{})
	one := func(container, host, length uint32) []*criv1.IDMapping {
		return []*criv1.IDMapping{{ContainerId: container, HostId: host, Length: length}}
	}
	for name, user := range map[string]*criv1.UserNamespace{
		"two ranges":       {Uids: append(one(0, 1000, 10), one(10, 5000, 10)...), Gids: one(0, 1000, 10)},
		"no root":          {Uids: one(1, 1000, 10), Gids: one(1, 1000, 10)},
		"empty range":      {Uids: one(0, 1000, 0), Gids: one(0, 1000, 0)},
		"too high":         {Uids: one(0, 4294967290, 100), Gids: one(0, 1000, 10)},
		"users only":       {Uids: one(0, 1000, 10)},
		"node with ranges": {Mode: criv1.NamespaceMode_NODE, Uids: one(0, 1000, 10), Gids: one(0, 1000, 10)},
		"container":        {Mode: criv1.NamespaceMode_CONTAINER},
		"target":           {Mode: criv1.NamespaceMode_TARGET},
	} {
		if _, _, err := s.mappedPod("bad", func(o *criv1.NamespaceOption) { o.UsernsOptions = user }); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
	pod, config, err := s.mappedPod("good", nil)
	must(t, err)
	cfg := containerConfig("other", "true")
	cfg.Linux.SecurityContext = &criv1.LinuxContainerSecurityContext{NamespaceOptions: &criv1.NamespaceOption{
		UsernsOptions: &criv1.UserNamespace{Uids: one(0, 200_000, 65_536), Gids: one(0, 200_000, 65_536)},
	}}
	if _, err := s.create(pod, config, cfg); status.Code(err) != codes.InvalidArgument {
		t.Errorf("container with another mapping: %v", err)
	}
}
