// Package ocistate removes what an OCI runtime keeps of a container when no shim does it: the
// shim is dead and what it knew is lost, or the runtime said that it was done and was not.
//
// The runtimes that are known here, runc and those made like it, keep one folder per container,
// named by its id, in a root folder per namespace. The package ends no process: whoever calls
// Remove has emptied the container's control group before.
package ocistate

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/pkg/identifiers"
	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

const (
	// defaultBinary and defaultRoot are what shims take for runtimes that name none.
	defaultBinary = "runc"
	defaultRoot   = "/run/containerd/runc"
	// deleteTime bounds the runtime's delete command.
	deleteTime = 10 * time.Second
	// outputDelay is how long the output of the ended command may be kept open by others.
	outputDelay = 5 * time.Second
	// maxSaid is how much of what the command said goes into an error.
	maxSaid = 512
)

// Dir is the folder in which a handler's OCI runtime keeps its state of a container.
func Dir(h pod.Handler, id string) string {
	root := h.Root
	if root == "" {
		root = defaultRoot
	}
	return filepath.Join(root, pod.Namespace, id)
}

// Remove removes what a handler's OCI runtime keeps of a container that has no process any
// more: by the runtime's own delete command, so that its hooks run, and what that leaves by
// hand. Nothing being there is not an error. It fails with ErrUnavailable, naming the folder,
// as long as something cannot be removed, and can be repeated.
func Remove(ctx context.Context, h pod.Handler, id string) error {
	if err := identifiers.Validate(id); err != nil {
		return fmt.Errorf("container id: %w", err)
	}
	dir := Dir(h, id)
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	deleteErr := runDelete(ctx, h, id)
	// A runtime may say that it is done and leave the folder, or not understand what is in it.
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("state of container %q in the OCI runtime remains: %w: %w", id, errdefs.ErrUnavailable, errors.Join(err, deleteErr))
	}
	return nil
}

func runDelete(ctx context.Context, h pod.Handler, id string) error {
	ctx, cancel := context.WithTimeout(ctx, deleteTime)
	defer cancel()
	binary := h.BinaryName
	if binary == "" {
		binary = defaultBinary
	}
	args := []string{"--root", filepath.Dir(Dir(h, id))}
	if h.SystemdCgroup {
		args = append(args, "--systemd-cgroup")
	}
	cmd := exec.CommandContext(ctx, binary, append(args, "delete", "--force", id)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = outputDelay
	out, err := cmd.CombinedOutput()
	if err != nil {
		said := strings.ToValidUTF8(strings.TrimSpace(string(out[:min(len(out), maxSaid)])), "?")
		return fmt.Errorf("%s delete: %w: %s", filepath.Base(binary), err, said)
	}
	return nil
}
