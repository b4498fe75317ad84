//go:build integration

package faults

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// wide is the last address of a range that is not used up.
const wide = "10.88.255.254"

// chain is a configuration of the logged bridge with a further plugin behind it, and an
// address range that ends where it is told to.
func chain(s func(parts ...string) string, last, further string) string {
	return fmt.Sprintf(`{"cniVersion":"1.0.0","name":"crisp-test","plugins":[
{"type":"logged-bridge","bridge":"crisp0","isGateway":true,"ipMasq":false,
 "ipam":{"type":"host-local","dataDir":%q,"ranges":[[{"subnet":%q,"rangeEnd":%q}]],"routes":[{"dst":"0.0.0.0/0"}]}},
{"type":%q}]}`, s("addresses"), testenv.PodSubnet, last, further)
}

// withChain writes the configuration before the system starts.
func withChain(last, further string, more func(testenv.Settings)) func(testenv.Process, testenv.Settings) {
	return onSandboxd(func(settings testenv.Settings) {
		folder := settings.Get("network.conf_dir").(string)
		under := func(parts ...string) string {
			return filepath.Join(append([]string{filepath.Dir(folder)}, parts...)...)
		}
		if err := os.WriteFile(filepath.Join(folder, "10-test.conflist"), []byte(chain(under, last, further)), 0o644); err != nil {
			panic(err)
		}
		if more != nil {
			more(settings)
		}
	})
}

// A plugin that is not installed makes pods fail, and what the plugins before it gave is
// returned once it is.
func TestMissingPluginLosesNoAddress(t *testing.T) {
	w := newSwitches(t)
	s := start(t, testenv.Setup{Configure: withChain(wide, "late", nil)})
	for n := range scaled(t, 5) {
		if _, err := s.try(s.podConfig(fmt.Sprintf("lost%d", n)), "", 30*time.Second); err == nil {
			t.Fatal("a pod came up without a plugin of its network")
		}
	}
	// The same name again, which the failed one must not hold.
	for range 2 {
		if _, err := s.try(s.podConfig("again"), "", 30*time.Second); err == nil || oneOf(err, codes.AlreadyExists, codes.DeadlineExceeded) {
			t.Errorf("same name again: %v", err)
		}
	}
	must(t, s.Restart(t.Context(), testenv.Sandboxd))
	w.plugin(s.Path("cni"), "late", "tuning")
	for _, id := range s.pods() {
		must(t, errors.Join(s.stopPod(id), s.removePod(id)))
	}
	s.waitAddresses(0, patience)
	id := s.pod(s.podConfig("again"), "")
	must(t, s.removePod(id))
	s.waitAddresses(0, patience)
}

// A network that cannot be released makes the stop fail, over a restart, until it can.
func TestFailingReleaseIsReportedAndRepeated(t *testing.T) {
	w := newSwitches(t)
	s := start(t, testenv.Setup{Configure: withChain(wide, "unwilling", nil)})
	w.plugin(s.Path("cni"), "unwilling", "tuning")
	w.set("DEL", `echo '{"cniVersion":"1.0.0","code":100,"msg":"not today"}'; exit 1`)
	config := s.podConfig("held")
	id := s.pod(config, "")
	for range 2 {
		if err := s.stopPod(id); err == nil {
			t.Error("the stop succeeded although the address is held")
		}
		if err := s.removePod(id); err == nil {
			t.Error("the removal succeeded although the address is held")
		}
		if state := s.podStatus(id).GetState(); state != criv1.PodSandboxState_SANDBOX_NOTREADY {
			t.Errorf("the pod is %s", state)
		}
		must(t, s.Restart(t.Context(), testenv.Sandboxd))
	}
	// kubelet's next attempt does not wait for the old one.
	next := s.podConfig("held")
	next.Metadata.Attempt = 1
	nextID := s.pod(next, "")
	w.set("DEL", "")
	must(t, errors.Join(s.stopPod(id), s.stopPod(id), s.removePod(id), s.removePod(nextID)))
	s.waitAddresses(0, patience)
	must(t, s.removePod(s.pod(config, "")))
}

// An aborted pod whose network cannot be released at once does not stand in the way of the
// next one of its name, and is released in the background.
func TestOwedReleaseComesByItself(t *testing.T) {
	w := newSwitches(t)
	s := start(t, testenv.Setup{Configure: withChain(wide, "unwilling", func(settings testenv.Settings) {
		handler(settings, "broken", map[string]any{"shim_path": "/does/not/exist"})
	})})
	w.plugin(s.Path("cni"), "unwilling", "tuning")
	w.set("DEL", "exit 1")
	for range 3 {
		if _, err := s.try(s.podConfig("owed"), "broken", 30*time.Second); err == nil {
			t.Fatal("a pod came up without a shim")
		}
	}
	id := s.pod(s.podConfig("owed"), "")
	must(t, s.Restart(t.Context(), testenv.Sandboxd))
	w.set("DEL", "")
	must(t, s.removePod(id))
	s.waitAddresses(0, patience)
}

