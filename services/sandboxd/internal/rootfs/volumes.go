package rootfs

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/keylock"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/storage"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

const (
	// labelVolume marks the views that are mounted as image volumes, by sandbox.
	labelVolume = "crisp/volume"

	volumeRoot    = "root"
	volumeHolders = "holders"
	// passable lets users of containers through to what they may see.
	passable fs.FileMode = 0o711
)

// Volumes shows images as read-only folders of the node, for containers to mount. All
// containers of a sandbox share one mount of an image.
//
// What is mounted, and for whom, is in folders only, <root>/<sandbox>/<image>/{root,holders},
// so that it can be found and removed after any restart of the process or the node. The
// methods are safe for concurrent use.
type Volumes struct {
	st    *storage.Storage
	root  string
	locks *keylock.Locks // by sandbox
}

// NewVolumes returns volumes below root, an absolute folder that is made when needed.
func NewVolumes(st *storage.Storage, root string) *Volumes {
	return &Volumes{st: st, root: root, locks: keylock.New()}
}

// Mount shows an image to a container and returns the path of it, or of what subPath names
// inside, on the node. With ids its files belong to the users of a user namespace. Mounting
// twice gives the same. After an error the container holds nothing that it did not hold
// before. Errors: ErrNotFound if the image's layers are not there, ErrInvalidArgument for a
// sub path that leads nowhere, out of the image, or to something else than a folder or file.
func (v *Volumes) Mount(ctx context.Context, sandboxID, containerID string, img pod.Image, ids pod.IDMap, subPath string) (_ string, err error) {
	if err := checkIDs(sandboxID, containerID); err != nil {
		return "", err
	}
	if err := v.locks.Lock(ctx, sandboxID); err != nil {
		return "", err
	}
	defer v.locks.Unlock(sandboxID)
	name := volumeName(img.ChainID, ids)
	dir := filepath.Join(v.root, sandboxID, name)
	holder := filepath.Join(dir, volumeHolders, containerID)
	_, missing := os.Lstat(holder)
	defer func() {
		if err != nil && missing != nil {
			err = errors.Join(err, v.release(ctx, sandboxID, name, containerID))
		}
	}()
	// The note comes first: what is mounted without one would never be unmounted.
	if err := note(dir, holder); err != nil {
		return "", fmt.Errorf("volume of image %q: %w", img.ID, err)
	}
	root := filepath.Join(dir, volumeRoot)
	if err := v.show(ctx, sandboxID, name, img, ids, root); err != nil {
		return "", fmt.Errorf("volume of image %q: %w", img.ID, err)
	}
	path, err := inside(root, subPath)
	if err != nil {
		return "", fmt.Errorf("volume of image %q: %w", img.ID, err)
	}
	return path, nil
}

func note(dir, holder string) error {
	for _, d := range []string{filepath.Dir(dir), dir, filepath.Join(dir, volumeHolders), filepath.Join(dir, volumeRoot)} {
		if err := os.MkdirAll(d, passable); err != nil {
			return err
		}
	}
	return os.WriteFile(holder, nil, 0o600)
}

// show mounts an image unless it is mounted.
func (v *Volumes) show(ctx context.Context, sandboxID, name string, img pod.Image, ids pod.IDMap, root string) error {
	mounted, err := mountinfo.Mounted(root)
	if err != nil || mounted {
		return err
	}
	ctx = v.st.Context(ctx)
	sn, _, err := v.st.Snapshotter(img.Snapshotter)
	if err != nil {
		return err
	}
	labels := mapped(map[string]string{labelRoot: "true", labelVolume: sandboxID}, ids)
	key := volumeKey(sandboxID, name)
	mounts, err := sn.View(ctx, key, img.ChainID, snapshots.WithLabels(labels))
	if errdefs.IsAlreadyExists(err) {
		mounts, err = sn.Mounts(ctx, key)
	}
	if err != nil {
		return err
	}
	if err := mountReadOnly(mapMounts(mounts, labels), root); err != nil {
		return errors.Join(err, mount.UnmountAll(root, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW))
	}
	return nil
}

// Release takes a container's hold off the images of a sandbox; without a container it takes
// all. What nobody holds is unmounted. What is gone already is not an error.
func (v *Volumes) Release(ctx context.Context, sandboxID, containerID string) error {
	if err := checkIDs(sandboxID, containerID); err != nil {
		return err
	}
	dir := filepath.Join(v.root, sandboxID)
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := v.locks.Lock(ctx, sandboxID); err != nil {
		return err
	}
	defer v.locks.Unlock(sandboxID)
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("image volumes of sandbox %q: %w", sandboxID, err)
	}
	var errs []error
	for _, e := range entries {
		errs = append(errs, v.release(ctx, sandboxID, e.Name(), containerID))
	}
	if err := removeEmpty(dir); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// release takes a hold off one image, or all holds. The caller has the sandbox's lock.
