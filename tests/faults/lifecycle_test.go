//go:build integration

package faults

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// A pod may be stopped and removed by many at once while others make containers in it:
// stops and removals succeed, and no container survives its pod.
func TestStopAndCreateRaceLeavesNothing(t *testing.T) {
	s := start(t, testenv.Setup{})
	for round := range scaled(t, 5) {
		config := s.podConfig("race")
		pod := s.pod(config, "")
		var wg sync.WaitGroup
		stopped := make(chan struct{})
		for worker := range 4 {
			wg.Go(func() {
				for n := 0; ; n++ {
					id, err := s.create(pod, config, script(fmt.Sprintf("c%d-%d", worker, n), "sleep 1000"))
					if err == nil {
						err = s.startContainer(id)
					}
					if err != nil && !oneOf(err, codes.FailedPrecondition, codes.NotFound, codes.Aborted) {
						t.Errorf("create and start: %v", err)
					}
					select {
					case <-stopped:
						return
					default:
					}
				}
			})
		}
		wg.Go(func() {
			for {
				_, err := s.CRI.PodSandboxStatus(t.Context(), &criv1.PodSandboxStatusRequest{PodSandboxId: pod})
				if err != nil && !oneOf(err, codes.NotFound) {
					t.Errorf("status: %v", err)
				}
				select {
				case <-stopped:
					return
				case <-time.After(50 * time.Millisecond):
				}
			}
		})
		time.Sleep(time.Duration(round*100) * time.Millisecond)
		var stops sync.WaitGroup
		for range 8 {
			stops.Go(func() {
				if err := s.stopPod(pod); err != nil {
					t.Errorf("stop pod: %v", err)
				}
			})
		}
		for range 2 {
			stops.Go(func() {
				if err := s.removePod(pod); err != nil {
					t.Errorf("remove pod: %v", err)
				}
			})
		}
		stops.Wait()
		close(stopped)
		wg.Wait()
		left, err := s.CRI.ListContainers(t.Context(), &criv1.ListContainersRequest{Filter: &criv1.ContainerFilter{PodSandboxId: pod}})
		must(t, err)
		if len(left.GetContainers()) > 0 || len(s.pods()) > 0 {
			t.Fatalf("left are pods %v and containers %v", s.pods(), left.GetContainers())
		}
	}
}

