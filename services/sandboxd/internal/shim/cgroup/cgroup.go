// Package cgroup finds and ends the processes of a container by its control group, for the
// times when no shim is left to do it. It knows cgroup v1, v2 and both side by side.
//
// It never touches a group whose name does not carry the container's id: a wrong path must
// not end anything else. It changes no limits, and the groups that it makes are empty.
package cgroup

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/cgroup/folder"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/procs"
)

// Group is the control group of a container in all hierarchies in which it exists.
type Group struct {
	id   string
	dirs []string
}

// Find looks up the control group of a container by the cgroupsPath of its OCI
// specification, in the cgroupfs ("/a/b/<id>") or the systemd form ("slice:prefix:<id>").
// A container without any group has an empty one.
func Find(id, cgroupsPath string) (Group, error) {
	g := Group{id: id}
	dirs, err := places(id, cgroupsPath)
	if err != nil {
		return g, err
	}
	for _, dir := range dirs {
		if isDir(dir) {
			g.dirs = append(g.dirs, dir)
		}
	}
	return g, nil
}

// Make makes an empty group for an id, in all hierarchies that have its parent. A group that
// is there is no error. Errors: as Find, ErrNotFound if no hierarchy has the parent.
func Make(id, cgroupsPath string) (Group, error) {
	g := Group{id: id}
	dirs, err := places(id, cgroupsPath)
	if err != nil {
		return g, err
	}
	for _, dir := range dirs {
		err := os.Mkdir(dir, 0o755)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return g, errors.Join(err, g.Remove())
		}
		g.dirs = append(g.dirs, dir)
	}
	if len(g.dirs) == 0 {
		return g, fmt.Errorf("parent of cgroup %q: %w", cgroupsPath, errdefs.ErrNotFound)
	}
	return g, nil
}

// places are the folders that a group has or would have, one in each hierarchy.
func places(id, cgroupsPath string) ([]string, error) {
	path, err := resolve(id, cgroupsPath)
	if err != nil {
		return nil, err
	}
	if id == "" || !strings.Contains(filepath.Base(path), id) {
		return nil, fmt.Errorf("cgroup %q does not name container %q: %w", path, id, errdefs.ErrInvalidArgument)
	}
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return m.FSType != "cgroup" && m.FSType != "cgroup2", false
	})
	if err != nil {
		return nil, fmt.Errorf("cgroup mounts: %w", err)
	}
	own, err := ownGroups("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	var out []string
	for _, m := range mounts {
		dir := filepath.Join(m.Mountpoint, within(path, m, own))
		if !slices.Contains(out, dir) {
			out = append(out, dir)
		}
	}
	return out, nil
}

func isDir(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.IsDir()
}

// within is the group's path below a mount point. A relative path starts at the group of
// this process, as it does for OCI runtimes.
func within(path string, m *mountinfo.Info, own map[string]string) string {
	if filepath.IsAbs(path) {
		return strings.TrimPrefix(path, strings.TrimSuffix(m.Root, "/"))
	}
	if m.FSType == "cgroup2" {
		return filepath.Join(own[""], path)
	}
	for opt := range strings.SplitSeq(m.VFSOptions, ",") {
		if base, ok := own[opt]; ok {
			return filepath.Join(base, path)
		}
	}
	return path
}

// ownGroups reads the groups of this process by controller; "" is the unified hierarchy.
func ownGroups(file string) (map[string]string, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	own := map[string]string{}
	for s := bufio.NewScanner(f); s.Scan(); {
		parts := strings.SplitN(s.Text(), ":", 3)
		if len(parts) != 3 {
			continue
		}
		for c := range strings.SplitSeq(parts[1], ",") {
			own[c] = parts[2]
		}
	}
	return own, nil
}

