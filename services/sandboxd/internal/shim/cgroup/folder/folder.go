// Package folder does what is done alike with the folders of control groups of version 1 and 2,
// whoever has found them: it lists processes, and clears the way for their end.
package folder

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// freezerState is the file by which a group of version 1 is frozen.
const freezerState = "freezer.state"

// Pids lists the processes of groups and of the groups below them, in ascending order. A group
// that is gone has none.
func Pids(dirs ...string) ([]int, error) {
	var pids []int
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.IsDir() {
				return skipGone(err)
			}
			data, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
			for field := range strings.FieldsSeq(string(data)) {
				// 0 stands for a process of another process namespace, which has no number here.
				if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
					pids = append(pids, pid)
				}
			}
			return skipGone(err)
		})
		if err != nil {
			return nil, fmt.Errorf("processes of cgroup %s: %w", dir, err)
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}

// skipGone forgives what disappears while it is read, and groups that hold only threads.
func skipGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return err
}

// Kill has the kernel kill the processes of a group where it can, which is so in version 2, and
// thaws the group, so that it can be done one by one where it cannot.
func Kill(dir string) {
	_ = Write(filepath.Join(dir, "cgroup.kill"), "1")
	Thaw(dir)
}

// Thaw thaws a group and those below it, which a container may have made and frozen itself: in
// a frozen group of version 1 nothing dies. In version 2 frozen processes do.
func Thaw(dir string) {
	if _, err := os.Lstat(filepath.Join(dir, freezerState)); err != nil {
		return // another hierarchy
	}
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			_ = Write(filepath.Join(path, freezerState), "THAWED")
		}
		return nil
	})
}

// Write writes to a control file without ever making one.
func Write(file, value string) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}