// A plugin that hangs when it shall release something keeps no other pod from coming, over a
// restart and a reboot; no address is lost meanwhile, or given to a second pod.
func TestHangingReleaseLosesNoAddress(t *testing.T) {
	w := newSwitches(t)
	runtime := w.runtime()
	s := start(t, testenv.Setup{Configure: withChain(wide, "hanging", func(settings testenv.Settings) {
		settings.Set("network.timeout", "3s")
		settings.Set("network.parallel", 4)
		handler(settings, "broken", map[string]any{"binary_name": runtime})
	})})
	w.plugin(s.Path("cni"), "hanging", "tuning")
	w.set("DEL", "exec sleep 1000")
	w.set("create", "sleep 2; exit 1") // of pods with a process of their own
	old := s.pod(s.podConfig("old"), "")
	var wg sync.WaitGroup
	const failed = 5 // more than plugins may run at a time
	for n := range failed {
		config := s.podConfig(fmt.Sprintf("hangs%d", n))
		config.Linux.SecurityContext.NamespaceOptions = &criv1.NamespaceOption{Pid: criv1.NamespaceMode_POD}
		wg.Go(func() {
			if _, err := s.try(config, "broken", 30*time.Second); err == nil {
				t.Error("a pod came up without its process")
			}
		})
	}
	wg.Wait()
	if err := s.stopPod(old); err == nil {
		t.Error("the stop succeeded although the address is held")
	}
	held := s.addresses()
	if len(held) < 2 { // an address that a pod did not get in time it does not hold
		t.Fatalf("held are %v, want up to %d", held, failed+1)
	}
	var others []string
	comes := func(name string) {
		t.Helper()
		id := s.pod(s.podConfig(name), "")
		others = append(others, id)
		ip := s.podStatus(id).GetNetwork().GetIp()
		if slices.Contains(held, ip) {
			t.Errorf("%s has the address %s of another pod", name, ip)
		}
		held = append(held, ip)
	}
	comes("at-once")
	must(t, s.Restart(t.Context(), testenv.Sandboxd))
	comes("after-a-restart")
	s.imitateReboot(others)
	comes("after-a-reboot")
	if now := s.addresses(); len(now) != len(held) {
		t.Errorf("held are %v, want %v", now, held)
	}
	w.set("DEL", "")
	for _, id := range append(others, old) {
		must(t, errors.Join(s.stopPod(id), s.removePod(id)))
	}
	s.waitAddresses(0, patience)
}

// However a pod's making ends, its addresses come back: the caller's deadline passes, the
// caller goes away, the shim fails, the plugin is slow.
func TestFailedPodsReleaseTheirAddresses(t *testing.T) {
	w := newSwitches(t)
	runtime := w.runtime()
	s := start(t, testenv.Setup{Configure: withChain("10.88.0.14", "tuning", func(settings testenv.Settings) {
		handler(settings, "slow", map[string]any{"binary_name": runtime})
	})})
	// Only a pod with a process of its own calls the OCI runtime when it is made.
	shared := func(name string) *criv1.PodSandboxConfig {
		config := s.podConfig(name)
		config.Linux.SecurityContext.NamespaceOptions = &criv1.NamespaceOption{Pid: criv1.NamespaceMode_POD}
		return config
	}
	const available = 13
	t.Run("the step after the network fails", func(t *testing.T) {
		w.set("create", "echo broken on purpose >&2; exit 1")
		for n := range scaled(t, available+2) {
			if _, err := s.try(shared(fmt.Sprintf("broken%d", n)), "slow", 10*time.Second); err == nil {
				t.Fatal("the pod came up")
			}
		}
		s.waitAddresses(0, patience)
	})
	t.Run("the caller's deadline passes before the failure", func(t *testing.T) {
		w.set("create", "sleep 2; exit 1")
		attached := s.networkCalls("ADD", "")
		var wg sync.WaitGroup
		for n := range 6 {
			wg.Go(func() {
				_, err := s.try(shared(fmt.Sprintf("late%d", n)), "slow", 700*time.Millisecond)
				if !oneOf(err, codes.DeadlineExceeded) {
					t.Errorf("%v, want DeadlineExceeded", err)
				}
			})
		}
		wg.Wait()
		// All have got as far as the network before any is waited for.
		eventually(t, patience, "every pod gets an address", func() error {
			if n := s.networkCalls("ADD", "") - attached; n != 6 {
				return fmt.Errorf("%d have had one", n)
			}
			return nil
		})
		s.waitAddresses(0, patience)
		w.set("create", "")
	})
	t.Run("the network itself outlasts the caller", func(t *testing.T) {
		must(t, s.SlowNetwork(2*time.Second))
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(300*time.Millisecond, cancel)
		_, err := s.CRI.RunPodSandbox(ctx, &criv1.RunPodSandboxRequest{Config: s.podConfig("gone")})
		if !oneOf(err, codes.Canceled) {
			t.Errorf("%v, want Canceled", err)
		}
		must(t, s.SlowNetwork(0))
		// The retry gets the pod that the first call made.
		id := s.pod(s.podConfig("gone"), "")
		if n := s.networkCalls("ADD", id); n != 1 {
			t.Errorf("the network was attached %d times", n)
		}
		must(t, s.removePod(id))
		s.waitAddresses(0, patience)
	})
	t.Run("the range is free again", func(t *testing.T) {
		must(t, s.removePod(s.pod(s.podConfig("normal"), "")))
	})
	calls, err := s.NetworkCalls()
	must(t, err)
	balance := map[string]int{}
	for _, call := range calls {
		switch call[:4] {
		case "ADD:":
			balance[call[4:]]++
		case "DEL:":
			balance[call[4:]] = 0
		}
	}
	for id, n := range balance {
		if n > 0 {
			t.Errorf("pod %s was attached and not detached", id)
		}
	}
}

