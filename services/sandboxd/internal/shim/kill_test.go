package shim

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/bundle"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/shimtest"
)

// control makes the control group of a container of shimtest.Spec.
func control(t *testing.T, id string) (enter func(pid int)) {
	t.Helper()
	root := "/sys/fs/cgroup/pids"
	if _, err := os.Stat(root); err != nil {
		root = "/sys/fs/cgroup"
	}
	dir := filepath.Join(root, shimtest.Group(), id)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		testkit.Eventually(t, testkit.Patience, func() error { return os.Remove(dir) })
	})
	return func(pid int) {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
			t.Fatal(err)
		}
	}
}

// Killing everything in a container without its shim tells how it ended, as far as that can be
// known, and claims no end of what is not in the control group.
func TestKillAllTellsTheEnd(t *testing.T) {
	testkit.NeedRoot(t)
	dir := shimtest.Dir(t)
	m, _ := newManager(t, dir)
	i, err := m.Create(t.Context(), Spec{SandboxID: shimtest.ID(), Handler: shimtest.Fake(t, dir, "proto", ""), Config: []byte("{}")})
	if err != nil {
		t.Fatal(err)
	}
	saved := pod.Exit{Pid: 7, Code: 3, At: time.Now()}
	for _, tc := range []struct {
		name   string
		inside bool // the first process is in the control group
		lives  bool // it runs
		noted  bool // its process id is known
		saved  bool // its shim has saved its end
		want   pod.Exit
		fails  bool
	}{
		{name: "the first process is killed", inside: true, lives: true, noted: true, want: pod.Exit{Code: 137}},
		{name: "it had ended before, its end is saved", noted: true, saved: true, want: pod.Exit{Code: 3}},
		{name: "it had ended before, only its shim knows how", noted: true, want: pod.Exit{Code: pod.ExitCodeUnknown, Unknown: true}},
		{name: "it runs elsewhere, as in a virtual machine", lives: true, noted: true, fails: true},
		{name: "it is not known", fails: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			id := shimtest.ID()
			bundleDir, err := i.Bundle().CreateContainer(id, shimtest.Spec(t, i.ID(), id, false, "/bin/true"))
			if err != nil {
				t.Fatal(err)
			}
			enter := control(t, id)
			first, ended := shimtest.StartIn(t, "/", "sleep", "1000")
			stray, strayEnded := shimtest.StartIn(t, "/", "sleep", "1000")
			enter(stray)
			switch {
			case tc.inside:
				enter(first)
			case !tc.lives:
				if err := killPID(first); err != nil {
					t.Fatal(err)
				}
				<-ended
			}
			if tc.noted {
				if err := os.WriteFile(filepath.Join(bundleDir, "init.pid"), []byte(strconv.Itoa(first)), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if tc.saved {
				if err := bundle.WriteExit(bundleDir, saved); err != nil {
					t.Fatal(err)
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
			defer cancel()
			var told, gone atomic.Bool
			forget := i.WhenKilled(id, func() { told.Store(true) })
			defer forget()
			i.WhenKilled(id, func() { gone.Store(true) })()
			err = i.KillAll(ctx, id)
			<-strayEnded // in any case what is in the group ends
			e, known := i.Killed(id)
			if told.Load() == tc.fails {
				t.Errorf("who asked beforehand was told: %t", told.Load())
			}
			if tc.fails != errdefs.IsUnavailable(err) || known == tc.fails {
				t.Fatalf("%v, exit %+v, known %t", err, e, known)
			}
			if tc.fails {
				return
			}
			if e.Code != tc.want.Code || e.Unknown != tc.want.Unknown || e.At.IsZero() {
				t.Errorf("exit %+v, want %+v", e, tc.want)
			}
			late := false
			i.WhenKilled(id, func() { late = true })()
			if !late {
				t.Error("who asks afterwards is not told")
			}
			if gone.Load() {
				t.Error("who did not want to know any more was told")
			}
		})
	}
	if err := m.Shutdown(t.Context(), i.ID()); err != nil {
		t.Error(err)
	}
}

func killPID(pid int) error {
	p, err := os.FindProcess(pid)
	if err != nil {
		return err
	}
	return p.Kill()
}
