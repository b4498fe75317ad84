package rootfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/continuity/fs"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// FillVolumes copies folders of the image below a layer into folders of the node, with
// owners, modes and extended attributes, by the path in the image. A folder that the image
// does not have becomes an empty one; a folder of the node that is not empty was filled
// before and is left alone. A copy appears whole or not at all.
// Errors: ErrNotFound for an unknown layer, ErrFailedPrecondition if the path is no folder in
// the image.
func (r *Rootfs) FillVolumes(ctx context.Context, key, snapshotter string, folders map[string]string) error {
	if len(folders) == 0 {
		return nil
	}
	ctx = r.st.Context(ctx)
	sn, name, err := r.st.Snapshotter(snapshotter)
	if err != nil {
		return err
	}
	info, err := sn.Stat(ctx, key)
	if err != nil {
		return fmt.Errorf("writable layer %q in %s: %w", key, name, err)
	}
	if info.Parent == "" {
		return makeEmpty(folders)
	}
	return r.st.ReadOnly(ctx, name, info.Parent, func(mounts []mount.Mount) error {
		return mount.WithReadonlyTempMount(ctx, mounts, func(root string) error {
			for path, target := range folders {
				if err := fill(ctx, root, path, target); err != nil {
					return fmt.Errorf("volume %q of the image: %w", path, err)
				}
			}
			return nil
		})
	})
}

func makeEmpty(folders map[string]string) error {
	for _, target := range folders {
		if err := os.MkdirAll(target, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// fill copies one folder of an image mounted on root.
func fill(ctx context.Context, root, path, target string) error {
	if err := makeEmpty(map[string]string{path: target}); err != nil {
		return err
	}
	if entries, err := os.ReadDir(target); err != nil || len(entries) > 0 {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	fd, err := openInRoot(root, path, unix.O_DIRECTORY)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.ENOTDIR):
		return fmt.Errorf("not a folder: %w", errdefs.ErrFailedPrecondition)
	case err != nil:
		return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	defer unix.Close(fd)
	tmp := filepath.Join(filepath.Dir(target), ".new-"+filepath.Base(target))
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	// Attributes that the file system of the volumes does not know are left out.
	if err := fs.CopyDir(tmp, fmt.Sprintf("/proc/self/fd/%d", fd), fs.WithAllowXAttrErrors()); err != nil {
		return errors.Join(err, os.RemoveAll(tmp))
	}
	// os.Rename does not replace folders, not even empty ones.
	if err := unix.Rename(tmp, target); err != nil {
		return errors.Join(err, os.RemoveAll(tmp))
	}
	return nil
}

// openInRoot opens a path of an image for looking at it only. The kernel resolves the path as
// if root were "/".
func openInRoot(root, path string, flags uint64) (int, error) {
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("root %s: %w", root, err)
	}
	defer unix.Close(dir)
	return unix.Openat2(dir, path, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC | flags,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
}
