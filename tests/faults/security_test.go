//go:build integration

package faults

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// The files that are made for a pod can be read by whoever runs in it, whatever the daemon's
// own mask is, and written only where the root file system can.
func TestGeneratedFilesAreReadableAndNoMore(t *testing.T) {
	s := start(t, testenv.Setup{})
	for _, mapped := range []bool{false, true} {
		must(t, s.Stop(t.Context(), testenv.Sandboxd))
		mask := unix.Umask(0o077)
		if mapped {
			unix.Umask(0)
		}
		err := s.Run(testenv.Sandboxd)
		unix.Umask(mask)
		must(t, err)
		must(t, s.WaitReady(t.Context()))
		podConfig := s.podConfig(fmt.Sprintf("files-%t", mapped))
		podConfig.DnsConfig = &criv1.DNSConfig{Servers: []string{"192.0.2.1"}}
		options := &criv1.NamespaceOption{}
		if mapped {
			ids := []*criv1.IDMapping{{HostId: 200_000, Length: 65_536}}
			options.UsernsOptions = &criv1.UserNamespace{Mode: criv1.NamespaceMode_POD, Uids: ids, Gids: ids}
		}
		podConfig.Linux.SecurityContext.NamespaceOptions = options
		pod := s.pod(podConfig, "")
		config := script("main", "exec sleep 1000")
		config.Linux.SecurityContext = &criv1.LinuxContainerSecurityContext{
			RunAsUser: &criv1.Int64Value{Value: 1000}, ReadonlyRootfs: true, NamespaceOptions: options,
		}
		id := s.container(pod, podConfig, config)
		out, code, err := s.exec(id, "sh", "-c", `cat /etc/hosts /etc/hostname /etc/resolv.conf &&
			stat -c '%a %u:%g %n' /etc/hosts /etc/hostname /etc/resolv.conf /etc; touch /dev/shm/x && echo shm;
			for f in hosts hostname resolv.conf; do echo x 2>/dev/null > /etc/$f && echo wrote $f; done; true`)
		if err != nil || code != 0 {
			t.Errorf("mapped %t: %q, code %d, %v", mapped, out, code, err)
		}
		for _, want := range []string{
			"192.0.2.1", "localhost", "644 0:0 /etc/hosts", "644 0:0 /etc/hostname", "644 0:0 /etc/resolv.conf", "755 0:0 /etc\n", "shm",
		} {
			if !strings.Contains(out, want) {
				t.Errorf("mapped %t: lacks %q:\n%s", mapped, want, out)
			}
		}
		if strings.Contains(out, "wrote") {
			t.Errorf("mapped %t: a read-only file was written:\n%s", mapped, out)
		}
	}
}

// asStranger runs a command on the node as a user who has nothing to do with the system.
func asStranger(t *testing.T, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 54_321, Gid: 54_321}}
	cmd.Dir = "/"
	out, _ := cmd.Output() // what may not be entered is an error of find, and meant to be one
	return strings.TrimSpace(string(out))
}

// Who is nobody to the system, on the node or in a pod in the node's network, gets at no
// socket, bundle or stream of it.
func TestNothingIsOpenToStrangers(t *testing.T) {
	s := start(t, testenv.Setup{})
	podConfig := s.podConfig("guarded")
	pod := s.pod(podConfig, "")
	config := script("main", "exec sleep 1000")
	config.Envs = []*criv1.KeyValue{{Key: "SECRET", Value: []byte("x")}}
	id := s.container(pod, podConfig, config)
	must(t, os.Chmod(s.Path(), 0o755))
	if seen := asStranger(t, "find", s.Path(), "-maxdepth", "0", "-readable"); seen == "" {
		t.Fatal("the stranger sees nothing at all, so that the test would show nothing")
	}
	for what, test := range map[string][]string{
		"sockets": {"-type", "s", "-writable"}, "bundles": {"-name", "config.json", "-readable"}, "keys": {"-name", "*.nk", "-readable"},
		"databases": {"-name", "*.db", "-readable"}, "files of others": {"-type", "f", "-writable"},
	} {
		if found := asStranger(t, "find", append([]string{s.Path("run"), s.Path("lib"), s.Path("nri")}, test...)...); found != "" {
			t.Errorf("a stranger gets at %s:\n%s", what, found)
		}
	}

	unixSockets, err := os.ReadFile("/proc/net/unix") // of the test's own network namespace
	must(t, err)
	for line := range strings.Lines(string(unixSockets)) {
		if fields := strings.Fields(line); len(fields) > 7 && strings.HasPrefix(fields[7], "@") {
			t.Errorf("abstract socket %s", fields[7])
		}
	}

	bus, err := net.DialTimeout("tcp", s.busAddress(), 5*time.Second)
	must(t, err)
	defer bus.Close()
	must(t, bus.SetDeadline(time.Now().Add(10*time.Second)))
	_, err = bus.Write([]byte("CONNECT {\"verbose\":true}\r\nSUB > 1\r\nPING\r\n"))
	must(t, err)
	refused := false
	for r := bufio.NewScanner(bus); r.Scan(); {
		refused = refused || strings.Contains(r.Text(), "Authorization Violation")
		if strings.HasPrefix(r.Text(), "PONG") {
			t.Error("the bus takes a client without a key")
			break
		}
	}
	if !refused {
		t.Error("the bus did not refuse a client without a key")
	}

	answer, err := s.CRI.Exec(t.Context(), &criv1.ExecRequest{ContainerId: id, Cmd: []string{"true"}, Stdout: true})
	must(t, err)
	base := answer.GetUrl()[:strings.LastIndex(answer.GetUrl(), "/")]
	for _, path := range []string{"/", "/" + id, "/AAAAAAAA"} {
		response, err := http.Post(base+path, "", nil)
		must(t, err)
		must(t, response.Body.Close())
		if response.StatusCode < 400 {
			t.Errorf("stream %s without a token: %s", path, response.Status)
		}
	}
}

