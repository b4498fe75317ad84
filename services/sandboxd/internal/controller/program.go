package controller

import (
	"context"
	"os"
	"strconv"
	"time"

	"github.com/crisp-cri/crisp/services/internal/pause"
)

const (
	programPoll = 200 * time.Microsecond
	// programTime is the most that a start waits for the container's program.
	programTime = 50 * time.Millisecond
)

// programOf is the file that a process runs; nil if there is no such process.
func programOf(pid uint32) os.FileInfo {
	st, err := os.Stat("/proc/" + strconv.FormatUint(uint64(pid), 10) + "/exe")
	if err != nil {
		return nil
	}
	return st
}

// awaitProgram waits until a started process runs another program than before. An OCI
// runtime says that a process is started while it still is the runtime's own, on the way to
// the program: a signal that comes then is lost with what the runtime did to handle it. A
// process that never changes, such as that of a virtual machine, is not waited for long.
func awaitProgram(ctx context.Context, pid uint32, before os.FileInfo) {
	if before == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, programTime)
	defer cancel()
	for delay := programPoll; ; delay *= 2 {
		now := programOf(pid)
		if now == nil || !os.SameFile(before, now) {
			return
		}
		if !pause.For(ctx, delay) {
			return
		}
	}
}
