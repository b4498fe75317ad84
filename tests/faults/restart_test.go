//go:build integration

package faults

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protojson"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// From the first moment of a restart a list is either complete or refused.
func TestListsAreCompleteOrRefused(t *testing.T) {
	s := start(t, testenv.Setup{})
	count := scaled(t, 8)
	var wg sync.WaitGroup
	for n := range count {
		wg.Go(func() {
			config := s.podConfig(fmt.Sprintf("pod%d", n))
			id, err := s.try(config, "", time.Minute)
			for i := range 2 {
				if err == nil {
					var c string
					c, err = s.create(id, config, script(fmt.Sprintf("c%d", i), "sleep 1000"))
					if err == nil && i == 0 {
						err = s.startContainer(c)
					}
				}
			}
			if err != nil {
				t.Errorf("pod %d: %v", n, err)
			}
		})
	}
	wg.Wait()
	for _, victims := range [][]testenv.Process{{testenv.Sandboxd}, {testenv.Gateway}, {testenv.Sandboxd, testenv.Gateway}} {
		t.Run(fmt.Sprint(victims), func(t *testing.T) {
			for _, p := range victims {
				must(t, s.Kill(t.Context(), p))
			}
			for _, p := range victims {
				must(t, s.Run(p))
			}
			deadline := time.Now().Add(20 * time.Second)
			complete := 0
			for complete < 10 && time.Now().Before(deadline) {
				pods, err := s.CRI.ListPodSandbox(t.Context(), &criv1.ListPodSandboxRequest{})
				s.countOrRefusal("pods", len(pods.GetItems()), count, err)
				containers, err2 := s.CRI.ListContainers(t.Context(), &criv1.ListContainersRequest{})
				s.countOrRefusal("containers", len(containers.GetContainers()), 2*count, err2)
				images, err3 := s.Images.ListImages(t.Context(), &criv1.ListImagesRequest{})
				s.countOrRefusal("images", len(images.GetImages()), 1, err3)
				if _, err := s.CRI.Status(t.Context(), &criv1.StatusRequest{}); err != nil && !oneOf(err, codes.Unavailable) {
					t.Errorf("status: %v", err)
				}
				if errors.Join(err, err2, err3) == nil {
					complete++
				}
				time.Sleep(20 * time.Millisecond)
			}
			if complete < 10 {
				t.Error("the lists did not come back")
			}
			must(t, s.WaitReady(t.Context()))
		})
	}
}

func (s *system) countOrRefusal(what string, got, want int, err error) {
	s.t.Helper()
	if err != nil {
		if !oneOf(err, codes.Unavailable) {
			s.t.Errorf("list of %s: %v", what, err)
		}
		return
	}
	if got != want {
		s.t.Errorf("list of %s has %d entries, want %d", what, got, want)
	}
}

// An image whose content was damaged while nobody ran is noticed or repaired.
func TestDamagedImageIsRepaired(t *testing.T) {
	s := start(t, testenv.Setup{})
	works := func(t *testing.T, config *criv1.PodSandboxConfig, pod, name string) {
		t.Helper()
		id := s.container(pod, config, script(name, "exit 7"))
		if st := s.waitExit(id, patience); st.GetExitCode() != 7 {
			t.Errorf("exit code %d, want 7", st.GetExitCode())
		}
		must(t, s.removeContainer(id))
	}
	for _, test := range []struct {
		name   string
		damage func(t *testing.T, images string)
		// removal says that only the removal and another pull need to repair it: what was
		// synced to the disk does not lose content without anybody doing that.
		removal bool
	}{
		{"blob deleted", func(t *testing.T, images string) {
			must(t, os.Remove(largest(t, filepath.Join(images, "content", "blobs", "sha256"))))
		}, false},
		{"blob cut off", func(t *testing.T, images string) {
			must(t, os.Truncate(largest(t, filepath.Join(images, "content", "blobs", "sha256")), 100))
		}, false},
		{"layer folder deleted", func(t *testing.T, images string) {
			program := unpacked(t, images, "bin/busybox")
			must(t, os.RemoveAll(filepath.Dir(filepath.Dir(filepath.Dir(program)))))
		}, false},
		{"file emptied", func(t *testing.T, images string) {
			must(t, os.Truncate(unpacked(t, images, "bin/busybox"), 0))
		}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			s.pull(busybox)
			everything := []testenv.Process{testenv.Gateway, testenv.NRIHub, testenv.Sandboxd, testenv.EventBus}
			for _, p := range everything {
				must(t, s.Kill(t.Context(), p))
			}
			test.damage(t, s.Path("lib", "images"))
			for _, p := range slices.Backward(everything) {
				must(t, s.Run(p))
			}
			must(t, s.WaitReady(t.Context()))
			config := s.podConfig("damaged")
			pod := s.pod(config, "")
			if !test.removal {
				s.pull(busybox)
				works(t, config, pod, "repaired")
			}
			_, err := s.Images.RemoveImage(t.Context(), &criv1.RemoveImageRequest{Image: &criv1.ImageSpec{Image: busybox}})
			must(t, err)
			s.pull(busybox)
			works(t, config, pod, "anew")
			must(t, s.removePod(pod))
		})
	}
}

