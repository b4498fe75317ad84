// Package procs finds and ends processes by the folder that they work in, or by their root. A shim
// works in its bundle, so this finds it even if it never told its process id.
//
// It keeps no state; all of it may be called concurrently.
package procs

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// In lists the processes that have a folder as their working folder. The folders are compared
// as files, not as names, which a container could imitate. Processes with a controlling
// terminal do not count.
func In(dir string) []int {
	want, err := os.Stat(dir)
	if err != nil {
		return nil
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		got, err := os.Stat(filepath.Join("/proc", e.Name(), "cwd"))
		if err == nil && os.SameFile(want, got) && !HasTerminal(pid) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// ProgramIn is the program of the process that works in a folder and was started by none that
// does: of a shim, and not of the OCI runtime that it runs. It is empty if there is no such
// process, or if the program's file is gone.
func ProgramIn(dir string) string {
	pids := In(dir)
	for _, pid := range pids {
		fields, err := statOf(strconv.Itoa(pid))
		if err != nil || len(fields) <= statParent {
			continue
		}
		if parent, err := strconv.Atoi(fields[statParent]); err != nil || slices.Contains(pids, parent) {
			continue
		}
		path, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(pid), "exe"))
		if err != nil {
			continue
		}
		// The same file, and not one of that name in another mount namespace.
		if have, err := os.Stat(path); err == nil && isProgram(pid, have) {
			return path
		}
	}
	return ""
}

// isProgram says whether a process runs a file.
func isProgram(pid int, file os.FileInfo) bool {
	runs, err := os.Stat(filepath.Join("/proc", strconv.Itoa(pid), "exe"))
	return err == nil && os.SameFile(runs, file)
}

// Fields of a process's stat after the command.
const (
	statState    = 0
	statParent   = 1
	statTerminal = 4
)

// statOf reads the fields of a process's stat after the command, which is in parentheses and
// may hold anything.
func statOf(pid string) ([]string, error) {
	stat, err := os.ReadFile(filepath.Join("/proc", pid, "stat"))
	if err != nil {
		return nil, err
	}
	return strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:])), nil
}

// Running says whether a process exists and has not ended.
func Running(pid int) bool {
	fields, err := statOf(strconv.Itoa(pid))
	return err == nil && len(fields) > statState && fields[statState] != "Z" && fields[statState] != "X"
}

// HasTerminal says whether a process has a controlling terminal: no shim has one, but the
// shell of somebody who looks into a bundle.
func HasTerminal(pid int) bool {
	fields, err := statOf(strconv.Itoa(pid))
	return err == nil && len(fields) > statTerminal && fields[statTerminal] != "0"
}

// WaitGone waits until no process works in a folder. When ctx ends first it fails with the
// cause and names the processes.
func WaitGone(ctx context.Context, dir string) error {
	left, err := end(ctx, func() ([]int, error) { return In(dir), nil }, func([]int) {})
	if len(left) > 0 {
		return fmt.Errorf("processes %v still work in %s: %w", left, dir, err)
	}
	return err
}

// KillIn kills every process that works in a folder and waits until they are gone. Errors:
// ErrUnavailable when ctx ends first.
func KillIn(ctx context.Context, dir string) error {
	list := func() ([]int, error) { return In(dir), nil }
	left, err := end(ctx, list, func(pids []int) {
		for _, pid := range pids {
			killIfIn(pid, dir)
		}
	})
	if len(left) > 0 {
		return fmt.Errorf("processes %v in %s do not end: %w: %w", left, dir, err, errdefs.ErrUnavailable)
	}
	return err
}

// killIfIn kills a process if it, and not a later one of the same number, works in a folder.
func killIfIn(pid int, dir string) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	want, err := os.Stat(dir)
	if err != nil {
		return
	}
	got, err := os.Stat(filepath.Join("/proc", strconv.Itoa(pid), "cwd"))
	if err == nil && os.SameFile(want, got) {
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
	}
}
