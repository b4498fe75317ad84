package launch

import (
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"
)

// Rlimits translates names of limits, such as "nofile", into the kernel's numbers.
func Rlimits(named map[string]uint64) (map[int]uint64, error) {
	known := map[string]int{
		"as": unix.RLIMIT_AS, "core": unix.RLIMIT_CORE, "cpu": unix.RLIMIT_CPU, "data": unix.RLIMIT_DATA,
		"fsize": unix.RLIMIT_FSIZE, "memlock": unix.RLIMIT_MEMLOCK, "nofile": unix.RLIMIT_NOFILE,
		"nproc": unix.RLIMIT_NPROC, "stack": unix.RLIMIT_STACK,
	}
	limits := make(map[int]uint64, len(named))
	for name, value := range named {
		n, ok := known[name]
		if !ok {
			return nil, fmt.Errorf("limit %q is not known, write one of %v", name, slices.Sorted(maps.Keys(known)))
		}
		limits[n] = value
	}
	return limits, nil
}

// limit gives a process that was just started its limits; they hold from then on, also
// for its children.
func limit(pid int, named map[string]uint64) error {
	limits, err := Rlimits(named)
	if err != nil {
		return err
	}
	for n, value := range limits {
		if err := unix.Prlimit(pid, n, &unix.Rlimit{Cur: value, Max: value}, nil); err != nil {
			return fmt.Errorf("limit %d of process %d: %w", n, pid, err)
		}
	}
	return nil
}
