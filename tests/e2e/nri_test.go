//go:build integration

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// plugin is an NRI plugin that notes what it is told and adjusts containers.
type plugin struct {
	adjust func(*nri.Container) *nri.ContainerAdjustment

	mu     sync.Mutex
	calls  []string
	pods   []string
	refuse error // what pods and containers are refused with
}

// set changes what the plugin answers from now on; nil makes it agree.
func (p *plugin) set(refuse error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refuse = refuse
}

func (p *plugin) answer() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.refuse
}

func (p *plugin) note(call, name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls = append(p.calls, call+" "+name)
}

func (p *plugin) noted() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.calls)
}

func (p *plugin) Synchronize(_ context.Context, pods []*nri.PodSandbox, containers []*nri.Container) ([]*nri.ContainerUpdate, error) {
	for _, pod := range pods {
		p.note("Synchronize pod", pod.GetName())
	}
	for _, c := range containers {
		p.note("Synchronize container", c.GetName())
	}
	return nil, nil
}

func (p *plugin) RunPodSandbox(_ context.Context, pod *nri.PodSandbox) error {
	p.mu.Lock()
	p.pods = append(p.pods, pod.GetIps()...)
	p.mu.Unlock()
	p.note("RunPodSandbox", pod.GetName())
	return p.answer()
}

func (p *plugin) StopPodSandbox(_ context.Context, pod *nri.PodSandbox) error {
	p.note("StopPodSandbox", pod.GetName())
	return nil
}

func (p *plugin) RemovePodSandbox(_ context.Context, pod *nri.PodSandbox) error {
	p.note("RemovePodSandbox", pod.GetName())
	return nil
}

func (p *plugin) CreateContainer(_ context.Context, _ *nri.PodSandbox, c *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
	p.note("CreateContainer", c.GetName())
	if p.adjust == nil {
		return nil, nil, p.answer()
	}
	return p.adjust(c), nil, nil
}

func (p *plugin) PostCreateContainer(_ context.Context, _ *nri.PodSandbox, c *nri.Container) error {
	p.note("PostCreateContainer", c.GetName())
	return nil
}

func (p *plugin) StartContainer(_ context.Context, _ *nri.PodSandbox, c *nri.Container) error {
	p.note("StartContainer", c.GetName())
	return nil
}

func (p *plugin) PostStartContainer(_ context.Context, _ *nri.PodSandbox, c *nri.Container) error {
	p.note("PostStartContainer", c.GetName())
	return nil
}

func (p *plugin) StopContainer(_ context.Context, _ *nri.PodSandbox, c *nri.Container) ([]*nri.ContainerUpdate, error) {
	p.note("StopContainer", c.GetName())
	return nil, nil
}

func (p *plugin) RemoveContainer(_ context.Context, _ *nri.PodSandbox, c *nri.Container) error {
	p.note("RemoveContainer", c.GetName())
	return nil
}

// connect registers the plugin with the system's hub until the test ends.
func (p *plugin) connect(t *testing.T, s *system, index, name string) stub.Stub {
	t.Helper()
	st, err := stub.New(p, stub.WithSocketPath(s.NRISocket()), stub.WithPluginIdx(index), stub.WithPluginName(name), stub.WithOnClose(func() {}))
	must(t, err)
	must(t, st.Start(t.Context()))
	t.Cleanup(st.Stop)
	return st
}

func TestPluginIsToldEachStepInOrder(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	p := &plugin{}
	p.connect(t, s, "10", "witness")

	pod, config := s.pod("steps")
	id := s.container(pod, config, containerConfig("main", "sleep 1000"))
	_, err := s.CRI.StopContainer(t.Context(), &criv1.StopContainerRequest{ContainerId: id, Timeout: 1})
	must(t, err)
	_, err = s.CRI.RemoveContainer(t.Context(), &criv1.RemoveContainerRequest{ContainerId: id})
	must(t, err)
	_, err = s.CRI.StopPodSandbox(t.Context(), &criv1.StopPodSandboxRequest{PodSandboxId: pod})
	must(t, err)
	_, err = s.CRI.RemovePodSandbox(t.Context(), &criv1.RemovePodSandboxRequest{PodSandboxId: pod})
	must(t, err)
	want := []string{
		"RunPodSandbox steps", "CreateContainer main", "PostCreateContainer main", "StartContainer main", "PostStartContainer main",
		"StopContainer main", "RemoveContainer main", "StopPodSandbox steps", "RemovePodSandbox steps",
	}
	eventually(t, "plugin was told all", func() error {
		if got := p.noted(); !slices.Equal(got, want) {
			return fmt.Errorf("calls are %q, want %q", got, want)
		}
		return nil
	})
	if len(p.pods) != 1 || !strings.HasPrefix(p.pods[0], "10.88.") {
		t.Errorf("addresses at RunPodSandbox are %v", p.pods)
	}
}

