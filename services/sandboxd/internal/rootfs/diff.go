package rootfs

import (
	"context"
	"fmt"
	"io"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/pkg/archive"
	"github.com/containerd/errdefs"
)

// Diff writes what a container changed in its root file system as a tar archive in the form
// of an image layer. What writes to the layer meanwhile may be seen by half: pause it.
// Errors: ErrNotFound.
func (r *Rootfs) Diff(ctx context.Context, key, snapshotter string, w io.Writer) error {
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
		return fmt.Errorf("writable layer %q in %s is on no image: %w", key, name, errdefs.ErrFailedPrecondition)
	}
	upper, err := sn.Mounts(ctx, key)
	if err != nil {
		return fmt.Errorf("writable layer %q in %s: %w", key, name, err)
	}
	return r.st.ReadOnly(ctx, name, info.Parent, func(lower []mount.Mount) error {
		return mount.WithReadonlyTempMount(ctx, lower, func(below string) error {
			return mount.WithReadonlyTempMount(ctx, upper, func(above string) error {
				return archive.WriteDiff(ctx, w, below, above)
			})
		})
	})
}

// Apply makes the changes that Diff wrote in a layer that no container uses yet.
// Errors: ErrNotFound.
func (r *Rootfs) Apply(ctx context.Context, key, snapshotter string, changes io.Reader) error {
	ctx = r.st.Context(ctx)
	sn, name, err := r.st.Snapshotter(snapshotter)
	if err != nil {
		return err
	}
	mounts, err := sn.Mounts(ctx, key)
	if err != nil {
		return fmt.Errorf("writable layer %q in %s: %w", key, name, err)
	}
	return mount.WithTempMount(ctx, mounts, func(root string) error {
		_, err := archive.Apply(ctx, root, changes)
		return err
	})
}
