package bundle

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// exitFile is where the stock shim saves the exit of a container's first process before it
// tells anybody.
const exitFile = "exit.json"

// savedExit has the names that the stock shim uses.
type savedExit struct {
	Timestamp time.Time
	Pid       int
	Status    int
	// Unknown is this program's own addition, for exits that it saves itself.
	Unknown bool `json:",omitempty"`
}

// ReadExit reads the exit that a shim saved in a container's bundle. It fails with
// ErrNotFound if there is none and with ErrDataLoss if it cannot be true.
func ReadExit(dir string) (pod.Exit, error) {
	data, err := ReadFile(filepath.Join(dir, exitFile), 1<<16)
	if errors.Is(err, fs.ErrNotExist) {
		return pod.Exit{}, fmt.Errorf("saved exit: %w", errdefs.ErrNotFound)
	}
	if err != nil {
		return pod.Exit{}, err
	}
	var e savedExit
	if err := json.Unmarshal(data, &e); err != nil {
		return pod.Exit{}, fmt.Errorf("%s: %w: %w", exitFile, err, errdefs.ErrDataLoss)
	}
	if e.Pid < 0 || e.Status < 0 || e.Timestamp.IsZero() {
		return pod.Exit{}, fmt.Errorf("%s: impossible values: %w", exitFile, errdefs.ErrDataLoss)
	}
	return pod.Exit{Pid: uint32(e.Pid), Code: uint32(e.Status), At: e.Timestamp, Unknown: e.Unknown}, nil
}

// WriteExit saves an exit in the form that ReadExit reads, so that what was once found out
// about a dead shim's container stays the same at the next look.
func WriteExit(dir string, e pod.Exit) error {
	data, err := json.Marshal(savedExit{Timestamp: e.At, Pid: int(e.Pid), Status: int(e.Code), Unknown: e.Unknown})
	if err != nil {
		return err
	}
	return WriteFile(filepath.Join(dir, exitFile), data)
}

// ReadPid reads the process id that the OCI runtime noted for a container's first process
// (empty exec id) or for an exec; 0 if it cannot be read.
func ReadPid(dir, execID string) uint32 {
	name := "init.pid"
	if execID != "" {
		name = filepath.Base(execID) + ".pid"
	}
	data, err := ReadFile(filepath.Join(dir, name), 64)
	if err != nil {
		return 0
	}
	pid, err := strconv.ParseUint(strings.TrimSpace(string(data)), 10, 32)
	if err != nil {
		return 0
	}
	return uint32(pid)
}

// CgroupsPath reads linux.cgroupsPath of a bundle's configuration.
func CgroupsPath(dir string) (string, error) {
	data, err := ReadFile(filepath.Join(dir, configFile), maxConfigBytes)
	if err != nil {
		return "", err
	}
	var c struct {
		Linux struct {
			CgroupsPath string `json:"cgroupsPath"`
		} `json:"linux"`
	}
	if err := json.Unmarshal(data, &c); err != nil {
		return "", fmt.Errorf("%s: %w: %w", configFile, err, errdefs.ErrDataLoss)
	}
	return c.Linux.CgroupsPath, nil
}

// ReadFile reads a regular file of at most limit bytes.
func ReadFile(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > limit {
		return nil, fmt.Errorf("%s: larger than %d bytes: %w", path, limit, errdefs.ErrResourceExhausted)
	}
	return data, nil
}

// WriteFile writes a small file so that a reader sees all of it or nothing.
func WriteFile(path string, data []byte) error {
	tmp := filepath.Join(filepath.Dir(path), ".tmp-"+filepath.Base(path))
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	return nil
}
