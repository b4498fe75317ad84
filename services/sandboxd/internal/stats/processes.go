package stats

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/podmetrics"
)

// Processes looks at every process of a container's cgroup and of those below it. It costs
// a system call for each open file and a small file for each thread.
func (r *Reader) Processes(cgroupsPath string) podmetrics.Processes {
	var out podmetrics.Processes
	for i, pid := range r.pids(Path(cgroupsPath)) {
		out.Count++
		if i == 0 {
			out.OpenFilesLimit = openFilesLimit(filepath.Join(r.proc, pid, "limits"))
		}
		r.threads(pid, &out)
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

// threads counts the threads of a process by their states.
func (r *Reader) threads(pid string, into *podmetrics.Processes) {
	folder := filepath.Join(r.proc, pid, "task")
	entries, err := os.ReadDir(folder)
	if err != nil {
		return // ended meanwhile
	}
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join(folder, e.Name(), "stat"))
		if err != nil {
			continue // ended meanwhile
		}
		switch threadState(string(text)) {
		case 'R':
			into.Running++
		case 'S', 'I':
			into.Sleeping++
		case 'T', 't':
			into.Stopped++
		case 'D':
			into.Uninterruptible++
		}
	}
}

// threadState is the letter of a state in the text of a thread's stat: what follows the name,
// which is in parentheses and may have any itself; 0 if there is none.
func threadState(stat string) byte {
	at := strings.LastIndex(stat, ") ")
	if at < 0 || at+2 >= len(stat) {
		return 0
	}
	return stat[at+2]
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