func (v *Volumes) release(ctx context.Context, sandboxID, name, containerID string) error {
	dir := filepath.Join(v.root, sandboxID, name)
	holders := filepath.Join(dir, volumeHolders)
	if containerID == "" {
		if err := os.RemoveAll(holders); err != nil {
			return err
		}
	} else if err := os.Remove(filepath.Join(holders, containerID)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	left, err := os.ReadDir(holders)
	if len(left) > 0 || (err != nil && !errors.Is(err, fs.ErrNotExist)) {
		return err
	}
	root := filepath.Join(dir, volumeRoot)
	if err := mount.UnmountAll(root, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("unmount %s: %w", root, err)
	}
	if err := v.forget(ctx, volumeKey(sandboxID, name)); err != nil {
		return err
	}
	// Never recursively: what is mounted still is not ours to delete.
	for _, d := range []string{root, holders, dir, filepath.Dir(dir)} {
		if err := removeEmpty(d); err != nil {
			return err
		}
	}
	return nil
}

// forget removes a view from whichever snapshotter has it.
func (v *Volumes) forget(ctx context.Context, key string) error {
	ctx = v.st.Context(ctx)
	for _, name := range v.st.Snapshotters() {
		sn, _, err := v.st.Snapshotter(name)
		if err != nil {
			return err
		}
		err = sn.Remove(ctx, key)
		if err == nil {
			v.st.CollectSoon()
		} else if !errdefs.IsNotFound(err) {
			return fmt.Errorf("view %q in %s: %w", key, name, err)
		}
	}
	return nil
}

// Holders lists the containers that hold image volumes by sandbox. A sandbox whose volumes
// nobody holds is there without a container.
func (v *Volumes) Holders() (map[string][]string, error) {
	out := make(map[string][]string)
	sandboxes, err := os.ReadDir(v.root)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, s := range sandboxes {
		out[s.Name()] = nil
		notes, err := filepath.Glob(filepath.Join(v.root, s.Name(), "*", volumeHolders, "*"))
		if err != nil {
			return nil, err
		}
		for _, n := range notes {
			out[s.Name()] = append(out[s.Name()], filepath.Base(n))
		}
	}
	return out, nil
}

func removeEmpty(dir string) error {
	err := os.Remove(dir)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTEMPTY) {
		return nil
	}
	return err
}

// inside resolves a path in an image. No link may lead out of the image, and since nothing
// in it changes, the path stays what it is.
func inside(root, subPath string) (string, error) {
	if subPath == "" {
		return root, nil
	}
	bad := func(why string) error {
		return fmt.Errorf("image_sub_path %q %s: %w", subPath, why, errdefs.ErrInvalidArgument)
	}
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(dir)
	fd, err := unix.Openat2(dir, subPath, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS,
	})
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return "", bad("does not exist in the image")
	case errors.Is(err, unix.EXDEV):
		return "", bad("leads out of the image")
	case err != nil:
		return "", bad("cannot be resolved in the image (" + err.Error() + ")")
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return "", err
	}
	if kind := st.Mode & unix.S_IFMT; kind != unix.S_IFDIR && kind != unix.S_IFREG {
		return "", bad("is neither a folder nor a file")
	}
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return "", err
	}
	top, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", dir))
	if err != nil {
		return "", err
	}
	if path != top && !strings.HasPrefix(path, top+"/") {
		return "", bad("leads out of the image")
	}
	return path, nil
}

// volumeName is a folder name for an image as one user namespace sees it.
func volumeName(chainID string, ids pod.IDMap) string {
	name := "empty"
	if chainID != "" {
		name = digest.Digest(chainID).Encoded()
	}
	if !ids.IsZero() {
		sum := sha256.Sum256([]byte(ids.String()))
		name += "-" + hex.EncodeToString(sum[:8])
	}
	return name
}

func volumeKey(sandboxID, name string) string { return "volume-" + sandboxID + "-" + name }

func checkIDs(sandboxID, containerID string) error {
	for _, id := range []string{sandboxID, containerID} {
		if strings.HasPrefix(id, ".") || strings.ContainsRune(id, '/') {
			return fmt.Errorf("id %q: %w", id, errdefs.ErrInvalidArgument)
		}
	}
	if sandboxID == "" {
		return fmt.Errorf("sandbox id is empty: %w", errdefs.ErrInvalidArgument)
	}
	return nil
}
