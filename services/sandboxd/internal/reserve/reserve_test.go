package reserve

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
)

func TestReserveIsKeptAndGivenUp(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "root")
	r, err := New(t.Context(), dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(filepath.Join(dir, "reserve"))
	if err != nil {
		t.Skipf("the test's file system is nearly full: %v", err)
	}
	if st.Size() != size {
		t.Errorf("size is %d, want %d", st.Size(), size)
	}
	if !r.Release(t.Context()) {
		t.Error("the reserve was not given up")
	}
	if r.Release(t.Context()) {
		t.Error("a reserve was given up twice")
	}
	r.Look(t.Context())
	if _, err := os.Stat(filepath.Join(dir, "reserve")); err != nil {
		t.Errorf("the reserve was not made again: %v", err)
	}
}
