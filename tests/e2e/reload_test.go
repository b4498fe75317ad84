//go:build integration

package e2e

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/pelletier/go-toml/v2"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// change rewrites the configuration of a process.
func (s *system) change(p testenv.Process, change func(testenv.Settings)) {
	s.t.Helper()
	text, err := os.ReadFile(s.ConfigFile(p))
	must(s.t, err)
	settings := testenv.Settings{}
	must(s.t, toml.Unmarshal(text, &settings))
	change(settings)
	var out bytes.Buffer
	must(s.t, toml.NewEncoder(&out).Encode(map[string]any(settings)))
	must(s.t, os.WriteFile(s.ConfigFile(p), out.Bytes(), 0o644))
}

// hangup tells a process to read its configuration anew and waits until its log has a line
// with the words that it did not have before.
func (s *system) hangup(p testenv.Process, words string) {
	s.t.Helper()
	lines := func() int { return strings.Count(s.log(p), words) }
	before := lines()
	must(s.t, syscall.Kill(s.Pid(p), syscall.SIGHUP))
	eventually(s.t, fmt.Sprintf("%s says %q", p, words), func() error {
		if lines() == before {
			return fmt.Errorf("not in its log")
		}
		return nil
	})
}

func (s *system) log(p testenv.Process) string {
	s.t.Helper()
	text, err := os.ReadFile(s.Path("logs", string(p)+".log"))
	must(s.t, err)
	return string(text)
}

// The configuration of every process can be changed while it runs, and what is wrong or cannot
// be changed is said and changes nothing.
func TestConfigurationIsReadAnew(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	pod, config := s.pod("before")
	kept := s.container(pod, config, containerConfig("main", "sleep 1000"))
	before := s.pids()

	for _, p := range []testenv.Process{testenv.EventBus, testenv.Sandboxd, testenv.NRIHub, testenv.Gateway} {
		s.change(p, func(c testenv.Settings) {
			c.Set("log.level", "debug")
			c.Set("admin.listen", "127.0.0.1:1")
		})
		s.hangup(p, "configuration read anew")
		contains(t, s.log(p), "log.level", "wait for the next start", "admin.listen")
	}

	_, err := s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: s.podConfig("early"), RuntimeHandler: "copy"})
	if err == nil {
		t.Fatal("a handler that is not configured yet ran a pod")
	}
	s.change(testenv.Sandboxd, func(c testenv.Settings) {
		for _, key := range []string{"runtime_type", "shim_path", "binary_name", "runtime_root", "sandboxer"} {
			c.Set("runtime.handlers.copy."+key, c.Get("runtime.handlers."+c.Get("runtime.default_handler").(string)+"."+key))
		}
		c.Set("runtime.ulimits.nofile", map[string]any{"soft": 777, "hard": 888})
		c.Set("image.pinned_images", []string{`/.*[/]busybox:.+/`})
	})
	s.hangup(testenv.Sandboxd, "configuration read anew")
	check := func() {
		t.Helper()
		status, err := s.CRI.Status(t.Context(), &criv1.StatusRequest{Verbose: true})
		must(t, err)
		if got := fmt.Sprint(status.GetRuntimeHandlers()); !strings.Contains(got, "copy") {
			t.Errorf("handlers: %s", got)
		}
		contains(t, status.GetInfo()["sandboxd"], "[/]busybox:")
		image, err := s.Images.ImageStatus(t.Context(), &criv1.ImageStatusRequest{Image: &criv1.ImageSpec{Image: busybox}})
		must(t, err)
		if !image.GetImage().GetPinned() {
			t.Error("the image is not pinned")
		}
	}
	check()
	copied := s.podConfig("copy")
	answer, err := s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: copied, RuntimeHandler: "copy"})
	must(t, err)
	id := s.container(answer.GetPodSandboxId(), copied, containerConfig("main", "sleep 1000"))
	if got := strings.TrimSpace(s.exec(id, "sh", "-c", "ulimit -Sn; ulimit -Hn")); got != "777\n888" {
		t.Errorf("limits of a new container: %q", got)
	}

	for name, broken := range map[string]string{
		"no TOML":       "[runtime\n",
		"unknown key":   "[runtime]\nhandler = 'x'\n",
		"bad value":     "[runtime]\ndefault_handler = 'nobody'\n",
		"missing class": "[runtime]\nblockio_config_file = '/no/such/file'\n",
	} {
		t.Run(name, func(t *testing.T) {
			good, err := os.ReadFile(s.ConfigFile(testenv.Sandboxd))
			must(t, err)
			defer func() { must(t, os.WriteFile(s.ConfigFile(testenv.Sandboxd), good, 0o644)) }()
			must(t, os.WriteFile(s.ConfigFile(testenv.Sandboxd), []byte(broken), 0o644))
			s.hangup(testenv.Sandboxd, "the old one stays in force")
			check()
		})
	}
	require := func(plugins ...string) {
		s.change(testenv.NRIHub, func(c testenv.Settings) { c.Set("required_plugins", plugins) })
		s.hangup(testenv.NRIHub, "configuration read anew")
	}
	require("nobody")
	if _, err := s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: s.podConfig("refused")}); err == nil || !strings.Contains(err.Error(), "nobody") {
		t.Errorf("a pod without the plugin that is required now: %v", err)
	}
	require()
	s.pod("again")

	must(t, os.Rename(s.ConfigFile(testenv.Gateway), s.ConfigFile(testenv.Gateway)+".gone"))
	s.hangup(testenv.Gateway, "the old one stays in force")

	if after := s.pids(); after != before {
		t.Errorf("processes %v became %v", before, after)
	}
	s.exec(kept, "true")
}