// Messages of which parts are absent get an answer or are refused; nothing falls over.
func TestAbsentMessagesAreAnsweredOrRefused(t *testing.T) {
	s := start(t, testenv.Setup{})
	config := s.podConfig("absent")
	pod := s.pod(config, "")
	pids := [2]int{s.Pid(testenv.Gateway), s.Pid(testenv.Sandboxd)}
	ctx := t.Context()
	bare := func(change func(*criv1.CreateContainerRequest)) func() error {
		return func() error {
			request := &criv1.CreateContainerRequest{PodSandboxId: pod, SandboxConfig: config, Config: script("absent", "true")}
			change(request)
			answer, err := s.CRI.CreateContainer(ctx, request)
			if err == nil {
				must(t, s.startContainer(answer.GetContainerId()))
				s.waitExit(answer.GetContainerId(), patience)
				err = s.removeContainer(answer.GetContainerId())
			}
			return err
		}
	}
	runPod := func(config *criv1.PodSandboxConfig) func() error {
		return func() error {
			answer, err := s.CRI.RunPodSandbox(ctx, &criv1.RunPodSandboxRequest{Config: config})
			if err == nil {
				err = s.removePod(answer.GetPodSandboxId())
			}
			return err
		}
	}
	without := func(change func(*criv1.PodSandboxConfig)) *criv1.PodSandboxConfig {
		config := s.podConfig("without")
		change(config)
		return config
	}
	running := s.container(pod, config, script("running", "sleep 1000"))
	refused, answered, either := "refused", "answered", "either"
	for _, test := range []struct {
		name string
		want string
		call func() error
	}{
		{"pod without config", refused, runPod(nil)},
		{"pod with empty config", refused, runPod(&criv1.PodSandboxConfig{})},
		{"pod without metadata", refused, runPod(without(func(c *criv1.PodSandboxConfig) { c.Metadata = nil }))},
		{"pod without linux", answered, runPod(without(func(c *criv1.PodSandboxConfig) { c.Linux = nil }))},
		{"pod without security context", answered, runPod(without(func(c *criv1.PodSandboxConfig) { c.Linux.SecurityContext = nil }))},
		{"pod with absent port mapping", either, runPod(without(func(c *criv1.PodSandboxConfig) { c.PortMappings = []*criv1.PortMapping{nil} }))},
		{"container without config", refused, bare(func(r *criv1.CreateContainerRequest) { r.Config = nil })},
		{"container without metadata", refused, bare(func(r *criv1.CreateContainerRequest) { r.Config.Metadata = nil })},
		{"container without image", refused, bare(func(r *criv1.CreateContainerRequest) { r.Config.Image = nil })},
		{"container without sandbox config", either, bare(func(r *criv1.CreateContainerRequest) { r.SandboxConfig = nil })},
		{"container without sandbox metadata", either, bare(func(r *criv1.CreateContainerRequest) { r.SandboxConfig = &criv1.PodSandboxConfig{} })},
		{"container without linux", answered, bare(func(r *criv1.CreateContainerRequest) { r.Config.Linux = nil })},
		{"container without security context", answered, bare(func(r *criv1.CreateContainerRequest) { r.Config.Linux.SecurityContext = nil })},
		{"container with empty security context", answered, bare(func(r *criv1.CreateContainerRequest) {
			r.Config.Linux.SecurityContext = &criv1.LinuxContainerSecurityContext{}
		})},
		{"container without resources", answered, bare(func(r *criv1.CreateContainerRequest) { r.Config.Linux.Resources = nil })},
		{"container with absent entries", either, bare(func(r *criv1.CreateContainerRequest) {
			r.Config.Mounts, r.Config.Devices, r.Config.Envs = []*criv1.Mount{nil}, []*criv1.Device{nil}, []*criv1.KeyValue{nil}
			r.Config.CDIDevices = []*criv1.CDIDevice{nil}
		})},
		{"update without linux", either, func() error {
			_, err := s.CRI.UpdateContainerResources(ctx, &criv1.UpdateContainerResourcesRequest{ContainerId: running})
			return err
		}},
		{"update of no container", refused, func() error {
			_, err := s.CRI.UpdateContainerResources(ctx, &criv1.UpdateContainerResourcesRequest{})
			return err
		}},
		{"pod update without anything", either, func() error {
			_, err := s.CRI.UpdatePodSandboxResources(ctx, &criv1.UpdatePodSandboxResourcesRequest{PodSandboxId: pod})
			return err
		}},
		{"list containers", answered, func() error {
			_, err := s.CRI.ListContainers(ctx, &criv1.ListContainersRequest{})
			_, err2 := s.CRI.ListContainers(ctx, &criv1.ListContainersRequest{Filter: &criv1.ContainerFilter{}})
			return errors.Join(err, err2)
		}},
		{"list pods", answered, func() error {
			_, err := s.CRI.ListPodSandbox(ctx, &criv1.ListPodSandboxRequest{})
			_, err2 := s.CRI.ListPodSandbox(ctx, &criv1.ListPodSandboxRequest{Filter: &criv1.PodSandboxFilter{}})
			return errors.Join(err, err2)
		}},
		{"list container stats", answered, func() error {
			_, err := s.CRI.ListContainerStats(ctx, &criv1.ListContainerStatsRequest{})
			_, err2 := s.CRI.ListContainerStats(ctx, &criv1.ListContainerStatsRequest{Filter: &criv1.ContainerStatsFilter{}})
			return errors.Join(err, err2)
		}},
		{"list pod stats", answered, func() error {
			_, err := s.CRI.ListPodSandboxStats(ctx, &criv1.ListPodSandboxStatsRequest{})
			_, err2 := s.CRI.ListPodSandboxStats(ctx, &criv1.ListPodSandboxStatsRequest{Filter: &criv1.PodSandboxStatsFilter{}})
			return errors.Join(err, err2)
		}},
		{"status of no image", refused, func() error {
			_, err := s.Images.ImageStatus(ctx, &criv1.ImageStatusRequest{})
			return err
		}},
		{"pull of no image", refused, func() error {
			_, err := s.Images.PullImage(ctx, &criv1.PullImageRequest{})
			return err
		}},
		{"removal of no image", refused, func() error {
			_, err := s.Images.RemoveImage(ctx, &criv1.RemoveImageRequest{})
			return err
		}},
		{"list images", answered, func() error {
			_, err := s.Images.ListImages(ctx, &criv1.ListImagesRequest{})
			_, err2 := s.Images.ListImages(ctx, &criv1.ListImagesRequest{Filter: &criv1.ImageFilter{}})
			return errors.Join(err, err2)
		}},
		{"exec with only an id", refused, func() error {
			_, err := s.CRI.Exec(ctx, &criv1.ExecRequest{ContainerId: running})
			return err
		}},
		{"exec of nothing", refused, func() error {
			_, err := s.CRI.ExecSync(ctx, &criv1.ExecSyncRequest{ContainerId: running})
			return err
		}},
		{"attach with only an id", either, func() error {
			_, err := s.CRI.Attach(ctx, &criv1.AttachRequest{ContainerId: running})
			return err
		}},
		{"port forward with only an id", either, func() error {
			_, err := s.CRI.PortForward(ctx, &criv1.PortForwardRequest{PodSandboxId: pod})
			return err
		}},
		{"runtime configuration without config", either, func() error {
			_, err := s.CRI.UpdateRuntimeConfig(ctx, &criv1.UpdateRuntimeConfigRequest{})
			return err
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := test.call()
			switch {
			case err == nil && test.want == refused:
				t.Error("was not refused")
			case err != nil && (test.want == answered || status.Code(err) != codes.InvalidArgument):
				t.Errorf("%v", err)
			}
			if _, err := s.CRI.Version(ctx, &criv1.VersionRequest{}); err != nil {
				t.Errorf("version: %v", err)
			}
			if now := [2]int{s.Pid(testenv.Gateway), s.Pid(testenv.Sandboxd)}; now != pids {
				t.Fatalf("processes were %v and are %v", pids, now)
			}
		})
	}
	if left := s.pods(); len(left) != 1 {
		t.Errorf("pods are %v, want only %s", left, pod)
	}
}

