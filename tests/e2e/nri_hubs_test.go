//go:build integration

package e2e

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// secondHub is one more nri-hub for a system.
type secondHub struct {
	t            *testing.T
	folder, file string
	cmd          *exec.Cmd
}

const nobody = 65534

func newSecondHub(t *testing.T) *secondHub {
	t.Helper()
	folder, err := os.MkdirTemp("", "hub2")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	must(t, os.Chown(folder, nobody, nobody))
	return &secondHub{t: t, folder: folder, file: filepath.Join(folder, "nri-hub.toml")}
}

func (h *secondHub) socket() string { return filepath.Join(h.folder, "run", "nri-hub.sock") }
func (h *secondHub) nri() string    { return filepath.Join(h.folder, "nri", "nri.sock") }

// run starts the hub with the configuration of the system's own, in its own folder.
func (h *secondHub) run(s *system) {
	h.t.Helper()
	text, err := os.ReadFile(s.ConfigFile(testenv.NRIHub))
	must(h.t, err)
	moved := strings.NewReplacer(s.Path("run"), filepath.Join(h.folder, "run"), s.Path("nri"), filepath.Join(h.folder, "nri"), ":9672", ":0").Replace(string(text))
	must(h.t, os.WriteFile(h.file, []byte(moved), 0o644))
	program, err := testenv.Binary("nri-hub")
	must(h.t, err)
	h.cmd = exec.Command(program, "run", "--config", h.file)
	h.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	log, err := os.OpenFile(filepath.Join(h.folder, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	must(h.t, err)
	defer func() { _ = log.Close() }()
	h.cmd.Stdout, h.cmd.Stderr = log, log
	must(h.t, h.cmd.Start())
	h.t.Cleanup(h.kill)
	eventually(h.t, "second hub serves", func() error {
		c, err := net.Dial("unix", h.nri())
		if err != nil {
			out, _ := os.ReadFile(log.Name())
			return fmt.Errorf("%w\n%s", err, out)
		}
		return c.Close()
	})
}

func (h *secondHub) kill() {
	if h.cmd == nil {
		return
	}
	_ = h.cmd.Process.Kill()
	_ = h.cmd.Wait()
	h.cmd = nil
}

func (h *secondHub) connect(p *plugin, index, name string, opts ...stub.Option) stub.Stub {
	h.t.Helper()
	st, err := stub.New(p, append(opts, stub.WithSocketPath(h.nri()), stub.WithPluginIdx(index), stub.WithPluginName(name), stub.WithOnClose(func() {}))...)
	must(h.t, err)
	must(h.t, st.Start(context.Background()))
	h.t.Cleanup(st.Stop)
	return st
}

// tryContainer makes a container in a pod and gives its id.
func (s *system) tryContainer(pod string, config *criv1.PodSandboxConfig, name string) (string, error) {
	answer, err := s.CRI.CreateContainer(s.t.Context(), &criv1.CreateContainerRequest{
		PodSandboxId: pod, Config: containerConfig(name, "sleep 1000"), SandboxConfig: config,
	})
	return answer.GetContainerId(), err
}

// appends is a plugin that adds its name to a variable, after what the plugins before it
// have made of it.
func appends(name string) *plugin {
	return &plugin{adjust: func(c *nri.Container) *nri.ContainerAdjustment {
		seen := ""
		for _, e := range c.GetEnv() {
			if v, ok := strings.CutPrefix(e, "SEEN="); ok {
				seen = v
			}
		}
		a := &nri.ContainerAdjustment{}
		a.RemoveEnv("SEEN")
		a.AddEnv("SEEN", seen+"/"+name)
		return a
	}}
}

// Plugins that are spread over two hubs have one order and one merge; each hub's plugins
// update containers by themselves; a hub that is away takes only its own plugins with it.
func TestPluginsOfTwoHubs(t *testing.T) {
	second := newSecondHub(t)
	s := start(t, testenv.Setup{Configure: func(p testenv.Process, c testenv.Settings) {
		if p == testenv.Gateway {
			c.Set("nri.more_sockets", []string{second.socket()})
			c.Set("nri.hold", "3s")
		}
	}})
	second.run(s)
	s.pull(busybox)
	appends("first").connect(t, s, "00", "first")
	middle := appends("middle")
	st := second.connect(middle, "10", "middle")
	appends("last").connect(t, s, "20", "last")
	eventually(t, "all plugins are there", func() error {
		info := s.crictl("info")
		for _, name := range []string{"first", "middle", "last"} {
			if !strings.Contains(info, `"name":"`+name+`"`) && !strings.Contains(info, `"name": "`+name+`"`) {
				return fmt.Errorf("%s is missing in\n%s", name, info)
			}
		}
		return nil
	})

	pod, config := s.pod("spread")
	seen := func(id string) string { return strings.TrimSpace(s.exec(id, "sh", "-c", "echo $SEEN")) }
	one := s.container(pod, config, containerConfig("one", "sleep 1000"))
	if got := seen(one); got != "/first/middle/last" {
		t.Errorf("the plugins came as %q", got)
	}

	t.Run("unsolicited update", func(t *testing.T) {
		up := &nri.ContainerUpdate{ContainerId: one}
		up.SetLinuxCPUShares(345)
		failed, err := st.UpdateContainers([]*nri.ContainerUpdate{up})
		if err != nil || len(failed) > 0 {
			t.Fatalf("failed %v, %v", failed, err)
		}
		if got := cgroupValue(t, one, "cpu/cpu.shares"); got != "345" {
			t.Errorf("shares are %s", got)
		}
	})

	t.Run("conflict", func(t *testing.T) {
		set := func(*nri.Container) *nri.ContainerAdjustment {
			a := &nri.ContainerAdjustment{}
			a.SetLinuxPidLimits(7)
			return a
		}
		(&plugin{adjust: set}).connect(t, s, "40", "greedy")
		other := second.connect(&plugin{adjust: set}, "50", "rival")
		eventually(t, "the conflict is found", func() error {
			_, err := s.tryContainer(pod, config, "conflict")
			if err == nil {
				return fmt.Errorf("no conflict")
			}
			contains(t, err.Error(), "40-greedy", "50-rival")
			return nil
		})
		other.Stop()
	})

	t.Run("hub away", func(t *testing.T) {
		picky := second.connect(&plugin{}, "60", "picky", stub.WithFailurePolicy(&nri.FailurePolicy{FailRequest: true}))
		eventually(t, "picky takes part", func() error {
			if info := s.crictl("info"); !strings.Contains(info, "picky") {
				return fmt.Errorf("not there in\n%s", info)
			}
			return nil
		})
		second.kill()
		if _, err := s.tryContainer(pod, config, "refused"); err == nil {
			t.Error("created although the policy of a plugin of the hub that is away is to fail")
		} else {
			contains(t, err.Error(), "60-picky")
		}
		picky.Stop()
		// The hub comes back without it, so that the policy is gone, and leaves again.
		second.run(s)
		middle = appends("middle")
		second.connect(middle, "10", "middle")
		eventually(t, "middle is back", func() error {
			id, err := s.tryContainer(pod, config, fmt.Sprintf("back-%d", len(middle.noted())))
			if err != nil {
				return err
			}
			if !slices.ContainsFunc(middle.noted(), func(c string) bool { return strings.HasPrefix(c, "CreateContainer back") }) {
				return fmt.Errorf("container %s was made without it", id)
			}
			return nil
		})
		second.kill()
		id := s.container(pod, config, containerConfig("without", "sleep 1000"))
		if got := seen(id); got != "/first/last" {
			t.Errorf("the plugins came as %q", got)
		}
	})
}

// judge is a plugin that validates, adjusts updates and notes both.
type judge struct {
	plugin

	shares uint64 // what it makes of an update; 0 leaves it alone

	seen []string // plugins that were consulted, and owners of variables, guarded by mu
}

func (j *judge) UpdateContainer(_ context.Context, _ *nri.PodSandbox, c *nri.Container, r *nri.LinuxResources) ([]*nri.ContainerUpdate, error) {
	j.note(fmt.Sprint("UpdateContainer ", r.GetCpu().GetShares().GetValue()), c.GetName())
	if j.shares == 0 {
		return nil, nil
	}
	u := &nri.ContainerUpdate{ContainerId: c.GetId()}
	u.SetLinuxCPUShares(j.shares)
	return []*nri.ContainerUpdate{u}, nil
}

func (j *judge) ValidateContainerAdjustment(_ context.Context, req *nri.ValidateContainerAdjustmentRequest) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.seen = nil
	for _, p := range req.GetPlugins() {
		j.seen = append(j.seen, p.GetIndex()+"-"+p.GetName())
	}
	if owner, ok := req.GetOwners().EnvOwner(req.GetContainer().GetId(), "SEEN"); ok {
		j.seen = append(j.seen, owner)
	}
	if req.GetContainer().GetName() == "forbidden" {
		return fmt.Errorf("this one is forbidden")
	}
	return nil
}

// What a plugin is required for, told and asked about does not depend on the hub at which it
// is: rules, validation, updates and ends go over all hubs, and one of them may come back as
// a new one in the middle.
func TestRequestsGoOverTwoHubs(t *testing.T) {
	second := newSecondHub(t)
	s := start(t, testenv.Setup{Configure: func(p testenv.Process, c testenv.Settings) {
		switch p {
		case testenv.Gateway:
			c.Set("nri.more_sockets", []string{second.socket()})
		case testenv.NRIHub:
			c.Set("required.wait", "4s")
		default:
		}
	}})
	second.run(s)
	s.pull(busybox)
	here, there := &judge{plugin: *appends("here")}, &judge{plugin: *appends("there"), shares: 700}
	st, err := stub.New(here, stub.WithSocketPath(s.NRISocket()), stub.WithPluginIdx("10"), stub.WithPluginName("here"), stub.WithOnClose(func() {}))
	must(t, err)
	must(t, st.Start(t.Context()))
	t.Cleanup(st.Stop)
	connectThere := func() {
		st, err := stub.New(there, stub.WithSocketPath(second.nri()), stub.WithPluginIdx("20"), stub.WithPluginName("there"), stub.WithOnClose(func() {}))
		must(t, err)
		must(t, st.Start(context.Background()))
		t.Cleanup(st.Stop)
	}
	connectThere()
	takesPart := func(name string) {
		eventually(t, name+" takes part", func() error {
			if info := s.crictl("info"); !strings.Contains(info, name) {
				return fmt.Errorf("not there in\n%s", info)
			}
			return nil
		})
	}
	takesPart("here")
	takesPart("there")
	pod, config := s.pod("both")

	t.Run("validation", func(t *testing.T) {
		if _, err := s.tryContainer(pod, config, "forbidden"); err == nil {
			t.Error("a container that the validators forbid was made")
		} else {
			contains(t, err.Error(), "this one is forbidden")
		}
		s.container(pod, config, containerConfig("allowed", "sleep 1000"))
		want := []string{"10-here", "20-there", "20-there"}
		for _, j := range []*judge{here, there} {
			j.mu.Lock()
			if !slices.Equal(j.seen, want) {
				t.Errorf("a validator saw %q, want %q", j.seen, want)
			}
			j.mu.Unlock()
		}
	})

	t.Run("update and ends", func(t *testing.T) {
		id := s.container(pod, config, containerConfig("life", "sleep 1000"))
		_, err := s.CRI.UpdateContainerResources(t.Context(), &criv1.UpdateContainerResourcesRequest{
			ContainerId: id, Linux: &criv1.LinuxContainerResources{CpuShares: 400},
		})
		must(t, err)
		if got := cgroupValue(t, id, "cpu/cpu.shares"); got != "700" {
			t.Errorf("shares are %s, want those of the plugin of the second hub", got)
		}
		_, err = s.CRI.StopContainer(t.Context(), &criv1.StopContainerRequest{ContainerId: id})
		must(t, err)
		_, err = s.CRI.RemoveContainer(t.Context(), &criv1.RemoveContainerRequest{ContainerId: id})
		must(t, err)
		want := []string{
			"CreateContainer life", "PostCreateContainer life", "StartContainer life", "PostStartContainer life",
			"UpdateContainer 400 life", "StopContainer life", "RemoveContainer life",
		}
		for _, j := range []*judge{here, there} {
			eventually(t, "each plugin was told each step once", func() error {
				got := slices.DeleteFunc(j.noted(), func(c string) bool { return !strings.HasSuffix(c, " life") })
				if !slices.Equal(got, want) {
					return fmt.Errorf("told %q, want %q", got, want)
				}
				return nil
			})
		}
	})

	t.Run("required", func(t *testing.T) {
		guarded := s.podConfig("guarded")
		guarded.Annotations = map[string]string{"required-plugins.noderesource.dev": `["late"]`}
		run := func() (*criv1.RunPodSandboxResponse, error) {
			return s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: guarded})
		}
		begin := time.Now()
		if _, err := run(); status.Code(err) != codes.FailedPrecondition || time.Since(begin) < 3*time.Second {
			t.Errorf("without the plugin, after %v: %v", time.Since(begin), err)
		} else {
			contains(t, err.Error(), "late")
		}
		late := &plugin{}
		coming := time.AfterFunc(time.Second, func() {
			st, err := stub.New(late, stub.WithSocketPath(second.nri()), stub.WithPluginIdx("30"), stub.WithPluginName("late"), stub.WithOnClose(func() {}))
			if err == nil {
				err = st.Start(context.Background())
			}
			if err != nil {
				t.Error(err)
				return
			}
			t.Cleanup(st.Stop)
		})
		defer coming.Stop()
		answer, err := run()
		must(t, err)
		if !slices.Contains(late.noted(), "RunPodSandbox guarded") {
			t.Errorf("the pod was made without the plugin that it requires: %q", late.noted())
		}
		_, err = s.CRI.RemovePodSandbox(t.Context(), &criv1.RemovePodSandboxRequest{PodSandboxId: answer.GetPodSandboxId()})
		must(t, err)
	})

	t.Run("another generation", func(t *testing.T) {
		before := len(there.noted())
		over, made := make(chan struct{}), make(chan int, 1)
		go func() {
			n := 0
			defer func() { made <- n }()
			for ; ; n++ {
				select {
				case <-over:
					return
				default:
				}
				if err := s.makeAndRemove(fmt.Sprint("during-", n)); err != nil {
					t.Errorf("during-%d: %v", n, err)
				}
			}
		}()
		second.kill()
		second.run(s)
		connectThere()
		eventually(t, "the plugin is back", func() error {
			if calls := there.noted()[before:]; !slices.Contains(calls, "Synchronize pod both") {
				return fmt.Errorf("it was told %q", calls)
			}
			return nil
		})
		takesPart("there")
		close(over)
		if n := <-made; n == 0 {
			t.Error("no pod was made meanwhile")
		}
		id := s.container(pod, config, containerConfig("after", "sleep 1000"))
		if got := strings.TrimSpace(s.exec(id, "sh", "-c", "echo $SEEN")); got != "/here/there" {
			t.Errorf("the plugins came as %q", got)
		}
	})
}

