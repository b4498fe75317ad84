//go:build integration

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
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

// onHub changes the hub's settings.
func onHub(change func(testenv.Settings)) func(testenv.Process, testenv.Settings) {
	return func(p testenv.Process, settings testenv.Settings) {
		if p == testenv.NRIHub {
			change(settings)
		}
	}
}

// hubCommand runs a subcommand of nri-hub.
func (s *system) hubCommand(args ...string) (string, error) {
	s.t.Helper()
	path, err := testenv.Binary("nri-hub")
	must(s.t, err)
	ctx, cancel := context.WithTimeout(s.t.Context(), 30*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, append(args, "--config", s.ConfigFile(testenv.NRIHub))...).CombinedOutput()
	return string(out), err
}

func (s *system) pluginsCondition() *criv1.RuntimeCondition {
	s.t.Helper()
	answer, err := s.CRI.Status(s.t.Context(), &criv1.StatusRequest{})
	must(s.t, err)
	for _, c := range answer.GetStatus().GetConditions() {
		if c.GetType() == "NRIPluginsReady" {
			return c
		}
	}
	s.t.Fatal("Status has no condition NRIPluginsReady")
	return nil
}

// A plugin that hangs costs one container its time limit, is shown as degraded, gets what
// it missed and takes part again.
func TestHungPluginIsPassedBy(t *testing.T) {
	const limit = 3 * time.Second
	s := start(t, testenv.Setup{Configure: onHub(func(c testenv.Settings) { c.Set("timeouts.request", limit.String()) })})
	s.pull(busybox)
	release := make(chan struct{})
	free := sync.OnceFunc(func() { close(release) })
	defer free()
	p := &plugin{}
	p.adjust = func(c *nri.Container) *nri.ContainerAdjustment {
		<-release
		a := &nri.ContainerAdjustment{}
		a.AddEnv("SEEN", "by the plugin")
		return a
	}
	p.connect(t, s, "10", "hung")
	if c := s.pluginsCondition(); !c.GetStatus() {
		t.Errorf("condition is %v", c)
	}
	pod, config := s.pod("hung")
	create := func(name string) (string, time.Duration) {
		begin := time.Now()
		id := s.container(pod, config, containerConfig(name, "sleep 1000"))
		return id, time.Since(begin)
	}
	if _, took := create("first"); took < limit*9/10 {
		t.Errorf("the first container took %v, less than the time limit", took)
	}
	var slowest time.Duration
	for i := range 3 {
		_, took := create(fmt.Sprint("next", i))
		slowest = max(slowest, took)
	}
	t.Logf("slowest of the next containers: %v", slowest)
	if slowest >= limit {
		t.Errorf("a container waited for the degraded plugin: %v", slowest)
	}
	if c := s.pluginsCondition(); c.GetStatus() || c.GetReason() != "NRIPluginsDegraded" || !strings.Contains(c.GetMessage(), "10-hung") {
		t.Errorf("condition is %v", c)
	}
	out, err := s.hubCommand("plugins")
	must(t, err)
	contains(t, out, "10-hung", "degraded")
	free()
	eventually(t, "the plugin is back", func() error {
		if c := s.pluginsCondition(); !c.GetStatus() {
			return fmt.Errorf("condition is %v", c)
		}
		return nil
	})
	id, _ := create("last")
	if got := strings.TrimSpace(s.exec(id, "sh", "-c", "echo $SEEN")); got != "by the plugin" {
		t.Errorf("variable is %q", got)
	}
}