// A pod whose network namespace was taken away is stopped and removed like any other, and
// its address comes back.
func TestPodWithoutNamespaceIsRemovable(t *testing.T) {
	s := start(t, testenv.Setup{})
	for _, test := range []struct {
		name    string
		destroy func(path string) error
		restart bool
	}{
		{"file gone", func(path string) error { return errors.Join(unix.Unmount(path, unix.MNT_DETACH), os.Remove(path)) }, false},
		{"not a namespace", func(path string) error { return unix.Unmount(path, unix.MNT_DETACH) }, false},
		{"folder gone", func(path string) error {
			dir := filepath.Dir(path)
			entries, err := os.ReadDir(dir)
			for _, entry := range entries {
				err = errors.Join(err, unix.Unmount(filepath.Join(dir, entry.Name()), unix.MNT_DETACH))
			}
			return errors.Join(err, os.RemoveAll(dir))
		}, false},
		{"file gone and restart", func(path string) error { return errors.Join(unix.Unmount(path, unix.MNT_DETACH), os.Remove(path)) }, true},
		{"not a namespace and restart", func(path string) error { return unix.Unmount(path, unix.MNT_DETACH) }, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			config := s.podConfig("bare")
			id := s.pod(config, "")
			c := s.container(id, config, script("main", "sleep 1000"))
			must(t, test.destroy(s.Path("run", "ns", id, "net")))
			if test.restart {
				must(t, s.Restart(t.Context(), testenv.Sandboxd))
			}
			s.podStatus(id)
			if _, code, err := s.exec(c, "true"); err != nil || code != 0 {
				t.Errorf("exec: exit code %d, %v", code, err)
			}
			if _, err := s.CRI.ListPodSandboxStats(t.Context(), &criv1.ListPodSandboxStatsRequest{}); err != nil {
				t.Errorf("stats: %v", err)
			}
			if _, err := s.CRI.PodSandboxStats(t.Context(), &criv1.PodSandboxStatsRequest{PodSandboxId: id}); err != nil {
				t.Errorf("stats of the pod: %v", err)
			}
			for range 2 {
				if err := s.stopPod(id); err != nil {
					t.Errorf("stop: %v", err)
				}
			}
			s.waitAddresses(0, patience)
			if s.networkCalls("DEL", id) == 0 {
				t.Error("the network was not told")
			}
			if _, err := os.Lstat(s.Path("run", "ns", id)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the namespace folder is left: %v", err)
			}
			must(t, s.removePod(id))
		})
	}
}

// sandboxd may die in the middle of a stop, which then comes to its end at the next call.
func TestStopSurvivesADeathInTheMiddle(t *testing.T) {
	w := newSwitches(t)
	s := start(t, testenv.Setup{Configure: withChain(wide, "slow", nil)})
	w.plugin(s.Path("cni"), "slow", "tuning")
	for _, delay := range []time.Duration{50 * time.Millisecond, 400 * time.Millisecond} {
		config := s.podConfig("interrupted")
		id := s.pod(config, "")
		s.container(id, config, script("main", "sleep 1000"))
		w.set("DEL", "sleep 1")
		ended := make(chan error, 1)
		go func() { ended <- s.stopPod(id) }()
		time.Sleep(delay)
		must(t, s.Kill(t.Context(), testenv.Sandboxd))
		must(t, s.Run(testenv.Sandboxd))
		<-ended // either outcome is right: the gateway may have asked again
		w.set("DEL", "")
		must(t, s.WaitReady(t.Context()))
		must(t, errors.Join(s.stopPod(id), s.stopPod(id)))
		s.waitAddresses(0, patience)
		must(t, s.removePod(id))
	}
}