// largest is the largest file of a folder.
func largest(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	path := slices.MaxFunc(entries, func(a, b os.DirEntry) int {
		x, errX := a.Info()
		y, errY := b.Info()
		must(t, errors.Join(errX, errY))
		return cmp.Compare(x.Size(), y.Size())
	})
	return filepath.Join(dir, path.Name())
}

// unpacked finds a file of the image in an unpacked layer.
func unpacked(t *testing.T, images, name string) string {
	t.Helper()
	found := ""
	must(t, filepath.WalkDir(images, func(path string, d fs.DirEntry, err error) error {
		if err == nil && found == "" && strings.HasSuffix(path, "/fs/"+name) {
			found = path
		}
		return nil
	}))
	if found == "" {
		t.Fatalf("no layer below %s holds %s", images, name)
	}
	return found
}

// After a restart of the node old pods are shown as ended, can be removed in any order,
// and do not stand in the way of their successors.
func TestRestartOfTheNodeBlocksNobody(t *testing.T) {
	s := start(t, testenv.Setup{})
	var configs []*criv1.PodSandboxConfig
	var old, containers []string
	for n := range 4 {
		config := s.podConfig(fmt.Sprintf("old%d", n))
		switch n {
		case 1:
			config.Hostname = ""
			config.Linux.SecurityContext.NamespaceOptions = &criv1.NamespaceOption{Network: criv1.NamespaceMode_NODE, Pid: criv1.NamespaceMode_CONTAINER}
		case 2:
			config.PortMappings = []*criv1.PortMapping{{ContainerPort: 80, HostPort: 18080}}
		case 3:
			config.Linux.SecurityContext.NamespaceOptions = &criv1.NamespaceOption{Pid: criv1.NamespaceMode_POD}
		}
		id := s.pod(config, "")
		containers = append(containers, s.container(id, config, script("main", "sleep 1000")))
		configs, old = append(configs, config), append(old, id)
	}
	s.imitateReboot(old)
	for _, id := range old {
		if state := s.podStatus(id).GetState(); state != criv1.PodSandboxState_SANDBOX_NOTREADY {
			t.Errorf("pod %s is %s", id, state)
		}
	}
	for _, id := range containers {
		st := s.waitExit(id, patience)
		if st.GetExitCode() == 0 || st.GetReason() == "" || st.GetFinishedAt() < st.GetStartedAt() {
			t.Errorf("container: exit code %d, reason %q, finished %d", st.GetExitCode(), st.GetReason(), st.GetFinishedAt())
		}
	}
	for n, config := range configs {
		if n%2 == 1 {
			must(t, errors.Join(s.stopPod(old[n]), s.removePod(old[n])))
		}
		config.Metadata.Attempt++
		id := s.pod(config, "")
		s.container(id, config, script("main", "sleep 1000"))
		if n%2 == 0 {
			must(t, errors.Join(s.stopPod(old[n]), s.removePod(old[n])))
		}
		if network := n != 1; network && s.networkCalls("DEL", old[n]) == 0 {
			t.Errorf("the network was not told of the end of pod %d", n)
		}
	}
	s.waitAddresses(3, patience)
	must(t, s.RemoveAll(t.Context()))
	s.waitAddresses(0, patience)
}

