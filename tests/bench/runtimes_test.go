//go:build bench

package bench

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/fixture"
	"github.com/crisp-cri/crisp/tests/testenv"
)

// A node is one of the two runtimes, with images pulled.
type node struct {
	name   string
	cri    criv1.RuntimeServiceClient
	images criv1.ImageServiceClient
	nri    string // socket of plugins
	parent string // cgroup of the pods
	logs   string
	pods   int
}

// startBoth starts the two runtimes on the same network, registry, runc and disk.
func startBoth(t *testing.T) (ours, theirs *node) {
	t.Helper()
	parts, err := fixture.FindParts(t.Context(), fixture.PartsConfig{})
	if err != nil {
		t.Fatal(err)
	}
	images, err := fixture.Conformance(parts)
	if err != nil {
		t.Fatal(err)
	}
	s := testenv.Start(t, testenv.Setup{Images: images, Configure: configure})
	ours = &node{name: "crisp", cri: s.CRI, images: s.Images, nri: s.NRISocket()}
	theirs = startContainerd(t, s)
	for _, n := range []*node{ours, theirs} {
		n.parent, n.logs = s.CgroupParent(), s.Path("podlogs", n.name)
		if _, err := n.images.PullImage(t.Context(), &criv1.PullImageRequest{Image: &criv1.ImageSpec{Image: fixture.BusyboxImage}}); err != nil {
			t.Fatalf("%s: %v", n.name, err)
		}
	}
	return ours, theirs
}

// configure lets the plugins of the bench, which keep nothing between two requests, have several
// in flight.
func configure(p testenv.Process, settings testenv.Settings) {
	if p == testenv.NRIHub {
		settings.Set("plugins", []map[string]any{{"name": "*", "parallel": 64}})
	}
}

const containerdConfig = `version = 3
root = "%[1]s/root"
state = "%[1]s/state"
disabled_plugins = []
[grpc]
address = "%[1]s/c.sock"
[plugins.'io.containerd.cri.v1.images'.registry]
config_path = "%[2]s"
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = [%[3]q, %[4]q]
conf_dir = "%[5]s"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
BinaryName = "%[6]s"
Root = "%[1]s/runc"
[plugins.'io.containerd.nri.v1.nri']
socket_path = "%[1]s/nri.sock"
plugin_path = "%[1]s/plugins"
plugin_config_path = "%[1]s/plugins.d"
`

// startContainerd runs containerd as its users do: CRI plugin, stock shim, NRI on.
func startContainerd(t *testing.T, s *testenv.System) *node {
	t.Helper()
	find := func(name string) string {
		path, err := testenv.Binary(name)
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	runc, shim, containerd := find("runc"), find("containerd-shim-runc-v2"), find("containerd/containerd")
	plugins, err := testenv.CNIFolder()
	if err != nil {
		t.Fatal(err)
	}
	dir := s.Path("c")
	text := fmt.Sprintf(containerdConfig, dir, s.Path("hosts"), s.Path("cni"), plugins, s.Path("net.d"), runc)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(dir, "config.toml")
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(containerd, "-c", config)
	cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(shim)+":"+os.Getenv("PATH"))
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		_ = log.Close()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("containerd: %s", text)
		}
	})
	conn, err := grpc.NewClient("unix://"+filepath.Join(dir, "c.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	n := &node{
		name: "containerd", nri: filepath.Join(dir, "nri.sock"),
		cri: criv1.NewRuntimeServiceClient(conn), images: criv1.NewImageServiceClient(conn),
	}
	n.awaitReady(t)
	return n
}

