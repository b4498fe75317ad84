package cli

import (
	"fmt"
	"os"
	"strconv"
	"syscall"
)

// keepDescriptors makes sure that what descriptors the process was given besides the standard
// ones are not passed on to the programs that it starts.
func keepDescriptors() error {
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return fmt.Errorf("open descriptors: %w", err)
	}
	for _, e := range open {
		if fd, err := strconv.Atoi(e.Name()); err == nil && fd > syscall.Stderr {
			syscall.CloseOnExec(fd)
		}
	}
	return nil
}
