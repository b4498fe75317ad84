package task

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/errdefs"
	"github.com/containerd/go-runc"
)

const (
	// defaultRoot is the state folder of the OCI runtime, as other shims have it.
	defaultRoot = "/run/containerd/runc"
	runtimeFile = "runtime.json"
	logFile     = "log.json"
	initPidFile = "init.pid"
	configFile  = "config.json"
	// maxRuntimeLog is how much of the runtime's log is looked through for an error.
	maxRuntimeLog = 64 << 10
)

// Runtime says which OCI runtime a container was made with. It is kept in the bundle, for the
// time when the shim is gone.
type Runtime struct {
	Binary        string `json:"binary"`
	Root          string `json:"root"`
	SystemdCgroup bool   `json:"systemd_cgroup,omitempty"`
}

// runtimeOf is the runtime that options name.
func runtimeOf(o *options.Options, namespace string) Runtime {
	r := Runtime{Binary: o.GetBinaryName(), Root: o.GetRoot(), SystemdCgroup: o.GetSystemdCgroup()}
	if r.Binary == "" {
		r.Binary = runc.DefaultCommand
	}
	if r.Root == "" {
		r.Root = defaultRoot
	}
	r.Root = filepath.Join(r.Root, namespace)
	return r
}

// SavedRuntime reads which runtime a bundle's container was made with.
func SavedRuntime(bundle string) (Runtime, error) {
	data, err := os.ReadFile(filepath.Join(bundle, runtimeFile))
	if err != nil {
		return Runtime{}, err
	}
	var r Runtime
	if err := json.Unmarshal(data, &r); err != nil {
		return Runtime{}, fmt.Errorf("%s: %w: %w", runtimeFile, err, errdefs.ErrDataLoss)
	}
	return r, nil
}

func (r Runtime) save(bundle string) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return writeFile(filepath.Join(bundle, runtimeFile), data)
}

// Client returns the client of the runtime for a bundle. Its commands end with the shim.
func (r Runtime) Client(bundle string) *runc.Runc {
	return &runc.Runc{
		Command:       r.Binary,
		Root:          r.Root,
		Log:           filepath.Join(bundle, logFile),
		LogFormat:     runc.JSON,
		PdeathSignal:  syscall.SIGKILL,
		SystemdCgroup: r.SystemdCgroup,
	}
}

// Delete lets the runtime end and remove a container. It fails, and can be repeated, as long as
// the runtime's folder of the container is there: a second delete command finds no state in it
// and takes that for success.
func (r Runtime) Delete(ctx context.Context, bundle, id string) error {
	client := r.Client(bundle)
	since := sizeOf(client.Log)
	err := client.Delete(ctx, id, &runc.DeleteOpts{Force: true})
	if err != nil {
		return runtimeError(err, "delete", client.Log, since)
	}
	if err := os.RemoveAll(filepath.Join(r.Root, id)); err != nil {
		return fmt.Errorf("runtime delete left the state: %w: %w", err, errdefs.ErrUnavailable)
	}
	return nil
}

// runtimeError replaces the error of a failed command by what the runtime said in its log
// since a size.
func runtimeError(err error, action, log string, since int64) error {
	if err == nil {
		return nil
	}
	said := lastError(log, since)
	if said == "" {
		return fmt.Errorf("runtime %s: %w", action, err)
	}
	var kind error = errdefs.ErrUnknown
	switch {
	case strings.Contains(said, "does not exist") && strings.Contains(said, "container"):
		kind = errdefs.ErrNotFound
	case strings.Contains(said, "no such process"), strings.Contains(said, "process already finished"):
		kind = errdefs.ErrNotFound
	case strings.Contains(said, "paused container"):
		kind = errdefs.ErrFailedPrecondition
	}
	return &spokenError{text: "runtime " + action + ": " + said, kind: kind}
}

// spokenError is an error in the words of the runtime.
type spokenError struct {
	text string
	kind error
}

// Error implements error.
func (s *spokenError) Error() string { return s.text }

// Unwrap is the kind of the error.
func (s *spokenError) Unwrap() error { return s.kind }

// sizeOf is the size of a file; 0 if there is none.
func sizeOf(path string) int64 {
	st, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return st.Size()
}

// lastError is the last error in a runtime's log after a position.
func lastError(path string, since int64) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	if _, err := f.Seek(since, io.SeekStart); err != nil {
		return ""
	}
	last := ""
	s := bufio.NewScanner(io.LimitReader(f, maxRuntimeLog))
	s.Buffer(nil, maxRuntimeLog)
	for s.Scan() {
		var line struct {
			Level, Msg string
			Fields     struct{ Message string } // as youki writes it
		}
		if json.Unmarshal(s.Bytes(), &line) == nil && strings.EqualFold(line.Level, "error") {
			last = cmp.Or(line.Msg, line.Fields.Message, last)
		}
	}
	return strings.TrimSpace(last)
}

// readPid reads the process id that the runtime wrote.
func readPid(path string) (int, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	pid, err := strconv.Atoi(string(bytes.TrimSpace(data)))
	if err != nil || pid <= 0 {
		return 0, fmt.Errorf("%s: no process id: %w", path, errdefs.ErrDataLoss)
	}
	return pid, nil
}

// writeFile writes a small file so that a reader sees all of it or nothing.
func writeFile(path string, data []byte) error {
	tmp := filepath.Join(filepath.Dir(path), ".tmp-"+filepath.Base(path))
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	return nil
}

// config is the part of a bundle's OCI configuration that matters here.
type config struct {
	Process     *struct{}         `json:"process"`
	Annotations map[string]string `json:"annotations"`
	Linux       struct {
		Namespaces []struct {
			Type string `json:"type"`
			Path string `json:"path"`
		} `json:"namespaces"`
	} `json:"linux"`
}

func readConfig(bundle string) (config, error) {
	var c config
	data, err := os.ReadFile(filepath.Join(bundle, configFile))
	if errors.Is(err, fs.ErrNotExist) {
		return c, fmt.Errorf("bundle %s: %w: %w", bundle, err, errdefs.ErrInvalidArgument)
	}
	if err != nil {
		return c, err
	}
	if err := json.Unmarshal(data, &c); err != nil {
		return c, fmt.Errorf("%s: %w: %w", configFile, err, errdefs.ErrInvalidArgument)
	}
	return c, nil
}

// ownPids says whether the container is alone in its process namespace, so that the kernel
// ends everything in it with the first process.
func (c config) ownPids() bool {
	for _, n := range c.Linux.Namespaces {
		if n.Type == "pid" {
			return n.Path == ""
		}
	}
	return false
}

// HasProcess says whether a bundle's configuration describes a process.
func HasProcess(bundle string) (bool, error) {
	c, err := readConfig(bundle)
	return c.Process != nil, err
}