// A container that ends by itself is stopped for the plugins too, once.
func TestPluginIsToldOfAnExit(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	p := &plugin{}
	p.connect(t, s, "10", "witness")
	pod, config := s.pod("exits")
	id := s.container(pod, config, containerConfig("main", "exit 0"))
	s.waitExit(id)
	count := func() int {
		return len(slices.DeleteFunc(p.noted(), func(c string) bool { return c != "StopContainer main" }))
	}
	eventually(t, "StopContainer", func() error {
		if count() == 0 {
			return fmt.Errorf("calls are %q", p.noted())
		}
		return nil
	})
	_, err := s.CRI.StopContainer(t.Context(), &criv1.StopContainerRequest{ContainerId: id})
	must(t, err)
	_, err = s.CRI.StopPodSandbox(t.Context(), &criv1.StopPodSandboxRequest{PodSandboxId: pod})
	must(t, err)
	if n := count(); n != 1 {
		t.Errorf("StopContainer came %d times: %q", n, p.noted())
	}
}

// A plugin that comes late is handed what is there.
func TestLatePluginIsSynchronized(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	pod, config := s.pod("early")
	s.container(pod, config, containerConfig("main", "sleep 1000"))
	p := &plugin{}
	p.connect(t, s, "10", "late")
	want := []string{"Synchronize pod early", "Synchronize container main"}
	eventually(t, "plugin is synchronized", func() error {
		if got := p.noted(); !slices.Equal(got, want) {
			return fmt.Errorf("calls are %q, want %q", got, want)
		}
		return nil
	})
}

// A plugin that comes while a container is given its time to end is synchronised, and pods start
// meanwhile.
func TestPluginComesDuringALongStop(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	pod, config := s.pod("slow")
	id := s.container(pod, config, containerConfig("deaf", "trap '' TERM; while :; do sleep 0.1; done"))
	stop := func(patience int64) error {
		_, err := s.CRI.StopContainer(context.Background(), &criv1.StopContainerRequest{ContainerId: id, Timeout: patience})
		return err
	}
	long := make(chan error, 1)
	go func() { long <- stop(600) }()
	time.Sleep(time.Second)
	p := &plugin{}
	p.connect(t, s, "10", "late")
	s.pod("beside")
	eventually(t, "the plugin takes part", func() error {
		want := []string{"Synchronize pod slow", "Synchronize container deaf", "RunPodSandbox beside"}
		for _, w := range want {
			if !slices.Contains(p.noted(), w) && !slices.Contains(p.noted(), "Synchronize pod beside") {
				return fmt.Errorf("calls are %q, want %q", p.noted(), w)
			}
		}
		return nil
	})
	select {
	case err := <-long:
		t.Errorf("the stop is over: %v", err)
	default:
	}
	must(t, stop(0))
	must(t, <-long)
	eventually(t, "the plugin is told of the end", func() error {
		if !slices.Contains(p.noted(), "StopContainer deaf") {
			return fmt.Errorf("calls are %q", p.noted())
		}
		return nil
	})
}

func TestAdjustmentsReachTheContainer(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	shared := t.TempDir()
	must(t, os.WriteFile(filepath.Join(shared, "note"), []byte("from the host"), 0o644))
	mark := filepath.Join(t.TempDir(), "hook-ran")
	hook := filepath.Join(t.TempDir(), "hook")
	must(t, os.WriteFile(hook, []byte("#!/bin/sh\ncat > "+mark+"\n"), 0o755))

	p := &plugin{adjust: func(*nri.Container) *nri.ContainerAdjustment {
		a := &nri.ContainerAdjustment{}
		a.AddEnv("ADJUSTED", "yes")
		a.AddAnnotation("crisp.test/adjusted", "yes")
		a.AddMount(&nri.Mount{Source: shared, Destination: "/adjusted", Type: "bind", Options: []string{"rbind", "ro"}})
		a.AddDevice(&nri.LinuxDevice{Path: "/dev/adjusted", Type: "c", Major: 1, Minor: 3, FileMode: nri.FileMode(os.FileMode(0o666))})
		a.AddRlimit("RLIMIT_NOFILE", 600, 500)
		a.AddHooks(&nri.Hooks{CreateRuntime: []*nri.Hook{{Path: hook, Args: []string{"hook"}}}})
		a.SetLinuxMemoryLimit(64 << 20)
		a.SetLinuxPidLimits(77)
		a.SetLinuxCPUShares(321)
		return a
	}}
	p.connect(t, s, "10", "adjuster")
	pod, config := s.pod("adjusted")
	id := s.container(pod, config, containerConfig("main", "sleep 1000"))

	for _, test := range []struct{ command, want string }{
		{`echo $ADJUSTED`, "yes"},
		{`cat /adjusted/note`, "from the host"},
		{`touch /adjusted/x 2>/dev/null || echo read-only`, "read-only"},
		{`test -c /dev/adjusted && echo x > /dev/adjusted && echo device`, "device"},
		{`ulimit -Sn; ulimit -Hn`, "500\n600"},
	} {
		if got := strings.TrimSpace(s.exec(id, "sh", "-c", test.command)); got != test.want {
			t.Errorf("%s = %q, want %q", test.command, got, test.want)
		}
	}
	for file, want := range map[string]string{
		"memory/memory.limit_in_bytes": "67108864", "pids/pids.max": "77", "cpu/cpu.shares": "321",
	} {
		if got := cgroupValue(t, id, file); got != want {
			t.Errorf("%s = %q, want %q", file, got, want)
		}
	}
	state, err := os.ReadFile(mark)
	if err != nil {
		t.Errorf("the hook did not run: %v", err)
	}
	contains(t, string(state), id, `"crisp.test/adjusted":"yes"`)
}

