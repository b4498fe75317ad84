package procs

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Rooted are the processes of a container by its root file system, a folder that it is mounted on:
// those whose root it is, and those that share their mount namespace. Processes in the mount
// namespace of this one are none of them. It is for containers without a control group.
type Rooted string

// Pids lists the processes. A root file system that is gone has none.
func (r Rooted) Pids() ([]int, error) {
	root, err := os.Stat(string(r))
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	own, err := os.Stat("/proc/self/ns/mnt")
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	inside := map[int]os.FileInfo{} // the mount namespaces of processes
	var theirs []os.FileInfo
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || !Running(pid) {
			continue
		}
		space, err := os.Stat(filepath.Join("/proc", e.Name(), "ns", "mnt"))
		if err != nil || os.SameFile(own, space) {
			continue // ended, or not of a container
		}
		inside[pid] = space
		if at, err := os.Stat(filepath.Join("/proc", e.Name(), "root")); err == nil && os.SameFile(root, at) {
			theirs = append(theirs, space)
		}
	}
	var pids []int
	for pid, space := range inside {
		for _, one := range theirs {
			if os.SameFile(space, one) {
				pids = append(pids, pid)
				break
			}
		}
	}
	return pids, nil
}

// Signal sends a signal to every process once.
func (r Rooted) Signal(sig unix.Signal) error { return Signal(r.Pids, sig) }

// Kill kills every process and waits until none is left. Errors: ErrUnavailable when ctx ends
// first.
func (r Rooted) Kill(ctx context.Context) error {
	left, err := Kill(ctx, r.Pids, func() {})
	if len(left) > 0 {
		return fmt.Errorf("processes %v with the root %s do not end: %w: %w", left, string(r), err, errdefs.ErrUnavailable)
	}
	return err
}
