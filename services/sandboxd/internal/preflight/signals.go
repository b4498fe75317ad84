package preflight

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// Heeds says whether a signal would do anything to a process. The first process of a process
// namespace is spared by the kernel from each signal, but those that cannot be refused, for
// which it has no handler yet: who is told to end right after its start would never hear of
// it. What cannot be judged heeds.
func (Programs) Heeds(pid uint32, sig syscall.Signal) bool {
	if sig == syscall.SIGKILL || sig == syscall.SIGSTOP {
		return true
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return true
	}
	return heeds(string(status), sig)
}

// heeds judges by the text of a process's status.
func heeds(status string, sig syscall.Signal) bool {
	first, taken := false, uint64(0)
	for line := range strings.Lines(status) {
		key, value, _ := strings.Cut(line, ":")
		fields := strings.Fields(value)
		if len(fields) == 0 {
			continue
		}
		switch key {
		case "NSpid":
			first = len(fields) > 1 && fields[len(fields)-1] == "1"
		case "SigBlk", "SigCgt":
			mask, err := strconv.ParseUint(fields[0], 16, 64)
			if err != nil {
				return true
			}
			taken |= mask
		}
	}
	return !first || taken&(1<<(uint(sig)-1)) != 0
}
