// Package shimtest holds what tests of shims need: a run folder, a root file system, OCI
// specifications, and fake shims that misbehave in every way that is known. It is used by
// tests only.
package shimtest

import (
	"bytes"
	"crypto/rand"
	"debug/elf"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	runtimespec "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Variables of the environment that name the real parts, if they are not in PATH.
const (
	envShim  = "CRISP_TEST_SHIM"
	envRunc  = "CRISP_TEST_RUNC"
	envCrisp = "CRISP_TEST_CRISP_SHIM"
)

// Dir makes a run folder with a name that is short enough for sockets.
func Dir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "cs")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("run folder not removable: %v", err)
		}
	})
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	return dir
}

// ID makes the id of a sandbox or container.
func ID() string {
	var b [32]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// Handler is the handler of the stock shim with the real runc. It skips the test if one of
// them is missing or the test does not run as root.
func Handler(t testing.TB, dir string) pod.Handler {
	t.Helper()
	testkit.NeedRoot(t)
	return pod.Handler{
		Name:        "runc",
		RuntimeType: "io.containerd.runc.v2",
		ShimPath:    part(t, envShim, "containerd-shim-runc-v2"),
		BinaryName:  part(t, envRunc, "runc"),
		Root:        filepath.Join(dir, "runc"),
		Sandboxer:   "podsandbox",
	}
}

// Crisp is the handler of our own shim with the real runc. The shim is built once per test
// program, which calls Cleanup at its end, unless the environment names one.
func Crisp(t testing.TB, dir string) pod.Handler {
	t.Helper()
	h := Handler(t, dir)
	h.Name, h.RuntimeType = "crisp", "io.containerd.crisp.v1"
	if h.ShimPath = os.Getenv(envCrisp); h.ShimPath != "" {
		return h
	}
	var err error
	if h.ShimPath, err = buildCrisp(); err != nil {
		t.Fatal(err)
	}
	return h
}

// CrispWithoutCgo is the path of our own shim as it is built without cgo, which starts in
// another way.
func CrispWithoutCgo(t testing.TB) string {
	t.Helper()
	path, err := compile(crispShim, "containerd-shim-crisp-v1", "CGO_ENABLED=0", "-tags", "no_grpc")
	if err != nil {
		t.Fatal(err)
	}
	return path
}

const crispShim = "github.com/crisp-cri/crisp/services/sandboxd/cmd/containerd-shim-crisp-v1"

// buildCrisp builds our own shim as it is delivered.
var buildCrisp = sync.OnceValues(func() (string, error) {
	return compile(crispShim, "containerd-shim-crisp-v1", "CGO_ENABLED=1", "-tags", "no_grpc netgo osusergo", "-ldflags", "-s -w -extldflags -static")
})

func part(t testing.TB, env, name string) string {
	t.Helper()
	if path := os.Getenv(env); path != "" {
		return path
	}
	path, err := exec.LookPath(name)
	if err != nil {
		testkit.Lacks(t, name+" in PATH or $"+env)
	}
	return path
}

// Rootfs makes a root file system with the machine's busybox and returns its path.
func Rootfs(t testing.TB, dir string) string {
	t.Helper()
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		testkit.Lacks(t, "busybox in PATH")
	}
	root := filepath.Join(dir, "rootfs")
	for _, d := range []string{"bin", "proc", "dev", "sys", "tmp"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	files, err := libraries(busybox)
	if err != nil {
		t.Fatal(err)
	}
	files["/bin/busybox"] = busybox
	for at, from := range files {
		if err := copyFile(filepath.Join(root, at), from); err != nil {
			t.Fatal(err)
		}
	}
	for _, applet := range []string{"sh", "sleep", "true", "cat", "echo", "date", "seq", "kill", "head", "ps", "stty", "dd", "yes"} {
		if err := os.Symlink("busybox", filepath.Join(root, "bin", applet)); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// libraryDirs are where a program's libraries lie.
var libraryDirs = [...]string{"/lib64", "/lib", "/usr/lib64", "/usr/lib", "/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu"}

// libraries are the files that a program needs to run, by the path at which it looks for
// them; none for a static one.
func libraries(program string) (map[string]string, error) {
	out := map[string]string{}
	queue := []string{program}
	for len(queue) > 0 {
		f, err := elf.Open(queue[0])
		if err != nil {
			return nil, err
		}
		queue = queue[1:]
		needed, err := f.ImportedLibraries()
		if err == nil {
			if s := f.Section(".interp"); s != nil {
				var loader []byte
				if loader, err = s.Data(); err == nil {
					needed = append(needed, string(bytes.TrimRight(loader, "\x00")))
				}
			}
		}
		if err = errors.Join(err, f.Close()); err != nil {
			return nil, err
		}
		for _, name := range needed {
			path, err := library(name)
			if err != nil {
				return nil, err
			}
			if _, known := out[path]; !known {
				out[path] = path
				queue = append(queue, path)
			}
		}
	}
	return out, nil
}

// library finds a library of the machine.
func library(name string) (string, error) {
	if filepath.IsAbs(name) {
		return name, nil
	}
	for _, dir := range libraryDirs {
		path := filepath.Join(dir, name)
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("library %s: %w", name, os.ErrNotExist)
}

func copyFile(to, from string) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	return os.WriteFile(to, data, 0o755)
}

// Group is the name of the control group above those of the containers of Spec. Each test program
// has one of its own, so that several can run side by side. Tests.Run removes it.
func Group() string { return "crisp-shimtest-" + strconv.Itoa(os.Getpid()) }

// Groups are the control groups of a container of Spec, in all hierarchies; without an id, those
// above.
func Groups(id string) []string {
	var found []string
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
		all, _ := filepath.Glob(filepath.Join(root, Group(), id)) // the pattern is well-formed
		found = append(found, all...)
	}
	return found
}

// Spec is the OCI specification of a container.
func Spec(t testing.TB, sandboxID, containerID string, terminal bool, args ...string) []byte {
	t.Helper()
	s := runtimespec.Spec{
		Version:     runtimespec.Version,
		Root:        &runtimespec.Root{Path: "rootfs"},
		Annotations: map[string]string{pod.AnnotationSandboxID: sandboxID},
		Process: &runtimespec.Process{
			Args: args, Cwd: "/", Env: []string{"PATH=/bin"}, Terminal: terminal,
			Capabilities: &runtimespec.LinuxCapabilities{},
		},
		Mounts: []runtimespec.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755", "size=64k"}},
			{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"newinstance", "ptmxmode=0666", "mode=0620"}},
		},
		Linux: &runtimespec.Linux{
			CgroupsPath: "/" + Group() + "/" + containerID,
			Namespaces: []runtimespec.LinuxNamespace{
				{Type: runtimespec.PIDNamespace},
				{Type: runtimespec.MountNamespace},
				{Type: runtimespec.IPCNamespace},
				{Type: runtimespec.UTSNamespace},
			},
		},
	}
	data, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// Process is a further process for a container of Spec.
func Process(args ...string) runtimespec.Process {
	return runtimespec.Process{
		Args: args, Cwd: "/", Env: []string{"PATH=/bin"}, Capabilities: &runtimespec.LinuxCapabilities{},
	}
}

// Fake is the handler of a fake shim with the given behaviour; see package fakeshim for the
// modes. The shim is built once per test program, which calls
// Cleanup at its end.
func Fake(t testing.TB, dir, mode, sandboxer string) pod.Handler {
	t.Helper()
	binary := filepath.Join(dir, "fakeshim")
	if _, err := os.Stat(binary); err != nil {
		built, err := build()
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Link(built, binary); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(dir, "containerd-shim-"+mode+"-v1")
	if err := os.Symlink(binary, path); err != nil && !os.IsExist(err) {
		t.Fatal(err)
	}
	return pod.Handler{Name: mode, RuntimeType: "io.containerd." + mode + ".v1", ShimPath: path, Sandboxer: sandboxer}
}

// NothingLeft fails the test if a fake shim, or a container of one, is left of a test with that
// run folder: a process, a mount, a bundle, a socket, a FIFO or a control group.
func NothingLeft(t testing.TB, dir string, containers ...string) {
	t.Helper()
	links, _ := filepath.Glob("/proc/[0-9]*/exe")
	for _, l := range links {
		if target, err := os.Readlink(l); err == nil && strings.TrimSuffix(target, " (deleted)") == filepath.Join(dir, "fakeshim") {
			t.Errorf("process left: %s", filepath.Dir(l))
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Error(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, dir+"/") {
			t.Errorf("mount left: %s", line)
		}
	}
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && (d.Type()&(fs.ModeSocket|fs.ModeNamedPipe) != 0 || filepath.Base(filepath.Dir(path)) == "shims") {
			t.Errorf("left: %s", path)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	for _, id := range containers {
		if left := Groups(id); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
}

// build builds the fake shim.
var build = sync.OnceValues(func() (string, error) {
	const pkg = "github.com/crisp-cri/crisp/services/sandboxd/internal/shim/shimtest/fakeshim"
	return compile(pkg, "fakeshim", "CGO_ENABLED=0", "-ldflags", "-s -w")
})

// built are the folders of the programs that were built.
var built struct {
	mu   sync.Mutex
	dirs []string
}

// compile builds a static program.
func compile(pkg, name, cgo string, flags ...string) (string, error) {
	dir, err := os.MkdirTemp("", "crisp-built")
	if err != nil {
		return "", err
	}
	built.mu.Lock()
	built.dirs = append(built.dirs, dir)
	built.mu.Unlock()
	binary := filepath.Join(dir, name)
	args := append([]string{"build", "-trimpath", "-o", binary}, flags...)
	cmd := exec.Command("go", append(args, pkg)...)
	cmd.Env = append(os.Environ(), cgo)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build: %w\n%s", err, out)
	}
	return binary, nil
}

// Tests are tests of a package after which the programs that were built for them and their control
// groups are removed.
type Tests struct{ *testing.M }

// Run implements goleak.TestingM.
func (t Tests) Run() int {
	code := t.M.Run()
	built.mu.Lock()
	defer built.mu.Unlock()
	for _, dir := range built.dirs {
		_ = os.RemoveAll(dir)
	}
	for _, group := range Groups("") {
		_ = os.Remove(group)
	}
	return code
}

// StartIn starts a program that waits, in a folder, and collects it when it ends.
func StartIn(t testing.TB, dir string, args ...string) (pid int, ended <-chan struct{}) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
	cmd.Dir = dir
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-done
	})
	return cmd.Process.Pid, done
}