// An operator who suspects the network of a pod is told what its plugins miss.
func TestMissingInterfaceIsFound(t *testing.T) {
	s := start(t, testenv.Setup{})
	whole := s.pod(s.podConfig("whole"), "")
	broken := s.pod(s.podConfig("broken"), "")
	program, err := testenv.Binary(string(testenv.Sandboxd))
	must(t, err)
	look := func() (string, error) {
		out, err := exec.CommandContext(t.Context(), program, "check-state", "--network", "--config", s.ConfigFile(testenv.Sandboxd)).CombinedOutput()
		return string(out), err
	}
	if out, err := look(); err != nil {
		t.Errorf("two whole pods: %v\n%s", err, out)
	}
	s.inside(broken, func() error {
		return exec.CommandContext(t.Context(), "ip", "link", "delete", "eth0").Run()
	})
	out, err := look()
	if err == nil || !strings.Contains(out, "network.check "+broken) || strings.Contains(out, "network.check "+whole) {
		t.Errorf("a pod without its interface: %v\n%s", err, out)
	}
}

// What a network plugin writes before it fails is told in part, however much it is and whether or
// not it is text; nobody waits for an answer that would be too long to arrive.
func TestFloodsBeforeAFailure(t *testing.T) {
	w := newSwitches(t)
	s := start(t, testenv.Setup{Configure: withChain(wide, "flooding", nil)})
	w.plugin(s.Path("cni"), "flooding", "tuning")
	told := func(what string, err error) {
		t.Helper()
		if err == nil || oneOf(err, codes.DeadlineExceeded) || len(err.Error()) > 40<<10 || !strings.Contains(err.Error(), "the last word") {
			t.Errorf("%s: an error of %d bytes: %.300v", what, len(fmt.Sprint(err)), err)
		}
	}
	for what, text := range map[string]string{
		"a little of what is no text": `printf '\377\376' >&2; echo "the last word" >&2; exit 1`,
		"much to the standard output": `printf '{"cniVersion":"1.0.0","code":100,"msg":"'; head -c 3000000 /dev/zero | tr '\0' x; echo 'the last word"}'; exit 1`,
	} {
		w.set("ADD", text)
		_, err := s.try(s.podConfig("flooded"), "", 30*time.Second)
		told("network plugin, "+what, err)
	}
	w.set("ADD", "head -c 3000000 /dev/zero | tr '\\0' x >&2; echo 'the last word' >&2; exit 1")
	_, err := s.try(s.podConfig("flooded"), "", 30*time.Second)
	told("network plugin, much to the standard error", err)
	w.set("ADD", "")

	must(t, s.removePod(s.pod(s.podConfig("flooded"), "")))
}

// Sysctls of an interface are set once its plugin has made it. Those of one that no plugin makes
// undo the pod, and its address is free again.
func TestSysctlsOfInterfaces(t *testing.T) {
	s := start(t, testenv.Setup{})
	podConfig := s.podConfig("set")
	podConfig.Linux.Sysctls = map[string]string{
		"net.ipv4.conf.all.log_martians": "0", "net.ipv4.conf.eth0.log_martians": "1", "net/ipv4/neigh/eth0/app_solicit": "5",
	}
	for _, handler := range []string{testenv.HandlerCrisp, testenv.HandlerStock} {
		podConfig.Metadata.Name = "set-" + handler
		pod := s.pod(podConfig, handler)
		id := s.container(pod, podConfig, script("main", "exec sleep 1000"))
		out, _, err := s.exec(id, "cat", "/proc/sys/net/ipv4/conf/eth0/log_martians", "/proc/sys/net/ipv4/neigh/eth0/app_solicit")
		if err != nil || out != "1\n5\n" {
			t.Errorf("handler %s: %q, %v", handler, out, err)
		}
	}
	held := len(s.addresses())
	for _, name := range []string{"net.ipv4.conf.eth7.log_martians", "net.ipv4.conf.eth0.no_such_thing"} {
		bad := s.podConfig("bad")
		bad.Linux.Sysctls = map[string]string{name: "1"}
		for range 2 {
			_, err := s.try(bad, "", patience)
			if !oneOf(err, codes.InvalidArgument) || !strings.Contains(err.Error(), name) {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	s.waitAddresses(held, patience)
	if pods := s.pods(); len(pods) != 2 {
		t.Errorf("pods %v", pods)
	}
}
