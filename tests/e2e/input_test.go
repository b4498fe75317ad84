//go:build integration

package e2e

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

const noSuchID = "0000000000000000000000000000000000000000000000000000000000000000"

// Bad input is refused with a code and the name of the field, and leaves nothing.
func TestBadInputIsNamedAndLeavesNothing(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	pod, podConfig := s.pod("good")
	before := s.pids()

	badPod := func(change func(*criv1.PodSandboxConfig)) func() error {
		return func() error {
			config := s.podConfig("bad")
			change(config)
			_, err := s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: config})
			return err
		}
	}
	badContainer := func(change func(*criv1.CreateContainerRequest)) func() error {
		return func() error {
			request := &criv1.CreateContainerRequest{PodSandboxId: pod, Config: containerConfig("bad", "true"), SandboxConfig: podConfig}
			change(request)
			_, err := s.CRI.CreateContainer(t.Context(), request)
			return err
		}
	}
	pullBad := func(image *criv1.ImageSpec) func() error {
		return func() error {
			_, err := s.Images.PullImage(t.Context(), &criv1.PullImageRequest{Image: image})
			return err
		}
	}
	invalid, missing, unmet := codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition
	for _, test := range []struct {
		name  string
		call  func() error
		codes []codes.Code
		named string
	}{
		{"pod without config", func() error {
			_, err := s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{})
			return err
		}, []codes.Code{invalid}, "config"},
		{"pod without metadata", badPod(func(c *criv1.PodSandboxConfig) { c.Metadata = nil }), []codes.Code{invalid}, "metadata"},
		{"pod without name", badPod(func(c *criv1.PodSandboxConfig) { c.Metadata.Name = "" }), []codes.Code{invalid}, "name"},
		{"pod without namespace", badPod(func(c *criv1.PodSandboxConfig) { c.Metadata.Namespace = "" }), []codes.Code{invalid}, "namespace"},
		{"NUL in a pod's name", badPod(func(c *criv1.PodSandboxConfig) { c.Metadata.Name = "a\x00b" }), []codes.Code{invalid}, "name"},
		{"separator in a pod's name", badPod(func(c *criv1.PodSandboxConfig) { c.Metadata.Name = "../a" }), []codes.Code{invalid}, "name"},
		{"separator in a pod's uid", badPod(func(c *criv1.PodSandboxConfig) { c.Metadata.Uid = "../a" }), []codes.Code{invalid}, "uid"},
		{"line end in a pod's cgroup", badPod(func(c *criv1.PodSandboxConfig) { c.Linux.CgroupParent += "/a\nb" }), []codes.Code{invalid}, "cgroup_parent"},
		{"sysctl that the kernel refuses", badPod(func(c *criv1.PodSandboxConfig) {
			c.Linux.Sysctls = map[string]string{"net.ipv4.ip_forward": "banana"}
		}), []codes.Code{invalid}, "ip_forward"},
		{"sysctl that is not there", badPod(func(c *criv1.PodSandboxConfig) {
			c.Linux.Sysctls = map[string]string{"net.ipv4.no_such_thing": "1"}
		}), []codes.Code{invalid}, "no_such_thing"},
		{"sysctl that cannot be written", badPod(func(c *criv1.PodSandboxConfig) {
			c.Linux.Sysctls = map[string]string{"net.netfilter.nf_conntrack_count": "1"}
		}), []codes.Code{invalid}, "nf_conntrack_count"},
		{"unknown runtime handler", func() error {
			_, err := s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: s.podConfig("bad"), RuntimeHandler: "no-such-handler"})
			return err
		}, []codes.Code{invalid, missing, unmet}, "no-such-handler"},
		{"container without config", badContainer(func(r *criv1.CreateContainerRequest) { r.Config = nil }), []codes.Code{invalid}, "config"},
		{"container without metadata", badContainer(func(r *criv1.CreateContainerRequest) { r.Config.Metadata = nil }), []codes.Code{invalid}, "metadata"},
		{"container without name", badContainer(func(r *criv1.CreateContainerRequest) { r.Config.Metadata.Name = "" }), []codes.Code{invalid}, "name"},
		{"container without image", badContainer(func(r *criv1.CreateContainerRequest) { r.Config.Image = nil }), []codes.Code{invalid}, "image"},
		{"container of an image that is absent", badContainer(func(r *criv1.CreateContainerRequest) { r.Config.Image.Image = "registry.k8s.io/absent:1" }), []codes.Code{missing}, "absent"},
		{"container without sandbox config", badContainer(func(r *criv1.CreateContainerRequest) { r.SandboxConfig = nil }), []codes.Code{invalid}, "sandbox_config"},
		{"container in no sandbox", badContainer(func(r *criv1.CreateContainerRequest) { r.PodSandboxId = "" }), []codes.Code{invalid, missing}, "sandbox"},
		{"container in an unknown sandbox", badContainer(func(r *criv1.CreateContainerRequest) { r.PodSandboxId = noSuchID }), []codes.Code{missing}, "sandbox"},
		{"NUL in a container's name", badContainer(func(r *criv1.CreateContainerRequest) { r.Config.Metadata.Name = "a\x00b" }), []codes.Code{invalid}, "name"},
		{"more groups than a process can have", badContainer(func(r *criv1.CreateContainerRequest) {
			groups := make([]int64, 65537)
			for i := range groups {
				groups[i] = int64(i)
			}
			r.Config.Linux.SecurityContext = &criv1.LinuxContainerSecurityContext{SupplementalGroups: groups}
		}), []codes.Code{invalid}, "groups"},
		{"longer working directory than a path can be", badContainer(func(r *criv1.CreateContainerRequest) {
			r.Config.WorkingDir = strings.Repeat("/x", 2048)
		}), []codes.Code{invalid}, "working directory"},
		{"log path out of the log folder", badContainer(func(r *criv1.CreateContainerRequest) { r.Config.LogPath = "../../x.log" }), []codes.Code{invalid}, "log_path"},
		{"NUL in a mount", badContainer(func(r *criv1.CreateContainerRequest) {
			r.Config.Mounts = []*criv1.Mount{{HostPath: "/tmp\x00", ContainerPath: "/x"}}
		}), []codes.Code{invalid}, "mount"},
		{"start of an unknown container", func() error {
			_, err := s.CRI.StartContainer(t.Context(), &criv1.StartContainerRequest{ContainerId: noSuchID})
			return err
		}, []codes.Code{missing}, "container"},
		{"status of an unknown container", func() error {
			_, err := s.CRI.ContainerStatus(t.Context(), &criv1.ContainerStatusRequest{ContainerId: "../etc"})
			return err
		}, []codes.Code{missing, invalid}, "container"},
		{"status of an unknown sandbox", func() error {
			_, err := s.CRI.PodSandboxStatus(t.Context(), &criv1.PodSandboxStatusRequest{PodSandboxId: noSuchID})
			return err
		}, []codes.Code{missing}, "sandbox"},
		{"exec in an unknown container", func() error {
			_, err := s.CRI.ExecSync(t.Context(), &criv1.ExecSyncRequest{ContainerId: noSuchID, Cmd: []string{"true"}})
			return err
		}, []codes.Code{missing}, "container"},
		{"pull without image", pullBad(nil), []codes.Code{invalid}, "image"},
		{"pull of an empty name", pullBad(&criv1.ImageSpec{}), []codes.Code{invalid}, "image"},
		{"pull of a malformed name", pullBad(&criv1.ImageSpec{Image: "UPPER CASE//x:::"}), []codes.Code{invalid}, "UPPER CASE"},
		{"pull of an absent image", pullBad(&criv1.ImageSpec{Image: "registry.k8s.io/absent:1"}), []codes.Code{missing}, "absent"},
		{"status of no image", func() error {
			_, err := s.Images.ImageStatus(t.Context(), &criv1.ImageStatusRequest{})
			return err
		}, []codes.Code{invalid}, "image"},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := test.call()
			if code := status.Code(err); !slices.Contains(test.codes, code) {
				t.Errorf("code %s, want one of %v: %v", code, test.codes, err)
			}
			if !strings.Contains(status.Convert(err).Message(), test.named) {
				t.Errorf("%q does not name %q", status.Convert(err).Message(), test.named)
			}
		})
	}

	if after := s.pids(); after != before {
		t.Errorf("processes were %v and are %v", before, after)
	}
	if pods := strings.Fields(s.crictl("pods", "-q")); !slices.Equal(pods, []string{pod}) {
		t.Errorf("pods are %v, want only %s", pods, pod)
	}
	if containers := s.crictl("ps", "-aq"); containers != "" {
		t.Errorf("containers were left: %q", containers)
	}
	if logs := s.crictl("ps", "-aq", "--pod", pod); logs != "" {
		t.Errorf("the good pod has containers: %q", logs)
	}
}

