//go:build cgo

package early

/*
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

// The descriptor that tells the waiting process; -1 in a process that was not split.
static int told = -1;

int crisp_early_told(void) { return told; }

// Waits until the shim is ready, or has ended without, and ends in the same way.
static void wait_for(int fd, pid_t shim) {
	char byte;
	ssize_t n;
	int status;

	do {
		n = read(fd, &byte, 1);
	} while (n < 0 && errno == EINTR);
	if (n == 1)
		_exit(0);
	while (waitpid(shim, &status, 0) < 0) {
		if (errno != EINTR)
			_exit(1);
	}
	_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
}

// Runs before the Go runtime, while there is one thread only.
__attribute__((constructor)) static void split(int argc, char **argv) {
	int ends[2];
	pid_t pid;

	if (argc < 2 || strcmp(argv[argc - 1], "start") != 0)
		return;
	if (pipe2(ends, O_CLOEXEC) != 0)
		return;
	pid = fork();
	if (pid < 0) {
		close(ends[0]);
		close(ends[1]);
		return;
	}
	if (pid > 0) {
		close(ends[1]);
		wait_for(ends[0], pid);
	}
	setpgid(0, 0);
	// What this process inherited is not the shim's.
	if (ends[1] > 3)
		syscall(SYS_close_range, 3, ends[1] - 1, 0);
	syscall(SYS_close_range, ends[1] + 1, ~0U, 0);
	told = ends[1];
}
*/
import "C"

import "os"

// Waiter is the way to the process that waits for this one to be ready: a byte written to it
// ends that process well, and the end of this process ends it likewise. nil if there is none.
func Waiter() *os.File {
	fd := C.crisp_early_told()
	if fd < 0 {
		return nil
	}
	return os.NewFile(uintptr(fd), "waiter")
}
