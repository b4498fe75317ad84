package procs

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/shimtest"
)

// The program that works in a folder is found by its oldest process, and only if its file is
// there.
func TestProgramIn(t *testing.T) {
	dir := t.TempDir()
	if got := ProgramIn(dir); got != "" {
		t.Errorf("nobody works there, got %q", got)
	}
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	if sleep, err = filepath.EvalSymlinks(sleep); err != nil {
		t.Fatal(err)
	}
	copied := filepath.Join(t.TempDir(), "parent")
	data, err := os.ReadFile(sleep)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(copied, data, 0o755); err != nil {
		t.Fatal(err)
	}

	// A shell that works there runs a program that does, too: the shell it is.
	shell, err := filepath.EvalSymlinks("/bin/sh")
	if err != nil {
		t.Fatal(err)
	}
	shimtest.StartIn(t, dir, "/bin/sh", "-c", "sleep 1000; true")
	testkit.Eventually(t, testkit.Patience, func() error {
		if pids := In(dir); len(pids) != 2 {
			return fmt.Errorf("processes %v, want the shell and its child", pids)
		}
		return nil
	})
	if got := ProgramIn(dir); got != shell {
		t.Errorf("program %q, want %q", got, shell)
	}
	for _, pid := range In(dir) {
		killIfIn(pid, dir)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if pids := In(dir); len(pids) > 0 {
			return fmt.Errorf("processes %v are left", pids)
		}
		return nil
	})

	shimtest.StartIn(t, dir, copied, "1000")
	testkit.Eventually(t, testkit.Patience, func() error {
		if got := ProgramIn(dir); got != copied {
			return fmt.Errorf("program %q, want %q", got, copied)
		}
		return nil
	})
	if err := os.Remove(copied); err != nil {
		t.Fatal(err)
	}
	if got := ProgramIn(dir); got != "" {
		t.Errorf("a program whose file is gone: %q", got)
	}
	// Another file of that name is not what runs.
	if err := os.WriteFile(copied, []byte("other"), 0o755); err != nil {
		t.Fatal(err)
	}
	if got := ProgramIn(dir); got != "" {
		t.Errorf("another file of the program's name: %q", got)
	}
}
