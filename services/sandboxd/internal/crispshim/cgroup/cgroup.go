// Package cgroup is the shim's view of a container's control group: its processes, its
// metrics, and what the kernel killed in it for lack of memory. It knows cgroup v1, v2 and
// both side by side.
//
// A group is found by a process that is in it, not by a name, and a group that the shim is in
// itself is never taken for a container's. The package makes, changes and removes no groups.
package cgroup

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/cgroup/folder"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/procs"
)

// Group is a control group in all hierarchies in which the container has one of its own. The
// zero value is no group.
type Group struct {
	// dirs are the folders by controller; "" is the hierarchy of version 2.
	dirs map[string]string
}

// Of returns the group that a process is in.
func Of(pid int) (Group, error) {
	paths, err := pathsOf(strconv.Itoa(pid))
	if err != nil {
		return Group{}, err
	}
	own, err := pathsOf("self")
	if err != nil {
		return Group{}, err
	}
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return m.FSType != "cgroup" && m.FSType != "cgroup2", false
	})
	if err != nil {
		return Group{}, fmt.Errorf("cgroup mounts: %w", err)
	}
	return locate(paths, own, mounts), nil
}

// locate finds the folders of paths under the mounts of the hierarchies.
func locate(paths, own map[string]string, mounts []*mountinfo.Info) Group {
	g := Group{dirs: map[string]string{}}
	for _, m := range mounts {
		for controller, path := range paths {
			if path == own[controller] || path == "/" || !mountOf(m, controller) {
				continue
			}
			rel := strings.TrimPrefix(path, strings.TrimSuffix(m.Root, "/"))
			if _, found := g.dirs[controller]; !found {
				g.dirs[controller] = filepath.Join(m.Mountpoint, rel)
			}
		}
	}
	return g
}

// mountOf says whether a mount is that of a controller's hierarchy.
func mountOf(m *mountinfo.Info, controller string) bool {
	if controller == "" {
		return m.FSType == "cgroup2"
	}
	if m.FSType != "cgroup" {
		return false
	}
	for opt := range strings.SplitSeq(m.VFSOptions, ",") {
		if opt == controller {
			return true
		}
	}
	return false
}

// pathsOf reads the groups of a process by controller.
func pathsOf(pid string) (map[string]string, error) {
	f, err := os.Open(filepath.Join("/proc", pid, "cgroup"))
	if err != nil {
		return nil, fmt.Errorf("cgroup of process %s: %w", pid, err)
	}
	defer f.Close()
	paths := map[string]string{}
	s := bufio.NewScanner(f)
	for s.Scan() {
		parts := strings.SplitN(s.Text(), ":", 3)
		if len(parts) != 3 {
			continue
		}
		for controller := range strings.SplitSeq(parts[1], ",") {
			paths[controller] = parts[2]
		}
	}
	return paths, s.Err()
}

// None says that the container has no group of its own.
func (g Group) None() bool { return len(g.dirs) == 0 }

// Unified says that the controllers are those of version 2.
func (g Group) Unified() bool {
	_, v1 := g.dirs["memory"]
	_, v2 := g.dirs[""]
	return v2 && !v1
}

// Parent is the group above, which the containers of a pod share.
func (g Group) Parent() Group {
	p := Group{dirs: map[string]string{}}
	for controller, dir := range g.dirs {
		p.dirs[controller] = filepath.Dir(dir)
	}
	return p
}

// main is the folder whose processes are those of the group.
func (g Group) main() string {
	for _, controller := range []string{"freezer", "pids", "memory", "cpu", "devices", "name=systemd", ""} {
		if dir, ok := g.dirs[controller]; ok {
			return dir
		}
	}
	return ""
}

// Pids lists the processes of the group and of the groups below it.
func (g Group) Pids() ([]int, error) {
	dir := g.main()
	if dir == "" {
		return nil, nil
	}
	return folder.Pids(dir)
}

// Signal sends a signal to every process of the group once.
func (g Group) Signal(sig unix.Signal) error { return procs.Signal(g.Pids, sig) }

// Kill sends SIGKILL to every process of the group until none is left. It fails with
// ErrUnavailable, naming the processes, if some outlive ctx.
func (g Group) Kill(ctx context.Context) error {
	left, err := procs.Kill(ctx, g.Pids, func() {
		for _, dir := range g.dirs {
			folder.Kill(dir)
		}
	})
	if len(left) > 0 {
		return fmt.Errorf("processes %v do not end: %w: %w", left, err, errdefs.ErrUnavailable)
	}
	return err
}

// Join moves a process into the group of a path, as of the root of each hierarchy.
func Join(path string, pid int) error {
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return m.FSType != "cgroup" && m.FSType != "cgroup2", false
	})
	if err != nil {
		return fmt.Errorf("cgroup mounts: %w", err)
	}
	joined := false
	for _, m := range mounts {
		err := folder.Write(filepath.Join(m.Mountpoint, path, "cgroup.procs"), strconv.Itoa(pid))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("join cgroup %s: %w", path, err)
		}
		joined = joined || err == nil
	}
	if !joined {
		return fmt.Errorf("cgroup %s: %w", path, errdefs.ErrNotFound)
	}
	return nil
}