// Stop and remove of what is not there succeed, since kubelet repeats them.
func TestStopAndRemoveAreIdempotent(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	pod, config := s.pod("twice")
	id := s.container(pod, config, containerConfig("main", "sleep 1000"))
	for range 2 {
		_, err := s.CRI.StopContainer(t.Context(), &criv1.StopContainerRequest{ContainerId: id, Timeout: 0})
		must(t, err)
	}
	for range 2 {
		_, err := s.CRI.RemoveContainer(t.Context(), &criv1.RemoveContainerRequest{ContainerId: id})
		must(t, err)
	}
	for range 2 {
		_, err := s.CRI.StopPodSandbox(t.Context(), &criv1.StopPodSandboxRequest{PodSandboxId: pod})
		must(t, err)
	}
	for range 2 {
		_, err := s.CRI.RemovePodSandbox(t.Context(), &criv1.RemovePodSandboxRequest{PodSandboxId: pod})
		must(t, err)
	}
	_, err := s.CRI.StopContainer(t.Context(), &criv1.StopContainerRequest{ContainerId: noSuchID})
	must(t, err)
	_, err = s.CRI.RemovePodSandbox(t.Context(), &criv1.RemovePodSandboxRequest{PodSandboxId: noSuchID})
	must(t, err)
}
