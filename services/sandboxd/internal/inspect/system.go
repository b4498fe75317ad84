package inspect

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/core/snapshots"
	snapshotdb "github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"
	"github.com/moby/sys/mountinfo"
	"go.etcd.io/bbolt" //nolint:depguard // reads a copy of the image library's database

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/erofs"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/storage"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/inspect/rules"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/procs"
)

var (
	// groupName is the name of a container's cgroup, with cgroupfs and with systemd.
	groupName = regexp.MustCompile(`^(?:crisp-)?([0-9a-f]{64})(?:\.scope)?$`)
	idWithin  = regexp.MustCompile(`[0-9a-f]{64}`)
)

// lookAtProcesses lists all processes and finds the shims among them: those in this mount
// namespace that work in a bundle, also in one that was removed. Processes of containers
// have mount namespaces of their own and cannot pretend.
func (m *machine) lookAtProcesses() error {
	m.Pids, m.Shims = map[int]bool{}, map[string][]int{}
	own, err := os.Readlink(filepath.Join("/proc", "self", "ns", "mnt"))
	if err != nil {
		return err
	}
	all, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	bundles := filepath.Join(m.State, "shims") + "/"
	for _, e := range all {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		m.Pids[pid] = true
		cwd, err := os.Readlink(filepath.Join("/proc", e.Name(), "cwd"))
		if err != nil || !strings.HasPrefix(cwd, bundles) {
			continue
		}
		namespace, err := os.Readlink(filepath.Join("/proc", e.Name(), "ns", "mnt"))
		// What works in a container's bundle is the OCI runtime, for a moment.
		id := strings.TrimSuffix(strings.TrimPrefix(cwd, bundles), " (deleted)")
		if err == nil && namespace == own && !strings.Contains(id, "/") && !procs.HasTerminal(pid) {
			id = strings.TrimPrefix(id, ".old-")
			m.Shims[id] = append(m.Shims[id], pid)
		}
	}
	return nil
}

// groupParents are the cgroups below which containers have theirs: kubelet's, the default
// ones and those that records name.
func groupParents(rec rules.Records) []string {
	parents := []string{"/crisp", "/kubepods", "/kubepods.slice", "/system.slice"}
	add := func(parent string) {
		if strings.HasSuffix(parent, ".slice") {
			// A slice a-b.slice lies in a.slice.
			top, _, _ := strings.Cut(strings.TrimSuffix(path.Base(parent), ".slice"), "-")
			parent = top + ".slice"
		}
		if parent = path.Join("/", parent); parent != "/" {
			parents = append(parents, parent)
		}
	}
	for _, s := range rec.Sandboxes {
		add(s.GetConfig().GetLinux().GetCgroupParent())
	}
	for _, c := range rec.Containers {
		if slice, _, systemd := strings.Cut(c.GetCgroupsPath(), ":"); systemd {
			add(slice)
		} else if c.GetCgroupsPath() != "" {
			add(path.Dir(c.GetCgroupsPath()))
		}
	}
	slices.Sort(parents)
	return slices.Compact(parents)
}

// lookAtGroups finds the groups that are named by an id, in all hierarchies.
func (m *machine) lookAtGroups(parents []string) error {
	m.Cgroups = map[string][]string{}
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return fmt.Errorf("cgroup mounts: %w", err)
	}
	var errs []error
	for _, h := range mounts {
		for _, parent := range parents {
			errs = append(errs, m.walkGroups(filepath.Join(h.Mountpoint, parent)))
		}
	}
	return errors.Join(errs...)
}

// walkGroups adds the groups below one; what containers made in theirs is not entered.
func (m *machine) walkGroups(top string) error {
	return filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case !d.IsDir():
			return nil
		}
		found := groupName.FindStringSubmatch(d.Name())
		if found == nil {
			return nil
		}
		if !slices.Contains(m.Cgroups[found[1]], path) {
			m.Cgroups[found[1]] = append(m.Cgroups[found[1]], path)
		}
		return fs.SkipDir
	})
}