// A container whose program cannot run says why and with which file, counts as failed to
// start, and holds nothing until it is removed.
func TestFailedStartIsToldAndHoldsNothing(t *testing.T) {
	s := start(t, testenv.Setup{})
	config := s.podConfig("failing")
	pod := s.pod(config, "")
	files := t.TempDir()
	must(t, os.WriteFile(filepath.Join(files, "plain"), []byte("text"), 0o644))
	must(t, os.WriteFile(filepath.Join(files, "script"), []byte("#!/no/such/interpreter\n"), 0o755))
	foreign := append([]byte("\x7fELF\x02\x01\x01"), make([]byte, 200)...)
	foreign[16], foreign[18] = 2, 0x16 // an executable of another machine
	must(t, os.WriteFile(filepath.Join(files, "foreign"), foreign, 0o755))
	try := func(n int, program string, tty bool) {
		c := script(fmt.Sprintf("c%d", n), "")
		c.Command, c.Tty = []string{program}, tty
		c.Mounts = []*criv1.Mount{{HostPath: files, ContainerPath: "/files"}}
		id, err := s.create(pod, config, c)
		must(t, err)
		err = s.startContainer(id)
		if err == nil || !strings.Contains(err.Error(), program) {
			t.Errorf("start of %s: %v", program, err)
		}
		st := s.status(id)
		if st.GetState() != criv1.ContainerState_CONTAINER_EXITED || st.GetExitCode() < 126 || st.GetExitCode() > 128 || st.GetReason() != "StartError" {
			t.Errorf("%s: state %s, exit code %d, reason %q", program, st.GetState(), st.GetExitCode(), st.GetReason())
		}
		if st.GetCreatedAt() <= 0 || st.GetStartedAt() < st.GetCreatedAt() || st.GetFinishedAt() < st.GetStartedAt() {
			t.Errorf("%s: created %d, started %d, finished %d", program, st.GetCreatedAt(), st.GetStartedAt(), st.GetFinishedAt())
		}
		if pids := containerPIDs(t, id); len(pids) > 0 {
			t.Errorf("%s: processes are left: %v", program, pids)
		}
		for _, hierarchy := range []string{"", "*"} { // of version 2 and 1
			groups, err := filepath.Glob(filepath.Join("/sys/fs/cgroup", hierarchy, s.CgroupParent(), "*"+id))
			if err != nil || len(groups) > 0 {
				t.Errorf("%s: cgroups are left: %v, %v", program, groups, err)
			}
		}
		if err := s.removeContainer(id); err != nil {
			t.Errorf("%s: remove: %v", program, err)
		}
	}
	programs := []string{"/does/not/exist", "/etc", "/files/plain", "/files/script", "/files/foreign"}
	n := 0
	round := func() {
		for _, program := range programs {
			for _, tty := range []bool{false, true} {
				n++
				try(n, program, tty)
			}
		}
	}
	round()
	shim := s.shimOf(pod)
	before := [2]int{descriptors(t, s.Pid(testenv.Sandboxd)), descriptors(t, shim)}
	for range scaled(t, 2) {
		round()
	}
	eventually(t, patience, "descriptors are closed", func() error {
		after := [2]int{descriptors(t, s.Pid(testenv.Sandboxd)), descriptors(t, shim)}
		if after[0] > before[0]+4 || after[1] > before[1]+4 {
			return fmt.Errorf("sandboxd and shim had %v open files and have %v", before, after)
		}
		return nil
	})
}