// imitateReboot ends everything that a restart of the node ends, and empties what it
// empties, but for cgroups.
func (s *system) imitateReboot(pods []string) {
	t := s.t
	t.Helper()
	everything := []testenv.Process{testenv.Gateway, testenv.NRIHub, testenv.Sandboxd, testenv.EventBus}
	for _, p := range everything {
		must(t, s.Kill(t.Context(), p))
	}
	for _, pod := range pods {
		must(t, syscall.Kill(s.shimOf(pod), syscall.SIGKILL))
	}
	for _, pid := range containerPIDs(t, s.CgroupParent()+"/") {
		must(t, syscall.Kill(pid, syscall.SIGKILL))
	}
	run := s.Path("run")
	text, err := os.ReadFile("/proc/self/mounts")
	must(t, err)
	for _, line := range slices.Backward(strings.Split(string(text), "\n")) {
		if field := strings.Fields(line); len(field) > 1 && strings.HasPrefix(field[1], run+"/") {
			must(t, unix.Unmount(field[1], unix.MNT_DETACH))
		}
	}
	entries, err := os.ReadDir(run)
	must(t, err)
	for _, entry := range entries {
		must(t, os.RemoveAll(filepath.Join(run, entry.Name())))
	}
	for _, p := range slices.Backward(everything) {
		must(t, s.Run(p))
	}
	must(t, s.WaitReady(t.Context()))
}

// With not a byte free the runtime starts, shows everything, and can be told to stop and
// remove, which is how a node gets space again.
func TestFullDiskDoesNotStopTheRuntime(t *testing.T) {
	root := smallDisk(t, 160)
	s := start(t, testenv.Setup{Configure: onSandboxd(func(settings testenv.Settings) { settings.Set("root", root) })})
	s.pull("registry.k8s.io/pause:3.9")
	config := s.podConfig("full")
	pod := s.pod(config, "")
	keep := s.container(pod, config, script("keep", "sleep 1000"))
	stop := s.container(pod, config, script("stop", "sleep 1000"))
	remove := s.container(pod, config, script("remove", "sleep 1000"))
	otherConfig := s.podConfig("other")
	other := s.pod(otherConfig, "")
	s.container(other, otherConfig, script("main", "sleep 1000"))

	ballast := fill(t, root)
	must(t, s.Restart(t.Context(), testenv.Sandboxd))
	list, err := s.CRI.ListContainers(t.Context(), &criv1.ListContainersRequest{})
	must(t, err)
	if len(s.pods()) != 2 || len(list.GetContainers()) != 4 {
		t.Errorf("listed are %d pods and %d containers, want 2 and 4", len(s.pods()), len(list.GetContainers()))
	}
	limited := func(what string, call func() error) {
		t.Helper()
		ended := make(chan error, 1)
		go func() { ended <- call() }()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("%s: %v", what, err)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%s hangs", what)
		}
	}
	if id, err := s.create(pod, config, script("more", "true")); err == nil {
		must(t, s.removeContainer(id))
	}
	refill(t, ballast)
	limited("stop", func() error { return s.stopContainer(stop, 0) })
	refill(t, ballast)
	limited("remove", func() error { return s.removeContainer(remove) })
	refill(t, ballast)
	limited("remove image", func() error {
		_, err := s.Images.RemoveImage(t.Context(), &criv1.RemoveImageRequest{Image: &criv1.ImageSpec{Image: "registry.k8s.io/pause:3.9"}})
		return err
	})
	limited("stop pod", func() error { return s.stopPod(other) })
	limited("remove pod", func() error { return s.removePod(other) })
	must(t, s.Restart(t.Context(), testenv.Sandboxd))
	if st := s.status(stop); st.GetState() != criv1.ContainerState_CONTAINER_EXITED || st.GetExitCode() != 137 {
		t.Errorf("the stopped container is %s, exit code %d", st.GetState(), st.GetExitCode())
	}
	if st := s.status(keep); st.GetState() != criv1.ContainerState_CONTAINER_RUNNING {
		t.Errorf("the other container is %s", st.GetState())
	}
	must(t, os.Remove(ballast))
	must(t, s.Restart(t.Context(), testenv.Sandboxd))
	id := s.container(pod, config, script("after", "exit 0"))
	s.waitExit(id, patience)
	must(t, s.removePod(pod))
}

