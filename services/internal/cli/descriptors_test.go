package cli

import (
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

func TestDescriptorsAreNotPassedOn(t *testing.T) {
	dir := t.TempDir()
	inherited, err := syscall.Open(dir, syscall.O_RDONLY, 0) // as from a parent: without close-on-exec
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Close(inherited) }()
	list := func() string {
		out, err := exec.CommandContext(t.Context(), "ls", "-l", "/proc/self/fd").Output()
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	if !strings.Contains(list(), dir) {
		t.Fatal("nothing is passed on anyway")
	}
	if err := keepDescriptors(); err != nil {
		t.Fatal(err)
	}
	if out := list(); strings.Contains(out, dir) {
		t.Errorf("a program is given %s", out)
	}
}