// busAddress is where the bus listens.
func (s *system) busAddress() string {
	s.t.Helper()
	raw, err := os.ReadFile(s.ConfigFile(testenv.Gateway))
	must(s.t, err)
	found := regexp.MustCompile(`nats://([^'"]+)`).FindStringSubmatch(string(raw))
	if found == nil {
		return "127.0.0.1:4222"
	}
	return found[1]
}

// expectedDescriptor matches what a process may have open that was started for somebody: its
// streams, and the folder that it is just reading.
var expectedDescriptor = regexp.MustCompile(`^(pipe:\[\d+\]|/dev/null|/dev/pts/\d+|/dev/console|/proc/\d+/fd)$`)

// Containers and commands in them have the limits that sandboxd was started with, and not what
// the processes on the way have raised for themselves.
func TestLimitsAreInheritedUnraised(t *testing.T) {
	const list = "ulimit -Sn; ulimit -Hn; ulimit -Sc; ulimit -Hc; ulimit -Sl; ulimit -Hl"
	own, err := exec.Command("sh", "-c", list).Output()
	must(t, err)
	s := start(t, testenv.Setup{})
	for _, handler := range []string{"", "runc"} {
		podConfig := s.podConfig("limits" + handler)
		pod := s.pod(podConfig, handler)
		config := script("main", list+"; echo done; exec sleep 1000")
		id := s.container(pod, podConfig, config)
		out, _, err := s.exec(id, "sh", "-c", list)
		if err != nil || out != string(own) {
			t.Errorf("handler %q: a command has %q, the node %q, %v", handler, out, own, err)
		}
		s.waitLog(podConfig, config, "done")
		raw, err := os.ReadFile(filepath.Join(podConfig.GetLogDirectory(), config.GetLogPath()))
		must(t, err)
		var have []string
		for line := range strings.Lines(string(raw)) {
			fields := strings.Fields(line)
			have = append(have, fields[len(fields)-1])
		}
		if want := append(strings.Fields(string(own)), "done"); !slices.Equal(have, want) {
			t.Errorf("handler %q: the container has %q, want %q", handler, have, want)
		}
	}
}

// A container's processes, commands in it and programs that are started for it have their
// streams open and nothing else, also while much else is going on.
func TestNoDescriptorReachesAContainer(t *testing.T) {
	const list = "for f in /proc/self/fd/*; do echo fd $f $(readlink $f); done"
	s := start(t, testenv.Setup{})
	plugin, err := os.ReadFile(s.Path("cni", "logged-bridge"))
	must(t, err)
	lists := strings.Replace(string(plugin), "\nexec ", "\n("+list+") >> "+s.Path("cni", "descriptors")+"\nexec ", 1)
	must(t, os.WriteFile(s.Path("cni", "logged-bridge"), []byte(lists), 0o755))
	podConfig := s.podConfig("descriptors")
	pod := s.pod(podConfig, "")
	check := func(what, out string) {
		for line := range strings.Lines(out) {
			fields := strings.Fields(line)
			i := slices.Index(fields, "fd")
			if i < 0 || i+2 >= len(fields) {
				continue // the folder's own descriptor, which is closed again
			}
			if !expectedDescriptor.MatchString(fields[i+2]) {
				t.Errorf("%s: %s", what, line)
			}
		}
		if !strings.Contains(out, "/proc/self/fd/0") {
			t.Errorf("%s: no list: %q", what, out)
		}
	}
	busy := s.container(pod, podConfig, script("busy", "while :; do echo line; done"))
	target := s.container(pod, podConfig, script("target", "exec sleep 1000"))
	var wg sync.WaitGroup
	for worker := range 4 {
		wg.Go(func() {
			for n := range scaled(t, 4) {
				config := script(fmt.Sprintf("c%d-%d", worker, n), list)
				config.Tty = n%2 == 1
				id, err := s.create(pod, podConfig, config)
				if err == nil {
					err = s.startContainer(id)
				}
				if err != nil {
					t.Errorf("create and start: %v", err)
					return
				}
				out, _, err := s.exec(target, "sh", "-c", list)
				if err != nil {
					t.Errorf("command: %v", err)
				}
				check("command", out)
				s.waitExit(id, patience)
				raw, err := os.ReadFile(filepath.Join(podConfig.GetLogDirectory(), config.GetLogPath()))
				if err != nil {
					t.Errorf("log: %v", err)
				}
				check("container", string(raw))
			}
		})
	}
	wg.Wait()
	must(t, s.stopContainer(busy, 0))
	raw, err := os.ReadFile(s.Path("cni", "descriptors"))
	must(t, err)
	check("network plugin", string(raw))

	// A folder that leads through a descriptor leads nowhere.
	for _, dir := range []string{"/proc/self/fd/7", "/proc/self/fd/8/../..", "/proc/1/cwd", "/dev/fd/9"} {
		config := script("lost-"+strings.ReplaceAll(dir, "/", "-"), "pwd; ls")
		config.WorkingDir = dir
		id, err := s.create(pod, podConfig, config)
		if !oneOf(err, codes.InvalidArgument) {
			t.Errorf("working directory %s: container %s, %v", dir, id, err)
		}
	}
}