// smallDisk mounts an ext4 file system of so many MiB, made with further options, and gives
// its root.
func smallDisk(t *testing.T, size int64, options ...string) string {
	t.Helper()
	dir := t.TempDir()
	image, mount := filepath.Join(dir, "image"), filepath.Join(dir, "mount")
	must(t, os.Mkdir(mount, 0o755))
	must(t, os.WriteFile(image, nil, 0o600))
	must(t, os.Truncate(image, size<<20))
	command(t, "mkfs.ext4", append([]string{"-q", "-m", "0"}, append(options, image)...)...)
	command(t, "mount", "-o", "loop", image, mount)
	t.Cleanup(func() { command(t, "umount", "-l", mount) })
	return mount
}

// fill takes all space of a file system with one file, and gives that.
func fill(t *testing.T, root string) string {
	t.Helper()
	ballast := filepath.Join(root, "ballast")
	must(t, os.WriteFile(ballast, nil, 0o600))
	refill(t, ballast)
	return ballast
}

func refill(t *testing.T, ballast string) {
	t.Helper()
	file, err := os.OpenFile(ballast, os.O_WRONLY|os.O_APPEND, 0)
	must(t, err)
	defer func() { _ = file.Close() }()
	for _, size := range []int{1 << 20, 4096} {
		block := make([]byte, size)
		for {
			if _, err := file.Write(block); err != nil {
				if !errors.Is(err, syscall.ENOSPC) {
					t.Fatal(err)
				}
				break
			}
			if err := file.Sync(); err != nil && !errors.Is(err, syscall.ENOSPC) {
				t.Fatal(err)
			}
		}
	}
}

// What the calls show does not change over any restart.
func TestRestartsChangeNothingThatIsShown(t *testing.T) {
	s := start(t, testenv.Setup{Configure: onSandboxd(func(settings testenv.Settings) { handler(settings, "second", nil) })})
	answer, err := s.Images.ImageStatus(t.Context(), &criv1.ImageStatusRequest{Image: &criv1.ImageSpec{Image: busybox}})
	must(t, err)
	digest := answer.GetImage().GetRepoDigests()[0]
	config := s.podConfig("full")
	config.Annotations = map[string]string{"example.com/A_b.c": "x=\"y\" \n z\t€", "empty": ""}
	config.Labels["odd"] = "UPPER.lower-0_9"
	config.PortMappings = []*criv1.PortMapping{{Protocol: criv1.Protocol_UDP, ContainerPort: 53, HostPort: 10053}}
	config.DnsConfig = &criv1.DNSConfig{Servers: []string{"10.9.8.7"}, Searches: []string{"example.com"}}
	pod := s.pod(config, "second")
	plain := s.podConfig("plain")
	plainPod := s.pod(plain, "")
	byDigest := script("digest", "sleep 1000")
	byDigest.Image = &criv1.ImageSpec{Image: digest, UserSpecifiedImage: busybox}
	byDigest.Annotations = config.Annotations
	byDigest.StopSignal = criv1.Signal_SIGNAL_SIGUSR1
	byDigest.Linux.Resources = &criv1.LinuxContainerResources{MemoryLimitInBytes: 64 << 20, CpuShares: 100, OomScoreAdj: 500}
	ids := []string{s.container(pod, config, byDigest)}
	_, err = s.CRI.UpdateContainerResources(t.Context(), &criv1.UpdateContainerResourcesRequest{
		ContainerId: ids[0], Linux: &criv1.LinuxContainerResources{MemoryLimitInBytes: 96 << 20, CpuShares: 300},
	})
	must(t, err)
	ids = append(ids, s.container(pod, config, script("ended", "exit 9")))
	s.waitExit(ids[1], patience)
	created, err := s.create(plainPod, plain, script("created", "true"))
	must(t, err)
	ids = append(ids, created)
	bad := script("bad", "")
	bad.Command = []string{"/does/not/exist"}
	failed, err := s.create(plainPod, plain, bad)
	must(t, err)
	if err := s.startContainer(failed); err == nil {
		t.Fatal("a missing program was started")
	}
	ids = append(ids, failed)

	before := s.dump([]string{pod, plainPod}, ids)
	all := []testenv.Process{testenv.EventBus, testenv.Sandboxd, testenv.NRIHub, testenv.Gateway}
	for _, victims := range append([][]testenv.Process{all, all}, []testenv.Process{all[0]}, []testenv.Process{all[1]}, []testenv.Process{all[2]}, []testenv.Process{all[3]}) {
		for _, p := range slices.Backward(victims) {
			must(t, s.Kill(t.Context(), p))
		}
		for _, p := range victims {
			must(t, s.Run(p))
		}
		must(t, s.WaitReady(t.Context()))
		s.waitPluginsReady()
		after := s.dump([]string{pod, plainPod}, ids)
		if diff := gocmp.Diff(before, after); diff != "" {
			t.Fatalf("after the restart of %v:\n%s", victims, diff)
		}
	}
	id := s.container(pod, config, script("new", "echo logged"))
	if st := s.waitExit(id, patience); st.GetLogPath() != filepath.Join(config.GetLogDirectory(), "new.log") {
		t.Errorf("log path is %q", st.GetLogPath())
	}
	text, err := os.ReadFile(filepath.Join(config.GetLogDirectory(), "new.log"))
	if err != nil || !strings.Contains(string(text), "logged") {
		t.Errorf("log is %q, %v", text, err)
	}
	must(t, s.startContainer(created))
	s.waitExit(created, patience)
}

