package ocistate

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// runtime makes an OCI runtime of a script, which is called as runc is, and notes its calls.
func runtime(t *testing.T, script string) (h pod.Handler, calls string) {
	t.Helper()
	dir := t.TempDir()
	calls = filepath.Join(dir, "calls")
	binary := filepath.Join(dir, "runtime")
	text := "#!/bin/sh\necho \"$*\" >>" + calls + "\n" + script + "\n"
	if err := os.WriteFile(binary, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	return pod.Handler{BinaryName: binary, Root: filepath.Join(dir, "root")}, calls
}

func makeState(t *testing.T, h pod.Handler, id string) {
	t.Helper()
	if err := os.MkdirAll(Dir(h, id), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(Dir(h, id), "state.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestRemove(t *testing.T) {
	for _, tc := range []struct {
		name, script string
		systemd      bool
	}{
		{"the runtime removes it", `rm -r "$2/$5"`, false},
		{"with the driver of systemd", `rm -r "$2/$6"`, true},
		{"the runtime says that it is done", "exit 0", false},
		{"the runtime does not understand it", "echo 'cannot parse state' >&2; exit 1", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h, calls := runtime(t, tc.script)
			h.SystemdCgroup = tc.systemd
			makeState(t, h, "c1")
			makeState(t, h, "c2")
			for range 2 {
				if err := Remove(t.Context(), h, "c1"); err != nil {
					t.Error(err)
				}
			}
			if _, err := os.Lstat(Dir(h, "c1")); !os.IsNotExist(err) {
				t.Errorf("the state: %v, want it gone", err)
			}
			if _, err := os.Lstat(Dir(h, "c2")); err != nil {
				t.Errorf("the state of another container: %v", err)
			}
			want := "--root " + filepath.Dir(Dir(h, "c1")) + " delete --force c1\n"
			if tc.systemd {
				want = strings.Replace(want, " delete", " --systemd-cgroup delete", 1)
			}
			if got, err := os.ReadFile(calls); err != nil || string(got) != want {
				t.Errorf("the runtime was called with %q, %v, want %q", got, err, want)
			}
		})
	}
}

// What cannot be removed stays an error until it can be.
func TestWhatRemainsIsAnError(t *testing.T) {
	testkit.NeedRoot(t)
	h, _ := runtime(t, "echo busy >&2; exit 1")
	makeState(t, h, "c1")
	place := filepath.Join(Dir(h, "c1"), "obstacle")
	if err := errors.Join(os.Mkdir(place, 0o700), unix.Mount("tmpfs", place, "tmpfs", 0, "")); err != nil {
		t.Fatal(err)
	}
	release := func() { _ = unix.Unmount(place, unix.MNT_DETACH) }
	t.Cleanup(release)
	for range 3 {
		err := Remove(t.Context(), h, "c1")
		if !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), Dir(h, "c1")) || !strings.Contains(err.Error(), "busy") {
			t.Errorf("error %v", err)
		}
	}
	release()
	if err := Remove(t.Context(), h, "c1"); err != nil {
		t.Error(err)
	}
}

func TestRuntimeThatIsMissing(t *testing.T) {
	h := pod.Handler{BinaryName: filepath.Join(t.TempDir(), "missing"), Root: t.TempDir()}
	makeState(t, h, "c1")
	if err := Remove(t.Context(), h, "c1"); err != nil {
		t.Error(err)
	}
	if err := Remove(t.Context(), h, "../c1"); !errdefs.IsInvalidArgument(err) {
		t.Errorf("an id that leaves the folder: %v", err)
	}
}
