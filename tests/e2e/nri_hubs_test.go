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

	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
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
