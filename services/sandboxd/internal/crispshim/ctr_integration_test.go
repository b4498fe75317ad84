//go:build integration

package crispshim_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/shimtest"
)

// envContainerd names the folder of containerd and ctr, if they are not in PATH.
const envContainerd = "CRISP_TEST_CONTAINERD"

// daemon is a running containerd.
type daemon struct {
	t         *testing.T
	ctr, sock string
	env       []string
}

// startContainerd runs containerd with our shim in its PATH.
func startContainerd(t *testing.T, dir string) *daemon {
	t.Helper()
	handler := shimtest.Crisp(t, dir)
	path := filepath.Dir(handler.ShimPath) + ":" + filepath.Dir(handler.BinaryName) + ":" + os.Getenv(envContainerd) + ":" + os.Getenv("PATH")
	t.Setenv("PATH", path)
	binary, err := exec.LookPath("containerd")
	if err != nil {
		testkit.Lacks(t, "containerd in PATH or $"+envContainerd)
	}
	if version, err := exec.Command(binary, "--version").Output(); err != nil || !strings.Contains(string(version), " v2.") {
		testkit.Lacks(t, fmt.Sprintf("containerd 2 but %q, %v", version, err))
	}
	d := &daemon{t: t, sock: filepath.Join(dir, "c.sock"), env: os.Environ()}
	if d.ctr, err = exec.LookPath("ctr"); err != nil {
		testkit.Lacks(t, "ctr in PATH or $"+envContainerd)
	}
	config := filepath.Join(dir, "config.toml")
	text := fmt.Sprintf("version = 3\nroot = %q\nstate = %q\ndisabled_plugins = [%s]\n[grpc]\naddress = %q\n",
		filepath.Join(dir, "root"), filepath.Join(dir, "state"),
		`"io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "io.containerd.nri.v1.nri"`, d.sock)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(binary, "-c", config)
	cmd.Env = d.env
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	})
	for range 100 {
		if _, code := d.run("", "version"); code == 0 {
			return d
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatal("containerd does not answer")
	return nil
}

// run runs ctr and returns what it printed and its exit code.
func (d *daemon) run(stdin string, args ...string) (string, int) {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(d.t.Context(), 30*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, d.ctr, append([]string{"-a", d.sock}, args...)...)
	cmd.Stdin, cmd.Env = strings.NewReader(stdin), d.env
	var out bytes.Buffer
	cmd.Stdout = &out
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		d.t.Fatal(err)
	}
	return out.String(), cmd.ProcessState.ExitCode()
}

// containerd runs containers with this shim as with any other.
func TestContainerd(t *testing.T) {
	dir := shimtest.Dir(t)
	d := startContainerd(t, dir)
	rootfs := shimtest.Rootfs(t, dir)
	run := []string{"run", "--runtime", "io.containerd.crisp.v1", "--rootfs"}
	out, code := d.run("in\n", append(run, "--rm", rootfs, "one", "/bin/sh", "-c", "echo hello; exit 3")...)
	if code != 3 || out != "hello\n" {
		t.Errorf("run: %q, %d", out, code)
	}
	if out, code = d.run("", append(run, "-d", rootfs, "two", "/bin/sleep", "1000")...); code != 0 {
		t.Fatalf("run -d: %q, %d", out, code)
	}
	if out, code = d.run("data\n", "task", "exec", "--exec-id", "x", "two", "/bin/sh", "-c", "cat; exit 5"); code != 5 || out != "data\n" {
		t.Errorf("exec: %q, %d", out, code)
	}
	for _, step := range []struct {
		args []string
		want string
	}{
		{[]string{"task", "metrics", "two"}, "pids.current"},
		{[]string{"task", "pause", "two"}, ""},
		{[]string{"task", "ls"}, "PAUSED"},
		{[]string{"task", "resume", "two"}, ""},
		{[]string{"task", "ls"}, "RUNNING"},
		{[]string{"task", "kill", "-s", "KILL", "two"}, ""},
	} {
		if out, code := d.run("", step.args...); code != 0 || !strings.Contains(out, step.want) {
			t.Errorf("%v: %q, %d", step.args, out, code)
		}
	}
	if _, code = d.run("", "task", "rm", "two"); code != 137 && code != 0 {
		t.Errorf("task rm: %d", code)
	}
	if _, code = d.run("", "containers", "rm", "two"); code != 0 {
		t.Errorf("containers rm: %d", code)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "state", "io.containerd.runtime.v2.task", "default", "*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// The shim is one of many on a node: it links nothing that is not for it.
func TestLean(t *testing.T) {
	out, err := exec.Command("go", "list", "-tags", "no_grpc", "-deps",
		"github.com/crisp-cri/crisp/services/sandboxd/cmd/containerd-shim-crisp-v1").Output()
	if err != nil {
		t.Fatal(err)
	}
	for pkg := range strings.Lines(string(out)) {
		pkg = strings.TrimSpace(pkg)
		for _, heavy := range []string{"net/http", "text/template", "k8s.io/", "github.com/prometheus/", "github.com/containerd/nri", "google.golang.org/grpc/server"} {
			if pkg == heavy || strings.HasSuffix(heavy, "/") && strings.HasPrefix(pkg, heavy) {
				t.Errorf("links %s", pkg)
			}
		}
		if pkg == "google.golang.org/grpc" {
			t.Error("links gRPC")
		}
	}
}
