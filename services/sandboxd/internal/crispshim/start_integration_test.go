//go:build integration

package crispshim_test

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	bootapi "github.com/containerd/containerd/api/runtime/bootstrap/v1"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/shimtest"
)

// eachBuild runs a test with the shim as it is delivered and as it is built without cgo.
func eachBuild(t *testing.T, test func(t *testing.T, shim string)) {
	t.Helper()
	t.Run("cgo", func(t *testing.T) { test(t, shimtest.Crisp(t, shimtest.Dir(t)).ShimPath) })
	t.Run("without cgo", func(t *testing.T) { test(t, shimtest.CrispWithoutCgo(t)) })
}

// startShim runs the start command as a runtime does, in a bundle of that name.
func startShim(t *testing.T, shim, bundle, id, sockets string) (answer, said string, err error) {
	t.Helper()
	params, err := proto.Marshal(&bootapi.BootstrapParams{InstanceID: id, Namespace: "ns", SocketDir: &sockets})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), shim, "-namespace", "ns", "-id", id, "-address", "/a", "start")
	var out, errs bytes.Buffer
	cmd.Dir, cmd.Stdin, cmd.Stdout, cmd.Stderr = bundle, bytes.NewReader(params), &out, &errs
	cmd.WaitDelay = time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// inBundle lists the processes that work in a folder.
func inBundle(dir string) []string {
	links, _ := filepath.Glob("/proc/[0-9]*/cwd")
	var out []string
	for _, l := range links {
		if target, err := os.Readlink(l); err == nil && target == dir {
			out = append(out, filepath.Base(filepath.Dir(l)))
		}
	}
	return out
}

func bundleOf(t *testing.T, dir, id, group string) string {
	t.Helper()
	bundle := filepath.Join(dir, id)
	if err := os.Mkdir(bundle, 0o700); err != nil {
		t.Fatal(err)
	}
	config := fmt.Sprintf(`{"annotations":{"io.kubernetes.cri.sandbox-id":%q}}`, group)
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return bundle
}

// A pod has one shim, which lets go of all that belongs to the command that started it, and
// takes its socket along when it ends.
func TestStart(t *testing.T) { eachBuild(t, testStart) }

func testStart(t *testing.T, shim string) {
	dir := shimtest.Dir(t)
	first := bundleOf(t, dir, "one", "pod")
	one, said, err := startShim(t, shim, first, "one", filepath.Join(dir, "s"))
	if err != nil || said != "" {
		t.Fatalf("start: %v, %q", err, said)
	}
	two, said, err := startShim(t, shim, bundleOf(t, dir, "two", "pod"), "two", filepath.Join(dir, "s"))
	if err != nil || said != "" || two != one {
		t.Errorf("second start: %q, want %q; %v, %q", two, one, err, said)
	}
	var result bootapi.BootstrapResult
	if err := proto.Unmarshal([]byte(one), &result); err != nil || result.GetVersion() != 3 {
		t.Fatalf("answer %q, %v", one, err)
	}
	socket := strings.TrimPrefix(result.GetAddress(), "unix://")
	if _, err := os.Lstat(socket); err != nil {
		t.Error(err)
	}
	pids := append(inBundle(first), inBundle(filepath.Join(dir, "two"))...)
	if len(pids) != 1 {
		t.Fatalf("shims %v, want one", pids)
	}
	var pid int
	if _, err := fmt.Sscan(pids[0], &pid); err != nil {
		t.Fatal(err)
	}
	for fd := range 3 {
		if target, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", pid, fd)); err != nil || target != os.DevNull {
			t.Errorf("descriptor %d is %s, %v", fd, target, err)
		}
	}
	if group, err := syscall.Getpgid(pid); err != nil || group != pid {
		t.Errorf("process group %d of %d, %v", group, pid, err)
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	for range 500 {
		if _, err = os.Lstat(socket); errors.Is(err, fs.ErrNotExist) && len(inBundle(first)) == 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("shim or socket is left: %v", err)
}

// A start that fails says why, and leaves neither a process nor a socket.
func TestStartFails(t *testing.T) { eachBuild(t, testStartFails) }

func testStartFails(t *testing.T, shim string) {
	dir := shimtest.Dir(t)
	for name, tc := range map[string]struct {
		id, sockets, says string
		spoil             func(bundle string) error
	}{
		"no config":      {"a", "s", "config.json", func(b string) error { return os.Remove(filepath.Join(b, "config.json")) }},
		"cut config":     {"b", "s", "config.json", func(b string) error { return os.WriteFile(filepath.Join(b, "config.json"), []byte("{"), 0o600) }},
		"long socket":    {"c", strings.Repeat("s", 80), "too long", nil},
		"log is no fifo": {"d", "s", "log", func(b string) error { return os.Mkdir(filepath.Join(b, "log"), 0o700) }},
	} {
		if name == "log is no fifo" && strings.Contains(t.Name(), "without") {
			continue // the second process finds out, when the answer is given
		}
		bundle := bundleOf(t, dir, tc.id, tc.id)
		if tc.spoil != nil {
			if err := tc.spoil(bundle); err != nil {
				t.Fatal(err)
			}
		}
		answer, said, err := startShim(t, shim, bundle, tc.id, filepath.Join(dir, tc.sockets))
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 1 || answer != "" || !strings.Contains(said, tc.says) {
			t.Errorf("%s: %v, %q, %q", name, err, answer, said)
		}
		if pids := inBundle(bundle); len(pids) > 0 {
			t.Errorf("%s: processes left: %v", name, pids)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "s*", "*")); len(left) > 0 {
		t.Errorf("sockets left: %v", left)
	}
}
