//go:build integration

package e2e

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// withHandler adds a runtime handler that is like the default one before the processes start.
func withHandler(name string) func(testenv.Process, testenv.Settings) {
	return func(p testenv.Process, settings testenv.Settings) {
		if p == testenv.Sandboxd {
			like := settings.Get("runtime.handlers." + settings.Get("runtime.default_handler").(string)).(map[string]any)
			settings.Set("runtime.handlers."+name, maps.Clone(like))
		}
	}
}

// dropIn writes a file beside sandboxd's configuration and has it read.
func (s *system) dropIn(text string) {
	s.t.Helper()
	folder := s.ConfigFile(testenv.Sandboxd) + ".d"
	must(s.t, os.MkdirAll(folder, 0o755))
	must(s.t, os.WriteFile(filepath.Join(folder, "50-test.toml"), []byte(text), 0o644))
	s.hangup(testenv.Sandboxd, "configuration read anew")
}

// Pods of a handler are in the networks of its own folder, from a reload on, and are released from
// them after the handler has got others and sandboxd was restarted.
func TestNetworksOfAHandler(t *testing.T) {
	s := start(t, testenv.Setup{Configure: withHandler("other")})
	network := func(folder, subnet string) string {
		dir := s.Path(folder)
		must(t, os.MkdirAll(dir, 0o755))
		must(t, os.WriteFile(filepath.Join(dir, "10-net.conflist"), []byte(fmt.Sprintf(`{"cniVersion":"1.0.0","name":"crisp-test","plugins":[
{"type":"logged-bridge","bridge":"crisp0","ipMasq":false,
 "ipam":{"type":"host-local","dataDir":%q,"ranges":[[{"subnet":%q}]]}}]}`, s.Path("addresses"), subnet)), 0o644))
		return dir
	}
	use := func(dir string) { s.dropIn(fmt.Sprintf("[runtime.handlers.other]\ncni_conf_dir = %q\n", dir)) }
	run := func(name, handler string) (string, string) {
		resp, err := s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: s.podConfig(name), RuntimeHandler: handler})
		must(t, err)
		st, err := s.CRI.PodSandboxStatus(t.Context(), &criv1.PodSandboxStatusRequest{PodSandboxId: resp.GetPodSandboxId()})
		must(t, err)
		return resp.GetPodSandboxId(), st.GetStatus().GetNetwork().GetIp()
	}
	use(network("own1", "10.89.0.0/24"))
	first, ip1 := run("first", "other")
	_, ip2 := run("second", "")
	if !strings.HasPrefix(ip1, "10.89.0.") || !strings.HasPrefix(ip2, "10.88.") {
		t.Errorf("addresses %s and %s", ip1, ip2)
	}
	use(network("own2", "10.90.0.0/24"))
	must(t, os.RemoveAll(s.Path("own1")))
	must(t, s.Restart(t.Context(), testenv.Sandboxd))
	must(t, s.WaitReady(t.Context()))
	if _, ip := run("third", "other"); !strings.HasPrefix(ip, "10.90.0.") {
		t.Errorf("address %s", ip)
	}
	_, err := s.CRI.StopPodSandbox(t.Context(), &criv1.StopPodSandboxRequest{PodSandboxId: first})
	must(t, err)
	if held, err := filepath.Glob(s.Path("addresses", "crisp-test", "10.89.*")); err != nil || len(held) != 0 {
		t.Errorf("still held: %v, %v", held, err)
	}
	must(t, os.RemoveAll(s.Path("own2")))
	tries := 0
	eventually(t, "a folder that is gone is noticed", func() error {
		tries++
		_, err := s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: s.podConfig(fmt.Sprintf("none%d", tries)), RuntimeHandler: "other"})
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), s.Path("own2")) {
			return fmt.Errorf("a pod without a network: %w", err)
		}
		return nil
	})
	must(t, s.WaitReady(t.Context())) // the node is ready by the default handler
}

// What the node has for pods with an annotation reaches containers of each shim: processors of a
// workload, annotations of the handler, hooks of a folder. A hook that is wrong is told.
func TestWorkloadsAndHooks(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	hooks, ran := s.Path("hooks.d"), filepath.Join(t.TempDir(), "ran")
	must(t, os.MkdirAll(hooks, 0o755))
	hook := func(name, when string) {
		must(t, os.WriteFile(filepath.Join(hooks, name), []byte(fmt.Sprintf(
			`{"version":"1.0.0","hook":{"path":"/bin/sh","args":["sh","-c","cat >> %s"]},"when":%s,"stages":["createRuntime"]}`, ran, when)), 0o644))
	}
	hook("10-of-workload.json", `{"annotations":{"^target/fast$":""},"commands":["/sh$","^sh$"]}`)
	s.dropIn(fmt.Sprintf(`
[runtime]
hooks_dir = [%q]
[runtime.handlers.crisp]
default_annotations = {"test/of-handler" = "crisp"}
[runtime.handlers.runc]
default_annotations = {"test/of-handler" = "runc"}
[runtime.workloads.fast]
activation_annotation = "target/fast"
annotation_prefix = "cpu.fast"
resources = {cpushares = 333, cpuset = "0"}
`, hooks))
	for _, handler := range []string{testenv.HandlerCrisp, testenv.HandlerStock} {
		podConfig := s.podConfig("fast-" + handler)
		podConfig.Annotations = map[string]string{"target/fast": "yes", "cpu.fast/own": `{"cpulimit": 250}`}
		resp, err := s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: podConfig, RuntimeHandler: handler})
		must(t, err)
		pod := resp.GetPodSandboxId()
		for name, want := range map[string]int64{"own": 25_000, "other": 0} {
			id := s.container(pod, podConfig, containerConfig(name, "sleep 1000"))
			cpu := s.status(id).GetResources().GetLinux()
			if cpu.GetCpuQuota() != want || cpu.GetCpuShares() != 333 || cpu.GetCpusetCpus() != "0" {
				t.Errorf("handler %s, container %s: %+v", handler, name, cpu)
			}
			if got := strings.TrimSpace(s.exec(id, "sed", "-n", "s/^Cpus_allowed_list:[[:space:]]*//p", "/proc/1/status")); got != "0" {
				t.Errorf("handler %s, container %s: runs on %s", handler, name, got)
			}
			states, err := os.ReadFile(ran)
			must(t, err)
			contains(t, string(states), id, fmt.Sprintf(`"test/of-handler":%q`, handler))
		}
		hook("20-wrong.json", `{}`)
		if _, err := s.create(pod, podConfig, containerConfig("wrong", "true")); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "20-wrong.json") {
			t.Errorf("a hook that is wrong: %v", err)
		}
		must(t, os.Remove(filepath.Join(hooks, "20-wrong.json")))
	}
	pod, podConfig := s.pod("plain")
	id := s.container(pod, podConfig, containerConfig("plain", "sleep 1000"))
	if states, err := os.ReadFile(ran); err != nil || strings.Contains(string(states), id) {
		t.Errorf("hooks of a pod of no workload: %v, %s", err, states)
	}
}