// A plugin that hangs is left out by its own hub and told afterwards; the ends of pods and
// containers reach each plugin once, whichever hub, or the gateway, is restarted meanwhile.
func TestEndsComeOnceOverTwoHubs(t *testing.T) {
	second := newSecondHub(t)
	s := start(t, testenv.Setup{Configure: func(p testenv.Process, c testenv.Settings) {
		switch p {
		case testenv.Gateway:
			c.Set("nri.more_sockets", []string{second.socket()})
			c.Set("nri.hold", "2s")
		case testenv.NRIHub:
			c.Set("timeouts.request", "1s")
		default:
		}
	}})
	second.run(s)
	s.pull(busybox)
	held := make(chan struct{})
	here := &plugin{}
	there := &plugin{adjust: func(c *nri.Container) *nri.ContainerAdjustment {
		if c.GetName() == "hangs" {
			<-held
		}
		return nil
	}}
	here.connect(t, s, "10", "here")
	second.connect(there, "20", "there")
	takesPart := func(name string) {
		eventually(t, name+" takes part", func() error {
			if info := s.crictl("info"); !strings.Contains(info, name) {
				return fmt.Errorf("not there in\n%s", info)
			}
			return nil
		})
	}
	takesPart("here")
	takesPart("there")
	told := func(p *plugin, calls ...string) {
		t.Helper()
		eventually(t, "each is told once", func() error {
			noted := p.noted()
			for _, want := range calls {
				n := 0
				for _, c := range noted {
					if c == want {
						n++
					}
				}
				if n != 1 {
					return fmt.Errorf("%s: told %d times, in %q", want, n, noted)
				}
			}
			return nil
		})
	}

	pod, config := s.pod("ends")
	s.container(pod, config, containerConfig("hangs", "sleep 1000"))
	if c := s.pluginsCondition(); c.GetStatus() || !strings.Contains(c.GetMessage(), "20-there") {
		t.Errorf("while a plugin hangs the condition is %v", c)
	}
	s.container(pod, config, containerConfig("behind", "sleep 1000"))
	close(held)
	told(there, "CreateContainer hangs", "CreateContainer behind")

	one := s.container(pod, config, containerConfig("one", "sleep 1000"))
	two := s.container(pod, config, containerConfig("two", "sleep 1000"))
	told(there, "CreateContainer one", "CreateContainer two")
	second.kill()
	for _, id := range []string{one, two} {
		_, err := s.CRI.StopContainer(t.Context(), &criv1.StopContainerRequest{ContainerId: id})
		must(t, err)
	}
	_, err := s.CRI.RemoveContainer(t.Context(), &criv1.RemoveContainerRequest{ContainerId: one})
	must(t, err)
	told(here, "StopContainer one", "RemoveContainer one", "StopContainer two")
	second.run(s)
	second.connect(there, "20", "there")
	told(there, "StopContainer one", "RemoveContainer one", "StopContainer two")

	must(t, s.Kill(t.Context(), testenv.NRIHub))
	must(t, s.Run(testenv.NRIHub))
	here.stay(t, s, "10", "here")
	must(t, s.Restart(t.Context(), testenv.Gateway))
	takesPart("here")
	takesPart("there")
	for range 2 {
		_, err = s.CRI.StopPodSandbox(t.Context(), &criv1.StopPodSandboxRequest{PodSandboxId: pod})
		must(t, err)
	}
	_, err = s.CRI.RemovePodSandbox(t.Context(), &criv1.RemovePodSandboxRequest{PodSandboxId: pod})
	must(t, err)
	ends := []string{"StopPodSandbox ends", "RemovePodSandbox ends"}
	for _, c := range []string{"hangs", "behind", "one", "two"} {
		ends = append(ends, "StopContainer "+c, "RemoveContainer "+c)
	}
	told(here, ends...)
	told(there, ends...)
}
