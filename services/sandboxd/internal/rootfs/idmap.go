package rootfs

import (
	"os"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay/overlayutils"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/storage"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// mapped adds to labels those by which a snapshotter knows the ids of a user namespace.
func mapped(labels map[string]string, ids pod.IDMap) map[string]string {
	if !ids.IsZero() {
		labels[snapshots.LabelSnapshotUIDMapping] = pod.MappingText(ids.UIDs)
		labels[snapshots.LabelSnapshotGIDMapping] = pod.MappingText(ids.GIDs)
	}
	return labels
}

// mapMounts adds the mapping to the mounts of a snapshotter that does not do so itself. Who
// mounts them shifts the ids.
func mapMounts(mounts []mount.Mount, labels map[string]string) []mount.Mount {
	uids, gids := labels[snapshots.LabelSnapshotUIDMapping], labels[snapshots.LabelSnapshotGIDMapping]
	if uids == "" {
		return mounts
	}
	out := slices.Clone(mounts)
	for i, m := range out {
		isMap := func(o string) bool { return strings.HasPrefix(o, "uidmap=") }
		if !slices.ContainsFunc(m.Options, isMap) {
			out[i].Options = append(slices.Clone(m.Options), "uidmap="+uids, "gidmap="+gids)
		}
	}
	return out
}

// mountReadOnly mounts what a snapshotter shows. A folder whose ids are shifted becomes
// read-only as the last step, after the shift.
func mountReadOnly(mounts []mount.Mount, target string) error {
	for _, m := range mounts {
		shifted := m.Type == "bind" && slices.ContainsFunc(m.Options, func(o string) bool { return strings.HasPrefix(o, "uidmap=") })
		if shifted {
			m.Options = slices.DeleteFunc(slices.Clone(m.Options), func(o string) bool { return o == "ro" })
		}
		if err := m.Mount(target); err != nil {
			return err
		}
		if !shifted {
			continue
		}
		if err := unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
			return err
		}
	}
	return nil
}

// MapsIDs says whether the kernel can show the layers of a snapshotter (empty for the default one),
// and the files beside them, with the ids of a user namespace. Of a snapshotter in another process
// it is the file system with its folder that counts.
func (r *Rootfs) MapsIDs(snapshotter string) bool {
	const some = "0:1000:1000"
	ns, err := mount.GetUsernsFD(some, some)
	if err != nil {
		return false
	}
	defer ns.Close()
	if snapshotter == "" {
		snapshotter = r.st.DefaultSnapshotter()
	}
	if !mapsIDs(r.st.Mountpoint(r.st.DefaultSnapshotter()), ns) || !mapsIDs(r.st.Mountpoint(snapshotter), ns) {
		return false
	}
	if snapshotter == storage.Native {
		return true
	}
	ok, err := overlayutils.SupportsIDMappedMounts()
	return err == nil && ok
}

// mapsIDs says whether the file system with a folder can be shown with the ids of a user namespace.
func mapsIDs(folder string, ns *os.File) bool {
	tree, err := unix.OpenTree(unix.AT_FDCWD, folder, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return false
	}
	defer unix.Close(tree)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(ns.Fd())}
	return unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr) == nil
}
