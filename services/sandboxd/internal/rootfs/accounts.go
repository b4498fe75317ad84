package rootfs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"sync"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

const (
	// maxAccounts bounds the images whose account files are remembered.
	maxAccounts = 128
	// maxAccountFile is the largest account file that is read.
	maxAccountFile = 1 << 20
)

// Accounts reads the user and group files of an image, cached by its chain id. Links are
// followed inside the image's root only, absolute ones from there. A missing file is empty.
// Errors: ErrNotFound if the image's layers are not there, ErrFailedPrecondition if a file is
// no regular file, is larger than one MiB or is a link without end.
func (r *Rootfs) Accounts(ctx context.Context, img pod.Image) (pod.Accounts, error) {
	if img.ChainID == "" {
		return pod.Accounts{}, nil
	}
	if a, ok := r.accounts.get(img.ChainID); ok {
		return a, nil
	}
	a, err := r.readAccounts(ctx, img)
	if err != nil {
		return pod.Accounts{}, fmt.Errorf("accounts of image %q: %w", img.ID, err)
	}
	r.accounts.put(img.ChainID, a)
	return a, nil
}

func (r *Rootfs) readAccounts(ctx context.Context, img pod.Image) (a pod.Accounts, err error) {
	ctx = r.st.Context(ctx)
	err = r.st.ReadOnly(ctx, img.Snapshotter, img.ChainID, func(mounts []mount.Mount) error {
		return mount.WithReadonlyTempMount(ctx, mounts, func(root string) error {
			if a.Passwd, err = readInRoot(root, "etc/passwd"); err != nil {
				return err
			}
			a.Group, err = readInRoot(root, "etc/group")
			return err
		})
	})
	return a, err
}

// readInRoot reads a file of an image. The kernel resolves the path as if root were "/". The
// file is looked at before it is opened: opening a pipe or a device has effects.
func readInRoot(root, path string) ([]byte, error) {
	fd, err := openInRoot(root, path, 0)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("/%s: %w: %w", path, err, errdefs.ErrFailedPrecondition)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("/%s: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, fmt.Errorf("/%s is not a regular file: %w", path, errdefs.ErrFailedPrecondition)
	}
	if st.Size > maxAccountFile {
		return nil, fmt.Errorf("/%s has %d bytes, more than %d: %w", path, st.Size, maxAccountFile, errdefs.ErrFailedPrecondition)
	}
	f, err := os.Open("/proc/self/fd/" + strconv.Itoa(fd))
	if err != nil {
		return nil, fmt.Errorf("/%s: %w", path, err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxAccountFile))
	if err != nil {
		return nil, fmt.Errorf("/%s: %w", path, err)
	}
	return data, nil
}

// accountCache remembers the account files of the images that were used last. Layers never
// change, so an entry is never wrong.
type accountCache struct {
	limit int

	mu    sync.Mutex // mu guards the rest
	known map[string]pod.Accounts
	order []string // chain ids, the last used at the end
}

func newAccountCache(limit int) *accountCache {
	return &accountCache{limit: limit, known: make(map[string]pod.Accounts)}
}

func (c *accountCache) get(chainID string) (pod.Accounts, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	a, ok := c.known[chainID]
	if ok {
		c.touchLocked(chainID)
	}
	return a, ok
}

func (c *accountCache) put(chainID string, a pod.Accounts) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.known[chainID] = a
	c.touchLocked(chainID)
	if len(c.order) > c.limit {
		delete(c.known, c.order[0])
		c.order = slices.Delete(c.order, 0, 1)
	}
}

func (c *accountCache) touchLocked(chainID string) {
	if i := slices.Index(c.order, chainID); i >= 0 {
		c.order = slices.Delete(c.order, i, i+1)
	}
	c.order = append(c.order, chainID)
}
