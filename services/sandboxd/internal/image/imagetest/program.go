package imagetest

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// AddProgram puts a shell script into a folder of programs, such as that of verifiers.
func AddProgram(tb testing.TB, dir, name, script string) {
	tb.Helper()
	// A process that is started meanwhile would hold the file open for writing, and the
	// kernel runs no such file.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil { //nolint:gosec // it is to be run
		tb.Fatal(err)
	}
}