// lookAtLayers reads the writable layers of containers from a copy of the database of
// containerd's libraries: v1/<namespace>/snapshots/<snapshotter>/<key>/labels.
func (m *machine) lookAtLayers(ctx context.Context) error {
	from := filepath.Join(m.Root, "images", "meta.db")
	if _, err := os.Stat(from); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return withCopy(ctx, from, func(path string) error {
		db, err := bbolt.Open(path, 0o600, &bbolt.Options{ReadOnly: true})
		if err != nil {
			return fmt.Errorf("image database: %w", err)
		}
		defer db.Close() //nolint:errcheck // nothing was written
		m.Layered = true
		return db.View(func(tx *bbolt.Tx) error {
			snapshots := within(tx.Bucket([]byte("v1")), pod.Namespace, "snapshots")
			if snapshots == nil {
				return nil
			}
			return snapshots.ForEachBucket(func(snapshotter []byte) error {
				b := snapshots.Bucket(snapshotter)
				return b.ForEachBucket(func(key []byte) error {
					labels := within(b, string(key), "labels")
					if labels != nil && string(labels.Get([]byte("crisp/container"))) == "true" {
						m.Layers = append(m.Layers, string(key))
					}
					return nil
				})
			})
		})
	})
}

// lookAtErofs finds where layers of the erofs snapshotter are to be mounted, of its own database.
func (m *machine) lookAtErofs(ctx context.Context) error {
	root := filepath.Join(m.Root, "images", storage.Erofs)
	from := filepath.Join(root, "metadata.db")
	if _, err := os.Stat(from); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return withCopy(ctx, from, func(path string) error {
		db, err := snapshotdb.NewMetaStore(path)
		if err != nil {
			return fmt.Errorf("database of the erofs snapshotter: %w", err)
		}
		err = db.WithTransaction(ctx, false, func(ctx context.Context) error {
			var err error
			m.Lower, _, err = erofs.Folders(ctx, root, walkInfo{})
			return err
		})
		return errors.Join(err, db.Close())
	})
}

// walkInfo lists the snapshots of the transaction in the context.
type walkInfo struct{}

// Walk implements erofs.Walker.
func (walkInfo) Walk(ctx context.Context, fn snapshots.WalkFunc, filters ...string) error {
	err := snapshotdb.WalkInfo(ctx, fn, filters...)
	if errdefs.IsNotFound(err) {
		return nil // nothing was ever recorded
	}
	return err
}

func within(b *bbolt.Bucket, names ...string) *bbolt.Bucket {
	for _, name := range names {
		if b == nil {
			return nil
		}
		b = b.Bucket([]byte(name))
	}
	return b
}

// lookAtAddresses reads whom the host-local plugin holds addresses for, as far as the
// network configurations tell where it keeps them.
func (m *machine) lookAtAddresses(confDir string) error {
	m.Addresses = map[string]string{}
	files, err := filepath.Glob(filepath.Join(confDir, "*.conf*"))
	if err != nil {
		return err
	}
	for _, file := range files {
		for _, dir := range addressFolders(file) {
			held, _, err := entries(dir)
			if err != nil {
				return err
			}
			for _, name := range held {
				text, err := os.ReadFile(filepath.Join(dir, name))
				id, _, _ := strings.Cut(string(text), "\n")
				if id = strings.TrimSpace(id); err == nil && rules.IsID(id) {
					m.Addresses[filepath.Join(dir, name)] = id
				}
			}
		}
	}
	return nil
}

// addressFolders gives the folders in which a configuration's host-local plugins keep
// their addresses. Configurations of which that cannot be told have none.
func addressFolders(file string) []string {
	type plugin struct {
		IPAM struct {
			Type    string `json:"type"`
			DataDir string `json:"dataDir"`
		} `json:"ipam"`
	}
	var network struct {
		plugin

		Name    string   `json:"name"`
		Plugins []plugin `json:"plugins"`
	}
	text, err := os.ReadFile(file)
	if err != nil || json.Unmarshal(text, &network) != nil {
		return nil
	}
	var dirs []string
	for _, p := range append(network.Plugins, network.plugin) {
		if p.IPAM.Type != "host-local" {
			continue
		}
		if p.IPAM.DataDir == "" {
			p.IPAM.DataDir = "/var/lib/cni/networks"
		}
		dirs = append(dirs, filepath.Join(p.IPAM.DataDir, network.Name))
	}
	return dirs
}
