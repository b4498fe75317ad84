package shim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// processPoll is the pause between two looks at processes that should end.
const processPoll = 10 * time.Millisecond

// processesIn lists the processes that have a folder as their working folder. A shim works
// in its bundle, so this finds it even if it never told its process id. The folders are
// compared as files, not as names, which a container could imitate.
func processesIn(dir string) []int {
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
		if err == nil && os.SameFile(want, got) && !hasTerminal(e.Name()) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// programIn is the program of a process that works in a folder; empty if none does, or its
// file is gone.
func programIn(dir string) string {
	for _, pid := range processesIn(dir) {
		path, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(pid), "exe"))
		if err != nil {
			continue
		}
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	return ""
}

// hasTerminal says whether a process has a controlling terminal: no shim has one, but the
// shell of somebody who looks into a bundle.
func hasTerminal(pid string) bool {
	stat, err := os.ReadFile(filepath.Join("/proc", pid, "stat"))
	if err != nil {
		return false
	}
	// The command, in parentheses, may hold anything; the terminal is the fifth field after it.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	return len(fields) > 4 && fields[4] != "0"
}

// waitGone waits until no process works in a folder. It fails with ErrDeadlineExceeded's
// kin, naming the processes, when ctx ends first.
func waitGone(ctx context.Context, dir string) error {
	tick := time.NewTicker(processPoll)
	defer tick.Stop()
	for {
		pids := processesIn(dir)
		if len(pids) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("processes %v still work in %s: %w", pids, dir, context.Cause(ctx))
		case <-tick.C:
		}
	}
}

// killIn kills every process that works in a folder and waits until they are gone.
func killIn(ctx context.Context, dir string) error {
	tick := time.NewTicker(processPoll)
	defer tick.Stop()
	for {
		pids := processesIn(dir)
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			killIfIn(pid, dir)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("processes %v in %s do not end: %w: %w", pids, dir, context.Cause(ctx), errdefs.ErrUnavailable)
		case <-tick.C:
		}
	}
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

// isRefused says that a socket exists but nobody listens on it.
func isRefused(err error) bool { return errors.Is(err, unix.ECONNREFUSED) }
