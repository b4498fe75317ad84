package cgroup

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/moby/sys/mountinfo"
)

func TestResolve(t *testing.T) {
	for _, tc := range []struct {
		in, want string
		ok       bool
	}{
		{"", "c1", true},
		{"/kubepods/podx/c1", "/kubepods/podx/c1", true},
		{"a/c1", "a/c1", true},
		{"../c1", "", false},
		{"/../../c1", "/c1", true},
		{"kubepods-burstable-podx.slice:crisp:c1", "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podx.slice/crisp-c1.scope", true},
		{":crisp:c1", "/system.slice/crisp-c1.scope", true},
		{"-.slice::c1", "/c1.scope", true},
		{"a.slice:b:c.slice", "/a.slice/c.slice", true},
		{"a--b.slice:x:c1", "", false},
		{"a/b.slice:x:c1", "", false},
		{"a:b", "", false},
		{"noslice:x:c1", "", false},
	} {
		got, err := resolve("c1", tc.in)
		if (err == nil) != tc.ok || got != tc.want {
			t.Errorf("%q: %q, %v", tc.in, got, err)
		}
	}
}

func TestWithin(t *testing.T) {
	own := map[string]string{"": "/u", "memory": "/m", "cpu": "/"}
	v1 := &mountinfo.Info{FSType: "cgroup", Root: "/", VFSOptions: "rw,memory"}
	v2 := &mountinfo.Info{FSType: "cgroup2", Root: "/"}
	nested := &mountinfo.Info{FSType: "cgroup", Root: "/docker/x", VFSOptions: "rw,cpu"}
	for _, tc := range []struct {
		path string
		m    *mountinfo.Info
		want string
	}{
		{"/a/c1", v1, "/a/c1"},
		{"a/c1", v1, "/m/a/c1"},
		{"a/c1", v2, "/u/a/c1"},
		{"/docker/x/c1", nested, "/c1"},
	} {
		if got := within(tc.path, tc.m, own); got != tc.want {
			t.Errorf("%q: %q, want %q", tc.path, got, tc.want)
		}
	}
}

func TestFindRefusesForeignGroups(t *testing.T) {
	for _, path := range []string{"/", "/kubepods", "system.slice:crisp:other"} {
		if _, err := Find("0123456789ab", path); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%q: %v", path, err)
		}
	}
	if _, err := Find("", "/x"); !errdefs.IsInvalidArgument(err) {
		t.Errorf("no id: %v", err)
	}
}

func TestMakeNeedsAParent(t *testing.T) {
	const id = "0123456789ab"
	if _, err := Make(id, "/no/such/parent/"+id); !errdefs.IsNotFound(err) {
		t.Errorf("without a parent: %v", err)
	}
	if _, err := Make(id, "/other"); !errdefs.IsInvalidArgument(err) {
		t.Errorf("a foreign group: %v", err)
	}
}

// A folder stands in for a group: reading processes and giving up in time need no more.
func TestPidsAndGivingUp(t *testing.T) {
	dir := t.TempDir()
	below := filepath.Join(dir, "below")
	if err := os.Mkdir(below, 0o700); err != nil {
		t.Fatal(err)
	}
	// No process can have these numbers.
	const none = 1 << 29
	for d, content := range map[string]string{
		dir:   strconv.Itoa(none) + "\n",
		below: strings.Repeat(strconv.Itoa(none+1)+"\n", 2) + "0\n",
	} {
		if err := os.WriteFile(filepath.Join(d, "cgroup.procs"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	g := Group{id: "c1", dirs: []string{dir, filepath.Join(dir, "gone")}}
	pids, err := g.Pids()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]int{none, none + 1}, pids); diff != "" {
		t.Error(diff)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := g.Kill(ctx); err == nil || !strings.Contains(err.Error(), strconv.Itoa(none)) {
		t.Errorf("kill: %v", err)
	}
}

// TestSetOOMScore uses a folder as a group, with processes of the test in it.
func TestSetOOMScore(t *testing.T) {
	start := func(score string) int {
		cmd := exec.CommandContext(t.Context(), "sleep", "60")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", cmd.Process.Pid), []byte(score), 0); err != nil {
			t.Fatal(err)
		}
		return cmd.Process.Pid
	}
	plain, special := start("900"), start("950")
	dir := t.TempDir()
	procs := fmt.Sprintf("%d\n%d\n%d\n", plain, special, 1<<29) // the last one has ended
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(procs), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := (Group{id: "c1", dirs: []string{dir}}).SetOOMScore(900, 910); err != nil {
		t.Fatal(err)
	}
	for pid, want := range map[int]string{plain: "910", special: "950"} {
		got, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid))
		if err != nil || strings.TrimSpace(string(got)) != want {
			t.Errorf("process %d: %q, %v, want %s", pid, got, err, want)
		}
	}
}