// Removals that race with each other, starts and commands all succeed.
func TestParallelRemovalsSucceed(t *testing.T) {
	s := start(t, testenv.Setup{})
	config := s.podConfig("removals")
	pod := s.pod(config, "")
	for round := range scaled(t, 4) {
		id, err := s.create(pod, config, script("victim", "sleep 1000"))
		must(t, err)
		if round%2 == 0 {
			must(t, s.startContainer(id))
		}
		var wg sync.WaitGroup
		for n := range 5 {
			wg.Go(func() {
				if err := s.startContainer(id); err != nil && !oneOf(err, codes.FailedPrecondition, codes.NotFound, codes.Aborted) {
					t.Errorf("start %d: %v", n, err)
				}
			})
			wg.Go(func() {
				_, err := s.CRI.ContainerStatus(t.Context(), &criv1.ContainerStatusRequest{ContainerId: id})
				if err != nil && !oneOf(err, codes.NotFound) {
					t.Errorf("status %d: %v", n, err)
				}
			})
			wg.Go(func() {
				if _, _, err := s.exec(id, "true"); oneOf(err, codes.DeadlineExceeded, codes.Internal) {
					t.Errorf("exec %d: %v", n, err)
				}
			})
		}
		for n := range 20 {
			wg.Go(func() {
				if err := s.removeContainer(id); err != nil {
					t.Errorf("remove %d: %v", n, err)
				}
			})
		}
		wg.Wait()
		if _, err := s.CRI.ContainerStatus(t.Context(), &criv1.ContainerStatusRequest{ContainerId: id}); !oneOf(err, codes.NotFound) {
			t.Fatalf("the container is still there: %v", err)
		}
	}
}

