package podfiles

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// CheckLogs says whether the folder of a pod's logs is one or could be made; it makes nothing.
// Errors: ErrFailedPrecondition naming what is no folder.
func (f *Files) CheckLogs(cfg *criv1.PodSandboxConfig) error {
	dir := cfg.GetLogDirectory()
	if dir == "" {
		return nil
	}
	for at := filepath.Clean(dir); ; at = filepath.Dir(at) {
		st, err := os.Stat(at)
		switch {
		case err == nil && st.IsDir():
			return nil
		case err == nil:
			return fmt.Errorf("log_directory %q: %s is no folder: %w", dir, at, errdefs.ErrFailedPrecondition)
		case errors.Is(err, fs.ErrNotExist) && dangling(at):
			return fmt.Errorf("log_directory %q: %s is a link to nothing: %w", dir, at, errdefs.ErrFailedPrecondition)
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
			// What is above decides; the root is always there.
		default:
			return fmt.Errorf("log_directory %q: %w: %w", dir, err, errdefs.ErrFailedPrecondition)
		}
	}
}

// dangling says that there is a link where nothing was found.
func dangling(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
