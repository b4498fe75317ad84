package podfiles

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestCheckLogs(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, err := range []error{
		os.WriteFile(filepath.Join(dir, "file"), nil, 0o644), os.Symlink(dir, filepath.Join(dir, "link")),
		os.Symlink(filepath.Join(dir, "none"), filepath.Join(dir, "dangling")), os.Symlink("loop", filepath.Join(dir, "loop")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	f := New(Config{})
	for path, wrong := range map[string]string{
		"": "", dir: "", dir + "/absent/deeper": "", dir + "/link": "", dir + "/link/absent": "",
		dir + "/file": "/file is no folder", dir + "/file/below/deeper": "/file is no folder", dir + "/dangling": "link to nothing",
		dir + "/dangling/below": "link to nothing", dir + "/loop": "loop",
	} {
		err := f.CheckLogs(&criv1.PodSandboxConfig{LogDirectory: path})
		if wrong == "" && err != nil || wrong != "" && (!errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), wrong)) {
			t.Errorf("%q: %v, want %q", path, err, wrong)
		}
	}
	if _, err := os.Lstat(filepath.Join(dir, "absent")); !os.IsNotExist(err) {
		t.Errorf("a folder was made: %v", err)
	}
}
