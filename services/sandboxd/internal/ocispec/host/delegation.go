package host

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// Delegation is where containers can have control groups. The zero value is anywhere.
type Delegation struct {
	// None says that the daemon may make groups nowhere: containers run without one, and so
	// without limits and figures. Why is the reason, in words.
	None bool
	Why  string
	// Root is the group below which the daemon may make others, as in /proc/self/cgroup; empty is
	// anywhere.
	Root string
}

// DefaultParent is the group of the containers of pods that name none.
const DefaultParent = "/crisp"

// Parent checks the group that a pod wants for its containers, and is a default one if it wants
// none. Errors: ErrFailedPrecondition for one outside of what is delegated.
func (d Delegation) Parent(asked string) (string, error) {
	if asked == "" {
		return path.Join("/", d.Root, DefaultParent), nil
	}
	clean := path.Join("/", asked)
	if d.Root == "" || d.Root == "/" || clean == d.Root || strings.HasPrefix(clean, d.Root+"/") {
		return clean, nil
	}
	return "", fmt.Errorf("cgroup parent %q: sandboxd runs in a user namespace and may make groups below %q alone: %w",
		asked, d.Root, errdefs.ErrFailedPrecondition)
}

// Confine takes from a specification what only a group can give, if there is none. The rules of
// devices stay: no runtime heeds them in a user namespace, and some want them.
func (d Delegation) Confine(spec *specs.Linux) {
	if !d.None {
		return
	}
	spec.CgroupsPath = ""
	if spec.Resources != nil {
		spec.Resources = &specs.LinuxResources{Devices: spec.Resources.Devices}
	}
}

// hierarchy is a mounted hierarchy of groups and the group of this process in it.
type hierarchy struct {
	mountpoint, root, own string
}

// delegated looks for the highest group below which this process may make others, in all
// hierarchies that have controllers: its own or one above.
func delegated(unified bool) (Delegation, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return Delegation{}, fmt.Errorf("cgroup mounts: %w", err)
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return Delegation{}, fmt.Errorf("own cgroups: %w", err)
	}
	return choose(hierarchies(mounts, string(own), unified)), nil
}

// hierarchies are those that have controllers.
func hierarchies(mounts []*mountinfo.Info, own string, unified bool) []hierarchy {
	groups := map[string]string{}
	for s := bufio.NewScanner(strings.NewReader(own)); s.Scan(); {
		if parts := strings.SplitN(s.Text(), ":", 3); len(parts) == 3 {
			groups[parts[1]] = parts[2]
		}
	}
	found := map[string]hierarchy{}
	for _, m := range mounts {
		for controllers, group := range groups {
			if unified != (controllers == "") || strings.HasPrefix(controllers, "name=") || !isOf(m, controllers) {
				continue
			}
			found[controllers] = hierarchy{mountpoint: m.Mountpoint, root: m.Root, own: group} // the last mount covers those before
		}
	}
	out := make([]hierarchy, 0, len(found))
	for _, name := range slices.Sorted(maps.Keys(found)) {
		out = append(out, found[name])
	}
	return out
}

// isOf says whether a mount is that of a hierarchy, by its controllers.
func isOf(m *mountinfo.Info, controllers string) bool {
	if controllers == "" {
		return m.FSType == "cgroup2"
	}
	options := strings.Split(m.VFSOptions, ",")
	for c := range strings.SplitSeq(controllers, ",") {
		if !slices.Contains(options, c) {
			return false
		}
	}
	return m.FSType == "cgroup"
}

// choose picks the highest group that is this process's own or above it somewhere, and in which
// it may make groups and move processes everywhere.
func choose(all []hierarchy) Delegation {
	if len(all) == 0 {
		return Delegation{None: true, Why: "no hierarchy of control groups is mounted"}
	}
	candidates := map[string]bool{"/": true}
	for _, h := range all {
		for group := path.Clean(h.own); group != "/" && group != "."; group = path.Dir(group) {
			candidates[group] = true
		}
	}
	sorted := slices.Sorted(maps.Keys(candidates))
	slices.SortStableFunc(sorted, func(a, b string) int { return len(a) - len(b) })
	var nearest error
	for _, group := range sorted {
		err := usable(all, group)
		if err == nil {
			return Delegation{Root: group}
		}
		if !errors.Is(err, fs.ErrNotExist) || nearest == nil {
			nearest = err
		}
	}
	return Delegation{None: true, Why: "no control group is delegated to the user who started sandboxd: " + nearest.Error()}
}

// usable says whether groups can be made below one, in all hierarchies.
func usable(all []hierarchy, group string) error {
	for _, h := range all {
		below, inside := strings.CutPrefix(group, strings.TrimSuffix(h.root, "/"))
		if !inside || (below != "" && below[0] != '/') {
			return &fs.PathError{Op: "find", Path: group + " below " + h.mountpoint, Err: fs.ErrNotExist}
		}
		folder := filepath.Join(h.mountpoint, below)
		for _, file := range []string{folder, filepath.Join(folder, "cgroup.procs")} {
			if err := unix.Faccessat(unix.AT_FDCWD, file, unix.W_OK, unix.AT_EACCESS); err != nil {
				return &fs.PathError{Op: "write", Path: file, Err: err}
			}
		}
	}
	return nil
}
