package bundle

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

func TestLife(t *testing.T) {
	root := t.TempDir()
	meta := Meta{Sandboxer: "podsandbox", RuntimeType: "io.containerd.runc.v2", ShimPath: "/shim", BootID: "b"}
	p, err := Create(root, "pod", []byte("{}"), meta)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Create(root, "pod", nil, meta); !errdefs.IsAlreadyExists(err) {
		t.Errorf("second create: %v", err)
	}
	if got, err := p.Meta(); err != nil || got != meta {
		t.Errorf("meta %+v, %v", got, err)
	}
	dir, err := p.CreateContainer("c", []byte(`{"linux":{"cgroupsPath":"/x/c"}}`))
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"c", "pod", "", "../c", "a/b"} {
		if _, err := p.CreateContainer(id, []byte("{}")); err == nil {
			t.Errorf("created %q", id)
		}
	}
	if path, err := CgroupsPath(dir); err != nil || path != "/x/c" {
		t.Errorf("cgroups path %q, %v", path, err)
	}
	if !p.HasContainer("c") || p.HasContainer("d") || p.HasContainer("../c") || p.HasInit() {
		t.Error("containers are wrong")
	}
	if err := p.MarkInit(); err != nil {
		t.Fatal(err)
	}
	ids, err := p.Containers()
	if diff := cmp.Diff([]string{"c", "pod"}, ids); err != nil || diff != "" {
		t.Errorf("%s %v", diff, err)
	}
	for range 2 {
		if err := errors.Join(p.RemoveContainer("c"), p.RemoveContainer("pod")); err != nil {
			t.Error(err)
		}
	}
	if p.HasContainer("c") || p.HasInit() {
		t.Error("containers are left")
	}
	for range 2 {
		if err := p.Remove(); err != nil {
			t.Error(err)
		}
	}
	if left, _ := os.ReadDir(root); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestOpenRefusesPaths(t *testing.T) {
	for _, id := range []string{"", "..", "a/b", ".hidden", "nul\x00", string(make([]byte, 300))} {
		if _, err := Open("/root", id); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%.20q: %v", id, err)
		}
	}
}

func TestSweep(t *testing.T) {
	root := t.TempDir()
	p, err := Create(root, "pod", []byte("{}"), Meta{})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{filepath.Join(root, ".new-x", "rootfs"), filepath.Join(p.Dir(), containersDir, ".old-c")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := Sweep(root); err != nil {
		t.Fatal(err)
	}
	if ids, err := List(root); err != nil || len(ids) != 1 {
		t.Errorf("%v, %v", ids, err)
	}
	for _, d := range []string{root, filepath.Join(p.Dir(), containersDir)} {
		hidden, _ := filepath.Glob(filepath.Join(d, ".*"))
		if len(hidden) > 0 {
			t.Errorf("left: %v", hidden)
		}
	}
	if err := errors.Join(Sweep(filepath.Join(root, "none"))); err != nil {
		t.Error(err)
	}
}

func TestExitFile(t *testing.T) {
	dir := t.TempDir()
	if _, err := ReadExit(dir); !errdefs.IsNotFound(err) {
		t.Errorf("none: %v", err)
	}
	want := pod.Exit{Pid: 7, Code: 3, At: time.Now().UTC()}
	if err := WriteExit(dir, want); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadExit(dir); err != nil || !cmp.Equal(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{"", "{", `{"Pid":1,"Status":-1,"Timestamp":"2026-01-01T00:00:00Z"}`, `{"Pid":1}`} {
		if err := os.WriteFile(filepath.Join(dir, exitFile), []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadExit(dir); !errdefs.IsDataLoss(err) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestMappedRoot(t *testing.T) {
	for in, want := range map[string][2]int{
		`{}`: {0, 0},
		`{"linux":{"uidMappings":[{"containerID":0,"hostID":7}],"gidMappings":[{"containerID":5,"hostID":9},{"containerID":0,"hostID":100000}]}}`: {7, 100000},
		`{"linux":{"gidMappings":[]}}`: {0, 0},
	} {
		if uid, gid, err := mappedRoot([]byte(in)); err != nil || uid != want[0] || gid != want[1] {
			t.Errorf("%s: %d, %d, %v", in, uid, gid, err)
		}
	}
	if _, _, err := mappedRoot([]byte(`{"gidMappings"`)); !errdefs.IsInvalidArgument(err) {
		t.Errorf("broken: %v", err)
	}
}
