package stats

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/podmetrics"
)

// Filesystem describes the file system that a folder is on. What cannot be found out is
// zero.
func (*Reader) Filesystem(folder string) podmetrics.Filesystem {
	var out podmetrics.Filesystem
	var st unix.Statfs_t
	if unix.Statfs(folder, &st) == nil {
		out.Bytes = st.Blocks * uint64(max(st.Bsize, 0))
		out.Inodes, out.InodesFree = st.Files, st.Ffree
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err == nil {
		out.Device = deviceOf(folder, string(mounts))
	}
	return out
}

// deviceOf finds the source of the mount that a folder is below in the text of mountinfo;
// of several at the same place the last one counts.
func deviceOf(folder, mounts string) string {
	var device string
	longest := -1
	for line := range strings.Lines(mounts) {
		before, after, ok := strings.Cut(line, " - ")
		fields, source := strings.Fields(before), strings.Fields(after)
		if !ok || len(fields) < 5 || len(source) < 2 {
			continue
		}
		at := fields[4]
		if at != "/" && folder != at && !strings.HasPrefix(folder, at+"/") {
			continue
		}
		if len(at) >= longest {
			longest, device = len(at), source[1]
		}
	}
	return device
}

// DeviceName names a block device, such as "/dev/sda"; one that is gone is named by its
// numbers.
func (*Reader) DeviceName(major, minor uint64) string {
	numbers := fmt.Sprintf("%d:%d", major, minor)
	text, err := os.ReadFile(filepath.Join("/sys/dev/block", numbers, "uevent"))
	if err != nil {
		return numbers
	}
	for line := range strings.Lines(string(text)) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "DEVNAME="); ok {
			return "/dev/" + name
		}
	}
	return numbers
}
