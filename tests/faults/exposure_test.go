//go:build integration

package faults

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

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

// Descriptors that sandboxd was started with go neither to network plugins nor to shims and
// what they start.
func TestInheritedDescriptorsGoNowhere(t *testing.T) {
	testenv.EachHandler(t, func(t *testing.T, shim string) {
		wrapped := newSwitches(t)
		s := start(t, testenv.Setup{Handler: shim, Configure: onSandboxd(func(settings testenv.Settings) {
			handler(settings, "wrapped", map[string]any{"binary_name": wrapped.runtime()})
		})})
		wrapped.plugin(s.Path("cni"), "logged-bridge", "bridge")
		listings := filepath.Join(wrapped.dir, "listings")
		for _, command := range []string{"ADD", "DEL", "create", "start", "exec", "kill", "delete"} {
			wrapped.set(command, fmt.Sprintf("echo at %[1]s >>%[2]s\nls -l /proc/self/fd >>%[2]s", command, listings))
		}
		secret := t.TempDir()
		inherited, err := syscall.Open(secret, syscall.O_RDONLY, 0) // without close-on-exec
		must(t, err)
		must(t, s.Kill(t.Context(), testenv.Sandboxd))
		err = s.Run(testenv.Sandboxd)
		must(t, syscall.Close(inherited))
		must(t, err)
		must(t, s.WaitReady(t.Context()))

		config := s.podConfig("heirs")
		pod := s.pod(config, "wrapped")
		id := s.container(pod, config, script("main", "ls -l /proc/self/fd; exec sleep 1000"))
		listing, _, err := s.exec(id, "ls", "-l", "/proc/self/fd", "/proc/1/fd")
		must(t, err)
		log := s.status(id).GetLogPath()
		must(t, s.stopPod(pod))
		text, err := os.ReadFile(listings)
		must(t, err)
		output, err := os.ReadFile(log)
		must(t, err)
		for what, list := range map[string]string{"a helper": string(text), "a command": listing, "a container": string(output)} {
			if strings.Contains(list, secret) || !strings.Contains(list, "->") {
				t.Errorf("%s has:\n%s", what, list)
			}
		}
		for _, command := range []string{"ADD", "DEL", "create", "exec"} {
			if !strings.Contains(string(text), "at "+command+"\n") {
				t.Errorf("no helper was seen at %s", command)
			}
		}
	})
}