// A removal that failed half way succeeds once the obstacle is gone, with and without a
// restart in between.
func TestRemovalSucceedsOnceTheObstacleIsGone(t *testing.T) {
	s := start(t, testenv.Setup{})
	config := s.podConfig("obstacle")
	pod := s.pod(config, "")
	for _, place := range []string{"lib/containers", "run/io"} {
		for _, restart := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s restart %v", filepath.Base(place), restart), func(t *testing.T) {
				id := s.container(pod, config, script("stuck", "sleep 1000"))
				block := obstacle(t, s.Path(place), id)
				ctx, cancel := context.WithTimeout(t.Context(), 8*time.Second)
				defer cancel()
				_, err := s.CRI.RemoveContainer(ctx, &criv1.RemoveContainerRequest{ContainerId: id})
				if err == nil {
					t.Error("the removal succeeded in spite of the obstacle")
				}
				if restart {
					must(t, s.Kill(t.Context(), testenv.Sandboxd))
					must(t, unix.Unmount(block, 0))
					must(t, s.Run(testenv.Sandboxd))
					must(t, s.WaitReady(t.Context()))
				} else {
					must(t, unix.Unmount(block, 0))
				}
				if err := s.removeContainer(id); err != nil {
					t.Errorf("removal after the obstacle: %v", err)
				}
				if _, err := s.CRI.ContainerStatus(t.Context(), &criv1.ContainerStatusRequest{ContainerId: id}); !oneOf(err, codes.NotFound) {
					t.Errorf("the container is still there: %v", err)
				}
			})
		}
	}
}

// obstacle mounts something into the container's folder below root, so that it cannot be
// removed, and gives the place.
func obstacle(t *testing.T, root, id string) string {
	t.Helper()
	folder := ""
	must(t, filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() && d.Name() == id && folder == "" {
			folder = path
		}
		return nil
	}))
	if folder == "" {
		folder = filepath.Join(root, id)
	}
	place := filepath.Join(folder, "obstacle")
	must(t, os.MkdirAll(place, 0o755))
	must(t, unix.Mount("tmpfs", place, "tmpfs", 0, ""))
	must(t, os.WriteFile(filepath.Join(place, "file"), nil, 0o644))
	t.Cleanup(func() { _ = unix.Unmount(place, unix.MNT_DETACH) })
	return place
}

// Of several stops the most impatient one decides, one signal is sent, and nothing else
// waits for them.
func TestShortestStopTimeoutWins(t *testing.T) {
	s := start(t, testenv.Setup{})
	config := s.podConfig("stops")
	pod := s.pod(config, "")
	volume := t.TempDir()
	c := script("stubborn", `trap 'echo x >> /volume/signals' TERM; touch /volume/ready; while true; do sleep 0.05; done`)
	c.Mounts = []*criv1.Mount{{HostPath: volume, ContainerPath: "/volume"}}
	id := s.container(pod, config, c)
	eventually(t, patience, "the trap is set", func() error {
		_, err := os.Stat(filepath.Join(volume, "ready"))
		return err
	})
	pid := s.Pid(testenv.Sandboxd)
	var wg sync.WaitGroup
	begun := time.Now()
	stop := func(timeout int64) {
		wg.Go(func() {
			if err := s.stopContainer(id, timeout); err != nil {
				t.Errorf("stop within %d s: %v", timeout, err)
			}
		})
	}
	stop(60)
	time.Sleep(300 * time.Millisecond)
	for range 10 {
		stop(20)
	}
	for range 5 {
		asked := time.Now()
		s.status(id)
		_, err := s.CRI.ListContainers(t.Context(), &criv1.ListContainersRequest{})
		must(t, err)
		if took := time.Since(asked); took > 10*time.Second {
			t.Errorf("status and list took %s", took)
		}
		time.Sleep(100 * time.Millisecond)
	}
	stop(0)
	wg.Wait()
	if took := time.Since(begun); took > 18*time.Second {
		t.Errorf("the stops took %s", took)
	}
	if st := s.waitExit(id, patience); st.GetExitCode() != 137 {
		t.Errorf("exit code %d, want 137", st.GetExitCode())
	}
	signals, err := os.ReadFile(filepath.Join(volume, "signals"))
	must(t, err)
	if n := strings.Count(string(signals), "x"); n != 1 {
		t.Errorf("%d signals were received, want 1", n)
	}
	for range 10 {
		stop(5)
	}
	wg.Go(func() {
		if err := s.removeContainer(id); err != nil {
			t.Errorf("remove: %v", err)
		}
	})
	wg.Wait()
	if now := s.Pid(testenv.Sandboxd); now != pid {
		t.Errorf("sandboxd was %d and is %d", pid, now)
	}
}