// What a plugin changes is in the log and on the bus, and can be tried before.
func TestAuditAndDryRun(t *testing.T) {
	s := start(t, testenv.Setup{Configure: onHub(func(c testenv.Settings) { c.Set("audit.values", true) })})
	s.pull(busybox)
	p := &plugin{adjust: func(*nri.Container) *nri.ContainerAdjustment {
		a := &nri.ContainerAdjustment{}
		a.AddEnv("AUDITED", "new-value")
		a.SetLinuxCPUShares(333)
		return a
	}}
	p.connect(t, s, "10", "auditor")
	ctx, cancel := context.WithCancel(t.Context())
	cmd, err := s.EventBus(ctx, "tail", "--json", "--config", s.ConfigFile(testenv.EventBus))
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	lines := &recorder{}
	var wg sync.WaitGroup
	wg.Go(func() { lines.read(out) })
	defer wg.Wait()
	defer cancel()

	manifest := filepath.Join(t.TempDir(), "pod.yaml")
	text := "kind: Pod\nmetadata: {name: tried}\nspec: {containers: [{name: main, command: [sleep, '1']}]}\n"
	must(t, os.WriteFile(manifest, []byte(text), 0o644))
	tried, err := s.hubCommand("dry-run", "-f", manifest)
	must(t, err)
	contains(t, tried, "10-auditor", "env[AUDITED]", "new-value", "linux.resources.cpu.shares", "333")
	if list := s.crictl("ps", "-aq"); list != "" {
		t.Errorf("a dry run made %q", list)
	}

	pod, config := s.pod("audited")
	id := s.container(pod, config, containerConfig("main", "sleep 1000"))
	eventually(t, "the change is on the bus", func() error {
		for _, line := range lines.all() {
			var event struct {
				Subject string
				Topic   string
				Event   struct {
					Plugin      string
					ContainerID string `json:"container_id"`
					Changes     []struct {
						Field    string
						Key      string
						NewValue string `json:"new_value"`
					}
				}
			}
			if json.Unmarshal([]byte(line), &event) != nil || event.Topic != "/nri/audit" || event.Event.ContainerID != id {
				continue
			}
			if !strings.HasSuffix(event.Subject, ".nri.audit") || event.Event.Plugin != "10-auditor" || len(event.Event.Changes) != 2 ||
				event.Event.Changes[0].Key != "AUDITED" || event.Event.Changes[0].NewValue != "new-value" {
				t.Errorf("event is %s", line)
			}
			return nil
		}
		return fmt.Errorf("no such event among %d", len(lines.all()))
	})
	log, err := os.ReadFile(s.Path("logs", "nri-hub.log"))
	must(t, err)
	contains(t, string(log), "nri audit", "AUDITED", id)
	detail, err := s.hubCommand("plugins", "inspect", "auditor")
	must(t, err)
	contains(t, detail, "10-auditor", "active", "CreateContainer", "program")
}

// Rights hold for real containers, and required plugins for real pods.
func TestRightsAndRequirements(t *testing.T) {
	s := start(t, testenv.Setup{Configure: onHub(func(c testenv.Settings) {
		c.Set("plugins", []map[string]any{
			{"name": "limited", "rights": map[string]any{"fields": []string{"env"}}},
			{"name": "nobody", "rights": map[string]any{"uids": []int64{12345}}},
		})
		c.Set("required.wait", "1s")
		c.Set("required.exempt", []map[string]any{{"plugins": []string{"absent"}, "pods": map[string]any{"labels": map[string]string{"app": "absent"}}}})
	})})
	s.pull(busybox)
	var mounts bool
	p := &plugin{adjust: func(*nri.Container) *nri.ContainerAdjustment {
		a := &nri.ContainerAdjustment{}
		a.AddEnv("OK", "1")
		if mounts {
			a.AddMount(&nri.Mount{Source: "/", Destination: "/host", Type: "bind", Options: []string{"rbind"}})
		}
		return a
	}}
	p.connect(t, s, "10", "limited")
	pod, config := s.pod("rights")
	s.container(pod, config, containerConfig("allowed", "sleep 1000"))
	mounts = true
	_, err := s.CRI.CreateContainer(t.Context(), &criv1.CreateContainerRequest{PodSandboxId: pod, Config: containerConfig("denied", "true"), SandboxConfig: config})
	if status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), "mounts") {
		t.Errorf("container with a forbidden mount: %v", err)
	}
	if out := s.crictl("ps", "-aq", "--name", "denied"); out != "" {
		t.Errorf("it is listed: %q", out)
	}
	st, err := stub.New(&plugin{}, stub.WithSocketPath(s.NRISocket()), stub.WithPluginIdx("20"), stub.WithPluginName("nobody"), stub.WithOnClose(func() {}))
	must(t, err)
	if err := st.Start(t.Context()); err == nil || !strings.Contains(err.Error(), "12345") {
		t.Errorf("a process of another user was taken for the plugin: %v", err)
	}
	needy := s.podConfig("needy")
	needy.Annotations["required-plugins.noderesource.dev"] = `["absent"]`
	_, err = s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: needy})
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "absent") {
		t.Errorf("pod that requires a plugin that is away: %v", err)
	}
	own := s.podConfig("own")
	own.Annotations["required-plugins.noderesource.dev"] = `["absent"]`
	own.Labels["app"] = "absent"
	if _, err := s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: own}); err != nil {
		t.Errorf("the plugin's own pod: %v", err)
	}
}