// Plugins are asked in the order of index and name, and two that want the same
// thing are an error, not a surprise.
func TestPluginsActInOrderAndConflictsFail(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	var mu sync.Mutex
	var order []string
	adjust := func(name, variable string) func(*nri.Container) *nri.ContainerAdjustment {
		return func(c *nri.Container) *nri.ContainerAdjustment {
			mu.Lock()
			order = append(order, name)
			mu.Unlock()
			a := &nri.ContainerAdjustment{}
			if c.GetName() == "conflict" {
				variable = "SAME"
			}
			a.AddEnv(variable, name)
			return a
		}
	}
	(&plugin{adjust: adjust("20-b", "B")}).connect(t, s, "20", "b")
	(&plugin{adjust: adjust("10-z", "Z")}).connect(t, s, "10", "z")
	(&plugin{adjust: adjust("20-a", "A")}).connect(t, s, "20", "a")
	pod, config := s.pod("ordered")
	id := s.container(pod, config, containerConfig("main", "sleep 1000"))
	if want := []string{"10-z", "20-a", "20-b"}; !slices.Equal(order, want) {
		t.Errorf("order is %v, want %v", order, want)
	}
	if got := s.exec(id, "sh", "-c", "echo $Z $A $B"); got != "10-z 20-a 20-b\n" {
		t.Errorf("variables are %q", got)
	}
	_, err := s.CRI.CreateContainer(t.Context(), &criv1.CreateContainerRequest{PodSandboxId: pod, Config: containerConfig("conflict", "true"), SandboxConfig: config})
	if err == nil || !strings.Contains(err.Error(), "SAME") {
		t.Errorf("conflicting plugins: %v, want an error that names SAME", err)
	}
	if out := s.crictl("ps", "-aq", "--name", "conflict"); out != "" {
		t.Errorf("the refused container is listed: %q", out)
	}
}

// A pod and a container that a plugin refuses leave nothing, and can be made
// again once the plugin agrees.
func TestRefusedPodAndContainerAreUndone(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	p := &plugin{refuse: errors.New("not today")}
	p.connect(t, s, "10", "refuser")
	_, err := s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: s.podConfig("refused")})
	if err == nil || !strings.Contains(err.Error(), "not today") {
		t.Fatalf("RunPodSandbox = %v, want the plugin's refusal", err)
	}
	if pods := s.crictl("pods", "-q"); pods != "" {
		t.Errorf("the refused pod is listed: %q", pods)
	}
	p.set(nil)
	pod, config := s.pod("refused")
	p.set(errors.New("not today either"))
	create := &criv1.CreateContainerRequest{PodSandboxId: pod, Config: containerConfig("refused", "sleep 1000"), SandboxConfig: config}
	_, err = s.CRI.CreateContainer(t.Context(), create)
	if err == nil || !strings.Contains(err.Error(), "not today either") {
		t.Fatalf("CreateContainer = %v, want the plugin's refusal", err)
	}
	if containers := s.crictl("ps", "-aq"); containers != "" {
		t.Errorf("the refused container is listed: %q", containers)
	}
	p.set(nil)
	s.container(pod, config, containerConfig("refused", "sleep 1000"))
}

// A plugin in the plugin folder is launched by the hub.
func TestPluginFromTheFolderIsLaunched(t *testing.T) {
	s := start(t, testenv.Setup{})
	mark := s.Path("nri", "launched") // Any user may write here.
	// A process that is no plugin is enough to see the launch with its socket.
	script := "#!/bin/sh\necho \"$NRI_PLUGIN_NAME $NRI_PLUGIN_IDX $NRI_PLUGIN_SOCKET\" > " + mark + "\nsleep 5\n"
	must(t, os.WriteFile(s.Path("nri", "plugins", "15-demo"), []byte(script), 0o755))
	must(t, s.Restart(t.Context(), testenv.NRIHub))
	eventually(t, "plugin is launched", func() error {
		text, err := os.ReadFile(mark)
		if err != nil {
			return err
		}
		if got := strings.TrimSpace(string(text)); got != "demo 15 3" {
			return fmt.Errorf("environment is %q, want \"demo 15 3\"", got)
		}
		return nil
	})
}

// cgroupValue reads a file of the container's cgroup in a version 1 hierarchy.
func cgroupValue(t *testing.T, id, file string) string {
	t.Helper()
	controller, name, _ := strings.Cut(file, "/")
	var value string
	err := filepath.WalkDir("/sys/fs/cgroup/"+controller, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.Contains(filepath.Base(path), id) {
			data, err := os.ReadFile(filepath.Join(path, name))
			if err != nil {
				return err
			}
			value = strings.TrimSpace(string(data))
			return filepath.SkipAll
		}
		return nil
	})
	must(t, err)
	return value
}
