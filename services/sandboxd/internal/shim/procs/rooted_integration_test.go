//go:build integration

package procs

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/internal/testkit"
)

// rootFolder is a root file system of its own, that has the machine's programs.
func rootFolder(t *testing.T) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	dir, null := t.TempDir(), t.TempDir()
	// The shell reads from it in the background.
	if err := os.MkdirAll(filepath.Join(null, "dev"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(null, "dev", "null"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	m := mount.Mount{Type: "overlay", Source: "overlay", Options: []string{"ro", "lowerdir=/usr:" + null}}
	if err := m.Mount(dir); err != nil {
		testkit.Lacks(t, "overlayfs: "+err.Error())
	}
	t.Cleanup(func() { _ = mount.UnmountAll(dir, unix.MNT_DETACH) })
	if _, err := os.Stat(filepath.Join(dir, "bin", "sh")); err != nil {
		testkit.Lacks(t, "programs in /usr")
	}
	return dir
}

// inside starts a shell with a root, in a mount namespace of its own if it is a container's.
func inside(t *testing.T, root, script string, container bool) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/bin/sh", "-c", script)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	if container {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNS
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd
}

// What a container has started is found and ended also when its first process is gone, and nothing
// else: not what another container or somebody of the machine runs.
func TestRootedProcessesAreKilled(t *testing.T) {
	root, other := rootFolder(t), rootFolder(t)
	first := inside(t, root, "sleep 1000 & exec sleep 1000", true)
	stranger := inside(t, other, "exec sleep 1000", true)
	admin := inside(t, root, "exec sleep 1000", false)
	of := Rooted(root)
	testkit.Eventually(t, testkit.Patience, func() error {
		if pids, err := of.Pids(); err != nil || len(pids) != 2 {
			return fmt.Errorf("processes %v, %w", pids, err)
		}
		return nil
	})
	_ = first.Process.Kill()
	_ = first.Wait()
	testkit.Eventually(t, testkit.Patience, func() error {
		if pids, err := of.Pids(); err != nil || len(pids) != 1 {
			return fmt.Errorf("processes %v, %w", pids, err)
		}
		return nil
	})
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	if err := of.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	if pids, err := of.Pids(); err != nil || len(pids) > 0 {
		t.Errorf("processes %v, %v", pids, err)
	}
	for name, cmd := range map[string]*exec.Cmd{"another container's": stranger, "the machine's": admin} {
		if !Running(cmd.Process.Pid) {
			t.Errorf("%s process was killed", name)
		}
	}
}

func TestRootThatIsGoneHasNoProcesses(t *testing.T) {
	t.Parallel()
	of := Rooted(filepath.Join(t.TempDir(), "gone"))
	if pids, err := of.Pids(); err != nil || len(pids) > 0 {
		t.Errorf("processes %v, %v", pids, err)
	}
	if err := of.Kill(t.Context()); err != nil {
		t.Error(err)
	}
}
