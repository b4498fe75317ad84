//go:build integration

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	versionapi "github.com/containerd/containerd/api/services/version/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// kubelet's built-in cAdvisor learns from sandboxd what the cgroups of containers and of pods
// with an init process belong to.
func TestCAdvisorIsAnswered(t *testing.T) {
	testenv.EachHandler(t, answerCAdvisor)
}

func answerCAdvisor(t *testing.T, handler string) {
	var socket string
	s := start(t, testenv.Setup{Handler: handler, Configure: func(p testenv.Process, settings testenv.Settings) {
		if p == testenv.Sandboxd {
			socket = strings.TrimSuffix(settings.Get("server.socket.path").(string), "sandboxd.sock") + "containerd/containerd.sock"
			settings.Set("cadvisor.socket", socket)
		}
	}})
	s.pull(busybox)
	config := s.podConfig("watched")
	config.Labels["io.kubernetes.pod.name"] = "watched"
	config.Linux.SecurityContext.NamespaceOptions = &criv1.NamespaceOption{Pid: criv1.NamespaceMode_POD}
	answer, err := s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: config})
	must(t, err)
	pod := answer.GetPodSandboxId()
	work := containerConfig("work", "sleep 1000")
	work.Labels["io.kubernetes.pod.name"] = "watched"
	work.Linux.SecurityContext = &criv1.LinuxContainerSecurityContext{NamespaceOptions: config.GetLinux().GetSecurityContext().GetNamespaceOptions()}
	id := s.container(pod, config, work)

	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	defer func() { _ = conn.Close() }()
	version, err := versionapi.NewVersionClient(conn).Version(t.Context(), &emptypb.Empty{})
	must(t, err)
	if version.GetVersion() == "" {
		t.Error("the version is empty")
	}
	containers, tasks := containersapi.NewContainersClient(conn), tasksapi.NewTasksClient(conn)
	ctx := metadata.AppendToOutgoingContext(t.Context(), "containerd-namespace", "k8s.io")
	kinds := map[string]string{id: "container", pod: "sandbox"}
	for asked, kind := range kinds {
		described, err := containers.Get(ctx, &containersapi.GetContainerRequest{ID: asked})
		must(t, err)
		labels := described.GetContainer().GetLabels()
		if labels["io.kubernetes.pod.name"] != "watched" || labels["io.cri-containerd.kind"] != kind {
			t.Errorf("labels of the %s are %v", kind, labels)
		}
		task, err := tasks.Get(ctx, &tasksapi.GetRequest{ContainerID: asked})
		must(t, err)
		pid := task.GetProcess().GetPid()
		// cAdvisor asks for what the last element of a process's cgroup names.
		groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		must(t, err)
		if !strings.Contains(string(groups), asked) {
			t.Errorf("process %d of the %s is in\n%swant the cgroup of %s", pid, kind, groups, asked)
		}
	}
	sameNetwork(ctx, t, tasks, pod, id)
	s.standIns(ctx, tasks)

	_, err = containers.Get(ctx, &containersapi.GetContainerRequest{ID: strings.Repeat("0", len(id))})
	wantStatus(t, "unknown container", err, codes.NotFound)
	elsewhere := metadata.AppendToOutgoingContext(t.Context(), "containerd-namespace", "moby")
	_, err = containers.Get(elsewhere, &containersapi.GetContainerRequest{ID: id})
	wantStatus(t, "other namespace", err, codes.NotFound)
	_, err = tasks.Kill(ctx, &tasksapi.KillRequest{ContainerID: id, Signal: 9})
	wantStatus(t, "kill", err, codes.Unimplemented)

	_, err = s.CRI.StopContainer(t.Context(), &criv1.StopContainerRequest{ContainerId: id})
	must(t, err)
	s.waitExit(id)
	_, err = tasks.Get(ctx, &tasksapi.GetRequest{ContainerID: id})
	wantStatus(t, "task of an ended container", err, codes.NotFound)

	must(t, s.Stop(t.Context(), testenv.Sandboxd))
	if _, err := os.Lstat(socket); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("socket after sandboxd's stop: %v", err)
	}
	must(t, s.Run(testenv.Sandboxd))
	must(t, s.WaitReady(t.Context()))
}

// standIns checks that a pod without a process of its own has a cgroup by which cAdvisor finds it,
// as long as a process runs in it, and a new one when another process stands for it.
func (s *system) standIns(ctx context.Context, tasks tasksapi.TasksClient) {
	t := s.t
	t.Helper()
	pod, config := s.pod("plain")
	first := s.container(pod, config, containerConfig("first", "sleep 1000"))
	inode := s.podGroup(config, pod, 0)
	sameNetwork(ctx, t, tasks, pod, first)
	second := s.container(pod, config, containerConfig("second", "sleep 1000"))
	_, err := s.CRI.StopContainer(t.Context(), &criv1.StopContainerRequest{ContainerId: first})
	must(t, err)
	s.podGroup(config, pod, inode)
	sameNetwork(ctx, t, tasks, pod, second)
	_, err = s.CRI.StopPodSandbox(t.Context(), &criv1.StopPodSandboxRequest{PodSandboxId: pod})
	must(t, err)
	eventually(t, "end of the pod's cgroup", func() error {
		if found := podGroups(config, pod); len(found) != 0 {
			return fmt.Errorf("there are %v", found)
		}
		return nil
	})
}

// podGroups are the cgroups named after a pod's sandbox.
func podGroups(config *criv1.PodSandboxConfig, pod string) []string {
	parent := config.GetLinux().GetCgroupParent()
	var out []string
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
		found, _ := filepath.Glob(filepath.Join(root, parent, pod)) // the pattern is well-formed
		out = append(out, found...)
	}
	return out
}

// podGroup waits for the cgroup of a pod that is not the one with an inode, and gives its inode.
func (s *system) podGroup(config *criv1.PodSandboxConfig, pod string, but uint64) (inode uint64) {
	s.t.Helper()
	eventually(s.t, "cgroup of the pod", func() error {
		found := podGroups(config, pod)
		if len(found) == 0 {
			return errors.New("there is none")
		}
		info, err := os.Stat(found[0])
		if err != nil {
			return err
		}
		inode = info.Sys().(*syscall.Stat_t).Ino
		if inode == but {
			return errors.New("it is the old one")
		}
		return nil
	})
	return inode
}

// sameNetwork checks that the processes of a pod and of its container share a network that is
// not the host's.
func sameNetwork(ctx context.Context, t *testing.T, tasks tasksapi.TasksClient, pod, container string) {
	t.Helper()
	var of [2]string
	for i, id := range []string{pod, container} {
		task, err := tasks.Get(ctx, &tasksapi.GetRequest{ContainerID: id})
		must(t, err)
		of[i], err = os.Readlink(fmt.Sprintf("/proc/%d/ns/net", task.GetProcess().GetPid()))
		must(t, err)
	}
	host, err := os.Readlink("/proc/self/ns/net")
	must(t, err)
	if of[0] != of[1] || of[0] == host {
		t.Errorf("networks are %v of the pod, %v of the container, %v of the host", of[0], of[1], host)
	}
}

func wantStatus(t *testing.T, what string, err error, want codes.Code) {
	t.Helper()
	if status.Code(err) != want {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}