// resolve turns a cgroupsPath of an OCI specification into a path of the hierarchy.
func resolve(id, cgroupsPath string) (string, error) {
	parts := strings.Split(cgroupsPath, ":")
	switch {
	case cgroupsPath == "":
		return id, nil
	case len(parts) == 1:
		clean := filepath.Clean(cgroupsPath)
		if clean == ".." || strings.HasPrefix(clean, "../") {
			return "", fmt.Errorf("cgroup %q leaves its parent: %w", cgroupsPath, errdefs.ErrInvalidArgument)
		}
		return clean, nil
	case len(parts) != 3:
		return "", fmt.Errorf("cgroup %q is neither a path nor slice:prefix:name: %w", cgroupsPath, errdefs.ErrInvalidArgument)
	}
	slice, prefix, name := parts[0], parts[1], parts[2]
	if slice == "" {
		slice = "system.slice"
	}
	dir, err := expandSlice(slice)
	if err != nil {
		return "", err
	}
	if strings.HasSuffix(name, ".slice") {
		return filepath.Join(dir, name), nil
	}
	if prefix != "" {
		name = prefix + "-" + name
	}
	return filepath.Join(dir, name+".scope"), nil
}

// expandSlice turns a systemd slice into its path: a-b.slice lies in /a.slice/a-b.slice.
func expandSlice(slice string) (string, error) {
	name, ok := strings.CutSuffix(slice, ".slice")
	if !ok || strings.Contains(name, "/") {
		return "", fmt.Errorf("cgroup slice %q: %w", slice, errdefs.ErrInvalidArgument)
	}
	path := "/"
	if name == "-" {
		return path, nil
	}
	prefix := ""
	for part := range strings.SplitSeq(name, "-") {
		if part == "" {
			return "", fmt.Errorf("cgroup slice %q: %w", slice, errdefs.ErrInvalidArgument)
		}
		path = filepath.Join(path, prefix+part+".slice")
		prefix += part + "-"
	}
	return path, nil
}

// Pids lists the processes of the group and of the groups below it.
func (g Group) Pids() ([]int, error) {
	pids, err := folder.Pids(g.dirs...)
	if err != nil {
		return nil, fmt.Errorf("container %q: %w", g.id, err)
	}
	return pids, nil
}

// scoreRounds bounds the search for processes that were forked while others were changed.
const scoreRounds = 5

// SetOOMScore changes the OOM score adjustment of the group's processes from one value to
// another. A process that has given itself another value keeps it; one that ends meanwhile is
// no error.
func (g Group) SetOOMScore(from, to int) error {
	for range scoreRounds {
		pids, err := g.Pids()
		if err != nil {
			return err
		}
		changed := false
		for _, pid := range pids {
			one, err := setOOMScore(pid, from, to)
			if err != nil {
				return fmt.Errorf("oom_score_adj of container %q: %w", g.id, err)
			}
			changed = changed || one
		}
		if !changed {
			return nil
		}
	}
	return nil
}

func setOOMScore(pid, from, to int) (changed bool, err error) {
	file := fmt.Sprintf("/proc/%d/oom_score_adj", pid)
	have, err := os.ReadFile(file)
	if err != nil {
		return false, skipEnded(err)
	}
	if strings.TrimSpace(string(have)) != strconv.Itoa(from) {
		return false, nil
	}
	err = os.WriteFile(file, []byte(strconv.Itoa(to)), 0)
	return err == nil, skipEnded(err)
}

// skipEnded forgives what a process is gone for.
func skipEnded(err error) error {
	if errors.Is(err, unix.ESRCH) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Kill sends SIGKILL to every process of the group until none is left. It fails with
// ErrDeadlineExceeded, naming the processes, if some outlive ctx.
func (g Group) Kill(ctx context.Context) error {
	left, err := procs.Kill(ctx, g.Pids, func() {
		for _, dir := range g.dirs {
			folder.Kill(dir)
		}
	})
	if len(left) > 0 {
		return fmt.Errorf("container %q: processes %v do not end: %w", g.id, left, err)
	}
	return err
}

// Thaw thaws the group and those below it.
func (g Group) Thaw() {
	for _, dir := range g.dirs {
		folder.Thaw(dir)
	}
}

// Remove removes the empty groups; what is gone already is not an error.
func (g Group) Remove() error {
	var errs []error
	for _, dir := range g.dirs {
		var below []string
		_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				below = append(below, path)
			}
			return nil
		})
		slices.Reverse(below)
		for _, path := range below {
			if err := unix.Rmdir(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, &fs.PathError{Op: "rmdir", Path: path, Err: err})
			}
		}
	}
	return errors.Join(errs...)
}
