//go:build integration

package podfiles

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestSharedMemory(t *testing.T) {
	testkit.NeedRoot(t)
	f := files(t)
	// Twice, as after an interrupted first try.
	for range 2 {
		if _, err := f.Make(t.Context(), "id", &criv1.PodSandboxConfig{Hostname: "a"}); err != nil {
			t.Fatal(err)
		}
	}
	shm := f.Paths("id", nil).Shm
	var st unix.Statfs_t
	if err := unix.Statfs(shm, &st); err != nil {
		t.Fatal(err)
	}
	const flags = unix.MS_NOEXEC | unix.MS_NOSUID | unix.MS_NODEV
	if st.Type != unix.TMPFS_MAGIC || int64(st.Blocks)*st.Bsize != DefaultShmSize || st.Flags&flags != flags {
		t.Errorf("type %x, %d bytes, flags %x", st.Type, int64(st.Blocks)*st.Bsize, st.Flags)
	}
	if info, err := os.Stat(shm); err != nil || info.Mode().Perm() != 0o777 || info.Mode()&os.ModeSticky == 0 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if err := os.WriteFile(filepath.Join(shm, "x"), []byte("x"), 0o600); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := f.Remove(t.Context(), "id"); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{f.stateDir("id"), filepath.Dir(f.shmDir("id"))} {
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", dir, err)
		}
	}
}
