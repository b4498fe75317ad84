package preflight

import (
	"os"
	"syscall"
	"testing"
)

func TestHeeds(t *testing.T) {
	const term, winch = syscall.SIGTERM, syscall.SIGWINCH
	for name, c := range map[string]struct {
		status string
		sig    syscall.Signal
		want   bool
	}{
		"no handler yet":     {"NSpid:\t7\t1\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\nSigCgt:\t0000000000000000\n", term, false},
		"other handler":      {"NSpid:\t7\t1\nSigBlk:\t0000000000000000\nSigCgt:\t0000000000004000\n", winch, false},
		"handler":            {"NSpid:\t7\t1\nSigBlk:\t0000000000000000\nSigCgt:\t0000000000004000\n", term, true},
		"waits for it":       {"NSpid:\t7\t1\nSigBlk:\t0000000000004000\nSigCgt:\t0000000000000000\n", term, true},
		"highest":            {"NSpid:\t7\t1\nSigCgt:\t8000000000000000\n", 64, true},
		"not the first":      {"NSpid:\t7\t2\nSigCgt:\t0000000000000000\n", term, true},
		"no namespace":       {"NSpid:\t1\nSigCgt:\t0000000000000000\n", term, true},
		"no such field":      {"Name:\tx\n", term, true},
		"not what was known": {"NSpid:\t7\t1\nSigCgt:\tx\n", term, true},
	} {
		t.Run(name, func(t *testing.T) {
			if got := heeds(c.status, c.sig); got != c.want {
				t.Errorf("%t, want %t", got, c.want)
			}
		})
	}
	if p := (Programs{}); !p.Heeds(uint32(os.Getpid()), term) || !p.Heeds(0, term) || !p.Heeds(1, syscall.SIGKILL) {
		t.Error("this process heeds, and who does not exist")
	}
}