// However short a container's life, its end is told with the right code, reason and times.
func TestImmediateExitIsNeverLost(t *testing.T) {
	s := start(t, testenv.Setup{})
	config := s.podConfig("short")
	// In a namespace of its own a first process cannot kill itself.
	config.Linux.SecurityContext.NamespaceOptions = &criv1.NamespaceOption{Pid: criv1.NamespaceMode_POD}
	pod := s.pod(config, "")
	kinds := []struct {
		script string
		code   int32
		reason string
	}{{"exit 0", 0, "Completed"}, {"exit 3", 3, "Error"}, {"kill -9 $$", 137, "Error"}}
	count := scaled(t, 60)
	next := make(chan int, count)
	for n := range count {
		next <- n
	}
	close(next)
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			for n := range next {
				kind := kinds[n%len(kinds)]
				id, err := s.create(pod, config, script(fmt.Sprintf("c%d", n), kind.script))
				if err == nil {
					err = s.startContainer(id)
				}
				if err != nil {
					t.Errorf("container %d: %v", n, err)
					return
				}
				st, err := s.pollExit(id)
				if err != nil {
					t.Errorf("container %d: %v", n, err)
					return
				}
				if st.GetExitCode() != kind.code || st.GetReason() != kind.reason {
					t.Errorf("%q: exit code %d, reason %q; want %d, %s", kind.script, st.GetExitCode(), st.GetReason(), kind.code, kind.reason)
				}
				if st.GetCreatedAt() <= 0 || st.GetStartedAt() < st.GetCreatedAt() || st.GetFinishedAt() < st.GetStartedAt() {
					t.Errorf("%q: created %d, started %d, finished %d", kind.script, st.GetCreatedAt(), st.GetStartedAt(), st.GetFinishedAt())
				}
				exited := &criv1.ContainerFilter{Id: id, State: &criv1.ContainerStateValue{State: criv1.ContainerState_CONTAINER_EXITED}}
				list, err := s.CRI.ListContainers(t.Context(), &criv1.ListContainersRequest{Filter: exited})
				if err != nil || len(list.GetContainers()) != 1 {
					t.Errorf("list of the exited: %v, %v", list.GetContainers(), err)
				}
				if err := s.removeContainer(id); err != nil {
					t.Errorf("remove: %v", err)
				}
			}
		})
	}
	wg.Wait()
}

// pollExit waits for an end without failing the test, so that any goroutine may call it.
func (s *system) pollExit(id string) (*criv1.ContainerStatus, error) {
	deadline := time.Now().Add(10 * time.Second)
	for {
		answer, err := s.CRI.ContainerStatus(s.t.Context(), &criv1.ContainerStatusRequest{ContainerId: id})
		if err != nil {
			return nil, err
		}
		if answer.GetStatus().GetState() == criv1.ContainerState_CONTAINER_EXITED {
			return answer.GetStatus(), nil
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("state is still %s", answer.GetStatus().GetState())
		}
		time.Sleep(20 * time.Millisecond)
	}
}
