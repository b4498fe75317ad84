//go:build integration

package faults

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// What listens for operators on loopback, where a pod in the network of the host can ask too,
// shows how the processes are but nothing of their inside, and takes no order.
func TestOperatorsListenersGiveNothingAway(t *testing.T) {
	_ = start(t, testenv.Setup{})
	client := http.Client{Timeout: 5 * time.Second}
	for port := 9670; port <= 9673; port++ {
		for path, want := range map[string]int{
			"/healthz": http.StatusOK, "/loglevel": http.StatusNotFound, "/debug/pprof/": http.StatusNotFound,
			"/debug/pprof/cmdline": http.StatusNotFound, "/debug/vars": http.StatusNotFound,
		} {
			answer, err := client.Get(fmt.Sprintf("http://127.0.0.1:%d%s", port, path))
			must(t, err)
			must(t, answer.Body.Close())
			if answer.StatusCode != want {
				t.Errorf("port %d answers %s with %s, want %d", port, path, answer.Status, want)
			}
		}
	}
}

// surroundings is a shell script that tells what a process was given by whom it was started.
const surroundings = `ls -l /proc/self/fd; grep -E "Sig(Blk|Ign)" /proc/self/status; echo umask $(umask); env; grep "open files" /proc/self/limits`

// What sandboxd and the hub were started with goes to nobody that they start or have started:
// descriptors to none, variables, ignored signals, a mask and limits to no container or hook.
func TestInheritedThingsGoNowhere(t *testing.T) {
	testenv.EachHandler(t, func(t *testing.T, shim string) {
		wrapped := newSwitches(t)
		s := start(t, testenv.Setup{Handler: shim, Configure: onSandboxd(func(settings testenv.Settings) {
			handler(settings, "wrapped", map[string]any{"binary_name": wrapped.runtime()})
		})})
		wrapped.plugin(s.Path("cni"), "logged-bridge", "bridge")
		heard := func(name string) string { return s.Path("logs", "heard-"+name) } // the hub's plugins may write there, too
		for _, command := range []string{"ADD", "DEL", "create", "start", "exec", "kill", "delete"} {
			wrapped.set(command, fmt.Sprintf("(%s) >>%s", surroundings, heard(command)))
		}
		executable := func(path, after string, name string) {
			must(t, os.WriteFile(path, fmt.Appendf(nil, "#!/bin/sh\n(%s) >>%s 2>&1\n%s\n", surroundings, heard(name), after), 0o755))
		}
		hook := filepath.Join(wrapped.dir, "hook")
		executable(hook, "", "hook")

		secret := t.TempDir()
		inherited, err := syscall.Open(secret, syscall.O_RDONLY, 0) // without close-on-exec
		must(t, err)
		mask := syscall.Umask(0o027)
		signal.Ignore(syscall.SIGINT, syscall.SIGHUP) // as a shell does for what it runs in the background
		for _, p := range []testenv.Process{testenv.Sandboxd, testenv.NRIHub} {
			must(t, s.Kill(t.Context(), p))
			err = errors.Join(err, s.Run(p))
		}
		signal.Reset(syscall.SIGINT, syscall.SIGHUP)
		syscall.Umask(mask)
		must(t, syscall.Close(inherited))
		must(t, err)
		must(t, s.WaitReady(t.Context()))
		executable(s.Path("nri", "plugins", "50-listing"), "exec sleep 1000", "plugin")
		b := newBookkeeper()
		b.create = func(*nri.PodSandbox, *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
			a := &nri.ContainerAdjustment{}
			a.AddHooks(&nri.Hooks{CreateRuntime: []*nri.Hook{{Path: hook}}})
			return a, nil, nil
		}
		s.connect(b, "10", "hooks")

		config := s.podConfig("heirs")
		pod := s.pod(config, "wrapped")
		id := s.container(pod, config, script("main", "("+surroundings+"); exec sleep 1000"))
		out, _, err := s.exec(id, "sh", "-c", surroundings+"; ls -l /proc/1/fd")
		must(t, err)
		all := map[string]string{"a command": out}
		text, err := os.ReadFile(s.status(id).GetLogPath())
		must(t, err)
		all["a container"] = string(text)
		must(t, s.stopPod(pod))
		for _, name := range []string{"ADD", "DEL", "create", "exec", "delete", "hook", "plugin"} {
			eventually(t, 30*time.Second, name+" is heard", func() error {
				text, err := os.ReadFile(heard(name))
				if err == nil && !strings.Contains(string(text), "open files") {
					err = fmt.Errorf("heard is %q", text)
				}
				all[name] = string(text)
				return err
			})
		}
		for who, text := range all {
			inside := strings.HasPrefix(who, "a ")
			if own := inside || who == "hook" || who == "plugin"; own && strings.Contains(text, "GOTRACEBACK") {
				t.Errorf("%s has the variables of who started it:\n%s", who, text)
			}
			if ignored := regexp.MustCompile(`SigIgn:\s*[0-9a-f]*([0-9a-f])\b`).FindStringSubmatch(text); ignored == nil || strings.Contains("1235679abdef", ignored[1]) { // SIGHUP and SIGINT are the lowest bits
				t.Errorf("%s ignores signals:\n%s", who, text)
			}
			if inside && !strings.Contains(text, "umask 0022") {
				t.Errorf("%s has another mask:\n%s", who, text)
			}
			for line := range strings.Lines(text) {
				before, target, found := strings.Cut(strings.TrimSpace(line), " -> ")
				fields := strings.Fields(before)
				if !found || expectedDescriptor.MatchString(target) || strings.HasPrefix(target, s.Path("logs")) {
					continue
				}
				// NRI gives a plugin its connection so. The stock shim leaves its socket to the OCI
				// runtime, which closes it before it runs anything.
				if allowed := who == "plugin" || shim == testenv.HandlerStock && !inside && who != "hook"; allowed && fields[len(fields)-1] == "3" && strings.HasPrefix(target, "socket:") {
					continue
				}
				t.Errorf("%s has open: %s", who, line)
			}
		}
	})
}
