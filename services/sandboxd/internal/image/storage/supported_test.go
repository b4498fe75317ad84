package storage

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// A disk that is full when sandboxd starts says nothing about the snapshotter that was in use.
func TestSupportedOnAFullDisk(t *testing.T) {
	used, fresh := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(used, "metadata.db"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	other := errors.New("no d_type")
	for name, tt := range map[string]struct {
		root      string
		err, want error
	}{
		"full, in use":     {used, &os.PathError{Op: "mkdir", Path: "upper", Err: syscall.ENOSPC}, nil},
		"quota, in use":    {used, fmt.Errorf("mount: %w", syscall.EDQUOT), nil},
		"full, never used": {fresh, syscall.ENOSPC, syscall.ENOSPC},
		"not supported":    {used, other, other},
		"supported":        {fresh, nil, nil},
	} {
		if got := supported(tt.root, func(string) error { return tt.err }); !errors.Is(got, tt.want) || (tt.want == nil) != (got == nil) {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}
