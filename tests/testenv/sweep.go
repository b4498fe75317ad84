package testenv

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/tests/leak"
)

// leakScope counts what is below the run folder and the network's addresses.
// What stays by design is left out: the processes' sockets while they run, the
// lock and the cursor of the address plugin, and what the network keeps for all
// pods, namely its bridge and the portmap plugin's top chains.
func (s *System) leakScope() leak.Scope {
	prefix := s.CgroupParent() + "/"
	if s.setup.AllCgroups {
		prefix = ""
	}
	return leak.Scope{
		CgroupPrefix: prefix,
		Dirs:         []string{s.layout.path("run"), s.layout.path("addresses")},
		Ignore: []*regexp.Regexp{
			regexp.MustCompile(`/run/nri-hub/`),           // The hub remembers its plugins over a restart.
			regexp.MustCompile(`/run/shim-events\.sock$`), // Shims of pods that outlive sandboxd look for it there.
			regexp.MustCompile(`^link: crisp0 \(bridge\)$`),
			regexp.MustCompile(`/addresses/crisp-test(/lock|/last_reserved_ip\.\d+)?$`),
			regexp.MustCompile(`^iptables: .*CNI-(HOSTPORT-(DNAT|MASQ|SETMARK)|DN-|ADMIN|FORWARD)`),
			// Only folders named by an id are an object's own, and those beside the shims' sockets.
			regexp.MustCompile(`^file: d--------- .*/([^/s]|[^/]{2,})/[^/]{0,63}$`),
			regexp.MustCompile(`^socket: tcp`),
		},
	}
}

// LeakScope is what counts as left behind by the pods of the system while it runs on: its
// own processes, which may have been started again, do not.
func (s *System) LeakScope() leak.Scope {
	scope := s.leakScope()
	scope.Ignore = append(scope.Ignore, regexp.MustCompile(`^process: .*`+regexp.QuoteMeta(s.layout.path("etc"))+`/[a-z-]+\.toml`))
	return scope
}

// sweep ends what a broken run left, so that the next one starts clean: the
// processes that have the folder in their command line, with all their
// descendants, the pods' parent cgroup, and all mounts below the folder.
func (s *System) sweep() error {
	return errors.Join(s.killLeft(), s.removeCgroups(), s.unmountLeft())
}

func (s *System) killLeft() error {
	parents, roots, err := s.processTable()
	if err != nil {
		return err
	}
	var problems []error
	for pid := range parents {
		for up := pid; up > 1; up = parents[up] {
			if !roots[up] {
				continue
			}
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				problems = append(problems, fmt.Errorf("kill %d: %w", pid, err))
			}
			break
		}
	}
	return errors.Join(problems...)
}

// processTable gives each process's parent, and the processes that this system
// has started: those with its folder in their command line.
func (s *System) processTable() (parents map[int]int, roots map[int]bool, err error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, nil, err
	}
	parents, roots = map[int]int{}, map[int]bool{}
	for _, dir := range dirs {
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil || pid == os.Getpid() {
			continue
		}
		stat, err := os.ReadFile(filepath.Join(dir, "stat"))
		if err != nil {
			continue // It has ended meanwhile.
		}
		// The name in parentheses may hold anything: count from the last one.
		field := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if parents[pid], err = strconv.Atoi(field[1]); err != nil {
			return nil, nil, fmt.Errorf("parent of %d: %w", pid, err)
		}
		cmdline, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		roots[pid] = err == nil && strings.Contains(string(cmdline), s.layout.root)
	}
	return parents, roots, nil
}

// removeCgroups removes the system's own parent cgroup with all that is below it.
func (s *System) removeCgroups() error {
	hierarchies, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return err
	}
	var problems []error
	for _, h := range hierarchies {
		var dirs []string
		err := filepath.WalkDir(filepath.Join(h.Mountpoint, s.CgroupParent()), func(path string, d os.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		problems = append(problems, err)
		for _, dir := range slices.Backward(dirs) {
			problems = append(problems, removeCgroup(dir))
		}
	}
	return errors.Join(problems...)
}

// removeCgroup waits a moment for the kernel to let go of processes that were killed.
func removeCgroup(dir string) error {
	var err error
	for range 20 {
		err = os.Remove(dir)
		if err == nil || errors.Is(err, os.ErrNotExist) {
			return nil
		}
		<-time.After(50 * time.Millisecond)
	}
	return err
}

func (s *System) unmountLeft() error {
	left, err := mountinfo.GetMounts(mountinfo.PrefixFilter(s.layout.root))
	if err != nil {
		return err
	}
	slices.SortFunc(left, func(a, b *mountinfo.Info) int { return len(b.Mountpoint) - len(a.Mountpoint) })
	var problems []error
	for _, m := range left {
		if err := unix.Unmount(m.Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
			problems = append(problems, fmt.Errorf("unmount %s: %w", m.Mountpoint, err))
		}
	}
	return errors.Join(problems...)
}
