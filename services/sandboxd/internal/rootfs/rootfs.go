// Package rootfs makes the writable layers of containers on top of image layers, and reads
// the account files of images.
//
// A layer that was made stays until it is removed, whatever happens to its image's name; the
// key of a layer is the container's id. The methods are safe for concurrent use. The package
// does not mount what containers run on; it says how to.
package rootfs

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/storage"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

const (
	// labelRoot keeps a layer from being collected.
	labelRoot = "containerd.io/gc.root"
	// labelContainer marks the layers of containers.
	labelContainer = "crisp/container"
	// keysFilter selects the layers of containers.
	keysFilter = `labels."` + labelContainer + `"==true`
)

// Rootfs makes and removes writable layers.
type Rootfs struct {
	st       *storage.Storage
	accounts *accountCache
}

// New returns a Rootfs on an open storage.
func New(st *storage.Storage) *Rootfs {
	return &Rootfs{st: st, accounts: newAccountCache(maxAccounts)}
}

// Prepare makes the writable layer named key on top of an image, seen through the ids of a
// user namespace, and returns how to mount it. Preparing a key twice returns the same layer.
// Errors: ErrNotFound if the image's layers are not there.
func (r *Rootfs) Prepare(ctx context.Context, key string, img pod.Image, ids pod.IDMap) ([]mount.Mount, error) {
	ctx = r.st.Context(ctx)
	sn, name, err := r.st.Snapshotter(img.Snapshotter)
	if err != nil {
		return nil, err
	}
	labels := mapped(map[string]string{labelRoot: "true", labelContainer: "true"}, ids)
	mounts, err := sn.Prepare(ctx, key, img.ChainID, snapshots.WithLabels(labels))
	if errdefs.IsAlreadyExists(err) {
		mounts, err = r.existing(ctx, sn, key, img)
	}
	if err != nil {
		return nil, fmt.Errorf("writable layer %q in %s: %w", key, name, err)
	}
	return mapMounts(mounts, labels), nil
}

// existing returns a layer that was prepared before, if it is on the same image.
func (r *Rootfs) existing(ctx context.Context, sn snapshots.Snapshotter, key string, img pod.Image) ([]mount.Mount, error) {
	info, err := sn.Stat(ctx, key)
	if err != nil {
		return nil, err
	}
	if info.Parent != img.ChainID || info.Kind != snapshots.KindActive {
		return nil, fmt.Errorf("exists on top of %q: %w", info.Parent, errdefs.ErrAlreadyExists)
	}
	return sn.Mounts(ctx, key)
}

// Mounts returns how to mount a prepared layer. Errors: ErrNotFound.
func (r *Rootfs) Mounts(ctx context.Context, key, snapshotter string) ([]mount.Mount, error) {
	ctx = r.st.Context(ctx)
	sn, name, err := r.st.Snapshotter(snapshotter)
	if err != nil {
		return nil, err
	}
	info, err := sn.Stat(ctx, key)
	if err != nil {
		return nil, fmt.Errorf("writable layer %q in %s: %w", key, name, err)
	}
	mounts, err := sn.Mounts(ctx, key)
	if err != nil {
		return nil, fmt.Errorf("writable layer %q in %s: %w", key, name, err)
	}
	return mapMounts(mounts, info.Labels), nil
}

// Remove removes a layer; an unknown one is not an error. The space is freed soon after.
func (r *Rootfs) Remove(ctx context.Context, key, snapshotter string) error {
	ctx = r.st.Context(ctx)
	sn, name, err := r.st.Snapshotter(snapshotter)
	if err != nil {
		return err
	}
	err = sn.Remove(ctx, key)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("writable layer %q in %s: %w", key, name, err)
	}
	r.st.CollectSoon()
	return nil
}

// Usage returns the bytes and inodes of a writable layer. It walks over the layer's files,
// so callers should remember the answer for a while. Errors: ErrNotFound.
func (r *Rootfs) Usage(ctx context.Context, key, snapshotter string) (bytes, inodes uint64, err error) {
	ctx = r.st.Context(ctx)
	sn, name, err := r.st.Snapshotter(snapshotter)
	if err != nil {
		return 0, 0, err
	}
	usage, err := sn.Usage(ctx, key)
	if err != nil {
		return 0, 0, fmt.Errorf("writable layer %q in %s: %w", key, name, err)
	}
	return uint64(max(usage.Size, 0)), uint64(max(usage.Inodes, 0)), nil
}

// Keys lists the writable layers of containers by snapshotter. With an error it returns those of
// the snapshotters that could be asked.
func (r *Rootfs) Keys(ctx context.Context) (map[string][]string, error) {
	ctx = r.st.Context(ctx)
	out := make(map[string][]string)
	var errs []error
	for _, name := range r.st.Snapshotters() {
		sn, _, err := r.st.Snapshotter(name)
		if err != nil {
			return nil, err
		}
		err = sn.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
			out[name] = append(out[name], info.Name)
			return nil
		}, keysFilter)
		if err != nil {
			delete(out, name)
			errs = append(errs, fmt.Errorf("snapshotter %s: %w", name, err))
		}
	}
	return out, errors.Join(errs...)
}
