package stats

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/podmetrics"
)

// Processes looks at every process of a container's cgroup and of those below it. It costs
// a system call for each open file.
func (r *Reader) Processes(cgroupsPath string) podmetrics.Processes {
	var out podmetrics.Processes
	for i, pid := range r.pids(Path(cgroupsPath)) {
		out.Count++
		if i == 0 {
			out.OpenFilesLimit = openFilesLimit(filepath.Join(r.proc, pid, "limits"))
		}
		folder := filepath.Join(r.proc, pid, "fd")
		entries, err := os.ReadDir(folder)
		if err != nil {
			continue // ended meanwhile
		}
		for _, e := range entries {
			target, err := os.Readlink(filepath.Join(folder, e.Name()))
			if err != nil {
				continue // closed meanwhile
			}
			out.FileDescriptors++
			if strings.HasPrefix(target, "socket:") {
				out.Sockets++
			}
		}
	}
	return out
}

// pids lists the processes in a cgroup and below it, its own ones first.
func (r *Reader) pids(group string) []string {
	controller := "pids"
	if r.unified {
		controller = ""
	}
	pids := strings.Fields(r.text(controller, group, "cgroup.procs"))
	entries, err := os.ReadDir(filepath.Join(r.root, controller, group))
	if err != nil {
		return pids
	}
	for _, e := range entries {
		if e.IsDir() {
			pids = append(pids, r.pids(filepath.Join(group, e.Name()))...)
		}
	}
	return pids
}

// openFilesLimit reads the soft limit of open files from a process's limits.
func openFilesLimit(file string) uint64 {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		if values, ok := strings.CutPrefix(line, "Max open files"); ok {
			if fields := strings.Fields(values); len(fields) > 0 {
				return parse(fields[0])
			}
		}
	}
	return 0
}