// While the hub restarts, a service manager holds the socket: who connects meanwhile waits.
func TestSocketHeldByAServiceManager(t *testing.T) {
	s := start(t, testenv.Setup{Privileged: true}) // the test starts hubs of its own
	must(t, s.Stop(t.Context(), testenv.NRIHub))
	_ = os.Remove(s.NRISocket())
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: s.NRISocket(), Net: "unix"})
	must(t, err)
	defer listener.Close()
	file, err := listener.File()
	must(t, err)
	defer file.Close()
	path, err := testenv.Binary("nri-hub")
	must(t, err)
	hub := func() *exec.Cmd {
		// The variable must name the process itself, as with a service manager.
		cmd := exec.Command("/bin/sh", "-c", `LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=nri.sock exec "$0" run --config "$1"`, path, s.ConfigFile(testenv.NRIHub))
		cmd.ExtraFiles = []*os.File{file}
		must(t, cmd.Start())
		return cmd
	}
	kill := func(cmd *exec.Cmd) {
		_ = cmd.Process.Signal(syscall.SIGKILL)
		_ = cmd.Wait()
	}
	for round := range 2 {
		p := &plugin{}
		st, err := stub.New(p, stub.WithSocketPath(s.NRISocket()), stub.WithPluginIdx("10"), stub.WithPluginName("early"), stub.WithOnClose(func() {}))
		must(t, err)
		registered := make(chan error, 1)
		go func() { registered <- st.Start(context.Background()) }()
		time.Sleep(300 * time.Millisecond) // no hub is there
		cmd := hub()
		select {
		case err := <-registered:
			if err != nil {
				t.Errorf("round %d: %v", round, err)
			}
		case <-time.After(20 * time.Second):
			t.Errorf("round %d: the plugin was not served", round)
		}
		kill(cmd)
		st.Stop()
	}
	must(t, listener.Close())
	_ = os.Remove(s.NRISocket())
	_ = os.Remove(s.Path("run", "nri-hub.sock")) // left behind by the kills
	must(t, s.Run(testenv.NRIHub))
	eventually(t, "the hub is back", func() error {
		_, err := s.hubCommand("plugins")
		return err
	})
}

// A newer instance takes over while the older one serves; no container is made without the
// plugin, and the older one is told.
func TestNewInstanceTakesOverWithoutAGap(t *testing.T) {
	s := start(t, testenv.Setup{Configure: onHub(func(c testenv.Settings) { c.Set("required_plugins", []string{"upgraded"}) })})
	s.pull(busybox)
	instance := func(version string) *plugin {
		return &plugin{adjust: func(*nri.Container) *nri.ContainerAdjustment {
			a := &nri.ContainerAdjustment{}
			a.AddEnv("VERSION", version)
			return a
		}}
	}
	old := &leaving{plugin: instance("1"), told: make(chan struct{})}
	st, err := stub.New(old, stub.WithSocketPath(s.NRISocket()), stub.WithPluginIdx("10"), stub.WithPluginName("upgraded"), stub.WithOnClose(func() {}))
	must(t, err)
	must(t, st.Start(t.Context()))
	t.Cleanup(st.Stop)
	pod, config := s.pod("upgrade")
	stop := make(chan struct{})
	var load sync.WaitGroup
	var failures []error
	var last string
	load.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			answer, err := s.CRI.CreateContainer(context.Background(), &criv1.CreateContainerRequest{
				PodSandboxId: pod, Config: containerConfig(fmt.Sprint("c", n), "sleep 1000"), SandboxConfig: config,
			})
			if err != nil {
				failures = append(failures, err)
			}
			last = answer.GetContainerId()
		}
	})
	time.Sleep(500 * time.Millisecond)
	instance("2").connect(t, s, "10", "upgraded")
	select {
	case <-old.told:
	case <-time.After(20 * time.Second):
		t.Error("the older instance was not told")
	}
	time.Sleep(500 * time.Millisecond)
	close(stop)
	load.Wait()
	if err := errors.Join(failures...); err != nil {
		t.Errorf("containers were refused: %v", err)
	}
	_, err = s.CRI.StartContainer(t.Context(), &criv1.StartContainerRequest{ContainerId: last})
	must(t, err)
	if got := strings.TrimSpace(s.exec(last, "sh", "-c", "echo $VERSION")); got != "2" {
		t.Errorf("the last container was made with version %q", got)
	}
}

// leaving is a plugin that notes that it is told to go.
type leaving struct {
	*plugin

	told chan struct{}
}

func (l *leaving) Shutdown(context.Context) { close(l.told) }