// waitPluginsReady waits until the gateway has found the hub again, without which it is ready, too.
func (s *system) waitPluginsReady() {
	s.t.Helper()
	eventually(s.t, patience, "the plugins are ready", func() error {
		answer, err := s.CRI.Status(s.t.Context(), &criv1.StatusRequest{})
		if err != nil {
			return err
		}
		for _, c := range answer.GetStatus().GetConditions() {
			if c.GetType() == "NRIPluginsReady" && c.GetStatus() {
				return nil
			}
		}
		return fmt.Errorf("conditions %v", answer.GetStatus().GetConditions())
	})
}

// dump is everything that is shown of objects, in a comparable form.
func (s *system) dump(pods, containers []string) map[string]string {
	t := s.t
	t.Helper()
	ctx := t.Context()
	out := map[string]string{}
	for _, id := range pods {
		answer, err := s.CRI.PodSandboxStatus(ctx, &criv1.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
		must(t, err)
		answer.Timestamp = 0
		for _, c := range answer.GetContainersStatuses() {
			c.Mounts = nil
		}
		out["pod "+id] = protojson.Format(answer)
	}
	for _, id := range containers {
		answer, err := s.CRI.ContainerStatus(ctx, &criv1.ContainerStatusRequest{ContainerId: id, Verbose: true})
		must(t, err)
		out["container "+id] = protojson.Format(answer)
	}
	podList, err := s.CRI.ListPodSandbox(ctx, &criv1.ListPodSandboxRequest{})
	must(t, err)
	out["pods"] = protojson.Format(podList)
	containerList, err := s.CRI.ListContainers(ctx, &criv1.ListContainersRequest{})
	must(t, err)
	out["containers"] = protojson.Format(containerList)
	imageList, err := s.Images.ListImages(ctx, &criv1.ListImagesRequest{})
	must(t, err)
	out["images"] = protojson.Format(imageList)
	status, err := s.CRI.Status(ctx, &criv1.StatusRequest{})
	must(t, err)
	out["status"] = protojson.Format(status)
	for key, text := range out {
		out[key] = strings.ReplaceAll(text, "  ", " ") // protojson varies its spaces on purpose
	}
	return out
}
