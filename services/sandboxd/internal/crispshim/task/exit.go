package task

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/reaper"
)

// exitFile is where the end of a container's first process is saved before anybody is told.
const exitFile = "exit.json"

// savedExit has the names by which others read the file.
type savedExit struct {
	Timestamp time.Time
	Pid       int
	Status    int
}

func saveExit(bundle string, e reaper.Exit) error {
	data, err := json.Marshal(savedExit{Timestamp: e.At, Pid: e.Pid, Status: e.Status})
	if err != nil {
		return err
	}
	return writeFile(filepath.Join(bundle, exitFile), data)
}

// SavedExit reads the end that was saved in a bundle. It fails with ErrNotFound if there is
// none.
func SavedExit(bundle string) (reaper.Exit, error) {
	data, err := os.ReadFile(filepath.Join(bundle, exitFile))
	if errors.Is(err, fs.ErrNotExist) {
		return reaper.Exit{}, fmt.Errorf("saved exit: %w", errdefs.ErrNotFound)
	}
	if err != nil {
		return reaper.Exit{}, err
	}
	var e savedExit
	if err := json.Unmarshal(data, &e); err != nil {
		return reaper.Exit{}, fmt.Errorf("%s: %w: %w", exitFile, err, errdefs.ErrDataLoss)
	}
	return reaper.Exit{Pid: e.Pid, Status: e.Status, At: e.Timestamp}, nil
}

// SavedPid reads the process id of a bundle's first process; 0 if it is not known.
func SavedPid(bundle string) int {
	pid, err := readPid(filepath.Join(bundle, initPidFile))
	if err != nil {
		return 0
	}
	return pid
}