func (n *node) awaitReady(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		answer, err := n.cri.Status(ctx, &criv1.StatusRequest{}, grpc.WaitForReady(true))
		ready := err == nil
		for _, c := range answer.GetStatus().GetConditions() {
			if c.GetType() == "RuntimeReady" || c.GetType() == "NetworkReady" {
				ready = ready && c.GetStatus()
			}
		}
		switch {
		case ready:
			return
		case ctx.Err() != nil:
			t.Fatalf("%s is not ready: %v, %v", n.name, answer.GetStatus(), err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// pod is a pod that runs.
type pod struct {
	node   *node
	id     string
	config *criv1.PodSandboxConfig
	made   int
}

func (n *node) newPod() *pod {
	n.pods++
	name := "p" + strconv.Itoa(n.pods)
	return &pod{node: n, config: &criv1.PodSandboxConfig{
		Metadata:     &criv1.PodSandboxMetadata{Name: name, Uid: n.name + name, Namespace: "bench"},
		Hostname:     name,
		LogDirectory: filepath.Join(n.logs, name),
		Linux:        &criv1.LinuxPodSandboxConfig{CgroupParent: n.parent, SecurityContext: &criv1.LinuxSandboxSecurityContext{}},
	}}
}

// runPods makes pods and runs them side by side.
func (n *node) runPods(t *testing.T, count int) []*pod {
	t.Helper()
	var pods []*pod
	for range count {
		pods = append(pods, n.newPod())
	}
	side(t, count, func(i int) *pod { return pods[i] }, func(ctx context.Context, p *pod) error { return p.run(ctx) })
	return pods
}

func removePods(t *testing.T, pods []*pod) {
	t.Helper()
	side(t, len(pods), func(i int) *pod { return pods[i] }, func(ctx context.Context, p *pod) error { return p.remove(ctx) })
}

func (p *pod) run(ctx context.Context) error {
	answer, err := p.node.cri.RunPodSandbox(ctx, &criv1.RunPodSandboxRequest{Config: p.config})
	p.id = answer.GetPodSandboxId()
	return err
}

func (p *pod) create(ctx context.Context) (id string, err error) {
	p.made++
	answer, err := p.node.cri.CreateContainer(ctx, &criv1.CreateContainerRequest{
		PodSandboxId: p.id, SandboxConfig: p.config, Config: &criv1.ContainerConfig{
			Metadata: &criv1.ContainerMetadata{Name: "main", Attempt: uint32(p.made)},
			Image:    &criv1.ImageSpec{Image: fixture.BusyboxImage},
			Command:  []string{"sleep", "1000"},
			LogPath:  fmt.Sprintf("main-%d.log", p.made),
			Envs:     environment,
			Linux:    &criv1.LinuxContainerConfig{Resources: &criv1.LinuxContainerResources{CpuShares: 512, MemoryLimitInBytes: 1 << 28}},
		},
	})
	return answer.GetContainerId(), err
}

// environment is that of a container in a namespace with several services.
var environment = func() []*criv1.KeyValue {
	var list []*criv1.KeyValue
	for i := range 30 {
		list = append(list, &criv1.KeyValue{Key: fmt.Sprintf("SERVICE_%d_ADDRESS", i), Value: fmt.Appendf(nil, "tcp://10.0.0.%d:8080", i)})
	}
	return list
}()

func (p *pod) start(ctx context.Context, id string) error {
	_, err := p.node.cri.StartContainer(ctx, &criv1.StartContainerRequest{ContainerId: id})
	return err
}

func (p *pod) exec(ctx context.Context, id string) error {
	_, err := p.node.cri.ExecSync(ctx, &criv1.ExecSyncRequest{ContainerId: id, Cmd: []string{"true"}})
	return err
}

// end stops a container at once and removes it.
func (p *pod) end(ctx context.Context, id string) error {
	if _, err := p.node.cri.StopContainer(ctx, &criv1.StopContainerRequest{ContainerId: id}); err != nil {
		return err
	}
	return p.removeContainer(ctx, id)
}

func (p *pod) removeContainer(ctx context.Context, id string) error {
	_, err := p.node.cri.RemoveContainer(ctx, &criv1.RemoveContainerRequest{ContainerId: id})
	return err
}

func (p *pod) remove(ctx context.Context) error {
	if _, err := p.node.cri.StopPodSandbox(ctx, &criv1.StopPodSandboxRequest{PodSandboxId: p.id}); err != nil {
		return err
	}
	_, err := p.node.cri.RemovePodSandbox(ctx, &criv1.RemovePodSandboxRequest{PodSandboxId: p.id})
	return err
}
