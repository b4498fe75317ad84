//go:build integration

package storage

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// A process that was killed while it tried whether overlayfs works leaves a folder with a mount.
// The next one removes both.
func TestKilledDuringTheCheckOfOverlayfs(t *testing.T) {
	root := t.TempDir()
	left := filepath.Join(root, Overlay, "multiple-lowerdir-check123")
	for _, dir := range []string{"lower", "upper", "work", "merged"} {
		if err := os.MkdirAll(filepath.Join(left, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	options := "lowerdir=" + left + "/lower,upperdir=" + left + "/upper,workdir=" + left + "/work"
	if err := unix.Mount("overlay", left+"/merged", "overlay", 0, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(left+"/merged", unix.MNT_DETACH) })
	if err := os.WriteFile(left+"/merged/file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	st, err := Open(t.Context(), Config{Root: root}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := st.Close(); err != nil {
		t.Error(err)
	}
	entries, err := os.ReadDir(filepath.Dir(left))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() == filepath.Base(left) {
			t.Error("what the check left is still there")
		}
	}
}
